"""Places that cannot be written to, and paths that look odd: every program ends with one line, or as anywhere."""

import random
import resource
import shutil
from pathlib import Path

import pytest
from programs import Inputs, call
from trials import flags_of

PROGRAMS = ["assign_rewards", "imitation", "alpaca", "split", "report", "play_llm_game", "evaluate_games", "train"]
ODD_NAMES = [" a  b ", "ä ö", 'it\'s "q"', "-rf", "$HOME", "[1]*?", "%s{0}", "a\nb", "x" * 200, "#;&|", "\\", "~"]


def run(name: str, inputs: Inputs, output: Path) -> tuple[int, str]:
    main, _, command, flags = inputs.programs(output)[name]
    return call(main, *command, *flags_of(flags))


@pytest.fixture
def inputs(tmp_path, tiny_model, other_model) -> Inputs:
    (tmp_path / "in").mkdir()
    return Inputs(tmp_path / "in", tiny_model, other_model)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_disk_that_is_full(name, inputs, tmp_path, trials):
    """No file can grow beyond some bytes: the program says which, and its status is not 0."""

    def trial(rng: random.Random) -> None:
        output = tmp_path / "out"
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (rng.choice([0, 10, 40]), hard))
        try:
            status, errors = run(name, inputs, output)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert status == 2 and str(output) in errors, errors[-1000:]
        left = [path for path in output.rglob("*") if path.is_file() and path.stat().st_size]
        assert not [path for path in left if path.suffix == ".tmp"]

    trials.run("full disk", trial, short=1)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("place", ["/proc/spag", "FILE/below"])
def test_a_place_where_nothing_can_be_written(name, place, inputs, tmp_path, trials):
    def trial(rng: random.Random) -> None:
        status, errors = run(name, inputs, Path(place.replace("FILE", str(inputs.folder / "words.txt"))))
        assert status == 2, errors

    trials.run("read-only place", trial, short=1 if name in ("assign_rewards", "play_llm_game") else 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_odd_paths(name, tmp_path, tiny_model, other_model, trials):
    def trial(rng: random.Random) -> None:
        folder = tmp_path / f"{rng.choice(ODD_NAMES)}{rng.randrange(10**9)}"
        (folder / "in").mkdir(parents=True)
        inputs = Inputs(folder / "in", tiny_model, other_model)
        status, errors = run(name, inputs, folder / rng.choice(ODD_NAMES))
        assert status == 0, errors

    trials.run("odd paths", trial, short=1 if name != "train" else 0)
