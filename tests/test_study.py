"""Studies: what is kept of finished loops, tables over seeds, the script that runs all, stored results."""

import contextlib
import math
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import ROOT, call, descendants, finish, start, wait_for

from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, Taboo
from tools.lab import collect, preparations, study, table
from tools.lab.table import holm, student
from tools.measure.estimates import MEAN, markdown
from tools.measure.match_text import write_results
from tools.measure.reasoning_table import Score, score_rows
from tools.selfplay.episodes import summary
from utils import UserError, read_json, read_words, write_json, write_records, write_words

T = 12.7062  # Student's 97.5% quantile with one degree of freedom
TABOO = Taboo()
MATCH = {"against": "imitation", "task_type": "sampling", "seeds": [0], "games_per_word": 1, "max_turns": 5}


def make_loop(folder: Path, seed: int, wins: tuple[int, ...] = (50, 55, 60), settings: Mapping = {}) -> Path:
    """A finished loop. `wins` are the games of 100 that imitation and the models of two epochs win as attackers."""
    settings = {"seed": seed, "output": str(folder), "words": f"{folder.parent}/words.txt", **settings}
    write_json(folder / "settings.json", {"format": 2, "settings": settings, "made_by": {"spag": "abc123"}})
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
        make_loop(tmp_path / f"seed{seed}/detached", seed, detached, {"training.detach_kl": "True"})
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
    for seed, change in zip(seeds, (0, 1), strict=True):
        add_belief(seed / "released", {"base": -5.5, "epoch1": -4.0, "epoch2": -2.0})
        add_belief(seed / "detached", {"base": -5.5, "epoch1": -3.0, "epoch2": -1.0 + change})
        add_benchmark(seed / "released", {"imitation": 50, "epoch1": 55, "epoch2": 60 + 4 * change})
    flags = ["--primary", "share among 40", "detached", "released", "--minus", "points", "detached", "released"]
    flags += ["--primary", "points", "detached", "typo"]
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
    arm = shown["Arms"]["detached", "training.detach_kl=True", "2"]
    assert (arm["steps"], arm["rows"], arm["commits"]) == ("32", "2000", "abc123")
    assert read_json(collected(seeds[0]))["arms"]["released"]["settings"]["words"] == "{folder}/words.txt"
    of_one = tables(table_of(collected(seeds[0])).output)["Reasoning benchmarks"]["released", "2", "1"]
    assert of_one["PIQA"] == of_one[MEAN] == "60.00 ± 5.00"


def test_runs_of_an_arm_with_other_settings_are_refused_by_name(seeds):
    first, second = collected(seeds[0]), seeds[1] / "detached"
    free = {"training.detach_kl": "True", "match.seeds": ["2"], "like": "x", "training.save_steps": "9", "epochs": 9}
    make_loop(second, 2, settings=free)
    table_of(first, collected(seeds[1]))
    make_loop(second, 2, settings={"training.detach_kl": "False"})
    refused = table_of(first, collected(seeds[1]), status=2).errors
    assert "seed 2, detached: training.detach_kl: True then, False now" in refused
    for name in ("match.words", "training.per_device_train_batch_size"):
        make_loop(second, 2, settings={"training.detach_kl": "True", name: "other"})
        assert f"{name}: None then, other now" in table_of(first, collected(seeds[1]), status=2).errors
    assert "two runs of released with seed 1" in table_of(first, first, status=2).errors


def test_the_folder_of_a_loop_is_replaced_only_where_a_path_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"rewards.decay_weight": "0.8", "model": f"x{tmp_path}/m", "epochs": 3}
    values |= {"match.words": [f"a={tmp_path}/a.txt", "b=./b.txt"], "rewards.shape": f"{ROOT}/shape.py:shape"}
    settings = collect.read_loop("arm", make_loop(Path("loop"), 1, settings=values))["arms"]["arm"]["settings"]
    values |= {"match.words": ["a={folder}/a.txt", "b={folder}/b.txt"], "rewards.shape": "shape.py:shape"}
    assert settings == values | {"seed": 1, "output": "loop", "words": "{folder}/words.txt"}


