"""Taboo's prompts as the first release words them, read from a checkout of it, for models trained on them."""

import ast
from typing import Any

from tools.games import prompts
from tools.games.taboo import Taboo
from utils import open_text

RULES, PLAY_INSTRUCTIONS, INSTRUCTIONS = NAMES = "GAME_RULE_PROMPTS", "INSTRUCT_PROMPTS", "PLAYER_INSTRUCT_PROMPTS"


def release_templates(path: str) -> prompts.Templates:
    """The released prompts, three literals of a Python file that is parsed, never run, as a prompt file.

    Raises FileNotFoundError; ValueError for a file without them, and where they do not fit: play and training must
    word a player's instruction alike.
    """
    game, values = Taboo(), dict[str, Any]()
    with open_text(path) as file:
        text = file.read()
    try:
        for statement in ast.parse(text).body:
            match statement:
                case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value) if name in NAMES:
                    values[name] = ast.literal_eval(value)
        played, trained = values[PLAY_INSTRUCTIONS], values[INSTRUCTIONS]
        templates = {"rules": list(values[RULES]), **{f"{role}_instruction": trained[role] for role in game.roles}}
        alike = all(played[role] == prompts.play_request(trained[role]) for role in game.roles)
    except (SyntaxError, ValueError, TypeError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: not the utils.py of the released code ({problem})") from None
    problems = prompts.template_problems(templates, game)
    if not alike:
        problems.append(f"{PLAY_INSTRUCTIONS} and {INSTRUCTIONS} tell a player different things; there is one text")
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return templates
