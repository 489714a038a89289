"""Training rows: read from JSON and JSONL files, encoded as token ids, padded to batches.

    files -> load_rows -> Arrow table of token ids -> RowDataset -> SPAGCollator -> batch

data/README.md describes the rows field by field.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

import utils

IGNORE_INDEX = -100  # label of a token that is not scored
LARGEST = float(np.finfo(np.float32).max)  # of a weight or reward
ROWS_AT_ONCE = 1000  # rows that are tokenized in one call


def normalize_row(record: dict) -> dict:
    """Return a raw record as query, target, weight, reward, is_sft, role, chat_template.

    Texts are those of `query` and `target`, or else of `prompt` and `answer`, or else of a raw Alpaca row. A missing
    weight or reward is 1.0. Only a `type` equal to "sft" makes an SFT row. With `chat_template` true the texts already
    contain special tokens.

    Raises UserError for a missing or non-text query or target, for a weight or reward that is not a finite number, and
    for a `chat_template` that is neither true nor false.
    """
    if not isinstance(record.get("chat_template", False), bool):
        raise utils.UserError(f"'chat_template' must be true or false, got {record['chat_template']!r:.40}")
    query, target, record = utils.row_texts(record)
    return {
        "query": query,
        "target": target,
        "weight": _number(record, "weight"),
        "reward": _number(record, "reward"),
        "is_sft": record.get("type") == "sft",
        "role": str(record.get("role", "")),
        "chat_template": record.get("chat_template", False),
    }


def _number(record: dict, name: str) -> float:
    value = record.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise utils.UserError(f"'{name}' must be a finite number, got {value!r:.40}")
    return float(value)


def encode_example(example: dict, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Encode one row as [BOS] + query + target + [EOS], cut to the tokenizer's model_max_length.

    Query and target are tokenized separately and without special tokens. The labels of BOS and query are masked, by
    their number and not by their ids, so EOS is scored even if PAD is the same token. A tokenizer without BOS adds
    none. A row with `chat_template` is encoded as query + target, since the chat template already wrote BOS and the
    token that ends a message.

    Returns input_ids and labels (lists of one length), weight, reward, is_sft, and `ref_logprob` if the example has
    one. Raises UserError for a bad row (see `normalize_row`), for a tokenizer without EOS, and for a row with
    `chat_template` that does not end in a special token of the tokenizer.
    """
    (row,) = encode_and_cut([normalize_row(example)], tokenizer)
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
            bos, end = [], []
            if not target or target[-1] not in special:
                raise utils.UserError(
                    f"{row.get('where', 'row')}: 'target' ends in {row['target'][-20:]!r}, not in a special token of "
                    "this tokenizer; make rows for it by assign_rewards --chat_template True --tokenizer MODEL"
                )
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
) -> tuple[datasets.Dataset, RowCounts]:
    """Read, check and encode the rows of JSON and JSONL files; return a Dataset of ENCODED_FEATURES.

    With `path` the rows are memory-mapped from this Arrow file, which is written if it does not exist. The caller
    must delete it when rows, tokenizer or source code change. Without `path` the rows are kept in memory.

    The loss of a row whose whole target is cut off would be 0/0. With `drop_unscored` such rows are left out and
    counted; otherwise the first one is a UserError.
    Raises FileNotFoundError, and UserError that names file and line of an invalid row.
    """
    if path is None:
        rows = datasets.Dataset.from_list(list(itertools.chain(*_iter_encoded(paths, tokenizer))), ENCODED_FEATURES)
    else:
        write_encoded(paths, tokenizer, path)
        rows = datasets.Dataset.from_file(str(path))
    limit = tokenizer.model_max_length
    full, scored, is_sft, reward = _columns(rows, "full_length", "scored_length", "is_sft", "reward")
    kept = scored > 0
    counts = RowCounts(
        rows=int(kept.sum()),
        sft_rows=int(is_sft[kept].sum()),
        truncated=int((full[kept] > limit).sum()),
        dropped=int((~kept).sum()),
        negative=int((~is_sft & (reward < 0))[kept].sum()),
    )
    if counts.dropped and not drop_unscored:
        raise utils.UserError(
            f"{rows[int(kept.argmin())]['where']}: max_length {limit} cuts off the whole target "
            f"({counts.dropped} such rows). Use --truncation_side left, a larger --max_length, or "
            "--drop_unscored_rows True"
        )
    if not counts.rows:
        raise utils.UserError(f"{rows[0]['where']}: max_length {limit} cuts off the targets of all {len(rows)} rows")
    return rows.select(np.flatnonzero(kept)) if counts.dropped else rows, counts


def write_encoded(paths: list[str], tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Write the encoded rows to an Arrow file unless it exists. The file appears only when it is complete."""
    if Path(path).is_file():
        return
    schema = ENCODED_FEATURES.arrow_schema
    with utils.replacing(path, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in _iter_encoded(paths, tokenizer):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))


def _columns(rows: datasets.Dataset, *names: str) -> list[np.ndarray]:
    return [rows.with_format("numpy")[name][:] for name in names]


def _iter_encoded(paths: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[dict]]:
    """Yield encoded rows in batches, because a fast tokenizer uses all cores for a batch."""
    rows = _iter_rows(paths)
    while batch := list(itertools.islice(rows, ROWS_AT_ONCE)):
        yield encode_and_cut(batch, tokenizer)


def _iter_rows(paths: list[str]) -> Iterator[dict]:
    where = None
    for path in paths:
        for where, record in utils.iter_records(path):
            try:
                yield normalize_row(record) | {"where": where}
            except utils.UserError as error:
                raise utils.BadRecordError(f"{where}: {error}") from None
    if where is None:
        raise utils.UserError(f"{', '.join(paths)}: no rows")


class RowDataset(torch.utils.data.Dataset):
    """Encoded rows, each with its log-probability under the reference model after `ref_logprobs` is set."""

    def __init__(self, rows: datasets.Dataset, counts: RowCounts):
        self.counts = counts
        self.lengths, self.is_sft, self.role, scored = _columns(rows, "full_length", "is_sft", "role", "scored_length")
        self.num_scored_tokens = int(scored.sum())
        self.rows = rows.select_columns(["input_ids", "masked_length", "weight", "reward", "is_sft"])
        self.number_roles(sorted({role for role in self.role[~self.is_sft] if role}))
        self.ref_logprobs: np.ndarray | None = None  # (rows,) nats per token; NaN if not computed

    def number_roles(self, names: list[str]) -> None:
        """Number the rows' roles in the order of `names`, from 1; other rows get 0."""
        numbers = {name: number for number, name in enumerate(names, start=1)}
        self.role_names = names
        self.roles = np.array([numbers.get(role, 0) for role in self.role])  # (rows,)

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
