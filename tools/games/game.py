"""The base class of all games for two players, and how a game is found by its name. Pure functions; no torch.

A new game is a Python file with a subclass of `Game` and a prompt file; README.md shows a whole one.
"""

import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from utils import UserError

ROOT = Path(__file__).resolve().parents[2]
LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")  # JSON can escape it, UTF-8 cannot hold it
MOST_TURNS = 10**9  # more turns must be a typing error, and would overflow
SECRET, GUESS = "secret", "guess"  # kinds of text that the report marks in a message
EPISODE_KEYS = ("history", "target_word", "max_turns")  # the keys that every stored game has

Message = Mapping[str, str]  # "role" and "content"
History = Sequence[Message]


def whole_word(word: str) -> re.Pattern:
    """A pattern that finds the word, in any case, where no letter or digit touches it."""
    return re.compile(rf"(?<![^\W_]){re.escape(word.strip())}(?![^\W_])", re.IGNORECASE)


class Outcome(NamedTuple):
    """One of the ways in which a game can end."""

    name: str  # as stored in episodes
    winner: str | None = None  # the role that gets the point of a match; None: half a point each
    breach: bool = False  # the loser broke the rules: the winner gets the point of a match, but no reward
    points: tuple[float, float] | None = None  # of roles[0] and roles[1], in [0, 1]; None: they follow from the winner
    why: str = ""  # shown to a person: the rule that decided the game


class Verdict(NamedTuple):
    """How a game ended, and its number of messages up to the decisive one, which is included."""

    outcome: str
    length: int


