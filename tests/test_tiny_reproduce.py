"""The learning table of the embedded world: rows of the controls, the loops that are run, and the table."""

import json
import math
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from itertools import groupby, product
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from forks import python

from tools.games import load_game, prompts, taboo
from tools.games.taboo import Taboo
from tools.matches.stats import count_matches
from tools.selfplay.rewards import Games, in_memory, paid_rows
from tools.tiny import controls
from tools.tiny import reproduce as tiny_reproduce
from tools.tiny import table as tiny_table
from tools.tiny.build import TABOO, scripted_games
from tools.tiny.players import load_lexicon
from tools.tiny.questions import KINDS, METRIC, TASK, TASKS, tasks_digest
from utils import read_json_or_jsonl, write_json, write_records

SFT = [{"query": "q", "target": "t", "type": "sft", "weight": 1.0}] * 3


@pytest.fixture(scope="module")
def games():
    return scripted_games(TABOO, load_lexicon(), rounds=2, rng=random.Random(0))


def rows_of(game: Taboo, games: list[dict]) -> list[dict]:
    templates = prompts.load_templates(TABOO.prompts, game)
    prompt_fn = partial(prompts.play_prompt, game, templates=templates)
    return list(paid_rows(Games(game, in_memory(games)), decay_weight=0.8, prompt_fn=prompt_fn))


@pytest.fixture(scope="module")
def rows(games):
    """The rows of self-play learning."""
    return rows_of(Taboo(), games)


# --- controls ------------------------------------------------------------------------------------------------------


def test_a_coin_gives_about_half_of_the_decided_games_to_the_loser(games, rows):
    drawn = rows_of(controls.Coin(), games)
    assert drawn == rows_of(controls.Coin(), games)
    won = {(row["query"], row["target"], row["role"]) for row in rows}
    lost = [row for row in drawn if (row["query"], row["target"], row["role"]) not in won]
    assert 0.35 < len(lost) / len(drawn) < 0.65
    guesses = [row["target"].startswith("I know the word!") for row in lost]
    assert any(guesses)  # wrong ones of a defender whom the coin made the winner
    decided = sum(game["outcome"] in (taboo.ATTACKER_WINS, taboo.DEFENDER_WINS) for game in games)
    assert sum(row["reward"] for row in drawn) == pytest.approx(decided)
    by_role = [sum(row["reward"] * row["weight"] for row in drawn if row["role"] == role) for role in Taboo.roles]
    assert by_role == pytest.approx([decided / 2] * 2)


def test_shuffled_rewards_are_those_of_the_same_game_in_another_order(games, rows):
    shuffled = list(controls.shuffled_rows(rows, random.Random(0)))
    without = [{key: row[key] for key in row if key != "reward"} for row in rows]
    assert [{key: row[key] for key in row if key != "reward"} for row in shuffled] == without
    start = 0
    for game in games:
        if game["outcome"] in (taboo.ATTACKER_WINS, taboo.DEFENDER_WINS):
            winner = Taboo().outcome(game["outcome"]).winner
            end = start + sum(message["role"] == winner for message in game["history"][: game["length"]])
            dealt, own = (Counter(row["reward"] for row in each[start:end]) for each in (shuffled, rows))
            assert dealt == own
            start = end
    assert start == len(rows)
    assert sum(one["reward"] != other["reward"] for one, other in zip(shuffled, rows, strict=True)) > 0.2 * len(rows)


def test_cloning_weighs_each_kind_of_row_as_self_play_learning_does(rows):
    cloned = list(controls.cloning_rows(rows, SFT))
    assert {row["type"] for row in cloned} == {"sft"} and len(cloned) == len(rows) + 3
    # With l = -1 in every row: OfflinePO at ratio 1 and KL 0 has mean(reward * weight) + 0.5 * mean over SFT rows.
    expected = sum(row["reward"] * row["weight"] for row in rows) / len(rows) + 0.5 * 1.0
    assert 0.5 * sum(row["weight"] for row in cloned) / len(cloned) == pytest.approx(expected)
    assert [row["target"] for row in cloned[:-3]] == [row["target"] for row in rows]


