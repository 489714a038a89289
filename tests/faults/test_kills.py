"""The kill matrix: after a kill, the same command must give the results of an undisturbed run.

A program is killed when its output reaches a random size: while it starts, works, saves, or ends. Undisturbed runs and
starts after a kill run in this process unless they need a launcher.
"""

import functools
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from helpers import ENVIRONMENT, ROOT, TORCHRUN, call, finish, flags_of, kill_all, start, users_of, wait_for, words_of
from safetensors.torch import load_file
from trials import scratch

import train
from tools import assign_rewards, evaluate_games, play_llm_game

WORDS = [f"word{number}" for number in range(24)]
LEAVING = 10  # seconds within which a launch has ended after SIGTERM
SURVIVING = 120  # seconds within which ranks have ended their work after a kill of their launcher


class Program(NamedTuple):
    """A program that is killed: flags for an output folder, and what is compared of the results."""

    main: Callable[[], object]
    flags: Callable[[Path], dict]
    results: Callable[[Path], dict]
    batch: str | None = None  # the batch size per process; two processes get half of it each
    oracle: str | None = None  # the program whose undisturbed run gives the expected results; None: this one
    tolerance: float = 0.0  # of results that are tensors

    def words(self, output: Path, processes: int = 1) -> list[str]:
        flags = self.flags(output)
        if self.batch:
            flags[self.batch] //= processes
        return flags_of(flags)


class Kill(NamedTuple):
    """A row of the matrix."""

    program: str
    launcher: str = "alone"  # or torchrun, with two processes
    how: str = "all"  # SIGKILL to all processes; "launcher": to torchrun alone; or a signal to the launch
    always: bool = False  # True: every test run makes a trial; False: only a campaign does

    def __str__(self) -> str:
        return f"{self.program}, {self.launcher}, {self.how}"


MATRIX = [
    Kill("play", always=True),
    Kill("play", "torchrun"),
    Kill("play", "torchrun", "launcher", always=True),
    Kill("play", "torchrun", "SIGTERM", always=True),
    Kill("rewards", always=True),
    Kill("matches", always=True),
    Kill("training", always=True),
    Kill("training", "torchrun", always=True),
    Kill("training", "torchrun", "launcher"),
    Kill("training", "torchrun", "SIGTERM"),
    Kill("DeepSpeed", "torchrun", always=True),
]


@pytest.mark.parametrize("kill", MATRIX, ids=str)
def test_a_killed_program_ends_with_what_an_undisturbed_run_leaves(kill, folder, programs, tmp_path, trials):
    program = programs[kill.program]

    def trial(rng: random.Random) -> int:
        name = program.oracle or kill.program
        expected, size = undisturbed(programs[name], folder / name)
        with scratch(tmp_path) as place:
            delivered = 0
            for _ in range(rng.randint(1, 3) if trials.campaign else 1):
                delivered += start_and_kill(kill, program, place / "out", rng.uniform(0, 0.9) * size, rng)
            if kill.program == "DeepSpeed":  # it can continue only with the same number of processes
                finish(start(command(kill, program, place / "out")))
            else:
                call(program.main, *program.words(place / "out"))
            same(program.results(place / "out"), expected, program.tolerance)
        return delivered

    trials.run(f"killed: {kill}", trial, short=int(kill.always), each=1)


def undisturbed(program: Program, output: Path) -> tuple[dict, int]:
    """Return the results of an undisturbed run, which is made once, and the size of its output in bytes."""
    if not output.exists():
        call(program.main, *program.words(output))
    return program.results(output), size_of(output)


def command(kill: Kill, program: Program, output: Path) -> list[str]:
    """The command line of a new process."""
    launcher = [*TORCHRUN, "--nproc_per_node=2"] if kill.launcher == "torchrun" else [sys.executable]
    return [*launcher, "-m", program.main.__module__, *program.words(output, 2 if kill.launcher == "torchrun" else 1)]


