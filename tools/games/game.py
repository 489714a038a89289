"""The base class of two-player games, and loading a game by name. Pure functions; no torch."""

import importlib
import inspect
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from tools.common.errors import UserError, user_errors
from tools.common.records import files_setting

# Kinds of text that the report marks in a message.
SECRET = "secret"
GUESS = "guess"
EPISODE_KEYS = ("history", "target_word", "max_turns")  # in every stored game
DEFAULT_GAME = "taboo"  # also of stored episodes without the key "game", such as the release's
CLASSES = {
    "taboo": "tools.games.taboo:Taboo",
    "twenty_questions": "tools.games.twenty_questions:TwentyQuestions",
}

_sources: dict[str, bytes] = {}  # by module name: the content of a user's file when it was run

History = Sequence[Mapping[str, str]]  # messages: "role" and "content"


class Outcome(NamedTuple):
    name: str  # as stored in episodes
    # The role that gets the point in a match. None: a tie, with half a point each unless `points` says otherwise, even
    # if both roles succeeded.
    winner: str | None = None
    # The loser broke the rules. The winner gets the point in a match but, as released, no reward, because its messages
    # did not win the game.
    breach: bool = False
    points: tuple[float, float] | None = None  # of roles[0] and roles[1], in [0, 1]; None: determined by the winner


class Verdict(NamedTuple):
    """How a game ended, and its number of messages up to and including the decisive one."""

    outcome: str
    length: int


class Game:
    """A game in which two roles speak in turn about a task, a line of the word list.

    An instance holds the game's options but no state of a game in progress: everything must follow from task and
    history, because judge, rows and belief call the same methods again with stored messages. Randomness must come
    from the task, which may be a seed. A task may have several parts, such as a word and forbidden words; episodes
    store the whole line as `target_word`.
    """

    name: str  # as in --game
    title: str  # the display name
    max_turns: int  # the default; a turn is one message by each role
    prompt_file: ClassVar[Path]  # format: data/README.md
    roles: ClassVar[tuple[str, str]]  # --attacker_model_name_or_path plays the first, --defender_... the second
    outcomes: ClassVar[tuple[Outcome, ...]]  # the last one means undecided
    example_task: ClassVar[str]  # a valid task, for checking prompt files

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        """What this role is told about the task: texts by slot name, with the same slots in every turn.

        They fill the slots of the role's instruction, all of which every prompt file of the game must have. A text may
        change from message to message; the turn's number is `len(history) // 2 + 1`.
        """
        raise NotImplementedError

    def decide(self, task: str, history: History) -> str | None:
        """The name of the outcome that the last message causes; None if the game goes on. `history` is not empty."""
        raise NotImplementedError

    # Optional methods.

    def check_task(self, task: str) -> None:
        """ValueError for a line of the word list that is not a task of this game."""

    def next_role(self, task: str, history: History) -> str:
        """The role that speaks next. By default roles[0] opens and the roles alternate.

        For `max_turns`, any two messages are a turn.
        """
        return self.other(history[-1]["role"]) if history else self.roles[0]

    def stops(self, task: str, history: History) -> bool:
        """Whether play ends after the last message, undecided although turns are left. `history` is not empty.

        `verdict` ignores this, so in a recorded game that went on, a later message counts.
        """
        return False

    def rewards(self, task: str, history: History, outcome: str) -> dict[str, float]:
        """Rewards by role, finite and at least 0; 0 if missing. A role with a reward above 0 gets training rows.

        Matches count `points` instead, so a game with graded rewards must define both.
        """
        ended = self.outcome(outcome)
        return {} if ended.winner is None or ended.breach else {ended.winner: 1.0}

    def points(self, task: str, history: History, outcome: str) -> tuple[float, float]:
        """Points of roles[0] and roles[1] in a match, each in [0, 1]."""
        ended = self.outcome(outcome)
        if ended.points:
            return ended.points
        if ended.winner is None:
            return 0.5, 0.5
        if ended.winner == self.roles[0]:
            return 1.0, 0.0
        return 0.0, 1.0

    def answer(self, task: str) -> tuple[str, str] | None:
        """The role that must find the secret and the message that names it; None if the game has no secret.

        Without a secret, belief is undefined and a human player is not told the task at the end of a game.
        """
        return None

    def hint(self, role: str) -> str:
        """What a human player in this role is told before the game, in addition to the rules."""
        return ""

    def marks(self, task: str, text: str) -> list[tuple[str, int, int]]:
        """Spans of a message that the report highlights: (SECRET or GUESS, start, end)."""
        return []

    # Derived from the above.

    def other(self, role: str) -> str:
        first, second = self.roles
        return second if role == first else first

    def outcome(self, name: str) -> Outcome:
        """The outcome with this name; KeyError if the game has none."""
        return {outcome.name: outcome for outcome in self.outcomes}[name]

    def judge(self, history: History, task: str, max_turns: float) -> Verdict:
        """How a game ended, by its first decisive message (arXiv 2404.10642).

        Only the first `2 * max_turns` messages count. ValueError for an invalid task, message or number.
        """
        self._check(history, task)
        return self.verdict(history, task, max_turns)

    def verdict(self, history: History, task: str, max_turns: float) -> Verdict:
        """`judge` without the checks.

        Calls `decide` after every message, because a recorded game may go on after the message that decided it.
        """
        counted = min(len(history), self.message_limit(max_turns))
        for length in range(1, counted + 1):
            if outcome := self.decide(task, history[:length]):
                return Verdict(self.outcome(outcome).name, length)
        return Verdict(self.outcomes[-1].name, counted)

    def is_over(self, history: History, task: str, max_turns: float) -> bool:
        """Whether play ends here: the game is decided, all turns are used, or the game stops it."""
        if not history:
            return False
        if len(history) >= self.message_limit(max_turns):
            return True
        return self.stops(task, history) or self.decide(task, history) is not None

    @staticmethod
    def message_limit(max_turns: float) -> int:
        """The largest number of messages: two per turn, rounded up."""
        if not isinstance(max_turns, (int, float)) or not 1 <= max_turns < math.inf:
            raise ValueError(f"'max_turns' is {max_turns!r}; it must be a number of at least 1")
        return math.ceil(2 * max_turns)

    def check_episode(self, episode: Mapping) -> None:
        """ValueError for a stored episode that is incomplete, invalid, or of another game."""
        if absent := [key for key in EPISODE_KEYS if episode.get(key) is None]:
            raise ValueError(f"'{absent[0]}' is missing; an episode needs {', '.join(EPISODE_KEYS)}")
        if (game := episode.get("game") or DEFAULT_GAME) != self.name:
            raise ValueError(f"an episode of {game!r}, not of {self.name!r}; set --game to the game that was played")
        if (learner := episode.get("learner")) not in (None, *self.roles):
            raise ValueError(f"'learner' is {learner!r}; it must be {' or '.join(self.roles)}")
        self.message_limit(episode["max_turns"])
        self._check(episode["history"], episode["target_word"])

    def _check(self, history: History, task: str) -> None:
        if not isinstance(task, str) or not task.strip():
            raise ValueError(f"'target_word' is {task!r}; it must be a word")
        for index, message in enumerate(history):
            fits = isinstance(message, Mapping) and message.get("role") in self.roles
            if not fits or not isinstance(message.get("content"), str):
                expected = f"expected 'role' ({' or '.join(self.roles)}) and 'content' (a string)"
                raise ValueError(f"message {index}: {expected}, got {message!r:.60}")
        self.check_task(task)