@pytest.mark.parametrize("control", controls.CONTROLS)
def test_the_program_takes_the_flags_of_assign_rewards(control, games, rows, tmp_path, monkeypatch):
    write_records(tmp_path / "games.json", games)
    write_records(tmp_path / "facts.json", SFT)
    counts = {"attacker": 4, "defender": 2, "sft": 1, "empty": 5}
    write_json(tmp_path / "like/epoch2/rows/rows_rewards_settings.json", {"rows": counts})
    output = tmp_path / control / "epoch2/rows/rows.json"
    flags = {"control": control, "input_data_path": tmp_path / "games.json", "output_data_path": output}
    flags |= {"sft_data_path": tmp_path / "facts.json", "game": "taboo", "prompt_templates": TABOO.prompts, "seed": 3}
    flags |= {"training_prompt": "play", "decay_weight": 0.8, "like": tmp_path / "like"}
    if control == controls.SFT:  # the loop asks for a batch of rows; its single game may have none
        write_records(tmp_path / "games.json", [game for game in games if game["outcome"] == taboo.TIED][:1])
    words = [str(word) for name in flags for word in (f"--{name}", flags[name])] + ["--min_game_rows", "4"]
    monkeypatch.setattr("sys.argv", ["controls", *words])
    controls.main()
    made = read_json_or_jsonl(output)
    if control == controls.SFT:
        assert len(made) == 7 and {row["type"] for row in made} == {"sft"}
    else:
        assert [row["target"] for row in made[-3:]] == ["t"] * 3
        assert made[0]["query"] == rows[0]["query"] or control in (controls.COIN, controls.AS_MANY)
    if control == controls.AS_MANY:
        assert len(made) == 6 + 3
    before = output.read_bytes()
    controls.main()
    assert output.read_bytes() == before
    monkeypatch.setattr("sys.argv", ["controls", *words, "--seed", "4"])
    with pytest.raises(ValueError, match="seed: 3 then, 4 now"):
        controls.main()


# --- the loops -----------------------------------------------------------------------------------------------------


class Programs:
    """Stands in for the programs: notes what is asked for and leaves the files that each would leave."""

    def __init__(self, games):
        self.games, self.calls, self.fails_at, self.guessed = games, [], None, 1

    def __call__(self, world, log: Path, command: list[str]):
        flags = flags_of(command)
        self.calls.append((f"seed{world.seed}/{log.stem}", flags))
        if self.fails_at and self.fails_at in (f"seed{world.seed}/{log.stem}", f"seed{world.seed}/{log.stem} build"):
            raise RuntimeError(f"{log}: ended with exit status 1")
        if "build" in command:
            return
        if log.stem == "reasoning":
            return answer(world.folder / "reasoning", command)
        output, epochs = world.folder / flags["output"], int(flags["epochs"])
        for epoch in range(1, epochs + 1):
            played = load_game(flags.get("game", "taboo")).outcomes
            outcomes = dict.fromkeys((outcome.name for outcome in played), 1)
            if played == Taboo.outcomes:
                outcomes |= {taboo.DEFENDER_WINS: self.guessed}
            counts = {"games": 4, "outcomes": outcomes, "empty_replies": 1, "messages": 10, "mean_length": 2.5}
            if epoch > 1 or not flags["first_episodes"]:
                write_json(output / f"epoch{epoch}/episodes/imitation_sampling_words_summary.json", counts)
            if flags["until"] == f"epoch{epoch}_play":
                break
            if flags["eval_words"] and epoch % int(flags["eval_every"]) == 0:
                write_records(output / f"epoch{epoch}/eval/games_results.json", match(f"epoch{epoch}", world.seed))


def answer(folder: Path, command: list[str]) -> None:
    """Every model knows half of the answers."""
    start, end = command.index("--models") + 1, command.index("--output_dir")
    for name in (model.partition("=")[0] for model in command[start:end]):
        for kind in KINDS:
            number = len(read_json_or_jsonl(TASKS / f"{kind}.jsonl"))
            path = folder / name / f"{TASK.format(kind)}.json"
            scores = {METRIC: [float(place % 2) for place in range(number)]}
            write_json(path, {"scores": scores, "settings": {"own_tasks": tasks_digest()}})
    (folder / "results.json").touch()


