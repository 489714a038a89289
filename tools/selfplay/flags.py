"""Flags shared by all programs that play games. No torch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from tools.common.flags import flag
from tools.engine.flags import EngineFlags
from tools.games.flags import GameFlags
from tools.games.game import Game
from tools.players.server import ServerFlags


@dataclass(kw_only=True)
class PlayFlags(GameFlags, EngineFlags, ServerFlags):
    max_turns: int | None = flag(
        "turns per game, each one message by each player; unset: the game's default",
        default=None,
        names=["taboo_max_turns"],
        at_least=1,
        shared=True,
    )
    concurrent_games: int | None = flag(
        "games to play at once; unset: as many as engines and servers answer at once",
        default=None,
        at_least=1,
        machine=True,
    )
    logging_steps: int = flag(
        "show a game after this many batches of messages; 0: never", default=10, at_least=0, compared=False
    )

    def turns(self, game: Game) -> int:
        return game.max_turns if self.max_turns is None else self.max_turns

    def settings(self, game: Game) -> dict:
        """The compared flags, with the resolved number of turns."""
        return super().settings(game) | {"max_turns": self.turns(game)}


def words_setting(path: str, words: Sequence[str]) -> dict[str, str]:
    """A word list as a setting of a stage, compared by `words`, those of it that are played."""
    return {"path": path, "sha256": hashlib.sha256("\n".join(words).encode()).hexdigest()}
