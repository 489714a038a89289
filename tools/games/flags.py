"""The flags by which programs are told which game is played."""

from dataclasses import dataclass

from tools.flags import flag
from tools.games import prompts
from tools.games.game import DEFAULT_GAME, Game, game_setting, load_game
from utils import UserError


@dataclass(kw_only=True)
class GameChoice:
    """Flags for a game and its options."""

    game: str = flag("a game of this project, or your own: FILE.py:Class or module:Class", default=DEFAULT_GAME)
    game_options: list[str] = flag("options of the game", default=[], metavar="KEY=VALUE")
    match: str | None = flag(
        "short for --game_options match=...: 'substring' finds Taboo's word inside other words, 'word' does not",
        default=None,
    )

    def load_game(self) -> Game:
        """The game that the flags name. Raises UserError if it or its options are wrong."""
        options = {}
        for text in self.game_options:
            key, equals, value = text.partition("=")
            if not (key and equals):
                raise UserError(f"--game_options {text!r}: expected KEY=VALUE")
            options[key] = value
        if self.match is not None:
            options["match"] = self.match
        return load_game(self.game, **options)


@dataclass(kw_only=True)
class GameFlags(GameChoice):
    """Flags for a game, its options and its prompts."""

    prompt_templates: str | None = flag("prompt file; unset: the game's own", default=None, metavar="FILE")

    def load_templates(self, game: Game) -> prompts.Templates:
        """The prompts that the flags name. Raises UserError that lists what is wrong with the file."""
        return prompts.load_templates(self.prompt_templates or game.prompt_file, game)

    def game_settings(self, game: Game, templates: prompts.Templates) -> dict:
        """The game and its prompts, as `utils.stage` compares them between two starts of a run."""
        path = str(self.prompt_templates or game.prompt_file)
        wording = {"path": path, "sha256": prompts.templates_digest(templates)}
        return {"game": game_setting(game), "prompt_templates": wording}
