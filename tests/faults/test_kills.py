"""Programs that are killed at random moments, again and again, end with what an undisturbed run leaves."""

import functools
import json
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from forks import python
from safetensors.torch import load_file
from trials import ENVIRONMENT, finish, flags_of, kill_all, killed, scratch, seconds_of, start, users_of

import utils

WORDS = [f"word{number}" for number in range(24)]
STEM = "im_sampling_words"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--monitor_interval=0.1"]


class Case:
    """A program's command for an output folder, and what an undisturbed run of it leaves."""

    def __init__(self, folder: Path, command, results):
        self.folder, self.command, self.results = folder, command, results

    @functools.cached_property
    def undisturbed(self) -> dict:
        """Results of an undisturbed run."""
        self.seconds = min(self.seconds_to("undisturbed"), self.seconds_to("again"))  # a first start takes longer
        return self.results(self.folder / "undisturbed")

    def seconds_to(self, name: str | Path) -> float:
        """How long a run takes into this folder, or to find all there."""
        return seconds_of(lambda: finish(start(self.command(self.folder / name))))

    def trial(self, rng: random.Random, kills: int = 3, within: tuple[float, float] = (0, 1.1)) -> int:
        """Kill it at random moments of its time, then compare; how often it was killed."""
        expected = self.undisturbed
        with scratch(self.folder) as folder:
            begin = functools.partial(start, self.command(folder / "out"))
            delivered = killed(rng, begin, folder, kills=kills, within=self.seconds * rng.uniform(*within))
            same(self.results(folder / "out"), expected)
        return delivered


def same(found: dict, expected: dict) -> None:
    """Equal bytes of files, weights within rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
        else:
            assert found[name] == value, name


# --- play and matches ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with words, and prompts that are short."""
    return make_place(tmp_path_factory.mktemp("kills"))


def make_place(folder: Path) -> Path:
    (folder / "words.txt").write_text("\n".join(WORDS))
    rules = [f"Rule {number}: {{max_turns}} turns.\n" for number in range(8)]
    prompts = {"rules": rules, "attacker_instruction": "Hide `{target_word}`.", "defender_instruction": "Guess."}
    (folder / "prompts.json").write_text(json.dumps(prompts))
    return folder


def playing(place: Path, **flags) -> list[str]:
    """Flags of play whose replies do not depend on when they are drawn."""
    shared = {"max_turns": 2, "max_length": 160, "max_new_tokens": 16, "per_device_eval_batch_size": 2, "top_k": 1}
    return flags_of(shared | {"logging_steps": 0, "prompt_templates": place / "prompts.json"} | flags)


def play_flags(place: Path, model: str, output: Path) -> list[str]:
    models = {"attacker_model_name_or_path": model, "defender_model_name_or_path": model, "output_dir": output}
    return playing(place, **models, data_path=place / "words.txt", model_prefix="im", data_suffix="words")


def games_of(folder: Path) -> dict:
    """The results, and that each game is in the rank files once."""
    stored = [json.loads(line)["index"] for path in folder.glob("*_rank*") for line in path.read_text().splitlines()]
    return {"results": (folder / f"{STEM}_results.json").read_bytes(), "stored": sorted(stored)}


@pytest.fixture
def play(place, tiny_model, tmp_path) -> Case:
    """Play in one process."""
    command = [python(), "-m", "tools.play_llm_game"]
    return Case(tmp_path, lambda output: [*command, *play_flags(place, tiny_model, output)], games_of)


def test_play_in_one_process(play, trials):
    trials.run("play, one process", play.trial, short=1, kills=8)


def test_play_under_torchrun(place, tiny_model, tmp_path, trials):
    command = [python(), *TORCHRUN, "-m", "tools.play_llm_game"]
    case = Case(tmp_path, lambda output: [*command, *play_flags(place, tiny_model, output)], games_of)
    trials.run("play, torchrun", functools.partial(case.trial, kills=2), short=0, kills=5)


def test_play_when_torchrun_alone_is_killed(play, place, tiny_model, trials):
    def trial(rng: random.Random) -> int:
        expected = play.undisturbed
        with scratch(play.folder) as folder:
            flags = play_flags(place, tiny_model, folder / "out")
            process = start([sys.executable, *TORCHRUN, "-m", "tools.play_llm_game", *flags])
            size = rng.randint(0, 5000)
            until(lambda: sum(path.stat().st_size for path in folder.glob("out/*_rank*")) > size, process)
            ended = process.poll() is not None
            process.kill()
            process.communicate()
            finish(start([python(), "-m", "tools.play_llm_game", *flags]))
            assert games_of(folder / "out") == expected
        return not ended

    trials.run("play, torchrun alone killed", trial, short=0, kills=2)


