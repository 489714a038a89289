"""The study of the embedded world: rows of its arms, the loops that are run, and the tables."""

import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest
from helpers import ENVIRONMENT, ROOT, call, descendants, flags_of

from tools import tiny_world
from tools.assign_rewards import assign_rewards
from tools.games import load_game, taboo
from tools.games.taboo import Taboo
from tools.matches.stats import count_matches, result_rows
from tools.tiny import controls, questions
from tools.tiny import reproduce as tiny_reproduce
from tools.tiny.arms import ARMS
from tools.tiny.build import TABOO, scripted_games
from tools.tiny.players import load_lexicon
from tools.tiny.results import seed_results
from tools.tiny.table import difference_lines, over_seeds, questions_refusal
from utils import UserError, read_json_or_jsonl, write_json, write_records

SFT = [{"query": "q", "target": "t", "type": "sft", "weight": 1.0}] * 3


@pytest.fixture(scope="module")
def games():
    return scripted_games(TABOO, load_lexicon(), rounds=2, rng=random.Random(0))


@pytest.fixture(scope="module")
def rows(games):
    """The rows of self-play learning."""
    return assign_rewards(games, rng=random.Random(0))


# --- rows ----------------------------------------------------------------------------------------------------------


def test_practice_holds_no_held_out_word():
    held_out = set(load_lexicon().held_out())
    made = controls.practice_rows()
    assert len(made) > 2000 and not any(held_out & set((row["query"] + row["target"]).split()) for row in made)


@pytest.mark.parametrize("control", controls.CONTROLS)
def test_rows_of_the_arms_that_depend_on_another_run(control, games, rows, tmp_path):
    write_records(tmp_path / "games.json", games)
    write_records(tmp_path / "facts.json", SFT)
    other = [row | {"reward": 0.5} for row in rows[:6]] + [SFT[0] | {"target": f"t{number}"} for number in range(4)]
    write_records(tmp_path / "like/epoch2/rows/rows.json", other)
    output = tmp_path / control / "epoch2/rows/rows.json"
    flags = {"control": control, "input_data_path": tmp_path / "games.json", "output_data_path": output}
    flags |= {"sft_data_path": tmp_path / "facts.json", "game": "taboo", "prompt_templates": TABOO.prompts, "seed": 3}
    flags |= {"training_prompt": "play", "decay_weight": 0.8, "min_game_rows": 4, "like": tmp_path / "like"}
    call(controls.main, *flags_of(flags))
    made = read_json_or_jsonl(output)
    sft = [row for row in made if row.get("type") == "sft"]
    if control == controls.AS_MANY:
        assert len(made) == 6 + 3 and [row["target"] for row in made[6:]] == ["t"] * 3
    if control == controls.SILENT:
        assert [row["weight"] for row in made] == [0.0] * 6 + [1.0] * 4 and made[6:] == sft == other[6:]
    if control == controls.FORMS:
        assert sft == made and made[6:] == other[6:] and all(row in controls.practice_rows() for row in made[:6])
    before = output.read_bytes()
    call(controls.main, *flags_of(flags))
    assert output.read_bytes() == before


# --- the loops -----------------------------------------------------------------------------------------------------


class Programs:
    """Stands in for the programs: notes what is asked for and leaves the files that each would leave."""

    def __init__(self):
        self.calls, self.fails_at, self.guessed = [], None, {}

    def __call__(self, world, log: Path, command: list[str]):
        name, flags = f"seed{world.seed}/{log.stem}", given(command)
        self.calls.append((name, flags))
        if name == self.fails_at:
            raise UserError(f"{log}: ended with exit status 1")
        if "build" in command:
            return
        if "players" in flags:
            one, other = (player.partition("=")[0] for player in command[command.index("--players") + 1 :][:2])
            results = results_of(match(one, world.seed, other))
            return write_json(world.folder / flags["output_dir"] / "matches.json", results)
        names = ("MAX_TURNS", "MAX_LENGTH", "MAX_NEW_TOKENS", "TEMPERATURE", "TOP_K", "EVAL_GAMES_PER_WORD")
        write_json(world.folder / flags["output"] / "settings.json", dict.fromkeys(names, "5"))
        for epoch in range(1, int(flags["epochs"]) + 1):
            played = load_game(flags.get("game", "taboo"))
            outcomes = dict.fromkeys((outcome.name for outcome in played.outcomes), 1)
            if played.name == "taboo":
                outcomes[taboo.DEFENDER_WINS] = self.guessed.get(world.seed, 1)
            counts = {"games": 4, "outcomes": outcomes, "empty_replies": 1, "messages": 10, "mean_length": 2.5}
            folder = world.folder / flags["output"] / f"epoch{epoch}"
            if epoch > 1 or not flags["like"]:
                about = dict.fromkeys(played.roles, 0.75)
                write_json(folder / "episodes/imitation_sampling_words_summary.json", counts | {"about": about})
            if flags["until"] == f"epoch{epoch}_play":
                break
            if flags["eval_words"] and epoch % int(flags["eval_every"]) == 0:
                games = match(f"epoch{epoch}", world.seed)
                write_records(folder / "eval/games_results.json", games)
                write_json(folder / "eval/matches.json", results_of(games))


