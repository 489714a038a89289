"""Training rows: read from JSON and JSONL files, encoded as token ids, padded to batches.

    files -> load_rows -> RowDataset, a table of token ids -> SPAGCollator -> batch

data/README.md describes the rows field by field.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

import utils

IGNORE_INDEX = -100  # label of a token that is not scored
LARGEST = float(np.finfo(np.float32).max)  # of a weight or reward
LARGEST_ID = np.iinfo(np.int32).max
ROWS_AT_ONCE = 1000  # rows that are tokenized, or written to the table, in one call


def normalize_row(record: dict, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Return a raw record as query, target, target_ids, weight, reward, is_sft, role, chat_template.

    Texts are those of `query` and `target`, or else of `prompt` and `answer`, or else of a raw Alpaca row, or else of
    `messages` in the tokenizer's chat template. A missing weight or reward is 1.0. Only a `type` equal to "sft" makes
    an SFT row. With `chat_template` true the texts already contain special tokens. `target_ids` are the target's
    token ids without the one that ends it, or None.

    Raises UserError for a missing or non-text query or target, for messages without a reply, for a weight or reward
    that is not a finite number, for target_ids that are not token ids, and for a `chat_template` that is neither true
    nor false.
    """
    if "messages" in record and not {"query", "prompt", "target", "answer", "instruction"} & record.keys():
        record = record | messages_to_row(record["messages"], tokenizer)
    if not isinstance(record.get("chat_template", False), bool):
        raise utils.UserError(f"'chat_template' must be true or false, got {record['chat_template']!r:.40}")
    query, target, record = utils.row_texts(record)
    return {
        "query": query,
        "target": target,
        "target_ids": _token_ids(record),
        "weight": _number(record, "weight"),
        "reward": _number(record, "reward"),
        "is_sft": record.get("type") == "sft",
        "role": str(record.get("role", "")),
        "chat_template": record.get("chat_template", False),
    }


