import copy
import json
import os
import random
import re
import subprocess
import sys
import tracemalloc

import pytest
from conftest import ROOT, load_golden
from hypothesis import given
from hypothesis import strategies as st

from tools import assign_rewards as program
from tools.assign_rewards import assign_rewards
from tools.flags import parse_flags
from tools.games import prompts
from tools.games.taboo import Taboo
from tools.selfplay import rows as rows_room
from tools.selfplay.rewards import Games, in_memory, message_shares, paid_rows
from tools.selfplay.rows import RowFlags
from utils import read_json_or_jsonl, run_program

GAME, WORD = Taboo(), "apple"
WINNERS = {"attacker wins": "attacker", "defender wins": "defender"}
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


def rows_of(episodes, seed=0, **settings):
    return assign_rewards(episodes, rng=random.Random(seed), **settings)


def rows_by(prompt_fn, episodes, decay_weight=0.8):
    """Rows with queries of one's own."""
    games = Games(GAME, in_memory(episodes))
    return list(paid_rows(games, decay_weight=decay_weight, prompt_fn=prompt_fn))


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [pytest.param(run, id=run["set"]) for run in load_golden("rewards.json")["runs"]])
def test_rows_are_the_recorded_ones_to_the_last_digit(run):
    episodes = {recorded["id"]: recorded for recorded in load_golden("rewards.json")["episodes"]}
    rows = rows_of([episodes[i] for i in run["episode_ids"]], decay_weight=run["decay_weight"])
    keys = ("role", "target", "reward", "weight")
    assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in run["records"]]


def test_a_recorded_row_stems_from_the_recorded_message():
    golden = load_golden("rewards.json")
    records = golden["runs"][0]["records"]
    asked = []
    rows = rows_by(lambda *game: asked.append(game) or "?", golden["episodes"])
    for record, row, (history, target_word, max_turns) in zip(records, rows, asked, strict=True):
        source = golden["episodes"][record["episode"]]
        assert history == source["history"][: record["message"]] and row["query"] == "?"
        assert (target_word, max_turns) == (source["target_word"], source["max_turns"])


def test_each_message_of_the_winner_up_to_the_decisive_one_gives_a_row():
    rows = rows_by(lambda history, word, turns: f"{len(history)} {word} {turns}", EPISODES, 0.5)
    first, second = 1 / 3, 2 / 3  # 0.5 / (0.5 + 1) and 1 / (0.5 + 1)
    assert rows == [
        {"query": "0 apple 5", "target": "Hungry?", "reward": first, "role": "attacker", "weight": 1.0},
        {"query": "2 apple 5", "target": "For what?", "reward": second, "role": "attacker", "weight": 1.0},
        {"query": "1 apple 5", "target": "Yes", "reward": first, "role": "defender", "weight": 1.0},
        {"query": "3 apple 5", "target": GUESS, "reward": second, "role": "defender", "weight": 1.0},
    ]


def test_weights_balance_the_roles_by_games():
    rows = rows_of([ATTACKER_WON, DEFENDER_WON, ATTACKER_WON, ATTACKER_WON, TIED])
    assert {(row["role"], row["weight"]) for row in rows} == {("attacker", 4 / 6), ("defender", 4 / 2)}


def test_shares_of_a_reward_decay_backwards():
    assert message_shares(3, 0.8) == pytest.approx([0.64 / 2.44, 0.8 / 2.44, 1 / 2.44])
    assert message_shares(2, 1) == [0.5, 0.5]
    assert message_shares(1, 0.001) == [1.0]
    assert message_shares(0, 0.8) == []


@pytest.mark.parametrize("decay_weight", [0, -0.8, 1.25, float("nan")])
def test_a_decay_outside_its_bounds_is_refused(decay_weight):
    with pytest.raises(ValueError, match="decay_weight is .* above 0 and at most 1"):
        rows_of(EPISODES, decay_weight=decay_weight)


