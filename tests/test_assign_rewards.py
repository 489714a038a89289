"""Rewards and rows: the recorded numbers, rewards worked by hand, and the program."""

import json
import random
import re
from collections import Counter

import pytest
from conftest import ROOT, load_golden
from helpers import call, flags_of, write_rows
from scripted import messages

from tools import assign_rewards as program
from tools import spag
from tools.assign_rewards import assign_rewards
from tools.common.errors import UserError
from tools.common.files import read_json_or_jsonl, write_records
from tools.common.records import files_setting
from tools.common.rowformats import alpaca_to_row
from tools.games import prompts
from tools.games.taboo import Taboo
from tools.selfplay.rewards import decay_shares

GAME, WORD = Taboo(), "apple"
GUESS = f"I know the word! It is `{WORD}`!"


def episode(*texts, target_word=WORD, max_turns=5):
    """An episode in which the players take turns."""
    return {"history": messages(GAME, *texts), "target_word": target_word, "max_turns": max_turns}


ATTACKER_WON = episode("Hungry?", "A little", "For what?", "An apple", "ignored", "ignored")
DEFENDER_WON = episode("Fruit?", " Yes \n", "Pie?", GUESS)
TIED = episode("Hello", "Hi")
BROKEN = episode("An apple?", "Yes")
EPISODES = [ATTACKER_WON, TIED, DEFENDER_WON, BROKEN]
WINNERS = ((ATTACKER_WON, 0), (ATTACKER_WON, 2), (DEFENDER_WON, 1), (DEFENDER_WON, 3))  # messages that become rows
FIRST, SECOND = 1 / 3, 2 / 3  # shares of two messages with gamma 0.5: 0.5 / (0.5 + 1) and 1 / (0.5 + 1)


def rows_of(episodes, seed=0, **settings):
    return assign_rewards(episodes, rng=random.Random(seed), **settings)


def near(rows):
    return [(role, pytest.approx(reward), pytest.approx(weight)) for role, reward, weight in rows]


# --- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [pytest.param(run, id=run["set"]) for run in load_golden("rewards.json")["runs"]])
def test_rows_are_the_recorded_ones_to_the_last_digit(run):
    episodes = {recorded["id"]: recorded for recorded in load_golden("rewards.json")["episodes"]}
    rows = rows_of([episodes[i] for i in run["episode_ids"]], decay_weight=run["decay_weight"])
    keys = ("role", "target", "reward", "weight")
    assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in run["records"]]


@pytest.mark.parametrize("count, gamma", [(1100, 0.5), (200_000, 0.99), (1, 1.0), (3, 1e-300)])
def test_the_shares_of_any_number_of_messages_sum_to_1_and_the_last_is_the_largest(count, gamma):
    shares = decay_shares(count, gamma)
    assert len(shares) == count and sum(shares) == pytest.approx(1) and shares == sorted(shares)
    assert shares[-1] == pytest.approx((1 - gamma) / (1 - gamma**count) if gamma < 1 else 1 / count)


def test_weights_balance_the_roles_by_games():
    rows = rows_of([ATTACKER_WON, DEFENDER_WON, ATTACKER_WON, ATTACKER_WON, TIED])
    assert {(row["role"], row["weight"]) for row in rows} == {("attacker", 4 / 6), ("defender", 4 / 2)}


def test_losers_and_ties_pay_below_zero():
    """N = 4 games pay, 3 the attacker: its rows weigh 4/6, the defender's 4/2; a loser weighs as the winner does."""
    games = [ATTACKER_WON, DEFENDER_WON, ATTACKER_WON, ATTACKER_WON, TIED, BROKEN]
    rows = rows_of(games, decay_weight=0.5, losers=0.6, ties=0.25)
    won = [("attacker", FIRST), ("defender", -0.6 * FIRST), ("attacker", SECOND), ("defender", -0.6 * SECOND)]
    lost = [("attacker", -0.6 * FIRST), ("defender", FIRST), ("attacker", -0.6 * SECOND), ("defender", SECOND)]
    expected = [(*row, 4 / 6) for row in won] + [(*row, 4 / 2) for row in lost] + [(*row, 4 / 6) for row in 2 * won]
    expected += [("attacker", -0.25, 1.0), ("defender", -0.25, 1.0)]  # a breach pays nobody
    assert [(row["role"], row["reward"], row["weight"]) for row in rows] == near(expected)
    assert sum(row["reward"] * row["weight"] for row in rows_of(games, losers=1.0)) == pytest.approx(0)
    assert rows_of(games, losers=0.0, ties=0.0) == rows_of(games)


