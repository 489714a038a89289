"""The flags that all programs that play games share. No torch."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tools.common.flags import flag
from tools.engine.flags import EngineFlags
from tools.games.flags import GameFlags
from tools.games.game import Game
from tools.players.player import Sampling
from tools.players.server import ServerFlags

# The flags on which replies depend. --engine is none of them: engines draw other tokens with the same probabilities,
# up to rounding, so a run may go on with another engine on another machine.
COMPUTING = (*(field.name for field in dataclasses.fields(Sampling)), "dtype", "tf32", "vllm_args")


@dataclass(kw_only=True)
class PlayFlags(GameFlags, EngineFlags, ServerFlags):
    """The flags of tools/play_llm_game.py, tools/evaluate_games.py and `play` of tools/spag.py.

    The loop takes them in its tables [play] and [match], except those that it sets itself (tools/loop/keys.py). A flag
    that changes games belongs into COMPARED, which the loop reads, and into `settings`, which play records; a field of
    Sampling is in both. One that only says how a machine computes belongs into THIS_MACHINE (tools/loop/record.py), so
    that `like=` does not take it over.
    """

    group = "play"
    # The flags that games depend on; all others say how and where they are computed.
    COMPARED: ClassVar = ("game", "game_options", "prompt_templates", "max_turns", *COMPUTING)

    max_turns: int | None = flag(
        "turns of a game, each of one message per player; unset: the game's default",
        default=None,
        names=["taboo_max_turns"],
        at_least=1,
    )
    concurrent_games: int | None = flag(
        "games played at once; unset: as many as the engines and servers answer at once", default=None, at_least=1
    )
    logging_steps: int = flag("show a game after every so many batches of messages; 0: none", default=10)

    def turns(self, game: Game) -> int:
        return game.max_turns if self.max_turns is None else self.max_turns

    def settings(self, game: Game) -> dict:
        """The settings that games depend on besides players, words and seed."""
        values = {name: getattr(self, name) for name in COMPUTING}
        return {**self.game_settings(game), "max_turns": self.turns(game), **values}


def words_setting(path: str, words: Sequence[str]) -> dict[str, str]:
    """A word list as a setting of a stage, compared by `words`: those that --max_games, in matches --max_words, leave.

    So a run cannot get more words: play the others into another folder, and give tools/assign_rewards.py both results.
    """
    return {"path": path, "sha256": hashlib.sha256("\n".join(words).encode()).hexdigest()}