def test_play_while_results_are_merged(play, trials):
    def trial(rng: random.Random) -> int:
        expected = play.undisturbed
        with scratch(play.folder) as folder:
            shutil.copytree(play.folder / "undisturbed", folder / "out")
            (results,) = folder.glob("out/*_results.json")
            results.unlink()
            seconds = play.seconds_to(folder / "out")
            results.unlink()
            begin = functools.partial(start, play.command(folder / "out"))
            delivered = killed(rng, begin, folder, kills=3, within=seconds)
            assert games_of(folder / "out") == expected
        return delivered

    trials.run("play, merge", trial, short=0, kills=5)


def test_matches(place, tiny_model, other_model, tmp_path, trials):
    flags = {"players": [f"a={tiny_model}", f"b={other_model}"], "words": place / "words.txt", "games_per_word": 1}

    def command(output: Path) -> list:
        return [python(), "-m", "tools.evaluate_games", *playing(place, **flags, output_dir=output)]

    def results(folder: Path) -> dict:
        return {name: (folder / name).read_bytes() for name in ("games_results.json", "matches.json", "matches.txt")}

    trials.run("matches", Case(tmp_path, command, results).trial, short=0, kills=3)


# --- training ------------------------------------------------------------------------------------------------------


def make_rows(count: int) -> list[dict]:
    rng = random.Random(0)
    rows = []
    for index in range(count):
        row = {"query": "ask " * rng.randint(2, 12), "target": "say " * rng.randint(1, 6), "weight": 1.0}
        of_game = {"reward": rng.random(), "role": ("attacker", "defender")[index % 2]}
        rows.append(row | (of_game if rng.random() < 0.7 else {"type": "sft"}))
    return rows


@pytest.fixture
def training(tmp_path, tiny_model, other_model) -> dict:
    """Settings of a training with all its stages: encoding, reference pass, steps, checkpoints."""
    (tmp_path / "rows.json").write_text(json.dumps(make_rows(192)))
    return {
        "train_method": "OfflinePO",
        "model_name_or_path": tiny_model,
        "ref_model_name_or_path": other_model,
        "train_data_path": tmp_path / "rows.json",
        "max_length": 128,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-5,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "loss_normalization": "step",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
    }


def trained(folder: Path) -> dict:
    """Final weights, and the losses of all steps."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    return load_file(folder / "model.safetensors") | {"losses": torch.tensor(losses)}


def train_case(settings: dict, folder: Path, launcher: list[str], **changes) -> Case:
    def command(output: Path) -> list:
        cache = {"output_dir": output, "cache_dir": output.parent / "cache"}  # each trial has one of its own
        return [python(), *launcher, ROOT / "train.py", *flags_of(settings | changes | cache)]

    (folder / "case").mkdir(exist_ok=True)
    return Case(folder / "case", command, trained)


def test_training_in_one_process(training, tmp_path, trials):
    case = train_case(training, tmp_path, [])
    trials.run("training, one process", case.trial, short=1, kills=1)


def test_training_before_its_first_step(training, tmp_path, trials):
    """While rows are encoded and the reference's log-probabilities are computed."""
    case = train_case(training, tmp_path, [])
    early = functools.partial(case.trial, within=(0.1, 0.6))
    trials.run("training, encoding and reference", early, short=0, kills=1)


def test_training_while_it_saves(training, tmp_path, trials):
    case = train_case(training, tmp_path, [], save_steps=1)

    def trial(rng: random.Random) -> int:
        expected, delivered = case.undisturbed, 0
        with scratch(case.folder) as folder:
            for _ in range(3):
                process = start(case.command(folder / "out"))
                step = rng.randint(1, 20)
                until(lambda: saves(folder / "out", step), process)  # noqa: B023
                time.sleep(rng.uniform(0, 0.01))
                delivered += process.poll() is None
                kill_all(process, folder)
            finish(start(case.command(folder / "out")))
            same(trained(folder / "out"), expected)
        return delivered

    trials.run("training, saving", trial, short=0, kills=1)