def messages_to_row(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> dict:
    """Turn a conversation in the hub's chat format into an SFT row: the last assistant message is the target.

    Both texts are written by the tokenizer's chat template. Raises UserError if there is no assistant message, or if
    the template is missing or refuses the messages.
    """
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise utils.UserError("'messages' must be a list of {'role': text, 'content': text}")
    last = max((place for place, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        raise utils.UserError("'messages' has no assistant message, which would be the target")
    if not tokenizer.chat_template:
        raise utils.UserError("'messages' need a chat template, and this tokenizer has none")
    try:
        query = tokenizer.apply_chat_template(
            messages[:last], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        whole = tokenizer.apply_chat_template(messages[: last + 1], tokenize=False)
    except (TemplateError, ValueError, TypeError, IndexError) as error:  # templates index the first message
        raise utils.UserError(f"the tokenizer's chat template refuses 'messages' ({error})") from None
    if not whole.startswith(query):
        raise utils.UserError("the tokenizer's chat template writes a reply elsewhere than where it asks for one")
    return {"query": query, "target": whole.removeprefix(query).rstrip(), "chat_template": True, "type": "sft"}


def _is_message(message) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def _token_ids(record: dict) -> list[int] | None:
    ids = record.get("target_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= LARGEST_ID for each in ids):
        raise utils.UserError(f"'target_ids' must be a list of token ids, got {ids!r:.40}")
    return ids


def _number(record: dict, name: str) -> float:
    value = record.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise utils.UserError(f"'{name}' must be a finite number, got {value!r:.40}")
    return float(value)


def encode_example(example: dict, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Encode one row as [BOS] + query + target + [EOS], cut to the tokenizer's model_max_length.

    Query and target are tokenized separately and without special tokens. `target_ids` replace the tokens of the
    target's text, except for the token of a chat template that ends it. The labels of BOS and query are masked, by
    their number and not by their ids, so EOS is scored even if PAD is the same token. A tokenizer without BOS adds
    none. A row with `chat_template` is encoded as query + target, since the chat template already wrote BOS and the
    token that ends a message.

    Returns input_ids and labels (lists of one length), weight, reward, is_sft, and `ref_logprob` if the example has
    one. Raises UserError for a bad row (see `normalize_row`), for a tokenizer without EOS, and for a row with
    `chat_template` that does not end in a special token of the tokenizer.
    """
    (row,) = encode_and_cut([normalize_row(example, tokenizer)], tokenizer)
    encoded = {name: row[name] for name in ("input_ids", "weight", "reward", "is_sft")}
    encoded["labels"] = _labels(row)
    if "ref_logprob" in example:
        encoded["ref_logprob"] = example["ref_logprob"]
    return encoded


def encode_and_cut(rows: list[dict], tokenizer: PreTrainedTokenizerBase) -> list[dict]:
    """Encode normalized rows; ENCODED_FEATURES describes the result."""
    if tokenizer.eos_token_id is None:
        raise utils.UserError("the tokenizer has no EOS token; training needs one to teach where a target ends")
    queries, targets = (
        tokenizer([row[name] for row in rows], add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        for name in ("query", "target")
    )
    bos_or_none = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    special = set()
    if any(row["chat_template"] for row in rows):
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    limit, cut_left = tokenizer.model_max_length, tokenizer.truncation_side == "left"
    encoded = []
    for row, query, target in zip(rows, queries, targets, strict=True):
        bos, end = bos_or_none, [tokenizer.eos_token_id]
        if row["chat_template"]:
            bos = []
            if not target or target[-1] not in special:
                raise utils.UserError(
                    f"{row.get('where', 'row')}: 'target' ends in {row['target'][-20:]!r}, not in a special token of "
                    "this tokenizer; make rows for it by assign_rewards --chat_template True --tokenizer MODEL"
                )
            end = [target.pop()]
        target = target if row["target_ids"] is None else row["target_ids"]
        ids = bos + query + target + end
        kept = ids[-limit:] if cut_left else ids[:limit]
        prompt_kept = len(bos) + len(query) - (len(ids) - len(kept) if cut_left else 0)
        masked = min(max(prompt_kept, 0), len(kept))
        encoded.append(
            {
                **{name: row.get(name, "") for name in ("weight", "reward", "is_sft", "role", "where")},
                "input_ids": kept,
                "largest_id": max(kept),
                "masked_length": masked,
                "full_length": len(ids),
                "scored_length": len(kept) - max(masked, 1),
            }
        )
    return encoded


def _labels(row: dict) -> list[int]:
    """The labels of an encoded row: its ids, with IGNORE_INDEX in place of BOS and query."""
    masked = row["masked_length"]
    return [IGNORE_INDEX] * masked + row["input_ids"][masked:]


ENCODED_FEATURES = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "largest_id": datasets.Value("int32"),  # compared with the size of the model's vocabulary
        "masked_length": datasets.Value("int32"),  # BOS and query, after the cut
        "weight": datasets.Value("float32"),
        "reward": datasets.Value("float32"),
        "is_sft": datasets.Value("bool"),
        "role": datasets.Value("string"),
        "where": datasets.Value("string"),  # file:line
        "full_length": datasets.Value("int32"),  # tokens before the cut
        "scored_length": datasets.Value("int32"),  # labels, without one at position 0, which nothing predicts
    }
)
REF_LOGPROB = "ref_logprob"  # a column of float32 that is added later: nats per token under the reference


@dataclass(frozen=True)
class RowCounts:
    """How many rows are trained on, how many of these were cut, and how many rows were dropped."""

    rows: int
    sft_rows: int
    truncated: int
    dropped: int
    negative: int  # game rows with a reward below 0


def load_rows(
    paths: list[str],
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path | None = None,
    *,
    drop_unscored: bool = False,
    tokenizer_sha256: str | None = None,
) -> "RowDataset":
    """Read, check and encode the rows of JSON and JSONL files.

    With `path` the rows are memory-mapped from this Arrow file, which is written if it does not exist. The caller
    must delete it when rows, tokenizer or source code change. Without `path` the rows are kept in memory.

    `target_ids` of rows are used if the record of their file names `tokenizer_sha256`, the fingerprint of this
    tokenizer; with None, the texts are tokenized instead.

    Raises FileNotFoundError, UserError that names file and line of an invalid row or of `target_ids` of another
    tokenizer, and UserError as `RowDataset` does.
    """
    batches = _iter_encoded(paths, tokenizer, tokenizer_sha256)
    if path is None:
        table = datasets.Dataset.from_list(list(itertools.chain(*batches)), ENCODED_FEATURES)
    else:
        if not Path(path).is_file():
            schema = ENCODED_FEATURES.arrow_schema
            _write_table(path, schema, (pa.RecordBatch.from_pylist(batch, schema=schema) for batch in batches))
        table = datasets.Dataset.from_file(str(path))
    return RowDataset(table, tokenizer.model_max_length, drop_unscored=drop_unscored, path=path)


def _write_table(path: str | Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch | pa.Table]) -> None:
    """Write an Arrow file. It appears only when it is complete."""
    with utils.replacing(path, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write(batch)


def _columns(rows: datasets.Dataset, *names: str) -> list[np.ndarray]:
    return [rows.with_format("numpy")[name][:] for name in names]


def _iter_encoded(
    paths: list[str], tokenizer: PreTrainedTokenizerBase, tokenizer_sha256: str | None
) -> Iterator[list[dict]]:
    """Yield encoded rows in batches, because a fast tokenizer uses all cores for a batch."""
    rows = itertools.chain(*(_iter_rows(path, tokenizer, tokenizer_sha256) for path in paths))
    empty = True
    while batch := list(itertools.islice(rows, ROWS_AT_ONCE)):
        yield encode_and_cut(batch, tokenizer)
        empty = False
    if empty:
        raise utils.UserError(f"{', '.join(paths)}: no rows")


def _iter_rows(path: str, tokenizer: PreTrainedTokenizerBase, tokenizer_sha256: str | None) -> Iterator[dict]:
    """Yield the normalized rows of a file, each with its place; without `tokenizer_sha256`, without `target_ids`."""
    checked = False
    for where, record in utils.iter_records(path):
        try:
            row = normalize_row(record, tokenizer) | {"where": where}
        except utils.UserError as error:
            raise utils.BadRecordError(f"{where}: {error}") from None
        if row["target_ids"] is not None and tokenizer_sha256 is None:
            row["target_ids"] = None
        elif row["target_ids"] is not None and not checked:
            _check_tokenizer(path, where, tokenizer_sha256)
            checked = True
        yield row


def rows_record(path: str | Path) -> dict:
    """The record that assign_rewards wrote beside a file of rows; {} if there is none."""
    try:
        record = utils.read_json(Path(path).with_name(f"{Path(path).stem}_rewards_settings.json"))
    except (OSError, utils.UserError):
        return {}
    return record if isinstance(record, dict) else {}


def _check_tokenizer(path: str, where: str, tokenizer_sha256: str) -> None:
    made_by = rows_record(path).get("tokenizer_sha256")
    if made_by != tokenizer_sha256:
        of = "an unknown tokenizer" if made_by is None else f"another tokenizer (sha256 {str(made_by)[:8]})"
        raise utils.UserError(
            f"{where}: 'target_ids' are token ids of {of}; this model's has sha256 {tokenizer_sha256[:8]}. "
            "--retokenize True trains on the texts instead"
        )


class RowDataset(torch.utils.data.Dataset):
    """The encoded rows that are trained on, each with its log-probability under the reference once that is known.

    `table` is a Dataset of ENCODED_FEATURES, with a column REF_LOGPROB if an earlier start added it; `path` is its
    file. The loss of a row whose whole target is cut off would be 0/0. With `drop_unscored` such rows are left out
    and counted; otherwise the first one is a UserError. UserError too if no row is left.
    """

    def __init__(
        self,
        table: datasets.Dataset,
        max_length: int,
        *,
        drop_unscored: bool = False,
        path: str | Path | None = None,
    ):
        self.table, self.path = table, path
        full, scored, is_sft, reward = _columns(table, "full_length", "scored_length", "is_sft", "reward")
        kept = scored > 0
        self.kept = np.flatnonzero(kept)
        self.counts = RowCounts(
            rows=len(self.kept),
            sft_rows=int(is_sft[kept].sum()),
            truncated=int((full[kept] > max_length).sum()),
            dropped=int((~kept).sum()),
            negative=int((~is_sft & (reward < 0))[kept].sum()),
        )
        if self.counts.dropped and not drop_unscored:
            raise utils.UserError(
                f"{table[int(kept.argmin())]['where']}: max_length {max_length} cuts off the whole target "
                f"({self.counts.dropped} such rows). Use --truncation_side left, a larger --max_length, or "
                "--drop_unscored_rows True"
            )
        if not self.counts.rows:
            where = table[0]["where"]
            raise utils.UserError(f"{where}: max_length {max_length} cuts off the targets of all {len(table)} rows")
        self.lengths, self.is_sft, self.num_scored_tokens = full[kept], is_sft[kept], int(scored[kept].sum())
        (self.role,) = (column[kept] for column in _columns(table, "role"))
        self.rows = table.select(self.kept) if self.counts.dropped else table
        self.rows = self.rows.select_columns(["input_ids", "masked_length", "weight", "reward", "is_sft"])
        self.number_roles(sorted({role for role in self.role[~self.is_sft] if role}))
        self.ref_logprobs: np.ndarray | None = None  # (rows,) nats per token
        if REF_LOGPROB in table.column_names:
            (self.ref_logprobs,) = (column[kept] for column in _columns(table, REF_LOGPROB))

    def check_vocabulary(self, size: int, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise UserError for a row with a token that is not in the model's vocabulary of this size."""
        largest = _columns(self.table, "largest_id")[0][self.kept]
        if largest.max() >= size:
            token = tokenizer.convert_ids_to_tokens(int(largest.max()))
            row = self.table[int(self.kept[largest.argmax()])]
            raise utils.UserError(f"{row['where']}: the model's vocabulary of {size} tokens does not hold {token!r}")

    def number_roles(self, names: list[str]) -> None:
        """Number the rows' roles in the order of `names`, from 1; other rows get 0."""
        numbers = {name: number for number, name in enumerate(names, start=1)}
        self.role_names = names
        self.roles = np.array([numbers.get(role, 0) for role in self.role])  # (rows,)

    def store_ref_logprobs(self) -> None:
        """Add the log-probabilities under the reference to the table's file, for the next start of this run."""
        column = np.zeros(len(self.table), dtype=np.float32)
        column[self.kept] = self.ref_logprobs
        table = self.table.add_column(REF_LOGPROB, column)
        _write_table(self.path, table.features.arrow_schema, table.with_format("arrow").iter(ROWS_AT_ONCE))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict]:
        batch = self.rows.__getitems__(indices)
        for example, index in zip(batch, indices, strict=True):
            example["labels"] = _labels(example)
            example["role"] = int(self.roles[index])
            if self.ref_logprobs is not None:
                example["ref_logprob"] = float(self.ref_logprobs[index])
        return batch


class SPAGCollator:
    """Pad encoded rows to the longest of them, on the tokenizer's padding side.

    Returns input_ids, labels and attention_mask, int64 tensors of shape (batch, longest); weights, rewards and
    sft_mask, float32 of shape (batch,); and scored_places, (scored tokens,). If the rows have them, also ref_logprobs,
    float32, and roles, int64, of shape (batch,).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        ensure_pad_token(tokenizer)
        self.pad_token_id = tokenizer.pad_token_id
        self.pad_left = tokenizer.padding_side == "left"

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        def column(name: str) -> torch.Tensor:
            return torch.tensor([example[name] for example in examples], dtype=torch.float32)

        labels = self._pad([example["labels"] for example in examples], IGNORE_INDEX)
        batch = {
            "input_ids": self._pad([example["input_ids"] for example in examples], self.pad_token_id),
            "labels": labels,
            "scored_places": scored_places(labels),  # on the CPU, since on a GPU nonzero() would wait for its result
            "attention_mask": self._pad([[1] * len(example["input_ids"]) for example in examples], 0),
            "weights": column("weight"),
            "rewards": column("reward"),
            "sft_mask": column("is_sft"),
        }
        if all("ref_logprob" in example for example in examples):
            batch["ref_logprobs"] = column("ref_logprob")
        if all("role" in example for example in examples):
            batch["roles"] = torch.tensor([example["role"] for example in examples])
        return batch

    def _pad(self, sequences: list[list[int]], value: int) -> torch.Tensor:
        tensors = [torch.tensor(ids, dtype=torch.long) for ids in sequences]
        side = "left" if self.pad_left else "right"
        return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def scored_places(labels: torch.Tensor) -> torch.Tensor:
    """Indices into the flattened (batch, T) labels of the positions that predict a scored label: (scored tokens,)."""
    return F.pad(labels[:, 1:] != IGNORE_INDEX, (0, 1)).flatten().nonzero()[:, 0]


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer without PAD pad with EOS. Raises UserError if it has no EOS either.

    No token is added: policy and reference keep the same vocabulary, so their log-probabilities can be compared.
    """
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise utils.UserError("the tokenizer has neither a PAD nor an EOS token")
    tokenizer.pad_token = tokenizer.eos_token
