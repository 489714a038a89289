"""Studies: what is kept of finished loops, the table over seeds, the program that runs all, stored results."""

import contextlib
import functools
import itertools
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import ROOT, Fork, call, descendants, finish, flags_of, wait_for

from tools import evaluate_belief
from tools.common.errors import UserError
from tools.common.files import read_json, read_words, write_json, write_records, write_words
from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, Taboo
from tools.lab import preparations, study, table
from tools.measure.estimates import markdown, student, with_interval
from tools.measure.matches import write_results
from tools.selfplay.episodes import summary

T = 12.7062  # Student's 97.5% quantile with one degree of freedom
TABOO = Taboo()
MATCH = {"against": "imitation", "task_type": "sampling", "seeds": [0], "games_per_word": 1, "max_turns": 5}


def make_loop(folder: Path, seed: int, wins: tuple[int, ...] = (50, 55, 60), settings: Mapping = {}) -> Path:
    """A finished loop. `wins` are the games of 100 that imitation and the models of two epochs win as attackers."""
    settings = {"seed": seed, "output": str(folder), "words": f"{folder.parent}/words.txt", **settings}
    write_json(
        folder / "settings.json", {"format": 3, "became": {}, "settings": settings, "made_by": {"spag": "abc123"}}
    )
    for epoch, won in enumerate(wins[1:], start=1):
        name, place = f"epoch{epoch}", folder / f"epoch{epoch}"
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
    rows = [{"model": model, "benchmark": "PIQA", "value": percent} for model, percent in percents.items()]
    write_json(folder / "reasoning/results.json", {"results": rows})


def add_belief(folder: Path, log_shares: dict[str, float]) -> None:
    """Results of tools/evaluate_belief.py: log_share of each model after the last hint, and before the first one."""
    rows = []
    for model, value in log_shares.items():
        row = {"model": model, "candidates": 40, "rank_1": 0.5, "belief": -20.0}
        rows += [row | {"hints": "last", "log_share": value}, row | {"hints": 0, "log_share": -9.0}]
    write_json(folder / "epoch1/belief/belief.json", {"table": rows})


@pytest.fixture
def seeds(tmp_path) -> list[dict]:
    """The numbers of two seeds, each with the arms released and detached."""
    written = []
    for seed, released, detached in ((1, (50, 55, 60), (50, 60, 70)), (2, (52, 56, 64), (52, 62, 66))):
        folder = tmp_path / f"seed{seed}"
        make_loop(folder / "released", seed, released)
        make_loop(folder / "detached", seed, detached, {"training.detach_kl": "True"})
        add_belief(folder / "released", {"base": -5.5, "epoch1": -4.0, "epoch2": -2.0})
        add_belief(folder / "detached", {"base": -5.5, "epoch1": -3.0, "epoch2": -2.0 + seed})
        add_benchmark(folder / "released", {"imitation": 50, "epoch1": 55, "epoch2": 56 + 4 * seed})
        table.collect(folder, ["released", "detached"])
        written.append(read_json(folder.with_suffix(".json")))
    return written


def sections(text: str) -> dict[str, dict[tuple, dict[str, str]]]:
    """The tables of a text in Markdown by title: lines by their first three cells, cells by column."""
    read = {}
    for title, block in re.findall(r"^## (.*)\n\n((?:\|.*\n)+)", text, flags=re.MULTILINE):
        head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines())
        read[title] = {tuple(line[:3]): dict(zip(head, line, strict=True)) for line in lines}
    return read


def test_the_numbers_of_a_training_are_those_of_its_steps_on_games(tmp_path):
    loop = make_loop(tmp_path / "seed1/released", 1)
    steps = [
        {"log_ratio": ratio, "clip_fraction": clipped} for ratio, clipped in ((0.0, 0.0), (-0.5, 0.5), (0.1, 0.1))
    ]
    write_json(loop / "epoch1/model/trainer_state.json", {"log_history": [*steps, {"train_loss": 1.0}]})
    write_json(loop / "epoch2/model/trainer_state.json", {"log_history": [{"sft_loss": 1.0}]})
    first, second = (table.loop_numbers(loop)[f"epoch{epoch}"] for epoch in (1, 2))
    of_training = {name: value for name, value in first.items() if name.startswith("training: ")}
    assert list(of_training.values()) == pytest.approx([0.2, -0.5, 0.1])
    assert not [name for name in second if name.startswith("training: ")]


def over_two(one: float, other: float, form: str = ".3f") -> str:
    mean, half = (one + other) / 2, T * abs(one - other) / 2
    return f"{mean:{form}} [{mean - half:{form}}, {mean + half:{form}}]"


