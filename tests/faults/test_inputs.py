"""Pure functions take any content of files and any reply of models: they return a result or a one-line error."""

import json
import math
import os
import random
import tempfile

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import utils
from tools.assign_rewards import assign_rewards
from tools.games import load_game, prompts
from tools.selfplay.rewards import judge_games, message_shares

BATCH = 8  # inputs per example of hypothesis; drawing them together is five times faster
SHORT, LONG = 10, 125  # batches per trial: in every test run, and in a campaign
WORDS = ["art", "Straße", "c++", "new york", "{max_turns}", "I know the word! It is", "a" * 50]
PARTS = [*WORDS, *(f"I know the word! It is `{word}`!" for word in WORDS), "I know the word! It is `", "`!", "Is it "]
PARTS += ["Yes", "ART", "arts", " ", " ", ".", "?", "\n", "\r", "\x00", "\u2028", "\ufeff", "\u202e", "e\u0301"]
PARTS += ["ß", "İ", "\U0001f600", "\x1b[31m"]
CODES = {chr(0x41 + place): part for place, part in enumerate(PARTS)}  # a text is drawn as codes: one draw, not many


def decoded(text: str) -> str:
    return "".join(map(CODES.get, text))


TEXTS = st.text("".join(CODES), max_size=12).map(decoded) | st.text(max_size=8)
ODD = st.sampled_from([None, True, -1, 0, 1, 3, 10**30, [], [1, 2], {}, "attacker", "\ud800"]) | st.floats() | TEXTS
GAMES = [load_game("taboo"), load_game("taboo", match="word"), load_game("twenty_questions")]
MESSAGES = st.text("".join(CODES) + "|", max_size=30).map(lambda text: [decoded(part) for part in text.split("|")])


def as_episode(game, turns: int, messages: list[str], word: str) -> tuple:
    """Return a game and one of its episodes with these messages."""
    history = [{"role": game.roles[place % 2], "content": text} for place, text in enumerate(messages[: 2 * turns])]
    shown = {"history": history, "target_word": word, "max_turns": turns}
    return game, shown | ({} if game.name == "taboo" else {"game": game.name})


EPISODES = st.builds(as_episode, st.sampled_from(GAMES), st.integers(1, 4), MESSAGES, st.sampled_from(WORDS))


def pure(strategy, *, thousands: int):
    """Make a test from a check of one drawn input. A round of a campaign draws so many thousands."""

    def decorate(check):
        def test(trials):
            batches = LONG if trials.campaign else SHORT
            how = settings(
                max_examples=batches,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )

            def trial(rng: random.Random) -> None:
                checked = 0

                def check_batch(inputs):
                    nonlocal checked
                    for each in inputs:
                        check(each)
                        checked += 1

                seed(rng.getrandbits(60))(how(given(st.tuples(*[strategy] * BATCH))(check_batch)))()
                assert checked >= batches * BATCH

            trials.run("pure inputs", trial, short=1, each=thousands, inputs=batches * BATCH)

        return test

    return decorate


@pure(EPISODES, thousands=25)
def test_judge(drawn):
    game, episode = drawn
    before = json.dumps(episode)
    word, history, turns = episode["target_word"], episode["history"], episode["max_turns"]
    verdict = game.judge(history, word, turns)
    assert verdict.outcome in {outcome.name for outcome in game.outcomes} and 0 <= verdict.length <= len(history)
    assert verdict == game.judge(history, word, turns) and json.dumps(episode) == before
    decided = verdict.outcome != game.outcomes[-1].name
    assert not decided or game.judge(history[: verdict.length], word, turns) == verdict
    if decided:
        assert game.is_over(history[: verdict.length], word, turns)
        assert verdict.length == 0 or game.judge(history[: verdict.length - 1], word, turns).outcome != verdict.outcome


@pure(EPISODES, thousands=20)
def test_points_and_rewards(drawn):
    game, episode = drawn
    rows = assign_rewards([episode], game=game, rng=random.Random(0))
    assert all(math.isfinite(row["reward"]) and row["reward"] > 0 for row in rows)
    paid = sum(row["reward"] for row in rows)
    assert math.isclose(paid, round(paid), abs_tol=1e-9)
    verdict = game.judge(episode["history"], episode["target_word"], episode["max_turns"])
    points = game.points(episode["target_word"], episode["history"], verdict.outcome)
    assert all(0 <= each <= 1 for each in points)


