"""Training rows: read from files or the hub, encoded into a `datasets.Dataset`, and padded to batches.

files -> load_rows -> Dataset -> SPAGCollator -> batch
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.arrow_writer import ArrowWriter
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from tools.common.errors import UserError, user_errors
from tools.common.files import StrPath, read_records
from tools.common.models import chat_text, check_token, encode_pairs
from tools.common.ranks import on_each_machine, warn_on_rank_0
from tools.common.rowformats import KINDS, read_row, row_kind

IGNORE_INDEX = -100  # label of tokens that are not scored
# Numbers of a row, 1.0 by default. In batches: float32 tensors `weights` and `rewards`, (batch,).
NUMBERS = ("weight", "reward")
ROWS_AT_ONCE = 1000  # rows to tokenize in one call
logger = logging.getLogger(__name__)


class TextRow(NamedTuple):
    """A row's texts and numbers. With `chat_template`, the texts already contain all special tokens."""

    query: str
    target: str
    numbers: dict[str, float]  # those of NUMBERS in the record
    type: Any  # as in the record; rows of games may have none, or any but "sft"
    kind: str  # one of KINDS
    chat_template: bool


def normalize_row(record: dict, tokenizer: PreTrainedTokenizerBase) -> TextRow:
    """Convert a record by `read_row`, and a conversation to texts in the tokenizer's chat template.

    UserError for a record without texts, and for numbers that are NaN or infinite.
    """
    row = read_row(record)
    kind = row_kind(row)
    if "messages" in row:
        row |= messages_to_row(row["messages"], tokenizer)
    chat_template = row.get("chat_template", False)
    if not isinstance(chat_template, bool):
        raise UserError(f"'chat_template' must be true or false, not {chat_template!r:.60}")
    return TextRow(
        query=row["query"],
        target=row["target"],
        numbers=read_numbers(row),
        type=record.get("type"),
        kind=kind,
        chat_template=chat_template,
    )


def read_numbers(row: Mapping) -> dict[str, float]:
    """The row's NUMBERS. UserError for one that is not finite, and for a negative weight."""
    numbers = {}
    for name in filter(row.__contains__, NUMBERS):
        with user_errors(repr(name), TypeError, OverflowError):
            if not math.isfinite(row[name]):
                raise UserError(f"{name!r} must be a finite number, not {row[name]}")
        numbers[name] = float(row[name])
    if numbers.get("weight", 1.0) < 0:
        raise UserError("'weight' is negative; for a row to avoid, set a negative reward and use OfflinePO")
    return numbers


