"""The rules of Adversarial Taboo and its prompts: who speaks, when a game is decided, what a player is shown.

The prompts' wording is data, in configs/prompts.json. Everything here is pure: nothing is printed or modified, and
random choices come from the `rng` that the caller passes. No torch.
"""

import hashlib
import json
import logging
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypedDict

from textblob import Word

from utils import open_text

ATTACKER = "attacker"
DEFENDER = "defender"
ROLES = (ATTACKER, DEFENDER)

ATTACKER_WINS = "attacker wins"
DEFENDER_WINS = "defender wins"
ATTACKER_BREAKS = "attacker breaks the rules"
TIED = "tied game"
OUTCOMES = (ATTACKER_WINS, DEFENDER_WINS, ATTACKER_BREAKS, TIED)
WINNERS = {ATTACKER_WINS: ATTACKER, DEFENDER_WINS: DEFENDER}  # the decided games, the only ones that pay

SUBSTRING = "substring"  # "art" is found in "start": what the paper's games were judged with
WHOLE_WORD = "word"
MATCHES = (SUBSTRING, WHOLE_WORD)

GUESS = re.compile(r"i know the word! it(?=.)")  # in lower-cased text
LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")  # JSON can escape it, UTF-8 cannot hold it
MOST_TURNS = 10**9  # of a game; more is a slip, and overflows
MAX_GAP = 8  # characters that may stand between the guess's "it" and the word
GUESS_BEGINNING = "i know the word"  # after this from the defender, right or wrong, play stops

DEFAULT_TEMPLATES = Path(__file__).resolve().parents[2] / "configs" / "prompts.json"
NUM_RULES = 8
TURNS_SLOT = "{max_turns}"
WORD_SLOT = "{target_word}"

SEPARATORS = ("\n - ", "\n### ", "\n## ", "\n# ", "\n *** ", "\n **", "\n\n")
NAMES = (("Assistant", "Human"), ("Answer", "Question"), ("Response", "Query"), ("A", "Q"))  # besides the roles
CHAT, CHAT_INVERSE, ALPACA = "chat", "chat_inverse", "alpaca"
SYSTEM_NAMES = ("Rules", "Game Rule", "System")
ALPACA_CHANCE = 0.2  # of each of the two variations of the alpaca layout
NO_HISTORY = "The game is just initialized."

Message = Mapping[str, str]  # "role", one of ROLES, and "content"
History = Sequence[Message]
logger = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """How a game ended, one of OUTCOMES, and how many messages it took: the decisive one included."""

    outcome: str
    length: int


class Templates(TypedDict):
    """The wording of all prompts: a parsed prompt file."""

    rules: list[str]
    attacker_instruction: str
    defender_instruction: str


class Layout(NamedTuple):
    """The random choices behind one training prompt."""

    separator: str
    names: tuple[str, str]  # of the player who answers, of the other one
    kind: str
    system_name: str
    rule: int
    alpaca_system: bool
    alpaca_prefix: bool


# --- rules ---------------------------------------------------------------------------------------------------------


def judge(history: History, target_word: str, max_turns: float, *, match: str = SUBSTRING) -> Verdict:
    """The outcome of a game and its length in messages; the first decisive message ends it (arXiv 2404.10642).

    Only the first `2 * max_turns` messages count. Case is ignored; the target word is literal text.
    Raises ValueError for a message, word, number of turns or kind of match that is none.
    """
    check_game(history, target_word, max_turns)
    if match not in MATCHES:
        raise ValueError(f"match is {match!r}; it must be one of {', '.join(MATCHES)}")
    word = target_word.strip().lower()
    limit = message_limit(max_turns)
    for length, message in enumerate(history[:limit], start=1):
        outcome = _decide(message["role"], message["content"].lower(), word, match)
        if outcome:
            return Verdict(outcome, length)
    return Verdict(TIED, min(len(history), limit))


def message_limit(max_turns: float) -> int:
    """How many messages a game has at most: two a turn, half a turn being one message."""
    return math.ceil(2 * max_turns)


def next_player(history: History) -> str:
    """The role that speaks next: the attacker opens, then they take turns."""
    return DEFENDER if history and history[-1]["role"] == ATTACKER else ATTACKER


def is_over(history: History, target_word: str, max_turns: float, *, match: str = SUBSTRING) -> bool:
    """Whether play stops here: decided, all turns taken, or the defender has begun the sentence of a guess."""
    if judge(history, target_word, max_turns, match=match).outcome != TIED or len(history) >= message_limit(max_turns):
        return True
    return bool(history) and history[-1]["role"] == DEFENDER and GUESS_BEGINNING in history[-1]["content"].lower()


