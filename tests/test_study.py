"""Studies: files of arms, what is kept of finished loops, tables over seeds, matches, the program that runs all."""

import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ENVIRONMENT, ROOT, call
from study_loops import add_benchmarks, game_of, make_loop, write_match

from tools.study import table
from tools.study.loops import seed_results
from tools.study.plan import read_plan
from tools.study.results import holm, student
from tools.study.run import matches
from utils import UserError, read_json, write_json

T = 12.7062  # Student's 97.5% quantile with one degree of freedom
MEAN = "geometric mean"
ARMS = """# two arms
all: WORDS=words.txt EVAL_WORDS=w=words.txt
gate: "attacker wins" 0.1
released MODEL=base IMITATION_DATA=rows.json # SPAG
detached DETACH_KL=True TRAIN_ARGS="--num_train_epochs 2"
earlier: old # no longer run
match: last hints=scripted:hints --game_options hints=games.jsonl
match: detached released
minus: points detached released
primary: points released
primary: points detached released
"""


@pytest.fixture
def arms(tmp_path) -> Path:
    (tmp_path / "arms.txt").write_text(ARMS)
    return tmp_path / "arms.txt"


@pytest.fixture
def seeds(tmp_path) -> list[Path]:
    """The folders of two seeds of the study of ARMS."""
    wins = {1: ((50, 55, 60), (50, 60, 70)), 2: ((52, 56, 64), (52, 62, 66))}
    for seed, (released, detached) in wins.items():
        folder = tmp_path / f"seed{seed}"
        shared = {"WORDS": f"{folder}/words.txt"}
        make_loop(folder / "released", seed, released, **shared)
        make_loop(folder / "detached", seed, detached, imitation=False, LIKE="x", DETACH_KL="True", **shared)
    return [tmp_path / f"seed{seed}" for seed in wins]


def kept(folder: Path, arms: Path) -> Path:
    path, plan = folder.with_suffix(".json"), read_plan(arms)
    found = seed_results(folder, plan, list(plan.arms))
    write_json(path, {"seed": int(folder.name.removeprefix("seed")), "arms": found})
    return path


def rows_of(block: str) -> list[dict[str, str]]:
    """The lines of a table in Markdown, cells by column."""
    head, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
    return [dict(zip(head, line, strict=True)) for line in lines]


def tables(text: str) -> dict[str, dict[tuple, dict[str, str]]]:
    """The tables of a text by title: lines by their first two cells."""
    found = re.findall(r"^## (.*)\n\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return {title: {tuple(row.values())[:2]: row for row in rows_of(block)} for title, block in found}


def table_of(*results, status: int = 0, **flags):
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    return call(table.main, "--results", *results, *words, status=status)


def over_two(one: float, other: float, form: str) -> str:
    mean, half = (one + other) / 2, T * abs(one - other) / 2
    return f"{mean:{form}} [{mean - half:{form}}, {mean + half:{form}}]"


# --- files of arms -------------------------------------------------------------------------------------------------


def test_a_file_of_arms_says_what_is_run_and_compared(arms):
    plan = read_plan(arms)
    assert plan.first == "released" and plan.titles == {"released": "SPAG", "detached": "", "old": "no longer run"}
    assert plan.arms["detached"] == {"DETACH_KL": "True", "TRAIN_ARGS": "--num_train_epochs 2"}
    assert plan.all == ["WORDS=words.txt", "EVAL_WORDS=w=words.txt"] and plan.gate == ("attacker wins", 0.1)
    assert plan.primaries == [("points", "released", None), ("points", "detached", "released")]


@pytest.mark.parametrize("path", sorted((ROOT / "configs/arms").glob("*.txt")), ids=lambda path: path.stem)
def test_every_file_of_arms_that_comes_along_is_right(path):
    known = set(re.findall(r"^([A-Z_]+)=", (ROOT / "configs/defaults.sh").read_text(), re.MULTILINE))
    plan = read_plan(path)
    assert {name for words in plan.arms.values() for name in words} <= known


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("released KL=0.1", "arms.txt:12: .*released"),
        ("coin CONTROL", "arms.txt:12: 'CONTROL': expected NAME=VALUE"),
        ("coin CONTROL='coin", "arms.txt:12: "),
        ("minus: points", "arms.txt:12: minus: points"),
        ("primary: points coin", "coin, which is no arm"),
    ],
)
def test_a_wrong_line_of_a_file_of_arms_is_named(arms, line, complaint):
    arms.write_text(f"{ARMS}{line}\n")
    with pytest.raises(UserError, match=complaint):
        read_plan(arms)


