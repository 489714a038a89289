"""Flags that choose the game, its options and its prompt file."""

from dataclasses import dataclass

from tools.common.flags import FlagGroup, compared_values, flag
from tools.common.records import files_setting
from tools.games import prompts
from tools.games.game import DEFAULT_GAME, Game, load_game, member_setting


@dataclass(kw_only=True)
class GameChoice(FlagGroup):
    game: str = flag(
        "a game of this project, or your own: FILE.py:Class or module:Class", default=DEFAULT_GAME, shared=True
    )
    game_options: list[str] = flag("options of the game", default=[], metavar="KEY=VALUE", shared=True)

    def load_game(self) -> Game:
        return load_game(self.game, **self._options())

    def _options(self) -> dict[str, str]:
        return {key: value for key, _, value in (text.partition("=") for text in self.game_options)}


@dataclass(kw_only=True)
class GameFlags(GameChoice):
    prompt_templates: str | None = flag(
        "prompt file; unset: the game's own", default=None, metavar="FILE", shared=True
    )

    def load_templates(self, game: Game) -> prompts.Templates:
        return prompts.load_templates(self.prompt_templates or game.prompt_file, game)

    def settings(self, game: Game) -> dict:
        """The compared flags, with the content of the prompt file and of a user's own game."""
        settings = compared_values(self)
        settings["game"] = {"name": game.name, "options": self._options()}
        del settings["game_options"]
        settings["prompt_templates"] = files_setting(self.prompt_templates or game.prompt_file)
        if ":" in self.game:  # the user's own, which may change between starts
            settings["game_file"] = member_setting(self.game)
        return settings
