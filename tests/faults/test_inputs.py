"""Whatever stands in a file or comes from a model: pure functions answer, or refuse it in one line."""

import json
import math
import os

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import utils
from tools.games import load_game, prompts
from tools.selfplay.rewards import Games, message_shares, paid_rows

SHORT, EACH = 60, 500  # inputs of a test, of a round of a campaign
WORDS = ["art", "Straße", "c++", "new york", "{max_turns}", "I know the word! It is", "a" * 50]
PARTS = [
    *WORDS,
    "I know the word! It is `",
    "`!",
    " ",
    "\n",
    "Is it ",
    "Yes",
    "\x00",
    "\u2028",
    "\U0001f600",
    "ART",
    "arts",
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=8), max_size=6).map("".join)
ODD = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | TEXTS | st.lists(st.integers(), max_size=2)
GAMES = [load_game("taboo"), load_game("taboo", match="word"), load_game("twenty_questions")]


def pure(*strategies):
    """A test over drawn inputs, so many as the campaign asks for; hypothesis prints the one that fails, shrunk."""

    def decorate(check):
        def test(trials):
            count = SHORT if trials.rounds == 1 else EACH * trials.rounds
            how = settings(
                max_examples=count,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            lost = 1
            try:
                seed(trials.only or 0)(how(given(*strategies)(check)))()
                lost = 0
            finally:
                trials.count("pure inputs", count, lost)

        return test

    return decorate


@st.composite
def episodes(draw, game=None):
    """Games as players of any kind could have left them."""
    game = game or draw(st.sampled_from(GAMES))
    turns = draw(st.integers(1, 4))
    messages = draw(st.lists(TEXTS, max_size=2 * turns))
    history = [{"role": game.roles[place % 2], "content": text} for place, text in enumerate(messages)]
    shown = {"history": history, "target_word": draw(st.sampled_from(WORDS)), "max_turns": turns}
    return game, shown | ({} if game.name == "taboo" else {"game": game.name})


@pure(episodes())
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


@pure(episodes())
def test_points_and_rewards(drawn):
    game, episode = drawn
    games = Games(game)
    games.add(episode)
    rows = list(paid_rows(games, [episode], decay_weight=0.8, prompt_fn=lambda history, task, turns: "q"))
    assert all(math.isfinite(row["reward"]) and row["reward"] > 0 for row in rows)
    paid = sum(row["reward"] for row in rows)
    assert math.isclose(paid, round(paid), abs_tol=1e-9)
    verdict = game.judge(episode["history"], episode["target_word"], episode["max_turns"])
    points = game.points(episode["target_word"], episode["history"], verdict.outcome)
    assert all(0 <= each <= 1 for each in points)


@pure(st.integers(1, 200), st.floats(0.05, 1))
def test_message_shares(count, decay):
    try:
        shares = message_shares(count, decay)
    except ValueError as error:
        assert "too small" in str(error)
        return
    assert len(shares) == count and math.isclose(sum(shares), 1) and sorted(shares) == shares


@pure(episodes(), st.randoms(use_true_random=False))
def test_prompts(drawn, rng):
    game, episode = drawn
    word, history, turns = episode["target_word"], episode["history"], episode["max_turns"]
    if game.is_over(history, word, turns):
        return
    templates = prompts.load_templates(game.prompt_file, game)
    for prompt in (
        prompts.play_prompt(game, history, word, turns, templates),
        prompts.training_prompt(game, history, word, turns, rng=rng, templates=templates),
    ):
        assert all(message["content"].strip() in prompt for message in history)
        assert "{max_turns}" not in prompt.replace(word, "") or any("{max_turns}" in m["content"] for m in history)


@pure(st.dictionaries(st.sampled_from(["history", "target_word", "max_turns", "game", "extra"]), ODD), st.data())
def test_episodes_that_are_none(record, data):
    if data.draw(st.booleans()):
        message = st.dictionaries(st.sampled_from(["role", "content", "x"]), ODD | st.sampled_from(["attacker"]))
        record["history"] = data.draw(st.lists(message, max_size=3))
    games = Games(GAMES[0])
    refused(games.add, record)


@pure(st.dictionaries(st.sampled_from(["query", "prompt", "target", "answer", "instruction", "input", "output"]), ODD))
def test_rows_and_alpaca_records(record):
    refused(utils.row_texts, dict(record))
    refused(utils.alpaca_to_row, dict(record))


@pure(st.dictionaries(st.sampled_from(["rules", "attacker_instruction", "defender_instruction", "judge"]), ODD))
def test_prompt_files(content):
    path = os.path.join(os.environ["TRIAL_FOLDER"], "prompts.json")
    with open(path, "w") as file:
        json.dump(content, file)
    refused(prompts.load_templates, path, GAMES[0])


JSON = st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
PIECES = st.sampled_from(
    ["[", "]", "{", "}", ",", "\n", '"', "\ufeff", " ", "[" * 2000, "1e999", "NaN", "9" * 5000, "\r"]
)


@pure(st.lists(PIECES | JSON.map(json.dumps) | st.text(max_size=3), max_size=8), st.booleans())
def test_readers_of_records(parts, skip_bad):
    path = write("".join(parts).encode("utf-8", "surrogatepass"))
    refused(lambda: list(utils.iter_records(path, skip_bad=skip_bad, on_skip=lambda message: None)))


@pure(st.lists(st.fixed_dictionaries({"a": JSON}), max_size=4), st.booleans())
def test_records_that_are_written_are_read(records, lines):
    text = json.dumps(records)  # what Python cannot write it need not read
    if "NaN" in text or "Infinity" in text:
        return
    path = os.path.join(os.environ["TRIAL_FOLDER"], "records.jsonl" if lines else "records.json")
    utils.write_records(path, records)
    if records or not lines:
        assert utils.read_json_or_jsonl(path) == records


@pure(st.binary(max_size=60))
def test_word_lists(content):
    refused(utils.read_words, write(content))


@pytest.fixture(autouse=True)
def trial_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIAL_FOLDER", str(tmp_path))


def write(content: bytes) -> str:
    path = os.path.join(os.environ["TRIAL_FOLDER"], "input")
    with open(path, "wb") as file:
        file.write(content)
    return path


def refused(call, *values) -> None:
    """The call answers, or refuses in one line."""
    try:
        call(*values)
    except (ValueError, OSError) as error:
        assert str(error) and "\n" not in str(error)
