"""A person at the terminal as one of the two players: `human` instead of a model. No torch."""

import contextlib
import signal
import sys
from collections.abc import Mapping

from tools.games.game import LONE_SURROGATE, Game, History
from tools.players.player import STOP, Player, Reply, Turn
from utils import shown, world_size

with contextlib.suppress(ImportError):  # lets the person edit the line in `input`
    import readline  # noqa: F401

HUMAN = "human"


class HumanQuit(Exception):
    """The person has pressed Ctrl-D or Ctrl-C."""


class HumanPlayer(Player):
    """Shows a person what their role may know of the game, and reads each message as a line."""

    at_terminal = True
    games = most_games = 1

    def __init__(self, game: Game):
        self.game, self.role = game, ""
        self.secrets: dict[str, Mapping[str, str]] = {}  # by role: what the person was last told

    @classmethod
    def make(cls, name: str, lineup, seed: int | str) -> "HumanPlayer":
        """The person, for all roles of this name."""
        return cls(lineup.game)

    @classmethod
    def problems(cls, flags) -> list[str]:
        """A person needs a terminal that is theirs alone."""
        if world_size() > 1 or not sys.stdin.isatty():
            return [f"{HUMAN} needs a terminal, and one process: python -m tools.play_llm_game"]
        return []

    async def reply(self, turn: Turn) -> Reply:
        """The next line that is not blank. Blocks the event loop: a person plays one game at a time."""
        self.role = turn.role
        if all(message["role"] != turn.role for message in turn.history):
            self._introduce(turn)
        print(f"\nturn {len(turn.history) // 2 + 1} of {turn.max_turns}")
        self._show_answers(turn.history)
        self._show_secrets(turn)
        return Reply(read_line(f"you, {self.role}> "), STOP, tokens=0)

    def game_over(self, episode: Mapping) -> None:
        """Show the last messages, the outcome and the rule that decided."""
        self._show_answers(episode["history"])
        task, outcome = episode["target_word"], episode["outcome"]
        why = self.game.explain(task, episode["history"][: episode["length"]], outcome)
        print(f"\n--- {outcome}{f' ({why})' if why else ''}; the target word was `{shown(task)}` ---")

    def _introduce(self, turn: Turn) -> None:
        print(f"\n--- game {turn.index + 1}: you are the {turn.role} (Ctrl-D leaves; finished games are stored) ---\n")
        print(turn.rules())
        print(shown(turn.instruction()))
        self.secrets[turn.role] = {}
        self._show_secrets(turn)
        if hint := self.game.hint(turn.role):
            print(hint)

    def _show_secrets(self, turn: Turn) -> None:
        """Show what only this role may know and was not told yet. (Some prompts leave it out.)"""
        known, self.secrets[turn.role] = self.secrets[turn.role], turn.secrets
        for name, secret in turn.secrets.items():
            if known.get(name) != secret:
                print(f"The {name.replace('_', ' ')}: {shown(secret)}")

    def _show_answers(self, history: History) -> None:
        """Show the other player's messages since this role's last one."""
        own = [place for place, message in enumerate(history, start=1) if message["role"] == self.role]
        for message in history[max(own, default=0) :]:
            print(f"{message['role']}: {shown(message['content'])}")


def read_line(prompt: str) -> str:
    """The next line from the terminal that is not blank, stripped. Raises HumanQuit for Ctrl-D and Ctrl-C."""
    # asyncio's own handler of Ctrl-C only cancels a task, which would have no effect until the line is read.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            try:
                line = input(prompt).strip()
            except UnicodeDecodeError:
                line = "\ud800"
            if LONE_SURROGATE.search(line):
                print("(That is not UTF-8; please type it again.)")
            elif line:
                return line
    except (EOFError, KeyboardInterrupt):
        raise HumanQuit from None
    finally:
        signal.signal(signal.SIGINT, handler)
