"""A person at the terminal as one of the two players: `human` in the place of a model.

Nothing else is written to the terminal while a game is on. No torch.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping

from tools.games.game import LONE_SURROGATE, Game, History
from tools.players.player import STOP, Reply, Turn
from utils import shown, world_size

with contextlib.suppress(ImportError):  # with it, `input` lets one edit the line
    import readline  # noqa: F401

HUMAN = "human"


class HumanQuit(Exception):
    """The person has ended the input (Ctrl-D) or interrupted it (Ctrl-C)."""


class HumanPlayer:
    """Shows a person the game as far as its role may know it, and reads each message as a line."""

    def __init__(self, game: Game):
        self.game, self.role = game, ""

    async def reply(self, turn: Turn) -> Reply:
        """The next line that is not blank. It blocks: a person plays one game at a time, and nobody else waits."""
        self.role = turn.role
        if len(turn.history) < 2:
            self._introduce(turn)
        print(f"\nturn {len(turn.history) // 2 + 1} of {turn.max_turns}")
        self._show_answer(turn.history)
        return Reply(read_line(f"you, {self.role}> "), STOP, tokens=0)

    def end(self, episode: Mapping) -> None:
        """Show what was said last, the verdict and the rule that decided."""
        self._show_answer(episode["history"])
        task, outcome, length = episode["target_word"], episode["outcome"], episode["length"]
        decisive = episode["history"][:length]
        own, other = self.game.checked_points(task, decisive, outcome)
        if self.role == self.game.roles[1]:
            own, other = other, own
        together = {1.0: " - both win", 0.0: " - both lose"}
        result = f" - you {'win' if own > other else 'lose'}" if own != other else together.get(own, "")
        why = self.game.explain(task, decisive, outcome)
        after = f"after {length} message{'s' * (length != 1)}"
        print(f"\n--- {outcome}{result}, {after}{f' ({why})' if why else ''}; the target word was `{shown(task)}` ---")

    def _introduce(self, turn: Turn) -> None:
        print(f"\n--- game {turn.index + 1}: you are the {turn.role} (Ctrl-D leaves; finished games are stored) ---\n")
        print(turn.rules())
        print(shown(turn.instruction()))
        for name, secret in turn.secrets.items():  # not all prompts say these
            print(f"The {name.replace('_', ' ')}: {shown(secret)}")
        if hint := self.game.hint(turn.role):
            print(hint)

    def _show_answer(self, history: History) -> None:
        """Show what the other one said last, if that is new."""
        if history and history[-1]["role"] != self.role:
            print(f"{history[-1]['role']}: {shown(history[-1]['content'])}")


def read_line(prompt: str) -> str:
    """A line from the terminal that says anything, stripped. Raises HumanQuit for Ctrl-D and Ctrl-C."""
    # asyncio's own handler only cancels a task, which would not happen before the line is read.
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


def human_problems(names: tuple[str, str], concurrent_games: int | None) -> Iterator[str]:
    """What keeps a person from playing, a phrase each; `names` are the players of both roles."""
    if HUMAN not in names:
        return
    if names[0] == names[1]:
        yield f"{HUMAN} can play one side: on one screen the other one's secrets would be read"
    if world_size() > 1:
        yield f"{HUMAN} plays in one process: start it with python -m tools.play_llm_game, without torchrun"
    if (concurrent_games or 1) > 1:
        yield f"--concurrent_games is {concurrent_games}; {HUMAN} plays one game at a time"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield f"{HUMAN} needs a terminal, for input and for output"
