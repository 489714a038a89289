"""Rows: reading and checking them, token ids against recorded ones, batches."""

import json

import pytest
import torch
from conftest import GOLDEN, load_golden
from test_chat import SPECIAL, chat_tokenizer
from transformers import AutoTokenizer

import dataloaders
import utils
from dataloaders import SPAGCollator, encode_example, load_rows

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
    assert batch["weights"].dtype == batch["rewards"].dtype == torch.float32 and "ref_logprobs" not in batch


def test_reference_logprobs_reach_the_batch(tokenizer):
    row = {"query": "q", "target": "t", "role": "defender", "ref_logprob": -1.5}
    batch = SPAGCollator(tokenizer)([encode_example(row, tokenizer)] * 2)
    assert batch["ref_logprobs"].tolist() == [-1.5, -1.5]


def test_roles_of_game_rows_are_numbered_in_the_order_of_their_names(tokenizer, tmp_path):
    rows = [{"query": "q", "target": "t", "role": role} for role in ("seller", "buyer", "")]
    rows.append({"query": "q", "target": "t", "role": "teacher", "type": "sft"})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = load_rows([str(path)], tokenizer)
    assert dataset.role_names == ["buyer", "seller"]
    assert SPAGCollator(tokenizer)(dataset.__getitems__([0, 1, 2, 3]))["roles"].tolist() == [2, 1, 0, 0]
    dataset.number_roles(["answerer", "buyer", "seller"])  # as train.py does with those of evaluation rows
    assert [dataset[index]["role"] for index in range(4)] == [3, 2, 0, 0]


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


def test_raw_alpaca_rows_become_sft_rows(tokenizer):
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    encoded = encode_example(row, tokenizer)
    assert encoded["is_sft"] and encoded["weight"] == encoded["reward"] == 1.0
    target = [i for i in encoded["labels"] if i != -100]
    assert tokenizer.decode(target) == "3</s>"
    assert "Add." in tokenizer.decode(encoded["input_ids"]) and "1 2" in tokenizer.decode(encoded["input_ids"])


ROWS = [
    {"query": "a question", "target": "an answer", "reward": 0.5, "weight": 2.0, "role": "attacker"},
    {"prompt": "say", "answer": "so", "type": "sft"},
    {"query": "nothing", "target": ""},
]


def write_rows(path, rows, lines: bool = True):
    text = "\n".join(map(json.dumps, rows)) + "\n" if lines else json.dumps(rows, indent=1)
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- token ids of play ---------------------------------------------------------------------------------------------


WITH_IDS = {"query": "q", "target": "ab", "target_ids": [97, 98, 99]}  # a reply whose text has other ids


def target_of(row: dict) -> list[int]:
    return [label for label in row["labels"] if label != dataloaders.IGNORE_INDEX]


def test_token_ids_of_the_tokenizer_that_the_record_names_are_the_target(tokenizer, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [*ROWS, WITH_IDS])
    utils.write_json(tmp_path / "rows_rewards_settings.json", {"tokenizer_sha256": "ours"})
    with_ids, *texts = (load_rows([path], tokenizer, tokenizer_sha256=sha256) for sha256 in ("ours", None))
    assert target_of(with_ids[3]) == [97, 98, 99, tokenizer.eos_token_id]
    assert with_ids[3]["input_ids"][:-4] == [
        tokenizer.bos_token_id,
        *tokenizer("q", add_special_tokens=False).input_ids,
    ]
    ab = tokenizer("ab", add_special_tokens=False).input_ids
    assert target_of(texts[0][3]) == [*ab, tokenizer.eos_token_id] and ab != [97, 98, 99]
    assert [with_ids[index] for index in range(3)] == [texts[0][index] for index in range(3)]


@pytest.mark.parametrize("record", [{"tokenizer_sha256": "theirs"}, {}, None])
def test_token_ids_of_another_or_an_unknown_tokenizer_are_refused(tokenizer, tmp_path, record):
    path = write_rows(tmp_path / "rows.jsonl", [*ROWS, WITH_IDS])
    if record is not None:
        utils.write_json(tmp_path / "rows_rewards_settings.json", record)
    with pytest.raises(utils.UserError, match=r"rows\.jsonl:4: 'target_ids' .*--retokenize True"):
        load_rows([path], tokenizer, tokenizer_sha256="ours")
    assert len(load_rows([write_rows(tmp_path / "texts.jsonl", ROWS)], tokenizer, tokenizer_sha256="ours")) == 3


def test_token_ids_in_a_chat_template_end_with_the_token_that_ends_the_text():
    tokenizer = chat_tokenizer("chatml")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    row = WITH_IDS | {"target": "ab<|im_end|>", "chat_template": True}
    assert target_of(encode_example(row, tokenizer)) == [97, 98, 99, end]


# --- conversations -------------------------------------------------------------------------------------------------


TALK = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(["user", "assistant", "user", "assistant"])]