def saves(output: Path, step: int) -> bool:
    """Whether a checkpoint is being written, or a later one is there."""
    steps = [int(path.name.split("-")[1]) for path in output.glob("checkpoint-*")]
    return any(at > step or (at == step and not utils.is_complete(output / f"checkpoint-{at}")) for at in steps)


def until(condition, process) -> None:
    """Wait for a condition, at most as long as the program runs."""
    while process.poll() is None and not condition():
        time.sleep(0.002)


def test_training_under_torchrun(training, tmp_path, trials):
    case = train_case(training, tmp_path, TORCHRUN, per_device_train_batch_size=4)
    trials.run("training, torchrun", functools.partial(case.trial, kills=2), short=0, kills=1)


def test_training_under_deepspeed(training, tmp_path, trials):
    settings = {"deepspeed": ROOT / "configs" / "zero2.json", "per_device_train_batch_size": 4}
    case = train_case(training, tmp_path, TORCHRUN, **settings)
    trials.run("training, DeepSpeed", functools.partial(case.trial, kills=1), short=0, kills=1)


# --- preemption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["play", "training"])
def test_preemption(program, place, tiny_model, training, tmp_path, trials):
    """After SIGTERM or SIGUSR1 all processes have ended within 10 s, and the same command continues."""
    if program == "play":
        words = [*TORCHRUN, "-m", "tools.play_llm_game"]
        case = Case(tmp_path, lambda output: [python(), *words, *play_flags(place, tiny_model, output)], games_of)
    else:
        case = train_case(training, tmp_path, TORCHRUN, per_device_train_batch_size=4)

    def trial(rng: random.Random) -> None:
        expected = case.undisturbed
        with scratch(case.folder) as folder:
            real = rng.random() < 0.5  # stand-ins of forks take SIGUSR1 as a sign for themselves
            command = [sys.executable if real else python(), *case.command(folder / "out")[1:]]
            process = start(command)
            time.sleep(rng.uniform(0, case.seconds + 5 * real))
            process.send_signal(rng.choice([signal.SIGTERM, signal.SIGUSR1]) if real else signal.SIGTERM)
            process.communicate(timeout=10)
            deadline = time.monotonic() + 10
            while (left := users_of(folder)) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not left
            finish(start(case.command(folder / "out")))
            same(case.results(folder / "out"), expected)

    trials.run(f"preemption, {program}", trial, short=0)


# --- the loop ------------------------------------------------------------------------------------------------------


def test_the_whole_loop(place, training, tiny_model, tmp_path, trials, monkeypatch):
    row = {"query": "Say: ", "target": "I know the word! It is `art`!", "reward": 1.0, "weight": 1.0}
    (tmp_path / "imitation.json").write_text(json.dumps([row | {"role": "defender"}] * 24))
    (tmp_path / "sft.json").write_text(json.dumps([{"query": "What?", "target": "That."}] * 24))
    settings = {"model": tiny_model, "words": place / "words.txt", "eval_words": f"played={place / 'words.txt'}"}
    settings |= {"imitation_data": tmp_path / "imitation.json", "sft_data": tmp_path / "sft.json", "top_k": 1}
    settings |= {"epochs": 1, "global_batch": 4, "nproc": 1, "precision": "fp32", "deepspeed": "none", "save_steps": 1}
    settings |= {"gradient_checkpointing": "False", "max_turns": 1, "max_length": 1400, "max_new_tokens": 8}
    settings |= {"reward_args": "--min_game_rows 0", "train_args": "--allow_no_game_rows True"}  # all games are ties
    settings |= {"play_batch": 2, "report": "False", "check_disk": "False", "imitation_lr": 1e-3}

    def command(output: Path) -> list:
        return [ROOT / "tools" / "run_spag.sh", *flags_of(settings | {"output": output})]

    def results(folder: Path) -> dict:
        epoch = folder / "epoch1"
        files = ["episodes/imitation_sampling_words_results.json", "rows/rows.json", "eval/games_results.json"]
        weights = load_file(epoch / "model" / "model.safetensors")
        return {name: (epoch / name).read_bytes() for name in files} | weights

    case = Case(tmp_path, command, results)
    monkeypatch.setitem(ENVIRONMENT, "PYTHON", python())
    trials.run("loop", functools.partial(case.trial, kills=4), short=0, kills=3)
