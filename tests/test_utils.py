"""Files that every program reads and writes: records, word lists, whole writes, digests of models, errors."""

import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ENVIRONMENT, call
from scripted import messages

from tools.common.errors import UserError, user_errors
from tools.common.files import read_json_or_jsonl, read_words, replacing, write_json, write_records, write_words
from tools.common.models import make_weights_readable, model_setting
from tools.common.rowformats import alpaca_to_row, read_row
from tools.games.taboo import Taboo

RECORDS = [{"query": "a", "n": [1, {"b": 2}]}, {"query": "’é\u2028\u0085"}, {}, {"query": "}, {\ud83d"}]
LINES = [json.dumps(record, ensure_ascii=False) for record in RECORDS]


@pytest.mark.parametrize("text", ["[\n" + ",\n".join(LINES) + "\n]\n", "\n" + "\n\n".join(LINES), json.dumps(RECORDS),
                                  "\ufeff\n" + json.dumps(RECORDS, indent=1).replace("\n", "\r\n")])  # fmt: skip
def test_records_are_read_however_the_file_is_laid_out(tmp_path, text):
    (tmp_path / "records").write_bytes(text.encode(errors="backslashreplace"))
    assert read_json_or_jsonl(tmp_path / "records") == RECORDS


@pytest.mark.parametrize("name", ["records.json", "records.jsonl", "records.json.gz", "records.jsonl.gz"])
def test_records_are_read_as_they_were_written(tmp_path, name):
    write_records(tmp_path / name, RECORDS)
    assert read_json_or_jsonl(tmp_path / name) == RECORDS
    written = (tmp_path / name).read_bytes()
    text = gzip.decompress(written) if name.endswith(".gz") else written
    assert len(text.strip(b"[]\n").split(b"\n")) == len(RECORDS)
    assert text.startswith(b"[") == (".jsonl" not in name)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"a": 1}\nnot json\n{"a": 1}\n', ":2: not JSON"),
        ('[\n{"a": 1},\n{"b"', ": not JSON .*line 3"),
        ("", ": the file is empty"),
        ("[]".encode("utf-16"), ": not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "records"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=f"{re.escape(str(path))}{message}"):
        read_json_or_jsonl(path)


def test_words_lose_blanks_and_invisible_characters_at_their_ends(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\ufeffcat\r\n\n\ufeffcloud\n dog\u00ad \u200b\nice cream\nÉtat\n\u200b\n", encoding="utf-8")
    assert read_words(path) == ["cat", "cloud", "dog", "ice cream", "État"]


def test_a_decomposed_word_of_a_list_is_the_one_that_players_write(tmp_path):
    write_words(tmp_path / "words.txt", ["cafe\u0301", "\u1112\u1161\u11ab"])
    for word, written in zip(read_words(tmp_path / "words.txt"), ["caf\u00e9", "\ud55c"], strict=True):
        game = messages(Taboo(), "A hint.", f"I know the word! It is `{written}`!")
        assert Taboo().judge(game, word, 3).outcome == "defender wins"
        assert Taboo().judge(messages(Taboo(), f"Say {written}."), word, 3).outcome == "attacker breaks the rules"


INVISIBLE = (0x200B, 0x2060, 0xFEFF, 0xAD, 0x200E, 0x200F, 0x202E, 0x2066)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cat\n\ndog\n", ":3: no dogs"),
        ("\n\n", ": no words"),
        *((f"cat\n te{chr(code)}st\n", rf":2: character 4 .*U\+{code:04X}") for code in INVISIBLE),
    ],
)
def test_a_word_that_cannot_be_played_is_named_by_its_line(tmp_path, text, message):
    def check(word):
        if word == "dog":
            raise ValueError("no dogs")

    (tmp_path / "words.txt").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=rf"words\.txt{message}"):
        read_words(tmp_path / "words.txt", check)


def test_joiners_belong_to_words_of_some_languages(tmp_path):
    words = ["می\u200cخواهم", "क्\u200dष", "👩\u200d🚀"]
    write_words(tmp_path / "words.txt", words)
    assert read_words(tmp_path / "words.txt") == words


