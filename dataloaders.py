"""Training rows: read from files or the hub, encoded as token ids in a `datasets.Dataset`, padded to batches.

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

IGNORE_INDEX = -100  # label of a token that is not scored
# The numbers of a row, 1.0 where a record has none. Batches hold them as float32 tensors NAMEs, of shape (batch,).
NUMBERS = ("weight", "reward")
ROWS_AT_ONCE = 1000  # rows that are tokenized in one call
logger = logging.getLogger(__name__)


class TextRow(NamedTuple):
    """A row's texts and numbers. With `chat_template` the texts already contain all special tokens."""

    query: str
    target: str
    numbers: dict[str, float]  # those of NUMBERS that the record has
    type: Any  # as the record has it; rows of games may have any type but "sft", or none
    kind: str  # one of KINDS
    chat_template: bool


def normalize_row(record: dict, tokenizer: PreTrainedTokenizerBase) -> TextRow:
    """Read a raw record, as `read_row` does; a conversation becomes texts in the tokenizer's chat template.

    Raises UserError for a record without texts, and for numbers that are NaN or infinite.
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
    """The NUMBERS that a row has. UserError for one that is not finite, and for a weight below 0."""
    numbers = {}
    for name in filter(row.__contains__, NUMBERS):
        with user_errors(repr(name), TypeError, OverflowError):
            if not math.isfinite(row[name]):
                raise UserError(f"{name!r} must be a finite number, not {row[name]}")
        numbers[name] = float(row[name])
    if numbers.get("weight", 1.0) < 0:
        raise UserError("'weight' is below 0; a row to avoid has a negative reward, under OfflinePO")
    return numbers


def messages_to_row(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> dict:
    """Turn a conversation, as `read_row` gives it, into an SFT row: the last reply is the target.

    A row has one target, so earlier replies belong to the query and are not learned.
    """
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise UserError("'messages' has no assistant message, which would be the target")
    before = messages[: replies[-1]]
    # With thinking, the template might open a thought in the query, which the reply would not continue.
    render = partial(chat_text, tokenizer, enable_thinking=False)
    with user_errors(
        "the tokenizer's chat template does not take these messages", ValueError, TypeError, TemplateError
    ):
        query = render(before, add_generation_prompt=True)
        whole = render(messages[: replies[-1] + 1])
    if not whole.startswith(query):
        raise UserError("the tokenizer's chat template writes a reply elsewhere than where it asks for one")
    return {"query": query, "target": whole.removeprefix(query).rstrip(), "chat_template": True}


def encode_example(example: dict, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Encode one row as [BOS] + query + target + [EOS], cut to the tokenizer's model_max_length.

    Query and target are tokenized separately and without special tokens: in play, too, the prompt is tokenized alone.
    In a row with `chat_template`, whose template has written the special tokens, they are tokenized as one text
    (`encode_pairs`). As many labels are masked as BOS and query have tokens; no id is compared, so EOS is scored even
    if PAD is the same token. A tokenizer without BOS adds none.

    Returns input_ids and labels (lists of one length), the NUMBERS and the kind. Raises UserError for a bad row (see
    `normalize_row`), and for one with `chat_template` that does not end in a special token of the tokenizer.
    """
    (row,) = encode([normalize_row(example, tokenizer)], tokenizer)
    lists = {name: row[name].tolist() for name in ("input_ids", "labels")}
    return lists | {name: row[name] for name in (*NUMBERS, "kind")}