class Game:
    """A game in which two roles speak in turn about a task, a line of the word list. An instance holds its options."""

    name: ClassVar[str]  # as in --game
    title: ClassVar[str]  # the name that people read
    max_turns: ClassVar[int]  # the default; a turn is one message of each role
    prompt_file: ClassVar[Path]  # format: data/README.md
    roles: ClassVar[tuple[str, str]]  # --attacker_model_name_or_path plays the first, --defender_... the second
    outcomes: ClassVar[tuple[Outcome, ...]]  # the last one means that nothing was decided
    example_task: ClassVar[str]  # a valid task, with which prompt files are checked

    # A game must define these.

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        """What this role may know after these messages: texts by the name of their slot in the prompt file.

        The names must not depend on the history. The texts may: hidden cards, a board that changes.
        """
        raise NotImplementedError

    def decide(self, task: str, history: History) -> str | None:
        """The name of the outcome that the last message brings; None if the game goes on. `history` is not empty."""
        raise NotImplementedError

    # A game may define these.

    def check_task(self, task: str) -> None:
        """Raise ValueError for a line of the word list that is not a task of this game."""

    def next_role(self, task: str, history: History) -> str:
        """The role that speaks after these messages: roles[0] opens, then they take turns."""
        return self.roles[1] if history and history[-1]["role"] == self.roles[0] else self.roles[0]

    def stops(self, task: str, history: History) -> bool:
        """Whether play ends after the last message although that decides nothing; `history` is not empty."""
        return False

    def rewards(self, task: str, history: History, outcome: str) -> dict[str, float]:
        """The reward of each role, finite and at least 0; 0 if left out. A role with a reward above 0 gets rows."""
        ended = self.outcome(outcome)
        return {} if ended.winner is None or ended.breach else {ended.winner: 1.0}

    def points(self, task: str, history: History, outcome: str) -> tuple[float, float]:
        """What roles[0] and roles[1] get in a match, each in [0, 1]."""
        ended = self.outcome(outcome)
        if ended.points is not None:
            return ended.points
        if ended.winner is None:
            return 0.5, 0.5
        return (1.0, 0.0) if ended.winner == self.roles[0] else (0.0, 1.0)

    def hint(self, role: str) -> str:
        """What a person in this role is told before the game, besides the rules."""
        return ""

    def explain(self, task: str, history: History, outcome: str) -> str:
        """What a person is told after the game: the rule that decided it. `history` ends with the decisive message."""
        return self.outcome(outcome).why

    def marks(self, task: str, text: str) -> list[tuple[str, int, int]]:
        """The parts of a message that the report marks: (SECRET or GUESS, start, end) for each."""
        return []

    def facts(self, task: str, history: History, outcome: str) -> dict[str, bool]:
        """What summaries count beside outcomes, by name: for each fact, whether it is true of this game.

        `history` ends with the decisive message. The names are the same for all games.
        """
        return {}

    def tasks(self, number: int, rng: random.Random) -> list[str]:
        """At most `number` lines of a word list. Raises UserError if the game cannot make any."""
        raise UserError(f"{self.title} makes no tasks of its own; write a list, one a line")

    def scripted(self, name: str) -> Callable[[Any], str]:
        """The function by which `scripted:NAME`, a player without a model, turns a players.player.Turn into a message.

        A game may have players of its own. Those of all games are FILE.py:FUNCTION and module:FUNCTION. Raises
        UserError if there is no such player.
        """
        place, colon, function = name.rpartition(":")
        found = getattr(_import(place), function, None) if colon else None
        if not callable(found):
            raise UserError(f"{self.title} has no scripted player {name!r}; name your own FILE.py:FUNCTION")
        return found

    # Everything below follows from the above.

    def outcome(self, name: str) -> Outcome:
        """The outcome with this name. Raises ValueError if the game has none."""
        for outcome in self.outcomes:
            if outcome.name == name:
                return outcome
        raise ValueError(f"{self.title} has no outcome {name!r}; it has {', '.join(o.name for o in self.outcomes)}")

    def judge(self, history: History, task: str, max_turns: float) -> Verdict:
        """How a game ended: its first decisive message decides (arXiv 2404.10642).

        Only the first `2 * max_turns` messages count. Raises ValueError as `check_history` does.
        """
        self.check_history(history, task, max_turns)
        seen: list[Message] = []
        for message in history[: self.message_limit(max_turns)]:
            seen.append(message)
            if decided := self.decide(task, seen):
                return Verdict(self.outcome(decided).name, len(seen))
        return Verdict(self.outcomes[-1].name, len(seen))

    def is_over(self, history: History, task: str, max_turns: float) -> bool:
        """Whether play ends here: the game is decided, all turns are taken, or the game stops it."""
        if not history:
            return False
        full = len(history) >= self.message_limit(max_turns)
        return full or self.decide(task, history) is not None or self.stops(task, history)

    @staticmethod
    def message_limit(max_turns: float) -> int:
        """The largest number of messages: two a turn. Part of a turn is rounded up to whole messages."""
        return math.ceil(2 * max_turns)

    def checked_points(self, task: str, history: History, outcome: str) -> tuple[float, float]:
        """`points`. Raises ValueError unless they are two numbers between 0 and 1."""
        points = self.points(task, history, outcome)
        if not _are_points(points):
            raise ValueError(f"{self.title} gives the points {points}; they must be two numbers between 0 and 1")
        return points

    def check_history(self, history: History, task: str, max_turns: float) -> None:
        """Raise ValueError if the task, the number of turns or a message is invalid."""
        if not isinstance(task, str) or not task.strip():
            raise ValueError(f"'target_word' is {task!r}; it must be a word")
        if not isinstance(max_turns, (int, float)) or not 1 <= max_turns <= MOST_TURNS:
            raise ValueError(f"'max_turns' is {max_turns!r}; it must be a number from 1 to {MOST_TURNS:,}")
        if not isinstance(history, (list, tuple)):
            raise ValueError(f"'history' is {type(history).__name__}; it must be a list of messages")
        for index, message in enumerate(history):
            try:
                role, content = message["role"], message["content"]
            except (TypeError, KeyError):
                raise ValueError(f"message {index}: expected 'role' and 'content', got {message!r:.40}") from None
            if role not in self.roles:
                raise ValueError(f"message {index}: 'role' is {role!r}; it must be {' or '.join(self.roles)}")
            if not isinstance(content, str):
                raise ValueError(f"message {index}: 'content' is {content!r:.40}; it must be a text")
            if not content.isascii() and LONE_SURROGATE.search(content):
                raise ValueError(f"message {index}: 'content' has a lone surrogate, half of a character")
        self.check_task(task)

    def check_episode(self, episode: Mapping) -> None:
        """Raise ValueError for a stored episode that is incomplete, invalid, or from another game."""
        if missing := [key for key in EPISODE_KEYS if key not in episode]:
            raise ValueError(f"'{missing[0]}' is missing; an episode has {', '.join(EPISODE_KEYS)}")
        if (played := episode.get("game", DEFAULT_GAME)) != self.name:
            raise ValueError(f"a game of {played!r}, not of {self.name!r}; pass --game with the one that was played")
        self.check_history(*(episode[key] for key in EPISODE_KEYS))


DEFAULT_GAME = "taboo"  # also the game of stored episodes without the key "game"
NEEDED = ("name", "title", "max_turns", "prompt_file", "roles", "outcomes", "example_task", "secrets", "decide")
# Results and counts have these keys beside the names of roles, so no role may have one of these names.
TAKEN = {*EPISODE_KEYS, "index", "game", "outcome", "length", "replies", "words", "seed"}
TAKEN |= {"both", "sft", "negative", "empty", "dropped"}


