"""Measure the speed of self-play and of training beside other ways to do the same, with a random Llama.

    python -m tools.bench play
    python -m tools.bench train --accumulation 8
    python -m tools.bench play --modes vllm default --preset 7b --bf16 True

Each mode runs in a process of its own, and its line of the table is printed when it ends. "ratio" divides by the first
mode. tools/README.md explains the tables.
"""

import asyncio
import importlib.metadata
import math
import multiprocessing
import os
import random
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tools.flags import flag, parse_command  # isort: skip  (first: it imports utils, see train.py)
import torch
from transformers import PrinterCallback

import train
import trainers
import utils
from arguments import SPAGArguments
from dataloaders import SPAGCollator
from tools.engine.generate import now
from tools.engine.model import own_device
from tools.engine.vllm import VLLM
from tools.games import load_game
from tools.games.game import ROOT
from tools.games.prompts import default_templates
from tools.selfplay.flags import GENERATE, PlayFlags
from tools.selfplay.lineup import Lineup
from tools.selfplay.play import play_games
from tools.tiny.models import byte_tokenizer, random_llama, train_tokenizer

RELEASE, BATCHED, DEFAULT, REBALANCED, PLAIN = "release", "batched", "default", "rebalanced", "plain"
FORCED, DRAWN = "forced", "drawn"
TURNS, FORCED_TOKENS, MEAN_TOKENS, MOST_TOKENS = 3, 32, 60, 256  # of a game; of replies
FEWER = {RELEASE: 16, BATCHED: 6}  # slow modes play so many times fewer games
# Hidden size, layers, heads, heads of keys and values, intermediate size, vocabulary.
SHAPES = {
    "tiny": (32, 2, 2, 2, 64, 400),
    "30m": (512, 8, 8, 8, 1376, 8000),
    "1b": (2048, 22, 32, 4, 5632, 32000),
    "7b": (4096, 32, 32, 32, 11008, 32000),
}
# Tokens of training rows, as in the method: a query has rules, an instruction and up to 8 messages; the lengths of
# targets are geometric, as those of replies; one row of three is a short SFT row.
RULES_TOKENS, MESSAGE_TOKENS, MOST_MESSAGES, SFT_TOKENS, SFT_SHARE = 370, 66, 8, (15, 100), 1 / 3
LONGEST_ROW = 2 + RULES_TOKENS + MESSAGE_TOKENS * MOST_MESSAGES + MOST_TOKENS


@dataclass(kw_only=True)
class Bench:
    """Settings of both measurements. `lines` of each yields a line of its table when a mode has ended."""

    preset: str = flag("shape of the Llama", default="30m", choices=list(SHAPES))
    seed: int = flag("seed of all random numbers", default=42)
    bf16: bool = flag("compute in bfloat16", default=False)

    columns: ClassVar[dict[str, str]]  # names and formats

    def llama(self, positions: int, dtype: torch.dtype = torch.float32):
        """A random Llama of the preset's shape, with this many positions."""
        names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"]
        *shape, vocabulary = SHAPES[self.preset]
        config = dict(zip(names, shape, strict=True)) | {"max_position_embeddings": positions}
        return random_llama(vocabulary, self.seed, dtype=dtype, **config)

    def run(self) -> None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
        packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
        print(f"{device}; {packages}\n")
        print(f"| {' | '.join(self.columns)} |\n|{'---|' * len(self.columns)}")
        for line in self.lines():
            print(f"| {' | '.join(form.format(line[name]) for name, form in self.columns.items())} |", flush=True)


