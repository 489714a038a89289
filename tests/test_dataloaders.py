"""Rows: reading and checking them, token ids against recorded ones, batches."""

import gzip
import json
import math
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from conftest import GOLDEN, build_tokenizer, load_golden
from datasets import Dataset
from helpers import contents, write_rows
from transformers import AutoTokenizer

import dataloaders
from dataloaders import SPAGCollator, encode_example, load_rows
from tools.common.errors import UserError
from tools.common.files import data_folder
from tools.common.models import DAY
from tools.common.records import files_setting, rows_setting
from tools.common.rowformats import KINDS
from tools.games.chat import ChatTemplate
from tools.loop.check import check_sft_rows
from tools.selfplay.rows import read_sft_rows
from trainers import loss_denominators

RECORDED = load_golden("collator.json")
ROWS = [
    {"query": "a question", "target": "an answer", "reward": 0.5, "weight": 2.0, "role": "attacker"},
    {"prompt": "say", "answer": "so", "type": "sft"},
    {"query": "nothing", "target": "", "reward": -1},
]
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
    assert batch["weights"].dtype == batch["rewards"].dtype == torch.float32


def test_a_tokenizer_without_bos_gets_none():
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "tok", bos_token=None)
    tokenizer.bos_token = None
    assert encode_example({"query": "", "target": ""}, tokenizer)["input_ids"] == [tokenizer.eos_token_id]


@pytest.mark.parametrize("case", RECORDED["errors"][1:], ids=lambda case: case["note"])
def test_rows_that_stopped_the_release_are_errors_here_but_for_null_which_is_absent(case, tokenizer):
    if case["note"] == "weight None":
        assert encode_example(case["batch"][0], tokenizer)["weight"] == 1.0
        return
    with pytest.raises((UserError, TypeError), match="query|target|must be real number"):
        encode_example(case["batch"][0], tokenizer)


def test_a_field_that_is_null_counts_as_absent(tokenizer):
    """Files that pass through `datasets` have all fields in all rows."""
    fields = ("query", "target", "prompt", "answer", "instruction", "input", "output", "messages")
    nulls = dict.fromkeys((*fields, "reward", "weight", "type", "role", "chat_template"))
    for row in ROWS:
        encoded = encode_example(row, tokenizer)
        assert encode_example(nulls | row, tokenizer) == encoded
        assert encoded["kind"] == ("game" if "query" in row else "sft")


def test_a_further_number_of_a_row_is_one_name(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(dataloaders, "NUMBERS", (*dataloaders.NUMBERS, "advantage"))
    with_it = dataloaders.COLUMNS.copy()
    with_it["advantage"] = with_it["reward"]
    monkeypatch.setattr(dataloaders, "COLUMNS", with_it)  # made of NUMBERS at the import
    path = write_rows(tmp_path / "rows.jsonl", [ROWS[0] | {"advantage": -0.5}, ROWS[1]])
    batch = SPAGCollator(tokenizer)(load_rows([path], tokenizer).to_list())
    assert batch["advantages"].tolist() == [-0.5, 1.0] and batch["rewards"].tolist() == [0.5, 1.0]


def test_a_further_kind_of_row_is_a_name_and_its_rule(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "draft", "drafts")
    monkeypatch.setattr(dataloaders, "row_kind", lambda row: row.get("type", "game"))
    path = write_rows(tmp_path / "rows.jsonl", [ROWS[0], ROWS[1], ROWS[0] | {"type": "draft"}])
    batch = SPAGCollator(tokenizer)(load_rows([path], tokenizer).to_list())
    assert [batch[f"{kind}_mask"].tolist() for kind in KINDS] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    denominators = loss_denominators(batch)
    assert [denominators[f"{kind}_rows"] for kind in KINDS] == [1, 1, 1] and denominators["rows"] == 3


TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML = TURN + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TALK = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(["user", "assistant", "user", "assistant"])]


@pytest.fixture
def chat_tokenizer():
    return build_tokenizer("<|im_start|>", "<|im_end|>", chat_template=CHATML)


def target_of(row: dict) -> list[int]:
    return [label for label in row["labels"] if label != dataloaders.IGNORE_INDEX]


def test_of_a_conversation_the_last_reply_is_learned_in_the_chat_template(chat_tokenizer):
    encoded = encode_example({"messages": [*TALK, {"role": "user", "content": "unanswered"}]}, chat_tokenizer)
    whole = chat_tokenizer.apply_chat_template(TALK, tokenize=False).rstrip()
    assert chat_tokenizer.decode(encoded["input_ids"]) == whole
    assert chat_tokenizer.decode(target_of(encoded)) == "assistant 3<|im_end|>"
    assert encoded["kind"] == "sft" and encoded["weight"] == 1.0
    texts = {"query": "q", "target": "t", "messages": TALK}  # a target of its own wins
    assert encode_example(texts, chat_tokenizer)["kind"] == "game"