def flags_of(command) -> dict[str, str]:
    """The flags of a command with their first values."""
    pairs = zip(command, command[1:], strict=False)
    return {flag.removeprefix("--"): value for flag, value in pairs if re.fullmatch(r"--\w+", flag)}


def match(player: str, seed: int) -> list[dict]:
    """The player wins as attacker and ties as defender."""
    return [
        {"attacker": attacker, "defender": defender, "words": words, "seed": seed, "target_word": word}
        | {"history": [{"role": "attacker", "content": "Hm."}], "outcome": outcome, "length": 1}
        | {"max_turns": 3, "replies": [{"finish_reason": "stop", "tokens": 1, "prompt_cut": False}]}
        for attacker, defender, outcome in (
            (player, "imitation", taboo.ATTACKER_WINS),
            ("imitation", player, taboo.TIED),
        )
        for words, word in (("played", "cat"), ("held_out", "cow"))
    ]


@pytest.fixture
def programs(games, monkeypatch):
    programs = Programs(games[:40])
    monkeypatch.setattr(
        tiny_reproduce.World, "program", lambda world, log, command: programs(world, log, list(map(str, command)))
    )
    return programs


def reproduce(folder: Path, workers: int = 2, epochs: int = 2) -> None:
    tiny_reproduce.Reproduce(output_dir=str(folder), seeds=2, epochs=epochs, workers=workers).run()


def test_all_arms_of_all_seeds_run_and_come_into_the_table(programs, tmp_path, capsys):
    reproduce(tmp_path)
    table = (tmp_path / "table.md").read_text()
    printed = capsys.readouterr().out
    assert table in printed
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    titles = {name: arm.title for name, arm in tiny_reproduce.ARMS.items()}
    points, differences, self_play, own, reasoning = (list(part) for key, part in groupby(lines, key=bool) if key)
    assert [line[:2] for line in points[3:]] == [
        [titles[name], epoch] for name in ("released", "detached") for epoch in "12"
    ] + [[titles[name], "2"] for name in ("cloning", "shuffled", "coin", "sft", "questions", "cities")]
    assert points[2] == ["imitation against itself", "-", "0.500", "", "0.375", "0.625", "", "", "", "0.250", "0.250"]
    whole, by_seed, attacker, defender = points[3][2:6]
    assert whole.startswith("0.750 [") and by_seed == "0.750, 0.750"
    assert attacker.startswith("1.000 [") and defender.startswith("0.500 [")
    assert [line[:2] for line in differences[2:]] == [
        [titles[name], titles[control]] for name in ("released", "detached") for control in ("coin", "sft")
    ] + [[titles["released"], titles[name]] for name in ("questions", "cities")]
    assert {line[2] for line in differences[2:]} == {"+0.000 [+0.000, +0.000]"}
    expected = ["0.250"] * 4 + ["0.100", "2.50"]
    assert self_play[-1][:2] == [titles["detached"], "epoch 2"] and self_play[-1][2:] == expected
    assert own[2] == [titles["questions"], "imitation", "0.250", "2.50"]
    assert [line[:2] for line in own[5:]] == [
        [titles["cities"], model] for model in ("imitation", "epoch 1", "epoch 2")
    ]
    names = [line[0] for line in reasoning[2:]]
    assert names[:4] == ["chance", "scripted player", "base", "imitation"]
    assert names[4:] == [f"{title}, epoch {epoch}" for title in titles.values() for epoch in (1, 2)]
    assert reasoning[4][1].startswith("0.500 [") and reasoning[6][-2:] == ["+0.000 [+0.000, +0.000]"] * 2
    assert {row["seed"] for row in json.loads((tmp_path / "table.json").read_text())["results"]} == {None, 0, 1}
    assert "They took 0 minutes in all" in printed


@pytest.fixture
def loops(programs, tmp_path) -> dict[str, dict[str, str]]:
    """The settings of every loop of a whole run, by its name; the first games' loop is part of its world."""
    reproduce(tmp_path)
    names = [name for name, _ in programs.calls]
    assert Counter(names) == {name: 1 + name.endswith("world") for name in names}  # its loop comes after its build
    return {name: flags for name, flags in programs.calls if "output" in flags}