def load_game(name: str = DEFAULT_GAME, **options: str) -> Game:
    """A game of this project by its name, or your own by FILE.py:Class or module:Class, with these options.

    Raises UserError if the game does not exist, is incomplete, or does not take the options.
    """
    kind = _find_class(name)
    if problems := _problems(kind):
        raise UserError(f"--game {name}: {'; '.join(problems)}")
    known = inspect.signature(kind).parameters
    if unknown := [option for option in options if option not in known]:
        raise UserError(
            f"--game_options of {kind.title}: no option {unknown[0]!r}; it has {', '.join(known) or 'none'}"
        )
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise UserError(f"--game_options of {kind.title}: {error}") from None
    try:
        game = kind(**options)
    except ValueError as error:
        raise UserError(f"--game_options of {kind.title}: {error}") from None
    if (role := game.next_role(game.example_task, ())) not in game.roles:
        raise UserError(f"--game {name}: next_role gives {role!r}; it must be {' or '.join(game.roles)}")
    return game


def _problems(kind: type[Game]) -> list[str]:
    """Faults that would end a long run late or give wrong results, a phrase for each."""
    if missing := [name for name in NEEDED if getattr(kind, name, None) is getattr(Game, name, None)]:
        return [f"{kind.__name__}.{name} is missing" for name in missing]
    problems, names = [], [outcome.name for outcome in kind.outcomes]
    if len(set(kind.roles)) != 2 or set(kind.roles) & TAKEN or not all(map(str.isidentifier, kind.roles)):
        problems.append(f"roles are {kind.roles!r}; they must be two names, none of {sorted(TAKEN)}")
    if len(set(names)) < max(len(names), 1):
        problems.append(f"outcomes are called {names}; there must be one, and no two may have the same name")
    if wrong := [each for each in kind.outcomes if each.winner not in (None, *kind.roles)]:
        problems.append(f"the winner of {wrong[0].name!r} is {wrong[0].winner!r}, which is no role")
    if wrong := [each for each in kind.outcomes if each.points is not None and not _are_points(each.points)]:
        problems.append(f"the points of {wrong[0].name!r} are {wrong[0].points}; they must be two numbers from 0 to 1")
    return problems


def _are_points(points: Any) -> bool:
    """Whether these are two numbers in [0, 1]."""
    pair = isinstance(points, (tuple, list)) and len(points) == 2
    return pair and all(isinstance(point, Real) and 0 <= point <= 1 for point in points)


def own_games() -> list[str]:
    """The names of this project's games; each is a module in this folder."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [path.stem for path in files if re.search(r"^class \w+\(Game\)", path.read_text("utf-8"), re.MULTILINE)]


def _find_class(name: str) -> type[Game]:
    place, colon, class_name = name.rpartition(":")
    if not colon:
        if name not in own_games():
            raise UserError(f"--game {name}: there is {', '.join(own_games())}; name your own game FILE.py:Class")
        module = importlib.import_module(f"{__package__}.{name}")
        return next(kind for kind in vars(module).values() if getattr(kind, "name", None) == name)
    kind = getattr(_import(place), class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Game)):
        raise UserError(f"--game {name}: {place} has no subclass of Game called {class_name!r}")
    if getattr(kind, "name", None) in own_games() and not kind.__module__.startswith(f"{__package__}."):
        raise UserError(f"--game {name}: this project has a game called {kind.name!r}; choose another `name`")
    return kind


def _import(place: str) -> ModuleType:
    """Import a Python file, or a module by its name from the current folder or the import path."""
    if not place.endswith(".py"):
        sys.path.append("")
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UserError(f"{place}: {error}") from None
    name = f"game_of_{Path(place).stem}"
    spec = importlib.util.spec_from_file_location(name, place)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def game_setting(game: Game) -> dict[str, Any]:
    """A game's name, options and digest of its sources and of files among its options, as two starts compare them."""
    kinds = [kind for kind in type(game).__mro__ if issubclass(kind, Game) and kind is not Game]
    options = {name: getattr(game, name, None) for name in inspect.signature(type(game)).parameters}
    files = [value for value in options.values() if isinstance(value, str) and os.path.isfile(value)]
    source = b"".join(Path(path).read_bytes() for path in [*map(inspect.getfile, kinds), *files])
    digest = hashlib.sha256(source + json.dumps(options, sort_keys=True, default=str).encode())
    return {"path": game.name, "options": options, "sha256": digest.hexdigest()}
