"""The learning table of the README: self-play learning and its controls in the embedded world, over several seeds.

    python -m tools.tiny_world reproduce --seeds 3 --output_dir outputs/tiny_world

Every seed has its own scripted games, tokenizer, base model, imitation model, self-play and evaluation. Whatever is
finished is kept: the same command continues a run that was cut off. OUTPUT_DIR/seedS holds the world of a seed, a
folder for each arm in it epochK/{episodes,rows,model,eval}; table.md and table.json are written at the end.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import yaml

from tools.games import taboo
from tools.tiny.controls import CONTROLS
from tools.tiny.players import LEXICON, fact_rows, load_lexicon
from tools.tiny.table import FIRST_GAMES, IMITATION, PREFIX, RESULTS, SUMMARY, Arm, read_summary, write_table
from utils import file_digest, iter_records, read_json_or_jsonl, remember_settings, write_records

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "configs" / "tiny.yaml"
TIMES = "programs.jsonl"
LEAST_GUESSED = 0.1  # share of the imitation model's games that end in a right guess, below which it is no yardstick

ARMS = {
    arm.name: arm
    for arm in (
        Arm("released", "SPAG, loss as released", every_epoch=True),
        Arm("detached", "SPAG, `--detach_kl True`", flags=("--detach_kl", "True"), every_epoch=True),
        Arm("cloning", "filtered behaviour cloning", rows="cloning"),
        Arm("shuffled", "rewards shuffled among the winner's messages", rows="shuffled"),
        Arm("coin", "control: winner drawn by coin", rows="coin"),
        Arm("sft", "control: SFT rows only, as many steps", rows="sft"),
    )
}


class World:
    """The programs, with the settings of configs/tiny.yaml, in the folder of one seed."""

    def __init__(self, folder: Path, seed: int, args: argparse.Namespace):
        self.folder, self.seed, self.args = folder, seed, args
        self.settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
        self.data = folder / "data"
        self.imitation = folder / IMITATION / "model"

    def program(self, log: Path, *command) -> None:
        """Run one program with one thread, its output in the log. Raises RuntimeError if it fails."""
        if self.args.stop.is_set():
            raise RuntimeError(f"{log}: not begun, since another program failed")
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        started = time.monotonic()
        with open(log, "a", encoding="utf-8") as file:
            done = subprocess.run([sys.executable, *map(str, command)], stdout=file, stderr=file, env=environment)
        if done.returncode:
            raise RuntimeError(f"{log}: ended with exit status {done.returncode}; run the same command to go on")
        name, seconds = str(log.relative_to(self.args.output_dir).with_suffix("")), time.monotonic() - started
        with open(self.args.output_dir / TIMES, "a", encoding="utf-8") as file:
            file.write(json.dumps({"program": name, "seconds": round(seconds, 1)}) + "\n")
        print(f"{time.strftime('%H:%M:%S')} {name}: {seconds:.0f} s", flush=True)

    def train(self, output: Path, start: Path, rows: Path, learning_rate: float, *flags) -> None:
        """One epoch of train.py from a model that is the reference too."""
        if (output / "train_results.json").is_file():
            return
        batch = self.settings["train_batch"]
        self.program(
            output.parent / "train.log", ROOT / "train.py", "--output_dir", output, "--model_name_or_path", start,
            "--ref_model_name_or_path", start, "--train_data_path", rows, "--num_train_epochs", 1,
            "--max_length", self.settings["max_length"], "--per_device_train_batch_size", batch,
            "--gradient_accumulation_steps", self.settings["global_batch"] // batch, "--overwrite_output_dir", "True",
            "--learning_rate", learning_rate, "--lr_scheduler_type", "cosine", "--warmup_ratio", 0.03,
            "--logging_steps", 5, "--save_strategy", "no", "--seed", self.seed,
            "--cache_dir", self.folder / "cache", *flags,
        )  # fmt: skip

    def game_flags(self) -> tuple:
        """What self-play and evaluation share."""
        settings = self.settings
        return (
            "--task_type", "sampling", "--taboo_max_turns", settings["max_turns"], "--temperature",
            settings["temperature"], "--max_length", settings["max_length"], "--max_new_tokens",
            settings["max_new_tokens"], "--prompt_templates", ROOT / settings["prompts"],
            "--per_device_eval_batch_size", settings["play_batch"], "--logging_steps", 0,
        )  # fmt: skip

    def play(self, folder: Path, model: Path, epoch: int) -> Path:
        """Games of a model against itself, so many for each word; the file of results."""
        if not (folder / SUMMARY).is_file():
            self.program(
                folder / "play.log", "-m", "tools.play_llm_game", "--attacker_model_name_or_path", model,
                "--defender_model_name_or_path", model, "--data_path", self.data / "games.txt", "--output_dir", folder,
                "--model_prefix", PREFIX, "--data_suffix", "words", "--seed", 100 * self.seed + epoch,
                *self.game_flags(),
            )  # fmt: skip
        return folder / RESULTS

    def evaluate(self, folder: Path, name: str, model: Path) -> None:
        """A model against the imitation model, in both roles, on the words of self-play and on the held-out ones."""
        if (folder / "matches.json").is_file():
            return
        self.program(
            folder / "evaluate.log", "-m", "tools.evaluate_games", "--players", f"{IMITATION}={self.imitation}",
            f"{name}={model}", "--against", IMITATION, "--words", f"played={self.data / 'words.txt'}",
            f"held_out={self.data / 'held_out.txt'}", "--games_per_word", self.settings["eval_games_per_word"],
            "--seeds", self.seed, "--output_dir", folder, *self.game_flags(),
        )  # fmt: skip


# --- one seed, one arm ---------------------------------------------------------------------------------------------


def prepare(world: World) -> None:
    """The data, the base model, the imitation model of a seed and that model's games, the first of every arm."""
    world.program(world.folder / "build.log", "-m", "tools.tiny_world", "build", "--output_dir", world.folder,
                  "--seed", world.seed)  # fmt: skip
    words = (world.data / "words.txt").read_text(encoding="utf-8")
    (world.data / "games.txt").write_text(words * world.settings["games_per_word"], encoding="utf-8")
    world.train(world.imitation, world.folder / "base", world.data / "imitation.json",
                world.settings["imitation_lr"], "--train_method", "SFTwithKL")  # fmt: skip
    world.play(world.folder / FIRST_GAMES, world.imitation, 1)
    summary = read_summary(world.folder / FIRST_GAMES)
    guessed = summary["outcomes"][taboo.DEFENDER_WINS] / summary["games"]
    if guessed < LEAST_GUESSED:
        raise RuntimeError(
            f"{world.folder}: the imitation model guesses the word in {guessed:.1%} of its games; it has not learned "
            "the game, and points against it would say little"
        )