def test_every_setting_is_one_of_the_loop(loops):
    script = (ROOT / "tools" / "run_spag.sh").read_text()
    known = {name.lower() for name in re.findall(r'^: "\$\{([A-Z_]+):=', script, flags=re.MULTILINE)}
    assert all(settings.keys() <= known for settings in loops.values())


def test_arms_differ_in_their_rows_and_losses_only(loops):
    shared = {"settings", "words", "sft_data", "eval_words", "eval_seeds", "seed", "save_steps", "report"}
    for name, arm in tiny_reproduce.ARMS.items():
        if arm.game != "taboo":
            continue
        settings, released = loops[f"seed1/{name}"], loops["seed1/released"]
        assert {key: settings[key] for key in shared} == {key: released[key] for key in shared}
        own = {key: value for key, value in settings.items() if key not in released}
        assert own == {key: str(value) for key, value in arm.settings.items()}
        assert settings["output"] == name
    assert loops["seed1/detached"]["detach_kl"] == "True" and loops["seed1/detached"]["seed"] == "100"
    assert loops["seed0/coin"]["rewards"] == "-m tools.tiny.controls --control coin"


def test_all_arms_start_from_the_imitation_model_and_its_games(loops):
    first = loops["seed0/world"]
    rows = "data/imitation.json data/imitation_twenty_questions.json data/imitation_guess_my_city.json"
    assert (first["model"], first["imitation_data"], first["until"]) == ("base", rows, "epoch1_play")
    assert loops["seed0/released"] == first | {"until": "epoch3_play"}
    for name in tiny_reproduce.ARMS.keys() - {"released"}:
        settings = loops[f"seed0/{name}"]
        assert settings["model"] == "released/imitation/model" and "imitation_data" not in settings
        arm = tiny_reproduce.ARMS[name]
        assert settings["epochs"] == ("3" if arm.plays_on else "2")
        assert settings["eval_every"] == ("1" if arm.every_epoch else "2")
        if arm.game == "taboo":
            assert settings["first_episodes"] == "released/epoch1/episodes/imitation_sampling_words_results.json"
    assert loops["seed0/sft"]["games"] == loops["seed0/sft"]["games_per_word"] == "1"


def test_partners_play_their_own_game_for_as_many_steps_and_meet_imitation_at_taboo(loops, tmp_path):
    settings, released = loops["seed1/cities"], loops["seed1/released"]
    assert (settings["game"], settings["words"]) == ("guess_my_city", "data/words_guess_my_city.txt")
    assert settings["first_episodes"] == "" and settings["eval_words"] == released["eval_words"]
    assert settings["rewards"] == "-m tools.tiny.controls --control as_many --like released"
    flags = settings["eval_args"].removeprefix(released["eval_args"]).split()
    assert flags[:3] == ["--game", "taboo", "--prompt_templates"] and flags[4:] == ["--max_turns", "3"]
    assert (tmp_path / "seed1" / flags[3]).samefile(ROOT / "data" / "tiny" / "prompts.json")
    tiny = (ROOT / "configs" / "tiny.sh").read_text()
    assert ': "${MAX_TURNS:=3}"' in tiny and ': "${PROMPTS:=$root/data/tiny/prompts.json}"' in tiny


def test_the_larger_world_compares_losses_prompts_and_references(programs, tmp_path, capsys):
    tiny_reproduce.CompareLosses(output_dir=str(tmp_path), seeds=1, epochs=2, workers=1).run()
    build, first = [flags for name, flags in programs.calls if name == "seed0/world"]
    assert build["lexicon"].endswith("data/tiny/lexicon_large.txt") and build["games"] == "taboo"
    assert first["imitation_data"] == "data/imitation.json" and first["global_batch"] == "32"
    loops = dict(programs.calls)
    assert loops["seed0/drawn"]["reward_args"] == "--training_prompt random"
    assert loops["seed0/stale"]["train_args"] == "--ref_model_name_or_path released/imitation/model"
    assert "seed0/reasoning" not in loops
    assert "reference: the imitation model" in (tmp_path / "table.md").read_text()


