"""tests/golden/verify_release.py, with stand-ins for the release's modules: they answer by the recorded files."""

import textwrap

import pytest
from conftest import GOLDEN
from helpers import Fork, finish

from tools.common.files import read_json

PARTS = ["judge", "derivatives", "rewards, special"]
STAND_IN = """
    import json, re
    from pathlib import Path

    class TextBlob: pass  # verify_release.py puts a class of its own here

    Released = TextBlob
    judge, words, rewards, inputs = (
        json.loads(Path({folder!r}, name + ".json").read_text())
        for name in ("judge", "derivatives", "rewards", "rewards_special")
    )

    def answer(case):
        if case["raises"]:
            message = case.get("raises_message") or ""
            raise KeyError(message.strip("'")) if case["raises"] == "KeyError" else eval(case["raises"])(message)
        return case

    def get_game_outcome(history, word, max_turns):
        asked = [history, word, max_turns]
        case = next(case for case in judge if [case["history"], case["target_word"], case["max_turns"]] == asked)
        if TextBlob is not Released and not case["same_with_word_pluralize"]:
            case = case["with_word_pluralize"]
        found = answer(case)
        return found["outcome"], found["history_length"]

    def get_derivative_words(word):
        return answer(next(case for case in words if case["word"] == word))["derivatives"]

    def compute_self_play_sample_rewards(episodes, decay):
        asked = dict(episodes=episodes, decay_weight=decay)
        case = answer(next(case for case in rewards["special"] if inputs[case["name"]] == asked))
        for episode, keys in zip(episodes, case["message_keys_after"]):
            for message, names in zip(episode["history"], keys):
                message.update(dict.fromkeys(names))
        return [dict(reward=reward) for reward in case["rewards"]]
"""


@pytest.fixture
def release(tmp_path):
    for name in ("utils", "dataloaders", "arguments", "trainers", "train"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "tools").mkdir()
    code = textwrap.dedent(STAND_IN).replace("{folder!r}", repr(str(GOLDEN)))
    (tmp_path / "tools/assign_rewards.py").write_text(code)
    return tmp_path


def verify(release, status: int) -> list[str]:
    words = [GOLDEN / "verify_release.py", "--release", release, "--only", *PARTS]
    return finish(Fork(words, cwd=release), status).splitlines()


def test_recorded_answers_are_found_equal_and_a_changed_one_is_named(release):
    recorded = {name: len(read_json(GOLDEN / f"{name}.json")) for name in ("judge", "derivatives")}
    cases = sum(recorded.values()) + len(read_json(GOLDEN / "rewards.json")["special"])
    assert f"in all {cases} of {cases} cases" in verify(release, 0)[-1]

    module = release / "tools/assign_rewards.py"
    module.write_text(
        module.read_text()
        + """
    ordinary = get_derivative_words
    def get_derivative_words(word):
        return ordinary(word)[::-1] if word == "apple" else ordinary(word)
    """.replace("\n    ", "\n")
    )
    *_, difference, _rewards, total = verify(release, 1)
    assert difference.startswith("    differs: 'apple'") and f"in all {cases - 1} of {cases} cases" in total
