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
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools import taboo
from tools.match_stats import ALL, BOTH, count_matches, result_rows
from tools.tiny_controls import CONTROLS
from tools.tiny_players import fact_rows, load_lexicon
from utils import iter_records, read_json_or_jsonl, replacing, write_json, write_records

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "configs" / "tiny.yaml"
IMITATION = "imitation"
FIRST_GAMES = "epoch1_episodes"  # of the imitation model, shared by all arms of a seed
PREFIX = "self"
RESULTS, SUMMARY = (f"{PREFIX}_sampling_words_{part}.json" for part in ("results", "summary"))


@dataclass(frozen=True)
class Arm:
    """One way of learning from self-play."""

    title: str
    rows: str | None = None  # a control of CONTROLS, or sft; None: the rows of tools/assign_rewards.py
    flags: tuple[str, ...] = ()  # of train.py
    every_epoch: bool = False  # whether the models of all epochs are evaluated, not only the last


ARMS = {
    "released": Arm("SPAG, loss as released", every_epoch=True),
    "detached": Arm("SPAG, `--detach_kl True`", flags=("--detach_kl", "True"), every_epoch=True),
    "cloning": Arm("filtered behaviour cloning", rows="cloning"),
    "shuffled": Arm("rewards shuffled among the winner's messages", rows="shuffled"),
    "coin": Arm("winner drawn by coin", rows="coin"),
    "sft": Arm("SFT rows only, as many steps", rows="sft"),
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
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        started = time.monotonic()
        with open(log, "w", encoding="utf-8") as file:
            done = subprocess.run([sys.executable, *map(str, command)], stdout=file, stderr=file, env=environment)
        if done.returncode:
            raise RuntimeError(f"{log}: ended with exit status {done.returncode}; run the same command to go on")
        name = log.relative_to(self.args.output_dir).with_suffix("")
        print(f"{time.strftime('%H:%M:%S')} {name}: {time.monotonic() - started:.0f} s", flush=True)

    def train(self, output: Path, start: Path, rows: Path, learning_rate: float, *flags) -> None:
        """One epoch of train.py from a model that is the reference too."""
        if (output / "train_results.json").is_file():
            return
        self.program(
            output.parent / "train.log", ROOT / "train.py", "--output_dir", output, "--model_name_or_path", start,
            "--ref_model_name_or_path", start, "--train_data_path", rows, "--num_train_epochs", 1,
            "--max_length", self.settings["max_length"], "--per_device_train_batch_size", self.settings["train_batch"],
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


def run_arm(world: World, name: str, waits_for: Sequence[Future]) -> None:
    """Epochs of self-play learning in one way."""
    for other in waits_for:
        other.result()
    arm, model, folder = ARMS[name], world.imitation, world.folder / name
    for epoch in range(1, world.args.epochs + 1):
        here = folder / f"epoch{epoch}"
        if not (here / "rows" / "rows.json").is_file():
            make_rows(world, arm, epoch, here, model)
        start, model = model, here / "model"
        flags = ("--train_method", "OfflinePO", *arm.flags)
        world.train(model, start, here / "rows" / "rows.json", world.settings["learning_rate"], *flags)
        if arm.every_epoch or epoch == world.args.epochs:
            world.evaluate(here / "eval", f"{name}{epoch}", model)
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


# --- the table -----------------------------------------------------------------------------------------------------


def result_files(output_dir: Path, seeds: int) -> list[Path]:
    """The games of all evaluations."""
    paths = (output_dir / f"seed{seed}" / arm for seed in range(seeds) for arm in ARMS)
    return [file for path in paths for file in sorted(path.glob("epoch*/eval/games_results.json"))]


def match_table(rows: Sequence[dict], epochs: int) -> Iterator[str]:
    """Points against imitation, a line for each evaluated model: pooled over seeds, and seed by seed."""
    yield (
        "| learning | epoch | points | of each seed | as attacker | as defender | held-out words | clean games "
        "| breaches | ties |"
    )
    yield "|---" * 10 + "|"
    chosen = {(row["player"], row["words"], row["role"], row["seed"]): row for row in rows}
    for name, arm in ARMS.items():
        for epoch in range(1, epochs + 1):
            player = f"{name}{epoch}"
            whole = chosen.get((player, ALL, BOTH, None))
            if whole is None:
                continue
            sides = [chosen[player, ALL, role, None] for role in taboo.ROLES]
            by_seed = [row for key, row in chosen.items() if key[:3] == (player, ALL, BOTH) and key[3] is not None]
            cells = [
                arm.title,
                str(epoch),
                with_interval(whole),
                ", ".join(f"{row['points']:.3f}" for row in by_seed),
                *(with_interval(side) for side in sides),
                with_interval(chosen[player, "held_out", BOTH, None]),
                with_interval(whole["clean"]),
                f"{sides[0]['rates']['breach']['share']:.3f}",
                f"{whole['rates']['tie']['share']:.3f}",
            ]
            yield "| " + " | ".join(cells) + " |"


def with_interval(row: dict) -> str:
    """Points and their 95% interval."""
    low, high = row["points_interval"]
    return f"{row['points']:.3f} [{low:.3f}, {high:.3f}]"


def self_play_table(output_dir: Path, seeds: int, epochs: int) -> Iterator[str]:
    """What the models' games against themselves came to, over all seeds: shares of games, of replies, and length."""
    yield "| learning | model | attacker wins | defender wins | breaches | ties | empty replies | messages |"
    yield "|---" * 8 + "|"
    for name in (name for name, arm in ARMS.items() if arm.every_epoch):
        for epoch in range(epochs + 1):
            place = f"{name}/epoch{epoch + 1}/episodes" if epoch else FIRST_GAMES
            summaries = [read_summary(output_dir / f"seed{seed}" / place) for seed in range(seeds)]
            games = sum(summary["games"] for summary in summaries)
            shares = [sum(summary["outcomes"][outcome] for summary in summaries) / games for outcome in taboo.OUTCOMES]
            empty = sum(summary["empty_replies"] for summary in summaries)
            messages = sum(summary["messages"] for summary in summaries)
            length = sum(summary["mean_length"] * summary["games"] for summary in summaries) / games
            numbers = " | ".join(f"{share:.3f}" for share in (*shares, empty / messages))
            yield f"| {ARMS[name].title} | {f'epoch {epoch}' if epoch else IMITATION} | {numbers} | {length:.2f} |"


def read_summary(folder: Path) -> dict:
    """The summary of the games in a folder."""
    return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))


