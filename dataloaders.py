"""Training rows: from JSON and JSONL files, over token ids, to padded batches.

    files -> load_rows -> token ids -> RowDataset -> SPAGCollator -> batch

data/README.md describes the rows field by field.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

import utils

IGNORE_INDEX = -100  # label of a token that is not scored
FORMAT_VERSION = 4  # part of every cache key: raise it when the encoding changes
LARGEST = float(np.finfo(np.float32).max)  # of a weight or reward
KEPT = 0.1  # share of its tokens that a row keeps at least, or it is counted as mostly cut
ROWS_AT_ONCE = 1000  # that are encoded


def normalize_row(record: dict) -> dict:
    """Bring one raw record to query, target, weight, reward, is_sft, role, chat_template.

    Texts are taken from `query`/`target`, else `prompt`/`answer`, else raw Alpaca. A missing weight or reward is 1.0;
    only a `type` equal to "sft" makes an SFT row. With `chat_template` true the texts hold their special tokens.

    Raises ValueError for a missing or non-text query or target, for a weight or reward that is no finite number, and
    for a `chat_template` that is neither true nor false.
    """
    if not isinstance(record.get("chat_template", False), bool):
        raise ValueError(f"'chat_template' must be true or false, got {record['chat_template']!r:.40}")
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
        raise ValueError(f"'{name}' must be a finite number, got {value!r:.40}")
    return float(value)


def encode_example(example: dict, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Encode one row as [BOS] + query + target + [EOS], cut to the tokenizer's model_max_length.

    Query and target are tokenized separately and without special tokens. Labels mask BOS and query by their length,
    never by token id, so that PAD may equal EOS. No BOS is put where the tokenizer has none. A row with
    `chat_template`, whose texts a chat template wrote, is query + target: these hold BOS and the token that ends it.

    Returns input_ids and labels (lists of one length), weight, reward, is_sft, and `ref_logprob` where the example has
    it.
    Raises ValueError for a bad row (see `normalize_row`), for a tokenizer without EOS, and for a row
    with `chat_template` that does not end in a special token of the tokenizer.
    """
    (row,) = encode_and_cut([normalize_row(example)], tokenizer)
    encoded = {name: row[name] for name in ("input_ids", "weight", "reward", "is_sft")}
    encoded["labels"] = _labels(row)
    if "ref_logprob" in example:
        encoded["ref_logprob"] = example["ref_logprob"]
    return encoded


