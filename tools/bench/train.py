"""Speed and memory of self-play training: this project's defaults beside the usual recipe, a table with ratios.

    python -m tools.bench.train --accumulation 8
    python -m tools.bench.train --preset 7b --bf16 True --gradient_checkpointing True --deepspeed configs/zero2.json
    python -m tools.bench.train --preset tiny --processes 2 --row_tokens 512

All modes train a random Llama by OfflinePO on the same random rows, each in a process of its own, with the trainer of
train.py:
default     reference log-probabilities computed before the first step by the policy itself, logits only at labels;
rebalanced  the same with --train_sampling_strategy batch_rebalance, which deals the rows of a step out by length;
plain       a second, frozen model runs at every step, and logits are (batch, sequence, vocabulary).
`rebalanced` is measured where a step has several micro-batches; all run under --loss_normalization step and have the
same losses but for the order of the rows. Only `plain` passes an attention mask, as is usual.

Rows have lengths as the method has them: two game rows of any turn to one SFT row. tools/bench/README.md explains the
columns.
"""

import random
import string
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import train
import trainers
import utils
from arguments import SPAGArguments
from dataloaders import IGNORE_INDEX, SPAGCollator
from tools.bench.common import LlamaFlags, Shape, measure_machine, print_results, run_ranks
from tools.engine.generate import now
from tools.flags import flag, parse_flags
from tools.tiny.models import byte_tokenizer

DEFAULT, REBALANCED, PLAIN = "default", "rebalanced", "plain"
COLUMNS = {  # of the table, and how they are printed
    "mode": "{}",
    "tokens/s": "{:.1f}",
    "with reference": "{:.1f}",
    "s/step": "{:.3f}",
    "peak GiB": "{:.3f}",
    "x plain": "{}",
    "last loss": "{:.6f}",
    "MFU": "{:.1%}",
    "padding": "{:.1%}",
}
# Tokens of the method's rows: a query is rules and instruction, and a message for each of up to 8 earlier ones;
# targets are geometric. SFT rows are short. One of three rows is an SFT row.
RULES_TOKENS, MESSAGE_TOKENS, MOST_EARLIER, MEAN_TARGET, MOST_TARGET = 370, 66, 8, 60, 256
SFT_QUERY_TOKENS, SFT_SHARE = (15, 100), 1 / 3
LONGEST_ROW = 2 + RULES_TOKENS + MESSAGE_TOKENS * MOST_EARLIER + MOST_TARGET  # with BOS and EOS


@dataclass
class Settings(LlamaFlags):
    """What is measured."""

    row_tokens: int | None = flag("game rows of so many tokens each, instead of the method's lengths", default=None)
    batch_size: int = flag("rows of a micro-batch and process", default=2)
    accumulation: int = flag("micro-batches of a step", default=1)
    steps: int = flag("measured steps", default=10)
    warmup_steps: int = flag("steps before them that are left out, at least 1", default=2)
    bf16: bool = flag("True: computing in bf16, as train.py does", default=False)
    gradient_checkpointing: bool = flag("True: recompute layers backwards", default=False)
    deepspeed: str | None = flag("DeepSpeed JSON, as for train.py", default=None)

    @property
    def modes(self) -> list[str]:
        """What is measured: rows can only be dealt out by length where a step has several micro-batches."""
        several = self.accumulation * self.processes > 1
        return [DEFAULT, REBALANCED, PLAIN] if several else [DEFAULT, PLAIN]

    def row(self, rng: random.Random) -> dict:
        """A row of random letters, each of them a token."""
        kind, target = "game", min(MOST_TARGET, 1 + int(rng.expovariate(1 / MEAN_TARGET)))
        if self.row_tokens:
            query, target = self.row_tokens - MEAN_TARGET - 2, MEAN_TARGET
        elif rng.random() < SFT_SHARE:
            kind, query = "sft", rng.randint(*SFT_QUERY_TOKENS)
        else:
            query = RULES_TOKENS + MESSAGE_TOKENS * rng.randint(0, MOST_EARLIER)
        query, target = ("".join(rng.choices(string.ascii_letters, k=length)) for length in (query, target))
        return {"query": query, "target": target, "reward": rng.random(), "type": kind}


def make_inputs(folder: Path, settings: Settings) -> None:
    """Write a random Llama, its tokenizer of bytes, and as many rows as the steps take."""
    byte_tokenizer().save_pretrained(folder)
    settings.llama(max_position_embeddings=settings.row_tokens or LONGEST_ROW).save_pretrained(folder)
    rng = random.Random(settings.seed)
    count = settings.batch_size * settings.accumulation * settings.processes * (settings.warmup_steps + settings.steps)
    utils.write_records(folder / "rows.jsonl", (settings.row(rng) for _ in range(count)))


# Trainers.