def write_table(args: argparse.Namespace) -> str:
    """Write table.json and table.md; returns the text."""
    episodes = (episode for path in result_files(args.output_dir, args.seeds) for _, episode in iter_records(path))
    rows = [row for row in result_rows(count_matches(episodes)) if row["opponent"] == IMITATION]
    lines = [*match_table(rows, args.epochs), "", *self_play_table(args.output_dir, args.seeds, args.epochs)]
    text = "\n".join(lines) + "\n"
    write_json(args.output_dir / "table.json", {"results": rows})
    with replacing(args.output_dir / "table.md") as file:
        file.write(text)
    return text


def reproduce(args: argparse.Namespace) -> None:
    """Run what is missing of all seeds and arms, and make the table."""
    args.output_dir = Path(args.output_dir)
    started = time.monotonic()
    with ThreadPoolExecutor(args.workers) as pool:
        worlds = [World(args.output_dir / f"seed{seed}", seed, args) for seed in range(args.seeds)]
        prepared = [pool.submit(prepare, world) for world in worlds]
        runs: dict[tuple[int, str], Future] = {}
        for world, ready in zip(worlds, prepared, strict=True):
            for name, arm in ARMS.items():
                waits_for = [ready] if arm.rows != "sft" else [ready, runs[world.seed, "released"]]
                runs[world.seed, name] = pool.submit(run_arm, world, name, waits_for)
        for run in runs.values():
            run.result()
    print(write_table(args))
    print(f"{(time.monotonic() - started) / 60:.0f} minutes, with {args.workers} processes at a time")
