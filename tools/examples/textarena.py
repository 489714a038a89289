"""TextArena's two-player games: --game tools/examples/textarena.py:TextArena --game_options env=TicTacToe-v0.

A task is a seed. An environment cannot take a move back, so every decision replays the game: the environment is reset
with the seed, then takes one step for each message.
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
NLTK_DATA = re.compile(r"nltk\.download\('(\w+)'\)")  # in the message of NLTK's LookupError


class TextArena(Game):
    """The environment `env`. An invalid move is a breach of the rules; a draw gives half a point to each player."""

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
        # Episodes store the name, but no options: by it games of another environment are refused.
        self.name = f"{self.name}:{env}"
        self.title = env
        limit = self._first_state().max_turns
        if limit:  # in messages; some environments take one more
            self.max_turns = math.ceil((limit + 1) / 2)

    def check_task(self, task: str) -> None:
        int(task)  # ValueError: it is not a seed

    def next_role(self, task: str, history: History) -> str:
        return self.roles[self._replay(task, history).current_player_id]

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        """The rules for this player, and what the environment has told this player; only the last board is shown.

        The moves of both players (PLAYER_ACTION) are left out, since they are the messages of the history.
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
        except SyntaxError as error:  # most of these files use f-strings as Python 3.12 reads them
            why = f"Python {sys.version_info.major}.{sys.version_info.minor} cannot read its code ({error})"
            raise UserError(f"{where}: {why}; take Python 3.12 or newer, or another environment") from None
        except (ImportError, OSError) as error:  # a module or a text file that the package on PyPI lacks
            why = f"a part of it is missing ({error})"
            raise UserError(f"{where}: {why}; take another environment, or install that part") from None
        except LookupError as error:
            if (missing := NLTK_DATA.search(str(error))) is None:
                raise
            data = missing[1]
            raise UserError(f"{where}: its data of NLTK are missing: python -m nltk.downloader {data}") from None

    def _replay(self, task: str, history: History):
        """TextArena's state after these messages.

        `reset` seeds Python's global generator, from which a function that plays may draw. So its state is put back.
        """
        import textarena

        before = random.getstate()
        try:
            env = textarena.make(f"{self.env}-raw")  # -raw: observations are not joined to one text
            env.reset(num_players=2, seed=int(task))
            # The first invalid move ends the game. TextArena allows some and lets the same player try again; here each
            # message is a move, and a breach is an outcome, which loses the game. With an allowance `next_role` would
            # name the same player again, and a refused move would stay in the history and could become a row.
            env.state.error_allowance = 0
            for message in history:
                if env.state.done:
                    break
                env.step(message["content"])
            return env.state
        finally:
            random.setstate(before)


def _require_package() -> None:
    """Raise UserError unless the package is installed; by its name alone, Python would find this file too."""
    try:
        importlib.metadata.version("textarena")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("the package textarena is missing: pip install textarena==0.7.4") from None
