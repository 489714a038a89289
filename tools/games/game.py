"""The base class of all games for two players, and how a game is found by its name. Pure functions; no torch."""

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
EPISODE_KEYS = ("history", "target_word", "max_turns")  # the keys that every stored game has
DEFAULT_GAME = "taboo"  # also the game of stored episodes without the key "game", which the release does not write
CLASSES = {
    "taboo": "tools.games.taboo:Taboo",
    "twenty_questions": "tools.games.twenty_questions:TwentyQuestions",
}

_sources: dict[str, bytes] = {}  # by name of the module: the content of a person's file when it ran

History = Sequence[Mapping[str, str]]  # messages: "role" and "content"


class Outcome(NamedTuple):
    name: str  # as stored in episodes
    # The role that gets the point of a match. None: a tie, with half a point each unless `points` says more, even if
    # both roles have succeeded.
    winner: str | None = None
    # The loser broke the rules: the winner gets the point of a match, but no reward, as released. It was not his
    # messages that won the game.
    breach: bool = False
    points: tuple[float, float] | None = None  # of roles[0] and roles[1], in [0, 1]; None: they follow from the winner


class Verdict(NamedTuple):
    """How a game ended, and its number of messages up to the decisive one, which is included."""

    outcome: str
    length: int


class Game:
    """A game in which two roles speak in turn about a task, a line of the word list.

    An instance holds the game's options, but no state of a game that is played: the judge, the maker of rows and
    belief call the same methods again with stored messages, so all must follow from task and history. Chance comes
    from the task, which may be a seed; what only one role may see goes into `secrets`. A task may have several parts,
    such as a word and words that are forbidden; episodes store the whole line as `target_word`.
    """

    name: str  # as in --game
    title: str  # the name that people read
    max_turns: int  # the default; a turn is one message of each role
    prompt_file: ClassVar[Path]  # format: data/README.md
    roles: ClassVar[tuple[str, str]]  # --attacker_model_name_or_path plays the first, --defender_... the second
    outcomes: ClassVar[tuple[Outcome, ...]]  # the last one means that nothing was decided
    example_task: ClassVar[str]  # a valid task, with which prompt files are checked

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        """What this role may know after these messages: texts by the name of their slot, the same slots always.

        They fill the role's instruction, which must have each slot in every prompt file of the game. A text may change
        from message to message: the number of the turn is `len(history) // 2 + 1`. A slot that a player writes into a
        message is not filled.
        """
        raise NotImplementedError

    def decide(self, task: str, history: History) -> str | None:
        """The name of the outcome that the last message brings; None if the game goes on. `history` is not empty."""
        raise NotImplementedError

    # What a game may define besides.

    def check_task(self, task: str) -> None:
        """Raise ValueError for a line of the word list that is not a task of this game."""

    def next_role(self, task: str, history: History) -> str:
        """The role that speaks after these messages: roles[0] opens, then they take turns.

        `max_turns` counts two messages as a turn, whoever sends them.
        """
        return self.other(history[-1]["role"]) if history else self.roles[0]

    def stops(self, task: str, history: History) -> bool:
        """Whether play ends after the last message although that message decides nothing; `history` is not empty.

        Such a game is undecided, although turns are left. `verdict` does not ask this: in a recorded game that went
        on, a later message counts.
        """
        return False

    def rewards(self, task: str, history: History, outcome: str) -> dict[str, float]:
        """The reward of each role, finite and at least 0; 0 if left out. A role with a reward above 0 gets rows.

        Matches count `points` instead, so a game with graded rewards defines both.
        """
        ended = self.outcome(outcome)
        return {} if ended.winner is None or ended.breach else {ended.winner: 1.0}

    def points(self, task: str, history: History, outcome: str) -> tuple[float, float]:
        """What roles[0] and roles[1] get in a match, each in [0, 1]."""
        ended = self.outcome(outcome)
        if ended.points:
            return ended.points
        if ended.winner is None:
            return 0.5, 0.5
        if ended.winner == self.roles[0]:
            return 1.0, 0.0
        return 0.0, 1.0

    def answer(self, task: str) -> tuple[str, str] | None:
        """The role that must find the secret, and the message that names it; None if the game has no secret.

        Without a secret there is no belief, and a person is not told the task at the end of a game.
        """
        return None

    def hint(self, role: str) -> str:
        """What a person in this role is told before the game, besides the rules."""
        return ""

    def marks(self, task: str, text: str) -> list[tuple[str, int, int]]:
        """The parts of a message that the report marks: (SECRET or GUESS, start, end) for each."""
        return []

    # What follows from the above.

    def other(self, role: str) -> str:
        first, second = self.roles
        return second if role == first else first

    def outcome(self, name: str) -> Outcome:
        """The outcome with this name; KeyError if the game has none."""
        return {outcome.name: outcome for outcome in self.outcomes}[name]

    def judge(self, history: History, task: str, max_turns: float) -> Verdict:
        """How a game ended: its first decisive message decides (arXiv 2404.10642).

        Only the first `2 * max_turns` messages count. Raises ValueError for an invalid task, message, or number.
        """
        self._check(history, task)
        return self.verdict(history, task, max_turns)

    def verdict(self, history: History, task: str, max_turns: float) -> Verdict:
        """What `judge` returns, for messages and a task that were checked before.

        It asks `decide` after every message, because a recorded game may go on after the message that decided it.
        """
        counted = min(len(history), self.message_limit(max_turns))
        for length in range(1, counted + 1):
            if outcome := self.decide(task, history[:length]):
                return Verdict(self.outcome(outcome).name, length)
        return Verdict(self.outcomes[-1].name, counted)

    def is_over(self, history: History, task: str, max_turns: float) -> bool:
        """Whether play ends here: the game is decided, all turns are taken, or the game stops it."""
        if not history:
            return False
        if len(history) >= self.message_limit(max_turns):
            return True
        return self.stops(task, history) or self.decide(task, history) is not None

    @staticmethod
    def message_limit(max_turns: float) -> int:
        """The largest number of messages: two a turn. The judge rounds part of a turn up to whole messages."""
        if not isinstance(max_turns, (int, float)) or not 1 <= max_turns < math.inf:
            raise ValueError(f"'max_turns' is {max_turns!r}; it must be a number of at least 1")
        return math.ceil(2 * max_turns)

    def check_episode(self, episode: Mapping) -> None:
        """Raise ValueError for a stored episode that is incomplete, invalid, or from another game."""
        if absent := [key for key in EPISODE_KEYS if episode.get(key) is None]:
            raise ValueError(f"'{absent[0]}' is missing; an episode has {', '.join(EPISODE_KEYS)}")
        if (game := episode.get("game") or DEFAULT_GAME) != self.name:
            raise ValueError(f"a game of {game!r}, not of {self.name!r}; pass --game with the one that was played")
        self.message_limit(episode["max_turns"])
        self._check(episode["history"], episode["target_word"])

    def _check(self, history: History, task: str) -> None:
        if not isinstance(task, str) or not task.strip():
            raise ValueError(f"'target_word' is {task!r}; it must be a word")
        for index, message in enumerate(history):
            fits = isinstance(message, Mapping) and message.get("role") in self.roles
            if not fits or not isinstance(message.get("content"), str):
                expected = f"expected 'role' ({' or '.join(self.roles)}) and 'content' (a text)"
                raise ValueError(f"message {index}: {expected}, got {message!r:.60}")
        self.check_task(task)