@pytest.mark.parametrize("decay_weight", [1e-200, 1e-320])
def test_a_decay_too_small_to_compute_with_is_refused(decay_weight):
    with pytest.raises(ValueError, match="too small for a game with 3 messages"):
        message_shares(3, decay_weight)


def test_a_winner_without_messages_counts_as_a_game_and_gives_no_row():
    alone = {"history": [{"role": "defender", "content": "apple"}], "target_word": WORD, "max_turns": 3}
    rows = rows_of([alone, DEFENDER_WON])
    assert [(row["role"], row["weight"]) for row in rows] == [("defender", 1.0)] * 2


def test_queries_are_training_prompts_drawn_in_the_order_of_rows():
    rng = random.Random(3)
    expected = [
        prompts.training_prompt(GAME, game["history"][:index], WORD, 5, rng=rng)
        for game, index in ((ATTACKER_WON, 0), (ATTACKER_WON, 2), (DEFENDER_WON, 1), (DEFENDER_WON, 3))
    ]
    assert [row["query"] for row in rows_of(EPISODES, seed=3)] == expected
    assert [row["query"] for row in rows_of(EPISODES, seed=4)] != expected


def test_another_set_of_prompts_is_used():
    templates = copy.deepcopy(prompts.default_templates(GAME))
    templates["rules"] = ["Just play {max_turns} turns.\n"] * 8
    assert all("Just play 5 turns." in row["query"] for row in rows_of(EPISODES, templates=templates))


def test_the_kind_of_match_decides_who_gets_rows():
    game = episode("Well?", "Let us start", target_word="art")
    assert len(rows_of([game])) == 1 and rows_of([game], game=Taboo("word")) == []


def test_the_episodes_are_not_modified():
    before = copy.deepcopy(EPISODES)
    rows_of(EPISODES)
    assert before == EPISODES


def test_leftovers_of_an_earlier_run_in_the_messages_do_not_matter():
    stale = copy.deepcopy(EPISODES)
    for message in stale[0]["history"]:
        message |= {"query": "old", "target": "old", "reward_coeff": 3.2}
    assert rows_of(stale) == rows_of(EPISODES)


def test_episodes_that_change_between_the_passes_are_an_error():
    named = [("", each) for each in EPISODES]
    games = Games(GAME, lambda on_skip=None: named)
    named.pop()
    with pytest.raises(ValueError):
        list(paid_rows(games, decay_weight=0.8, prompt_fn=lambda *game: ""))


def test_streaming_keeps_no_episodes_in_memory():
    def read(on_skip=None):
        return (("", episode(f"Hello number {i}", "x" * 1000, "So", "An apple")) for i in range(2000))

    tracemalloc.start()
    try:
        rows = paid_rows(Games(GAME, read), decay_weight=0.8, prompt_fn=lambda *game: "")
        assert sum(1 for _ in rows) == 4000
        assert tracemalloc.get_traced_memory()[1] < 200_000  # 2 MB of text went by
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "broken, message",
    [
        ({"target_word": WORD, "max_turns": 5}, "episode 1: 'history' is missing"),
        (TIED | {"history": "Hello"}, "episode 1: 'history' is str"),
        (TIED | {"history": [{"role": "judge", "content": "x"}]}, "episode 1: message 0: 'role' is 'judge'"),
        (TIED | {"max_turns": 0}, "episode 1: 'max_turns' is 0"),
    ],
)
def test_an_episode_that_is_no_game_is_refused_with_its_index(broken, message):
    with pytest.raises(ValueError, match=message):
        rows_of([TIED, broken])


texts = st.sampled_from(["Hello", "An apple", "apples", GUESS, "I know the word! It is `pear`!", "", " Well "])
games = st.lists(texts, max_size=8).map(lambda game: episode(*game, max_turns=3))
decays = st.floats(min_value=0.05, max_value=1)