# --- what is kept, and its tables ----------------------------------------------------------------------------------


def test_seeds_are_kept_and_their_tables_compare_arms_seed_by_seed(seeds, arms):
    (seeds[0] / "questions.json").write_text(
        json.dumps({"shares": {"imitation": {"all": 0.5}, "detached": {"all": 0.75}}})
    )
    found = tables(table_of(*(kept(folder, arms) for folder in seeds), arms=arms).output)
    # A model that wins 60 of 100 games as attacker wins the other 40 as defender: imitation breaks the rules.
    points = found["Points against imitation"]
    assert points["released", "2"]["as attacker"] == over_two(0.6, 0.64, ".3f")
    assert points["released", "2"]["as defender"] == over_two(0.4, 0.36, ".3f")
    assert points["detached", "1"]["points"] == "0.500 [0.500, 0.500]" and points["detached", "1"]["tie"] == "0.000"
    assert (points["released", "2"]["steps"], points["released", "2"]["rows"]) == ("32", "2000")
    assert points["released", "2"]["own breaches as attacker"] == "0.380"
    assert found["Differences, paired by seed"]["points", "detached"]["difference"] == "+0.000 [+0.000, +0.000]"
    assert found["Primary comparisons"]["points", "released"]["minus"] == "0.5"
    own = found["Self-play"]
    assert own["imitation", "0"]["attacker wins"] == "0.510" and own["detached", "1"]["attacker wins"] == "0.610"
    assert own["imitation", "0"]["word_dependence attacker"] == "1.000"
    assert (
        found["Questions"]["detached", "2"]["all"] == "0.750" and found["Questions"]["detached", "2"]["seeds"] == "1"
    )
    made = found["Runs"]["1", "released"]
    assert (made["commit"], made["hours of training"], made["of play"]) == ("abc123", "1.50", "4.00")
    assert found["Arms"]["detached", ""]["settings"] == "DETACH_KL=True; TRAIN_ARGS=--num_train_epochs 2"
    assert "word1, it is the " in found["Games"]["released", "1"]["games of the last model"]


def test_benchmarks_asked_of_the_last_models_of_a_seed_stand_at_their_last_epochs(seeds, arms):
    add_benchmarks(seeds[0], {"base": 40, "imitation": 50, "detached": 60})
    found = tables(table_of(*(kept(folder, arms) for folder in seeds), arms=arms).output)["Reasoning benchmarks"]
    assert {key: row["PIQA"].split()[0] for key, row in found.items()} == {
        ("base", "0"): "40.00",
        ("imitation", "0"): "50.00",
        ("detached", "2"): "60.00",
    }


def test_runs_that_differ_in_more_than_seed_and_words_are_refused_by_name(seeds, arms):
    good = [kept(folder, arms) for folder in seeds]
    make_loop(seeds[1] / "detached", 2, imitation=False, LIKE="x", DETACH_KL="True", WORDS=f"{seeds[1]}/w.txt")
    refused = table_of(good[0], kept(seeds[1], arms), arms=arms, status=2).errors
    assert "detached with seed 2 differs from detached with seed 1: WORDS" in refused
    make_loop(seeds[0] / "detached", 1, imitation=False, DETACH_KL="True", WORDS=f"{seeds[0]}/words.txt", KL="0.1")
    refused = table_of(kept(seeds[0], arms), arms=arms, status=2).errors
    assert "detached with seed 1 differs from released in more than its words say: KL: 0.2 then, 0.1 now" in refused
    assert "two runs of detached, released with seed 1" in table_of(good[0], good[0], status=2).errors


def test_a_seed_whose_imitation_model_cannot_play_is_left_out_and_named(seeds, arms):
    path = kept(seeds[0], arms)
    stored = read_json(path)
    stored["arms"]["imitation"]["epochs"]["0"]["Self-play"]["attacker wins"] = 0.05
    write_json(path, stored)
    printed = table_of(path, kept(seeds[1], arms), arms=arms).output
    assert "Seed 1 is left out: 5.0%" in printed
    assert tables(printed)["Points against imitation"]["released", "2"]["points of each seed"] == "0.500"


