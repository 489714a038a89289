"""Rewards and rows: the recorded numbers, the properties of rewards, and the program.

faults/ kills the program, damages its files, refuses its flags and other settings, and draws games at random whose
rewards must add up.
"""

import copy
import json
import random
import re
import subprocess
import sys
import tracemalloc

import pytest
from conftest import ROOT, load_golden
from helpers import call, flags_of

import utils
from tools import assign_rewards as program
from tools.assign_rewards import assign_rewards
from tools.games import prompts
from tools.games.taboo import Taboo
from tools.selfplay import rows as rows_room
from tools.selfplay.layout import layout_of
from tools.selfplay.rewards import RewardFlags, judge_game, judge_games, message_shares
from tools.selfplay.rows import episode_rows
from utils import UserError, read_json_or_jsonl

GAME, WORD = Taboo(), "apple"
GUESS = f"I know the word! It is `{WORD}`!"


def episode(*texts, target_word=WORD, max_turns=5):
    """An episode in which the players take turns."""
    history = [{"role": GAME.roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"history": history, "target_word": target_word, "max_turns": max_turns}


ATTACKER_WON = episode("Hungry?", "A little", "For what?", "An apple", "ignored", "ignored")
DEFENDER_WON = episode("Fruit?", " Yes \n", "Pie?", GUESS)
TIED = episode("Hello", "Hi")
BROKEN = episode("An apple?", "Yes")
EPISODES = [ATTACKER_WON, TIED, DEFENDER_WON, BROKEN]
PAID = ((ATTACKER_WON, 0), (ATTACKER_WON, 2), (DEFENDER_WON, 1), (DEFENDER_WON, 3))  # messages that become rows


def rows_of(episodes, seed=0, **settings):
    return assign_rewards(episodes, rng=random.Random(seed), **settings)


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [pytest.param(run, id=run["set"]) for run in load_golden("rewards.json")["runs"]])
def test_rows_are_the_recorded_ones_to_the_last_digit(run):
    episodes = {recorded["id"]: recorded for recorded in load_golden("rewards.json")["episodes"]}
    rows = rows_of([episodes[i] for i in run["episode_ids"]], decay_weight=run["decay_weight"])
    keys = ("role", "target", "reward", "weight")
    assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in run["records"]]


def test_each_message_of_the_winner_up_to_the_decisive_one_gives_a_row():
    before = copy.deepcopy(EPISODES)
    how = {"weights": {"attacker": 0.75, "defender": 1.5}, "flags": RewardFlags(decay_weight=0.5)}
    how["prompt_fn"] = lambda said, word, turns: f"{len(said)} {word} {turns}"
    first, second = 1 / 3, 2 / 3  # 0.5 / (0.5 + 1) and 1 / (0.5 + 1)
    assert [episode_rows(GAME, game, judge_game(GAME, game), **how) for game in EPISODES] == [
        [
            {"query": "0 apple 5", "target": "Hungry?", "reward": first, "role": "attacker", "weight": 0.75},
            {"query": "2 apple 5", "target": "For what?", "reward": second, "role": "attacker", "weight": 0.75},
        ],
        [],
        [
            {"query": "1 apple 5", "target": "Yes", "reward": first, "role": "defender", "weight": 1.5},
            {"query": "3 apple 5", "target": GUESS, "reward": second, "role": "defender", "weight": 1.5},
        ],
        [],
    ]
    rows_of(EPISODES)
    assert before == EPISODES  # nothing is modified


def test_weights_balance_the_roles_by_games():
    rows = rows_of([ATTACKER_WON, DEFENDER_WON, ATTACKER_WON, ATTACKER_WON, TIED])
    assert {(row["role"], row["weight"]) for row in rows} == {("attacker", 4 / 6), ("defender", 4 / 2)}
    alone = {"history": [{"role": "defender", "content": "apple"}], "target_word": WORD, "max_turns": 3}
    rows = rows_of([alone, DEFENDER_WON])  # the attacker wins a game without a message: it counts, and has no row
    assert [(row["role"], row["weight"]) for row in rows] == [("defender", 1.0)] * 2