def given(command) -> dict[str, str]:
    """The flags of a command with their first values."""
    words = list(map(str, command))
    return {flag[2:]: value for flag, value in zip(words, words[1:], strict=False) if re.fullmatch(r"--\w+", flag)}


def match(player: str, seed: int, other: str = "imitation") -> list[dict]:
    """The player wins as attacker and, with an even seed, ties as defender, else loses."""
    outcome = taboo.TIED if seed % 2 == 0 else taboo.ATTACKER_WINS
    return [
        {"attacker": attacker, "defender": defender, "words": words, "seed": seed, "target_word": word}
        | {"history": [{"role": "attacker", "content": "Hm."}], "outcome": outcome, "length": 1}
        | {"max_turns": 3}
        for attacker, defender, outcome in ((player, other, taboo.ATTACKER_WINS), (other, player, outcome))
        for words, word in (("played", "cat"), ("held_out", "cow"))
    ]


def results_of(games: list[dict]) -> dict:
    """What matches.json holds."""
    return {"results": list(result_rows(count_matches(games, Taboo())))}


@pytest.fixture
def programs(monkeypatch):
    """Half of the questions are answered right by every model; base answers one more, forms all of them."""
    programs, number = Programs(), len(questions.make_questions())
    answers = {"base": [1, *(place % 2 for place in range(1, number))], "forms": [1] * number}
    half = [place % 2 for place in range(number)]
    monkeypatch.setattr(tiny_reproduce.World, "program", lambda world, *args: programs(world, *args))
    monkeypatch.setattr(tiny_reproduce, "ask", lambda models, path: {name: answers.get(name, half) for name in models})
    return programs


def reproduce(folder: Path, status: int = 0, **flags):
    defaults = {"output_dir": folder, "seeds": [3, 4], "epochs": 2, "workers": 2}
    return call(tiny_world.main, "reproduce", *flags_of(defaults | flags), status=status)


def tables_of(folder: Path) -> list[list[list[str]]]:
    """The cells of each table, without the line under its head."""
    text = (folder / "table.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n")]
    tables = [list(part) for key, part in groupby(lines, key=bool) if key]
    return [[table[0], *table[2:]] for table in tables]


def titles(*names: str) -> list[str]:
    return [ARMS[name].title for name in names]