@pytest.mark.parametrize("family", ["chatml", "headers", "turns"])
def test_of_a_conversation_the_last_reply_is_learned_in_the_chat_template(family):
    tokenizer = chat_tokenizer(family)
    encoded = encode_example({"messages": [*TALK, {"role": "user", "content": "unanswered"}]}, tokenizer)
    whole = tokenizer.apply_chat_template(TALK, tokenize=False).rstrip()
    assert tokenizer.decode(encoded["input_ids"]) == whole
    assert tokenizer.decode(target_of(encoded)) == "assistant 3" + SPECIAL[family][-1]
    assert encoded["is_sft"] and encoded["weight"] == 1.0
    texts = {"query": "q", "target": "t", "messages": TALK}  # texts of a row win
    assert not encode_example(texts, tokenizer)["is_sft"]


def test_a_chat_template_that_refuses_a_conversation_is_named():
    with pytest.raises(utils.UserError, match="chat template refuses 'messages' .there is no system role."):
        encode_example({"messages": [{"role": "system", "content": "s"}, *TALK]}, chat_tokenizer("turns"))


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [2, 1000])
@pytest.mark.parametrize("stored", [True, False])
def test_json_and_jsonl_files_mix_and_are_encoded_alike(tmp_path, tokenizer, monkeypatch, at_once, stored):
    monkeypatch.setattr(dataloaders, "ROWS_AT_ONCE", at_once)
    paths = [write_rows(tmp_path / "a.json", ROWS, lines=False), write_rows(tmp_path / "b.jsonl", ROWS)]
    dataset = load_rows(paths, tokenizer, tmp_path / "rows.arrow" if stored else None)
    assert dataset.counts == dataloaders.RowCounts(rows=6, sft_rows=2, truncated=0, dropped=0, negative=0)
    expected = [encode_example(row, tokenizer) for row in ROWS * 2]
    for found, direct in zip(dataset, expected, strict=True):
        assert {name: found[name] for name in direct} == direct
    assert [row["where"] for row in dataset.table][3:] == [f"{paths[1]}:{n}" for n in (1, 2, 3)]
    assert (tmp_path / "rows.arrow").exists() == stored


def test_rows_are_encoded_into_a_file_once_and_whole_or_not_at_all(tmp_path, tokenizer, monkeypatch):
    path, stored = write_rows(tmp_path / "a.jsonl", ROWS), tmp_path / "rows.arrow"
    with monkeypatch.context() as patch:
        patch.setattr(dataloaders, "ROWS_AT_ONCE", 2)
        broken = write_rows(tmp_path / "b.jsonl", [*ROWS, {"query": "q"}])
        with pytest.raises(utils.UserError, match=r"b\.jsonl:4"):
            load_rows([broken], tokenizer, stored)
    assert [path.name for path in tmp_path.iterdir() if "arrow" in path.name] == []
    load_rows([path], tokenizer, stored)
    monkeypatch.setattr(dataloaders, "normalize_row", None)  # encoding again would fail
    assert len(load_rows([path], tokenizer, stored)) == 3


def test_a_row_cut_to_nothing_is_named_or_dropped_and_counted(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "tok", model_max_length=4, truncation_side="right")
    path = write_rows(tmp_path / "a.jsonl", [{"query": "", "target": "x"}, {"query": "long " * 9, "target": "x"}])
    with pytest.raises(utils.UserError, match=r"a\.jsonl:2: .*--drop_unscored_rows"):
        load_rows([path], tokenizer)
    dataset = load_rows([path], tokenizer, drop_unscored=True)
    assert len(dataset) == 1 and dataset.counts == dataloaders.RowCounts(1, 0, truncated=0, dropped=1, negative=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"query": "a"}\n', r"bad\.json:1: 'target' is missing"),
        ('[\n{"query": "a", "target": null}]', r"bad\.json: record 1: 'target' must be a text"),
        ('{"query": "a", "target": "b", "reward": NaN}\n', r"bad\.json:1: 'reward' must be a finite number"),
        ('{"query": "a", "target": "b", "weight": Infinity}\n', r"bad\.json:1: 'weight' must be a finite number"),
        ('{"query": "a", "target": "b", "weight": null}\n', r"bad\.json:1: 'weight' must be a finite number"),
        ('{"query": "a", "target": "b", "weight": "1.0"}\n', r"bad\.json:1: 'weight' must be a finite number"),
        ('{"query": "a", "target": "b", "weight": true}\n', r"bad\.json:1: 'weight' must be a finite number"),
        ('{"instruction": "a"}\n', r"bad\.json:1: 'output' is missing"),
        ('{"instruction": "a", "input": 5, "output": "b"}\n', r"bad\.json:1: 'input' must be a text"),
        ('{"query": "a", "target": "b", "reward": 1e300}\n', r"bad\.json:1: 'reward' must be a finite number"),
        ('{"query": "a", "target": "\\ud800"}\n', r"bad\.json:1: 'target' is not Unicode text"),
        ('{"query": "a", "target": "b", "target_ids": [1, true]}\n', r"bad\.json:1: 'target_ids' must be a list of"),
        ('{"messages": "hello"}\n', r"bad\.json:1: 'messages' must be a list"),
        ('{"messages": [{"role": "user", "content": null}]}\n', r"bad\.json:1: 'messages' must be a list"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', r"bad\.json:1: 'messages' has no assistant message"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', r"bad\.json:1: 'messages' need a chat template"),
        ("[]", r"bad\.json: no rows"),
    ],
)
def test_bad_files_are_errors_that_name_file_and_line(tmp_path, tokenizer, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(utils.UserError, match=message):
        load_rows([str(path)], tokenizer)