def test_loops_are_compared_without_a_file_of_arms_and_have_their_benchmarks(tmp_path):
    right = {("spag", 1): (50, 55, 60), ("spag", 2): (52, 56, 64), ("sft", 1): (50, 51, 52), ("sft", 2): (52, 53, 56)}
    loops = {}
    for (arm, seed), numbers in right.items():
        loops[arm, seed] = make_loop(tmp_path / f"{arm}{seed}", seed, CONTROL="sft" * (arm == "sft"))
        names = ("base", "imitation", "epoch1", "epoch2")
        add_benchmarks(loops[arm, seed], dict(zip(names, (40, *numbers), strict=True)))
    named = [f"{arm}={folder}" for (arm, _), folder in loops.items()]
    found = tables(table_of(*named).output)
    benchmarks = found["Reasoning benchmarks"]
    assert benchmarks["spag", "2"]["PIQA"] == benchmarks["spag", "2"][MEAN] == over_two(60, 64, ".2f")
    assert benchmarks["spag", "2"][f"{MEAN} minus imitation"] == over_two(10, 12, "+.2f")
    assert found["Differences, paired by seed"][MEAN, "sft"]["difference"] == over_two(-8, -8, "+.2f")
    lonely = make_loop(tmp_path / "spag0", 0, CONTROL="")  # a seed without the other arm takes nothing away
    add_benchmarks(lonely, {"base": 40, "imitation": 50, "epoch1": 55, "epoch2": 60})
    found = tables(table_of(*named, f"spag={lonely}").output)
    assert found["Differences, paired by seed"][MEAN, "sft"]["difference"] == over_two(-8, -8, "+.2f")
    # With one seed, the error of a difference is over questions: 10 of 100 answers differ, in each of two benchmarks.
    alone = tables(table_of(named[0]).output)["Reasoning benchmarks"]["spag", "2"]
    assert alone[f"{MEAN} minus imitation"] == f"+10.00 ± {100 * math.sqrt(0.1 * 0.9 / 99 / 2):.2f}"
    add_benchmarks(loops["sft", 1], {"base": 40, "epoch1": 51}, commit="def456")
    assert "data_revisions" in table_of(named[0], named[2], status=2).errors


def test_loops_that_share_a_model_add_what_each_knows_of_it(tmp_path):
    spag = make_loop(tmp_path / "spag", 1, CONTROL="")
    sft = make_loop(tmp_path / "sft", 1, imitation=False, CONTROL="sft", LIKE=str(spag))
    shutil.copytree(spag / "epoch1", spag / "epoch1_old")  # a copy that somebody kept
    add_benchmarks(sft, {"base": 40, "imitation": 50, "epoch1": 55})
    found = tables(table_of(f"sft={sft}", f"spag={spag}").output)
    assert found["Reasoning benchmarks"]["imitation", "0"]["PIQA"].startswith("50.00")
    assert found["Self-play"]["imitation", "0"]["attacker wins"]


def test_a_folder_that_is_no_loop_and_a_file_that_is_no_seed_are_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    assert "no settings.json of a loop" in table_of(f"spag={tmp_path}", status=2).errors
    assert "x.json" in table_of(tmp_path / "x.json", status=2).errors


def test_intervals_and_p_values_are_students_and_primary_ones_are_adjusted_by_holm():
    # Mean 0.6, standard deviation 0.1, standard error 0.1 / sqrt(3), t(2) = 4.303; t = 10.39, p = 0.00913.
    mean, (low, high), p = student([0.5, 0.6, 0.7])
    assert (mean, low, high) == (pytest.approx(0.6), pytest.approx(0.3516, abs=1e-4), pytest.approx(0.8484, abs=1e-4))
    assert p == pytest.approx(0.00913, abs=1e-5)
    assert student([0.55 - 0.5, 0.6 - 0.55])[2] is None  # equal up to rounding
    assert student([0.5]) == (0.5, None, None) and student([0.5, 0.5]) == (0.5, [0.5, 0.5], None)
    assert holm([0.04, 0.01, 0.03]) == [pytest.approx(0.06), pytest.approx(0.03), pytest.approx(0.06)]
    assert holm([0.04, None]) == [pytest.approx(0.08), None]


# --- the embedded world's stored results ---------------------------------------------------------------------------


TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


@pytest.fixture(scope="module")
def printed():
    """A function that returns the tables of the stored results of a world."""

    @functools.cache
    def printed(world: str, study: str = "results") -> str:
        stored = sorted((ROOT / "data" / world / study).glob("*.json"))
        return table_of(*stored, arms=ROOT / f"configs/arms/{world}.txt").output

    return printed


def test_seeds_whose_imitation_model_cannot_play_are_named(printed):
    first = printed("tiny", "first_study")
    assert "Seed 2 is left out: 0.8%" in first and "Seed 8 is left out: 0.8%" in first


