"""Taboo's prompts as the first release words them, read from a checkout of it, for models trained on them."""

import ast
from typing import Any

from tools.games import prompts
from tools.games.taboo import Taboo
from utils import open_text

RULES, PLAY_INSTRUCTIONS, INSTRUCTIONS = "GAME_RULE_PROMPTS", "INSTRUCT_PROMPTS", "PLAYER_INSTRUCT_PROMPTS"


def read_literals(path: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The values of variables that a Python file sets to literals; the file is parsed, never run.

    Raises FileNotFoundError; ValueError for a file that is not Python, lacks one of `names`, or computes its value.
    """
    with open_text(path) as file:
        try:
            statements = ast.parse(file.read()).body
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{path}: not Python ({error})") from None
    values: dict[str, Any] = {}
    for statement in statements:
        match statement:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value) if name in names:
                try:
                    values[name] = ast.literal_eval(value)
                except (ValueError, TypeError):
                    line = statement.lineno
                    raise ValueError(f"{path}:{line}: {name} is computed; only literals are read") from None
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"{path}: {', '.join(missing)} is not set; is this the utils.py of the released code?")
    return values


def release_templates(path: str) -> prompts.Templates:
    """The released prompts as a prompt file of this project.

    Raises ValueError where they do not fit: play and training must word a player's instruction alike.
    """
    game = Taboo()
    literals = read_literals(path, (RULES, PLAY_INSTRUCTIONS, INSTRUCTIONS))
    for name in (PLAY_INSTRUCTIONS, INSTRUCTIONS):
        texts = literals[name]
        if not isinstance(texts, dict) or not all(isinstance(texts.get(role), str) for role in game.roles):
            raise ValueError(f"{path}: {name} must be a dictionary with texts for {' and '.join(game.roles)}")
    for role in game.roles:
        if literals[PLAY_INSTRUCTIONS][role] != prompts.play_request(literals[INSTRUCTIONS][role]):
            raise ValueError(
                f"{path}: {PLAY_INSTRUCTIONS} and {INSTRUCTIONS} tell the {role} different things;"
                " a prompt file has one instruction for both, laid out for play"
            )
    rules = literals[RULES]
    templates = {
        "rules": list(rules) if isinstance(rules, tuple) else rules,
        **{f"{role}_instruction": literals[INSTRUCTIONS][role] for role in game.roles},
    }
    if problems := prompts.template_problems(templates, game):
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return templates
