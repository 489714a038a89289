"""The prompts of play and of training, for any game. Their wording comes from prompt files. No torch."""

import hashlib
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tools.games.game import Game, History
from utils import UserError, read_json

RULES = "rules"  # a key of prompt files
MAX_TURNS = "max_turns"  # a slot that all their texts may have
SLOT = re.compile(r"\{(\w+)\}")
NO_HISTORY = "The game is just initialized."
SEPARATORS = ("\n - ", "\n### ", "\n## ", "\n# ", "\n *** ", "\n **", "\n\n")
NAMES = (("Assistant", "Human"), ("Answer", "Question"), ("Response", "Query"), ("A", "Q"))  # for the two roles
CHAT, CHAT_INVERSE, ALPACA = "chat", "chat_inverse", "alpaca"
SYSTEM_NAMES = ("Rules", "Game Rule", "System")
ALPACA_CHANCE = 0.2  # the chance of each of the two variations of the alpaca layout

Templates = Mapping[str, Any]  # a parsed prompt file: "rules", a list of texts, and ROLE_instruction for each role
_own_files: dict[Path, Templates] = {}


def play_prompt(game: Game, history: History, task: str, max_turns: float, templates: Templates | None = None) -> str:
    """The prompt under which the next message is sampled: rules, messages so far, instruction of the next role.

    Of the task, it holds only what the game lets this role know. `templates` default to the game's prompt file.
    """
    templates = templates or default_templates(game)
    role = game.next_role(task, history)
    told = instruction(templates, role, game.secrets(role, task, history), max_turns)
    return join_play_prompt(rule_text(templates, max_turns), history, told)


def join_play_prompt(rules: str, history: History, told: str) -> str:
    """A play prompt from the rule text, the messages so far, and the player's instruction."""
    said = NO_HISTORY
    if history:
        lines = (f"\n  - {message['role']}: {message['content']}" for message in history)
        said = f"\n### Game History:{''.join(lines)}"
    return f"{rules}{said}\n\n### Instruction: {told}\n\n### Response:"


def rule_text(templates: Templates, max_turns: float, number: int = 0) -> str:
    """One of the rule texts, which ends in a newline. Play uses the first one."""
    return _fill(templates[RULES][number], {MAX_TURNS: str(max_turns)})


def instruction(templates: Templates, role: str, secrets: Mapping[str, str], max_turns: float) -> str:
    """The instruction of this role, its slots filled with the secrets that the role may know."""
    return _fill(templates[f"{role}_instruction"], {MAX_TURNS: str(max_turns), **secrets})


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Replace each slot {name} by its value, in one pass. Other braces stay, also those in values."""
    return SLOT.sub(lambda slot: values.get(slot[1], slot[0]), text)


class Layout(NamedTuple):
    """The random choices behind one training prompt."""

    separator: str
    names: tuple[str, str]  # of the player who is to speak, and of the other one
    kind: str
    system_name: str
    rule: int
    alpaca_system: bool
    alpaca_prefix: bool


def training_prompt(
    game: Game,
    history: History,
    task: str,
    max_turns: float,
    *,
    rng: random.Random,
    templates: Templates | None = None,
) -> str:
    """A prompt for training on the next message, in a layout drawn at random, so that no layout is learned by heart.

    As in the paper's released data, there are five draws by `rng.choice`, and two more by `rng.uniform` for the alpaca
    layout.
    """
    templates = templates or default_templates(game)
    role = game.next_role(task, history)
    layout = draw_layout(game, role, rng, len(templates[RULES]))
    own, other = layout.names
    rule = rule_text(templates, max_turns, layout.rule)
    told = instruction(templates, role, game.secrets(role, task, history), max_turns)
    separator = "\n" + layout.separator
    answer = f"{separator}{own}: "
    names = (own if message["role"] == role else other for message in history)
    said = "".join(f"{separator}{name}: {each['content']}" for name, each in zip(names, history, strict=True))
    start = "" if history else NO_HISTORY + " "
    if layout.kind == ALPACA:
        system = f"{layout.system_name}: " if layout.alpaca_system else ""
        played = start or f"{separator}Game History:{said}\n\n"
        request = f"{told[:-1]}: " if layout.alpaca_prefix else told + answer
        return f"{system}{rule}{played}{request}"
    system = f"{separator}{layout.system_name}: {rule}\n\n{told}{start}"
    return f"{system}{said}{answer}" if layout.kind == CHAT else f"{said}{system}{answer}"


def draw_layout(game: Game, role: str, rng: random.Random, num_rules: int) -> Layout:
    """Draw the layout of a training prompt for this role, and which of `num_rules` rule texts it has."""
    other = game.roles[1 - game.roles.index(role)]
    separator = rng.choice(SEPARATORS)
    names = rng.choice(((role, other), *NAMES))
    kind = rng.choice((CHAT, CHAT_INVERSE, ALPACA))
    system_name = rng.choice(SYSTEM_NAMES)
    rule = rng.choice(range(num_rules))
    alpaca_system = kind == ALPACA and rng.uniform(0, 1) < ALPACA_CHANCE
    alpaca_prefix = kind == ALPACA and rng.uniform(0, 1) < ALPACA_CHANCE
    return Layout(separator, names, kind, system_name, rule, alpaca_system, alpaca_prefix)


def load_templates(path: str | Path, game: Game) -> Templates:
    """Read and check a prompt file of this game (format: data/README.md).

    Raises FileNotFoundError, or UserError with the file's name and everything that is wrong with it.
    """
    templates = read_json(path)
    if problems := _problems(templates, game):
        raise UserError(f"{path}: {'; '.join(problems)}")
    return templates


def default_templates(game: Game) -> Templates:
    """The prompts of the game's own prompt file, read once."""
    if game.prompt_file not in _own_files:
        _own_files[game.prompt_file] = load_templates(game.prompt_file, game)
    return _own_files[game.prompt_file]


def _problems(templates: object, game: Game) -> list[str]:
    """Everything that is wrong with a parsed prompt file, a phrase for each problem."""
    if not isinstance(templates, dict):
        return [f"expected an object, got {type(templates).__name__}"]
    problems, rules = [], templates.get(RULES)
    texts = rules if isinstance(rules, list) else []
    if not texts or not all(isinstance(rule, str) and rule.endswith("\n") for rule in texts):
        problems.append(f"{RULES!r} must be a list of one or more texts, each ending in a newline")
    secrets = {role: set(game.secrets(role, game.example_task, ())) for role in game.roles}
    for role, own in secrets.items():
        key = f"{role}_instruction"
        text = templates.get(key)
        if not isinstance(text, str) or not text.endswith("."):
            problems.append(f"{key!r} must be a text that ends in a full stop")
            continue
        slots, others = set(SLOT.findall(text)), set().union(*secrets.values()) - own
        problems += [f"{{{slot}}} must stand in {key!r}" for slot in sorted(own - slots)]
        problems += [f"{{{slot}}} must not stand in {key!r}" for slot in sorted(slots & others)]
    return problems


def templates_digest(templates: Templates) -> str:
    """SHA-256 of the texts of a prompt file, whatever the file's layout."""
    return hashlib.sha256(json.dumps(templates, sort_keys=True).encode()).hexdigest()