def messages_to_row(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> dict:
    """Convert a conversation to an SFT row whose target is the last reply. Earlier replies are part of the query."""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise UserError("'messages' has no assistant message to be the target")
    before = messages[: replies[-1]]
    # With thinking, the template might open a thought in the query that the reply does not continue.
    render = partial(chat_text, tokenizer, enable_thinking=False)
    with user_errors("the tokenizer's chat template rejects these messages", ValueError, TypeError, TemplateError):
        query = render(before, add_generation_prompt=True)
        whole = render(messages[: replies[-1] + 1])
    if not whole.startswith(query):
        raise UserError("the tokenizer's chat template does not put the reply after its generation prompt")
    return {"query": query, "target": whole.removeprefix(query).rstrip(), "chat_template": True}


def encode_example(example: dict, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Encode one row as [BOS] + query + target + [EOS], truncated to the tokenizer's model_max_length.

    Query and target are tokenized separately and without special tokens, because play also tokenizes the prompt alone.
    With `chat_template`, where the template has written the special tokens, they are tokenized as one text
    (`encode_pairs`). The labels of BOS and query are masked by position, not by id, so that EOS is scored even if PAD
    is the same token. No BOS is added if the tokenizer has none.

    Returns input_ids and labels (lists of equal length), the NUMBERS and the kind. UserError for an invalid row (see
    `normalize_row`), and for one with `chat_template` that does not end in a special token of the tokenizer.
    """
    (row,) = encode([normalize_row(example, tokenizer)], tokenizer)
    lists = {name: row[name].tolist() for name in ("input_ids", "labels")}
    return lists | {name: row[name] for name in (*NUMBERS, "kind")}


def encode(rows: list[TextRow], tokenizer: PreTrainedTokenizerBase, names: Sequence[str] | None = None) -> list[dict]:
    """`encode_example` for many rows, for which a fast tokenizer uses all cores. Ids and labels are int32 arrays.

    Adds `length`, the number of tokens, `is_cut`, whether the row was truncated, and `is_apart`, whether query and
    target in a chat template were encoded separately. `names` of the rows are for errors.
    """
    pairs = encode_pairs(tokenizer, [(row.query, row.target, row.chat_template) for row in rows])
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    limit = tokenizer.model_max_length
    # Truncation drops the beginning of the query or, on the right, the end of the target.
    cut = slice(-limit, None) if tokenizer.truncation_side == "left" else slice(limit)
    encoded = []
    for number, (row, (query, target, is_apart)) in enumerate(zip(rows, pairs, strict=True)):
        if not row.chat_template:
            query = bos + query
            target = [*target, tokenizer.eos_token_id]
        elif not target or target[-1] not in special:
            where = f"{names[number]}: " if names else ""
            raise UserError(
                f"{where}the target {row.target[-40:]!r} does not end in a special token of this tokenizer; make rows "
                "for it with assign_rewards --chat_template True --tokenizer MODEL"
            )
        ids = np.array((query + target)[cut], dtype=np.int32)
        labels = np.array(([IGNORE_INDEX] * len(query) + target)[cut], dtype=np.int32)
        numbers = dict.fromkeys(NUMBERS, 1.0) | row.numbers | {"kind": row.kind}
        lengths = {"length": len(ids), "is_cut": len(query) + len(target) > limit}
        encoded.append({"input_ids": ids, "labels": labels, "is_apart": is_apart} | numbers | lengths)
    return encoded


COLUMNS = Features(
    {
        "index": Value("int64"),  # of the row among all rows, the key of `SPAGCollator.tables`
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "length": Value("int32"),  # tokens, for the Trainer's sampling strategies by length
        "kind": Value("string"),
        **dict.fromkeys(NUMBERS, Value("float64")),
    }
)


def load_rows(
    paths: list[str],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: float = math.inf,
    *,
    file: StrPath | None = None,
    check: Callable[[TextRow], None] = lambda row: None,
    first_index: int = 0,
) -> Dataset:
    """The encoded rows of files or hub data sets, with the COLUMNS.

    UserError names a row that is invalid, that `check` refuses by UserError, whose target is cut off completely, or
    that has a token id of at least `vocab_size`.

    Without `file` the rows are in memory. Otherwise they are written to this Arrow file, which must exist as long as
    the Dataset is used; all ranks must call this together, the first process of each machine encodes, and the others
    read. Nothing is cached between calls, because the cache of `datasets`, whose key is a file's path and a function's
    name, would return stale rows.
    """
    batches = encoded_batches(paths, tokenizer, vocab_size, check, first_index)
    if file is None:
        return concatenate_datasets([Dataset.from_dict(batch, features=COLUMNS) for batch in batches])
    on_each_machine(lambda: write_arrow(file, batches))
    return Dataset.from_file(str(file))


def write_arrow(file: StrPath, batches: Iterable[dict]) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with ArrowWriter(path=str(file), features=COLUMNS) as writer:
        for batch in batches:
            writer.write_batch(batch)
        writer.finalize()


def encoded_batches(
    paths: list[str],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: float,
    check: Callable[[TextRow], None],
    first_index: int,
) -> Iterator[dict[str, list]]:
    """Batches of encoded rows, as columns. Finally logs their number and warns of truncated rows."""

    def read(record: dict) -> TextRow:
        row = normalize_row(record, tokenizer)
        check(row)
        return row

    limit = tokenizer.model_max_length
    count = Counter()
    for path in paths:
        rows = read_records(path, read)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            chunk = rows[start : start + ROWS_AT_ONCE]
            names = [f"{path}: row {number}" for number in range(start + 1, start + len(chunk) + 1)]
            encoded = encode(chunk, tokenizer, names)
            for name, row in zip(names, encoded, strict=True):
                with user_errors(name, UserError):
                    # Nothing predicts a label at position 0, and without other labels the row's loss would be 0/0.
                    if (row["labels"][1:] == IGNORE_INDEX).all():
                        remedy = "use --truncation_side left or a larger --max_length"
                        raise UserError(f"the limit of {limit} tokens cuts off the whole target; {remedy}")
                    check_token(row["input_ids"].max(), tokenizer, vocab_size)
            batch = {name: [row[name] for row in encoded] for name in encoded[0] if name in COLUMNS}
            first = first_index + count["rows"]
            yield batch | {"index": list(range(first, first + len(chunk)))}
            count.update(
                rows=len(chunk),
                **Counter(batch["kind"]),
                cut=sum(row["is_cut"] for row in encoded),
                apart=sum(row["is_apart"] for row in encoded),
            )
    files = ", ".join(paths)
    logger.info("%s: %s", files, ", ".join(f"{count[kind]:,} {name}" for kind, name in KINDS.items()))
    if count["cut"]:
        lost = "beginning, with the rules" if tokenizer.truncation_side == "left" else "end"
        warn_on_rank_0(
            "%s: %d of %d rows are longer than %d tokens and lost their %s; a larger --max_length avoids this",
            *(files, count["cut"], count["rows"], limit, lost),
        )
    if count["apart"]:
        line = "%s: in %d of %d rows a token would span query and target, which are therefore encoded separately"
        warn_on_rank_0(line, files, count["apart"], count["rows"])


def column(rows: Dataset, name: str) -> np.ndarray:
    """A column as an array: (rows,)."""
    return rows.select_columns(name).with_format("numpy")[:][name]


def numbers_by_row(rows: Dataset, *, by_token: bool) -> np.ndarray:
    """A table's number of values for each row: its number of scored tokens, or 1. (rows,)"""
    if not by_token:
        return np.ones(len(rows), dtype=int)
    labels = rows.select_columns("labels").with_format("numpy")
    return np.array([(row["labels"][1:] != IGNORE_INDEX).sum() for row in labels])


def split_by_row(values: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Split a table's values by row: (values,), sizes (rows,) -> a view for each row."""
    return np.split(values, np.cumsum(sizes)[:-1])


class SPAGCollator:
    """Pad encoded rows to the longest one, on the tokenizer's padding side.

    The padding token is PAD, EOS or 0: the first that the tokenizer has and that is below the model's `vocab_size`.

    Returns int64 input_ids, labels and attention_mask, (batch, longest); float32 weights, rewards, game_mask and
    sft_mask (1 for rows of that kind), (batch,); and scored_positions, (scored tokens,). `tables` add further tensors
    by name, with values looked up by row index. Rows are not packed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: float = math.inf):
        tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_token_id = next(token for token in tokens if token is not None and token < vocab_size)
        self.pad_left = tokenizer.padding_side == "left"
        self.tables: dict[str, dict[int, np.ndarray]] = {}

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        def numbers(values: Iterable[float]) -> Tensor:
            return torch.tensor([*values], dtype=torch.float32)

        input_ids = [example["input_ids"] for example in examples]
        labels = self._pad([example["labels"] for example in examples], IGNORE_INDEX)
        batch = {
            "input_ids": self._pad(input_ids, self.pad_token_id),
            "labels": labels,
            # Computed here on the CPU, because on a GPU nonzero() would synchronize.
            "scored_positions": scored_positions(labels),
            "attention_mask": self._pad([[1] * len(ids) for ids in input_ids], 0),
        }
        batch |= {f"{name}s": numbers(example[name] for example in examples) for name in NUMBERS}
        batch |= {f"{kind}_mask": numbers(example["kind"] == kind for example in examples) for kind in KINDS}
        for name, table in self.tables.items():
            batch[name] = torch.from_numpy(np.concatenate([table[example["index"]] for example in examples]))
        return batch

    def _pad(self, sequences: list[list[int]], value: int) -> Tensor:
        tensors = [torch.tensor(ids, dtype=torch.long) for ids in sequences]
        side = "left" if self.pad_left else "right"
        return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def scored_positions(labels: Tensor) -> Tensor:
    """Indices into the flattened (batch, T) labels of the positions that predict a scored label: (scored tokens,)."""
    predicts = F.pad(labels[:, 1:] != IGNORE_INDEX, (0, 1))
    return predicts.flatten().nonzero()[:, 0]
