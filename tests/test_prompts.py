import json
import random

import pytest
from conftest import load_golden
from scripted import messages

from tools.common.errors import UserError
from tools.games import prompts
from tools.games.taboo import DEFENDER_WINS, Taboo

GAME = Taboo()
TEMPLATES = {
    "rules": [f"RULE {index} in {{max_turns}} turns.\n" for index in range(8)],
    "attacker_instruction": "Hint at `{target_word}`.",
    "defender_instruction": "Answer.",
}


PLAYED = [case for case in load_golden("queries.json")["fixed_converter"]["cases"] if not case["raises"]]


@pytest.mark.parametrize("case", PLAYED, ids=range(len(PLAYED)))
def test_play_prompts_have_the_recorded_structure(case):
    prompt = prompts.play_prompt(GAME, case["history"], case["target_word"], case["max_turns"], TEMPLATES)
    rule = f"RULE 0 in {case['max_turns']} turns.\n"
    middle = case["history_block"] or "The game is just initialized."
    attacker = case["next_player"] == "attacker"
    instruction = f"Hint at `{case['target_word']}`." if attacker else "Answer."
    assert GAME.next_role(case["target_word"], case["history"]) == case["next_player"]
    assert prompt == f"{rule}{middle}\n\n### Instruction: {instruction}{case['ends_with']}"


SAMPLES = load_golden("queries.json")["random_converter"]["seed_samples"]["samples"]
ASKED, ANSWERED = messages(GAME, "QQ1"), messages(GAME, "QQ1", "RR1")
HISTORY_KINDS = {"empty": [], "attacker_last": ASKED, "defender_last": ANSWERED}


def assemble(draws, history):
    """The training prompt that recorded draws give in the recorded layout, for the word TGT and 7 turns."""
    separator = "\n" + draws["dialog_separator"]
    own, other = draws["player_names"]
    speaker = "defender" if draws["history_kind"] == "attacker_last" else "attacker"
    told = "".join(f"{separator}{own if m['role'] == speaker else other}: {m['content']}" for m in history)
    rule = f"RULE {draws['rule_index']} in 7 turns.\n"
    system, start = f"{draws['system_name']}: ", "The game is just initialized. "
    instruction = "Hint at `TGT`." if speaker == "attacker" else "Answer."
    answer = f"{separator}{own}: "
    if draws["prompt_type"] == "chat":
        return f"{separator}{system}{rule}\n\n{instruction}{'' if history else start}{told}{answer}"
    if draws["prompt_type"] == "chat_inverse":
        return f"{told}{separator}{system}{rule}\n\n{instruction}{'' if history else start}{answer}"
    game = f"{separator}Game History:{told}\n\n" if history else start
    request = instruction[:-1] + ": " if draws["alpaca_instruction_as_prefix"] else instruction + answer
    return (system if draws["alpaca_system_prefix"] else "") + rule + game + request


@pytest.mark.parametrize("draws", SAMPLES, ids=lambda draws: f"{draws['history_kind']}-{draws['seed']}")
def test_training_prompts_follow_the_recorded_draws(draws):
    history = HISTORY_KINDS[draws["history_kind"]]
    prompt = prompts.training_prompt(GAME, history, "TGT", 7, rng=random.Random(draws["seed"]), templates=TEMPLATES)
    assert prompt == assemble(draws, history)


def test_slots_are_filled_by_plain_replacement_and_never_twice():
    history = messages(GAME, "{max_turns} {target_word} {} {0}", "fine")
    for prompt in (
        prompts.play_prompt(GAME, history, "{max_turns}", 4, TEMPLATES),
        prompts.training_prompt(GAME, history, "{max_turns}", 4, rng=random.Random(0), templates=TEMPLATES),
    ):
        assert "{max_turns} {target_word} {} {0}" in prompt and "Hint at `{max_turns}`" in prompt


def test_each_shipped_rule_text_of_taboo_tells_the_sentence_that_the_judge_takes_as_a_guess():
    sentence = "I know the word! It is `target word`!"
    assert GAME.judge(messages(GAME, "Hm?", sentence.replace("target word", "art")), "art", 3).outcome == DEFENDER_WINS
    rules = prompts.default_templates(GAME)["rules"]
    assert len(rules) == 8 and all(sentence in rule and "{max_turns}" in rule for rule in rules)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"rules": "One text.\n"}, "'rules' must be a list of strings that end in a newline"),
        ({"rules": [7]}, "'rules' must be a list of strings that end in a newline"),
        ({"rules": []}, "'rules' must be a list of strings that end in a newline"),
        ({"answer": 7}, "the judge does not accept 'answer' .7. as"),
        ({"attacker_instruction": None}, "'attacker_instruction' is missing or not a string"),
        ({"attacker_instruction": "No word."}, "'attacker_instruction' lacks the slot {target_word}"),
        ({"answer": "Ich kenne das Wort! Es ist {target_word}!"}, "the judge does not accept 'answer' .*right guess"),
        ({"defender_instruction": ...}, "'defender_instruction' is missing"),
    ],
)
def test_a_prompt_file_with_a_fault_is_refused_by_name(tmp_path, change, problem):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({name: text for name, text in (TEMPLATES | change).items() if text is not ...}))
    with pytest.raises(UserError, match=f"prompts.json: {problem}"):
        prompts.load_templates(path, GAME)


def test_three_turns_that_another_tool_wrote_as_3_0_give_the_same_prompts():
    assert "in 3 turns." in prompts.play_prompt(GAME, [], "art", 3.0, TEMPLATES)
    drawn = prompts.training_prompt(GAME, [], "art", 3.0, rng=random.Random(0), templates=TEMPLATES)
    assert "in 3 turns." in drawn
