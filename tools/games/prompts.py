"""The prompts of play and training, for any game. Their wording comes from prompt files. No torch.

Histories contain messages only, so no prompt contains an earlier thought, not even the player's own.
"""

import functools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from random import Random
from typing import Any

from tools.common.errors import UserError
from tools.common.files import read_json
from tools.games.game import Game, History

RULES = "rules"  # key in prompt files
MAX_TURNS = "max_turns"  # slot that any of their texts may have
SLOT = re.compile(r"\{(\w+)\}")
NO_HISTORY = "The game is just initialized."  # as released
# Training prompts are drawn from these, in the order of the released code, so that draws agree.
SEPARATORS = ("\n - ", "\n### ", "\n## ", "\n# ", "\n *** ", "\n **", "\n\n")
NAMES = (("Assistant", "Human"), ("Answer", "Question"), ("Response", "Query"), ("A", "Q"))  # for the two roles
CHAT = "chat"
CHAT_INVERSE = "chat_inverse"
ALPACA = "alpaca"
SYSTEM_NAMES = ("Rules", "Game Rule", "System")
# The roles of a chat.
SYSTEM = "system"
USER = "user"
ASSISTANT = "assistant"
ALPACA_CHANCE = 0.2  # probability of each of the alpaca layout's two variations, as released
# Tags that open and close a private thought.
THOUGHT_TAGS = {"<think>": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]"}
ALL_THOUGHT_TAGS = frozenset({*THOUGHT_TAGS, *THOUGHT_TAGS.values()})

Templates = Mapping[str, Any]  # a parsed prompt file: "rules", a list of texts, and a ROLE_instruction for each role


def join_play_prompt(history: History, role: str, rules: str, request: str) -> str:
    """Play's prompt for either role, in the released layout.

    The secret is in the instruction, after the history, so that the prompts of both roles begin alike and our engine
    computes only what a game has added since its last prompt.
    """
    messages = NO_HISTORY
    if history:
        lines = (f"\n  - {message['role']}: {message['content']}" for message in history)
        messages = f"\n### Game History:{''.join(lines)}"
    return f"{rules}{messages}\n\n### Instruction: {request}\n\n### Response:"


def chat_messages(history: History, role: str, rules: str, request: str) -> list[dict[str, str]]:
    """The game as a conversation in which the player in this role is the assistant and the other one the user.

    Rules and instruction form the system message. If roles alternate and secrets stay the same, a role's conversation
    begins with that of its previous turn.
    """
    messages = [{"role": SYSTEM, "content": f"{rules}\n{request}"}]
    if not history or history[0]["role"] == role:
        messages.append({"role": USER, "content": NO_HISTORY})  # many templates require the user to speak first
    for message in history:
        speaker = ASSISTANT if message["role"] == role else USER
        if messages[-1]["role"] == speaker:  # many templates require user and assistant to alternate
            messages[-1]["content"] += f"\n{message['content']}"
        else:
            messages.append({"role": speaker, "content": message["content"]})
    return messages


def play_prompt(
    game: Game,
    history: History,
    task: str,
    max_turns: float,
    templates: Templates | None = None,
    *,
    rng: Random | None = None,
    join: Callable[[History, str, str, str], str] = join_play_prompt,
) -> str:
    """The prompt for the next message, which contains only what its role may know.

    With `rng`, the rule text is drawn. `join` combines history, role, rules and instruction.
    """
    templates = templates or default_templates(game)
    role = game.next_role(task, history)
    rule = rng.randrange(len(templates[RULES])) if rng else 0
    request = instruction(templates, role, game.secrets(role, task, history), max_turns)
    return join(history, role, rule_text(templates, max_turns, rule), request)


def rule_text(templates: Templates, max_turns: float, number: int = 0) -> str:
    """A rule text, which ends in a newline. As released, play uses the first one and training draws one."""
    return _fill(templates[RULES][number], {}, max_turns)


def instruction(templates: Templates, role: str, secrets: Mapping[str, str], max_turns: float) -> str:
    """The role's instruction, with its slots filled."""
    return _fill(templates[f"{role}_instruction"], secrets, max_turns)


def answer(game: Game, task: str, templates: Templates) -> tuple[str, str]:
    """`Game.answer`, whose message the prompt file may replace by `answer`, with {target_word} for the secret."""
    named = game.answer(task)
    if named is None:
        raise ValueError(f"{game.title} has no secret")
    role, message = named
    return role, str(templates.get("answer", message)).replace("{target_word}", task)