def test_a_loser_pays_its_part_of_what_the_winner_gets():
    class Half(Taboo):
        def rewards(self, task, history, outcome):
            return {role: 0.5 * reward for role, reward in super().rewards(task, history, outcome).items()}

    rows = rows_of([ATTACKER_WON], game=Half(), decay_weight=0.5, losers=0.6)
    assert [row["reward"] for row in rows] == pytest.approx([FIRST / 2, -0.3 * FIRST, SECOND / 2, -0.3 * SECOND])


def test_only_the_learner_s_messages_become_rows_and_its_roles_count_alike():
    games = (ATTACKER_WON, DEFENDER_WON)
    as_attacker, as_defender = ([game | {"learner": role} for game in games] for role in GAME.roles)
    rows = rows_of(as_attacker, decay_weight=0.5, losers=0.6)
    expected = [("attacker", share, 1.0) for share in (FIRST, SECOND, -0.6 * FIRST, -0.6 * SECOND)]
    assert [(row["role"], row["reward"], row["weight"]) for row in rows] == near(expected)
    rows = rows_of([*3 * as_attacker, *as_defender], losers=1.0)
    sums = Counter()
    for row in rows:
        sums[row["role"], row["reward"] > 0] += row["reward"] * row["weight"]
    assert sums == pytest.approx({(role, won): 2 if won else -2 for role in GAME.roles for won in (True, False)})
    with pytest.raises(UserError, match="'learner' is 'judge'; it must be attacker or defender"):
        rows_of([ATTACKER_WON | {"learner": "judge"}])


def test_queries_are_training_prompts_drawn_in_the_order_of_rows():
    templates = prompts.default_templates(GAME) | {"rules": ["Just play {max_turns} turns.\n"] * 8}
    for more in ({}, {"templates": templates}):
        rng = random.Random(3)
        expected = [
            prompts.training_prompt(GAME, game["history"][:index], WORD, 5, rng=rng, **more) for game, index in WINNERS
        ]
        assert [row["query"] for row in rows_of(EPISODES, seed=3, **more)] == expected
        assert [row["query"] for row in rows_of(EPISODES, seed=4, **more)] != expected


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path):
    """Run the program in this process with these flags, on files of these episodes; gives how it ended."""

    def run(inputs=(EPISODES,), status=0, **flags):
        paths = [write_rows(tmp_path / f"episodes{number}.jsonl", records) for number, records in enumerate(inputs)]
        flags = {"input_data_path": paths, "output_data_path": tmp_path / "rows.json"} | flags
        return call(program.main, *flags_of(flags), status=status)

    return run


@pytest.fixture
def run(start, tmp_path):
    """The rows of a run whose output was not there before, and the line that it printed."""

    def run_once(**flags):
        output = flags.setdefault("output_data_path", tmp_path / "rows.json")
        output.unlink(missing_ok=True)
        printed = start(**flags).output
        return read_json_or_jsonl(output), printed

    return run_once


@pytest.fixture
def refuse(start):
    """The line in which the program refuses something."""
    return lambda **flags: start(status=2, **flags).errors.splitlines()[-1]


