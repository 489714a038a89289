"""After a kill at any moment, the same command must give the results of an undisturbed run.

A program is killed when its output reaches a random size: while it starts, works, saves, or ends. Undisturbed runs and
starts after a kill run in this process unless they need a launcher. `--campaign N` makes N rounds of all kills.
"""

import contextlib
import json
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from helpers import ROOT, TORCHRUN, Fork, call, finish, flags_of, kill_all, start_ranks, users_of, wait_for, words_of
from programs import BATCH, program_flags, write_inputs
from safetensors.torch import load_file

import train
from tools import assign_rewards, evaluate_games, play_llm_game

LEAVING = 10  # seconds within which a launch has ended after SIGTERM
SURVIVING = 120  # seconds within which ranks have ended their work after a kill of their launcher


class Program(NamedTuple):
    """A program that is killed: its flags, and what is compared of its output."""

    main: Callable[[], object]
    flags: dict
    files: tuple[str, ...] = ()
    output: tuple[str, str] = ("output_dir", "")  # the flag for the output, and its place in the folder
    undisturbed: str | None = None  # the program whose undisturbed run gives the expected results; None: this one
    tolerance: float = 0.0  # of results that are tensors

    def words(self, folder: Path, processes: int = 1) -> list[str]:
        flag, place = self.output  # two processes get half of the batch each
        batch = {BATCH: self.flags[BATCH] // processes} if BATCH in self.flags else {}
        return flags_of(self.flags | batch | {flag: folder / place})


class Kill(NamedTuple):
    """A row of the matrix."""

    program: str
    launcher: str = "alone"  # or two processes: "ranks" without a launcher, or those of "torchrun"
    how: str = "all"  # SIGKILL to all processes; "launcher": to torchrun alone; or a signal to it
    always: bool = False  # True: in every test run; False: only in a campaign


MATRIX = [
    Kill("play", always=True),
    Kill("play", "ranks"),
    Kill("play", "torchrun", "launcher", always=True),
    Kill("play", "torchrun", "SIGTERM"),
    Kill("rewards", always=True),
    Kill("matches", always=True),
    Kill("training", always=True),
    Kill("training", "ranks", always=True),
    Kill("training", "torchrun", "launcher"),
    Kill("training", "torchrun", "SIGTERM"),
    Kill("DeepSpeed", "ranks", always=True),
]


@pytest.mark.kills
@pytest.mark.parametrize("kill", MATRIX, ids=lambda kill: " ".join(kill[:3]))
def test_a_killed_program_ends_with_what_an_undisturbed_run_leaves(
    kill, campaign_round, folder, programs, tmp_path, pytestconfig
):
    if not kill.always and pytestconfig.getoption("campaign") == 1:
        pytest.skip("only in a campaign: --campaign N")
    if kill.program == "DeepSpeed":
        pytest.importorskip("deepspeed")  # for Linux
    program, rng = programs[kill.program], random.Random(f"{kill} {campaign_round}")
    name = program.undisturbed or kill.program
    if not (folder / name).exists():
        call(programs[name].main, *programs[name].words(folder / name))
    for _ in range(1 + campaign_round % 3):
        start_and_kill(kill, program, tmp_path, rng.uniform(0, 0.9) * size_of(folder / name), rng)
    if kill.program == "DeepSpeed":  # it can continue only with the same number of processes
        for process in begin(kill, program, tmp_path):
            finish(process)
    else:
        call(program.main, *program.words(tmp_path))
    same(tmp_path, folder / name, program.files, program.tolerance)


def begin(kill: Kill, program: Program, output: Path) -> list[Fork]:
    """Start a program as one process, as two ranks, or by torchrun, which starts two new processes."""
    words = ["-m", program.main.__module__, *program.words(output, 1 if kill.launcher == "alone" else 2)]
    if kill.launcher == "ranks":
        return start_ranks(words)
    launcher = [*TORCHRUN[1:], "--nproc_per_node=2"] if kill.launcher == "torchrun" else []
    return [Fork([*launcher, *words])]


def start_and_kill(kill: Kill, program: Program, output: Path, size: float, rng: random.Random) -> None:
    """Start a program, and kill it when its output has this size in bytes.

    No process of the program is left: ranks that outlive their launcher are waited for.
    """
    processes = begin(kill, program, output)
    wait_for(lambda: size_of(output) >= size, processes[0])
    time.sleep(rng.uniform(0, 0.02))
    if kill.how == "all":
        for process in processes:
            kill_all(process, output)
        return
    (launcher,), ranks = processes, users_of(output)
    launcher.send_signal(signal.SIGKILL if kill.how == "launcher" else getattr(signal, kill.how))
    launcher.communicate(timeout=LEAVING)
    assert not psutil.wait_procs(ranks, timeout=SURVIVING if kill.how == "launcher" else LEAVING)[1]


def size_of(output: Path) -> int:
    """The bytes of all files of a folder, while a program may be writing there."""
    total = 0
    for path in output.rglob("*"):
        with contextlib.suppress(OSError):  # deleted meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def same(output: Path, expected: Path, files: Sequence[str], tolerance: float) -> None:
    """Equal files, each game once in the rank files, and weights and losses within a tolerance."""
    for name in files:
        assert (output / name).read_bytes() == (expected / name).read_bytes(), name
    assert games(output) == games(expected)
    if (expected / "model.safetensors").is_file():
        torch.testing.assert_close(trained(output), trained(expected), rtol=tolerance, atol=tolerance)


def games(output: Path, prefix: str = "m") -> list[int]:
    lines = [line for path in output.glob(f"{prefix}_*_rank*") for line in path.read_text().splitlines()]
    return sorted(json.loads(line)["index"] for line in lines)


def trained(output: Path) -> dict[str, torch.Tensor]:
    """Final weights, and the losses of all steps."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    return load_file(output / "model.safetensors") | {"losses": torch.tensor(losses)}


# The programs.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with inputs, and with the output of undisturbed runs."""
    return write_inputs(tmp_path_factory.mktemp("kills"), games=20_000)


@pytest.fixture(scope="module")
def programs(folder, tiny_model, other_model) -> dict[str, Program]:
    """The programs of the matrix, by name."""
    flags = program_flags(folder, tiny_model, other_model)
    deepspeed = flags["training"] | {"deepspeed": ROOT / "configs" / "zero2.json"}
    matches = ("games_results.json", "matches.json", "matches.txt")
    return {
        "play": Program(play_llm_game.main, flags["play"], ("m_sampling_w_results.json",)),
        "rewards": Program(assign_rewards.main, flags["rewards"], ("rows.json",), ("output_data_path", "rows.json")),
        "matches": Program(evaluate_games.main, flags["matches"], matches),
        "training": Program(train.main, flags["training"], tolerance=1e-5),
        "DeepSpeed": Program(train.main, deepspeed, undisturbed="training", tolerance=1e-4),
    }


# The loop.


@pytest.mark.kills
def test_a_killed_loop_ends_with_what_an_undisturbed_run_leaves(
    campaign_round, folder, tiny_model, tmp_path, pytestconfig
):
    if pytestconfig.getoption("campaign") == 1:
        pytest.skip("only in a campaign: --campaign N")
    settings = {"model": tiny_model, "words": folder / "words.txt", "prompt_templates": folder / "prompts.json"}
    settings |= {"max_turns": 2, "max_length": 160, "max_new_tokens": 16, "epochs": 2, "global_batch": 8}
    settings |= {"rewards.messages": "all", "processes": 1, "precision": "fp32", "training.loss_normalization": "step"}
    settings |= {"match.words": folder / "words.txt", "match.max_words": 4, "report": False}

    def begin(output: Path):
        return Fork(["-m", "tools.run_spag", *words_of(settings | {"output": output})])

    undisturbed, rng = folder / "loop", random.Random(f"loop {campaign_round}")
    if not undisturbed.exists():
        finish(begin(undisturbed))
    for _ in range(2):
        size = rng.uniform(0, 0.9) * size_of(undisturbed)
        process = begin(tmp_path)
        wait_for(lambda size=size: size_of(tmp_path) >= size, process)
        kill_all(process, tmp_path)
    finish(begin(tmp_path))
    for epoch in (1, 2):
        same(tmp_path / f"epoch{epoch}", undisturbed / f"epoch{epoch}", ["rows/rows.json", "eval/matches.txt"], 0.0)
        assert games(tmp_path / f"epoch{epoch}/episodes", "*") == games(undisturbed / f"epoch{epoch}/episodes", "*")
        model = f"epoch{epoch}/model"
        torch.testing.assert_close(trained(tmp_path / model), trained(undisturbed / model), rtol=1e-5, atol=1e-5)
