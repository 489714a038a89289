"""TextArena's two-player games (PyPI `textarena`): --game textarena --game_options env=TicTacToe-v0.

A task is a seed. An environment cannot take a move back, so every decision replays the game: the environment is reset
with the seed, then takes one step for each message.
"""

import functools
import importlib.metadata
import math
import random
import re
from collections.abc import Callable
from typing import Any

from tools.games.game import ROOT, Game, History, Outcome
from utils import require

VERSION = "0.7.4"  # of the package; another version may have other rules
# The environments that were tried with this version. In all of them two players take turns and see each other's moves,
# no network is needed, and the same messages always lead to the same state.
TRIED = """
    Alquerque-v0 Battleship-v0 Battleship-v0-extreme Battleship-v0-large Battleship-v0-standard Breakthrough-v0
    Breakthrough-v0-blind Breakthrough-v0-large Breakthrough-v0-long Breakthrough-v0-small Breakthrough-v0-tiny
    Briscola-v0 Chopsticks-v0 Chopsticks-v0-long Chopsticks-v0-medium ConnectFour-v0 ConnectFour-v0-blind
    ConnectFour-v0-large Crusade-v0 GermanWhist-v0 Golf-v0 Golf-v0-medium IndianPoker-v0 IndianPoker-v0-extreme
    IndianPoker-v0-long IndianPoker-v0-medium IndianPoker-v0-short IteratedUltimatumGame-v0
    IteratedUltimatumGame-v0-alternate KuhnPoker-v0 KuhnPoker-v0-extreme KuhnPoker-v0-long KuhnPoker-v0-medium
    KuhnPoker-v0-short LinesOfAction-v0 MemoryGame-v0 MemoryGame-v0-hard MemoryGame-v0-medium NewRecruit-v0 Nim-v0
    Nim-v0-large Nim-v0-medium Othello-v0 Othello-v0-big Othello-v0-hard Othello-v0-huge Othello-v0-small
    Othello-v0-tiny PigDice-v0 PigDice-v0-100 PigDice-v0-150 PigDice-v0-200 PigDice-v0-250 PigDice-v0-300
    PigDice-v0-350 PigDice-v0-400 PigDice-v0-450 PigDice-v0-50 PigDice-v0-500 PigDice-v0-long PigDice-v0-short
    QuantumTicTacToe-v0 SimpleNegotiation-v0 SimpleNegotiation-v0-long SimpleNegotiation-v0-short SimpleTak-v0
    SimpleTak-v0-extreme SimpleTak-v0-large SimpleTak-v0-medium TicTacToe-v0 TruthAndDeception-v0
    TruthAndDeception-v0-extreme TruthAndDeception-v0-long UltimateTicTacToe-v0 WildTicTacToe-v0
""".split()
ZERO, ONE = "player_zero", "player_one"
BOARD = "board"  # a view
MAX_TURNS = 50  # of environments without a limit of their own
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]  # of TicTacToe


