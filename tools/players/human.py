"""The player `human`: a person at the terminal. No torch."""

import contextlib
import signal
import sys
from collections.abc import Mapping

from tools.common.errors import UserError, printable
from tools.common.ranks import world_size
from tools.games.game import Game, History
from tools.players.player import STOP, Player, Reply, Sampling, Turn

with contextlib.suppress(ImportError):  # enables line editing in `input`
    import readline  # noqa: F401

HUMAN = "human"


class HumanPlayer(Player):
    """UserError without a terminal, or with several processes, whose games would ask at the same time."""

    form = f"{HUMAN} (you)"
    at_terminal = True

    def __init__(self, game: Game):
        if world_size() > 1 or not sys.stdin.isatty():
            raise UserError(f"{HUMAN} needs a terminal and a single process: python -m tools.play_llm_game")
        self.game = game
        self.role = ""

    @classmethod
    def named(cls, name: str, game: Game, flags: Sampling, seed: str) -> "HumanPlayer":
        return cls(game)

    @classmethod
    def setting(cls, name: str, flags: Sampling) -> str:
        return HUMAN

    async def reply(self, turn: Turn) -> Reply:
        """Read a non-blank line, blocking the event loop. Ctrl-D raises EOFError, Ctrl-C KeyboardInterrupt."""
        self.role = turn.role
        if all(message["role"] != turn.role for message in turn.history):
            print(f"\n--- game {turn.index + 1}: you are the {turn.role} (Ctrl-D to leave; games are saved) ---\n")
            print(turn.rules() + turn.game.hint(turn.role))
        print(f"\nturn {len(turn.history) // 2 + 1} of {turn.max_turns}")
        show_answers(turn.history, self.role)
        print(printable(turn.instruction()))
        return Reply(read_line(f"you, {self.role}> "), STOP, tokens=0)

    def game_over(self, episode: Mapping) -> None:
        show_answers(episode["history"], self.role)
        task = episode["target_word"]
        secret = f"; the secret was `{printable(task)}`" if self.game.answer(task) else ""
        print(f"\n--- {episode['outcome']}{secret} ---")


def show_answers(history: History, role: str) -> None:
    """Print what was said since this role's last message."""
    own_messages = [number for number, message in enumerate(history, start=1) if message["role"] == role]
    last_own = max(own_messages, default=0)
    for message in history[last_own:]:
        text = printable(message["content"]).replace("\n", "\n    ")  # so that it is recognizable as one message
        print(f"{message['role']}: {text}")


def read_line(prompt: str) -> str:
    # asyncio's Ctrl-C handler only cancels a task, which has no effect until the line is read.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while not (line := input(prompt).strip()):
            pass
        return line
    finally:
        signal.signal(signal.SIGINT, handler)