class TimedTrainer(trainers.OfflinePOTrainer):
    """Times the pass over the rows that precomputes the reference, and steps; counts what each micro-batch holds."""

    reference_seconds = 0.0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.counts: list[torch.Tensor] = []  # tokens, places, scored tokens, and the sum of squared lengths
        self.step_ends: list[float] = []

    def log(self, logs, *args):
        self.step_ends.append(now(self.args.device))
        super().log(logs, *args)

    def training_step(self, model, inputs, *args):
        lengths, scored = inputs["attention_mask"].sum(1), (inputs["labels"][:, 1:] != IGNORE_INDEX).sum()
        places = torch.full_like(scored, inputs["input_ids"].numel())
        self.counts.append(torch.stack([lengths.sum(), places, scored, lengths.square().sum()]))
        return super().training_step(model, inputs, *args)

    def _reference_pass(self, *args):
        super()._reference_pass(*args)  # warms up
        start = now(self.args.device)
        result = super()._reference_pass(*args)
        self.reference_seconds = now(self.args.device) - start
        return result


class PlainTrainer(TimedTrainer):
    """The usual recipe: (batch, T, vocabulary) logits for policy and reference, with an attention mask."""

    def logprob(self, model, module, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return trainers.sequence_logprob(logits, batch["labels"])


# A run.


def measure(settings: Settings, inputs: str, mode: str) -> dict:
    """Train on this rank's share of the rows as train.py does; what it took."""
    with tempfile.TemporaryDirectory() as folder:
        args = SPAGArguments(
            train_method="OfflinePO",
            ref_logprobs="online" if mode == PLAIN else "precompute",
            train_sampling_strategy="batch_rebalance" if mode == REBALANCED else "random",
            loss_normalization="step",
            output_dir=f"{folder}/run",
            cache_dir=f"{folder}/cache",
            model_name_or_path=inputs,
            ref_model_name_or_path=inputs,
            train_data_path=[f"{inputs}/rows.jsonl"],
            max_length=settings.row_tokens or LONGEST_ROW,
            per_device_train_batch_size=settings.batch_size,
            gradient_accumulation_steps=settings.accumulation,
            per_device_eval_batch_size=settings.batch_size,  # the reference pass then has no batch to fill up
            num_train_epochs=1,
            learning_rate=2e-6,  # the paper's, of self-play
            seed=settings.seed,
            bf16=settings.bf16,
            gradient_checkpointing=settings.gradient_checkpointing,
            deepspeed=settings.deepspeed,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        tokenizer = train.load_tokenizer(args)
        trainer = (PlainTrainer if mode == PLAIN else TimedTrainer)(
            model=train.load_model(inputs, args),
            args=args,
            load_reference=lambda: train.load_model(inputs, args),
            train_dataset=train.load_dataset(args.train_data_path, tokenizer, args),
            data_collator=SPAGCollator(tokenizer),
            processing_class=tokenizer,
        )
        trainer.train()
    measured = torch.stack(trainer.counts[-settings.steps * settings.accumulation :])  # (micro-batches, 4)
    tokens, places, scored, squares = measured.sum(0).tolist()
    ends = trainer.step_ends[settings.warmup_steps :]  # the first is the start
    return {
        "seconds": ends[settings.steps] - ends[0],
        "reference_seconds": trainer.reference_seconds * settings.steps / (settings.warmup_steps + settings.steps),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "tokens": tokens,
        "places": places,
        "operations": useful_operations(settings.shape, tokens, scored, squares),
        "peak_gib": trainers.peak_memory_gib(args.device),
    }


def useful_operations(shape: Shape, tokens: int, scored: int, squares: int) -> int:
    """Operations that the loss and its gradient need; `squares` is the sum of the rows' squared lengths.

    6 x (parameters of the layers x tokens + parameters of the output layer x scored tokens), and for causal attention
    6 x layers x hidden size x length^2 a row: neither the reference nor logits that nothing scores nor recomputation.
    """
    norms = (2 * shape.layers + 1) * shape.hidden_size
    output, attention = shape.hidden_size * shape.vocab_size, shape.layers * shape.hidden_size
    return 6 * ((shape.layer_weights + norms) * tokens + output * scored + attention * squares)


# The table.


def compare(settings: Settings) -> list[dict]:
    """Measure the machine, then all modes: the lines of the table."""
    machine = run_ranks(settings.processes, measure_machine, settings.bf16)
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder), settings)
        lines = [measure_mode(settings, machine, folder, mode) for mode in settings.modes]
    for line in lines:
        ratios = (line[name] / lines[-1][name] for name in ("tokens/s", "with reference", "peak GiB"))
        line["x plain"] = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return lines


def measure_mode(settings: Settings, machine: list[dict], folder: str, mode: str) -> dict:
    """One line of the table."""
    ranks = run_ranks(settings.processes, measure, settings, folder, mode)
    names = ("tokens", "places", "operations", "peak_gib")
    tokens, places, operations, peak = (sum(rank[name] for rank in ranks) for name in names)
    seconds, reference = (max(rank[name] for rank in ranks) for name in ("seconds", "reference_seconds"))
    return {
        "mode": mode,
        "tokens/s": tokens / seconds,
        "with reference": tokens / (seconds + reference),
        "s/step": seconds / settings.steps,
        "peak GiB": peak,
        "last loss": ranks[0]["losses"][-1],
        "MFU": operations / seconds / sum(rank["matmul_rate"] for rank in machine),
        "padding": 1 - tokens / places,
        "ranks": ranks,
        "machine": machine,
    }


def main() -> None:
    print_results(COLUMNS, compare(parse_flags(Settings, description=__doc__)))


if __name__ == "__main__":
    utils.run_program(main)
