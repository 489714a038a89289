"""Rows of the controls: a drawn winner, cloning, SFT rows alone."""

import json
import random
from collections import Counter

import pytest
from helpers import call, flags_of

from tools import assign_rewards
from tools.games import load_game, taboo
from tools.selfplay import controls
from tools.selfplay.rewards import JudgedGames, in_memory
from utils import write_records

SFT = [{"query": f"q{number}", "target": f"t{number}"} for number in range(3)]


def game_of(word: str, *messages: str) -> dict:
    roles = taboo.Taboo.roles * len(messages)
    history = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
    return {"history": history, "target_word": word, "max_turns": 3}


@pytest.fixture
def made(tmp_path):
    """Make rows in epoch 2 of a run by assign_rewards or a control; returns the game rows and the SFT rows."""
    games = [game_of(f"bow{number}", "A knot?", f"I know the word! It is bow{number}!") for number in range(40)]
    games += [game_of(f"tie{number}", "What is round your neck?", f"A tie{number}.") for number in range(20)]
    games += [game_of("hat", "What is on your head?", "Hair.")]  # a breach: "hat" stands in "What"
    write_records(tmp_path / "games.json", games)
    write_records(tmp_path / "sft.json", SFT)

    def make(control: str | None = None, status: int = 0, **changes):
        output = tmp_path / f"{control or 'spag'}/epoch2/rows/rows.json"
        flags = {"input_data_path": tmp_path / "games.json", "sft_data_path": tmp_path / "sft.json", "seed": 44}
        flags |= {"output_data_path": output, "training_prompt": "play", "control": control} | changes
        done = call((controls if control else assign_rewards).main, *flags_of(flags), status=status)
        return done.errors if status else controls.split_rows(flags["output_data_path"])

    return make


def test_a_coin_draws_the_role_that_gets_the_winners_reward(made):
    rows, sft_rows = made("coin")
    spag, spag_sft = made()
    assert sft_rows == spag_sft and len(rows) == len(spag) == 60  # each game pays one role, of one message
    drawn = Counter(row["role"] for row in rows)
    assert 15 < drawn[taboo.ATTACKER] < 45
    weights = {role: 60 / (2 * number) for role, number in drawn.items()}
    assert all(row["reward"] == 1.0 and row["weight"] == weights[row["role"]] for row in rows)
    texts = {(row["query"], row["target"]) for row in spag}
    assert 15 < sum((row["query"], row["target"]) in texts for row in rows) < 45
    assert made("coin") == (rows, sft_rows)


@pytest.mark.parametrize("control, named", [("coin", "game"), ("cloning", "control"), (None, "control")])
def test_rows_of_another_control_are_refused(made, tmp_path, control, named):
    output = tmp_path / "run/epoch2/rows/rows.json"
    first = made(None if control else "cloning", output_data_path=output)
    assert f"{named}: " in made(control, status=2, output_data_path=output)
    assert controls.split_rows(output) == first
    assert len(list(output.parent.glob("rows*"))) == (2 if control else 4)


def test_a_coin_serves_every_game_that_does_not_pay_both_roles_alike():
    class Shares(taboo.Taboo):
        def rewards(self, task, history, outcome):
            return {self.roles[0]: 0.75, self.roles[1]: 0.25}

    drawn = controls.with_coin(Shares(match="word"))
    found = {tuple(drawn.rewards(str(task), [], taboo.TIED).values()) for task in range(20)}
    assert found == {(0.75, 0.25), (0.25, 0.75)} and drawn.match == "word"
    assert JudgedGames(drawn, in_memory([game_of("hat", "Hm.", "Hm.")])).paid.total() == 2
    with pytest.raises(ValueError, match="20 Questions pays both roles alike"):
        controls.with_coin(load_game("twenty_questions"))


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
    games, sft = [{"reward": 1.0, "weight": 1.0}] * 6, [{}] * 3
    cloned = [row["weight"] for row in controls.cloning_rows(games, sft, 0.5, at_once)]
    rng, drawn = random.Random(0), {"game": 0.0, "sft": 0.0}
    for _ in range(20000):  # micro-batches: each kind is averaged over its own rows
        batch = rng.choices(["game", "sft"], [6, 3], k=at_once)
        for kind in set(batch):
            drawn[kind] += 1 / 20000
    assert 0.5 * sum(cloned[:6]) / 9 == pytest.approx(drawn["game"], rel=0.03)
    assert sum(cloned[6:]) / 9 == pytest.approx(drawn["sft"], rel=0.03)


def test_cloned_rows_of_a_chat_template_stay_such_rows():
    row = {"query": "q", "target": "t", "reward": 0.5, "role": "attacker", "weight": 2.0, "chat_template": True}
    (cloned,) = controls.cloning_rows([row], [], 0.5)
    assert cloned == {"query": "q", "target": "t", "type": "sft", "weight": 2.0, "chat_template": True}


def test_cloning_takes_the_messages_of_both_roles_if_asked_to(made):
    _, cloned = made("cloning", messages="all")
    assert len(cloned) == 2 * 60 + 1 + 3


def test_sft_rows_are_repeated_to_as_many_rows_as_the_other_run_has(made, tmp_path):
    rows, sft_rows = made()
    none, repeated = made("sft", like=tmp_path / "spag", input_data_path="none.json", sft_coeff=0.1)
    assert none == [] and len(repeated) == 63 == len(rows) + len(sft_rows)
    assert Counter(json.dumps(row) for row in repeated) == dict.fromkeys(map(json.dumps, sft_rows), 21)
    write_records(tmp_path / "spag/epoch2/rows/rows.json", rows[:2] + sft_rows)
    assert "like: " in made("sft", status=2, like=tmp_path / "spag")
    _, fewer = made("sft", like=tmp_path / "spag", output_data_path=tmp_path / "other/epoch2/rows/rows.json")
    assert sorted(Counter(row["target"] for row in fewer).values()) == [1, 2, 2]
    assert "epoch2/rows/rows.json" in made("sft", status=2, like=tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "control, flags",
    [
        ("sft", {}),
        ("sft", {"like": "run", "sft_data_path": None}),
        ("cloning", {"sft_coeff": 0}),
        ("cloning", {"losers": 0.5}),
        ("cloning", {"ties": 0.5}),
    ],
)
def test_a_control_without_what_it_needs_is_refused(made, tmp_path, control, flags):
    assert f"--control {control} needs " in made(control, status=2, **flags)
    assert not (tmp_path / control).exists()
