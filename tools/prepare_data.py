"""Make the files that play and training start from.

    python -m tools.prepare_data prompts --from_release SPAG/utils.py --output configs/release_prompts.json

`prompts` takes the wording of all prompts out of a checkout of the released code, for models that were trained on it.
"""

import argparse
import ast
import json
from pathlib import Path

from tools import taboo
from utils import open_text, run_program, write_json

RULES, PLAY_INSTRUCTIONS, INSTRUCTIONS = "GAME_RULE_PROMPTS", "INSTRUCT_PROMPTS", "PLAYER_INSTRUCT_PROMPTS"


def read_literals(path: str, names: tuple[str, ...]) -> dict[str, object]:
    """The values of variables that a Python file sets to literals; the file is parsed, never run.

    Raises FileNotFoundError; ValueError for a file that is not Python, lacks one of `names`, or computes its value.
    """
    with open_text(path) as file:
        try:
            module = ast.parse(file.read())
        except SyntaxError as error:
            raise ValueError(f"{path}:{error.lineno}: not Python ({error.msg})") from None
        except ValueError as error:
            raise ValueError(f"{path}: not Python ({error})") from None
    values: dict[str, object] = {}
    for statement in module.body:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for name in {target.id for target in targets if isinstance(target, ast.Name)} & set(names):
            try:
                values[name] = ast.literal_eval(statement.value)
            except (ValueError, TypeError):
                raise ValueError(f"{path}:{statement.lineno}: {name} is computed; only literals are read") from None
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"{path}: {', '.join(missing)} is not set; is this the utils.py of the released code?")
    return values


def release_templates(path: str) -> taboo.Templates:
    """The released prompts as a prompt file of this project.

    Raises ValueError where they do not fit: play and training must word a player's instruction alike.
    """
    literals = read_literals(path, (RULES, PLAY_INSTRUCTIONS, INSTRUCTIONS))
    for name in (PLAY_INSTRUCTIONS, INSTRUCTIONS):
        texts = literals[name]
        if not isinstance(texts, dict) or not all(isinstance(texts.get(role), str) for role in taboo.ROLES):
            raise ValueError(f"{path}: {name} must be a dictionary with texts for {' and '.join(taboo.ROLES)}")
    for role in taboo.ROLES:
        if literals[PLAY_INSTRUCTIONS][role] != taboo.play_request(literals[INSTRUCTIONS][role]):
            raise ValueError(
                f"{path}: {PLAY_INSTRUCTIONS} and {INSTRUCTIONS} tell the {role} different things;"
                " a prompt file has one instruction for both, laid out for play"
            )
    rules = literals[RULES]
    templates = {
        "rules": list(rules) if isinstance(rules, (list, tuple)) else rules,
        "attacker_instruction": literals[INSTRUCTIONS][taboo.ATTACKER],
        "defender_instruction": literals[INSTRUCTIONS][taboo.DEFENDER],
    }
    if problems := taboo.template_problems(templates):
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return templates


def prepare_prompts(args: argparse.Namespace) -> None:
    """The subcommand `prompts`. Raises ValueError for an output that is the input."""
    if Path(args.output).resolve() == Path(args.from_release).resolve():
        raise ValueError(f"{args.output}: is the released code; write to another file")
    templates = release_templates(args.from_release)
    write_json(args.output, templates)
    print(json.dumps({"output": args.output, "templates_sha256": taboo.templates_digest(templates)}))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make the files that play and training start from.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    prompts = commands.add_parser("prompts", help="make a prompt file out of the released code", allow_abbrev=False)
    prompts.add_argument("--from_release", required=True, metavar="FILE", help="utils.py of the released code")
    prompts.add_argument("--output", required=True, metavar="FILE", help="prompt file to write")
    prompts.set_defaults(run=prepare_prompts)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    args.run(args)


if __name__ == "__main__":
    run_program(main)