def test_a_loop_of_the_shell_script_still_has_a_table_and_another_folder_is_refused_in_one_line(tmp_path):
    older, other = make_loop(tmp_path / "older", 1), make_loop(tmp_path / "other", 1)
    settings = {"SEED": "1", "DETACH_KL": "True"}
    write_json(older / "settings.json", {"settings": settings, "made_by": {"spag": "abc123"}})
    write_json(other / "settings.json", {"settings": {"lm_kl_coeff": 0.1}, "finished": True})
    assert collect.read_loop("older", older)["seed"] == 1
    assert "## Arms" in table_of(f"older={older}").output
    assert f"{other}: its settings.json" in table_of(f"other={other}", status=2).errors


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


@pytest.mark.parametrize("world", ["tiny", "tiny_baseline", "hints", "english", "english_baseline"])
def test_the_stored_tables_are_made_again_from_the_stored_seeds(world):
    """Their own lines say which comparisons were asked for."""
    text, flags = (ROOT / f"data/results/{world}/table.md").read_text(), []
    for title, name in (("Primary comparisons", "--primary"), ("Differences, paired by seed", "--minus")):
        for comparison in tables(text).get(title, ()):
            flags += [name, *comparison]
    assert table_of(*sorted((ROOT / f"data/results/{world}").glob("*.json")), flags=flags).output == text


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
        (("english", "english_baseline"), 2, "released", "sft", 6),
        (("tiny", "hints"), 3, "released", "cloning", 16),
        (("tiny", "hints"), 3, "detached", "cloning", 16),
    ],
)
def test_differences_over_the_seeds_of_two_studies_are_the_ones_that_are_told(worlds, epoch, arm, other, seeds):
    files = [path for world in worlds for path in (ROOT / f"data/results/{world}").glob("*.json")]
    frame = table.to_frame(table.read_results(files))
    points = frame[(frame.table == "Points against imitation") & (frame.column == "points") & (frame.epoch == epoch)]
    by_arm = points.pivot(index="seed", columns="arm", values="value").dropna(subset=[arm, other])
    mean, interval, _ = student((by_arm[arm] - by_arm[other]).tolist())
    told = table.with_interval(mean, interval, "+.3f")
    assert len(by_arm) == seeds and told in " ".join((ROOT / "data/RESULTS.md").read_text().split())


# Studies. A stand-in for the loop notes its words and leaves what a loop leaves.

LOOP = """import os, pathlib, shutil, sys
output = pathlib.Path(next(word for word in sys.argv if word.startswith("output=")).partition("=")[2])
with open(os.environ["CALLS"], "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if os.environ["FAIL"] and str(output).endswith(os.environ["FAIL"]):
    sys.exit(1)
shutil.copytree(pathlib.Path(os.environ["LOOPS"], output.name), output, dirs_exist_ok=True)
"""
FUNCTIONS = """import json
from pathlib import Path

def prepare(folder, seed, settings):
    Path(folder, "prepared").write_text(f"{seed} {settings['model']} {settings['training.lm_kl_coeff']}")

def after(loop):
    row = {"model": "imitation", "hints": "last", "games": 20, "candidates": 40}
    row |= {"share": -3.0, "rank_1": 0.5, "tempered": -2.0}
    Path(loop, "belief.json").write_text(json.dumps({"table": [row]}))
"""
ARMS = """
files = ["configs/tiny.toml"]
prepare = "FUNCTIONS:prepare"
after = "FUNCTIONS:after"
primary = [["points", "sft", "released"]]

[all]
model = "{folder}/base"
words = "a b"
match.words = ["{folder}/a.txt", "{folder}/b c.txt"]
match.seeds = ["{seed}"]

[arms.released]

[arms.sft]
control = "sft"
training.learning_rate = 1e-4
"""


