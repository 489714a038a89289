"""The learning table of the embedded world: rows of the controls, the order of the programs, and the table."""

import argparse
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tools import taboo, tiny_reproduce
from tools.assign_rewards import assign_rewards
from tools.tiny_controls import cloning_rows, coin_rows, shuffled_rows
from tools.tiny_players import load_lexicon
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
        self.games, self.calls, self.fails_at = games, [], None

    def __call__(self, world, log, *command):
        flags = dict(zip(command[1:], command[2:], strict=False))
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
            outcomes = dict.fromkeys(taboo.OUTCOMES, 1)
            counts = {"games": 4, "outcomes": outcomes, "empty_replies": 1, "messages": 10, "mean_length": 2.5}
            write_records(Path(flags["--output_dir"]) / tiny_reproduce.RESULTS, self.games)
            write_json(Path(flags["--output_dir"]) / tiny_reproduce.SUMMARY, counts)
        elif "tools.assign_rewards" in command:
            write_records(flags["--output_data_path"], SFT)
            settings = Path(flags["--output_data_path"]).with_name("rows_rewards_settings.json")
            write_json(settings, {"rows": {"attacker": 4, "defender": 2, "sft": 1, "empty": 0}})
        elif "tools.evaluate_games" in command:
            player = command[command.index("--players") + 2].partition("=")[0]
            write_json(Path(flags["--output_dir"]) / "matches.json", {})
            write_records(Path(flags["--output_dir"]) / "games_results.json", match(player, world.seed))


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


def arguments(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(output_dir=str(folder), seeds=2, epochs=2, workers=2)


def test_all_arms_of_all_seeds_run_and_come_into_the_table(programs, tmp_path, capsys):
    tiny_reproduce.reproduce(arguments(tmp_path))
    table = (tmp_path / "table.md").read_text()
    assert table in capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    evaluated = [line[:2] for line in lines[2 : lines.index([])]]
    titles = {name: arm.title for name, arm in tiny_reproduce.ARMS.items()}
    assert evaluated == [[titles[name], epoch] for name in ("released", "detached") for epoch in "12"] + [
        [titles[name], "2"] for name in ("cloning", "shuffled", "coin", "sft")
    ]
    whole, by_seed, attacker, defender = lines[2][2:6]
    assert whole.startswith("0.750 [") and by_seed == "0.750, 0.750"
    assert attacker.startswith("1.000 [") and defender.startswith("0.500 [")
    assert lines[-1][:2] == [titles["detached"], "epoch 2"] and lines[-1][2:] == ["0.250"] * 4 + ["0.100", "2.50"]
    assert len({row["seed"] for row in json.loads((tmp_path / "table.json").read_text())["results"]}) == 3  # 0, 1, all


def test_arms_differ_in_rows_and_flags_only_and_share_the_first_games(programs, tmp_path):
    tiny_reproduce.reproduce(arguments(tmp_path))
    calls = dict(programs.calls)
    plays = sorted(log for log in calls if log.endswith("play.log") and log.startswith("seed0"))
    first = [log for log in plays if "epoch1_episodes" in log]
    assert len(first) == 1 and not any("sft" in log for log in plays)

    def without_paths(name: str) -> list[str]:
        command = list(calls[f"seed0/{name}/epoch2/train.log"])
        return [part for part in command if str(tmp_path) not in part]

    assert without_paths("detached") == without_paths("released") + ["--detach_kl", "True"]
    for name in ("cloning", "shuffled", "coin", "sft"):
        assert without_paths(name) == without_paths("released")
    assert len(json.loads((tmp_path / "seed1" / "sft" / "epoch2" / "rows" / "rows.json").read_text())) == 7


def test_what_is_finished_is_not_run_again(programs, tmp_path):
    programs.fails_at = "released/epoch2/train"
    with pytest.raises(RuntimeError, match="exit status 1"):
        tiny_reproduce.reproduce(arguments(tmp_path))
    before = {log for log, _ in programs.calls if "build" not in log}
    programs.calls, programs.fails_at = [], None
    tiny_reproduce.reproduce(arguments(tmp_path))
    again = {log for log, _ in programs.calls if "build" not in log} & before
    assert again == {"seed0/released/epoch2/train.log", "seed1/released/epoch2/train.log"}