def encode(rows: list[TextRow], tokenizer: PreTrainedTokenizerBase, names: Sequence[str] | None = None) -> list[dict]:
    """`encode_example` of many rows, for which a fast tokenizer uses all cores. Ids and labels are int32 arrays.

    Besides, `length` is the number of tokens, `is_cut` tells whether there were more, and `is_apart` whether query and
    target in a chat template were encoded apart. `names`: what errors call the rows.
    """
    pairs = encode_pairs(tokenizer, [(row.query, row.target, row.chat_template) for row in rows])
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    limit = tokenizer.model_max_length
    # A row loses the beginning of its query, or, if it is cut from the right, the end of its target.
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
                "for it by assign_rewards --chat_template True --tokenizer MODEL"
            )
        ids = np.array((query + target)[cut], dtype=np.int32)
        labels = np.array(([IGNORE_INDEX] * len(query) + target)[cut], dtype=np.int32)
        numbers = dict.fromkeys(NUMBERS, 1.0) | row.numbers | {"kind": row.kind}
        lengths = {"length": len(ids), "is_cut": len(query) + len(target) > limit}
        encoded.append({"input_ids": ids, "labels": labels, "is_apart": is_apart} | numbers | lengths)
    return encoded


COLUMNS = Features(
    {
        "index": Value("int64"),  # of the row among all rows, by which tables know it
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "length": Value("int32"),  # tokens, as the Trainer's sampling strategies by length read it
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
    """The encoded rows of files, or of data sets of the hub, in these COLUMNS.

    UserError names a row that is bad, one that `check` refuses by UserError, one whose target is cut off whole, and
    one with a token of `vocab_size` or above.

    Without `file` the rows lie in memory. Otherwise they are written to this Arrow file and read from there, so it
    must stay as long as the Dataset is used. All ranks of a launch then call this together: the first process of each
    machine encodes and writes, the others read. Nothing of an earlier call is used again. (The cache of `datasets`
    knows a file by its path and a function by its name, and would give the rows that they once gave.)
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
    """Batches of encoded rows, as columns. In the end it logs their number, and warns of rows that were cut."""

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
                    # A label at position 0 is predicted by nothing. The loss of a row without another would be 0/0.
                    if (row["labels"][1:] == IGNORE_INDEX).all():
                        remedy = "use --truncation_side left or a larger --max_length"
                        raise UserError(f"{limit} tokens cut off the whole target; {remedy}")
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
        lost = "beginning, where the rules stand" if tokenizer.truncation_side == "left" else "end"
        warn_on_rank_0(
            "%s: %d of %d rows are longer than %d tokens and lost their %s; a larger --max_length keeps them whole",
            *(files, count["cut"], count["rows"], limit, lost),
        )
    if count["apart"]:
        line = "%s: in %d of %d rows a token would cross the border of query and target; they are encoded apart"
        warn_on_rank_0(line, files, count["apart"], count["rows"])


def column(rows: Dataset, name: str) -> np.ndarray:
    """The numbers of all rows in this column: (rows,)."""
    return rows.select_columns(name).with_format("numpy")[:][name]


def numbers_by_row(rows: Dataset, *, by_token: bool) -> np.ndarray:
    """How many numbers a table has for each row: the number of its scored tokens, or 1. Of shape (rows,)."""
    if not by_token:
        return np.ones(len(rows), dtype=int)
    labels = rows.select_columns("labels").with_format("numpy")
    return np.array([(row["labels"][1:] != IGNORE_INDEX).sum() for row in labels])


def split_by_row(values: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """The numbers of each row: (numbers of all rows,), (rows,) -> a view for each row."""
    return np.split(values, np.cumsum(sizes)[:-1])


class SPAGCollator:
    """Pad encoded rows to the longest of them, on the tokenizer's padding side, with PAD, EOS or token 0.

    It is the first of these that the tokenizer has and that is below the model's `vocab_size`.

    Returns input_ids, labels and attention_mask, int64 tensors of shape (batch, longest); the NUMBERS as weights and
    rewards, and game_mask and sft_mask, 1 for the rows of this kind, float32 of shape (batch,); scored_positions,
    (scored tokens,). `tables`: further tensors by name, whose numbers are looked up by the row's index.

    Rows are not packed: each line of the batch is one row.
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
            # On the CPU, since on a GPU nonzero() would wait for its result.
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