def in_new_process(measure: Callable[..., dict], *args) -> dict:
    """Return `measure(*args)`, computed in a new process so that its peak of memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *args).result()


@dataclass(kw_only=True)
class Play(Bench):
    """Self-play: tools/play_llm_game.py's default beside other ways to generate.

    release: one game at a time, and the whole prompt is computed for each message, as in the first release;
    batched: whole batches by plain `generate`; default: our engine; vllm: --engine vllm, without its start.
    Replies have 32 tokens, or their lengths are drawn: geometric with mean 60, cut at 256. The draw depends on seed,
    game and message only, so all modes play the same lengths.
    """

    modes: list[str] = flag(
        "modes to measure, in this order",
        default=[RELEASE, BATCHED, DEFAULT],
        choices=[RELEASE, BATCHED, DEFAULT, VLLM],
    )
    lengths: list[str] = flag("how long replies are", default=[FORCED, DRAWN], choices=[FORCED, DRAWN])
    games: int = flag("games of default and vllm; batched plays a sixth of them, release a sixteenth", default=200)

    columns = {"lengths": "{}", "mode": "{}", "games": "{}", "at once": "{}", "games/min": "{:.1f}"}
    columns |= {"new tokens/s": "{:.1f}", "peak GiB": "{:.2f}", "ratio": "{:.2f}"}

    def reply_tokens(self, lengths: str, game: int, message: int) -> int:
        """The length of a reply in tokens, the same in every mode."""
        if lengths == FORCED:
            return FORCED_TOKENS
        uniform = random.Random(f"{self.seed}/{game}/{message}").random()
        return min(MOST_TOKENS, 1 + int(math.log(1 - uniform) / math.log(1 - 1 / MEAN_TOKENS)))

    def write_model(self, folder: Path) -> None:
        """Write a model that never ends a reply by itself: the 50 tokens that top-k leaves are always words."""
        texts = [*default_templates(load_game())["rules"] * 20, *utils.read_words(ROOT / "data/target_words.txt")]
        tokenizer = train_tokenizer(texts, SHAPES[self.preset][-1])
        model = self.llama(4096, torch.bfloat16 if self.bf16 else torch.float32)
        shown = [tokenizer.decode(token, skip_special_tokens=True) for token in range(len(model.lm_head.weight))]
        others = [token for token, text in enumerate(shown) if not (text.isascii() and text.strip().isalpha())]
        model.lm_head.weight.data[others] = 0  # logit 0, below those of the 50 likeliest words
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)

    def lines(self) -> Iterator[dict]:
        with tempfile.TemporaryDirectory() as folder:
            self.write_model(Path(folder))
            for lengths in self.lengths:
                first = None
                for mode in self.modes:
                    line = in_new_process(measure_play, self, folder, mode, lengths)
                    first = first or line
                    yield line | {"ratio": line["new tokens/s"] / first["new tokens/s"]}


def measure_play(settings: Play, model: str, mode: str, lengths: str) -> dict:
    """Play a mode's games as tools/play_llm_game.py does; return its line of the table and the lengths of replies."""
    engines = {RELEASE: {"engine": GENERATE, "per_device_eval_batch_size": 1, "concurrent_games": 1}}
    engines |= {BATCHED: {"engine": GENERATE}, VLLM: {"engine": VLLM}}
    flags = PlayFlags(max_turns=TURNS, bf16=settings.bf16, **engines.get(mode, {}))
    number = max(1, settings.games // FEWER.get(mode, 1))
    # Target words that no reply contains by chance.
    words = ["zq" + f"{game:05}".translate(str.maketrans("0123456789", "abcdefghij")) for game in range(number)]
    games, episodes = list(enumerate(words)), []
    game = flags.load_game()
    lineup = Lineup(flags, game)
    try:
        players, at_once = lineup.build_players([model] * 2, seed=settings.seed, games_left=number)
        for player in players.values():
            player.limit = lambda turn: settings.reply_tokens(lengths, turn.index, len(turn.history))
        started = time.monotonic()
        playing = play_games(
            game, games, players, max_turns=TURNS, concurrent_games=at_once, on_episode=episodes.append
        )
        asyncio.run(playing)
        seconds = time.monotonic() - started
    finally:
        lineup.end()
    tokens = [reply["tokens"] for episode in episodes for reply in episode["replies"]]
    line = {"lengths": lengths, "mode": mode, "games": number, "at once": min(at_once, number)}
    line |= {"games/min": 60 * number / seconds, "new tokens/s": sum(tokens) / seconds, "reply_tokens": tokens}
    return line | {"peak GiB": trainers.peak_memory_gib(own_device())}


@dataclass(kw_only=True)
class Train(Bench):
    """Self-play training: train.py's OfflinePO beside the usual recipe, on the same random rows.

    plain: a second, frozen model at every step, logits at all positions, an attention mask; default: reference
    log-probabilities before the first step, logits only at labels; rebalanced: the same with
    --train_sampling_strategy batch_rebalance, if a step has several micro-batches. All of them use
    --loss_normalization step.
    """

    batch_size: int = flag("rows of a micro-batch", default=2)
    accumulation: int = flag("micro-batches of a step", default=1)
    steps: int = flag("measured steps, after as many to warm up", default=5)
    gradient_checkpointing: bool = flag("recompute activations in the backward pass", default=False)
    deepspeed: str | None = flag("DeepSpeed JSON, as for train.py", default=None)

    columns = {"mode": "{}", "tokens/s": "{:.1f}", "with reference": "{:.1f}", "peak GiB": "{:.2f}"}
    columns |= {"last loss": "{:.5f}", "ratio": "{:.2f}"}

    def row(self, rng: random.Random) -> dict:
        """A training row of random letters; each letter is a token."""
        target = min(MOST_TOKENS, 1 + int(rng.expovariate(1 / MEAN_TOKENS)))
        kind, query = "game", RULES_TOKENS + MESSAGE_TOKENS * rng.randint(0, MOST_MESSAGES)
        if rng.random() < SFT_SHARE:
            kind, query = "sft", rng.randint(*SFT_TOKENS)
        query, target = ("".join(rng.choices(string.ascii_letters, k=length)) for length in (query, target))
        return {"query": query, "target": target, "reward": rng.random(), "type": kind}

    def lines(self) -> Iterator[dict]:
        rng, first = random.Random(self.seed), None
        rows = self.batch_size * self.accumulation * 2 * self.steps
        with tempfile.TemporaryDirectory() as folder:
            byte_tokenizer().save_pretrained(folder)
            self.llama(LONGEST_ROW).save_pretrained(folder)
            utils.write_records(Path(folder, "rows.jsonl"), (self.row(rng) for _ in range(rows)))
            for mode in [PLAIN, DEFAULT, REBALANCED] if self.accumulation > 1 else [PLAIN, DEFAULT]:
                line = in_new_process(measure_train, self, folder, mode)
                first = first or line
                yield line | {"ratio": line["with reference"] / first["with reference"]}


class TimedTrainer(trainers.OfflinePOTrainer):
    """Measures how long the reference takes before the first step."""

    reference_seconds = 0.0

    def _reference_pass(self, *args):
        start = now(self.args.device)
        result = super()._reference_pass(*args)
        self.reference_seconds += now(self.args.device) - start
        return result


class PlainTrainer(TimedTrainer):
    """The usual recipe: a frozen second model beside the policy, logits at all positions, an attention mask."""

    def prepare_reference(self):
        self.reference = self._load_reference_model()

    def logprob(self, model, module, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return trainers.sequence_logprob(logits, batch["labels"])

    def reference_logprob(self, batch):
        return self._frozen_logprob(self.reference, self.reference, batch)


def measure_train(settings: Train, inputs: str, mode: str) -> dict:
    """Train on the rows as train.py does; return a line of the table and the losses."""
    with tempfile.TemporaryDirectory() as folder:
        args = SPAGArguments(
            train_method="OfflinePO",
            train_sampling_strategy="batch_rebalance" if mode == REBALANCED else "random",
            loss_normalization="step",
            output_dir=folder,
            model_name_or_path=inputs,
            ref_model_name_or_path=inputs,
            train_data_path=[f"{inputs}/rows.jsonl"],
            max_length=LONGEST_ROW,
            per_device_train_batch_size=settings.batch_size,
            gradient_accumulation_steps=settings.accumulation,
            per_device_eval_batch_size=settings.batch_size,  # the reference pass then has no batch to fill up
            num_train_epochs=1,
            learning_rate=2e-6,  # the paper's
            seed=settings.seed,
            bf16=settings.bf16,
            gradient_checkpointing=settings.gradient_checkpointing or None,  # False would warn of its old name
            deepspeed=settings.deepspeed,
            logging_steps=settings.steps,
            save_strategy="no",
            disable_tqdm=True,
        )
        tokenizer = train.load_tokenizer(args)
        trainer = (PlainTrainer if mode == PLAIN else TimedTrainer)(
            model=train.load_model(inputs, args),
            args=args,
            load_reference=lambda: train.load_model(inputs, args),
            train_dataset=train.load_dataset(args, tokenizer, args.train_data_path, path=Path(folder, "rows.arrow")),
            data_collator=SPAGCollator(tokenizer),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    speed = logs[-1]["tokens_per_second"]
    reference = trainer.reference_seconds / sum(trainer.train_dataset.lengths)  # seconds of a token
    line = {"mode": mode, "losses": [entry["loss"] for entry in logs], "last loss": logs[-1]["loss"]}
    line |= {"tokens/s": speed, "with reference": 1 / (1 / speed + reference)}
    return line | {"peak GiB": trainers.peak_memory_gib(args.device)}


def main() -> None:
    parse_command({"play": Play, "train": Train}, description=__doc__).run()


if __name__ == "__main__":
    utils.run_program(main)
