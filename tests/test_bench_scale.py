"""bench_scale as its user sees it, and the files it measures with."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from tools.bench import scale as bench_scale
from tools.selfplay.files import EpisodeFiles
from utils import read_json_or_jsonl, read_words


def test_the_programs_get_whole_games_in_the_order_of_the_words(tmp_path):
    bench_scale.write_games(tmp_path, 7)
    words = read_words(tmp_path / "words.txt")
    assert len(set(words)) == 7
    assert EpisodeFiles(tmp_path, bench_scale.STEM, words, bench_scale.GAME).finished().missing() == []
    bench_scale.merge(str(tmp_path))
    games = read_json_or_jsonl(tmp_path / "bench_results.json")
    assert [game["target_word"] for game in games] == words
    assert json.loads((tmp_path / "bench_summary.json").read_text())["games"] == 7


def test_every_program_has_its_columns():
    command = [sys.executable, "-m", "tools.bench.scale", "--games", "4"]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    header, _, row = ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines)
    assert header == list(bench_scale.COLUMNS)
    games, *figures = map(float, row)
    assert games == 4 and min(figures[:3]) >= 0.1 and 0.01 < min(figures[3:]) and max(figures[3:]) < 4


def test_the_peak_is_that_of_the_program_alone():
    held = b"x" * (600 * 2**20)  # by the program that measures
    statement = "held = b'x' * (300 * 2**20); import time; time.sleep(0.2)"
    seconds, peak = bench_scale.measure("-c", statement)
    assert 300 / 1024 < peak < 400 / 1024 < len(held) / 2**30
    assert 0.2 < seconds < 60


def test_a_program_that_fails_is_an_error(tmp_path, capfd):
    with pytest.raises(ValueError, match="json.tool ended with status 2; its messages stand above"):
        bench_scale.measure("-m", "json.tool", tmp_path / "none.json")
    assert "none.json" in capfd.readouterr().err