def run_arm(world: World, arm: Arm, waits_for: Sequence[Future]) -> None:
    """Epochs of self-play learning in one way."""
    for other in waits_for:
        other.result()
    model, folder = world.imitation, world.folder / arm.name
    for epoch in range(1, world.args.epochs + 1):
        here = folder / f"epoch{epoch}"
        if not (here / "rows" / "rows.json").is_file():
            make_rows(world, arm, epoch, here, model)
        start, model = model, here / "model"
        flags = ("--train_method", "OfflinePO", *arm.flags)
        world.train(model, start, here / "rows" / "rows.json", world.settings["learning_rate"], *flags)
        if arm.every_epoch or epoch == world.args.epochs:
            world.evaluate(here / "eval", f"{arm.name}{epoch}", model)
    if arm.every_epoch:
        world.play(folder / f"epoch{world.args.epochs + 1}" / "episodes", model, world.args.epochs + 1)


def make_rows(world: World, arm: Arm, epoch: int, here: Path, model: Path) -> None:
    """The rows of an epoch, those of the method or a control's, from games of the model."""
    output = here / "rows" / "rows.json"
    facts = world.data / "facts.json"
    if arm.rows == "sft":
        written = here.parents[1] / "released" / here.name / "rows" / "rows_rewards_settings.json"
        number = sum(json.loads(written.read_text(encoding="utf-8"))["rows"][kind] for kind in (*taboo.ROLES, "sft"))
        write_records(output, fact_rows(load_lexicon(), random.Random(f"{world.seed}/{epoch}"), number))
        return
    episodes = world.folder / FIRST_GAMES / RESULTS if epoch == 1 else world.play(here / "episodes", model, epoch)
    if arm.rows is None:
        world.program(
            here / "rows.log", "-m", "tools.assign_rewards", "--input_data_path", episodes, "--output_data_path",
            output, "--sft_data_path", facts, "--prompt_templates", ROOT / world.settings["prompts"],
            *world.settings["reward_args"].split(),
        )  # fmt: skip
        return
    templates = taboo.load_templates(ROOT / world.settings["prompts"])
    sft_rows = [row | {"weight": 1.0} for row in read_json_or_jsonl(facts)]
    rng = random.Random(f"{world.seed}/{epoch}")
    write_records(output, CONTROLS[arm.rows](read_json_or_jsonl(episodes), sft_rows, templates, rng))


# --- all of them ---------------------------------------------------------------------------------------------------


def reproduce(args: argparse.Namespace) -> None:
    """Run what is missing of all seeds and arms, and make the table."""
    args.output_dir = Path(args.output_dir)
    for name in ("seeds", "epochs", "workers"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    args.stop = threading.Event()
    worlds = [World(args.output_dir / f"seed{seed}", seed, args) for seed in range(args.seeds)]
    made_with = worlds[0].settings | {"epochs": args.epochs, "lexicon_sha256": file_digest([LEXICON])}
    remember_settings(args.output_dir / "settings.json", made_with)
    pool = ThreadPoolExecutor(args.workers)
    try:
        for run in as_completed(submit(pool, worlds)):
            run.result()
    finally:
        args.stop.set()  # after a failure: programs that run may end, nothing else begins
        pool.shutdown(cancel_futures=True)
    print(write_table(args.output_dir, list(ARMS.values()), args.seeds, args.epochs))
    seconds = sum(record["seconds"] for _, record in iter_records(args.output_dir / TIMES))
    print(f"The programs took {seconds / 60:.0f} minutes in all; {args.workers} ran at a time, each with one thread.")


def submit(pool: ThreadPoolExecutor, worlds: Sequence[World]) -> list[Future]:
    """All that is to be done, in an order in which nothing waits for what comes after it."""
    prepared = [pool.submit(prepare, world) for world in worlds]
    runs: dict[tuple[int, str], Future] = {}
    for world, ready in zip(worlds, prepared, strict=True):
        for name, arm in ARMS.items():
            waits_for = [ready] if arm.rows != "sft" else [ready, runs[world.seed, "released"]]
            runs[world.seed, name] = pool.submit(run_arm, world, arm, waits_for)
    return [*prepared, *runs.values()]
