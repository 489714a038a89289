"""The learning table of the embedded world: rows of the controls, the order of the programs, and the table."""

import argparse
import json
import math
import random
from collections import Counter
from itertools import groupby, product
from pathlib import Path

import pytest

from tools.assign_rewards import assign_rewards
from tools.games import taboo
from tools.matches.stats import count_matches
from tools.tiny import reproduce as tiny_reproduce
from tools.tiny import table as tiny_table
from tools.tiny.controls import cloning_rows, coin_rows, shuffled_rows
from tools.tiny.players import load_lexicon
from tools.tiny_world import TEMPLATES, scripted_games
from utils import write_json, write_records

SFT = [{"query": "q", "target": "t", "type": "sft", "weight": 1.0}] * 3


@pytest.fixture(scope="module")
def templates():
    return taboo.load_templates(TEMPLATES)


@pytest.fixture(scope="module")
def games():
    return scripted_games(load_lexicon(), rounds=2, rng=random.Random(0))


@pytest.fixture(scope="module")
def rows(games, templates):
    """The rows of self-play learning."""
    return assign_rewards(
        games, rng=random.Random(0), prompt_fn=lambda *history: taboo.play_prompt(*history, templates=templates)
    )


# --- controls ------------------------------------------------------------------------------------------------------


def test_a_coin_gives_about_half_of_the_decided_games_to_the_loser(games, rows, templates):
    drawn = list(coin_rows(games, SFT, templates, random.Random(0)))
    assert drawn[-3:] == SFT
    won = {(row["query"], row["target"], row["role"]) for row in rows}
    lost = [row for row in drawn[:-3] if (row["query"], row["target"], row["role"]) not in won]
    assert 0.35 < len(lost) / len(drawn) < 0.65
    guesses = [row["target"].startswith("I know the word!") for row in lost]
    assert any(guesses)  # wrong ones of a defender whom the coin made the winner
    decided = sum(game["outcome"] in taboo.WINNERS for game in games)
    assert sum(row["reward"] for row in drawn[:-3]) == pytest.approx(decided)


def test_shuffled_rewards_are_those_of_the_same_game_in_another_order(games, rows, templates):
    shuffled = list(shuffled_rows(games, SFT, templates, random.Random(0)))
    assert shuffled[-3:] == SFT
    without = [{key: row[key] for key in row if key != "reward"} for row in rows]
    assert [{key: row[key] for key in row if key != "reward"} for row in shuffled[:-3]] == without
    start = 0
    for game in games:
        if game["outcome"] in taboo.WINNERS:
            winner = taboo.WINNERS[game["outcome"]]
            end = start + sum(message["role"] == winner for message in game["history"][: game["length"]])
            assert Counter(row["reward"] for row in shuffled[start:end]) == Counter(
                r["reward"] for r in rows[start:end]
            )
            start = end
    assert start == len(rows)
    assert sum(one["reward"] != other["reward"] for one, other in zip(shuffled, rows, strict=False)) > 0.2 * len(rows)


def test_cloning_weighs_each_kind_of_row_as_self_play_learning_does(games, rows, templates):
    cloned = list(cloning_rows(games, SFT, templates, random.Random(0)))
    assert {row["type"] for row in cloned} == {"sft"} and len(cloned) == len(rows) + 3
    # With l = -1 in every row: OfflinePO at ratio 1 and KL 0 has mean(reward * weight) + 0.5 * mean over SFT rows.
    expected = sum(row["reward"] * row["weight"] for row in rows) / len(rows) + 0.5 * 1.0
    assert 0.5 * sum(row["weight"] for row in cloned) / len(cloned) == pytest.approx(expected)
    assert [row["target"] for row in cloned[:-3]] == [row["target"] for row in rows]


# --- the programs --------------------------------------------------------------------------------------------------


class Programs:
    """Stands in for the programs: notes what is asked for and leaves the files that each would leave."""

    def __init__(self, games):
        self.games, self.calls, self.fails_at, self.guessed = games, [], None, 1

    def __call__(self, world, log, *command):
        flags = flags_of(command)
        command = [part.replace(f"{world.args.output_dir}/", "") for part in command]
        self.calls.append((str(log.relative_to(world.args.output_dir)), command))
        if self.fails_at and self.fails_at in str(log):
            raise RuntimeError(f"{log}: ended with exit status 1")
        if "build" in command:
            for name, text in (("words.txt", "cat\n"), ("held_out.txt", "cow\n")):
                (world.data / name).parent.mkdir(parents=True, exist_ok=True)
                (world.data / name).write_text(text)
            write_records(world.data / "facts.json", SFT)
        elif "--train_method" in command:
            write_json(Path(flags["--output_dir"]) / "train_results.json", {})
        elif "tools.play_llm_game" in command:
            outcomes = dict.fromkeys(taboo.OUTCOMES, 1) | {taboo.DEFENDER_WINS: self.guessed}
            counts = {"games": 4, "outcomes": outcomes, "empty_replies": 1, "messages": 10, "mean_length": 2.5}
            write_records(Path(flags["--output_dir"]) / tiny_table.RESULTS, self.games)
            write_json(Path(flags["--output_dir"]) / tiny_table.SUMMARY, counts)
        elif "tools.assign_rewards" in command:
            write_records(flags["--output_data_path"], SFT)
            settings = Path(flags["--output_data_path"]).with_name("rows_rewards_settings.json")
            write_json(settings, {"rows": {"attacker": 4, "defender": 2, "sft": 1, "empty": 0}})
        elif "tools.evaluate_games" in command:
            player = command[command.index("--players") + 2].partition("=")[0]
            write_json(Path(flags["--output_dir"]) / "matches.json", {})
            write_records(Path(flags["--output_dir"]) / "games_results.json", match(player, world.seed))