def start_and_kill(kill: Kill, program: Program, output: Path, size: float, rng: random.Random) -> bool:
    """Start a program, kill it when its output has this size in bytes; return whether it was still running.

    No process of the program is left: ranks that outlive their launcher are waited for.
    """
    process = start(command(kill, program, output))
    wait_for(lambda: size_of(output) >= size, process)
    time.sleep(rng.uniform(0, 0.02))
    running = process.poll() is None
    if kill.how == "all":
        kill_all(process, output)
    else:
        signum = signal.SIGKILL if kill.how == "launcher" else getattr(signal, kill.how)
        processes = users_of(output)
        process.send_signal(signum)
        process.communicate(timeout=LEAVING)
        assert not psutil.wait_procs(processes, timeout=SURVIVING if kill.how == "launcher" else LEAVING)[1]
    return running


def size_of(output: Path) -> int:
    """Return the bytes of all files of a folder, while a program may be writing there."""
    total = 0
    for path in output.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # deleted meanwhile
            continue
    return total


def same(results: dict, expected: dict, tolerance: float) -> None:
    """Equal bytes of files; tensors within a tolerance."""
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(results[name], value, rtol=tolerance, atol=tolerance)
        else:
            assert results[name] == value, name


# The programs.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with inputs, and with the output of undisturbed runs."""
    folder = tmp_path_factory.mktemp("kills")
    (folder / "words.txt").write_text("\n".join(WORDS))
    rules = [f"Rule {number}: {{max_turns}} turns.\n" for number in range(8)]
    prompts = {"rules": rules, "attacker_instruction": "Hide `{target_word}`.", "defender_instruction": "Guess."}
    (folder / "prompts.json").write_text(json.dumps(prompts))
    (folder / "rows.json").write_text(json.dumps(make_rows(192)))
    won = [{"role": "attacker", "content": "Hm."}, {"role": "defender", "content": "I know the word! It is `art`!"}]
    game = {"target_word": "art", "max_turns": 5, "history": won}
    (folder / "games.jsonl").write_text((json.dumps(game) + "\n") * 20_000)
    return folder


def make_rows(count: int) -> list[dict]:
    """Rows of games and SFT rows, of different lengths."""
    rng = random.Random(0)
    rows = []
    for index in range(count):
        row = {"query": "ask " * rng.randint(2, 12), "target": "say " * rng.randint(1, 6), "weight": 1.0}
        of_game = {"reward": rng.random(), "role": ("attacker", "defender")[index % 2]}
        rows.append(row | (of_game if rng.random() < 0.7 else {"type": "sft"}))
    return rows


@pytest.fixture(scope="module")
def programs(folder, tiny_model, other_model) -> dict[str, Program]:
    """The programs of the matrix, by name. Decoding is greedy, so that results are deterministic."""
    playing = {"max_turns": 2, "max_length": 160, "max_new_tokens": 16, "per_device_eval_batch_size": 2, "top_k": 1}
    playing |= {"logging_steps": 0, "prompt_templates": folder / "prompts.json"}
    play = {"attacker_model_name_or_path": tiny_model, "defender_model_name_or_path": tiny_model}
    play |= {"data_path": folder / "words.txt", "model_prefix": "m", "data_suffix": "w"}
    match = {"players": [f"a={tiny_model}", f"b={other_model}"], "words": folder / "words.txt", "games_per_word": 1}
    training = {"train_method": "OfflinePO", "model_name_or_path": tiny_model, "ref_model_name_or_path": other_model}
    training |= {"train_data_path": folder / "rows.json", "max_length": 128, "learning_rate": 1e-3}
    training |= {"adam_epsilon": 1e-5, "num_train_epochs": 1, "per_device_train_batch_size": 8}
    training |= {"loss_normalization": "step", "logging_steps": 1, "save_strategy": "steps", "save_steps": 3}
    training |= {"save_total_limit": 2, "report_to": "none", "disable_tqdm": True}
    deepspeed = training | {"deepspeed": ROOT / "configs" / "zero2.json"}

    def into(flags: dict) -> Callable[[Path], dict]:
        return lambda output: flags | {"output_dir": output}

    def rows(output: Path) -> dict:
        return {"input_data_path": folder / "games.jsonl", "output_data_path": output / "rows.json"}

    matches = ("games_results.json", "matches.json", "matches.txt")
    batch = "per_device_train_batch_size"
    return {
        "play": Program(play_llm_game.main, into(playing | play), games),
        "rewards": Program(assign_rewards.main, rows, functools.partial(files, names=("rows.json",))),
        "matches": Program(evaluate_games.main, into(playing | match), functools.partial(files, names=matches)),
        "training": Program(train.main, into(training), trained, batch, tolerance=1e-5),
        "DeepSpeed": Program(train.main, into(deepspeed), trained, batch, "training", tolerance=1e-4),
    }