def test_a_table_has_the_mean_over_seeds_of_each_number_by_arm_and_epoch(seeds):
    means = sections(table.table_text(seeds, [], []))["Means over seeds"]
    means = {key: (line["mean"], line["seeds"]) for key, line in means.items()}
    # A model that wins 60 of 100 games as attacker wins the other 40 as defender: imitation breaks the rules.
    assert means["points as attacker", "released", "2"] == (over_two(0.6, 0.64), "2")
    assert means["points as defender", "released", "2"] == (over_two(0.4, 0.36), "2")
    assert means["points", "detached", "1"] == ("0.500", "2")
    assert means[ATTACKER_WINS, "imitation", "0"] == (over_two(0.5, 0.52), "2")
    assert means["log_share among 40", "base", "0"] == ("-5.500", "2")
    assert means["log_share among 40, 0 hints", "base", "0"] == ("-9.000", "2")
    assert means["rank 1 among 40", "released", "1"] == ("0.500", "2")
    assert means["PIQA", "released", "2"] == (over_two(60, 64, ".1f"), "2")


def test_differences_of_arms_are_paired_by_seed_and_those_declared_first_have_p_values_by_holm(seeds):
    primary = [["log_share among 40", "detached", "released"], ["points as attacker", "detached", "released"]]
    minus = [["points", "detached", "released"], ["points as attacker", "released", "base"]]
    minus += [["log_share among 40", "base", "detached"], ["log_share among 40", "detached", "base"]]
    minus += [["log_share among 40", "detached", "typo"]]
    shown = sections(table.table_text(seeds, primary, minus))
    declared = shown["Primary comparisons"]
    log_shares = declared["log_share among 40", "detached", "released"]
    assert (log_shares["epoch"], log_shares["difference"]) == ("2", over_two(1, 2, "+.3f"))
    assert log_shares["of each seed"] == "+1.000, +2.000"
    wins = declared["points as attacker", "detached", "released"]
    assert wins["difference"] == over_two(0.1, 0.02, "+.3f")
    assert (log_shares["p by Holm"], wins["p by Holm"]) == (
        "0.410",
        "0.410",
    )  # p is 0.205 and 0.374; twice the smaller is the larger
    further = shown["Further comparisons"]
    assert further["log_share among 40", "detached", "base"]["difference"] == over_two(4.5, 5.5, "+.3f")
    assert further["log_share among 40", "base", "detached"]["difference"] == over_two(-4.5, -5.5, "+.3f")
    points = further["points", "detached", "released"]
    assert (points["difference"], points["p"]) == ("+0.000", "-")
    assert further["log_share among 40", "detached", "typo"]["difference"] == "-"
    assert further["points as attacker", "released", "base"]["difference"] == "-"


def test_a_comparison_is_after_the_last_epoch_that_both_arms_have_in_all_their_seeds(seeds):
    del seeds[1]["arms"]["detached"]["epochs"]["2"]
    gaps = table.paired(table.to_frame(seeds), "points as attacker", "detached", "released")
    assert gaps.name == 1 and gaps.tolist() == pytest.approx([0.05, 0.06])
    del seeds[1]["arms"]["detached"]
    gaps = table.paired(table.to_frame(seeds), "points as attacker", "detached", "released")
    assert gaps.name == 2 and gaps.tolist() == pytest.approx([0.1])


def test_the_file_of_a_seed_has_settings_and_commit_and_tells_no_folder_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"rewards.decay_weight": "0.8", "model": f"x{tmp_path}/m", "epochs": 3}
    values |= {"match.words": [f"a={tmp_path}/seed3/a.txt", "b=seed3/b.txt"], "prompt_templates": f"{ROOT}/p.json"}
    make_loop(Path("seed3/arm"), 3, settings=values)
    table.collect(Path("seed3"), ["arm"])
    seed = read_json("seed3.json")
    values |= {"match.words": ["a={folder}/a.txt", "b={folder}/b.txt"], "prompt_templates": "p.json"}
    expected = values | {"seed": 3, "output": "{folder}/arm", "words": "{folder}/words.txt"}
    assert seed["seed"] == 3 and seed["arms"]["arm"]["settings"] == expected
    assert seed["arms"]["arm"]["made"] == {"spag": "abc123"}


def test_a_bar_in_a_name_stays_in_its_cell():
    assert markdown([["a|b", 1]]).splitlines()[0] == "| a\\|b | 1 |"


# The stored study.

STORED = ROOT / "data/results/mechanism"
DECLARED = study.read_study(str(ROOT / "configs/arms/mechanism.toml"), [])
ARMS_SHOWN = "What each arm does after three epochs"  # the table of RESULTS.md with a line for each measure
TOLD = {
    "README.md": (ROOT / "README.md").read_text().partition("## Does it work?")[2].partition("\n## ")[0],
    "data/RESULTS.md": (ROOT / "data/RESULTS.md").read_text(),
}
NUMBER = r"[+-]?\b\d+\.\d{3}\b"


