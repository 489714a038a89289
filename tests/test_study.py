"""Studies: what is kept of finished loops, tables over seeds, the script that runs all, stored results."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ENVIRONMENT, ROOT, call
from study_loops import add_belief, add_benchmarks, make_loop

from tools.study import collect, table
from tools.study.table import holm, student
from utils import read_json

T = 12.7062  # Student's 97.5% quantile with one degree of freedom
MEAN = "geometric mean"


@pytest.fixture
def seeds(tmp_path) -> list[Path]:
    """The folders of two seeds, each with the arms released and detached."""
    wins = {1: ((50, 55, 60), (50, 60, 70)), 2: ((52, 56, 64), (52, 62, 66))}
    for seed, (released, detached) in wins.items():
        add_arm(tmp_path / f"seed{seed}", "released", wins=released)
        add_arm(tmp_path / f"seed{seed}", "detached", wins=detached, DETACH_KL="True")
    return [tmp_path / f"seed{seed}" for seed in wins]


def add_arm(folder: Path, arm: str, **settings) -> None:
    make_loop(folder / arm, int(folder.name[4:]), WORDS=f"{folder}/words.txt", **settings)
    (folder / f"{arm}.finished").touch()


def collected(folder: Path) -> Path:
    call(collect.main, "--folder", folder)
    return folder.with_suffix(".json")


def rows_of(text: str, title: str) -> list[dict[str, str]]:
    """The lines of a table in Markdown, cells by column."""
    block = re.search(rf"^## {title}\n\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block[1].splitlines()] if block else [[]]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def tables(text: str) -> dict[str, dict[tuple, dict[str, str]]]:
    """The tables of a text by title: lines by their first two cells."""
    titles = re.findall("^## (.*)$", text, flags=re.MULTILINE)
    return {title: {tuple(row.values())[:2]: row for row in rows_of(text, title)} for title in titles}


def table_of(*results, flags=(), status: int = 0):
    return call(table.main, "--results", *results, *flags, status=status)


def over_two(one: float, other: float, form: str) -> str:
    mean, half = (one + other) / 2, T * abs(one - other) / 2
    return f"{mean:{form}} [{mean - half:{form}}, {mean + half:{form}}]"


def test_seeds_are_kept_and_their_tables_compare_arms_seed_by_seed(seeds):
    shares = {"imitation": {"meet": 0.5}, "epoch2": {"meet": 0.75}}
    (seeds[0] / "detached/questions.json").write_text(json.dumps({"shares": shares}))
    for seed, change in zip(seeds, (0, 1), strict=True):
        add_belief(seed / "released", {"base": 0.5, "epoch1": 2.0, "epoch2": 4.0})
        add_belief(seed / "detached", {"base": 0.5, "epoch1": 3.0, "epoch2": 5.0 + change})
    flags = ["--primary", "points", "released", "0.5", "--primary", "knowledge", "detached", "released"]
    flags += ["--minus", "points", "detached", "released", "--minus", "meet", "detached", "imitation"]
    shown = tables(table_of(*map(collected, seeds), flags=flags).output)
    # A model that wins 60 of 100 games as attacker wins the other 40 as defender: imitation breaks the rules.
    points = shown["Points against imitation"]
    assert points["released", "2"]["as attacker"] == over_two(0.6, 0.64, ".3f")
    assert points["released", "2"]["as defender"] == over_two(0.4, 0.36, ".3f")
    assert points["released", "2"]["own breaches as attacker"] == over_two(0.4, 0.36, ".3f")
    assert points["detached", "1"]["points"] == "0.500 [0.500, 0.500]"
    gaps = shown["Differences, paired by seed"]
    assert gaps["points", "detached"]["difference"] == "+0.000 [+0.000, +0.000]"
    assert (gaps["meet", "detached"]["epoch"], gaps["meet", "detached"]["difference"]) == ("2", "+0.250")
    primary = shown["Primary comparisons"]
    assert primary["points", "released"]["minus"] == "0.5"
    assert primary["knowledge", "detached"]["difference"] == over_two(1, 2, "+.2f")
    assert shown["Self-play"]["imitation", "0"]["attacker wins"] == over_two(0.5, 0.52, ".3f")
    assert shown["Belief on recorded games"]["base", "0"]["knowledge after 1"] == "0.50 [0.50, 0.50]"
    arm = shown["Arms"]["detached", "DETACH_KL=True"]
    assert (arm["steps"], arm["rows"], arm["commits"]) == ("32", "2000", "abc123")
    assert read_json(collected(seeds[0]))["arms"]["released"]["settings"]["WORDS"] == "{folder}/words.txt"


def test_runs_of_an_arm_with_other_settings_are_refused_by_name(seeds):
    first = collected(seeds[0])
    add_arm(seeds[1], "detached", DETACH_KL="True", KL="0.1")
    assert "seed 2, detached: KL: 0.2 then, 0.1 now" in table_of(first, collected(seeds[1]), status=2).errors
    assert "two runs of detached, released with seed 1" in table_of(first, first, status=2).errors


def test_loops_are_compared_by_their_folders_and_have_their_benchmarks(tmp_path):
    right = {("spag", 1): (50, 55, 60), ("spag", 2): (52, 56, 64), ("sft", 1): (50, 51, 52), ("sft", 2): (52, 53, 56)}
    right["spag", 0] = (50, 55, 60)  # a seed without the other arm takes nothing away
    loops = {each: make_loop(tmp_path / "{}{}".format(*each), each[1]) for each in right}
    for each, numbers in right.items():
        add_benchmarks(loops[each], dict(zip(("imitation", "epoch1", "epoch2"), numbers, strict=True)))
    named = [f"{arm}={folder}" for (arm, _), folder in loops.items()]
    gap = tables(table_of(*named).output)["Differences, paired by seed"][MEAN, "sft"]
    assert gap["difference"] == over_two(-8, -8, "+.2f")
    assert tables(table_of(*named[:2]).output)["Reasoning benchmarks"]["spag", "2"]["PIQA"] == over_two(60, 64, ".2f")
    assert tables(table_of(named[0]).output)["Reasoning benchmarks"]["spag", "2"]["PIQA"] == "60.00 ± 5.00"
    add_benchmarks(loops["sft", 1], {"imitation": 50, "epoch1": 51}, limit=10)
    assert "limit: None then, 10 now" in table_of(named[0], named[2], status=2).errors


def test_intervals_and_p_values_are_students_and_primary_ones_are_adjusted_by_holm():
    # Mean 0.6, standard deviation 0.1, standard error 0.1 / sqrt(3), t(2) = 4.303; t = 10.39, p = 0.00913.
    mean, interval, p = student([0.5, 0.6, 0.7])
    assert (mean, p) == (pytest.approx(0.6), pytest.approx(0.00913, abs=1e-5))
    assert interval == pytest.approx([0.3516, 0.8484], abs=1e-4)
    assert student([0.55 - 0.5, 0.6 - 0.55])[2] is None  # equal up to rounding
    assert student([0.5]) == (0.5, None, None) and student([0.5, 0.5]) == (0.5, [0.5, 0.5], None)
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.04, None]) == pytest.approx([0.08, math.nan], nan_ok=True)


@pytest.mark.parametrize("world", ["tiny", "english"])
def test_the_stored_tables_are_made_again_from_the_stored_seeds(world, tmp_path):
    """Their own lines say which comparisons were asked for."""
    text = (ROOT / f"data/{world}/table.md").read_text()
    flags = ["--output", tmp_path]
    for title, name in (("Primary comparisons", "--primary"), ("Differences, paired by seed", "--minus")):
        for row in rows_of(text, title):
            flags += [name, row["measure"], row["arm"], row["minus"]]
    table_of(*sorted((ROOT / f"data/{world}/results").glob("*.json")), flags=flags)
    assert (tmp_path / "table.md").read_text() == text


def test_every_number_of_the_results_stands_in_the_stored_tables():
    stored = "".join((ROOT / f"data/{world}/table.md").read_text() for world in ("tiny", "english"))
    numbers = re.findall(r"[+-]?\b\d\.\d{2,3}\b", (ROOT / "data/RESULTS.md").read_text())
    rounded = {"0.34", "0.25", "-2.5"}  # imitation's points as attacker, a setting
    assert len(numbers) > 60 and [number for number in numbers if number not in stored and number not in rounded] == []


# The script that runs a study. A stand-in for the loop notes its words and leaves what a loop leaves.

LOOP = """#!/usr/bin/env bash
for word; do case $word in OUTPUT=*) output=${word#*=} ;; SLOW=*) slow=1 ;; esac; done
printf '%s\\n' "$*" >>"$CALLS"
[ -z "$FAIL" ] || case $output in *"$FAIL") exit 1 ;; esac
[ -z "$slow" ] || { trap 'echo ended >>"$CALLS"; exit 143' TERM; sleep 30 & wait; }
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


