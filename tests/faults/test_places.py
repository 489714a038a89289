"""Output places that cannot be written to end every program with a one-line error. Odd paths work like any other."""

import os
import random
import resource
import shutil
from pathlib import Path

import pytest
from programs import programs

PROGRAMS = ["assign_rewards", "split", "report", "play", "matches", "train"]
ODD_NAMES = [" a  b ", "ä ö", 'it\'s "q"', "-rf", "$HOME", "[1]*?", "%s{0}", "a\nb", "x" * 200, "#;&|", "\\", "~"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_full_disk_ends_with_one_line_that_names_the_file(name, inputs, tmp_path, trials):
    """A limit on file sizes stands in for the full disk."""

    def trial(rng: random.Random) -> None:
        output = tmp_path / "out"
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (rng.choice([0, 10, 40]), hard))
        try:
            ended = programs(inputs, output)[name].run()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert ended.status == 2 and str(output) in ended.errors, ended.errors[-1000:]
        left = [path for path in output.rglob("*") if path.is_file() and path.stat().st_size]
        assert not [path for path in left if path.suffix == ".tmp"]

    trials.run("full disk", trial, short=1)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("place", ["/proc/spag", "words.txt/below"])
def test_a_place_where_nothing_can_be_written_is_one_line(name, place, inputs):
    ended = programs(inputs, Path(os.path.join(inputs, place)))[name].run()
    assert ended.status == 2, ended.errors


@pytest.mark.parametrize("name", PROGRAMS)
def test_odd_paths_are_paths(name, inputs, tmp_path, trials):
    def trial(rng: random.Random) -> None:
        folder = tmp_path / f"{rng.choice(ODD_NAMES)}{rng.randrange(10**9)}"
        shutil.copytree(inputs, folder / "in")
        ended = programs(folder / "in", folder / rng.choice(ODD_NAMES))[name].run()
        assert ended.status == 0, ended.errors

    trials.run("odd paths", trial, short=1)
