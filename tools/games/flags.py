"""The flags that say which game is played, in every program that has to do with games."""

from dataclasses import dataclass

from tools.flags import flag
from tools.games import prompts
from tools.games.game import DEFAULT_GAME, Game, game_setting, load_game
from utils import UserError


@dataclass(kw_only=True)
class GameChoice:
    """Which game, with which options."""

    game: str = flag("a game of this project, or your own: FILE.py:Class, module:Class", default=DEFAULT_GAME)
    game_options: list[str] = flag("options of the game", default=[], metavar="KEY=VALUE")
    match: str | None = flag(
        "short for --game_options match=...: 'substring' finds Taboo's word inside others, 'word' does not",
        default=None,
    )

    def load_game(self) -> Game:
        """The game of the flags. Raises UserError that lists what is wrong with it or its options."""
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
    """Which game, with which options and prompts."""

    prompt_templates: str | None = flag("prompt file; unset: the game's own", default=None, metavar="FILE")

    def load_templates(self, game: Game) -> prompts.Templates:
        """The prompts of the flags. Raises UserError that lists what is wrong with the file."""
        return prompts.load_templates(self.prompt_templates or game.prompt_file, game)

    def game_settings(self, game: Game, templates: prompts.Templates) -> dict:
        """Game and prompts as `RunSettings` compares them."""
        path = str(self.prompt_templates or game.prompt_file)
        wording = {"path": path, "sha256": prompts.templates_digest(templates)}
        return {"game": game_setting(game), "prompt_templates": wording}
