"""Rows: reading and checking them, token ids against recorded ones, batches."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, load_golden
from transformers import AutoTokenizer

import dataloaders
import utils
from dataloaders import RowDataset, SPAGCollator, encode_example, load_rows

RECORDED = load_golden("collator.json")
LEGACY = {40}  # rows with `text` and `scores` are not carried over (README, Deviations)


def golden_tokenizer(case: dict):
    return AutoTokenizer.from_pretrained(
        GOLDEN / "tok",
        padding_side=case["padding_side"],
        truncation_side=case["truncation_side"],
        model_max_length=case["max_length"],
        pad_token=case["pad_token"],
    )


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["id"])
def test_batches_equal_the_recorded_ones(case):
    tokenizer = golden_tokenizer(case)
    kept = [row for row, item in enumerate(case["item_ids"]) if item not in LEGACY]
    items = [RECORDED["items"][case["item_ids"][row]]["item"] for row in kept]
    batch = SPAGCollator(tokenizer)([encode_example(item, tokenizer) for item in items])
    for name in ("input_ids", "labels", "attention_mask", "weights", "rewards", "sft_mask"):
        assert batch[name].tolist() == [case[name][row] for row in kept], name


def test_the_collator_pads_ids_labels_and_mask_on_the_right(tokenizer):
    a, b = 4 + 33, 4 + 34  # ids of two printable bytes
    examples = [
        {"input_ids": [1, a, b, 2], "labels": [-100, -100, b, 2], "weight": 0.5, "reward": 0.25, "is_sft": False},
        {"input_ids": [1, 2], "labels": [-100, 2], "weight": 1.0, "reward": 1.0, "is_sft": True},
    ]
    batch = SPAGCollator(tokenizer)(examples)
    assert batch["input_ids"].tolist() == [
        [1, a, b, 2],  # BOS, query, target, EOS
        [1, 2, 3, 3],  # BOS, EOS of an empty target, PAD, PAD
    ]
    assert batch["labels"].tolist() == [[-100, -100, b, 2], [-100, 2, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["sft_mask"].tolist() == [0.0, 1.0]
    assert batch["weights"].dtype == batch["rewards"].dtype == torch.float32
    assert "ref_logprobs" not in batch


def test_reference_logprobs_reach_the_batch(tokenizer):
    row = {"query": "q", "target": "t", "role": "defender", "ref_logprob": -1.5}
    batch = SPAGCollator(tokenizer)([encode_example(row, tokenizer)] * 2)
    assert batch["ref_logprobs"].tolist() == [-1.5, -1.5]


def test_roles_of_game_rows_are_numbered_in_the_order_of_their_names(tokenizer, tmp_path):
    rows = [{"query": "q", "target": "t", "role": role} for role in ("seller", "buyer", "")]
    rows.append({"query": "q", "target": "t", "role": "teacher", "type": "sft"})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = RowDataset(*load_rows([str(path)], tokenizer, str(tmp_path)))
    assert dataset.role_names == ["buyer", "seller"]
    assert SPAGCollator(tokenizer)(dataset.__getitems__([0, 1, 2, 3]))["roles"].tolist() == [2, 1, 0, 0]
    dataset.number_roles(["answerer", "buyer", "seller"])  # as train.py does with those of evaluation rows
    assert [dataset[index]["role"] for index in range(4)] == [3, 2, 0, 0]


def test_an_empty_batch_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="no rows"):
        SPAGCollator(tokenizer)([])


def test_a_tokenizer_without_bos_gets_none_and_without_eos_is_refused():
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "tok", bos_token=None)
    tokenizer.bos_token = None
    assert encode_example({"query": "", "target": ""}, tokenizer)["input_ids"] == [tokenizer.eos_token_id]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no EOS"):
        encode_example({"query": "", "target": ""}, tokenizer)


@pytest.mark.parametrize("case", RECORDED["errors"][1:], ids=lambda case: case["note"])
def test_rows_that_stopped_the_release_are_errors_here(case, tokenizer):
    with pytest.raises(ValueError, match="query|target|weight|reward"):
        encode_example(case["batch"][0], tokenizer)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1.0", True])
def test_a_weight_that_is_no_finite_number_is_refused(value, tokenizer):
    with pytest.raises(ValueError, match="'weight' must be a finite number"):
        encode_example({"query": "q", "target": "t", "weight": value}, tokenizer)


def test_raw_alpaca_rows_become_sft_rows(tokenizer):
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    encoded = encode_example(row, tokenizer)
    assert encoded["is_sft"] and encoded["weight"] == encoded["reward"] == 1.0
    target = [i for i in encoded["labels"] if i != -100]
    assert tokenizer.decode(target) == "3</s>"
    assert "Add." in tokenizer.decode(encoded["input_ids"]) and "1 2" in tokenizer.decode(encoded["input_ids"])


# --- files ---------------------------------------------------------------------------------------------------------

ROWS = [
    {"query": "a question", "target": "an answer", "reward": 0.5, "weight": 2.0, "role": "attacker"},
    {"prompt": "say", "answer": "so", "type": "sft"},
    {"query": "nothing", "target": ""},
]


def write_rows(path, rows, lines: bool):
    text = "\n".join(map(json.dumps, rows)) + "\n" if lines else json.dumps(rows, indent=1)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_json_and_jsonl_files_mix_and_are_encoded_alike(tmp_path, tokenizer):
    paths = [write_rows(tmp_path / "a.json", ROWS, False), write_rows(tmp_path / "b.jsonl", ROWS, True)]
    encoded, counts = load_rows(paths, tokenizer, str(tmp_path / "cache"))
    expected = {"rows": 6, "sft_rows": 2, "empty_targets": 2}
    expected |= dict.fromkeys(("truncated", "long_targets", "mostly_cut", "dropped"), 0)
    assert counts == dataloaders.RowCounts(**expected)
    expected = [encode_example(row, tokenizer) for row in ROWS * 2]
    for stored, direct in zip(RowDataset(encoded, counts), expected, strict=True):
        assert {name: stored[name] for name in direct} == direct
    assert [row["where"] for row in encoded][3:] == [f"{paths[1]}:{n}" for n in (1, 2, 3)]


def test_rows_of_several_batches_keep_their_order(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(dataloaders, "ROWS_AT_ONCE", 20)
    path = write_rows(tmp_path / "a.jsonl", [{"query": str(i), "target": "t"} for i in range(50)], lines=True)
    encoded, counts = load_rows([path], tokenizer, str(tmp_path / "cache"))
    assert counts.rows == 50
    assert [tokenizer.decode(row["input_ids"]) for row in encoded] == [f"<s>{i}t</s>" for i in range(50)]


def test_encoding_is_done_once_for_the_same_rows_and_settings(tmp_path, tokenizer, monkeypatch):
    paths, cache = [write_rows(tmp_path / "a.json", ROWS, False)], str(tmp_path / "cache")
    load_rows(paths, tokenizer, cache)
    monkeypatch.setattr(dataloaders, "normalize_row", None)  # whoever encodes again fails
    encoded, _ = load_rows(paths, tokenizer, cache)
    assert len(encoded) == 3
    shorter = AutoTokenizer.from_pretrained(GOLDEN / "tok", model_max_length=5)
    with pytest.raises(TypeError):
        load_rows(paths, shorter, cache)


def test_what_a_killed_run_has_half_encoded_is_replaced(tmp_path, tokenizer):
    paths = [write_rows(tmp_path / "a.json", ROWS, lines=False)]
    folder = Path(load_rows(paths, tokenizer, str(tmp_path / "cache"))[0].cache_files[0]["filename"]).parent
    half = folder.rename(f"{folder}.incomplete")
    for path in half.iterdir():
        path.write_bytes(b"half")
    encoded, _ = load_rows(paths, tokenizer, str(tmp_path / "cache"))
    assert len(encoded) == 3 and not half.exists()


def test_a_row_cut_to_nothing_is_named_or_dropped_and_counted(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "tok", model_max_length=4, truncation_side="right")
    path = write_rows(
        tmp_path / "a.jsonl", [{"query": "", "target": "x"}, {"query": "long " * 9, "target": "x"}], True
    )
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*--drop_unscored_rows"):
        load_rows([path], tokenizer, str(tmp_path / "cache"))
    encoded, counts = load_rows([path], tokenizer, str(tmp_path / "cache"), drop_unscored=True)
    assert len(encoded) == 1 and counts == dataloaders.RowCounts(1, 0, 0, 0, 0, mostly_cut=1, dropped=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('[{"query": "a", "target": "b"}, {"query": "c", "tar', r"bad\.json:1: .*cut off"),
        ('[{"query": "a", "target": "b"}', r"bad\.json:1: .*cut off"),
        ('{"query": "a", "target": "b"}\nnot json\n', r"bad\.json:2: not a JSON object"),
        ('{"query": "a", "target": "b"}\n[1]\n', r"bad\.json:2: expected a JSON object"),
        ('{"query": "a"}\n', r"bad\.json:1: 'target' is missing"),
        ('[\n{"query": "a", "target": null}]', r"bad\.json:2: 'target' must be a text"),
        ('{"query": "a", "target": "b", "reward": NaN}\n', r"bad\.json:1: 'reward' must be a finite number"),
        ('{"instruction": "a"}\n', r"bad\.json:1: 'output' is missing"),
        ('{"instruction": "a", "input": 5, "output": "b"}\n', r"bad\.json:1: 'input' must be a text"),
        ('{"query": "a", "target": "b", "reward": 1e300}\n', r"bad\.json:1: 'reward' must be a finite number"),
        ('{"query": "a", "target": "b", "reward": 1' + "0" * 400 + "}\n", r"bad\.json:1: 'reward' must be a finite"),
        ('{"query": "a", "target": 1' + "0" * 5000 + "}\n", r"bad\.json:1: JSON that Python does not read"),
        ("{" + '"a": [' * 1 + "[" * 100_000, r"bad\.json:1: "),
        ('{"query": "a", "target": "\\ud800"}\n', r"bad\.json:1: 'target' is no Unicode text"),
        ('[{"query": "a", "target": "b"}]\n[{}]', r"bad\.json:2: '\[' after the end of the JSON list"),
        ("[]", r"bad\.json: no rows"),
    ],
)
def test_bad_files_are_errors_that_name_file_and_line(tmp_path, tokenizer, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_rows([str(path)], tokenizer, str(tmp_path / "cache"))


def test_a_missing_file_is_named(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match="nowhere.json"):
        load_rows([str(tmp_path / "nowhere.json")], tokenizer, str(tmp_path / "cache"))


RECORDS = [{"query": "a", "n": [1, {"b": 2}]}, {"query": "’é\u2028"}, {}, {"query": "}, {"}]


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda records: "[\n" + ",\n".join(map(utils.to_json, records)) + "\n]\n",  # as write_records
        lambda records: json.dumps(records),
        lambda records: "\ufeff\n" + json.dumps(records, indent=1).replace("\n", "\r\n"),
        lambda records: "[" + "\n,".join(map(json.dumps, records)) + "]",
        lambda records: "[\n" + ",\n".join(map(json.dumps, records[:2])) + ",\n\n " + json.dumps(records[2:])[1:],
        lambda records: "\n" + "\n\n".join(map(utils.to_json, records)),
    ],
)
def test_records_are_read_with_their_lines_however_the_file_is_laid_out(tmp_path, lay_out):
    path = tmp_path / "records"
    path.write_bytes(lay_out(RECORDS).encode())
    read = list(utils.iter_records(path))
    assert [record for _, record in read] == RECORDS
    lines = path.read_text("utf-8-sig").split("\n")
    for where, record in read:
        line = lines[int(where.rsplit(":", 1)[1]) - 1]
        assert line.strip().lstrip("[,").startswith("{"), (where, record)


@pytest.mark.parametrize(
    ("text", "read", "message"),
    [
        ('[\n{"a": 1},\n{"b"', 1, ":3: not a JSON object, or the file was cut off"),
        ('[\n{"a": 1},\n', 1, ":3: the JSON list has no end"),
        ('[\n{"a": 1}\n{"b": 2}\n]', 1, ":3: expected ',' or ']', found '{'"),
        ('[\n{"a": 1},\n5]', 1, ":3: expected a JSON object, got int"),
        ('[\n{"a": 1},\n{"b": "\udcff"},\n{}]', 1, ":3: not UTF-8"),
        ('[\n{"a": 1},\n]', 1, ":3: not a JSON object"),
        ('[]\n{"a": 1}', 0, ":2: '{' after the end"),
        ('{"a": 1} {}\n', 0, ":1: '{}' after the JSON object"),
        ('{"a": 1}\n{"b": "\udcff"}', 1, ":2: not UTF-8"),
        ('{"a": ' * 100_000, 0, ":1: JSON that Python does not read"),
        ('[{"a": ' * 100_000, 0, ":1: JSON that Python does not read"),
    ],
)
def test_faults_of_a_file_are_named_by_line_and_skipped_on_request(tmp_path, text, read, message):
    path = tmp_path / "records"
    path.write_bytes(text.encode(errors="surrogateescape"))
    records = utils.iter_records(path)
    for _ in range(read):
        next(records)
    with pytest.raises(utils.BadRecordError) as caught:
        next(records)
    assert str(caught.value).startswith(f"{path}{message}")
    skipped = []
    assert len(list(utils.iter_records(path, on_skip=skipped.append))) == read
    assert skipped and skipped[0].startswith(f"{path}{message}")
