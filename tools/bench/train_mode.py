"""One mode of the benchmark of training: what is trained on, and training in this process."""

import random
import string
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TrainerCallback

import train
import trainers
import utils
from arguments import SPAGArguments
from dataloaders import IGNORE_INDEX, SPAGCollator
from tools.bench.common import LlamaFlags, device_name, matmul_rate
from tools.engine.generate import now
from tools.tiny.models import byte_tokenizer
from utils import flag

# Tokens of the method's rows: a query is rules and instruction, and a message for each of up to 8 earlier ones;
# targets are geometric. SFT rows are short. One of three rows is an SFT row.
RULES_TOKENS, MESSAGE_TOKENS, MOST_EARLIER, MOST_TARGET = 370, 66, 8, 256
SFT_QUERY_TOKENS, SFT_SHARE = (15, 100), 1 / 3


@dataclass
class Settings(LlamaFlags):
    """What is measured."""

    query_tokens: int = flag("tokens of a row's query", default=450)
    target_tokens: int = flag(
        "tokens of a row's target, with --method_rows their mean; BOS and EOS besides", default=60
    )
    method_rows: bool = flag(
        "True: two game rows of any turn to one SFT row, of lengths as the method has them, instead of these",
        default=False,
    )
    batch_size: int = flag("rows of a micro-batch and process", default=2)
    accumulation: int = flag("micro-batches of a step", default=1)
    steps: int = flag("measured steps", default=10)
    warmup_steps: int = flag("steps before them that are left out, at least 1", default=2)
    learning_rate: float = flag("learning rate", default=2e-6)
    bf16: bool = flag("True: fp32 weights, computing in bf16, as train.py does", default=False)
    bf16_weights: bool = flag("True: weights and optimizer are bf16 as well", default=False)
    gradient_checkpointing: bool = flag("True: recompute layers backwards", default=False)
    attn_implementation: str = flag("attention kernel", default="sdpa")
    deepspeed: str | None = flag("DeepSpeed JSON, as for train.py", default=None)
    use_cpu: bool = flag("True: leave the GPU alone", default=False)
    repeats: int = flag("measure each mode so often, in turn; the fastest run counts", default=1)

    def problems(self) -> list[str]:
        """What is wrong with the flags, a phrase each."""
        counts = ("query_tokens", "target_tokens", "batch_size", "accumulation", "steps", "warmup_steps", "repeats")
        return super().problems() + utils.too_small(self, **dict.fromkeys(counts, 1))


# --- what is trained on --------------------------------------------------------------------------------------------


def make_inputs(folder: Path, settings: Settings) -> None:
    """Write a random Llama, its tokenizer of bytes, and as many rows of random letters as the steps take."""
    byte_tokenizer().save_pretrained(folder)
    settings.llama(max_position_embeddings=max_length(settings)).save_pretrained(folder)
    rng = random.Random(settings.seed)
    count = settings.batch_size * settings.accumulation * utils.world_size() * (settings.warmup_steps + settings.steps)
    shape = (settings.query_tokens, settings.target_tokens, "game")
    shapes = [method_row(settings.target_tokens, rng) if settings.method_rows else shape for _ in range(count)]
    rows = (
        {
            "query": "".join(rng.choices(string.ascii_letters, k=query)),
            "target": "".join(rng.choices(string.ascii_letters, k=target)),
            "reward": rng.random(),
            "type": kind,
        }
        for query, target, kind in shapes
    )
    utils.write_records(folder / "rows.jsonl", rows)


def method_row(mean_target: int, rng: random.Random) -> tuple[int, int, str]:
    """Tokens of a row's query and target as the method has them, and its kind."""
    target = min(MOST_TARGET, 1 + int(rng.expovariate(1 / mean_target)))
    if rng.random() < SFT_SHARE:
        return rng.randint(*SFT_QUERY_TOKENS), target, "sft"
    return RULES_TOKENS + MESSAGE_TOKENS * rng.randint(0, MOST_EARLIER), target, "game"


def max_length(settings: Settings) -> int:
    """Tokens of the longest row, with BOS and EOS."""
    if settings.method_rows:
        return 2 + RULES_TOKENS + MESSAGE_TOKENS * MOST_EARLIER + MOST_TARGET
    return 2 + settings.query_tokens + settings.target_tokens


# --- trainers ------------------------------------------------------------------------------------------------------


class TimedTrainer(trainers.OfflinePOTrainer):
    """Times the pass over the rows that precomputes the reference."""

    reference_seconds = 0.0

    def _reference_pass(self, *args):
        super()._reference_pass(*args)  # warms up
        start = now(self.args.device)
        result = super()._reference_pass(*args)
        self.reference_seconds = now(self.args.device) - start
        return result