class TextArena(Game):
    """The environment `env`. An invalid move is a breach of the rules; a draw gives half a point to each player."""

    name, title, max_turns = "textarena", "TextArena", MAX_TURNS
    prompt_file = ROOT / "configs" / "prompts" / "textarena.json"
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

    def __init__(self, env: str = "", view: str = ""):
        """`view="board"`: the only slot of prompts is `observations`, and it holds the last board alone."""
        if view not in ("", BOARD):
            raise ValueError(f"view={view}: expected {BOARD}, or no view")
        require("textarena", f"textarena=={VERSION}")
        if (installed := importlib.metadata.version("textarena")) != VERSION:
            raise ValueError(f"textarena {installed} may have other rules: pip install textarena=={VERSION}")
        if env not in TRIED:
            names = ", ".join(name for name in TRIED if name.endswith("-v0"))
            raise ValueError(f"env={env}: it is not among those that were tried: {names}, and variants of these")
        self.env, self.view, self.name, self.title = env, view, f"{self.name}:{env}", env
        limit = self._replay(self.example_task, ()).max_turns  # in messages; some environments take one more
        self.max_turns = math.ceil((limit + 1) / 2) if limit else MAX_TURNS

    def check_task(self, task: str) -> None:
        if not re.fullmatch("[0-9]{1,9}", task):
            raise ValueError(f"{task!r} is not a seed; expected a whole number of at most nine digits")

    def tasks(self, number: int, rng: random.Random) -> list[str]:
        return [str(seed) for seed in range(number)]

    def next_role(self, task: str, history: History) -> str:
        return self.roles[self._replay(task, history).current_player_id]

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        """The rules for this player, and what the environment has told this player; only the last board is shown."""
        told = self._replay(task, history).observations[self.roles.index(role)]
        rules = [text for _, text, kind in told if kind.name == "PROMPT"]
        news = [text for _, text, kind in told if kind.name not in ("PROMPT", "PLAYER_ACTION", "GAME_BOARD")]
        boards = [text for _, text, kind in told if kind.name == "GAME_BOARD"]
        if self.view == BOARD:
            return {"observations": "".join(boards[-1:]).strip()}
        return {"game_rules": "\n".join(rules).strip(), "observations": "\n".join(news + boards[-1:]).strip()}

    def decide(self, task: str, history: History) -> str | None:
        state = self._replay(task, history)
        if not state.done:
            return None
        zero, one = state.rewards[0], state.rewards[1]
        if zero == one:
            return "draw"
        winner, loser = (ZERO, ONE) if zero > one else (ONE, ZERO)
        invalid = state.game_info[self.roles.index(loser)].get("invalid_move")
        return f"{loser} errs" if invalid else f"{winner} wins"

    def explain(self, task: str, history: History, outcome: str) -> str:
        return str(self._replay(task, history).game_info[0].get("reason") or super().explain(task, history, outcome))

    def scripted(self, name: str) -> Callable[[Any], str]:
        if self.env == "TicTacToe-v0" and name in ("random", "minimax"):
            return _random_move if name == "random" else _best_move
        return super().scripted(name)

    def _replay(self, task: str, history: History):
        """TextArena's state after these messages. The global random state is left as it was."""
        import textarena

        before = random.getstate()
        try:
            env = textarena.make(f"{self.env}-raw")  # -raw: observations are not joined to one text
            env.reset(num_players=2, seed=int(task))
            env.state.error_allowance = 0  # the first invalid move ends the game
            for message in history:
                if env.state.done:
                    break
                env.step(message["content"])
            return env.state
        finally:
            random.setstate(before)


# TicTacToe's scripted players. A board is nine characters: O of player zero, who opens, X of player one, "." if free.


def _next_boards(board: str) -> dict[int, str]:
    """The board after each move of the player whose turn it is, by the cell of the move."""
    mark = "OX"[(9 - board.count(".")) % 2]
    return {cell: board[:cell] + mark + board[cell + 1 :] for cell in range(9) if board[cell] == "."}


def _boards_after(history: History) -> dict[int, str]:
    boards = _next_boards("." * 9)
    for message in history:
        cell = int(re.search(r"\[\s*(\d+)\s*\]", message["content"])[1])
        boards = _next_boards(boards[cell])
    return boards


def _random_move(turn) -> str:
    """Any free cell, drawn by the number of the game and the number of its messages."""
    rng = random.Random(f"{turn.index}/{len(turn.history)}")
    return f"[{rng.choice(list(_boards_after(turn.history)))}]"


def _best_move(turn) -> str:
    """The first of the cells that are best against the best answers (minimax)."""
    boards = _boards_after(turn.history)
    return f"[{max(boards, key=lambda cell: -_value(boards[cell]))}]"


@functools.cache
def _value(board: str) -> int:
    """What best play gives the player whose turn it is: 1 for a win, 0 for a draw, -1 for a loss."""
    if any(board[a] == board[b] == board[c] != "." for a, b, c in LINES):
        return -1
    return max((-_value(after) for after in _next_boards(board).values()), default=0)
