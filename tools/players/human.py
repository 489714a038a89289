"""A person at the terminal as one of the two players: `human` in the place of a model.

Nothing else is written to the terminal while a game is on. No torch.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tools.games import taboo
from tools.players.player import STOP, GameView, Reply
from tools.selfplay.files import Episode, EpisodeFiles
from utils import world_size

with contextlib.suppress(ImportError):  # with it, `input` lets one edit the line
    import readline  # noqa: F401

HUMAN = "human"


class Left(Exception):
    """The person has ended the input (Ctrl-D) or interrupted it (Ctrl-C)."""


class HumanPlayer:
    """Shows a person the game as far as its role may know it, and reads each message as a line."""

    def __init__(self, templates: taboo.Templates | None = None):
        self.templates = templates or taboo.default_templates()
        self.role, self.shown = "", 0  # of the game at hand; shown: messages that the person has seen

    async def reply(self, prompt: str, *, view: GameView) -> Reply:
        """The next line that is not blank. It blocks: a person plays one game at a time, and nobody else waits."""
        if len(view.history) < 2:
            self._introduce(view)
        print(f"\nturn {len(view.history) // 2 + 1} of {view.max_turns}")
        self._show(view.history)
        line = read_line(f"you, {self.role}> ")
        self.shown += 1
        return Reply(line, STOP, tokens=0)

    def end(self, episode: Episode) -> None:
        """Show what was said last, and the verdict."""
        self._show(episode["history"])
        winner = taboo.WINNERS.get(episode["outcome"])
        result = f" - you {'win' if winner == self.role else 'lose'}" if winner else ""
        length = f"after {episode['length']} message{'s' * (episode['length'] != 1)}"
        print(f"\n--- {episode['outcome']}{result}, {length}; the target word was `{episode['target_word']}` ---")

    def _introduce(self, view: GameView) -> None:
        self.role, self.shown = view.role, 0
        print(f"\n--- game {view.game + 1}: you are the {view.role} (Ctrl-D leaves; finished games are stored) ---\n")
        print(taboo.rule_text(self.templates, view.max_turns))
        print(taboo.instruction_to(view.role, view.target_word, self.templates))
        # Not all prompts say these.
        if view.role == taboo.ATTACKER:
            print(f"The target word: {view.target_word}")
        else:
            print("A guess reads: I know the word! It is `word`!")

    def _show(self, history: taboo.History) -> None:
        """Show the messages that are new, without the characters that would steer the terminal."""
        for message in history[self.shown :]:
            text = (letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in message["content"])
            print(f"{message['role']}: {''.join(text)}")
        self.shown = len(history)


def read_line(prompt: str) -> str:
    """A line from the terminal that says anything, stripped. Raises Left at the end of the input and for Ctrl-C."""
    # asyncio's own handler only cancels a task, which would not happen before the line is read.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            try:
                line = input(prompt).strip()
            except UnicodeDecodeError:
                line = "\ud800"
            if taboo.LONE_SURROGATE.search(line):
                print("(That is not UTF-8; please type it again.)")
            elif line:
                return line
    except (EOFError, KeyboardInterrupt):
        raise Left from None
    finally:
        signal.signal(signal.SIGINT, handler)


def human_problems(args: argparse.Namespace, names: tuple[str, str]) -> list[str]:
    """What keeps a person from playing, a phrase each; `names` are those of attacker and defender."""
    if HUMAN not in names:
        return []
    problems = []
    if names[0] == names[1]:
        problems.append(f"{HUMAN} can play one side: on one screen the defender would read the target word")
    if world_size() > 1:
        problems.append(f"{HUMAN} plays in one process: start it with python -m tools.play_llm_game, without torchrun")
    if args.concurrent_games not in (None, 1):
        problems.append(f"--concurrent_games is {args.concurrent_games}; {HUMAN} plays one game at a time")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        problems.append(f"{HUMAN} needs a terminal, for input and for output")
    return problems


@contextmanager
def may_leave(names: tuple[str, str], files: EpisodeFiles) -> Iterator[None]:
    """End the program in good order when the person leaves; where models play, interrupts stay what they are."""
    try:
        yield
    except (Left, KeyboardInterrupt):
        if HUMAN not in names:
            raise
        games = len(files.words)
        finished = games - len(files.finished().missing(range(games)))
        print(f"\nYou have left. {finished} of {games} games are stored; the same command goes on with the others.")
        sys.exit(0)
