"""Studies: what is kept of finished loops, tables over seeds, the script that runs all, stored results."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ENVIRONMENT, ROOT, call

from tools.estimates import MEAN, markdown
from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, Taboo
from tools.matches.text import write_results
from tools.reasoning.table import Score, score_rows
from tools.selfplay.episodes import summary
from tools.study import collect, table
from tools.study.table import holm, student
from utils import read_json, write_json, write_records

T = 12.7062  # Student's 97.5% quantile with one degree of freedom
TABOO = Taboo()
MATCH = {"against": "imitation", "task_type": "sampling", "seeds": [0], "games_per_word": 1, "max_turns": 5}


def make_loop(folder: Path, seed: int, wins: tuple[int, ...] = (50, 55, 60), **settings) -> Path:
    """A finished loop. `wins` are the games of 100 that imitation and the models of two epochs win as attackers."""
    settings |= {"SEED": str(seed), "OUTPUT": str(folder), "WORDS": f"{folder.parent}/words.txt"}
    write_json(folder / "settings.json", {"settings": settings, "made_by": {"spag": "abc123"}})
    folder.with_name(f"{folder.name}.finished").touch()
    for epoch, won in enumerate(wins[1:], start=1):
        name, place = f"epoch{epoch}", folder / f"epoch{epoch}"
        write_json(place / "model/trainer_state.json", {"global_step": 16})
        write_json(place / "model/settings.json", {"rows": 1000})
        write_json(place / "episodes/x_sampling_words_summary.json", summary(TABOO, games(wins[epoch - 1])))
        path, sides = place / "eval/games_results.json", ((name, "imitation"), ("imitation", name))
        write_records(path, [game for attacker, defender in sides for game in games(won, attacker, defender)])
        write_results(path.parent, path, MATCH | {"players": [name, "imitation"]}, TABOO)
    return folder


def games(wins: int, attacker: str = "", defender: str = "") -> list[dict]:
    """A hundred games, of which the attacker wins this many, and loses the others by breaking the rules."""
    game = {"length": 2, "max_turns": 5, "words": "w", "seed": 0, "attacker": attacker, "defender": defender}
    game |= {"history": [{"role": role, "content": "a"} for role in TABOO.roles]}
    outcomes = [ATTACKER_WINS] * wins + [ATTACKER_BREAKS] * (100 - wins)
    return [game | {"target_word": f"word{n // 4}", "outcome": outcome} for n, outcome in enumerate(outcomes)]


def add_benchmark(folder: Path, percents: dict[str, float]) -> None:
    """The score of each model, by name."""
    scores = {model: {"PIQA": Score(percent, 5.0, {})} for model, percent in percents.items()}
    write_json(folder / "reasoning/results.json", {"results": score_rows(scores, "imitation", ["PIQA"])})


def add_belief(folder: Path, shares: dict[str, float]) -> None:
    """Results of tools/evaluate_belief.py: the share of each model after the last hint, among other rows."""
    for model, value in shares.items():
        row = {"model": model, "hints": "last", "games": 20, "candidates": 40}
        row |= {"share": value, "rank_1": 0.5, "tempered": value / 2}
        write_json(folder / model / "belief/belief.json", {"table": [row, row | {"hints": 0, "share": -9.0}]})
        old = {"model": model, "hints": "last", "knowledge": 9.0}  # a measure that was given up
        write_json(folder / model / "old/belief.json", {"table": [old]})


@pytest.fixture
def seeds(tmp_path) -> list[Path]:
    """The folders of two seeds, each with the arms released and detached."""
    for seed, released, detached in ((1, (50, 55, 60), (50, 60, 70)), (2, (52, 56, 64), (52, 62, 66))):
        make_loop(tmp_path / f"seed{seed}/released", seed, released)
        make_loop(tmp_path / f"seed{seed}/detached", seed, detached, DETACH_KL="True")
    return [tmp_path / "seed1", tmp_path / "seed2"]


def collected(folder: Path) -> Path:
    call(collect.main, folder)
    return folder.with_suffix(".json")


def tables(text: str) -> dict[str, dict[tuple, dict[str, str]]]:
    """The tables of a text in Markdown by title: lines by their first three cells, cells by column."""
    read = {}
    for title, block in re.findall(r"^## (.*)\n\n((?:\|.*\n)+)", text, flags=re.MULTILINE):
        head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines())
        read[title] = {tuple(line[:3]): dict(zip(head, line, strict=True)) for line in lines}
    return read


def table_of(*results, flags=(), status: int = 0):
    return call(table.main, "--results", *results, *flags, status=status)


def over_two(one: float, other: float, form: str) -> str:
    mean, half = (one + other) / 2, T * abs(one - other) / 2
    return f"{mean:{form}} [{mean - half:{form}}, {mean + half:{form}}]"


def test_seeds_are_kept_and_their_tables_compare_arms_seed_by_seed(seeds):
    shares = {"imitation": {"meet": 0.5}, "epoch2": {"meet": 0.75}}
    write_json(seeds[0] / "detached/questions.json", {"shares": shares})
    for seed, change in zip(seeds, (0, 1), strict=True):
        add_belief(seed / "released", {"base": -5.5, "epoch1": -4.0, "epoch2": -2.0})
        add_belief(seed / "detached", {"base": -5.5, "epoch1": -3.0, "epoch2": -1.0 + change})
        add_benchmark(seed / "released", {"imitation": 50, "epoch1": 55, "epoch2": 60 + 4 * change})
    flags = ["--primary", "share among 40", "detached", "released", "--minus", "points", "detached", "released"]
    flags += ["--minus", "meet", "detached", "imitation", "--primary", "points", "detached", "typo"]
    flags += ["--minus", "share among 41", "detached", "released"]
    shown = tables(table_of(*map(collected, seeds), flags=flags).output)
    # A model that wins 60 of 100 games as attacker wins the other 40 as defender: imitation breaks the rules.
    points = shown["Points against imitation"]
    assert points["released", "2", "2"]["as attacker"] == over_two(0.6, 0.64, ".3f")
    assert points["released", "2", "2"]["as defender"] == over_two(0.4, 0.36, ".3f")
    assert points["detached", "1", "2"]["points"] == "0.500"
    gaps = shown["Differences, paired by seed"]
    assert gaps["points", "detached", "released"]["difference"] == "+0.000"
    assert gaps["share among 41", "detached", "released"]["difference"] == "-"
    meet = gaps["meet", "detached", "imitation"]
    assert (meet["epoch"], meet["difference"]) == ("2", "+0.250")
    primary = shown["Primary comparisons"]
    assert primary["points", "detached", "typo"]["difference"] == "-"
    assert primary["share among 40", "detached", "released"]["difference"] == over_two(1, 2, "+.3f")
    assert shown["Self-play"]["imitation", "0", "2"][ATTACKER_WINS] == over_two(0.5, 0.52, ".3f")
    guesses = shown["Guesses after recorded hints"]["base", "0", "2"]
    assert (guesses["share among 40"], guesses["rank 1 among 40"]) == ("-5.500", "0.500")
    assert guesses["tempered share among 40"] == "-2.750"
    by_hints = shown["Guesses by number of recorded hints"]["base", "0", "2"]
    assert (by_hints["share among 40, 0 hints"], by_hints["games among 40, 0 hints"]) == ("-9.000", "20.000")
    assert "Belief on recorded games" not in shown
    assert shown["Reasoning benchmarks"]["released", "2", "2"]["PIQA"] == over_two(60, 64, ".2f")
    arm = shown["Arms"]["detached", "DETACH_KL=True", "2"]
    assert (arm["steps"], arm["rows"], arm["commits"]) == ("32", "2000", "abc123")
    assert read_json(collected(seeds[0]))["arms"]["released"]["settings"]["WORDS"] == "{folder}/words.txt"
    of_one = tables(table_of(collected(seeds[0])).output)["Reasoning benchmarks"]["released", "2", "1"]
    assert of_one["PIQA"] == of_one[MEAN] == "60.00 ± 5.00"


def test_runs_of_an_arm_with_other_settings_are_refused_by_name(seeds):
    first = collected(seeds[0])
    make_loop(seeds[1] / "detached", 2, DETACH_KL="False")
    assert "seed 2, detached: DETACH_KL: True then, False now" in table_of(first, collected(seeds[1]), status=2).errors
    assert "two runs of released with seed 1" in table_of(first, first, status=2).errors


def test_the_folder_of_a_loop_is_replaced_only_where_a_path_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"DECAY_WEIGHT": "0.8", "EVAL_WORDS": f"a={tmp_path}/a.txt b=./b.txt", "MODEL": f"x{tmp_path}/m"}
    settings = collect.read_loop("arm", make_loop(Path("loop"), 1, **values))["arms"]["arm"]["settings"]
    values |= {"EVAL_WORDS": "a={folder}/a.txt b={folder}/b.txt"}
    assert settings == values | {"SEED": "1", "OUTPUT": "loop", "WORDS": "{folder}/words.txt"}


def test_loops_are_given_by_their_folders_too(seeds):
    named = [f"{arm}={folder}/{arm}" for folder in seeds for arm in ("released", "detached")]
    assert table_of(*named).output == table_of(*map(collected, seeds)).output


def test_a_loop_without_an_ended_epoch_and_a_file_of_something_else_are_one_line(tmp_path):
    make_loop(tmp_path / "begun", seed=1, wins=(50,))
    write_json(tmp_path / "other.json", {"results": []})
    begun, other = f"spag={tmp_path / 'begun'}", tmp_path / "other.json"
    for name, message in ((begun, "no epoch of these loops"), (other, "other.json: not the results of a seed")):
        errors = call(table.main, "--results", name, status=2).errors
        assert message in errors and "Traceback" not in errors


def test_a_bar_in_a_name_stays_in_its_cell():
    assert markdown([["a|b", 1]]).splitlines()[0] == "| a\\|b | 1 |"


def test_intervals_and_p_values_are_students_and_primary_ones_are_adjusted_by_holm():
    # Mean 0.6, standard deviation 0.1, standard error 0.1 / sqrt(3), t(2) = 4.303; t = 10.39, p = 0.00913.
    mean, interval, p = student([0.5, 0.6, 0.7])
    assert (mean, p) == (pytest.approx(0.6), pytest.approx(0.00913, abs=1e-5))
    assert interval == pytest.approx([0.3516, 0.8484], abs=1e-4)
    assert math.isnan(student([0.55 - 0.5, 0.6 - 0.55])[2])  # equal up to rounding
    assert student([0.5])[:2] == (0.5, None) and student([0.5, 0.5])[:2] == (0.5, None)
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.04, math.nan]) == pytest.approx([0.08, math.nan], nan_ok=True)


@pytest.mark.parametrize("world", ["tiny", "tiny/baseline", "tiny/hints", "english", "english/baseline"])
def test_the_stored_tables_are_made_again_from_the_stored_seeds(world):
    """Their own lines say which comparisons were asked for."""
    text, flags = (ROOT / f"data/{world}/table.md").read_text(), []
    for title, name in (("Primary comparisons", "--primary"), ("Differences, paired by seed", "--minus")):
        for comparison in tables(text).get(title, ()):
            flags += [name, *comparison]
    assert table_of(*sorted((ROOT / f"data/{world}/results").glob("*.json")), flags=flags).output == text


def test_every_number_of_the_results_stands_in_the_stored_tables():
    stored = "".join(path.read_text() for path in (ROOT / "data").rglob("table.md"))
    numbers = re.findall(r"[+-]?\b\d\.\d{2,3}\b", (ROOT / "data/RESULTS.md").read_text())
    rounded = {"0.25", "-0.006", "-0.032", "+0.021", "-0.023", "-0.015", "+0.002", "-0.005", "+0.009"}
    # These are a setting, and of two studies, tested below.
    drawn = re.findall(r">(\d\.\d{3} \[.*?\])<", (ROOT / "data/points.svg").read_text())
    assert len(drawn) == 6 and all(points in stored for points in drawn)
    assert len(numbers) > 60 and {number for number in numbers if number not in stored} <= rounded


@pytest.mark.parametrize(
    "worlds, epoch, arm, other, seeds",
    [
        (("english", "english/baseline"), 2, "released", "sft", 6),
        (("tiny", "tiny/hints"), 3, "released", "cloning", 16),
        (("tiny", "tiny/hints"), 3, "detached", "cloning", 16),
    ],
)
def test_differences_over_the_seeds_of_two_studies_are_the_ones_that_are_told(worlds, epoch, arm, other, seeds):
    files = [path for world in worlds for path in (ROOT / f"data/{world}/results").glob("*.json")]
    frame = table.to_frame(table.read_results(files))
    points = frame[(frame.table == "Points against imitation") & (frame.column == "points") & (frame.epoch == epoch)]
    by_arm = points.pivot(index="seed", columns="arm", values="value").dropna(subset=[arm, other])
    mean, interval, _ = student((by_arm[arm] - by_arm[other]).tolist())
    told = table.with_interval(mean, interval, "+.3f")
    assert len(by_arm) == seeds and told in " ".join((ROOT / "data/RESULTS.md").read_text().split())


# The script that runs a study. A stand-in for the loop notes its words and leaves what a loop leaves.

LOOP = """#!/usr/bin/env bash
for word; do case $word in OUTPUT=*) output=${word#*=} ;; esac; done
printf '%s\\n' "$*" >>"$CALLS"
[ -z "$FAIL" ] || case $output in *"$FAIL") exit 1 ;; esac
mkdir -p "$output"
cp -r "$LOOPS/$(basename "$output")/." "$output"
"""
ARMS = """before() { mkdir -p "$folder/data"; }
after() { echo '{"shares": {"imitation": {"meet": 0.5}}}' >"$1/questions.json"; }
all=(WORDS="a b" EVAL_SEEDS="$seed")
arm released MODEL="$folder/base"
arm sft CONTROL=sft
table=(--primary points sft released)
"""


def test_a_study_runs_arms_by_seed_and_the_same_command_continues(tmp_path):
    script, out, calls = tmp_path / "tools/study/run_study.sh", tmp_path / "out", tmp_path / "calls"
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / "tools/study/run_study.sh").read_text())
    (tmp_path / "tools/run_spag.sh").write_text(LOOP)
    (tmp_path / "tools/run_spag.sh").chmod(0o755)
    (tmp_path / "arms.sh").write_text(ARMS)
    for arm in ("released", "sft"):
        make_loop(tmp_path / "loops" / arm, 1)
    variables = {"CALLS": str(calls), "LOOPS": str(tmp_path / "loops"), "SEEDS": "0 2", "PYTHON": sys.executable}

    def run(fail: str = "") -> subprocess.CompletedProcess:
        command = ["bash", script, tmp_path / "arms.sh", f"{out}/", "EPOCHS=1"]  # as a shell completes it
        environment = ENVIRONMENT | variables | {"JOBS": "2", "FAIL": fail}
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)

    failed = run(fail="seed2/sft")
    assert failed.returncode != 0 and "seed 2 failed" in failed.stdout and not (out / "table.md").exists()
    first = f"SEED=200 OUTPUT={out}/seed2/released EPOCHS=1 MODEL={out}/seed2/base"
    assert f"WORDS=a b EVAL_SEEDS=2 {first}" in calls.read_text().splitlines()
    like = f"SEED=0 OUTPUT={out}/seed0/sft LIKE={out}/seed0/released EPOCHS=1 CONTROL=sft"
    assert f"WORDS=a b EVAL_SEEDS=0 {like}" in calls.read_text().splitlines()
    assert read_json(out / "seed2.json")["arms"].keys() == {"imitation", "released"}
    again = run()
    assert again.returncode == 0, again.stderr
    assert [re.search(r"seed2/(\w+)", line)[1] for line in calls.read_text().splitlines()[4:]] == ["sft"]
    assert read_json(out / "seed2.json")["arms"]["imitation"]["epochs"]["0"]["Questions"] == {"meet": 0.5}
    assert "## Primary comparisons" in (out / "table.md").read_text()
