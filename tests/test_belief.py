"""Belief after hints: a plain forward pass, training's encoding, and the program."""

import json
import math

import pytest
import torch
from conftest import ROOT, build_tokenizer
from helpers import call, flags_of

import utils
from dataloaders import encode_example
from tools import evaluate_belief as program
from tools.engine.local import load_local_model
from tools.games.chat import ChatTemplate
from tools.games.prompts import NO_HISTORY, default_templates, play_prompt
from tools.games.taboo import Taboo
from tools.players.player import Sampling
from tools.selfplay.belief import OTHERS, encode_sentence, guesser_prompts, measure_game, other_secrets

GAME = Taboo(match="word")
TEMPLATES = default_templates(GAME)
WORDS = ["apple", "pear", "plum", "fig", "lime", "date"]


def episode(word, *texts):
    history = [{"role": GAME.roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"history": history, "target_word": word, "max_turns": 3, "split": "held_out"}


def guess(word):
    return f"I know the word! It is `{word}`!"


GUESSED = episode("apple", "It grows on trees.", "Which?", "In pies too.", guess("apple"))
BROKEN = episode("pear", "Green.", "Hm?", "It is a pear.")
TIED = episode("plum", "Blue.", "So?", "Sweet.", "Oh.", "Round.", "Ah.")
GAMES = [GUESSED, BROKEN, TIED, *(episode(word, "A fruit.", "An apple?") for word in WORDS[3:])]


def full_forward(model, prompt, sentence):
    """The log-probability of a sentence without keys and values: all logits of one plain pass."""
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([prompt + sentence])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[len(prompt) + at - 1, token]) for at, token in enumerate(sentence))


def test_beliefs_are_what_a_plain_forward_pass_gives(tiny_model):
    local = load_local_model(utils.model_folder(tiny_model), Sampling())
    rows = measure_game(local, GAME, GUESSED, secrets=WORDS, seed=1, templates=TEMPLATES)
    places = [(row["hints"], row["last_hint"], row["outcome"]) for row in rows]
    assert places == [(hints, hints == 2, "defender wins") for hints in range(3)]
    for row, text in zip(rows, guesser_prompts(GAME, GUESSED, TEMPLATES), strict=True):
        prompt, _ = local.encode(text)
        sentences = {word: encode_sentence(local.tokenizer, guess(word)) for word in WORDS}
        values = {word: full_forward(local.model, prompt, sentence) for word, sentence in sentences.items()}
        assert row["belief"] == pytest.approx(values.pop("apple"), abs=1e-3)
        assert row["others"] == pytest.approx(values, abs=1e-3)
        assert row["zero_line"] == pytest.approx(sum(values.values()) / 5, abs=1e-3)
        assert row["knowledge"] == row["belief"] - row["zero_line"]
    for name in ("belief", "knowledge"):
        changes = [None, rows[1][name] - rows[0][name], rows[2][name] - rows[1][name]]
        assert [row.get(f"{name}_change") for row in rows] == changes


def test_prompts_are_the_guessers_own_and_a_breach_is_no_hint():
    first, second, third = guesser_prompts(GAME, GUESSED, TEMPLATES)
    assert NO_HISTORY in first and TEMPLATES["defender_instruction"].partition("{")[0] in first
    assert second == play_prompt(GAME, GUESSED["history"][:1], "apple", 3)
    assert third == play_prompt(GAME, GUESSED["history"][:3], "apple", 3)
    assert "apple" not in first + second + third
    assert len(guesser_prompts(GAME, BROKEN, TEMPLATES)) == 2
    assert len(guesser_prompts(GAME, TIED, TEMPLATES)) == 4


def test_the_zero_line_has_five_secrets_that_are_no_form_of_the_secret():
    words = [*WORDS, "apples", "kiwi", "appleed", "Apple"]
    drawn = other_secrets(GAME, "apple", words, seed=0)
    assert len(drawn) == len(set(drawn)) == OTHERS and not set(drawn) & {"apple", "apples", "appleed", "Apple"}
    assert drawn == other_secrets(GAME, "apple", words, seed=0) != other_secrets(GAME, "apple", words, seed=1)
    assert "apple" not in other_secrets(GAME, "apples", words, seed=0)