def test_losers_and_ties_pay_below_zero():
    """N = 4 games pay, 3 the attacker: its rows weigh 4/6, the defender's 4/2; a loser weighs as the winner does."""
    games = [ATTACKER_WON, DEFENDER_WON, ATTACKER_WON, ATTACKER_WON, TIED, BROKEN]
    rows = rows_of(games, decay_weight=0.5, losers=0.6, ties=0.25)
    first, second = 1 / 3, 2 / 3  # shares of two messages
    won = [("attacker", first), ("defender", -0.6 * first), ("attacker", second), ("defender", -0.6 * second)]
    lost = [("attacker", -0.6 * first), ("defender", first), ("attacker", -0.6 * second), ("defender", second)]
    expected = [(*row, 4 / 6) for row in won] + [(*row, 4 / 2) for row in lost] + [(*row, 4 / 6) for row in 2 * won]
    expected += [("attacker", -0.25, 1.0), ("defender", -0.25, 1.0)]  # a breach pays nobody
    assert [(row["role"], row["reward"], row["weight"]) for row in rows] == [
        (role, pytest.approx(reward), weight) for role, reward, weight in expected
    ]
    assert sum(row["reward"] * row["weight"] for row in rows_of(games, losers=1.0)) == pytest.approx(0)
    assert rows_of(games, losers=0.0, ties=0.0) == rows_of(games)
    for wrong in ({"losers": -1.0}, {"ties": float("nan")}, {"ties": float("inf")}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))} is .* at least 0"):
            rows_of(games, **wrong)


def test_shares_of_a_reward_decay_backwards():
    assert message_shares(3, 0.8) == pytest.approx([0.64 / 2.44, 0.8 / 2.44, 1 / 2.44])
    assert message_shares(2, 1) == [0.5, 0.5]
    assert message_shares(1, 0.001) == [1.0]
    assert message_shares(0, 0.8) == []


def test_a_decay_outside_its_bounds_or_too_small_to_compute_with_is_refused():
    for decay_weight in (0, -0.8, 1.25, float("nan")):
        with pytest.raises(ValueError, match="decay_weight is .* above 0 and at most 1"):
            rows_of(EPISODES, decay_weight=decay_weight)
    with pytest.raises(UserError, match="too small for a game with 3 messages"):
        message_shares(3, 1e-320)


def test_queries_are_training_prompts_drawn_in_the_order_of_rows():
    templates = prompts.default_templates(GAME) | {"rules": ["Just play {max_turns} turns.\n"] * 8}
    for more in ({}, {"templates": templates}):
        rng = random.Random(3)
        expected = [
            prompts.training_prompt(GAME, game["history"][:index], WORD, 5, rng=rng, **more) for game, index in PAID
        ]
        assert [row["query"] for row in rows_of(EPISODES, seed=3, **more)] == expected
        assert [row["query"] for row in rows_of(EPISODES, seed=4, **more)] != expected


# --- the program -----------------------------------------------------------------------------------------------------


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def start(tmp_path):
    """Run the program in this process with these flags, on files of these episodes; gives how it ended."""

    def run(inputs=(EPISODES,), status=0, **flags):
        paths = [write(tmp_path / f"episodes{number}.jsonl", records) for number, records in enumerate(inputs)]
        flags = {"input_data_path": paths, "output_data_path": tmp_path / "rows.json"} | flags
        return call(program.main, *flags_of(flags), status=status)

    return run


@pytest.fixture
def run(start, tmp_path):
    """The rows of a run whose output was not there before, and what it printed."""

    def run_once(**flags):
        output = flags.setdefault("output_data_path", tmp_path / "rows.json")
        output.unlink(missing_ok=True)
        printed = start(**flags).output
        return read_json_or_jsonl(output), json.loads(printed)

    return run_once


@pytest.fixture
def refuse(start):
    """The line in which the program refuses something."""
    return lambda **flags: start(status=2, **flags).errors.splitlines()[-1]