@pytest.mark.parametrize(
    "readme, section, world, rows",
    [
        ("README.md", r"^### A pretrained model\n(.*?)^### The embedded world", "english", 5),
        ("README.md", r"^### The embedded world\n(.*?)^## The four steps", "tiny", 6),
        ("tools/tiny/README.md", r"^### Results\n(.*?)^## A game with", "tiny", 31),
    ],
)
def test_numbers_of_readmes_are_those_of_the_tables_of_stored_results(printed, readme, section, world, rows):
    """Each line of their tables is a part of a printed one; numbers of three decimals stand in the tables too."""
    printed = printed(world)
    known = [row for block in TABLE.findall(printed) for row in rows_of(block)]
    results = re.search(section, (ROOT / readme).read_text(), re.MULTILINE | re.DOTALL)[1]
    shown = [row for block in TABLE.findall(results) for row in rows_of(block)]
    of_arms = [row for row in shown if "arm" in row or "points" in row]
    assert len(of_arms) >= rows
    for row in of_arms:
        row.pop("learning", None)  # the arm in other words
        assert any(row.items() <= each.items() for each in known), row
    for number in re.findall(r"\b\d\.\d{3}\b", TABLE.sub("", results)):
        assert number in printed, number


def test_the_table_of_imitated_games_is_that_of_the_stored_counts():
    readme = (ROOT / "data/README.md").read_text()
    lines = (ROOT / "data/english/gate.jsonl").read_text().splitlines()
    shown = next(rows for rows in map(rows_of, TABLE.findall(readme)) if "imitated" in rows[0])
    assert len(shown) == len(lines) > 5
    for row, each in zip(shown, map(json.loads, lines), strict=True):
        training = f"{each['method']}, {each['learning_rate']}, {each['rows_a_step']}"
        shares = [f"{each[outcome] / each['games']:.1%}" for outcome in ("defender wins", "attacker breaks the rules")]
        assert [*row.values()] == [
            each["imitated"],
            f"{each['rows']:,}",
            training,
            str(each["temperature"]),
            f"`{each['words']}`",
            str(each["games"]),
            *shares,
        ]


# --- matches of last models ----------------------------------------------------------------------------------------


def test_the_last_models_meet_each_other_and_a_scripted_player_as_in_the_loops_matches(seeds, arms):
    shared = {
        "EVAL_WORDS": "a=x.txt b=y.txt",
        "EVAL_SEEDS": "3",
        "EVAL_GAMES_PER_WORD": "5",
        "EVAL_ARGS": "--tf32 True",
    }
    shared |= dict.fromkeys(("MAX_TURNS", "MAX_LENGTH", "MAX_NEW_TOKENS", "TEMPERATURE", "TOP_K"), "7")
    shared |= {"ENGINE": "auto", "PRECISION": "bf16", "PLAY_BATCH": ""}
    make_loop(seeds[0] / "released", 1, **shared)
    make_loop(seeds[0] / "detached", 1, imitation=False, **shared)
    made = {job.name: " ".join(job.command) for job in matches(seeds[0], read_plan(arms), ["released", "detached"])}
    of_hints = ("released_imitation", "released_epoch2", "detached_epoch2")
    assert {*made} == {*(f"{name}_against_hints" for name in of_hints), "detached_epoch2_against_released"}
    imitation = made["released_imitation_against_hints"]
    assert f"--players imitation={seeds[0]}/released/imitation/model hints=scripted:hints --against hints" in imitation
    last = made["released_epoch2_against_hints"]
    assert last.endswith("--bf16 True --tf32 True --game_options hints=games.jsonl")
    assert "--words a=x.txt b=y.txt --seeds 3 --games_per_word 5" in last and "--temperature 7" in last
    players = f"detached={seeds[0]}/detached/epoch2/model released={seeds[0]}/released/epoch2/model --against released"
    assert players in made["detached_epoch2_against_released"]
    assert f"--output_dir {seeds[0]}/detached/epoch2/against_released" in made["detached_epoch2_against_released"]
    games = [game_of(number, wins=40, attacker="detached", defender="released") for number in range(100)]
    games += [game_of(number, wins=20, attacker="released", defender="detached") for number in range(100)]
    write_match(seeds[0] / "detached/epoch2/against_released", games, ["detached", "released"], "released")
    found = tables(table_of(kept(seeds[0], arms), arms=arms).output)
    assert found["Points against released"]["detached", "2"]["points of each seed"] == "0.600"


# --- the program that runs a study ---------------------------------------------------------------------------------

