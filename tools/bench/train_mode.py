"""One mode of bench_train, in a process of its own so that its peak memory is its own.

    python -m tools.bench.train_mode FOLDER     (called by bench_train)

FOLDER/settings.json has bench_train's flags and the `mode`; the figures go to FOLDER/result.json.
"""

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

import train
import trainers
import utils
from arguments import SPAGArguments
from dataloaders import IGNORE_INDEX, SPAGCollator
from tools.bench.train import PLAIN, REBALANCED

# Tokens of the method's rows: a query is rules and instruction, and a message for each of up to 8 earlier ones;
# targets are geometric. SFT rows are short. One of three rows is an SFT row.
RULES_TOKENS, MESSAGE_TOKENS, MOST_EARLIER, MOST_TARGET = 370, 66, 8, 256
SFT_QUERY_TOKENS, SFT_SHARE = (15, 100), 1 / 3
MATMUL_SIZE = {"cpu": 2048, "mps": 4096, "cuda": 8192}


def write_inputs(folder: Path, settings: argparse.Namespace) -> None:
    """Write the model's configuration and tokenizer, and as many rows as the steps take."""
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    words = special + [str(number) for number in range(settings.vocab_size - len(special))]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    LlamaConfig(
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=settings.intermediate_size,
        vocab_size=settings.vocab_size,
        max_position_embeddings=max_length(settings),
        use_cache=False,
    ).save_pretrained(folder)
    rng = random.Random(settings.seed)
    count = settings.batch_size * settings.accumulation * utils.world_size() * (settings.warmup_steps + settings.steps)
    shapes = [method_row(settings, rng) if settings.method_rows else even_row(settings, rng) for _ in range(count)]
    rows = (
        {
            "query": " ".join(rng.choices(words[len(special) :], k=query)),
            "target": " ".join(rng.choices(words[len(special) :], k=target)),
            "reward": rng.random(),
            "type": kind,
        }
        for query, target, kind in shapes
    )
    utils.write_records(folder / "rows.jsonl", rows)


def even_row(settings: argparse.Namespace, rng: random.Random) -> tuple[int, int, str]:
    """Tokens of the query and of the target of a row, by the flags, and its kind."""
    means = (settings.query_tokens, settings.target_tokens)
    spread = settings.length_spread
    query, target = (max(1, round(mean * rng.uniform(1 - spread, 1 + spread))) for mean in means)
    return query, target, "game"


def method_row(settings: argparse.Namespace, rng: random.Random) -> tuple[int, int, str]:
    """The same as the method has them."""
    target = min(MOST_TARGET, 1 + int(rng.expovariate(1 / settings.target_tokens)))
    if rng.random() < SFT_SHARE:
        return rng.randint(*SFT_QUERY_TOKENS), target, "sft"
    return RULES_TOKENS + MESSAGE_TOKENS * rng.randint(0, MOST_EARLIER), target, "game"


def max_length(settings: argparse.Namespace) -> int:
    """Tokens of the longest row, with BOS and EOS."""
    if settings.method_rows:
        return 2 + RULES_TOKENS + MESSAGE_TOKENS * MOST_EARLIER + MOST_TARGET
    means = (settings.query_tokens, settings.target_tokens)
    return 2 + sum(round(mean * (1 + settings.length_spread)) for mean in means)


def full_logits_logprob(model, module, batch: dict[str, torch.Tensor], **how) -> torch.Tensor:
    """What `plain` puts in the place of trainers.label_logprob: (batch,), by way of (batch, T, vocabulary) logits."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return trainers.sequence_logprob(logits, batch["labels"])


def now(device: torch.device | None = None) -> float:
    """Seconds, when the device, this thread's current one unless given, has done all it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize(device)
    return time.perf_counter()


class StepClock(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self):
        self.times: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(now())


class CountingCollator(SPAGCollator):
    """Notes what each batch holds: tokens, places, scored tokens, and the sum of squared lengths."""

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