def test_settings_and_counts_stand_beside_the_rows_and_a_second_start_prints_them(run, start, tmp_path):
    templates = prompts.default_templates(GAME) | {"rules": ["Just play {max_turns} turns.\n"] * 8}
    (tmp_path / "prompts.json").write_text(json.dumps(templates))
    flags = {"game_options": "match=word", "seed": 7, "prompt_templates": tmp_path / "prompts.json"}
    rows, printed = run(decay_weight=0.9, **flags)
    assert rows == rows_of(EPISODES, seed=7, decay_weight=0.9, templates=templates)
    saved = json.loads((tmp_path / "rows.json_rewards_settings.json").read_text())
    assert saved["settings"] | {"seed": 7, "decay_weight": 0.9} == saved["settings"]
    assert saved["settings"]["game"]["options"]["match"] == "word"
    layout = {name: saved["settings"][name] for name in ("training_prompt", "chat_template", "prompt_templates")}
    digest = files_setting(tmp_path / "prompts.json")
    assert layout == {"training_prompt": "random", "chat_template": None, "prompt_templates": digest}
    outcomes = dict.fromkeys(("attacker wins", "defender wins", "attacker breaks the rules", "tied game"), 1)
    weights = {"attacker": 1.0, "defender": 1.0}
    notes = {
        "games": {"episodes": 4, **outcomes},
        "weights": weights,
        "rows": {"attacker": 2, "defender": 2, "negative": 0},
    }
    assert saved | notes == saved
    for part in ("4 games", "attacker wins 1", "tied game 1", "4 rows: attacker 2, defender 2", "attacker 1.00"):
        assert part in printed
    assert "negative" not in printed
    assert start(decay_weight=0.9, **flags).output == printed


def test_a_game_of_ones_own_that_has_changed_is_another_game(run, refuse, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("from tools.games.taboo import Taboo\n\n\nclass Own(Taboo):\n    name = 'taboo'\n")
    run(game=f"{own}:Own")
    own.write_text(own.read_text() + "    title = 'Own'\n")
    assert "game_file: " in refuse(game=f"{own}:Own")


def test_rows_that_a_person_has_changed_stay_when_the_same_command_starts_again(run, start, tmp_path):
    """So a loop that stopped behind its rows goes on with rewards of one's own."""
    rows, _ = run(losers=0.5)
    write_records(tmp_path / "rows.json", rows[:1])
    start(losers=0.5)
    assert read_json_or_jsonl(tmp_path / "rows.json") == rows[:1]


def test_rows_of_other_games_or_sft_examples_of_the_same_name_are_refused(run, refuse, tmp_path):
    path = write_rows(tmp_path / "sft.jsonl", [{"query": "q", "target": "t"}])
    run(sft_data_path=path)
    assert "input_data_path: " in refuse(inputs=(EPISODES[1:],), sft_data_path=path)
    write_rows(path, [{"query": "q", "target": "another"}])
    assert "sft_data_path: " in refuse(sft_data_path=path)


def test_messages_all_make_rows_up_to_the_end_of_each_game_of_several_inputs(run, tmp_path):
    inputs, output = ([ATTACKER_WON, TIED], [DEFENDER_WON, BROKEN]), tmp_path / "rows.jsonl"
    rows, printed = run(inputs=inputs, messages="all", training_prompt="play", output_data_path=output)
    assert "attacker 1.00, defender 1.00" in printed
    said = [message for game, end in zip(EPISODES, (4, 2, 4, 1), strict=True) for message in game["history"][:end]]
    assert [(row["role"], row["target"]) for row in rows] == [(m["role"], m["content"].strip()) for m in said]
    assert {(row["reward"], row["weight"]) for row in rows} == {(1.0, 1.0)}
    assert rows[-1]["query"] == prompts.play_prompt(GAME, [], WORD, 5)


def test_one_warning_counts_the_games_that_the_judge_decides_otherwise_than_they_say(start):
    stored = [ATTACKER_WON | {"outcome": "attacker wins"}, DEFENDER_WON | {"outcome": "tied game"}, TIED, BROKEN]
    (line,) = [line for line in start(inputs=(stored,)).errors.splitlines() if "WARNING" in line]
    assert "1 of 4 games" in line and "tied game -> defender wins: 1" in line


def test_a_game_in_two_rank_files_of_a_run_counts_once(run, tmp_path):
    """The rank files are those of one run; the games of another run with equal indices are others."""
    ranks = [[ATTACKER_WON | {"index": 0}, DEFENDER_WON | {"index": 1}], [TIED | {"index": 0}]]
    paths = [write_rows(tmp_path / f"m_words_rank{rank}.jsonl", games) for rank, games in enumerate(ranks)]
    rows, printed = run(input_data_path=paths)
    assert rows == rows_of([ATTACKER_WON, DEFENDER_WON]) and "2 games" in printed
    other = write_rows(tmp_path / "m_words_rank1000_rank0.jsonl", [BROKEN | {"index": 0}])
    assert "3 games" in run(input_data_path=[*paths, other], output_data_path=tmp_path / "more.json")[1]


def test_the_documented_examples_are_what_the_program_reads_and_writes(run, tmp_path):
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    game, documented = map(json.loads, re.findall(r"```json\n(.*?)```", readme, re.DOTALL)[:2])
    alpaca = {"instruction": "In French.", "input": "violin", "output": "violon"}
    messages = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}
    sft = [{"query": "Q", "target": "T", "prompt": "P", "answer": "A"}, {"prompt": "P", "answer": "A"}]
    path = write_rows(tmp_path / "sft.jsonl", [*sft, alpaca, messages])
    rows, printed = run(inputs=([game],), training_prompt="play", sft_data_path=path)
    for row, example in zip(rows[2 - len(documented) : 2], documented, strict=True):  # the last rows of the game
        assert row["query"].startswith(example["query"].removesuffix("..."))
        assert row == example | {"query": row["query"]}
    texts = [("Q", "T"), ("P", "A"), (alpaca_to_row(alpaca)["prompt"], "violon")]
    texts = [{"query": query, "target": target} for query, target in texts]
    assert rows[2:] == [each | {"type": "sft", "weight": 1.0} for each in (*texts, messages)]
    assert "sft 4" in printed


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken, complaint",
    [
        ({"target_word": WORD, "max_turns": 5}, "'history'"),
        (TIED | {"history": [{"role": "judge", "content": "x"}]}, "judge"),
        (TIED | {"game": "twenty_questions"}, "twenty_questions"),
        (TIED | {"history": None}, "'history'"),
        (TIED | {"history": json.dumps(TIED["history"])}, "message 0: expected"),
        (TIED | {"history": ["Hello"]}, "message 0: expected .* got 'Hello'"),
    ],
)
def test_a_bad_episode_is_named_by_file_and_number(refuse, broken, complaint):
    line = refuse(inputs=([TIED], [TIED, broken]))
    assert re.search(f"episodes1.jsonl: (episode|row) 2: .*{complaint}", line)
    with pytest.raises(ValueError, match=f"episode 1: .*{complaint}"):
        rows_of([TIED, broken])