LOOP = """#!/usr/bin/env bash
# Stands in for tools/run_spag.sh: notes its words, and leaves what a loop leaves.
for word; do case $word in OUTPUT=*) output=${word#*=} ;; SLOW=*) slow=1 ;; esac; done
printf '%s\\n' "$*" >>"$CALLS"
[ -z "$FAIL" ] || case $output in *"$FAIL") exit 1 ;; esac
[ -z "$slow" ] || { trap 'echo ended >>"$CALLS"; exit 143' TERM; sleep 30 & wait; }
mkdir -p "$output"
cp -r "$LOOPS/$(basename "$output" | sed s/reader/detached/)/." "$output"
"""
THREE = """before: -c print({seed})
all: WORDS="a b"
released MODEL={folder}/base
reader DETACH_KL=True REWARD_ARGS="--repeat_to {folder}/detached/rows.json" # reads files of another arm
detached DETACH_KL=True
"""


@pytest.fixture
def study(tmp_path):
    """A function that starts a study in which the loop has a stand-in."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/run_spag.sh").write_text(LOOP)
    (tmp_path / "tools/run_spag.sh").chmod(0o755)
    (tmp_path / "arms.txt").write_text(THREE)
    environment = ENVIRONMENT | {"CALLS": str(tmp_path / "calls"), "LOOPS": str(tmp_path / "loops"), "FAIL": ""}
    make_loop(tmp_path / "loops/released", 1)
    make_loop(tmp_path / "loops/detached", 1, imitation=False, DETACH_KL="True")
    program = "import sys; from tools.study import run; run.ROOT = sys.argv.pop(1); run.run_program(run.main)"

    def start(*flags: str, **more: str) -> subprocess.Popen:
        command = [sys.executable, "-c", program, tmp_path, "--arms", tmp_path / "arms.txt", *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command += ["--output_dir", tmp_path / "out"]
        return subprocess.Popen(command, env=environment | more, cwd=ROOT, **pipes)

    return start


def calls(tmp_path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_the_first_arm_comes_first_then_the_others_then_those_that_read_their_files(study, tmp_path):
    run = study("--settings", "settings.sh", "EPOCHS=1", "--seeds", "1", "2", "--jobs", "2")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    made, out = calls(tmp_path), tmp_path / "out"
    assert sorted(made[:2]) == [
        f"settings.sh SEED={seed}00 WORDS=a b EPOCHS=1 OUTPUT={out}/seed{seed}/released MODEL={out}/seed{seed}/base"
        for seed in (1, 2)
    ]
    like = f"OUTPUT={out}/seed1/detached LIKE={out}/seed1/released DETACH_KL=True"
    assert any(call.endswith(like) for call in made[2:4])
    assert all(f"REWARD_ARGS=--repeat_to {out}/seed" in call for call in made[4:]) and len(made) == 6
    assert "## Points against imitation" in (out / "table.md").read_text()
    assert (out / "seed1/before.log").read_text() == "1\n"


def test_the_same_command_continues_and_each_arm_is_kept_when_it_has_ended(study, tmp_path):
    run = study("--seeds", "1", FAIL="reader")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 2 and "seed1/reader.log" in output and len(calls(tmp_path)) == 3
    stored = read_json(tmp_path / "out/seed1.json")["arms"]
    assert stored.keys() == {"imitation", "released", "detached"}
    assert stored["detached"]["made"].keys() >= {"spag", "cpu", "precision"}
    again = study("--seeds", "1")
    assert again.communicate(timeout=300) and again.returncode == 0
    assert [re.search(r"seed1/(\w+)", call)[1] for call in calls(tmp_path)[3:]] == ["reader"]
    assert read_json(tmp_path / "out/seed1.json")["arms"].keys() == {*stored, "reader"}


def test_some_arms_of_the_file_may_run_alone(study, tmp_path):
    run = study("--seeds", "1", "--only", "detached")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    assert [re.search(r"seed1/(\w+)", call)[1] for call in calls(tmp_path)] == ["released", "detached"]
    wrong = study("--seeds", "1", "--only", "detatched")
    output, _ = wrong.communicate(timeout=300)
    assert wrong.returncode == 2 and "detatched" in output


def test_a_signal_ends_the_loops_at_work(study, tmp_path):
    run = study("--seeds", "1", "2", "--jobs", "2", "--settings", "SLOW=1")
    while not (tmp_path / "calls").exists() or len(calls(tmp_path)) < 2:
        assert run.poll() is None
        time.sleep(0.1)
    time.sleep(0.5)
    os.kill(run.pid, signal.SIGTERM)
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 143 and "the same command continues" in output
    assert calls(tmp_path).count("ended") == 2