def test_the_study_runs_its_arms_on_all_seeds_and_shows_them(programs, tmp_path):
    printed = reproduce(tmp_path, reasoning_seeds=[7]).output
    text = (tmp_path / "table.md").read_text()
    assert text in printed
    of_seed = {seed: {name for name, _ in programs.calls if name.startswith(f"seed{seed}/")} for seed in (3, 4, 7)}
    study = {name for name, arm in ARMS.items() if arm.game == "taboo"} | {"world", "losers_against_released"}
    assert of_seed[3] == {f"seed3/{name}" for name in study}
    assert of_seed[7] == {f"seed7/{name}" for name in ("world", "released", "losers", "sft", "silent", "forms")}
    points, differences, meeting, self_play, asked, gains, games = tables_of(tmp_path)
    shown = [line[:2] for line in points[1:]]
    assert [*titles("losers_released"), "2"] in shown and [*titles("sft"), "2"] in shown
    assert not {line[0] for line in shown} & set(titles("silent", "forms"))
    # 1/2 point as defender in seed 4 and 0 in seed 3: 0.75 and 0.5 points, standard error 0.125, t(1) = 12.706.
    assert (points[1][2], points[1][-1]) == ("0.625 [-0.963, 2.213]", "0.500, 0.750")
    assert points[1][3] == "1.000 [1.000, 1.000]" and points[1][8:10] == ["0.000", "0.250"]
    assert titles("losers", "cloning_all") in [line[:2] for line in differences[1:]]
    assert {line[2] for line in differences[1:]} == {"+0.000 [+0.000, +0.000]"}
    assert meeting[1] == [*titles("losers", "released"), "0.625 [-0.963, 2.213]", "0.500, 0.750"]
    assert self_play[1] == [*titles("released"), "imitation", *["0.250"] * 4, "0.100", "0.750", "0.750", "2.500"]
    assert [line[0] for line in asked[1:3]] == ["base", "imitation"] and len(asked) == 3 + 12
    assert gains[1][2:5] == ["+0.000 [+0.000, +0.000]"] * 3 and gains[4][2] == "+0.500 [+0.500, +0.500]"
    assert text.count("misses the gate") == 0
    assert games[1][0] == ARMS["released"].title and "it is the attacker: Hm. (attacker wins)" in games[1][1]


def test_all_arms_start_from_the_imitation_model_and_its_games_and_differ_in_their_own_settings(programs, tmp_path):
    reproduce(tmp_path)
    names = [name for name, _ in programs.calls]
    assert Counter(names) == {name: 1 + name.endswith("world") for name in names}  # its loop comes after its build
    loops = {name: flags for name, flags in programs.calls if "output" in flags}
    first = loops["seed3/world"]
    assert (first["model"], first["imitation_data"], first["until"]) == ("base", "data/imitation.json", "epoch1_play")
    assert first["like"] == ""
    released = loops["seed3/released"]
    assert released == first | {"until": "epoch3_play"}
    shared = {"settings", "words", "sft_data", "seed", "eval_seeds", "save_steps", "report", "play_args", "eval_args"}
    for name, arm in ARMS.items():
        if arm.game == "taboo" and name != "released":
            settings = loops[f"seed3/{name}"]
            assert settings["like"] == "released"
            assert not {"model", "imitation_data", "first_episodes"} & settings.keys()
            assert settings["output"] == name and {settings[key] == released[key] for key in shared} == {True}
            assert settings["eval_words"] == (released["eval_words"] if arm.matches else "")
            own = {key: value for key, value in settings.items() if key not in released}
            assert own == {key: str(value) for key, value in arm.settings.items()}


def test_every_setting_of_an_arm_is_one_of_the_loop(programs, tmp_path):
    reproduce(tmp_path, arms=list(ARMS), games=["taboo", "twenty_questions", "guess_my_city"])
    usage = subprocess.run(["bash", ROOT / "tools/run_spag.sh", "--help"], capture_output=True, text=True, check=True)
    used = {name.upper() for _, flags in programs.calls if "output" in flags for name in flags}
    assert used <= set(re.findall(r"\b[A-Z_]+\b", usage.stdout))


def test_partners_play_their_own_game_for_as_many_steps_and_meet_imitation_at_taboo(programs, tmp_path):
    reproduce(tmp_path, arms=["cities"], games=["taboo", "guess_my_city"])
    loops = dict(programs.calls)
    settings = loops["seed4/cities"]
    assert (settings["game"], settings["words"]) == ("guess_my_city", "data/words_guess_my_city.txt")
    assert settings["model"] == "released/imitation/model" and settings["like"] == ""
    assert settings["eval_words"] == loops["seed4/released"]["eval_words"]
    assert settings["rewards"] == "-m tools.tiny.controls --control as_many --like released"
    flags = settings["eval_args"].split()
    assert tables_of(tmp_path)[3][1] == [*titles("cities"), "imitation", "0.250", "2.500"]
    assert flags[-2:] == ["--max_turns", "3"] and flags[flags.index("--game") + 1] == "taboo"
    prompt_file = tmp_path / "seed4" / flags[flags.index("--prompt_templates") + 1]
    assert prompt_file.samefile(ROOT / "data" / "tiny" / "prompts.json")