def last_reply(tokenizer, **fields) -> str:
    """The target of a conversation whose last reply has these fields."""
    return tokenizer.decode(target_of(encode_example({"messages": [TALK[0], TALK[1] | fields]}, tokenizer)))


def test_contents_may_be_texts_in_parts(chat_tokenizer):
    parts = [{"type": "text", "text": text, "image": None} for text in ("a ", "b")]
    assert last_reply(chat_tokenizer, content=parts) == last_reply(chat_tokenizer, content="a b") == "a b<|im_end|>"
    assert last_reply(chat_tokenizer, content="", name="Ann", weight=1, tool_calls=[]) == "<|im_end|>"


CALL = {"content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    "fields, message",
    [({}, "'tools'"), (CALL, "'tool_calls'"), ({"weight": 0}, "'weight' 0")],
)
def test_conversations_with_tools_or_weights_are_refused_by_file_and_row(tmp_path, chat_tokenizer, fields, message):
    row = {"messages": [TALK[0], TALK[1] | fields]} | ({} if fields else {"tools": [{"type": "function"}]})
    path = write_rows(tmp_path / "rows.jsonl", [*ROWS, row])
    for read in (lambda: load_rows([path], chat_tokenizer), lambda: read_sft_rows(path)):
        with pytest.raises(UserError, match=rf"rows\.jsonl: row 4: .*{message}"):
            read()


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{{ 1 + 'a' }}"])
def test_messages_that_the_template_does_not_take_are_refused(chat_tokenizer, template):
    chat_tokenizer.chat_template = template
    with pytest.raises(UserError, match="template rejects these messages: (never|unsupported)"):
        last_reply(chat_tokenizer)


def test_a_template_that_tells_the_date_is_told_a_fixed_one(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ strftime_now('%Y') }} {{ date_string }}" + CHATML
    encoded = encode_example({"messages": TALK}, chat_tokenizer)
    assert chat_tokenizer.decode(encoded["input_ids"]).startswith(f"{DAY} {DAY}<|im_start|>")


def test_a_row_of_another_chat_template_is_refused(chat_tokenizer, tmp_path):
    row = {"query": "q", "target": "t<|im_end|>", "chat_template": True}
    assert target_of(encode_example(row, chat_tokenizer))[-1] == chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(UserError, match=r"does not end in a special token .*assign_rewards --chat_template"):
        encode_example(row | {"target": "t<|eot_id|>"}, chat_tokenizer)
    path = write_rows(tmp_path / "rows.jsonl", [row, row | {"target": "t"}])
    with pytest.raises(UserError, match=r"rows\.jsonl: row 2: .* does not end in a special token"):
        load_rows([path], chat_tokenizer)


@pytest.mark.parametrize("at_once", [2, 1000])
def test_json_and_jsonl_files_mix_and_are_encoded_alike(tmp_path, tokenizer, monkeypatch, at_once):
    monkeypatch.setattr(dataloaders, "ROWS_AT_ONCE", at_once)
    paths = [write_rows(tmp_path / "a.json", ROWS), write_rows(tmp_path / "b.jsonl", ROWS)]
    expected = [encode_example(row, tokenizer) for row in ROWS * 2]
    for file in (None, tmp_path / "rows.arrow"):
        dataset = load_rows(paths, tokenizer, file=file, first_index=10)
        for index, (row, encoded) in enumerate(zip(dataset, expected, strict=True), start=10):
            assert row == encoded | {"index": index, "length": len(encoded["input_ids"])}
        batch = SPAGCollator(tokenizer)([dataset[index] for index in (1, 5)])
        assert batch["rewards"].tolist() == [1, -1]


def test_an_edited_file_an_edited_check_and_another_tokenizer_give_other_rows(tmp_path, tokenizer):
    """`datasets` would know the file by its path, and the function by its name, and give the older rows."""
    path, file = str(tmp_path / "rows.jsonl"), tmp_path / "rows.arrow"
    other_tokenizer = build_tokenizer()
    other_tokenizer.add_tokens("two")
    for target, its_tokenizer in (("one", tokenizer), ("two", tokenizer), ("two", other_tokenizer)):
        row = {"query": "q", "target": target}
        write_rows(path, [row])  # always of the same size
        (encoded,) = load_rows([path], its_tokenizer, file=file)
        assert encoded["labels"] == encode_example(row, its_tokenizer)["labels"]

    def check(row):
        raise UserError("edited")

    with pytest.raises(UserError, match="row 1: edited"):
        load_rows([path], tokenizer, file=file, check=check)


