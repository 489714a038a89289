import json
import sys

import pytest

from tools import prepare_data, taboo
from utils import run_program

RULES = [f"\nrule {index}: {{max_turns}} turns\n" for index in range(6)] + [
    "no slot here\n",
    "{max_turns}, {max_turns}\n",
]
ATTACK, DEFEND = "Lure with `{target_word}`.", "Defend."
CODE = '''
import a_module_that_is_not_there

raise SystemExit("this file is never run")
GAME_RULE_PROMPTS = RULES
INSTRUCT_PROMPTS = {
    "attacker": """\\n\\n### Instruction: Lure with `{target_word}`.\\n\\n### Response:""",
    "defender": "\\n\\n### Instruction: Defend."
    "\\n\\n### Response:",
}
PLAYER_INSTRUCT_PROMPTS: dict = {"attacker": "Lure with `{target_word}`.", "defender": "Defend."}


def unrelated(GAME_RULE_PROMPTS=None):
    return GAME_RULE_PROMPTS
'''.replace("RULES\n", f"{RULES!r}\n", 1)


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Run `prepare_data prompts` on a file with this code; gives the path of the prompt file."""

    def run(code):
        source, output = tmp_path / "utils.py", tmp_path / "prompts.json"
        if code is not None:
            source.write_text(code)
        flags = ["prompts", "--from_release", str(source), "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *flags])
        run_program(prepare_data.main)
        return output

    return run


def test_the_released_prompts_become_a_prompt_file_word_for_word(convert):
    path = convert(CODE)
    assert json.loads(path.read_text()) == {
        "rules": RULES,
        "attacker_instruction": ATTACK,
        "defender_instruction": DEFEND,
    }


def test_the_prompt_file_plays_as_the_released_literals_say(convert):
    templates = taboo.load_templates(convert(CODE))
    expected = "\nrule 0: 5 turns\nThe game is just initialized.\n\n### Instruction: Lure with `sun`.\n\n### Response:"
    assert taboo.play_prompt([], "sun", 5, templates) == expected


@pytest.mark.parametrize(
    "code, complaint",
    [
        (None, "utils.py: no such file"),
        ("def broken(:\n", "utils.py:1: not Python"),
        ("x = 1\n", "GAME_RULE_PROMPTS, INSTRUCT_PROMPTS, PLAYER_INSTRUCT_PROMPTS is not set"),
        (
            CODE.replace("GAME_RULE_PROMPTS = [", "GAME_RULE_PROMPTS = list() + ["),
            "utils.py:5: GAME_RULE_PROMPTS is computed",
        ),
        (CODE.replace("no slot here\\n", "no newline"), "rules[6] must be a text that ends in a newline"),
        (CODE.replace("GAME_RULE_PROMPTS = [", "GAME_RULE_PROMPTS = 5, ["), "'rules' must be a list of 8 texts"),
        (CODE.replace(": Defend.", ": Beware."), "tell the defender different things"),
        (
            CODE.replace('"defender": "Defend."', '"judge": ""'),
            "PLAYER_INSTRUCT_PROMPTS must be a dictionary with texts",
        ),
    ],
)
def test_what_is_no_release_is_refused_in_one_line(convert, capsys, tmp_path, code, complaint):
    with pytest.raises(SystemExit) as exit_info:
        convert(code)
    lines = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and len(lines) == 1 and complaint in lines[0]
    assert not (tmp_path / "prompts.json").exists()


def test_a_subcommand_is_needed():
    with pytest.raises(SystemExit) as exit_info:
        prepare_data.parse_args([])
    assert exit_info.value.code == 2