@pytest.mark.parametrize("launch", [["tools/assign_rewards.py"], ["-m", "tools.assign_rewards"]])
def test_the_program_runs_as_a_file_and_as_a_module_without_torch_and_transformers(tmp_path, launch):
    path = write(tmp_path / "episodes.jsonl", EPISODES)
    for package in ("torch", "transformers"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not to be imported')")
    command = [sys.executable, *launch, "--input_data_path", path, "--output_data_path", tmp_path / "rows.json"]
    environment = {"PYTHONPATH": f".:{tmp_path}", "PATH": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert read_json_or_jsonl(tmp_path / "rows.json") == rows_of(EPISODES)


@pytest.mark.parametrize("name", ["episodes.json", "episodes.jsonl"])
def test_games_pass_through_in_constant_memory(tmp_path, name):
    games = (episode(f"Hello number {i}", "x" * 1000, "So", "An apple") for i in range(4000))
    utils.write_records(tmp_path / name, games)
    tracemalloc.start()
    try:
        flags = rows_room.RowFlags(training_prompt="play")
        made = rows_room.make_rows(flags, [str(tmp_path / name)], str(tmp_path / "rows.json"))
        assert made["rows"]["attacker"] == 8000
        assert tracemalloc.get_traced_memory()[1] < 3 << 20  # of 5 MB of games
    finally:
        tracemalloc.stop()


def test_settings_and_counts_stand_beside_the_rows(run, tmp_path):
    templates = prompts.default_templates(GAME) | {"rules": ["Just play {max_turns} turns.\n"] * 8}
    (tmp_path / "prompts.json").write_text(json.dumps(templates))
    rows, printed = run(match="word", seed=7, decay_weight=0.9, prompt_templates=tmp_path / "prompts.json")
    assert rows == rows_of(EPISODES, seed=7, decay_weight=0.9, templates=templates)
    saved = json.loads((tmp_path / "rows_rewards_settings.json").read_text())
    assert saved["settings"] | {"seed": 7, "decay_weight": 0.9} == saved["settings"]
    assert saved["settings"]["game"]["options"]["match"] == "word"
    assert saved["settings"]["prompt_templates"]["sha256"] == prompts.templates_digest(templates)
    assert printed == {name: saved[name] for name in ("games", "rows", "weights")}
    outcomes = dict.fromkeys(("attacker wins", "defender wins", "attacker breaks the rules", "tied game"), 1)
    assert printed["games"] == {"episodes": 4, **outcomes}
    assert printed["rows"] == {"attacker": 2, "defender": 2, "sft": 0, "negative": 0, "empty": 0, "dropped": 0}
    assert printed["weights"] == {"attacker": 1.0, "defender": 1.0}


def test_several_inputs_make_one_set_of_rows_in_either_format(run, tmp_path):
    inputs = ([ATTACKER_WON, TIED], [DEFENDER_WON, DEFENDER_WON])
    for name in ("rows.json", "rows.jsonl"):
        rows, printed = run(inputs=inputs, seed=5, output_data_path=tmp_path / name)
        assert rows == rows_of([*inputs[0], *inputs[1]], seed=5) and printed["games"]["episodes"] == 4


def test_all_messages_become_rows_up_to_the_end_of_each_game(run):
    rows, results = run(messages="all", training_prompt="play")
    said = [message for game, end in zip(EPISODES, (4, 2, 4, 1), strict=True) for message in game["history"][:end]]
    assert [(row["role"], row["target"]) for row in rows] == [(m["role"], m["content"].strip()) for m in said]
    assert {(row["reward"], row["weight"]) for row in rows} == {(1.0, 1.0)}
    assert results["rows"]["attacker"] == 6
    assert rows[-1]["query"] == prompts.play_prompt(GAME, [], WORD, 5)


def test_losers_and_ties_become_rows_unless_all_messages_do(run, refuse):
    assert "leave out --losers and --ties" in refuse(messages="all", losers=1)
    rows, printed = run(losers=0.5, ties=0.1, seed=3)
    assert rows == rows_of(EPISODES, losers=0.5, ties=0.1, seed=3)
    negative = sum(row["reward"] < 0 for row in rows)
    assert printed["rows"] == {"attacker": 5, "defender": 5, "sft": 0, "negative": negative, "empty": 0, "dropped": 0}
    assert 0 < negative < len(rows)


def test_role_weights_none_weigh_every_row_1(run):
    games = (4 * [ATTACKER_WON] + [DEFENDER_WON, TIED],)
    rows, printed = run(inputs=games, role_weights="none", losers=0.5, ties=0.25)
    assert {row["weight"] for row in rows} == {1.0} and printed["weights"] == {"attacker": 1.0, "defender": 1.0}
    rows, printed = run(inputs=games)
    assert printed["weights"] == {"attacker": 5 / 8, "defender": 5 / 2}


@pytest.mark.parametrize("won, warned", [(8, False), (10, True)])
def test_a_role_that_wins_so_seldom_that_its_rows_weigh_above_5_is_warned_of(start, tmp_path, won, warned):
    inputs = (won * [ATTACKER_WON] + [DEFENDER_WON],)
    errors = start(inputs=inputs).errors
    assert ("rows of the defender weigh 5.5" in errors and "--role_weights none" in errors) == warned
    for flags in ({"messages": "all"}, {"role_weights": "none"}):
        errors = start(inputs=inputs, output_data_path=tmp_path / f"{next(iter(flags))}.json", **flags).errors
        assert "weigh" not in errors


# --- token ids, and the layout of rows -------------------------------------------------------------------------------


def with_ids(game, **changes):
    """The game as play stores it: token ids of each reply; the second reply's text tokenizes to other ids."""
    replies = [{"finish_reason": "stop", "tokens": 3, "token_ids": [7, at]} for at in range(len(game["history"]))]
    replies[1]["retokenized"] = True
    return game | {"replies": replies} | changes


@pytest.fixture
def played(tmp_path):
    """Files of play with token ids, and the record that names their tokenizer; returns the path of the results."""

    def write_run(stem, attacker="abc", defender="abc"):
        tokenizers = {"attacker": attacker, "defender": defender}
        utils.write_json(tmp_path / f"{stem}_settings.json", {"settings": {}, "tokenizer_sha256": tokenizers})
        return write(tmp_path / f"{stem}_results.json", [with_ids(game) for game in EPISODES])

    return write_run


def test_rows_in_the_layout_of_play_carry_the_token_ids_of_the_replies(run, start, played, tmp_path):
    rows, printed = run(input_data_path=played("m"), training_prompt="play")
    assert [row.pop("target_ids") for row in rows] == [[7, index] for _, index in PAID]
    assert rows == run(training_prompt="play")[0]
    assert printed["tokenizer_sha256"] == "abc" and printed["replies"] == {"with_ids": 14, "retokenized": 4}
    (tmp_path / "rows.json").unlink()
    assert "retokenized: 4 of 14\n" in start(input_data_path=played("m"), training_prompt="play").errors


@pytest.mark.parametrize("flags", [{"training_prompt": "play", "retokenize": True}, {"training_prompt": "random"}])
def test_rows_of_other_layouts_and_retokenized_rows_have_texts_alone(run, played, flags):
    rows, printed = run(input_data_path=played("m"), **flags)
    assert rows == run(**flags)[0] and "tokenizer_sha256" not in printed


def test_token_ids_of_an_unknown_tokenizer_or_of_two_are_refused(refuse, run, played, tmp_path):
    for paths in ([played("one"), played("two", "def", "def")], [played("two", defender="def")]):
        line = refuse(input_data_path=paths, training_prompt="play")
        assert "different tokenizers" in line and "--retokenize True" in line
    (tmp_path / "two_settings.json").unlink()
    line = refuse(input_data_path=tmp_path / "two_results.json", training_prompt="play")
    assert "two_settings.json beside it does not name the tokenizer" in line
    bad = with_ids(DEFENDER_WON, replies=[{"token_ids": [1, -1]}])
    assert "episodes0.jsonl:1: reply 0: 'token_ids' must be" in refuse(inputs=([bad],), training_prompt="play")


def test_the_layout_of_rows_is_read_from_their_record(run, played, tmp_path):
    digest = prompts.templates_digest(prompts.default_templates(GAME))
    run(input_data_path=played("m"), training_prompt="play")
    layout = {"training_prompt": "play", "chat_template": None, "prompt_templates": digest}
    assert layout_of(tmp_path / "rows.json") == layout | {"tokenizer_sha256": "abc"}
    run()
    assert layout_of(tmp_path / "rows.json") == layout | {"training_prompt": "random", "tokenizer_sha256": None}
    assert layout_of(tmp_path / "foreign.json") is None
    utils.write_json(tmp_path / "foreign_rewards_settings.json", {"settings": 1})
    with pytest.raises(UserError, match="not the record of a file of rows"):
        layout_of(tmp_path / "foreign.json")


# --- more of the program ---------------------------------------------------------------------------------------------


def test_empty_targets_stay_unless_they_are_to_be_dropped(run):
    inputs = ([episode(" ", "Hm", "So?", "apple"), DEFENDER_WON],)
    rows, printed = run(inputs=inputs)
    assert [row["target"] for row in rows] == ["", "So?", "Yes", GUESS] and printed["rows"]["empty"] == 1
    kept, printed = run(inputs=inputs, drop_empty_targets=True)
    assert kept == rows[1:]
    assert printed["rows"] == {"attacker": 1, "defender": 2, "sft": 0, "negative": 0, "empty": 0, "dropped": 1}


def test_the_documented_examples_are_what_the_program_reads_and_writes(run, tmp_path):
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    game, game_rows, sft = map(json.loads, re.findall(r"```json\n(.*?)```", readme, re.DOTALL)[:3])
    sft += [{"query": "Q", "target": "T", "prompt": "P", "answer": "A"}]
    rows, printed = run(inputs=([game],), training_prompt="play", sft_data_path=write(tmp_path / "sft.jsonl", sft))
    for row, documented in zip(rows, game_rows, strict=False):
        assert row.pop("query").startswith(documented.pop("query").removesuffix("..."))
        assert row == documented
    queries = ["Name a stringed instrument."] * 2 + [utils.alpaca_to_row(sft[2])["prompt"], "Q"]
    targets = ["The violin.", "The violin.", "violon", "T"]
    expected = [{"query": q, "target": t, "type": "sft", "weight": 1.0} for q, t in zip(queries, targets, strict=True)]
    assert rows[2:] == expected and printed["rows"]["sft"] == 4


# --- bad input -------------------------------------------------------------------------------------------------------

BAD_EPISODES = [
    ({"target_word": WORD, "max_turns": 5}, "'history' is missing"),
    (TIED | {"history": [{"role": "judge", "content": "x"}]}, "message 0: 'role' is 'judge'"),
    (TIED | {"game": "bargain"}, "a game of 'bargain', not of 'taboo'"),
]


@pytest.mark.parametrize("broken, complaint", BAD_EPISODES)
def test_a_bad_episode_is_named_by_file_and_line(refuse, broken, complaint):
    line = refuse(inputs=([TIED], [TIED, broken]))
    assert "episodes1.jsonl:2: " in line and complaint in line
    with pytest.raises(ValueError, match=f"episode 1: {complaint}"):
        rows_of([TIED, broken])


@pytest.mark.parametrize(
    "rule, error",
    [
        ({"decide": lambda self, task, history: int("take 2")}, "invalid literal for int"),
        ({"rewards": lambda self, task, history, outcome: {"attacker": -1.0}}, "pays -1.0 to 'attacker'"),
    ],
)
def test_an_error_in_a_games_own_rules_keeps_its_traceback_and_the_episode_is_named(caplog, rule, error):
    game = type("Mine", (Taboo,), rule)()
    with pytest.raises(ValueError, match=error) as raised:
        judge_games(game, [("episode 0", TIED)])
    assert not isinstance(raised.value, UserError)  # run_program prints only UserError as one line
    assert caplog.messages == ["episode 0: the rules of Adversarial Taboo raised an error"]


def test_sft_rows_without_texts_and_too_few_rows_of_games_are_refused(refuse, tmp_path):
    sft = write(tmp_path / "sft.jsonl", [{"query": "Q", "target": "T"}] * 9)
    assert "4 rows of games, fewer than --min_game_rows 5" in refuse(min_game_rows=5, sft_data_path=sft)
    line = refuse(inputs=([TIED, TIED],))
    assert "0 rows of games, fewer than --min_game_rows 1" in line and "'tied game': 2" in line
    write(sft, [{"query": "Q", "target": "T"}, {"query": "Q"}])
    assert "sft.jsonl:2: 'target' is missing" in refuse(sft_data_path=sft)


def test_finished_rows_are_kept_and_their_counts_printed_again(run, start, monkeypatch):
    _, printed = run()
    monkeypatch.setattr(rows_room, "judge_games", None)
    again = start()
    assert json.loads(again.output) == printed and "rows_rewards_settings.json: all is there" in again.errors