@pytest.fixture
def on_hub(tmp_path, monkeypatch) -> Path:
    """The folder of the data set me/rows in a pretended cache of the hub, at the commit abc."""
    folder = tmp_path / "hub/datasets--me--rows"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots/abc").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    data_folder.cache_clear()
    return folder / "snapshots/abc"


def test_rows_are_read_from_parquet_gzip_and_the_hub_as_from_json(tmp_path, on_hub, chat_tokenizer):
    rows = [{"query": "q", "target": "t", "reward": 0.5}, {"messages": TALK}, {"messages": [TALK[0], *TALK]}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
    Dataset.from_json(path, cache_dir=str(tmp_path / "cache")).to_parquet(tmp_path / "rows.parquet")
    shutil.copy(tmp_path / "rows.parquet", on_hub / "train.parquet")
    expected = list(load_rows([path], chat_tokenizer))
    cache = Path(os.environ["HF_HOME"], "datasets")
    cached = contents(cache)
    for name in (tmp_path / "rows.jsonl.gz", tmp_path / "rows.parquet", "me/rows"):
        assert list(load_rows([str(name)], chat_tokenizer)) == expected, name
        made, of_json = (read_sft_rows(str(each)) for each in (name, path))
        assert [encode_example(row, chat_tokenizer) for row in made] == [
            encode_example(row, chat_tokenizer) for row in of_json
        ]
    assert contents(cache) == cached
    assert rows_setting("me/rows")["sha256"] == "abc"
    both = rows_setting(path, "me/rows")
    assert both["sha256"] == f"{files_setting(path)['sha256']} abc" and both["commits"] == {"me/rows": "abc"}


def test_gzipped_rows_are_read_line_by_line_and_a_name_is_no_pattern(tmp_path, tokenizer):
    rows = [{"query": "2024-01-01", "target": "2024-01-01", "reward": 1}, {"query": "q", "target": "t", "type": "sft"}]
    lines = "\n".join(map(json.dumps, rows))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert list(load_rows([str(tmp_path / "rows.jsonl.gz")], tokenizer))[1]["kind"] == "sft"
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(f"{lines}\n{{half".encode()))
    with pytest.raises(UserError, match=r"rows\.jsonl\.gz:3: not JSON"):
        load_rows([str(tmp_path / "rows.jsonl.gz")], tokenizer)
    for name, target in (("rows1.parquet", "other"), ("rows[1].parquet", "own")):
        Dataset.from_list([{"query": "q", "target": target}]).to_parquet(tmp_path / name)
    (row,) = load_rows([str(tmp_path / "rows[1].parquet")], tokenizer)
    assert target_of(row) == target_of(encode_example({"query": "q", "target": "own"}, tokenizer))


MISSING = ["rows", "a/b/c", "no/such.json", "no/such.jsonl.gz", "no/such.parquet", "no/such.csv"]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_file_is_not_looked_for_on_the_hub(name, tokenizer):
    with pytest.raises(UserError, match=f"{name}: no such file$"):
        load_rows([name], tokenizer)


def test_a_data_set_that_is_nowhere_is_named(on_hub, tokenizer):
    with pytest.raises(UserError, match="no such data set on the hub"):
        load_rows(["no/rows"], tokenizer)


def test_a_row_whose_target_is_cut_off_whole_is_named(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "tok", model_max_length=4, truncation_side="right")
    path = write_rows(tmp_path / "a.jsonl", [{"query": "", "target": "x"}, {"query": "long " * 9, "target": "x"}])
    with pytest.raises(UserError, match=r"a\.jsonl: row 2: .*cuts off the whole target; use --truncation_side"):
        load_rows([path], tokenizer)