def flags_of(command) -> dict[str, str]:
    """The word behind each word, so that of a flag its first value."""
    return dict(zip(command[1:], command[2:], strict=False))


def match(player: str, seed: int) -> list[dict]:
    """The player wins as attacker and ties as defender."""
    return [
        {"attacker": attacker, "defender": defender, "words": words, "seed": seed, "target_word": word}
        | {"history": [{"role": "attacker", "content": "Hm."}], "outcome": outcome, "length": 1}
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
        tiny_reproduce.World, "program", lambda world, log, *command: programs(world, log, *map(str, command))
    )
    return programs


def arguments(folder: Path, workers: int = 2) -> argparse.Namespace:
    (folder / tiny_reproduce.TIMES).write_text('{"program": "seed0/build", "seconds": 60.0}\n')  # the stub writes none
    return argparse.Namespace(output_dir=str(folder), seeds=2, epochs=2, workers=workers)


def test_all_arms_of_all_seeds_run_and_come_into_the_table(programs, tmp_path, capsys):
    tiny_reproduce.reproduce(arguments(tmp_path))
    table = (tmp_path / "table.md").read_text()
    printed = capsys.readouterr().out
    assert table in printed
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    titles = {name: arm.title for name, arm in tiny_reproduce.ARMS.items()}
    points, differences, self_play = (list(part) for key, part in groupby(lines, key=bool) if key)
    assert [line[:2] for line in points[3:]] == [
        [titles[name], epoch] for name in ("released", "detached") for epoch in "12"
    ] + [[titles[name], "2"] for name in ("cloning", "shuffled", "coin", "sft")]
    assert points[2] == ["imitation against itself", "-", "0.500", "", "0.375", "0.625", "", "", "", "0.250", "0.250"]
    whole, by_seed, attacker, defender = points[3][2:6]
    assert whole.startswith("0.750 [") and by_seed == "0.750, 0.750"
    assert attacker.startswith("1.000 [") and defender.startswith("0.500 [")
    assert [line[:2] for line in differences[2:]] == [
        [titles[name], titles[control]] for name in ("released", "detached") for control in ("coin", "sft")
    ]
    assert {line[2] for line in differences[2:]} == {"+0.000 [+0.000, +0.000]"}
    assert self_play[-1][:2] == [titles["detached"], "epoch 2"] and self_play[-1][2:] == ["0.250"] * 4 + [
        "0.100",
        "2.50",
    ]
    assert {row["seed"] for row in json.loads((tmp_path / "table.json").read_text())["results"]} == {None, 0, 1}
    assert "The programs took 1 minutes in all" in printed


@pytest.fixture
def commands(programs, tmp_path) -> dict[str, list[str]]:
    """Every command of a whole run by its log, paths from the output folder on."""
    tiny_reproduce.reproduce(arguments(tmp_path))
    assert len({log for log, _ in programs.calls}) == len(programs.calls)  # nothing ran twice
    return {log.removesuffix(".log"): command for log, command in programs.calls}


def test_arms_differ_in_their_rows_and_flags_only(commands):
    for epoch in (1, 2):
        released = commands[f"seed0/released/epoch{epoch}/train"]
        for name, arm in tiny_reproduce.ARMS.items():
            train = [
                part.replace(f"seed0/{name}/", "seed0/released/")
                for part in commands[f"seed0/{name}/epoch{epoch}/train"]
            ]
            assert train == [*released, *arm.flags], name
    assert tiny_reproduce.ARMS["detached"].flags == ("--detach_kl", "True")
    assert not any(arm.flags for name, arm in tiny_reproduce.ARMS.items() if name != "detached")