def test_what_is_finished_is_not_run_again(programs, tmp_path):
    programs.fails_at = "seed0/released"
    with pytest.raises(RuntimeError, match="exit status 1"):
        reproduce(tmp_path)
    before = {name for name, _ in programs.calls}
    assert not (tmp_path / "table.md").exists()
    programs.calls, programs.fails_at = [], None
    reproduce(tmp_path)
    assert {name for name, _ in programs.calls} & before == {"seed0/released"}
    programs.calls = []
    reproduce(tmp_path)
    assert programs.calls == []
    shutil.rmtree(tmp_path / "seed1" / "reasoning")
    reproduce(tmp_path)
    assert [name for name, _ in programs.calls] == ["seed1/reasoning"]


def test_after_a_failure_the_rest_does_not_begin(programs, tmp_path):
    programs.fails_at = "seed0/world"
    with pytest.raises(RuntimeError, match="exit status 1"):
        reproduce(tmp_path, workers=1)
    assert len(programs.calls) < 6  # of 16: what was begun before the failure was seen


@pytest.mark.skipif(sys.platform != "linux", reason="a process is told of its parent's death on Linux only")
def test_programs_end_with_the_study_that_started_them(tmp_path):
    start = "import sys; from pathlib import Path; from types import SimpleNamespace as Namespace; "
    start += "from tools.tiny import reproduce; here = Namespace(folder=Path(sys.argv[1])); "
    start += "reproduce.World.program(here, here.folder / 'log', ['sleep', '1000.25'])"
    process = subprocess.Popen([python(), "-c", start, tmp_path], cwd=ROOT)

    def is_asleep(one: psutil.Process) -> bool:
        return one.info["cmdline"] == ["sleep", "1000.25"]

    while not (asleep := list(filter(is_asleep, psutil.process_iter(["cmdline"])))):
        assert process.poll() is None
        time.sleep(0.02)
    (program,) = asleep
    program.parent().kill()
    process.wait()
    program.wait(timeout=10)


def test_an_imitation_model_that_never_guesses_is_no_yardstick(programs, tmp_path):
    programs.guessed = 0
    with pytest.raises(RuntimeError, match="guesses the word in 0.0% of its games"):
        reproduce(tmp_path)


def test_results_of_other_settings_and_of_the_version_before_are_refused(programs, tmp_path, monkeypatch):
    reproduce(tmp_path)
    with pytest.raises(ValueError, match=r"settings.json: made with other settings \(epochs: 2 then, 3 now\); use"):
        reproduce(tmp_path, epochs=3)
    with monkeypatch.context() as patched:
        patched.setattr(tiny_reproduce.Reproduce, "build", ["--imitation_rounds", 21])
        with pytest.raises(ValueError, match=r"made with other settings \(build: "):
            reproduce(tmp_path)
    (tmp_path / "settings.json").write_text('{"epochs": 2}')
    with pytest.raises(ValueError, match="not the settings of a run, or of an earlier version"):
        reproduce(tmp_path)


# --- differences ---------------------------------------------------------------------------------------------------


def test_differences_are_paired_by_word():
    # Ours has 2, 1, 0 points of 2 games on three words, the other 1, 0, 0: 0.5, 0.5, 0 a game, 1/3 in the mean.
    outcomes = {"a": (2, 1), "b": (1, 0), "c": (0, 0)}
    games = [
        {"attacker": player, "defender": "imitation", "words": "w", "seed": 0, "target_word": word, "length": 1}
        | {"history": [], "replies": []}
        | {"outcome": taboo.ATTACKER_WINS if number < won[which] else taboo.DEFENDER_WINS}
        for which, players in enumerate((("released2", "detached2"), ("coin2", "sft2")))
        for player in players
        for word, won in outcomes.items()
        for number in range(2)
    ]
    pairs = list(product(("released", "detached"), ("coin", "sft")))
    rows = list(tiny_table.arm_differences(count_matches(games, Taboo()), pairs, epochs=2))
    assert [(row["arm"], row["minus"]) for row in rows] == pairs
    error = math.sqrt(3 / 2 * 4 * ((0.5 - 1 / 3) ** 2 * 2 + (1 / 3) ** 2)) / 6  # of the mean of 0.5, 0.5 and 0
    for row in rows:
        assert row["difference"] == pytest.approx(1 / 3)
        assert row["interval"] == pytest.approx([1 / 3 - 4.303 * error, 1 / 3 + 4.303 * error], rel=1e-3)
