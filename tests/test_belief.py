"""Belief after hints: a stub with known log-probabilities, a plain forward pass, training's encoding, the program."""

import json
import math

import pytest
import torch
from conftest import ROOT, build_tokenizer
from helpers import call, flags_of
from transformers import LlamaConfig

import utils
from dataloaders import encode_example
from tools import evaluate_belief as program
from tools.engine.local import load_local_model
from tools.games.chat import ChatTemplate
from tools.games.prompts import NO_HISTORY, default_templates, play_prompt
from tools.games.taboo import Taboo
from tools.players.player import Sampling
from tools.selfplay.belief import (
    OTHERS,
    encode_sentence,
    guesser_prompts,
    measure_game,
    other_secrets,
    sentence_logprobs,
)

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


class Stub:
    """A model whose next token depends on the token before it, by one table if the prompt has a clue, else another."""

    config, device = LlamaConfig(num_hidden_layers=1), torch.device("cpu")

    def __init__(self, clue: list[int], with_clue: torch.Tensor, without: torch.Tensor):
        self.clue, self.tables = clue, {True: with_clue, False: without}

    def has_clue(self, ids: list[int]) -> bool:
        return any(ids[at : at + len(self.clue)] == self.clue for at in range(len(ids)))

    def forward(self, input_ids, past_key_values=None, use_cache=True, logits_to_keep=0):
        if logits_to_keep:  # the prompt
            self.table = self.tables[self.has_clue(input_ids[0].tolist())]
        return type("Output", (), {"logits": self.table[input_ids][:, -logits_to_keep:]})

    __call__ = forward

    def logprob(self, prompt: list[int], sentence: list[int]) -> float:
        table = self.tables[self.has_clue(prompt)].log_softmax(-1)
        return sum(
            float(table[before, token]) for before, token in zip([prompt[-1], *sentence], sentence, strict=False)
        )


class Local:
    """A stub with the tokenizer of a model."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.chat = model, tokenizer, None

    def encode(self, prompt):
        return [self.tokenizer.bos_token_id, *self.tokenizer(prompt, add_special_tokens=False)["input_ids"]], False


def full_forward(model, prompt, sentence):
    """The same number without keys and values: all logits of one plain pass."""
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([prompt + sentence])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[len(prompt) + at - 1, token]) for at, token in enumerate(sentence))


def test_beliefs_are_the_known_log_probabilities_of_a_stub(tokenizer):
    torch.manual_seed(0)
    tables = torch.randn(2, len(tokenizer), len(tokenizer)) * 3
    model = Stub(tokenizer("pies", add_special_tokens=False)["input_ids"], *tables)
    local = Local(model, tokenizer)
    rows = measure_game(local, GAME, GUESSED, secrets=WORDS, seed=1, templates=TEMPLATES)
    assert [(row["hints"], row["last_hint"], row["outcome"]) for row in rows] == [
        (0, False, "defender wins"),
        (1, False, "defender wins"),
        (2, True, "defender wins"),
    ]
    for row, prompt in zip(rows, guesser_prompts(GAME, GUESSED, TEMPLATES), strict=True):
        ids, _ = local.encode(prompt)
        known = {word: model.logprob(ids, encode_sentence(tokenizer, guess(word))) for word in WORDS}
        zero_line = sum(value for word, value in known.items() if word != "apple") / 5
        assert row["belief"] == pytest.approx(known.pop("apple"), abs=1e-3)
        assert row["others"] == pytest.approx(known, abs=1e-3)
        assert row["zero_line"] == pytest.approx(zero_line, abs=1e-3)
        assert row["knowledge"] == row["belief"] - row["zero_line"]
    assert rows[0]["belief"] == rows[1]["belief"] != rows[2]["belief"]  # only the second hint is a clue
    for name in ("belief", "knowledge"):
        assert [row.get(f"{name}_change") for row in rows] == [None, 0, rows[2][name] - rows[1][name]]


def test_kept_keys_and_values_give_what_a_plain_forward_pass_gives(tiny_model):
    local = load_local_model(utils.model_folder(tiny_model), Sampling())
    prompt, _ = local.encode(guesser_prompts(GAME, TIED, TEMPLATES)[-1])
    sentences = [encode_sentence(local.tokenizer, guess(word)) for word in WORDS] + [[65]]
    values = sentence_logprobs(local.model, prompt, sentences)
    assert values == pytest.approx([full_forward(local.model, prompt, each) for each in sentences], abs=1e-4)


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
    rows = program.table_rows(messages, GAME)
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
    local = load_local_model(utils.model_folder(other_model), Sampling())
    for row, other in zip(epoch1, base, strict=True):
        assert row["others"].keys() == other["others"].keys() and "kiwi" not in row["others"]
        assert row["difference"] == row["knowledge"] - other["knowledge"]
        prompt, _ = local.encode(guesser_prompts(GAME, GAMES[row["game"]], TEMPLATES)[row["hints"]])
        sentence = encode_sentence(local.tokenizer, guess(row["target_word"]))
        assert row["belief"] == pytest.approx(full_forward(local.model, prompt, sentence), abs=1e-3)
    last = next(row for row in stored["table"] if (row["model"], row["hints"]) == ("epoch1", "last"))
    assert last["games"] == len(GAMES) and len(last["difference interval"]) == 2
    assert printed == (tmp_path / "out" / "belief.txt").read_text() and "attacker breaks the rules" in printed
    assert call(program.main, *flags_of(flags)).output == printed
    errors = call(program.main, *flags_of(flags | {"seed": 1}), status=2).errors
    assert "seed: 0 then, 1 now" in errors