class PlainTrainer(TimedTrainer):
    """The usual recipe: (batch, T, vocabulary) logits for policy and reference, with an attention mask."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ref_logprob = self.reference_logprob(inputs)
        loss, metrics = self.method_loss(self._logprob(model, inputs), ref_logprob, inputs, num_items_in_batch)
        self.metrics.add(metrics, inputs)
        return loss

    def _frozen_logprob(self, model, module, batch):
        with torch.no_grad(), self.accelerator.autocast():
            return self._logprob(model, batch)

    def _logprob(self, model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return trainers.sequence_logprob(logits, batch["labels"])


class StepClock(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self):
        self.times: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(now(args.device))


class CountingCollator(SPAGCollator):
    """Counts what each batch holds: tokens, places, scored tokens, and the sum of squared lengths."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.counts: list[tuple[int, int, int, int]] = []

    def __call__(self, examples):
        batch = super().__call__(examples)
        lengths = batch["attention_mask"].sum(1)
        scored = (batch["labels"][:, 1:] != IGNORE_INDEX).sum()
        places = batch["input_ids"].numel()
        self.counts.append((lengths.sum().item(), places, scored.item(), lengths.square().sum().item()))
        return batch


# --- a run ---------------------------------------------------------------------------------------------------------


def build_arguments(settings: Settings, inputs: str, folder: str, *, plain: bool, rebalanced: bool) -> SPAGArguments:
    """The settings of train.py."""
    return SPAGArguments(
        train_method="OfflinePO",
        ref_logprobs="online" if plain else "precompute",
        train_sampling_strategy="batch_rebalance" if rebalanced else "random",
        loss_normalization="step",
        output_dir=f"{folder}/run",
        cache_dir=f"{folder}/cache",
        model_name_or_path=inputs,
        ref_model_name_or_path=inputs,
        train_data_path=[f"{inputs}/rows.jsonl"],
        max_length=max_length(settings),
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulation,
        per_device_eval_batch_size=settings.batch_size,  # the reference pass then has no batch to fill up
        num_train_epochs=1,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        bf16=settings.bf16 or settings.bf16_weights,
        gradient_checkpointing=settings.gradient_checkpointing,
        attn_implementation=settings.attn_implementation,
        deepspeed=settings.deepspeed,
        use_cpu=settings.use_cpu,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )


def measure(settings: Settings, inputs: str, plain: bool, rebalanced: bool) -> dict:
    """Train on this rank's share of the rows as train.py does; what it took."""
    with tempfile.TemporaryDirectory() as folder:
        args = build_arguments(settings, inputs, folder, plain=plain, rebalanced=rebalanced)
        rate = matmul_rate(args.device, torch.bfloat16 if args.bf16 else torch.float32)
        tokenizer = train.load_tokenizer(args)
        dataset = train.load_dataset(args.train_data_path, tokenizer, args)
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = trainers.peak_memory_gib(args.device)
        clock, collator = StepClock(), CountingCollator(tokenizer)
        trainer = (PlainTrainer if plain else TimedTrainer)(
            model=load_model(settings, args),
            args=args,
            load_reference=lambda: load_model(settings, args),
            train_dataset=dataset,
            data_collator=collator,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    measured = torch.tensor(collator.counts[-settings.steps * settings.accumulation :])  # (micro-batches, 4)
    tokens, places, scored, squares = measured.sum(0).tolist()
    return {
        "device": device_name(args.device),
        "seconds": clock.times[-1] - clock.times[settings.warmup_steps - 1],
        "reference_seconds": trainer.reference_seconds * settings.steps / (settings.warmup_steps + settings.steps),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "sums": {
            "tokens": tokens,
            "places": places,
            "scored": scored,
            "squares": squares,
            "useful_operations": useful_operations(settings, tokens, scored, squares),
            "matmul_rate": rate,
            "peak_gib": trainers.peak_memory_gib(args.device),
            "before_gib": before,
        },
    }


def load_model(settings: Settings, args: SPAGArguments):
    """The random Llama as train.py loads it, or in bf16 on its device."""
    model = train.load_model(args.model_name_or_path, args)
    return model.to(torch.bfloat16) if settings.bf16_weights and not args.deepspeed else model


def useful_operations(settings: Settings, tokens: int, scored: int, squares: int) -> int:
    """Operations that the loss and its gradient need; `squares` is the sum of the rows' squared lengths."""
    hidden = settings.hidden_size
    norms = (2 * settings.layers + 1) * hidden
    attention = settings.layers * hidden * squares
    return 6 * ((settings.layer_weights + norms) * tokens + hidden * settings.vocab_size * scored + attention)