def _fill(text: str, secrets: Mapping[str, str], max_turns: float) -> str:
    """Replace each slot {name} by its value, in one pass. Other braces, on which str.format would fail, stay.

    Messages are added to the prompt later, so slots that a player writes are not filled.
    """
    values = {MAX_TURNS: f"{max_turns:g}", **secrets}  # other tools may store 3 as 3.0
    return SLOT.sub(lambda slot: values.get(slot[1], slot[0]), text)


def training_prompt(
    game: Game,
    history: History,
    task: str,
    max_turns: float,
    *,
    rng: Random,
    templates: Templates | None = None,
) -> str:
    """A prompt for training on the next message, in a randomly drawn layout, so that no layout is memorized.

    Although the message was sampled under play's prompt, the importance ratio still starts at 1, because policy and
    reference read the same prompt. All rows share one `rng`, so an additional draw, or another number of rule texts,
    changes the prompts of all later rows.
    """
    templates = templates or default_templates(game)
    role = game.next_role(task, history)
    # Draws are in the order of the released code, so that the same seed gives the same prompt.
    separator = "\n" + rng.choice(SEPARATORS)
    roles = role, game.other(role)
    names = rng.choice((roles, *NAMES))
    layout = rng.choice((CHAT, CHAT_INVERSE, ALPACA))
    system_name = rng.choice(SYSTEM_NAMES)
    rule = rule_text(templates, max_turns, rng.choice(range(len(templates[RULES]))))
    request = instruction(templates, role, game.secrets(role, task, history), max_turns)
    name_of = dict(zip(roles, names, strict=True))
    dialog = "".join(f"{separator}{name_of[message['role']]}: {message['content']}" for message in history)
    start = "" if history else NO_HISTORY + " "
    reply_start = f"{separator}{names[0]}: "
    if layout == ALPACA:
        system = f"{system_name}: " if rng.uniform(0, 1) < ALPACA_CHANCE else ""
        dialog = f"{separator}Game History:{dialog}\n\n" if history else start
        as_prefix = rng.uniform(0, 1) < ALPACA_CHANCE
        request = f"{request.removesuffix('.')}: " if as_prefix else request + reply_start
        return f"{system}{rule}{dialog}{request}"
    system = f"{separator}{system_name}: {rule}\n\n{request}{start}"
    return f"{system}{dialog}{reply_start}" if layout == CHAT else f"{dialog}{system}{reply_start}"


def load_templates(path: str | Path, game: Game) -> Templates:
    """Read a prompt file of this game (format: data/README.md). UserError if it does not fit the game.

    Rule texts must end in a newline, because the history follows directly. Each role needs an instruction with the
    slots of its secrets, and the judge must accept `answer` as a right guess. Unknown fields are ignored.
    """
    templates = read_json(path)
    rules = templates.get(RULES) if isinstance(templates, dict) else None
    if not isinstance(rules, list) or not rules or not all(str(rule).endswith("\n") for rule in rules):
        raise UserError(f"{path}: {RULES!r} must be a list of strings that end in a newline")
    for role in game.roles:
        request = templates.get(f"{role}_instruction")
        if not isinstance(request, str):
            raise UserError(f"{path}: '{role}_instruction' is missing or not a string")
        for slot in game.secrets(role, game.example_task, ()):
            if f"{{{slot}}}" not in request:
                raise UserError(f"{path}: '{role}_instruction' lacks the slot {{{slot}}}")
    if "answer" in templates and game.answer(game.example_task):
        role, message = answer(game, game.example_task, templates)
        opening = {"role": game.roles[0], "content": ""}  # in Taboo the guess is at best the second message
        history = [opening, {"role": role, "content": message}]
        ended = game.decide(game.example_task, history)
        if ended is None or not game.rewards(game.example_task, history, ended).get(role):
            raise UserError(f"{path}: the judge does not accept 'answer' ({message}) as a right guess")
    return templates


def check_special_texts(game: Game, templates: Templates, special: Collection[str]) -> None:
    """UserError if the prompts, or the message that names the secret, contain a tokenizer's special token.

    Special tokens are removed from messages, so with "!" as PAD (token 0 of Llama 3, Qwen and GPT-2) no guess would be
    right.
    """
    texts = [*templates[RULES], *(templates[f"{role}_instruction"] for role in game.roles)]
    if game.answer(game.example_task):
        texts.append(answer(game, game.example_task, templates)[1])
    for token in sorted(set(special) - ALL_THOUGHT_TAGS):
        if any(token in text for text in texts):
            raise UserError(
                f"the game uses {token!r}, a special token of the tokenizer, but special tokens are removed from "
                f"messages; if it is the pad token, set another one in tokenizer_config.json"
            )


@functools.cache
def default_templates(game: Game) -> Templates:
    """The game's own prompt file."""
    return load_templates(game.prompt_file, game)