@functools.cache
def stored_seeds() -> list[dict]:
    return sorted(map(read_json, STORED.glob("seed*.json")), key=lambda seed: seed["seed"])


@functools.cache
def stored_frame():
    return table.to_frame(stored_seeds())


def test_the_stored_table_is_made_from_the_stored_seeds():
    assert table.table_text(stored_seeds(), DECLARED.primary, DECLARED.minus) == (STORED / "table.md").read_text()


def test_each_cell_of_the_results_is_the_mean_of_its_measure_and_arm():
    lines = sections(TOLD["data/RESULTS.md"])[ARMS_SHOWN]
    for line in lines.values():
        measure, *cells = line.values()
        for arm, shown in zip(list(line)[1:], cells, strict=True):
            assert shown == cell(values_of(measure, arm.strip("`"), 0 if arm == "`imitation`" else 3))


def test_the_results_tell_the_declared_comparisons_as_the_stored_table_does():
    of_page = sections(TOLD["data/RESULTS.md"])["The four declared comparisons"]
    of_table = sections((STORED / "table.md").read_text())["Primary comparisons"]
    shown = [list(line.values())[1:4] for line in of_page.values()]
    assert shown == [[line[name] for name in ("difference", "equal", "p by Holm")] for line in of_table.values()]


@pytest.mark.parametrize("path", TOLD)
def test_every_mean_or_difference_with_an_interval_is_of_the_stored_seeds(path):
    text = " ".join(TOLD[path].split())
    assert set(re.findall(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]", text)) - figures_with_intervals() == set()


@functools.cache
def figures_with_intervals() -> frozenset[str]:
    """The means of matches, rows and trainings, and the differences of any two arms after the same epoch."""
    frame = stored_frame()
    frame = frame[frame.measure.str.startswith(("match: ", "rows: ", "training: "))]
    figures = {cell(values.tolist()) for _, values in frame.groupby(["measure", "arm", "epoch"]).value}
    for _, of_measure in frame.groupby("measure"):
        for arm, other in itertools.permutations(of_measure.arm.unique(), 2):
            values, others = (table.by_seed_and_epoch(of_measure, each) for each in (arm, other))
            gaps = values - table.in_epochs(others, values.columns)
            figures.update(cell(gaps[epoch].dropna().tolist(), "+") for epoch in gaps)
    return frozenset(figures)


def values_of(measure: str, arm: str, epoch: int) -> list[float]:
    frame = stored_frame()
    return frame[(frame.measure == measure) & (frame.arm == arm) & (frame.epoch == epoch)].value.tolist()


def cell(values: list[float], sign: str = "") -> str:
    """The mean of values over seeds with its interval; a dash without any."""
    if not values:
        return "-"
    mean, interval, _ = student(values)
    return with_interval(mean, interval, sign + table.form_of(mean))


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
    measured = {"imitation": {"measures": {"own measure": -3.0}, "counts": {}}}
    Path(loop, "measures.json").write_text(json.dumps(measured))
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
    monkeypatch.setattr(study, "loop_command", lambda argv: [sys.executable, str(script), *argv])
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("LOOPS", str(tmp_path / "loops"))
    for arm in ("released", "sft"):
        make_loop(tmp_path / "loops" / arm, 1)
    flags = ["--output_dir", f"{out}/", "--seeds", 0, 2, "--jobs", 2, "--settings", "epochs=1"]  # as a shell has it

    monkeypatch.setenv("FAIL", "seed2/sft")
    failed = call(study.main, arms, *flags, status=1).output
    assert f"seed 2 failed; log: {out}/seed2/sft.log" in failed and not (out / "table.md").exists()
    first = f"{ROOT}/configs/tiny.toml model={out}/seed2/base words=a b"
    first += f' match.words=["{out}/seed2/a.txt", "{out}/seed2/b c.txt"] match.seeds=["2"]'
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
    assert read_json(out / "seed2.json")["arms"]["imitation"]["epochs"]["0"]["own measure"] == -3.0
    assert "## Primary comparisons" in (out / "table.md").read_text()

    # An arm that is put between those that have ended takes nothing from the numbers of those behind it.
    make_loop(tmp_path / "loops" / "between", 1)
    Path(arms).write_text(Path(arms).read_text().replace("[arms.sft]", "[arms.between]\n\n[arms.sft]"))
    call(study.main, arms, *flags)
    assert list(read_json(out / "seed2.json")["arms"]) == ["imitation", "released", "between", "sft"]


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("1e-4", '"fast"', "[arms.sft]: [training]: argument --learning_rate"),
        ("[arms.sft]", "[arms.imitation]", "[arms.imitation]: the name of a model"),
        ("training.learning_rate", "training.learning_rat", "[arms.sft]: training.learning_rat: no flag of train.py"),
        ('control = "sft"', 'like = "sft"', "[arms.sft]: like is 'sft'"),
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
        assert "{" not in str([*loop.given.values()]) and loop.of("training").lm_kl_coeff == 0.5


def test_the_file_of_arms_in_the_readme_is_one(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", (ROOT / "tools/lab/README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "arms.toml").write_text(shown)
    assert list(study.read_study(str(tmp_path / "arms.toml"), []).arms) == ["released", "sft", "detached"]


def test_the_study_of_a_real_model_compares_measures_that_its_loops_leave():
    ours = study.read_study(str(ROOT / "configs/arms/qwen15.toml"), [])
    of_arm = study.settings_of(ours, "detached", [])
    flags = evaluate_belief.Flags(**vars(of_arm.of("belief")) | {"models": [], "output_dir": "unused"})
    game = flags.load_game()
    _, _, among = evaluate_belief.read_games(flags, game)
    names = {"points", *table.belief_numbers({"candidates": among, "hints": "last", "log_share": 0, "rank_1": 0})}
    assert of_arm.of("match").words and {measure for measure, *_ in ours.primary + ours.minus} <= names
    assert ours.primary == [["points", "detached", "silent"], ["rank 1 among 200", "detached", "silent"]]


def test_an_arm_may_begin_like_another_than_the_first_one():
    ours = study.read_study(str(ROOT / "configs/arms/qwen15.toml"), [])
    likes = {"gate": None, "detached": "gate", "silent": "detached", "cloning": "gate", "sft": "detached"}
    assert {arm: study.like_of(ours, arm) for arm in ours.arms} == likes
    assert "like=x/detached" in study.loop_argv(ours, "silent", 0, Path("x"), [])


@pytest.mark.parametrize("right, breaches, opens", [(30, 10, True), (29, 10, False), (30, 11, False)])
def test_the_gate_of_a_study_stops_a_seed_whose_model_cannot_play(tmp_path, right, breaches, opens):
    outcomes = {"defender wins": right, "attacker breaks the rules": breaches}
    for arm in ("gate", "silent"):
        summary = tmp_path / arm / "epoch1/episodes/imitation_sampling_words_summary.json"
        write_json(summary, {"games": 100, "outcomes": outcomes})
    preparations.gate(str(tmp_path / "silent"))
    with contextlib.nullcontext() if opens else pytest.raises(UserError, match="does not play well enough"):
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


def test_the_sft_rows_of_the_english_study_are_drawn_from_its_rows_of_imitation(tmp_path, programs):
    ours = study.read_study(str(ROOT / "configs/arms/english.toml"), [])
    settings = study.settings_of(ours, next(iter(ours.arms)), [], 5, tmp_path).given
    preparations.english(str(tmp_path), 5, settings)
    assert "--rows outputs/english/data/imitation.json --number 300 --seed 5" in programs[-1]


def start_study(folder: Path, script: str, *seeds: int) -> Fork:
    """Start a study of one arm, with a shell script as its loop."""
    code = "from tools.lab import study as run; from tools.common.programs import run_program\n"
    code += f"run.loop_command = lambda argv: ['sh', '-c', {script!r}]\nrun_program(run.main)"
    (folder / "program.py").write_text(code)
    (folder / "arms.toml").write_text("[arms.one]\nmodel = 'm'\nwords = 'w'\n")
    flags = {"output_dir": folder / "out", "seeds": seeds}
    return Fork([folder / "program.py", folder / "arms.toml", *flags_of(flags)])


def test_a_signal_to_the_study_ends_its_programs(tmp_path):
    process = start_study(tmp_path, "sleep 60; true", 1)
    assert wait_for(lambda: bool(descendants(process.pid, "sleep")), process)
    programs = descendants(process.pid, "sleep")
    process.send_signal(signal.SIGTERM)
    finish(process, status=143)
    assert not any(program.is_running() and program.name() == "sh" for program in programs)


@pytest.mark.parametrize("end", ["kill -TERM $$", "kill -INT $$", "exit 130", "exit 143"])
def test_after_a_program_that_a_signal_ended_no_further_seed_begins_and_none_is_said_to_have_failed(tmp_path, end):
    printed = finish(start_study(tmp_path, end, 1, 2, 3), status=1)
    assert "seed 1: one" in printed and "seed 2" not in printed and "failed" not in printed
    assert "the same command continues" in printed