@given(games, decays)
def test_rewards_of_a_decided_game_rise_and_sum_to_one(game, decay_weight):
    outcome, length = GAME.judge(game["history"], game["target_word"], game["max_turns"])
    rows = rows_of([game], decay_weight=decay_weight)
    winner = WINNERS.get(outcome)
    won = [message["content"].strip() for message in game["history"][:length] if message["role"] == winner]
    rewards = [row["reward"] for row in rows]
    assert [row["target"] for row in rows] == won and {row["role"] for row in rows} <= {winner}
    assert rewards == sorted(rewards) and sum(rewards) == pytest.approx(1 if winner else 0)


@given(st.lists(games, max_size=12), decays)
def test_both_roles_weigh_the_same_if_both_have_won(episodes, decay_weight):
    verdicts = [GAME.judge(game["history"], game["target_word"], game["max_turns"]) for game in episodes]
    decided = sum(outcome in WINNERS for outcome, _ in verdicts)
    rows = rows_of(episodes, decay_weight=decay_weight)
    for role in {row["role"] for row in rows}:
        total = sum(row["reward"] * row["weight"] for row in rows if row["role"] == role)
        assert total == pytest.approx(decided / 2)


# --- the program -----------------------------------------------------------------------------------------------------


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the program in this process on files of a fresh folder; gives the rows it wrote and what it printed."""

    def run_once(*flags, inputs=(EPISODES,), output="rows.json", overwrite=True):
        paths = [write(tmp_path / f"episodes{number}.jsonl", records) for number, records in enumerate(inputs)]
        command = ["assign_rewards.py", "--input_data_path", *paths, "--output_data_path", str(tmp_path / output)]
        monkeypatch.setattr(sys, "argv", [*command, "--overwrite", str(overwrite), *map(str, flags)])
        capsys.readouterr()
        program.main()
        return read_json_or_jsonl(tmp_path / output), json.loads(capsys.readouterr().out)

    return run_once


@pytest.fixture
def refuse(tmp_path, run, capsys):
    """Run the program on bad input; gives the one line it says and asserts that it wrote nothing."""

    def run_badly(*flags, **settings):
        with pytest.raises(SystemExit) as exit_info:
            run_program(lambda: run(*flags, **settings))
        lines = capsys.readouterr().err.splitlines()
        assert exit_info.value.code == 2 and len(lines) == 1
        assert not [path for path in tmp_path.iterdir() if path.name.startswith("rows") or path.suffix == ".tmp"]
        return lines[0]

    return run_badly


@pytest.mark.parametrize("launch", [["tools/assign_rewards.py"], ["-m", "tools.assign_rewards"]])
def test_the_program_runs_as_a_file_and_as_a_module_without_torch(tmp_path, launch):
    path = write(tmp_path / "episodes.jsonl", EPISODES)
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not to be imported')")
    command = [sys.executable, *launch, "--input_data_path", path, "--output_data_path", str(tmp_path / "rows.json")]
    environment = {"PYTHONPATH": f".:{tmp_path}", "PATH": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert read_json_or_jsonl(tmp_path / "rows.json") == rows_of(EPISODES)


@pytest.mark.parametrize("output", ["rows.json", "rows.jsonl"])
def test_both_formats_hold_the_rows_that_the_function_gives(run, output):
    rows, _ = run("--seed", 5, "--decay_weight", 0.5, output=output)
    assert rows == rows_of(EPISODES, seed=5, decay_weight=0.5)


def test_several_inputs_make_one_set_of_rows(run):
    rows, printed = run(inputs=([ATTACKER_WON, TIED], [DEFENDER_WON, DEFENDER_WON]))
    assert rows == rows_of([ATTACKER_WON, TIED, DEFENDER_WON, DEFENDER_WON])
    assert printed["games"]["episodes"] == 4


def test_settings_and_counts_stand_beside_the_rows(run, tmp_path):
    _, printed = run("--match", "word", "--seed", 7, "--decay_weight", 0.9)
    saved = json.loads((tmp_path / "rows_rewards_settings.json").read_text())
    assert saved["settings"] | {"seed": 7, "decay_weight": 0.9} == saved["settings"]
    assert saved["settings"]["game"]["options"] == {"match": "word"}
    default = prompts.templates_digest(prompts.default_templates(GAME))
    assert saved["settings"]["prompt_templates"]["sha256"] == default
    assert printed == {key: saved[key] for key in ("games", "rows", "weights", "mean_rewards")}
    assert printed["mean_rewards"] == {"attacker": 0.5, "defender": 0.5}
    assert printed["games"] == {
        "episodes": 4,
        "attacker wins": 1,
        "defender wins": 1,
        "attacker breaks the rules": 1,
        "tied game": 1,
        "skipped": 0,
    }
    assert printed["rows"] == {"attacker": 2, "defender": 2, "sft": 0, "empty": 0, "dropped": 0}
    assert printed["weights"] == {"attacker": 1.0, "defender": 1.0}


def test_all_messages_become_rows_up_to_the_end_of_each_game(run):
    rows, results = run("--messages", "all", "--training_prompt", "play")
    told = [message for game in EPISODES for message in game["history"][: GAME.judge(*game_of(game)).length]]
    assert [(row["role"], row["target"]) for row in rows] == [(m["role"], m["content"].strip()) for m in told]
    assert {(row["reward"], row["weight"]) for row in rows} == {(1.0, 1.0)}
    assert results["rows"]["attacker"] == 6
    assert rows[-1]["query"] == prompts.play_prompt(
        GAME, [], WORD, 5
    )  # the breach ends the last game with its first message


def game_of(game: dict) -> tuple:
    """What the judge takes."""
    return game["history"], game["target_word"], game["max_turns"]


def test_the_play_prompt_can_be_trained_on(run):
    rows, _ = run("--training_prompt", "play")
    games = ((ATTACKER_WON, 0), (ATTACKER_WON, 2), (DEFENDER_WON, 1), (DEFENDER_WON, 3))
    assert [row["query"] for row in rows] == [
        prompts.play_prompt(GAME, game["history"][:i], WORD, 5) for game, i in games
    ]


def test_the_kind_of_match_can_be_chosen(run):
    inputs = ([episode("Well?", "Let us start", target_word="art")],)
    assert len(run(inputs=inputs)[0]) == 1 and run("--match", "word", "--min_game_rows", 0, inputs=inputs)[0] == []


def test_a_file_of_prompts_is_used_and_its_digest_kept(run, tmp_path):
    templates = prompts.default_templates(GAME) | {"rules": ["Just play {max_turns} turns.\n"] * 8}
    (tmp_path / "prompts.json").write_text(json.dumps(templates))
    rows, _ = run("--prompt_templates", tmp_path / "prompts.json", "--training_prompt", "play")
    assert all(row["query"].startswith("Just play 5 turns.") for row in rows)
    rows, _ = run("--prompt_templates", tmp_path / "prompts.json")
    assert rows == rows_of(EPISODES, templates=templates)
    saved = json.loads((tmp_path / "rows_rewards_settings.json").read_text())
    assert saved["settings"]["prompt_templates"]["sha256"] == prompts.templates_digest(templates)


@pytest.mark.parametrize(
    "record, query, target",
    [
        ({"query": "Q", "target": "T", "prompt": "P", "answer": "A"}, "Q", "T"),
        ({"prompt": "P", "answer": "A"}, "P", "A"),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "### Instruction: Add.\n\n### Input: 1 2", "3"),
        ({"instruction": "Sing.", "input": "", "output": "La"}, "### Instruction: Sing.", "La"),
    ],
)
def test_sft_examples_of_each_form_are_appended(run, tmp_path, record, query, target):
    rows, printed = run("--sft_data_path", write(tmp_path / "sft.jsonl", [record]))
    assert rows[:4] == rows_of(EPISODES) and printed["rows"]["sft"] == 1
    assert rows[4].pop("query").startswith(query)
    assert rows[4:] == [{"target": target, "type": "sft", "weight": 1.0}]


def test_empty_targets_stay_unless_they_are_to_be_dropped(run):
    inputs = ([episode(" ", "Hm", "So?", "apple"), DEFENDER_WON],)
    rows, printed = run(inputs=inputs)
    assert [row["target"] for row in rows] == ["", "So?", "Yes", GUESS] and printed["rows"]["empty"] == 1
    kept, printed = run("--drop_empty_targets", "True", inputs=inputs)
    assert kept == rows[1:] and printed["rows"] == {"attacker": 1, "defender": 2, "sft": 0, "empty": 0, "dropped": 1}


def test_outcomes_and_lengths_are_written_on_request(run, tmp_path):
    run("--outcomes", tmp_path / "outcomes.json")
    assert read_json_or_jsonl(tmp_path / "outcomes.json") == [
        {"target_word": WORD, "outcome": "attacker wins", "length": 4},
        {"target_word": WORD, "outcome": "tied game", "length": 2},
        {"target_word": WORD, "outcome": "defender wins", "length": 4},
        {"target_word": WORD, "outcome": "attacker breaks the rules", "length": 1},
    ]


def test_the_documented_examples_are_what_the_program_reads_and_writes(run, tmp_path):
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    game, game_rows, sft, outcome = map(json.loads, examples[:4])  # the rest is of other programs
    flags = ["--sft_data_path", write(tmp_path / "sft.jsonl", sft), "--outcomes", tmp_path / "outcomes.json"]
    rows, _ = run("--training_prompt", "play", *flags, inputs=([game],))
    for row, documented in zip(rows, game_rows, strict=False):
        assert row.pop("query").startswith(documented.pop("query").removesuffix("..."))
        assert row == documented
    assert [row["target"] for row in rows[2:]] == ["The violin.", "The violin.", "violon"]
    assert read_json_or_jsonl(tmp_path / "outcomes.json") == [outcome]


def test_no_decided_game_gives_an_empty_list_where_any_number_will_do(run):
    rows, printed = run("--min_game_rows", 0, inputs=([TIED],))
    assert rows == [] and printed["weights"] == {"attacker": 0.0, "defender": 0.0}


def test_games_that_teach_nothing_are_an_error_with_what_came_of_them(refuse):
    replies = [{"finish_reason": "length", "tokens": 5, "prompt_cut": True}] * 2
    message = refuse(inputs=([TIED | {"replies": replies}, TIED],))
    assert "0 rows of games, fewer than --min_game_rows 1 (2 games: tied game 100%;" in message
    assert "replies: 50% cut off at --max_new_tokens, 50% to a prompt cut to --max_length). Likely causes:" in message
    assert "--min_game_rows 0 allows any number" in message


def test_fewer_rows_than_an_optimizer_step_are_an_error_and_sft_rows_do_not_count(refuse, tmp_path):
    sft = write(tmp_path / "sft.jsonl", [{"query": "Q", "target": "T"}] * 9)
    assert "4 rows of games, fewer than --min_game_rows 5" in refuse("--min_game_rows", 5, "--sft_data_path", sft)


def test_rows_that_are_there_are_held_to_the_number_too(run, capsys):
    run("--min_game_rows", 4)
    with pytest.raises(ValueError, match="4 rows of games, fewer than --min_game_rows 5 .4 games: attacker wins 25%"):
        run("--min_game_rows", 5, overwrite=False)


def test_the_same_seed_writes_the_same_file(run, tmp_path):
    run()
    first = (tmp_path / "rows.json").read_bytes()
    run()
    assert (tmp_path / "rows.json").read_bytes() == first


# --- bad input -------------------------------------------------------------------------------------------------------

BAD_EPISODES = [
    ({"target_word": WORD, "max_turns": 5}, "'history' is missing"),
    (TIED | {"history": [{"role": "judge", "content": "x"}]}, "message 0: 'role' is 'judge'"),
    (TIED | {"history": [{"role": "attacker", "content": 5}]}, "message 0: 'content' is 5"),
    (TIED | {"target_word": ""}, "'target_word' is ''"),
]


@pytest.mark.parametrize("broken, complaint", BAD_EPISODES)
def test_a_bad_episode_is_named_by_file_line_and_index(refuse, broken, complaint):
    line = refuse(inputs=([TIED], [TIED, broken]))
    assert "episodes1.jsonl:2: episode 1 of the file" in line and complaint in line


@pytest.mark.parametrize("broken, complaint", BAD_EPISODES)
def test_a_bad_episode_is_skipped_and_counted_on_request(run, broken, complaint):
    rows, printed = run("--skip_bad", "True", inputs=([broken, *EPISODES, broken],))
    assert rows == rows_of(EPISODES) and printed["games"]["skipped"] == 2 and printed["games"]["episodes"] == 4


@pytest.mark.parametrize(
    "name, form", [("cut.json", json.dumps), ("cut.jsonl", lambda x: "\n".join(map(json.dumps, x)))]
)
def test_a_file_that_was_cut_off_is_an_error_or_recovered_as_far_as_it_goes(refuse, run, tmp_path, name, form):
    text = form([*EPISODES, DEFENDER_WON])
    (tmp_path / name).write_text(text[:-20])
    line = refuse("--input_data_path", tmp_path / name)
    assert name in line
    rows, printed = run("--input_data_path", tmp_path / name, "--skip_bad", "True")
    assert rows == rows_of(EPISODES) and printed["games"]["skipped"] == 1


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"", "the file is empty"),
        (b'{"target_word": "\xff"}', "bad.jsonl:1: not UTF-8"),
        (b"[1]", "expected a JSON object"),
    ],
)
def test_a_file_without_episodes_is_refused(refuse, tmp_path, content, complaint):
    (tmp_path / "bad.jsonl").write_bytes(content)
    assert complaint in refuse("--input_data_path", tmp_path / "bad.jsonl")


def test_a_byte_order_mark_and_other_line_ends_do_not_matter(run, tmp_path):
    text = "\r\n\r\n".join(json.dumps(game) for game in EPISODES)
    (tmp_path / "dos.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert run("--input_data_path", tmp_path / "dos.jsonl")[0] == rows_of(EPISODES)


def test_missing_files_are_named_before_any_work(refuse, tmp_path):
    assert "nowhere.json: no such file" in refuse("--input_data_path", tmp_path / "nowhere.json")
    assert "nosft.json: no such file" in refuse("--sft_data_path", tmp_path / "nosft.json")


def test_an_input_is_never_written_over(refuse, tmp_path):
    assert "would be written over another file" in refuse("--outcomes", tmp_path / "episodes0.jsonl")


@pytest.mark.parametrize("flag", ["--outcomes", "--prompt_templates"])
def test_files_of_one_run_never_overwrite_each_other(refuse, tmp_path, flag):
    rows = write(tmp_path / "same.json", [])
    assert "would be written over another file" in refuse("--output_data_path", rows, flag, rows)


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_a_file_cut_inside_a_character_is_recovered_as_far_as_it_goes(tmp_path, form):
    games = [{**game, "target_word": "naïve 🎻"} for game in EPISODES]
    texts = [json.dumps(game, ensure_ascii=False) for game in games]
    data = ("[" + ", ".join(texts) + "]" if form == "json" else "\n".join(texts) + "\n").encode()
    last = data.rindex("🎻".encode())
    for cut in range(last, last + 5):
        (tmp_path / "cut").write_bytes(data[:cut])
        found = RowFlags(skip_bad=True).read_games(GAME, [tmp_path / "cut"])
        assert [game for game, _ in found.judged()] == games[:-1] and found.skipped == 1


def test_an_sft_example_without_texts_is_named(refuse, tmp_path):
    path = write(tmp_path / "sft.jsonl", [{"query": "Q", "target": "T"}, {"query": "Q"}])
    assert "sft.jsonl:2: 'target' is missing; every row needs" in refuse("--sft_data_path", path)
    path = write(tmp_path / "sft.jsonl", [{"instruction": "Add.", "output": 3}])
    assert "sft.jsonl:1: 'output' is missing" in refuse("--sft_data_path", path)


def test_a_failed_run_leaves_the_rows_of_the_last_one(run, tmp_path):
    before, _ = run()
    path = write(tmp_path / "sft.jsonl", [{"query": "Q"}])
    with pytest.raises(ValueError):
        run("--sft_data_path", path)
    assert read_json_or_jsonl(tmp_path / "rows.json") == before
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_rows_that_are_there_stay_and_the_same_command_says_so(run, tmp_path, capsys, monkeypatch):
    _, printed = run("--outcomes", tmp_path / "outcomes.json", overwrite=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("[!.e]*")}
    assert {path.name for path in before} == {"rows.json", "rows_rewards_settings.json", "outcomes.json"}
    with monkeypatch.context() as patch:
        patch.setattr(rows_room, "Games", None)  # no episode is judged again
        program.main()
    again = capsys.readouterr()
    assert json.loads(again.out) == printed and f"{tmp_path / 'rows.json'}: all is there" in again.err
    of_attacker = "rows of 4 games: 2 of the attacker (mean reward 0.500, weight 1.000), 2 of the defender"
    assert of_attacker in again.err and "; 0 SFT rows" in again.err
    assert before == {path: path.stat().st_mtime_ns for path in before}
    (tmp_path / "rows.json").unlink()  # or never written, since a kill came first
    assert run(overwrite=False)[1] == printed


def test_rows_of_other_settings_or_episodes_are_refused_unless_they_may_be_overwritten(run, tmp_path):
    rows, _ = run()
    sft = write(tmp_path / "sft.jsonl", [{"query": "q", "target": "t"}])
    for flags, inputs, message in (
        (["--decay_weight", 0.5, "--match", "word"], [EPISODES], "decay_weight: 0.8 then, 0.5 now"),
        (["--sft_data_path", sft], [EPISODES], "sft_data_path: None then, "),
        ([], [EPISODES[:-1]], r"input_data_path: .*episodes0.jsonl \(sha256 \w*\) then"),
    ):
        with pytest.raises(ValueError, match=f"rows_rewards_settings.json: made with other settings .*{message}"):
            run(*flags, inputs=inputs, overwrite=False)
        assert read_json_or_jsonl(tmp_path / "rows.json") == rows
    assert run("--decay_weight", 0.5)[0] != rows
    (tmp_path / "rows_rewards_settings.json").unlink()
    with pytest.raises(ValueError, match="rows.json: no rows_rewards_settings.json beside it says how it was made"):
        run(overwrite=False)


def test_a_kill_while_rows_are_written_leaves_no_rows_under_settings_that_are_not_theirs(run, tmp_path, monkeypatch):
    run()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            run("--decay_weight", 0.5)
    rows, _ = run("--decay_weight", 0.5, overwrite=False)
    assert rows == rows_of(EPISODES, decay_weight=0.5)


def test_a_decay_of_the_command_line_is_checked(refuse):
    assert "decay_weight is 1.5" in refuse("--decay_weight", 1.5)


def test_flags_are_not_abbreviated_and_take_true_or_false():
    for flags in (["--decay", "0.5"], ["--skip_bad", "maybe"]):
        with pytest.raises(SystemExit) as exit_info:
            parse_flags(program.Flags, ["--input_data_path", "x", "--output_data_path", "y", *flags], description="")
        assert exit_info.value.code == 2