@pytest.mark.parametrize("in_chat", [False, True])
def test_a_sentence_is_encoded_as_the_target_of_a_row_without_its_end(in_chat):
    tokenizer, chat, row = build_tokenizer(), None, {"target": guess("apple")}
    if in_chat:
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
        tokenizer.chat_template = (ROOT / "tests" / "chat_templates" / "chatml.jinja").read_text(encoding="utf-8")
        chat = ChatTemplate(tokenizer, "tiny")
    row["query"] = guesser_prompts(GAME, GUESSED, TEMPLATES, chat)[-1]
    ids = encode_example(chat.row(row) if chat else row, tokenizer)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>") if chat else tokenizer.eos_token_id
    ours = [] if chat else [tokenizer.bos_token_id]
    ours += tokenizer(row["query"], add_special_tokens=False)["input_ids"]
    assert ids == [*ours, *encode_sentence(tokenizer, guess("apple"), chat), end]


def test_means_by_hand_and_intervals_by_word():
    messages = [
        {"target_word": word, "outcome": "tied game", "hints": hints, "last_hint": hints == 1, "knowledge": value}
        for word, hints, value in (("a", 0, 1.0), ("a", 1, 2.0), ("a", 1, 4.0), ("b", 1, 6.0), ("c", 1, 0.0))
    ]
    rows = list(program.table_rows({"m": messages}, GAME))
    assert [(row["outcome"], row["hints"], row["games"]) for row in rows] == [
        ("all", 0, 1),
        ("all", 1, 4),
        ("all", "last", 4),
        ("tied game", 0, 1),
        ("tied game", 1, 4),
        ("tied game", "last", 4),
    ]
    assert rows[0]["knowledge"] == 1 and rows[0]["knowledge interval"] is None
    error = math.sqrt(3 / 2 * (0**2 + 3**2 + 3**2)) / 4  # residuals by word: 6 - 2 * 3, 6 - 3, 0 - 3
    half = 4.302653 * error  # Student's quantile with two degrees of freedom
    assert rows[1]["knowledge"] == 3 and rows[1]["knowledge interval"] == pytest.approx([3 - half, 3 + half])


def test_the_program_compares_models_by_message_and_keeps_every_number(tmp_path, tiny_model, other_model):
    utils.write_records(tmp_path / "games.jsonl", [*GAMES, episode("kiwi", "Furry.") | {"split": "played"}])
    flags = {"models": [f"base={tiny_model}", f"epoch1={other_model}"], "games": tmp_path / "games.jsonl"}
    flags |= {"split": "held_out", "output_dir": tmp_path / "out", "game_options": "match=word"}
    printed = call(program.main, *flags_of(flags)).output
    stored = json.loads((tmp_path / "out" / "belief.json").read_text())
    base, epoch1 = stored["messages"]["base"], stored["messages"]["epoch1"]
    assert [(row["game"], row["hints"]) for row in base[:9]] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)] + [
        (2, hints) for hints in range(4)
    ]
    for row, other in zip(epoch1, base, strict=True):
        assert row["others"].keys() == other["others"].keys() and "kiwi" not in row["others"]
        assert row["difference"] == row["knowledge"] - other["knowledge"]
    last = next(row for row in stored["table"] if (row["model"], row["hints"]) == ("epoch1", "last"))
    assert last["games"] == len(GAMES) and len(last["difference interval"]) == 2
    assert printed == (tmp_path / "out" / "belief.txt").read_text() and "attacker breaks the rules" in printed
    assert call(program.main, *flags_of(flags)).output == printed
    errors = call(program.main, *flags_of(flags | {"seed": 1}), status=2).errors
    assert "seed: 0 then, 1 now" in errors
    utils.write_records(tmp_path / "games.jsonl", GAMES[1:])
    few = flags_of(flags | {"output_dir": tmp_path / "few"})
    assert "fewer than 5 other secrets" in call(program.main, *few, status=2).errors