class TimedTrainer(trainers.OfflinePOTrainer):
    """Takes the time of the pass over the rows that precomputes the reference."""

    reference_seconds = 0.0

    def _reference_pass(self, *args):
        super()._reference_pass(*args)  # warms up
        start = now()
        result = super()._reference_pass(*args)
        self.reference_seconds = now() - start
        return result


def build_arguments(settings: argparse.Namespace, folder: str) -> SPAGArguments:
    """The settings of train.py for the mode."""
    return SPAGArguments(
        train_method="OfflinePO",
        ref_logprobs="online" if settings.mode == PLAIN else "precompute",
        train_sampling_strategy="batch_rebalance" if settings.mode == REBALANCED else "random",
        loss_normalization="step",
        output_dir=f"{folder}/run",
        cache_dir=f"{folder}/cache",
        model_name_or_path=folder,
        ref_model_name_or_path=folder,
        train_data_path=[f"{folder}/rows.jsonl"],
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


def build_model(args: SPAGArguments, dtype: torch.dtype):
    """The random Llama, the same for policy and reference."""
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    with torch.random.fork_rng(), torch.device("cpu" if args.deepspeed else args.device):
        torch.manual_seed(args.seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=args.attn_implementation)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product, the best of ten."""
    size = MATMUL_SIZE[device.type]
    left, right = torch.ones(2, size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(10):
        start = now()
        torch.matmul(left, right)
        seconds.append(now() - start)
    return 2 * size**3 / min(seconds)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"


def measure(settings: argparse.Namespace, folder: str) -> dict:
    """Train as the mode does; the figures of this process."""
    args = build_arguments(settings, folder)
    rate = matmul_rate(args.device, torch.bfloat16 if args.bf16 else torch.float32)
    tokenizer = train.load_tokenizer(args)
    dataset = train.load_dataset(args.train_data_path, tokenizer, args)
    if settings.mode == PLAIN:
        trainers.label_logprob = full_logits_logprob
    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = trainers.peak_memory_gib(args.device)
    dtype = torch.bfloat16 if settings.bf16_weights or (args.bf16 and args.deepspeed) else torch.float32
    clock, collator = StepClock(), CountingCollator(tokenizer)
    trainer = TimedTrainer(
        model=build_model(args, dtype),
        args=args,
        load_reference=lambda: build_model(args, dtype),
        train_dataset=dataset,
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    micro_batches = collator.counts[-settings.steps * settings.accumulation :]
    tokens, places, scored, squares = map(sum, zip(*micro_batches, strict=True))
    epoch_share = settings.steps / (settings.warmup_steps + settings.steps)
    return {
        "device": device_name(args.device),
        "seconds": clock.times[-1] - clock.times[settings.warmup_steps - 1],
        "reference_seconds": trainer.reference_seconds * epoch_share,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "sums": {
            "tokens": tokens,
            "places": places,
            "scored": scored,
            "squares": squares,
            "useful_operations": useful_operations(trainer.module.config, tokens, scored, squares),
            "matmul_rate": rate,
            "peak_gib": trainers.peak_memory_gib(args.device),
            "before_gib": before,
        },
    }


def useful_operations(config: LlamaConfig, tokens: int, scored: int, squares: int) -> int:
    """Operations that the loss and its gradient need; `squares` is the sum of the rows' squared lengths."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)  # not from_config, which ZeRO-3 would partition
    output = model.get_output_embeddings().weight.numel()
    layers = sum(parameter.numel() for parameter in model.parameters()) - 2 * output  # without the input's table
    attention = config.num_hidden_layers * config.hidden_size * squares
    return 6 * (layers * tokens + output * scored + attention)


def main() -> None:
    folder = sys.argv[1]
    settings = argparse.Namespace(**json.loads(Path(folder, "settings.json").read_text(encoding="utf-8")))
    write_inputs(Path(folder), settings)
    try:
        result = measure(settings, folder)
    except torch.cuda.OutOfMemoryError:
        result = None
    utils.write_json(f"{folder}/result.json", result)


if __name__ == "__main__":
    utils.run_program(main)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