SAID = {role: {"role": role, "content": f"A text of the {role}."} for role in GAME.roles}


@pytest.mark.parametrize(
    "roles, complaint",
    [
        (["defender", "attacker", "defender"], "message 0: it is by the defender, but it is the attacker's turn"),
        (["attacker", "attacker", "defender"], "message 1: it is by the attacker, but it is the defender's turn"),
    ],
)
def test_a_game_in_another_order_of_speakers_is_judged_but_gives_no_rows(start, refuse, roles, complaint):
    """A row of such a message would have the other role's prompt: the defender would learn under the secret."""
    game = TIED | {"history": [SAID[role] for role in roles]}
    assert GAME.judge(game["history"], WORD, 5) == ("tied game", 3)
    assert re.search(f"episodes1.jsonl: episode 2: {complaint}", refuse(inputs=([TIED], [TIED, game])))
    with pytest.raises(UserError, match=f"episode 1: {complaint}"):
        spag.rows([TIED, game])
    start(inputs=([DEFENDER_WON | {"history": [*DEFENDER_WON["history"], SAID["defender"]]}],))  # after its end


def test_what_would_give_no_rows_or_wrong_ones_is_refused(refuse):
    line = refuse(inputs=([TIED, TIED],))
    assert "the games give no rows" in line and "'tied game': 2" in line
    assert "at most 1" in refuse(decay_weight=1.25) and "above 0" in refuse(decay_weight=0.0)
    assert "at least 0" in refuse(ties=float("nan"))
    assert "omit --losers" in refuse(messages="all", losers=1)
    assert "omit" in refuse(messages="all", ties=0.25)
    assert "go together" in refuse(chat_template=True)