def derivatives(word: str) -> list[str]:
    """The 16 lower-cased texts that count as `word`: itself, -ing, -ed and plural, bare and in three kinds of quotes.

    The plural is that of the whole text by TextBlob's rules, right or wrong. Raises ValueError for a blank word.
    """
    word = word.strip().lower()
    if not word:
        raise ValueError("the target word is blank")
    forms = [word, word + "ing", word + "ed", _plural(word)]
    return [f"{quote}{form}{quote}" for quote in ("", '"', "'", "`") for form in forms]


def check_game(history: History, target_word: str, max_turns: float) -> None:
    """Raise ValueError unless these make a game: a word, at least one turn, and messages with role and content."""
    if not isinstance(target_word, str) or not target_word.strip():
        raise ValueError(f"'target_word' is {target_word!r}; it must be a word")
    if not isinstance(max_turns, (int, float)) or not 1 <= max_turns <= MOST_TURNS:
        raise ValueError(f"'max_turns' is {max_turns!r}; it must be a number from 1 to {MOST_TURNS:,}")
    if not isinstance(history, (list, tuple)):
        raise ValueError(f"'history' is {type(history).__name__}; it must be a list of messages")
    for index, message in enumerate(history):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {index}: expected an object with 'role' and 'content', got {message!r:.40}")
        if message.get("role") not in ROLES:
            raise ValueError(f"message {index}: 'role' is {message.get('role')!r}; it must be {' or '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {index}: 'content' is {message.get('content')!r:.40}; it must be a text")
        if not message["content"].isascii() and LONE_SURROGATE.search(message["content"]):
            raise ValueError(f"message {index}: 'content' has half of a character, a lone surrogate")


def _decide(role: str, text: str, word: str, match: str) -> str | None:
    """What one lower-cased message decides, if anything."""
    guesses = GUESS.search(text) is not None
    if role == DEFENDER and guesses:
        return DEFENDER_WINS if _guesses_right(text, word, match) else ATTACKER_WINS
    if guesses or _contains(text, word, match):
        return ATTACKER_WINS if role == DEFENDER else ATTACKER_BREAKS
    return None


def _guesses_right(text: str, word: str, match: str) -> bool:
    """Whether one to MAX_GAP characters of the line after a guess's "it" lead to a derivative."""
    forms = derivatives(word)
    for guess in GUESS.finditer(text):
        gap = text[guess.end() : guess.end() + MAX_GAP].partition("\n")[0]
        for start in range(guess.end() + 1, guess.end() + len(gap) + 1):
            for form in forms:
                if text.startswith(form, start) and (match == SUBSTRING or _stands_alone(text, start, form)):
                    return True
    return False


def _contains(text: str, word: str, match: str) -> bool:
    """Whether any derivative is in the text. All but the plural contain the word itself, so two look-ups do."""
    if match == SUBSTRING:
        plural = _plural(word)
        return word in text or (word not in plural and plural in text)
    unquoted = derivatives(word)[:4]  # in quotes, they stand alone too
    return any(_stands_alone(text, start, form) for form in unquoted for start in _occurrences(text, form))


def _occurrences(text: str, form: str) -> Iterator[int]:
    start = text.find(form)
    while start >= 0:
        yield start
        start = text.find(form, start + 1)


def _stands_alone(text: str, start: int, form: str) -> bool:
    """Whether no letter or digit at an edge of the form, found at `start`, is joined to another one outside it."""
    end = start + len(form)
    joined_before = start > 0 and text[start - 1].isalnum() and form[0].isalnum()
    joined_after = end < len(text) and text[end].isalnum() and form[-1].isalnum()
    return not joined_before and not joined_after


@lru_cache(maxsize=1 << 16)
def _plural(word: str) -> str:
    return str(Word(word).pluralize()).lower()


# --- prompts -------------------------------------------------------------------------------------------------------


def play_prompt(history: History, target_word: str, max_turns: float, templates: Templates | None = None) -> str:
    """The prompt under which the next message is sampled: rules, the game so far, instruction of the next player.

    Only the attacker's prompt names the target word. `templates` default to configs/prompts.json.
    """
    templates = templates or default_templates()
    prompt = rule_text(templates, max_turns)
    if history:
        prompt += "\n### Game History:"
        prompt += "".join(f"\n  - {message['role']}: {message['content']}" for message in history)
    else:
        prompt += NO_HISTORY
    return prompt + play_request(instruction_to(next_player(history), target_word, templates))


def rule_text(templates: Templates, max_turns: float, number: int = 0) -> str:
    """One of the rule texts, ending in a newline; the first one is that of play."""
    return templates["rules"][number].replace(TURNS_SLOT, str(max_turns))


def instruction_to(role: str, target_word: str | None, templates: Templates) -> str:
    """What a player is told to do; the target word is looked at for the attacker only."""
    if role == ATTACKER:
        return templates["attacker_instruction"].replace(WORD_SLOT, target_word)
    return templates["defender_instruction"]