def test_json_that_is_written_has_null_for_numbers_that_are_not_finite(tmp_path):
    values = {"é": [1.5, 3, (math.nan,)], "more": {"a": math.inf, "b": [-math.inf, None, "NaN"]}}
    write_json(tmp_path / "file.json", values)
    expected = {"é": [1.5, 3, [None]], "more": {"a": None, "b": [None, None, "NaN"]}}
    assert (tmp_path / "file.json").read_text() == json.dumps(expected, ensure_ascii=False, indent=2) + "\n"


def test_readers_see_the_old_file_or_the_whole_new_one(tmp_path):
    path = tmp_path / "folder" / "file"
    with replacing(path) as file:
        file.write(b"old")
        file.flush()
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_text() == "old" and [each.name for each in path.parent.iterdir()] == ["file"]


def test_alpaca_becomes_a_prompt():
    row = read_row({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert row["query"] == "### Instruction: Add.\n\n### Input: 1 2\n\n### Response: "
    assert row["target"] == "3" and row["type"] == "sft"
    row = alpaca_to_row({"instruction": "Hi.", "output": "Hi!"})
    assert row["prompt"] == "### Instruction: Hi.\n\n### Response: "
    assert row == alpaca_to_row({"instruction": "Hi.", "input": None, "output": "Hi!"})


def test_a_models_digest_covers_every_file_that_may_change_it(tiny_model, tmp_path):
    def digest() -> str:
        return model_setting(str(folder))["sha256"]

    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    digests = [digest()]
    for record in ("README.md", "settings.json", "complete", "trainer_state.json", ".settings.lock"):
        (folder / record).write_text("x")
    assert digest() == digests[0]
    for name in "tekken.json tiktoken.model spiece.model added_tokens.json vocab.json merges.txt modeling.py".split():
        for content in ("1", "2"):
            (folder / name).write_text(content)
            digests.append(digest())
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert len({*digests, digest()}) == 16


def test_a_digest_sees_one_changed_byte_of_large_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    digests = set()
    for place in (None, 3, 5_000_001, 39_345_678):
        with open(tmp_path / "model.safetensors", "wb") as file:
            file.truncate(40 << 20)
            if place:
                file.seek(place)
                file.write(b"x")
        digests.add(model_setting(str(tmp_path))["sha256"])
    assert len(digests) == 4


def test_others_may_read_weights_if_they_may_read_a_new_file(tmp_path):
    for mask in (0o022, 0o077):
        before = os.umask(mask)
        (tmp_path / f"new{mask}").touch()
        (tmp_path / "model.safetensors").touch(mode=0o600)
        make_weights_readable(tmp_path)
        os.umask(before)
        assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / f"new{mask}").stat().st_mode


def test_an_error_of_the_user_is_one_line_and_a_bug_keeps_its_traceback():
    def raise_(error: Exception):
        raise error

    called = call(lambda: raise_(UserError("mend \x1b[2J\tthis")), status=2)
    assert called.errors == "test_utils: error: mend \ufffd[2J\tthis\n"
    call(lambda: open("no/such/file"), status=2)
    with pytest.raises(KeyError):
        call(lambda: raise_(KeyError("key")))


def test_ctrl_c_is_one_line_that_says_what_the_same_command_does():
    def interrupted():
        raise KeyboardInterrupt

    called = call(interrupted, status=130)
    assert called.errors.splitlines()[-1] == "test_utils: stopped; nothing is half done; rerun the same command"


def test_output_that_cannot_be_encoded_is_replaced():
    code = "from tools.common.programs import run_program; run_program(lambda: print('n\u00e9'))"
    shown = subprocess.check_output([sys.executable, "-c", code], env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"})
    assert shown == b"n?\n"


def test_errors_of_a_library_that_reads_what_a_person_gave_become_one_line():
    refused = pytest.raises(UserError, match="^folder: no such type$")
    with refused as raised, user_errors("folder", ValueError):
        raise ValueError("no such type\nmore words")
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(UserError, match="^of its own$"), user_errors("x", ValueError):
        raise UserError("of its own")


def test_an_import_error_is_told_if_a_library_names_a_package_and_keeps_its_traceback_inside_one():
    with pytest.raises(UserError, match="^x: install y$"), user_errors("x", ImportError):
        raise ImportError("install y")
    for code in ("import no_such_package", "from json import no_such_name"):
        with pytest.raises(ImportError), user_errors("x", ImportError):
            exec(code)