@pytest.fixture
def study(tmp_path):
    """A function that starts a study in which the loop has a stand-in."""
    project = tmp_path / "project"
    (project / "tools/study").mkdir(parents=True)
    (project / "tools/study/run_study.sh").write_text((ROOT / "tools/study/run_study.sh").read_text())
    (project / "tools/run_spag.sh").write_text(LOOP)
    (project / "tools/run_spag.sh").chmod(0o755)
    (tmp_path / "arms.sh").write_text(ARMS)
    for arm in ("released", "sft"):
        make_loop(tmp_path / "loops" / arm, 1)
    more = {"CALLS": tmp_path / "calls", "LOOPS": tmp_path / "loops", "FAIL": "", "SEEDS": "1 2", "JOBS": "2"}
    more |= {"PYTHON": sys.executable}
    environment = ENVIRONMENT | {name: str(value) for name, value in more.items()}

    def start(*words: str, **more: str) -> subprocess.Popen:
        command = ["bash", project / "tools/study/run_study.sh", tmp_path / "arms.sh", tmp_path / "out", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=environment | more, cwd=ROOT, **pipes)

    return start


def calls(tmp_path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_a_study_runs_arms_by_seed_and_the_same_command_continues(study, tmp_path):
    out = tmp_path / "out"
    run = study("EPOCHS=1", FAIL="seed2/sft")
    output, _ = run.communicate(timeout=300)
    assert run.returncode != 0 and "seed 2 failed" in output and not (out / "table.md").exists()
    first = f"SEED=200 OUTPUT={out}/seed2/released EPOCHS=1 MODEL={out}/seed2/base"
    assert f"WORDS=a b EVAL_SEEDS=2 {first}" in calls(tmp_path)
    like = f"SEED=100 OUTPUT={out}/seed1/sft LIKE={out}/seed1/released EPOCHS=1 CONTROL=sft"
    assert f"WORDS=a b EVAL_SEEDS=1 {like}" in calls(tmp_path)
    assert read_json(out / "seed2.json")["arms"].keys() == {"imitation", "released"}
    again = study("EPOCHS=1")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert [re.search(r"seed2/(\w+)", line)[1] for line in calls(tmp_path)[4:]] == ["sft"]
    assert read_json(out / "seed2.json")["arms"]["imitation"]["epochs"]["0"]["Questions"] == {"meet": 0.5}
    assert "## Primary comparisons" in (out / "table.md").read_text()


def test_a_signal_ends_the_loops_at_work(study, tmp_path):
    run = study("SLOW=1")
    while not (tmp_path / "calls").exists() or len(calls(tmp_path)) < 2:
        assert run.poll() is None
        time.sleep(0.1)
    time.sleep(0.5)
    os.kill(run.pid, signal.SIGTERM)
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 143 and "the same command continues" in output
    assert calls(tmp_path).count("ended") == 2


@pytest.mark.parametrize("path", sorted((ROOT / "configs/arms").glob("*.sh")), ids=lambda path: path.stem)
def test_every_file_of_arms_names_settings_of_the_loop(path):
    words = 'arm() { printf "%s\\n" "${all[@]:1}" "${@:2}"; }; seed=1 folder=f root=r; . "$1"'
    printed = subprocess.run(["bash", "-c", words, "-", path], capture_output=True, text=True, check=True).stdout
    names = {line.partition("=")[0] for line in printed.splitlines()}
    assert names <= set(re.findall(r"^([A-Z_]+)=", (ROOT / "configs/defaults.sh").read_text(), re.MULTILINE))
    assert {"WORDS", "CONTROL", "MODEL"} <= names