def play_request(instruction: str) -> str:
    """The end of the play prompt: what the player is told to do, and where the reply begins."""
    return f"\n\n### Instruction: {instruction}\n\n### Response:"


def training_prompt(
    history: History,
    target_word: str,
    max_turns: float,
    *,
    rng: random.Random,
    templates: Templates | None = None,
) -> str:
    """A prompt for training on the next message, in one of many layouts, so that none of them is learned by heart.

    Five draws by `rng.choice`, for the alpaca layout two more by `rng.uniform`; as in the paper's released data.
    """
    templates = templates or default_templates()
    layout = draw_layout(next_player(history), rng)
    rule = rule_text(templates, max_turns, layout.rule)
    instruction = instruction_to(next_player(history), target_word, templates)
    separator = "\n" + layout.separator
    answer = f"{separator}{layout.names[0]}: "
    told = _told(history, layout)
    start = "" if history else NO_HISTORY + " "
    if layout.kind == ALPACA:
        system = f"{layout.system_name}: " if layout.alpaca_system else ""
        game = start or f"{separator}Game History:{told}\n\n"
        request = f"{instruction[:-1]}: " if layout.alpaca_prefix else instruction + answer
        return f"{system}{rule}{game}{request}"
    system = f"{separator}{layout.system_name}: {rule}\n\n{instruction}{start}"
    return f"{system}{told}{answer}" if layout.kind == CHAT else f"{told}{system}{answer}"


def draw_layout(role: str, rng: random.Random) -> Layout:
    """Draw the layout of a training prompt for the player `role`."""
    other = ATTACKER if role == DEFENDER else DEFENDER
    separator = rng.choice(SEPARATORS)
    names = rng.choice(((role, other), *NAMES))
    kind = rng.choice((CHAT, CHAT_INVERSE, ALPACA))
    system_name = rng.choice(SYSTEM_NAMES)
    rule = rng.choice(range(NUM_RULES))
    alpaca_system = kind == ALPACA and rng.uniform(0, 1) < ALPACA_CHANCE
    alpaca_prefix = kind == ALPACA and rng.uniform(0, 1) < ALPACA_CHANCE
    return Layout(separator, names, kind, system_name, rule, alpaca_system, alpaca_prefix)


def _told(history: History, layout: Layout) -> str:
    """The messages so far, under the names of the layout."""
    speaker = next_player(history)
    own, other = layout.names
    lines = ((own if message["role"] == speaker else other, message["content"]) for message in history)
    return "".join(f"\n{layout.separator}{name}: {content}" for name, content in lines)


# --- prompt files --------------------------------------------------------------------------------------------------


def load_templates(path: str | Path) -> Templates:
    """Read and check a prompt file (format: data/README.md).

    Raises FileNotFoundError, and ValueError naming the file and all that is wrong with it; warns of a rule text
    that does not state the number of turns.
    """
    with open_text(path) as file:
        try:
            templates = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: not a JSON file ({error})") from None
    if problems := template_problems(templates):
        raise ValueError(f"{path}: {'; '.join(problems)}")
    for index, rule in enumerate(templates["rules"]):
        if TURNS_SLOT not in rule:
            logger.warning("%s: rules[%d] does not state the number of turns (%s)", path, index, TURNS_SLOT)
    return templates


def template_problems(templates: object) -> list[str]:
    """What keeps a parsed prompt file from being used, one phrase each; an empty list if nothing does."""
    if not isinstance(templates, dict):
        return [f"expected an object with {', '.join(Templates.__annotations__)}, got {type(templates).__name__}"]
    problems = [f"unknown key {key!r}" for key in templates if key not in Templates.__annotations__]
    rules = templates.get("rules")
    if not isinstance(rules, list) or len(rules) != NUM_RULES:
        problems.append(f"'rules' must be a list of {NUM_RULES} texts")
    else:
        problems += [
            f"rules[{index}] must be a text that ends in a newline"
            for index, rule in enumerate(rules)
            if not isinstance(rule, str) or not rule.strip() or not rule.endswith("\n")
        ]
    for key in ("attacker_instruction", "defender_instruction"):
        text = templates.get(key)
        if not isinstance(text, str) or not text.endswith("."):
            problems.append(f"{key!r} must be a text that ends in a full stop")
        elif (WORD_SLOT in text) != (key == "attacker_instruction"):
            problems.append(f"{WORD_SLOT} must stand in the attacker's instruction, and only there")
    return problems


@lru_cache(maxsize=1)
def default_templates() -> Templates:
    """The prompts of configs/prompts.json."""
    return load_templates(DEFAULT_TEMPLATES)


def templates_digest(templates: Templates | None = None) -> str:
    """SHA-256 of a set of prompts: equal for equal wording, however the file is laid out."""
    return hashlib.sha256(json.dumps(templates or default_templates(), sort_keys=True).encode()).hexdigest()