@pytest.mark.parametrize("name", tiny_reproduce.ARMS)
def test_each_epoch_plays_and_learns_with_the_model_of_the_one_before(commands, name):
    model = "seed1/imitation/model"
    for epoch in (1, 2):
        train = flags_of(commands[f"seed1/{name}/epoch{epoch}/train"])
        assert train["--model_name_or_path"] == train["--ref_model_name_or_path"] == model
        assert train["--train_data_path"] == f"seed1/{name}/epoch{epoch}/rows/rows.json"
        if epoch > 1 and name != "sft":
            play = flags_of(commands[f"seed1/{name}/epoch{epoch}/episodes/play"])
            assert play["--attacker_model_name_or_path"] == play["--defender_model_name_or_path"] == model
            assert play["--data_path"] == "seed1/data/games.txt"
        model = train["--output_dir"]
        assert model == f"seed1/{name}/epoch{epoch}/model"
    evaluate = commands[f"seed1/{name}/epoch2/eval/evaluate"]
    at = evaluate.index("--players")
    assert evaluate[at + 1 : at + 3] == ["imitation=seed1/imitation/model", f"{name}2={model}"]
    at = evaluate.index("--words")
    assert evaluate[at + 1 : at + 3] == ["played=seed1/data/words.txt", "held_out=seed1/data/held_out.txt"]
    assert (f"seed1/{name}/epoch1/eval/evaluate" in commands) == tiny_reproduce.ARMS[name].every_epoch


def test_the_first_games_are_the_imitation_models_on_played_words_alone(commands, tmp_path):
    first = flags_of(commands["seed0/epoch1_episodes/play"])
    assert first["--attacker_model_name_or_path"] == first["--defender_model_name_or_path"] == "seed0/imitation/model"
    assert (tmp_path / "seed0" / "data" / "games.txt").read_text() == "cat\n" * 12
    assert not any(log.endswith("epoch1/episodes/play") or "sft/epoch2/episodes" in log for log in commands)
    assert len(json.loads((tmp_path / "seed1" / "sft" / "epoch2" / "rows" / "rows.json").read_text())) == 7


def test_what_is_finished_is_not_run_again(programs, tmp_path):
    programs.fails_at = "seed0/released/epoch2/train"
    with pytest.raises(RuntimeError, match="exit status 1"):
        tiny_reproduce.reproduce(arguments(tmp_path))
    before = {log for log, _ in programs.calls if "build" not in log}
    assert not (tmp_path / "table.md").exists()
    programs.calls, programs.fails_at = [], None
    tiny_reproduce.reproduce(arguments(tmp_path))
    assert {log for log, _ in programs.calls} & before == {"seed0/released/epoch2/train.log"}


def test_after_a_failure_the_rest_does_not_begin(programs, tmp_path):
    programs.fails_at = "seed0/build"
    with pytest.raises(RuntimeError, match="exit status 1"):
        tiny_reproduce.reproduce(arguments(tmp_path, workers=1))
    assert len(programs.calls) < 6  # of 60: what was begun before the failure was seen


def test_an_imitation_model_that_never_guesses_is_no_yardstick(programs, tmp_path):
    programs.guessed = 0
    with pytest.raises(RuntimeError, match="guesses the word in 0.0% of its games"):
        tiny_reproduce.reproduce(arguments(tmp_path))


def test_results_of_other_settings_are_refused(programs, tmp_path):
    tiny_reproduce.reproduce(arguments(tmp_path))
    other = arguments(tmp_path)
    other.epochs = 3
    with pytest.raises(ValueError, match=r"settings.json: made with other settings \(epochs\)"):
        tiny_reproduce.reproduce(other)


# --- differences ---------------------------------------------------------------------------------------------------


def test_differences_are_paired_by_word():
    # Ours has 2, 1, 0 points of 2 games on three words, the other 1, 0, 0: 0.5, 0.5, 0 a game, 1/3 in the mean.
    outcomes = {"a": (2, 1), "b": (1, 0), "c": (0, 0)}
    games = [
        {"attacker": player, "defender": "imitation", "words": "w", "seed": 0, "target_word": word, "length": 1}
        | {"history": [], "outcome": taboo.ATTACKER_WINS if number < won[which] else taboo.DEFENDER_WINS}
        for which, players in enumerate((("released2", "detached2"), ("coin2", "sft2")))
        for player in players
        for word, won in outcomes.items()
        for number in range(2)
    ]
    rows = list(tiny_table.control_differences(count_matches(games), epochs=2))
    assert [(row["arm"], row["control"]) for row in rows] == list(product(("released", "detached"), ("coin", "sft")))
    error = math.sqrt(3 / 2 * 4 * ((0.5 - 1 / 3) ** 2 * 2 + (1 / 3) ** 2)) / 6  # of the mean of 0.5, 0.5 and 0
    for row in rows:
        assert row["difference"] == pytest.approx(1 / 3)
        assert row["interval"] == pytest.approx([1 / 3 - 4.303 * error, 1 / 3 + 4.303 * error], rel=1e-3)