def whole_word(word: str) -> re.Pattern:
    """Finds the word, in any case, where no letter or digit touches it."""
    return re.compile(rf"(?<![^\W_]){re.escape(word.strip())}(?![^\W_])", re.IGNORECASE)


def load_game(name: str = DEFAULT_GAME, **options: str) -> Game:
    """A game of this project by its name, or your own by FILE.py:Class or module:Class, with these options.

    Options are the arguments of the class, as texts: `__init__` makes numbers of them and checks their values.
    UserError for an unknown or a missing option.
    """
    path = CLASSES.get(name, name)
    if ":" not in path:
        raise UserError(f"--game {name}: there is {', '.join(CLASSES)}; name your own game FILE.py:Class")
    make = load_member(path)
    # A missing or an unknown option. `make` stays outside, so that a TypeError of a person's own code is not hidden.
    with user_errors(f"--game {name}, its options", TypeError):
        inspect.signature(make).bind(**options)
    return make(**options)


def load_member(path: str) -> Any:
    """FILE.py:NAME or module:NAME, a class or a function; the module is of the current folder or the import path.

    A file can import the modules beside it.
    """
    module_name, _, name = path.rpartition(":")
    if module_name.endswith(".py"):
        module = _run_file(module_name)
    else:
        _import_from("")
        module = importlib.import_module(module_name)
    return getattr(module, name)


def _run_file(path: str) -> ModuleType:
    """The module of a Python file, which runs once in this process, and again when its content has changed.

    Not an import: Python takes an edited file of the same size and second for the one that it has compiled.
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
    module.__file__ = path  # as it is named now; the current folder may be another one
    return module


def _import_from(folder: str) -> None:
    """Let imports find the modules of a folder, after those that are installed.

    So a file of this folder does not hide an installed package of the same name.
    """
    if folder not in sys.path:
        sys.path.append(folder)


def member_setting(path: str) -> dict[str, str]:
    """What `load_member` takes as a setting of a stage: compared by its name and by the content of its file.

    The modules that the file imports are not compared.
    """
    member = load_member(path)
    file = files_setting(inspect.getfile(getattr(member, "func", member)))  # of a functools.partial
    _, _, name = path.rpartition(":")
    return file | {"sha256": f"{name} {file['sha256']}"}
