"""The figures of data/RESULTS.md are those of the stored results: each mean and interval is computed again."""

import re

import pytest
from helpers import ROOT, call

from tools.matches.text import with_interval
from tools.study import figure
from tools.study.table import read_results, student

NUMBERS = re.compile(r">(\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\])<")


def points(world: str, arm: str, epoch: int) -> list[float]:
    """The points of each seed against imitation, straight from the files."""
    results = read_results(sorted(map(str, (ROOT / f"data/{world}/results").glob("seed*.json"))))
    runs = [result["arms"][arm]["epochs"].get(str(epoch), {}) for result in results if arm in result["arms"]]
    return [run["Points against imitation"]["points"] for run in runs if "Points against imitation" in run]


def test_the_printed_numbers_are_those_of_the_stored_results():
    printed = NUMBERS.findall((ROOT / "data/points.svg").read_text(encoding="utf-8"))
    values = [points(world, arm, epoch) for world, arm, epoch, _ in figure.ARMS]
    assert min(map(len, values)) > 2
    assert printed == [with_interval(*student(each)[:2]) for each in values]


def test_the_figures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, which tests/requirements.txt installs")
    call(figure.main, "--output_dir", tmp_path)
    for name in ("points.svg", "ties.svg", "gradient.svg"):
        assert (ROOT / "data" / name).is_file() and (tmp_path / name).stat().st_size > 5000
    drawn, stored = ((folder / "points.svg").read_text(encoding="utf-8") for folder in (tmp_path, ROOT / "data"))
    assert NUMBERS.findall(drawn) == NUMBERS.findall(stored)