def test_what_is_finished_is_not_run_again_and_a_failure_ends_the_study(programs, tmp_path):
    programs.fails_at = "seed3/released"
    assert "exit status 1" in reproduce(tmp_path, status=2).errors
    before = {name for name, _ in programs.calls}
    assert not (tmp_path / "table.md").exists()
    programs.calls, programs.fails_at = [], None
    reproduce(tmp_path)
    assert {name for name, _ in programs.calls} & before == {"seed3/released"}
    programs.calls = []
    reproduce(tmp_path, seeds=[3, 4, 5])
    assert {name.partition("/")[0] for name, _ in programs.calls} == {"seed5"}


def test_a_seed_whose_imitation_model_never_guesses_is_left_out_and_reported(programs, tmp_path):
    programs.guessed = {3: 0}
    assert "Seed 3 is left out" in reproduce(tmp_path).output
    assert {name for name, _ in programs.calls if name.startswith("seed3")} == {"seed3/world"}
    assert tables_of(tmp_path)[0][1][-1] == "0.750"  # seed 4 alone
    results = [tmp_path / f"seed{seed}/results.json" for seed in (3, 4)]
    assert (
        call(tiny_world.main, "tables", "--results", *results).output.strip()
        == (tmp_path / "table.md").read_text().strip()
    )


def test_other_settings_and_unknown_arms_are_refused(programs, tmp_path):
    reproduce(tmp_path)
    refused = reproduce(tmp_path, status=2, epochs=3).errors
    assert "settings.json" in refused and "epochs: 2 then, 3 now" in refused
    assert "--arms cities" in reproduce(tmp_path / "new", status=2, arms=["cities"]).errors
    assert not (tmp_path / "new").exists()


def test_programs_get_none_of_the_loops_settings_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("EPOCHS", "7")
    world = tiny_reproduce.World(tmp_path, 0, None)
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    world.program(tmp_path / "log", [sys.executable, "-c", code])
    environment = json.loads((tmp_path / "log").read_text())
    assert "EPOCHS" not in environment and environment["OMP_NUM_THREADS"] == "1" and "PATH" in environment
    with pytest.raises(UserError, match="exit status 3"):
        world.program(tmp_path / "log", [sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.skipif(sys.platform != "linux", reason="a process is told of its parent's death on Linux only")
def test_programs_end_with_the_study_that_started_them(tmp_path):
    start = "import sys; from pathlib import Path; from tools.tiny.reproduce import World; "
    start += "World(Path(sys.argv[1]), 0, None).program(Path(sys.argv[1]) / 'log', ['sleep', '1000.25'])"
    process = subprocess.Popen([sys.executable, "-c", start, tmp_path], cwd=ROOT, env=ENVIRONMENT)
    while not (asleep := descendants(process.pid, "1000.25")):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    asleep[0].wait(timeout=10)


def test_a_seed_whose_questions_cannot_show_a_gain_is_named_with_its_numbers(tmp_path):
    def refusal(**right) -> str | None:
        return questions_refusal(seed_results(tmp_path, 5, [], right))

    number = len(questions.make_questions())
    first = dict.fromkeys(("base", "imitation", "silent"), [1] * (number // 2) + [0] * (number - number // 2))
    forgot = refusal(**first | {"imitation": [0] * number, "forms": [1] * number})
    assert forgot.startswith("Seed 5 ") and "imitation 0.000" in forgot
    half = dict.fromkeys(first, [place % 2 for place in range(number)])
    assert "+0.000 [+0.000, +0.000]" in refusal(**half, forms=half["silent"])
    assert refusal(**half, forms=[1] * number) is None


# --- differences ---------------------------------------------------------------------------------------------------


def test_intervals_are_students_over_seeds_and_differences_are_paired_by_seed():
    assert over_seeds([0.5]) == "0.500"
    # Mean 0.6, standard deviation 0.1, standard error 0.1 / sqrt(3), t(2) = 4.303.
    assert over_seeds([0.5, 0.6, 0.7]) == "0.600 [0.352, 0.848]"
    last = {"losers": (0.75, 0.75), "released": (0.75, 1.0)}
    results = [
        {"points": {arm: {"2": {"points": 0.0}, "10": {"points": points[seed]}} for arm, points in last.items()}}
        for seed in (0, 1)
    ]
    _, line = difference_lines(results)
    assert line == [*titles("losers", "released"), "-0.125 [-1.713, +1.463]", "+0.000, -0.250"]