@pytest.fixture
def arms(tmp_path) -> Path:
    """A file of arms, and the file of its functions."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    path = tmp_path / "arms.toml"
    path.write_text(ARMS.replace("FUNCTIONS", str(tmp_path / "functions.py")))
    return path


def test_a_study_runs_arms_by_seed_and_the_same_command_continues(tmp_path, monkeypatch, arms):
    script, out, calls = tmp_path / "stand_in.py", tmp_path / "out", tmp_path / "calls"
    script.write_text(LOOP)
    monkeypatch.setattr(study, "loop_command", lambda words: [sys.executable, str(script), *words])
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("LOOPS", str(tmp_path / "loops"))
    for arm in ("released", "sft"):
        make_loop(tmp_path / "loops" / arm, 1)
    flags = ["--output_dir", f"{out}/", "--seeds", 0, 2, "--jobs", 2, "--settings", "epochs=1"]  # as a shell has it

    monkeypatch.setenv("FAIL", "seed2/sft")
    failed = call(study.main, arms, *flags, status=1).output
    assert f"seed 2 failed; log: {out}/seed2/sft.log" in failed and not (out / "table.md").exists()
    first = f"{ROOT}/configs/tiny.toml model={out}/seed2/base words=a b"
    first += f" match.words={out}/seed2/a.txt '{out}/seed2/b c.txt' match.seeds=2"
    lines = calls.read_text().splitlines()
    assert f"{first} seed=200 output={out}/seed2/released epochs=1" in lines
    like = f"seed=0 output={out}/seed0/sft like={out}/seed0/released epochs=1 control=sft training.learning_rate=1e-4"
    assert [line for line in lines if line.endswith(like)]
    assert read_json(out / "seed2.json")["arms"].keys() == {"imitation", "released"}
    assert (out / "seed2/prepared").read_text() == f"2 {out}/seed2/base 0.2"

    monkeypatch.setenv("FAIL", "")
    again = call(study.main, arms, *flags).output
    assert [re.search(r"seed2/(\w+) like", line)[1] for line in calls.read_text().splitlines()[4:]] == ["sft"]
    assert "seed 2: sft" in again and "released" not in again
    imitation = read_json(out / "seed2.json")["arms"]["imitation"]["epochs"]["0"]
    assert imitation["Guesses after recorded hints"]["share among 40"] == -3.0
    assert "## Primary comparisons" in (out / "table.md").read_text()


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("1e-4", '"fast"', "[arms.sft]: [training] learning_rate"),
        ("training.learning_rate", "training.learning_rat", "[arms.sft]: training.learning_rat: no flag of train.py"),
        ('control = "sft"', 'like = "sft"', "[arms.sft]: like is 'sft'"),
        ('"sft", "released"', '"sft", "typo"', "['points', 'sft', 'typo']"),
        (":after", ":afte", ":afte"),
        ("after =", "afte =", "afte is no key of a study; the nearest that exists: after"),
        ('["configs/tiny.toml"]', '"configs/tiny.toml"', "files is 'configs/tiny.toml'; expected a list"),
        ("[arms.", "[all.", "a study needs arms"),
        ("[all]", "[all", "not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_of_arms_is_said_before_the_first_loop(arms, tmp_path, old, new, told):
    arms.write_text(arms.read_text().replace(old, new))
    errors = call(study.main, arms, "--output_dir", tmp_path / "out", status=2).errors
    assert str(arms.parent) in errors and told in errors and not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "configs/arms").glob("*.toml")), ids=lambda path: path.stem)
def test_the_loop_accepts_the_settings_of_our_studies(path, tmp_path):
    ours, place = study.read_study(str(path), []), tmp_path / "seed7"
    for arm in ours.arms:
        loop = study.settings_of(ours, arm, ["training.lm_kl_coeff=0.5"], 7, place)
        assert (loop.seed, loop.output, loop.of("match").seeds) == (700, str(place / arm), [7])
        assert "{" not in str([*loop.settings().values()]) and loop.of("training").lm_kl_coeff == 0.5


def test_the_file_of_arms_in_the_readme_is_one(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", (ROOT / "tools/lab/README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "arms.toml").write_text(shown)
    assert list(study.read_study(str(tmp_path / "arms.toml"), []).arms) == ["released", "sft", "detached"]


def test_an_arm_may_begin_like_another_than_the_first_one():
    ours = study.read_study(str(ROOT / "configs/arms/qwen15.toml"), [])
    likes = {"gate": None, "detached": "gate", "silent": "detached", "cloning": "gate", "sft": "detached"}
    assert {arm: study.like_of(ours, arm) for arm in ours.arms} == likes
    assert "like=x/detached" in study.loop_words(ours, "silent", 0, Path("x"), [])


@pytest.mark.parametrize("right, breaches, opens", [(30, 10, True), (29, 10, False), (30, 11, False)])
def test_the_gate_of_a_study_stops_a_seed_whose_model_cannot_play(tmp_path, monkeypatch, right, breaches, opens):
    outcomes = {"defender wins": right, "attacker breaks the rules": breaches}
    for arm in ("gate", "silent"):
        summary = tmp_path / arm / "epoch1/episodes/imitation_sampling_words_summary.json"
        write_json(summary, {"games": 100, "outcomes": outcomes})
    preparations.gate(str(tmp_path / "silent"))
    with contextlib.nullcontext() if opens else pytest.raises(UserError, match="cannot play well enough"):
        preparations.gate(str(tmp_path / "gate"))
    monkeypatch.setenv("RIGHT", "0")
    monkeypatch.setenv("BREACHES", "1")
    preparations.gate(str(tmp_path / "gate"))


@pytest.fixture
def programs(monkeypatch) -> list[str]:
    """The command lines that a preparation would run."""
    commands = []
    monkeypatch.setattr(preparations, "run_python", lambda *words: commands.append(" ".join(map(str, words))))
    return commands


def test_words_of_a_study_leave_out_those_that_are_held_out(tmp_path, programs):
    data, (first, second, third, *_) = tmp_path / "data", read_words(ROOT / "data/target_words.txt")
    write_words(data / "held_out.txt", ["violin", first])
    write_words(data / "played.txt", ["piano", second])
    preparations.qwen15(str(tmp_path), 5, {"model": "a/model"})
    words = read_words(data / "words.txt")
    assert words[:3] == ["piano", second, third] and first not in words and len(words) == len(set(words))
    (rows,) = (command for command in programs if "assign_rewards" in command)
    assert "--tokenizer a/model" in rows and "--messages all" in rows
    assert f"--rows {data}/imitation.json --number 500 --seed 5 --output {data}/anchor.json" in programs[-1]
    write_words(data / "words.txt", ["piano"])
    preparations.hints(str(tmp_path), 5, {})
    assert read_words(tmp_path / "all_words.txt") == ["piano", "violin", first]


def test_guesses_among_all_words_are_those_of_the_newest_model_and_of_imitation(tmp_path, programs):
    loop = tmp_path / "released"
    for folder in ("imitation", "epoch2", "epoch10"):
        (loop / folder / "model").mkdir(parents=True)
    (loop / "epoch11/episodes").mkdir(parents=True)
    preparations.share_among_all(str(loop))
    newest = f"--models epoch10={loop}/epoch10/model imitation={loop}/imitation/model --games"
    assert newest in programs[-1] and programs[-1].endswith(f"--output_dir {loop}/belief_all")


def test_a_signal_to_the_study_ends_its_programs(tmp_path):
    code = "import sys; from tools.lab import study as run; from utils import run_program\n"
    code += "run.loop_command = lambda words: ['sh', '-c', 'sleep 60; true', str(words)]\nrun_program(run.main)"
    (tmp_path / "arms.toml").write_text("[arms.one]\nmodel = 'm'\nwords = 'w'\n")
    process = start([sys.executable, "-c", code, tmp_path / "arms.toml", "--output_dir", tmp_path / "out"])
    assert wait_for(lambda: bool(descendants(process.pid, "sleep")), process)
    programs = descendants(process.pid, "sleep")
    process.send_signal(signal.SIGTERM)
    finish(process, status=143)
    assert not any(program.is_running() and program.name() == "sh" for program in programs)