@pure(st.tuples(st.integers(1, 200), st.floats(0.05, 1)), thousands=10)
def test_message_shares(drawn):
    count, decay = drawn
    try:
        shares = message_shares(count, decay)
    except ValueError as error:
        assert "too small" in str(error)
        return
    assert len(shares) == count and math.isclose(sum(shares), 1) and sorted(shares) == shares


@pure(st.tuples(EPISODES, st.integers(0, 10**9)), thousands=10)
def test_prompts(drawn):
    (game, episode), number = drawn
    word, history, turns = episode["target_word"], episode["history"], episode["max_turns"]
    if game.is_over(history, word, turns):
        return
    templates = prompts.load_templates(game.prompt_file, game)
    for prompt in (
        prompts.play_prompt(game, history, word, turns, templates),
        prompts.training_prompt(game, history, word, turns, rng=random.Random(number), templates=templates),
    ):
        assert all(message["content"].strip() in prompt for message in history)
        assert "{max_turns}" not in prompt.replace(word, "") or any("{max_turns}" in m["content"] for m in history)


def records(*keys: str):
    """Records with some of these keys."""

    def chosen(drawn: tuple) -> dict:
        mask, *values = drawn
        return {key: each for place, (key, each) in enumerate(zip(keys, values, strict=True)) if mask >> place & 1}

    return st.tuples(st.integers(0, 2 ** len(keys) - 1), *[ODD] * len(keys)).map(chosen)


HISTORIES = st.lists(records("role", "content", "x"), max_size=3) | ODD


@pure(st.tuples(records("target_word", "max_turns", "game", "replies"), HISTORIES), thousands=7)
def test_invalid_episodes(drawn):
    record, history = drawn
    refused(lambda episode: judge_games(GAMES[0], [("", episode)]), record | {"history": history})


@pure(records("query", "prompt", "target", "answer", "instruction", "input", "output"), thousands=7)
def test_rows_and_alpaca_records(record):
    refused(utils.row_texts, dict(record))
    refused(utils.alpaca_to_row, dict(record))


@pure(records("rules", "attacker_instruction", "defender_instruction", "judge"), thousands=6)
def test_prompt_files(content):
    path = write(json.dumps(content).encode())
    refused(prompts.load_templates, path, GAMES[0])


JSON = st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
PIECES = st.sampled_from(
    ["[", "]", "{", "}", ",", "\n", '"', "\ufeff", " ", "[" * 2000, "1e999", "NaN", "9" * 5000, "\r"]
)


@pure(st.lists(PIECES | JSON.map(json.dumps) | st.text(max_size=3), max_size=8), thousands=5)
def test_readers_of_records(parts):
    path = write("".join(parts).encode("utf-8", "surrogatepass"))
    refused(lambda: list(utils.iter_records(path)))


@pure(st.tuples(st.lists(st.fixed_dictionaries({"a": JSON}), max_size=4), st.booleans()), thousands=4)
def test_records_that_are_written_are_read(drawn):
    records, lines = drawn
    text = json.dumps(records)  # not valid JSON or not UTF-8
    if "NaN" in text or "Infinity" in text or "\\ud800" in text:
        return
    path = os.path.join(os.environ["TRIAL_FOLDER"], "records.jsonl" if lines else "records.json")
    utils.write_records(path, records)
    if records or not lines:
        assert utils.read_json_or_jsonl(path) == records


@pure(st.binary(max_size=60), thousands=6)
def test_word_lists(content):
    refused(utils.read_words, write(content))


@pytest.fixture(autouse=True)
def trial_folder(tmp_path, monkeypatch):
    memory = "/dev/shm"  # files are ten times faster there
    with tempfile.TemporaryDirectory(dir=memory if os.path.isdir(memory) else tmp_path) as folder:
        monkeypatch.setenv("TRIAL_FOLDER", folder)
        yield


def write(content: bytes) -> str:
    path = os.path.join(os.environ["TRIAL_FOLDER"], "input")
    with open(path, "wb") as file:
        file.write(content)
    return path


def refused(call, *values) -> None:
    """Make the call; if it raises ValueError or OSError, the message must be one line."""
    try:
        call(*values)
    except (ValueError, OSError) as error:
        assert str(error) and "\n" not in str(error)