def encode_and_cut(rows: list[dict], tokenizer: PreTrainedTokenizerBase) -> list[dict]:
    """Normalized rows as ENCODED_FEATURES has them: the ids, how many of them are masked, and what the cut did."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token; training needs one to teach where a target ends")
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
                raise ValueError(
                    f"{row.get('where', 'row')}: its 'target' ends in {row['target'][-20:]!r}, no special token "
                    "of this tokenizer; make rows for it by assign_rewards --chat_template True --tokenizer MODEL"
                )
        ids = bos + query + target + end
        kept = ids[-limit:] if cut_left else ids[:limit]
        prompt_kept = len(bos) + len(query) - (len(ids) - len(kept) if cut_left else 0)
        masked = min(max(prompt_kept, 0), len(kept))
        encoded.append(
            {
                **{name: row.get(name, "") for name in ("weight", "reward", "is_sft", "role", "where")},
                "input_ids": kept,
                "masked_length": masked,
                "full_length": len(ids),
                "target_length": len(target) + len(end),
                "scored_length": len(kept) - max(masked, 1),
            }
        )
    return encoded


def _labels(row: dict) -> list[int]:
    """The ids of an encoded row with the masked ones replaced."""
    masked = row["masked_length"]
    return [IGNORE_INDEX] * masked + row["input_ids"][masked:]


ENCODED_FEATURES = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "masked_length": datasets.Value("int32"),  # BOS and query, after the cut
        "weight": datasets.Value("float32"),
        "reward": datasets.Value("float32"),
        "is_sft": datasets.Value("bool"),
        "role": datasets.Value("string"),
        "where": datasets.Value("string"),
        "full_length": datasets.Value("int32"),  # tokens before the cut
        "target_length": datasets.Value("int32"),  # with EOS, before the cut
        "scored_length": datasets.Value("int32"),  # labels that a token before them predicts
    }
)


@dataclass(frozen=True)
class RowCounts:
    """The rows to train on, and how many were dropped before."""

    rows: int
    sft_rows: int
    truncated: int
    long_targets: int
    empty_targets: int
    mostly_cut: int  # which lose more than nine tenths of their tokens, or of those to score; the dropped ones too
    dropped: int


def load_rows(
    paths: list[str], tokenizer: PreTrainedTokenizerBase, cache_dir: str | None = None, *, drop_unscored: bool = False
) -> tuple[datasets.Dataset, RowCounts]:
    """Read, check and encode the rows of JSON and JSONL files, once: a memory-mapped Dataset of ENCODED_FEATURES.

    A row of whose target nothing is left to score after the cut would be 0/0 in the loss: a ValueError that names the
    first of them, or, with `drop_unscored`, left out and counted.
    Raises FileNotFoundError, and ValueError that names file and line for anything that is not a valid row.
    """
    parts = [FORMAT_VERSION, paths, utils.file_digest(paths), *tokenizer_parts(tokenizer)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]  # datasets adds to it, up to 64 characters
    try:
        rows = datasets.Dataset.from_generator(
            partial(_iter_encoded, paths, tokenizer), features=ENCODED_FEATURES, cache_dir=cache_dir, fingerprint=key
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ from None
    limit = tokenizer.model_max_length
    full, target, scored, is_sft = _columns(rows, "full_length", "target_length", "scored_length", "is_sft")
    kept = scored > 0
    counts = RowCounts(
        rows=int(kept.sum()),
        sft_rows=int(is_sft[kept].sum()),
        truncated=int((full[kept] > limit).sum()),
        long_targets=int((target[kept] > limit).sum()),
        empty_targets=int((target[kept] == 1).sum()),
        mostly_cut=int(((limit < KEPT * full) | (scored < KEPT * target)).sum()),
        dropped=int((~kept).sum()),
    )
    if counts.dropped and not drop_unscored:
        raise ValueError(
            f"{rows[int(kept.argmin())]['where']}: no token of the target is left to learn from at max_length {limit} "
            f"({counts.dropped} such rows). Use --truncation_side left, a larger --max_length, or "
            "--drop_unscored_rows True"
        )
    if not counts.rows:
        raise ValueError(f"{rows[0]['where']}: all {len(rows)} rows are dropped, as nothing is left of a target")
    return rows.select(np.flatnonzero(kept)) if counts.dropped else rows, counts


def _columns(rows: datasets.Dataset, *names: str) -> list[np.ndarray]:
    return [rows.with_format("numpy")[name][:] for name in names]


def _iter_encoded(paths: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict]:
    """Encoded rows; a fast tokenizer encodes those of a batch on all cores."""
    rows = _iter_rows(paths)
    while batch := list(itertools.islice(rows, ROWS_AT_ONCE)):
        yield from encode_and_cut(batch, tokenizer)


def _iter_rows(paths: list[str]) -> Iterator[dict]:
    where = None
    for path in paths:
        for where, record in utils.iter_records(path):
            try:
                yield normalize_row(record) | {"where": where}
            except ValueError as error:
                raise utils.BadRecordError(f"{where}: {error}") from None
    if where is None:
        raise ValueError(f"{', '.join(paths)}: no rows")


def tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> list:
    """Everything of a tokenizer that the encoding of a row depends on."""
    return [
        sorted(tokenizer.get_vocab().items()),
        type(tokenizer).__name__,
        [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        [tokenizer.model_max_length, tokenizer.truncation_side, tokenizer.padding_side],
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else None,
    ]


class RowDataset(torch.utils.data.Dataset):
    """Encoded rows, each with the reference model's log-probability once that is known."""

    def __init__(self, rows: datasets.Dataset, counts: RowCounts):
        self.counts = counts
        self.key = rows._fingerprint  # of the data, the tokenizer, max_length and sides
        self.lengths, self.is_sft, self.role, scored = _columns(rows, "full_length", "is_sft", "role", "scored_length")
        self.num_scored_tokens = int(scored.sum())
        self.rows = rows.select_columns(["input_ids", "masked_length", "weight", "reward", "is_sft"])
        self.number_roles(sorted({role for role in self.role[~self.is_sft] if role}))
        self.ref_logprobs: np.ndarray | None = None  # (rows,) nats per token

    def number_roles(self, names: list[str]) -> None:
        """Number the rows' roles in the order of `names`, from 1; 0 is a row without one of these."""
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

    Returns tensors of shape (batch, longest): input_ids, labels, attention_mask (all int64), and of shape (batch,):
    weights, rewards, sft_mask (float32), and where the rows have them ref_logprobs (float32) and roles (int64);
    and the `scored_places`.
    Raises ValueError for an empty batch.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        utils.ensure_pad_token(tokenizer)
        self.pad_token_id = tokenizer.pad_token_id
        self.pad_left = tokenizer.padding_side == "left"

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        if not examples:
            raise ValueError("cannot make a batch of no rows")

        def column(name: str) -> torch.Tensor:
            return torch.tensor([example[name] for example in examples], dtype=torch.float32)

        labels = self._pad([example["labels"] for example in examples], IGNORE_INDEX)
        batch = {
            "input_ids": self._pad([example["input_ids"] for example in examples], self.pad_token_id),
            "labels": labels,
            "scored_places": scored_places(labels),  # here, since on a GPU everything would wait for it
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
    """Places in the flattened labels, (batch, T), whose next label is scored: (scored tokens,)."""
    return F.pad(labels[:, 1:] != IGNORE_INDEX, (0, 1)).flatten().nonzero()[:, 0]