def files(output: Path, names: tuple[str, ...]) -> dict:
    """The contents of some files."""
    return {name: (output / name).read_bytes() for name in names}


def games(output: Path) -> dict:
    """Return the merged games, and the indices in the rank files: each must be there once."""
    stored = [json.loads(line)["index"] for path in output.glob("*_rank*") for line in path.read_text().splitlines()]
    return files(output, ("m_sampling_w_results.json",)) | {"stored": sorted(stored)}


def trained(output: Path) -> dict:
    """Final weights, and the losses of all steps."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    return load_file(output / "model.safetensors") | {"losses": torch.tensor(losses)}


# The loop.


def test_a_killed_loop_ends_with_what_an_undisturbed_one_leaves(folder, tiny_model, tmp_path, trials):
    row = {"query": "Say: ", "target": "I know the word! It is `art`!", "reward": 1.0, "weight": 1.0}
    (tmp_path / "imitation.json").write_text(json.dumps([row | {"role": "defender"}] * 24))
    (tmp_path / "sft.json").write_text(json.dumps([{"query": "What?", "target": "That."}] * 24))
    words = folder / "words.txt"
    settings = {"model": tiny_model, "words": words, "eval_words": f"played={words}", "epochs": 1}
    settings |= {"imitation_data": tmp_path / "imitation.json", "sft_data": tmp_path / "sft.json", "top_k": 1}
    settings |= {"global_batch": 4, "nproc": 1, "precision": "fp32", "deepspeed": "none", "save_steps": 1}
    settings |= {"gradient_checkpointing": "False", "max_turns": 1, "max_length": 1400, "max_new_tokens": 8}
    settings |= {"ties": 0.25, "detach_kl": "True"}  # all games are ties
    settings |= {"play_batch": 2, "report": "False", "imitation_lr": 1e-3}

    def begin(output: Path) -> subprocess.Popen:
        environment = ENVIRONMENT | {"PYTHON": sys.executable}
        return start([ROOT / "tools" / "run_spag.sh", *words_of(settings | {"output": output})], env=environment)

    def results(output: Path) -> dict:
        epoch = output / "epoch1"
        names = ("episodes/imitation_sampling_words_results.json", "rows/rows.json", "eval/games_results.json")
        return files(epoch, names) | load_file(epoch / "model" / "model.safetensors")

    def trial(rng: random.Random) -> int:
        if not (tmp_path / "undisturbed").exists():
            finish(begin(tmp_path / "undisturbed"))
        size, delivered = size_of(tmp_path / "undisturbed"), 0
        with scratch(tmp_path) as place:
            for share in sorted(rng.uniform(0, 0.95) for _ in range(3)):
                process = begin(place / "out")
                wait_for(lambda: size_of(place / "out") >= share * size, process)  # noqa: B023
                delivered += process.poll() is None
                kill_all(process, place)
            finish(begin(place / "out"))
            same(results(place / "out"), results(tmp_path / "undisturbed"), tolerance=1e-5)
        return delivered

    trials.run("killed: loop", trial, short=0)
