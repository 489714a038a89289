"""Rows of the controls: a drawn winner, cloning, SFT rows alone, silent rows; and rows that are repeated."""

import json
import random
from collections import Counter

import pytest
from helpers import call, flags_of

from tools import assign_rewards
from tools.games import load_game, taboo
from tools.selfplay import controls
from tools.selfplay.rewards import Judged, judge_games
from utils import read_json, read_json_or_jsonl, write_records

SFT = [{"query": f"q{number}", "target": f"t{number}"} for number in range(3)]


def game_of(word: str, *messages: str) -> dict:
    roles = taboo.Taboo.roles * len(messages)
    history = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
    return {"history": history, "target_word": word, "max_turns": 3}


def guessed(word: str) -> str:
    return f"I know the word! It is {word}!"


def split_rows(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """The game rows, and the SFT rows."""
    return [row for row in rows if row.get("type") != "sft"], [row for row in rows if row.get("type") == "sft"]


def clones(rows: list[dict], *how) -> list[dict]:
    return list(map(controls.cloning(rows, *how), rows))


@pytest.fixture
def made(tmp_path):
    """Make rows by assign_rewards; returns the game rows and the SFT rows, or what it said in refusing."""
    games = [game_of(f"bow{number}", "A knot?", guessed(f"bow{number}")) for number in range(40)]
    games += [game_of(f"tie{number}", "What is round your neck?", f"A tie{number}.") for number in range(20)]
    games += [game_of(f"cap{number}", "On a head?", "Hair?", "Over it.", f"A cap{number}.") for number in range(10)]
    games += [game_of(f"pin{number}", "Is it thin?", "Yes.", "Sharp?", guessed(f"pin{number}")) for number in range(5)]
    games += [game_of("hat", "What is on your head?", "Hair.")]  # a breach: "hat" stands in "What"
    write_records(tmp_path / "games.json", games)
    write_records(tmp_path / "facts.json", SFT)

    def make(control: str | None = None, status: int = 0, **changes):
        flags = {"input_data_path": tmp_path / "games.json", "sft_data_path": tmp_path / "facts.json", "seed": 44}
        flags |= {"output_data_path": tmp_path / f"{control or 'spag'}.json", "training_prompt": "play"}
        flags |= {"control": control} | changes
        done = call(assign_rewards.main, *flags_of(flags), status=status)
        return done.errors if status else split_rows(read_json_or_jsonl(flags["output_data_path"]))

    return make


def record_of(tmp_path, name: str) -> dict:
    return read_json(tmp_path / f"{name}_rewards_settings.json")


# --- drawn winners ---------------------------------------------------------------------------------------------------


def test_a_coin_draws_the_role_that_gets_the_winners_reward(made):
    rows, sft_rows = made("coin")
    spag, spag_sft = made()
    assert sft_rows == spag_sft and sum(row["reward"] for row in rows) == pytest.approx(75)  # games that pay
    drawn = Counter(row["role"] for row in rows)
    paid = {role: sum(row["reward"] for row in rows if row["role"] == role) for role in drawn}
    assert 22 < paid[taboo.ATTACKER] < 53
    assert all(row["weight"] == pytest.approx(75 / (2 * paid[row["role"]])) for row in rows)
    texts = {(row["query"], row["target"]) for row in spag}
    assert 22 < sum((row["query"], row["target"]) in texts for row in rows) < 65


def test_the_coin_of_a_game_does_not_depend_on_other_games_or_the_seed(made, tmp_path):
    """These numbers are recorded: runs that were made before stay comparable."""
    words = ["art", "bow", "cap", "dog", "eye", "fin", "gun", "hut"]
    games = [game_of(word, "Well?", guessed(word)) for word in words]
    judged = [controls.coin_game(taboo.Taboo(), game).rewards for game in games]
    assert "".join("AD"[rewards.index(1.0)] for rewards in judged) == "AAAAADAA"


def test_coin_by_length_permutes_winners_among_games_of_one_length_and_counts_the_changed(made, tmp_path):
    rows, sft_rows = made("coin_by_length")
    spag, spag_sft = made()
    assert sft_rows == spag_sft

    def kinds(rows):  # how many rows of each role and each share of the reward, which tells the game's length
        return Counter((row["role"], row["reward"], row["weight"]) for row in rows)

    assert kinds(rows) == kinds(spag)
    assert rows != spag and record_of(tmp_path, "coin_by_length")["winners_changed"] > 10


def test_rewards_are_permuted_by_a_seed_within_lengths():
    games = [Judged("defender wins", 2, (0.0, 1.0))] * 50 + [Judged("attacker wins", 2, (1.0, 0.0))] * 50
    games += [Judged("attacker wins", 4, (1.0, 0.0))] * 5 + [Judged("tied game", 2, (0.0, 0.0))] * 5
    permuted, changed = controls.permute_rewards(games, random.Random(1))
    assert permuted[100:] == games[100:] and Counter(game.rewards for game in permuted[:100]) == {
        (0.0, 1.0): 50,
        (1.0, 0.0): 50,
    }
    assert [game[:2] for game in permuted] == [game[:2] for game in games]  # the games stay as they ended
    assert changed == sum(one != other for one, other in zip(games, permuted, strict=True)) and 30 < changed < 70
    assert controls.permute_rewards(games, random.Random(1)) == (permuted, changed)
    assert controls.permute_rewards(games, random.Random(2))[0] != permuted


def test_a_coin_serves_every_game_that_does_not_pay_both_roles_alike():
    class Shares(taboo.Taboo):
        def rewards(self, task, history, outcome):
            return {self.roles[0]: 0.75, self.roles[1]: 0.25}

    game = Shares(match="word")
    controls.check_winner(game, "coin")
    games = [("", game_of(f"hat{number}", "Hm.", "Hm.")) for number in range(20)]
    assert {judged.rewards for judged in judge_games(game, games, controls.coin_game).games} == {
        (0.75, 0.25),
        (0.25, 0.75),
    }


@pytest.mark.parametrize("control", ["coin", "coin_by_length"])
def test_games_that_pay_both_roles_alike_have_no_winner_to_draw(control):
    with pytest.raises(ValueError, match=f"{control}: .*20 Questions pays both roles alike"):
        controls.check_winner(load_game("twenty_questions"), control)


# --- cloning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sft_coeff", [0.5, 0.25])
def test_cloning_weighs_each_kind_of_row_as_self_play_does(made, sft_coeff):
    spag, _ = made()
    none, cloned = made("cloning", sft_coeff=sft_coeff)
    assert none == [] and [row["target"] for row in cloned] == [row["target"] for row in (*spag, *SFT)]
    # With l = -1 in every row: OfflinePO at ratio 1 and KL 0 has mean(reward * weight) + alpha * mean over SFT rows.
    expected = sum(row["reward"] * row["weight"] for row in spag) / len(spag) + sft_coeff * 1.0
    assert sft_coeff * sum(row["weight"] for row in cloned) / len(cloned) == pytest.approx(expected)


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_cloning_weighs_each_kind_as_micro_batches_do(at_once):
    games, sft = [{"reward": 1.0, "weight": 1.0}] * 6, [{"type": "sft"}] * 3
    cloned = [row["weight"] for row in clones(games + sft, 0.5, at_once)]
    rng, drawn = random.Random(0), {"game": 0.0, "sft": 0.0}
    for _ in range(20000):  # micro-batches: each kind is averaged over its own rows
        batch = rng.choices(["game", "sft"], [6, 3], k=at_once)
        for kind in set(batch):
            drawn[kind] += 1 / 20000
    assert 0.5 * sum(cloned[:6]) / 9 == pytest.approx(drawn["game"], rel=0.03)
    assert sum(cloned[6:]) / 9 == pytest.approx(drawn["sft"], rel=0.03)


def test_cloned_rows_of_a_chat_template_stay_such_rows():
    row = {"query": "q", "target": "t", "reward": 0.5, "role": "attacker", "weight": 2.0, "chat_template": True}
    (cloned,) = clones([row], 0.5)
    assert cloned == {"query": "q", "target": "t", "type": "sft", "weight": 2.0, "chat_template": True}


def test_cloning_takes_the_messages_of_both_roles_if_asked_to(made):
    _, cloned = made("cloning", messages="all")
    assert len(cloned) == 2 * 60 + 4 * 15 + 1 + 3


# --- the rows of another run -----------------------------------------------------------------------------------------


def test_sft_rows_are_repeated_to_as_many_rows_as_the_other_run_has(made, tmp_path):
    rows, sft_rows = made()
    none, repeated = made("sft", like_rows=tmp_path / "spag.json", input_data_path=None)
    assert none == [] and len(repeated) == 93 == len(rows) + len(sft_rows)
    assert Counter(json.dumps(row) for row in repeated) == dict.fromkeys(map(json.dumps, sft_rows), 31)
    assert record_of(tmp_path, "sft")["rows"] == record_of(tmp_path, "spag")["rows"] | {
        "attacker": 0,
        "defender": 0,
        "sft": 93,
    }
    write_records(tmp_path / "spag.json", rows[:2] + sft_rows)
    assert "like_rows: " in made("sft", status=2, like_rows=tmp_path / "spag.json")
    _, fewer = made("sft", like_rows=tmp_path / "spag.json", output_data_path=tmp_path / "other.json")
    assert sorted(Counter(row["target"] for row in fewer).values()) == [1, 2, 2]
    assert "none.json" in made("sft", status=2, like_rows=tmp_path / "none.json")


def test_silent_rows_are_those_of_the_other_run_with_weight_0_for_games(made, tmp_path):
    rows, sft_rows = made(losers=0.5)
    silent, same = made("silent", like_rows=tmp_path / "spag.json", input_data_path=None)
    assert silent == [row | {"weight": 0.0} for row in rows] and same == sft_rows
    assert "games.json:2: not a row" in made("silent", status=2, like_rows=tmp_path / "games.json",
                                             output_data_path=tmp_path / "other.json")  # fmt: skip


@pytest.mark.parametrize("number", [200, 30])
def test_rows_of_games_are_repeated_or_left_out_until_there_are_so_many(made, tmp_path, number):
    rows, sft_rows = made()
    repeated, same = made(repeat_to=number, output_data_path=tmp_path / "repeated.json")
    assert len(repeated) == number and same == sft_rows
    there, times = Counter(map(json.dumps, rows)), Counter(map(json.dumps, repeated))
    whole = number // len(rows)  # each row stands there so often, and drawn ones once more
    assert set(times) <= set(there) and all(
        whole * there[row] <= n <= (whole + 1) * there[row] for row, n in times.items()
    )
    write_records(tmp_path / "like.json", repeated + [{"type": "sft"}] * 7)
    as_many = made(repeat_to=tmp_path / "like.json", output_data_path=tmp_path / "as_many.json")
    assert as_many == (repeated, same)
    record = record_of(tmp_path, "as_many")
    assert record["rows"]["attacker"] + record["rows"]["defender"] == number
    write_records(tmp_path / "like.json", repeated[1:])
    assert "repeat_to: " in made(status=2, repeat_to=tmp_path / "like.json",
                                 output_data_path=tmp_path / "as_many.json")  # fmt: skip


# --- refusals --------------------------------------------------------------------------------------------------------


def test_the_coefficient_of_sft_rows_is_a_setting_of_cloning_alone(made):
    for control in ("coin", "cloning"):
        made(control)
    made("coin", sft_coeff=0.25)
    assert "sft_coeff: 0.5 then, 0.25 now" in made("cloning", sft_coeff=0.25, status=2)


@pytest.mark.parametrize(
    "control, flags",
    [
        ("sft", {}),
        ("silent", {}),
        ("sft", {"like_rows": "rows.json", "sft_data_path": None}),
        ("sft", {"like_rows": "rows.json", "repeat_to": 5}),
        ("cloning", {"sft_coeff": 0}),
        ("cloning", {"losers": 0.5}),
        ("cloning", {"ties": 0.5}),
        (None, {"input_data_path": None}),
        (None, {"repeat_to": 5, "input_data_path": "IN/tied.json", "min_game_rows": 0}),
    ],
)
def test_a_control_without_what_it_needs_is_refused(made, tmp_path, control, flags):
    write_records(tmp_path / "tied.json", [game_of("art", "Hm.")])
    placed = {name: str(value).replace("IN", str(tmp_path)) if value else value for name, value in flags.items()}
    said = made(control, status=2, **placed)
    assert any(
        words in said for words in (f"--control {control} ", "--input_data_path is missing", "no rows to repeat")
    )
    assert not (tmp_path / f"{control or 'spag'}.json").exists()
