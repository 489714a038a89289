"""TextArena's two-player games: --game tools/examples/textarena.py:TextArena --game_options env=TicTacToe-v0.

A task is a seed. Environments cannot undo a move, so every decision replays the game: reset with the seed, then one
step per message.
"""

import importlib.metadata
import math
import random
import re
import sys
from pathlib import Path

from tools.common.errors import UserError, user_errors
from tools.games.game import Game, History, Outcome

ZERO = "player_zero"
ONE = "player_one"
NLTK_DATA = re.compile(r"nltk\.download\('(\w+)'\)")  # in NLTK's LookupError


class TextArena(Game):
    """The environment `env`. An invalid move is a rule violation; a draw is worth half a point to each player."""

    name = "textarena"
    title = "TextArena"
    max_turns = 50
    prompt_file = Path(__file__).with_suffix(".json")
    roles = (ZERO, ONE)
    outcomes = (
        Outcome(f"{ZERO} wins", winner=ZERO),
        Outcome(f"{ONE} wins", winner=ONE),
        Outcome(f"{ZERO} errs", winner=ONE, breach=True),
        Outcome(f"{ONE} errs", winner=ZERO, breach=True),
        Outcome("draw"),
        Outcome("unfinished"),
    )
    example_task = "0"

    def __init__(self, env: str):
        _require_package()
        self.env = env
        # Episodes store the name but no options, so the name must identify the environment.
        self.name = f"{self.name}:{env}"
        self.title = env
        limit = self._first_state().max_turns
        if limit:  # in messages; some environments take one more
            self.max_turns = math.ceil((limit + 1) / 2)

    def check_task(self, task: str) -> None:
        int(task)  # ValueError: not a seed

    def next_role(self, task: str, history: History) -> str:
        return self.roles[self._replay(task, history).current_player_id]

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        """The rules, and what the environment has told this player, with only the latest board.

        The players' moves (PLAYER_ACTION) are left out, because the history already has them.
        """
        observations = self._replay(task, history).observations[self.roles.index(role)]
        rules = [text for _, text, kind in observations if kind.name == "PROMPT"]
        boards = [text for _, text, kind in observations if kind.name == "GAME_BOARD"]
        others = [text for _, text, kind in observations if kind.name not in ("PROMPT", "PLAYER_ACTION", "GAME_BOARD")]
        return {"game_rules": "\n".join(rules).strip(), "observations": "\n".join(others + boards[-1:]).strip()}

    def decide(self, task: str, history: History) -> str | None:
        state = self._replay(task, history)
        if not state.done:
            return None
        if state.rewards[0] == state.rewards[1]:
            return "draw"
        winner, loser = (0, 1) if state.rewards[0] > state.rewards[1] else (1, 0)
        invalid = state.game_info[loser].get("invalid_move")
        return f"{self.roles[loser]} errs" if invalid else f"{self.roles[winner]} wins"

    def _first_state(self):
        """TextArena's state before the first message. UserError if this environment cannot be played here."""
        where = f"env={self.env}"
        try:
            with user_errors(where, ValueError, AssertionError):  # unknown, or not for two players
                return self._replay(self.example_task, ())
        except SyntaxError as error:  # many environments use f-string syntax of Python 3.12
            why = f"Python {sys.version_info.major}.{sys.version_info.minor} cannot parse its code ({error})"
            raise UserError(f"{where}: {why}; use Python 3.12 or newer, or another environment") from None
        except (ImportError, OSError) as error:  # a module or text file missing from the PyPI package
            why = f"a part of it is missing ({error})"
            raise UserError(f"{where}: {why}; use another environment, or install that part") from None
        except LookupError as error:
            if (missing := NLTK_DATA.search(str(error))) is None:
                raise
            data = missing[1]
            raise UserError(f"{where}: its NLTK data are missing: python -m nltk.downloader {data}") from None

    def _replay(self, task: str, history: History):
        """TextArena's state after these messages.

        `reset` seeds Python's global generator, which players may use, so its state is restored.
        """
        import textarena

        before = random.getstate()
        try:
            env = textarena.make(f"{self.env}-raw")  # -raw: observations are not joined into one string
            env.reset(num_players=2, seed=int(task))
            # The first invalid move loses the game. TextArena would let the same player try again, so that a refused
            # move would stay in the history and could become a training row.
            env.state.error_allowance = 0
            for message in history:
                if env.state.done:
                    break
                env.step(message["content"])
            return env.state
        finally:
            random.setstate(before)


def _require_package() -> None:
    """UserError unless the package is installed. Import would not do, because this file has the same name."""
    try:
        importlib.metadata.version("textarena")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("the package textarena is missing: pip install textarena==0.7.4") from None
