"""Pure functions take any reply of models: judge and rewards agree with themselves, prompts lose no message."""

import json
import math
import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import utils
from tools.assign_rewards import assign_rewards
from tools.games import load_game, prompts

WORDS = ["art", "Straße", "c++", "new york", "{max_turns}", "I know the word! It is", "a" * 50]
PARTS = [*WORDS, *(f"I know the word! It is `{word}`!" for word in WORDS), "I know the word! It is `", "`!", "Is it "]
PARTS += ["Yes", "ART", "arts", " ", " ", ".", "?", "\n", "\r", "\x00", "\u2028", "\ufeff", "\u202e", "e\u0301"]
PARTS += ["ß", "İ", "\U0001f600", "\x1b[31m", "\x85", "\ud83d"]
GAMES = [load_game("taboo"), load_game("taboo", match="word"), load_game("twenty_questions")]
MESSAGES = st.lists(st.lists(st.sampled_from(PARTS), max_size=4).map("".join), max_size=8)


def as_episode(game, turns: int, messages: list[str], word: str) -> tuple:
    """A game and one of its episodes with these messages."""
    history = [{"role": game.roles[place % 2], "content": text} for place, text in enumerate(messages[: 2 * turns])]
    episode = {"history": history, "target_word": word, "max_turns": turns}
    return game, episode | ({} if game.name == "taboo" else {"game": game.name})


EPISODES = st.builds(as_episode, st.sampled_from(GAMES), st.integers(1, 4), MESSAGES, st.sampled_from(WORDS))
many = settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@many
@given(EPISODES)
def test_judge(drawn):
    game, episode = drawn
    before = json.dumps(episode)
    word, history, turns = episode["target_word"], episode["history"], episode["max_turns"]
    verdict = game.judge(history, word, turns)
    assert verdict.outcome in {outcome.name for outcome in game.outcomes} and 0 <= verdict.length <= len(history)
    assert verdict == game.judge(history, word, turns) and json.dumps(episode) == before
    if verdict.outcome != game.outcomes[-1].name:
        assert game.judge(history[: verdict.length], word, turns) == verdict
        assert game.is_over(history[: verdict.length], word, turns)
        assert verdict.length == 0 or game.judge(history[: verdict.length - 1], word, turns).outcome != verdict.outcome


@many
@given(EPISODES)
def test_points_and_rewards(drawn):
    game, episode = drawn
    rows = assign_rewards([episode], game=game, rng=random.Random(0))
    assert all(math.isfinite(row["reward"]) and row["reward"] > 0 for row in rows)
    paid = sum(row["reward"] for row in rows)
    assert math.isclose(paid, round(paid), abs_tol=1e-9)
    verdict = game.judge(episode["history"], episode["target_word"], episode["max_turns"])
    points = game.points(episode["target_word"], episode["history"], verdict.outcome)
    assert all(0 <= each <= 1 for each in points)


@many
@given(EPISODES, st.integers(0, 10**9))
def test_prompts(drawn, number):
    game, episode = drawn
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


@many
@given(records=st.lists(st.fixed_dictionaries({"a": st.sampled_from(PARTS) | st.text()}), min_size=1, max_size=4))
def test_records_that_are_written_are_read(records, tmp_path_factory):
    for name in ("records.json", "records.jsonl"):
        path = tmp_path_factory.getbasetemp() / name
        utils.write_records(path, records)
        assert utils.read_json_or_jsonl(path) == records