@pytest.mark.parametrize("side, lost", [("left", "beginning, with the rules"), ("right", "end")])
def test_rows_that_are_cut_are_one_warning_with_their_number(tmp_path, caplog, side, lost):
    tokenizer = build_tokenizer()
    tokenizer.model_max_length, tokenizer.truncation_side = 10, side
    rows = [{"query": "q" * length, "target": "target"} for length in (2, 3, 4)]  # 10, 11 and 12 tokens
    load_rows([write_rows(tmp_path / "a.jsonl", rows)], tokenizer)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"2 of 3 rows are longer than 10 tokens and lost their {lost}; a larger --max_length" in warning


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "a", "target": "b", "reward": math.nan}, "'reward' must be a finite number, not nan"),
        ({"query": "a", "target": "b", "weight": -1}, "'weight' is negative"),
        ({"query": "a", "target": "b", "chat_template": "false"}, "'chat_template' must be true or false"),
        ({"messages": TALK, "answer": "42"}, "'messages' beside 'answer': remove 'answer'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "'messages' has no assistant message"),
        ({"prompt": "a", "messages": [{"role": "assistant", "content": "b"}]}, "the tokenizer's chat template"),
        ({"query": "a", "target": "b", "reward": "1.0"}, "'reward': must be real number"),
        ({"query": "a", "target": "b", "weight": 10**400}, "'weight': int too large"),
    ],
)
def test_bad_rows_are_errors_that_name_file_and_row(tmp_path, tokenizer, row, message):
    with pytest.raises(UserError, match=rf"bad\.jsonl: row 4: {message}"):
        load_rows([write_rows(tmp_path / "bad.jsonl", [*ROWS, row])], tokenizer)


BAD_REPLIES = [{"from": "gpt", "value": "b"}, {"content": "b"}, "b", {"role": "assistant", "content": None}]
IMAGE = {"type": "image", "text": "b"}
BAD_REPLIES += [{"role": "assistant", "content": content} for content in (42, [], ["b"], [IMAGE])]
ALPACA = {"instruction": "Say hi.", "input": "", "output": "Hi."}
BAD_ALPACA = [
    {"instruction": ["Say", "hi."]},
    {"instruction": 5},
    {"input": {"name": "Ann"}},
    {"input": 0},
    {"output": 3},
]


@pytest.mark.parametrize("changes", BAD_ALPACA)
def test_alpacas_fields_that_are_no_texts_are_named_in_training_and_rewards(tmp_path, chat_tokenizer, changes):
    path = write_rows(tmp_path / "alpaca.jsonl", [ALPACA, ALPACA | changes])
    (field,) = changes
    for read in (lambda: load_rows([path], chat_tokenizer), lambda: read_sft_rows(path),
                 lambda: read_sft_rows(path, ChatTemplate(chat_tokenizer, "m"))):  # fmt: skip
        with pytest.raises(UserError, match=rf"alpaca\.jsonl: row 2: .*{field!r} must be a string"):
            read()


def test_prompt_and_completion_are_read_as_prompt_and_answer(tokenizer):
    of_trl, ours = ({"prompt": "Hi", name: "Hello."} for name in ("completion", "answer"))
    assert encode_example(of_trl, tokenizer) == encode_example(ours, tokenizer)


OTHER_FORMS = [
    {"instruction": "Say hi", "response": "Hi"},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
]


@pytest.mark.parametrize("row", OTHER_FORMS)
def test_a_row_of_another_form_is_told_the_forms_that_are_read(tokenizer, row):
    with pytest.raises(UserError, match="'query' and 'target'.* 'messages', .*'instruction'") as refused:
        encode_example(row, tokenizer)
    assert all(repr(field) in str(refused.value).partition("has ")[2] for field in row)


BAD_ROWS = [None, [1], {"query": "a"}, {"messages": "a"}, *({"messages": [reply]} for reply in BAD_REPLIES)]


@pytest.mark.parametrize("row", BAD_ROWS)
def test_sft_rows_in_another_format_are_named_in_training_rewards_and_the_loops_start(tmp_path, tiny_model, row):
    path = write_rows(tmp_path / "bad.jsonl", [*ROWS, row])
    for read in (lambda: load_rows([path], build_tokenizer()), lambda: read_sft_rows(path),
                 lambda: check_sft_rows(tiny_model, path, False)):  # fmt: skip
        with pytest.raises(UserError, match=r"bad\.jsonl: row 4: (not a JSON|a message needs|a row needs)"):
            read()


def test_tokens_that_the_model_lacks_are_no_padding_and_name_their_row(tmp_path, tokenizer):
    own, larger = len(tokenizer), build_tokenizer()
    larger.add_special_tokens({"pad_token": "[PAD]"})
    rows = [encode_example(row, tokenizer) for row in ROWS]
    batch = SPAGCollator(larger, own)(rows)
    assert batch["input_ids"].max() < own and SPAGCollator(larger).pad_token_id == own
    assert SPAGCollator(larger, own).pad_token_id == larger.eos_token_id
    larger.add_special_tokens({"eos_token": "[EOS]"})
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    assert SPAGCollator(larger, own).pad_token_id == 0 and len(load_rows([path], larger)) == 3
    with pytest.raises(UserError, match=rf"row 1: token {own + 1} \(\[EOS\]\) is outside the model's {own}"):
        load_rows([path], larger, own)
