"""Files that every program reads and writes: records, word lists, whole writes, digests of models, errors."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ENVIRONMENT

import utils

RECORDS = [{"query": "a", "n": [1, {"b": 2}]}, {"query": "’é\u2028\u0085"}, {}, {"query": "}, {\ud83d"}]
LINES = [json.dumps(record, ensure_ascii=False) for record in RECORDS]


@pytest.mark.parametrize("text", ["[\n" + ",\n".join(LINES) + "\n]\n", "\n" + "\n\n".join(LINES), json.dumps(RECORDS),
                                  "\ufeff\n" + json.dumps(RECORDS, indent=1).replace("\n", "\r\n")])  # fmt: skip
def test_records_are_read_however_the_file_is_laid_out(tmp_path, text):
    (tmp_path / "records").write_bytes(text.encode(errors="backslashreplace"))
    assert utils.read_json_or_jsonl(tmp_path / "records") == RECORDS


@pytest.mark.parametrize("name", ["records.json", "records.jsonl"])
def test_records_are_read_as_they_were_written(tmp_path, name):
    utils.write_records(tmp_path / name, RECORDS)
    assert utils.read_json_or_jsonl(tmp_path / name) == RECORDS
    assert len((tmp_path / name).read_bytes().strip(b"[]\n").split(b"\n")) == len(RECORDS)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"a": 1}\nnot json\n{"a": 1}\n', ":2: not JSON"),
        ('[\n{"a": 1},\n{"b"', ": not JSON .*line 3"),
        ("", ": the file is empty"),
        ("[]", ": the file is empty"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", ":1: a Git LFS pointer"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "records"
    path.write_text(text)
    with pytest.raises(utils.UserError, match=f"{re.escape(str(path))}{message}"):
        utils.read_json_or_jsonl(path)


def test_words_lose_blanks_and_invisible_characters_at_their_ends(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\ufeffcat\r\n\n\ufeffcloud\n dog\u00ad \u200b\nice cream\nÉtat\n\u200b\n", encoding="utf-8")
    assert utils.read_words(path) == ["cat", "cloud", "dog", "ice cream", "État"]


@pytest.mark.parametrize("word", ["clo\u00adud", "clo\u200bud", "ice\ufeffcream"])
def test_a_word_with_an_invisible_character_inside_is_refused_by_its_line(tmp_path, word):
    path = tmp_path / "words.txt"
    path.write_text(f"cat\n{word}\n", encoding="utf-8")
    with pytest.raises(utils.UserError, match=rf"words\.txt:2: .*U\+{ord(word[3]):04X}"):
        utils.read_words(path)


def test_a_word_that_the_game_refuses_is_named_by_its_line(tmp_path):
    def check(word):
        if word == "dog":
            raise ValueError("no dogs")

    (tmp_path / "words.txt").write_text("cat\n\ndog\n")
    with pytest.raises(utils.UserError, match=r"words\.txt:3: no dogs"):
        utils.read_words(tmp_path / "words.txt", check)
    (tmp_path / "words.txt").write_text("\n\n")
    with pytest.raises(utils.UserError, match="no words"):
        utils.read_words(tmp_path / "words.txt")


def test_readers_see_the_old_file_or_the_whole_new_one(tmp_path):
    path = tmp_path / "folder" / "file"
    with utils.replacing(path) as file:
        file.write("old")
        file.flush()
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), utils.replacing(path) as file:
        file.write("new")
        raise ZeroDivisionError
    assert path.read_text() == "old" and [each.name for each in path.parent.iterdir()] == ["file"]
    with utils.replacing(path, "wb") as file:
        file.write(b"\xff")
    assert path.read_bytes() == b"\xff"


def test_null_is_an_absent_field_and_alpaca_becomes_a_prompt():
    row = {"prompt": "p", "target": "t"}
    assert utils.row_texts(row | {"query": None, "reward": None}) == ("p", "t", row)
    query, target, row = utils.row_texts({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert query == "### Instruction: Add.\n\n### Input: 1 2\n\n### Response: "
    assert target == "3" and row["type"] == "sft"
    row = utils.alpaca_to_row({"instruction": "Hi.", "output": "Hi!"})
    assert row["prompt"] == "### Instruction: Hi.\n\n### Response: "
    with pytest.raises(utils.UserError, match="'query' and 'target'"):
        utils.row_texts({"query": "q", "target": None})


def test_half_a_surrogate_pair_is_replaced_and_whole_ones_are_joined():
    assert utils.whole_characters("a\ud83db \ud83d\ude00 é") == "a\ufffdb \U0001f600 é"


@pytest.mark.parametrize(
    "name", "tekken.json tiktoken.model spiece.model added_tokens.json vocab.json merges.txt modeling.py".split()
)
def test_a_models_digest_covers_every_file_that_may_change_it(tiny_model, tmp_path, name):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    before = utils.model_setting(str(folder))["sha256"]
    for record in ("README.md", "settings.json", "complete", "trainer_state.json", ".settings.lock"):
        (folder / record).write_text("x")
    assert utils.model_setting(str(folder))["sha256"] == before
    (folder / name).write_text("1")
    one = utils.model_setting(str(folder))["sha256"]
    (folder / name).write_text("2")
    assert len({before, one, utils.model_setting(str(folder))["sha256"]}) == 3


def test_a_models_digest_changes_with_its_weights(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    before = utils.model_setting(str(folder))["sha256"]
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert utils.model_setting(str(folder))["sha256"] != before


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(utils.UserError, match="no config.json; this is not a model folder"):
        utils.model_folder(str(tmp_path))
    (tmp_path / "merged").mkdir()
    utils.model_folder.cache_clear()
    with pytest.raises(utils.UserError, match="use .*merged"):
        utils.model_folder(str(tmp_path))
    with pytest.raises(utils.UserError, match="no/such: no such folder"):
        utils.model_folder("no/such")


def test_an_error_of_the_user_is_one_line_and_a_bug_keeps_its_traceback():
    def end(statement, **environment):
        code = f"import utils\ndef main():\n    {statement}\nutils.run_program(main)"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=ENVIRONMENT | environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert end("raise utils.UserError('mend \\x1b[2Jthis')") == (2, "", "-c: error: mend \ufffd[2Jthis\n")
    assert end("open('no/such/file')")[0] == 2
    status, _, errors = end("{}['key']")
    assert status == 1 and "KeyError" in errors
    assert end("print('né')", PYTHONIOENCODING="ascii")[:2] == (0, "n?\n")


def test_a_missing_optional_package_is_named_with_its_command():
    with pytest.raises(utils.UserError, match=r"no_such is missing: pip install 'no_such>=1,<2'"):
        utils.require("no_such", "no_such>=1,<2")
    utils.require("json", "json")


def test_utils_changes_nothing_on_import_and_brings_no_torch():
    code = "import sys, utils; print('torch' in sys.modules, sys.excepthook is sys.__excepthook__)"
    assert subprocess.check_output([sys.executable, "-c", code], env=ENVIRONMENT, text=True) == "False True\n"
    assert os.environ.get("RANK") is None