def whole_word(word: str) -> re.Pattern:
    """A pattern for the word, in any case, with no letter or digit next to it."""
    return re.compile(rf"(?<![^\W_]){re.escape(word.strip())}(?![^\W_])", re.IGNORECASE)


def load_game(name: str = DEFAULT_GAME, **options: str) -> Game:
    """A game of this project by name, or your own by FILE.py:Class or module:Class, with these options.

    Options are arguments of the class, as strings that its `__init__` converts and checks. UserError for an unknown or
    missing option.
    """
    path = CLASSES.get(name, name)
    if ":" not in path:
        raise UserError(f"--game {name}: the games are {', '.join(CLASSES)}; name your own as FILE.py:Class")
    make = load_member(path)
    # Checks only the options' names, so that a TypeError in the game's own code keeps its traceback.
    with user_errors(f"--game {name}, its options", TypeError):
        inspect.signature(make).bind(**options)
    return make(**options)


def load_member(path: str) -> Any:
    """The class or function FILE.py:NAME or module:NAME, from the current folder or the import path.

    FILE.py can import modules in its folder.
    """
    module_name, _, name = path.rpartition(":")
    if module_name.endswith(".py"):
        module = _run_file(module_name)
    else:
        _import_from("")
        module = importlib.import_module(module_name)
    return getattr(module, name)


def _run_file(path: str) -> ModuleType:
    """Run a Python file, once per content, and return its module.

    Not by import, which would reuse the compiled code of an edited file of equal size and time stamp.
    """
    name = str(Path(path).resolve())
    source = Path(path).read_bytes()
    if _sources.get(name) != source:
        _import_from(str(Path(name).parent))
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = path
        exec(compile(source, path, "exec"), vars(module))
        _sources[name] = source
    module = sys.modules[name]
    module.__file__ = path  # relative to the current folder, which may have changed
    return module


def _import_from(folder: str) -> None:
    """Make a folder's modules importable, without hiding installed packages of the same name."""
    if folder not in sys.path:
        sys.path.append(folder)


def member_setting(path: str) -> dict[str, str]:
    """A class or function as a setting of a stage, compared by its name and its file's content.

    Modules that the file imports are not compared.
    """
    member = load_member(path)
    file = files_setting(inspect.getfile(getattr(member, "func", member)))  # of a functools.partial
    _, _, name = path.rpartition(":")
    return file | {"sha256": f"{name} {file['sha256']}"}
