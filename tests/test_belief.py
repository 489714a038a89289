"""Belief after hints: training's log-probability and encoding as the yardsticks, and the program."""

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, build_llama, build_tokenizer, load_chat_template
from helpers import call, flags_of
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dataloaders import SPAGCollator, encode_example
from tools import evaluate_belief as program
from tools.common.files import read_json_or_jsonl, write_records
from tools.engine.flags import EngineFlags
from tools.engine.local import LocalModel, load_local_model
from tools.engine.random_model import random_llama, train_tokenizer
from tools.games.chat import ChatTemplate
from tools.games.prompts import NO_HISTORY, answer, default_templates, load_templates, play_prompt
from tools.games.taboo import Taboo
from tools.lab.world import build
from tools.lab.world.players import Skill, load_lexicon
from tools.measure import belief
from tools.measure.belief import draw_candidates, encode_sentences, guesser_prompts, measure_game, with_secret
from tools.players.player import Sampling
from trainers import label_logprob

GAME = Taboo(match="word")
TEMPLATES = default_templates(GAME)
WORDS = ["apple", "pear", "plum", "fig", "lime", "date"]


def episode(word, *texts):
    history = [{"role": GAME.roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"history": history, "target_word": word, "max_turns": 3, "split": "held_out"}


def guess(word):
    return f"I know the word! It is `{word}`!"


def message_lines(folder) -> list[dict]:
    return read_json_or_jsonl(folder / "belief_messages.jsonl")


GUESSED = episode("apple", "It grows on trees.", "Which?", "In pies too.", guess("apple"))
BROKEN = episode("pear", "Green.", "Hm?", "It is a pear.")
TIED = episode("plum", "Blue.", "So?", "Sweet.", "Oh.", "Round.", "Ah.")
GAMES = [GUESSED, BROKEN, TIED, *(episode(word, "A fruit.", "An apple?") for word in WORDS[3:])]


def plain_logprobs(model, prompt: list[int], sentences: list[list[int]]) -> list[float]:
    """The log-probabilities of sentences as training computes them: a row for each, in padded batches of four."""
    rows = []
    for sentence in sentences:
        numbers = {"weight": 1, "reward": 1, "kind": "game"}
        rows.append({"input_ids": prompt + sentence, "labels": [-100] * len(prompt) + sentence, **numbers})
    collate = SPAGCollator(build_tokenizer(), vocab_size=model.config.vocab_size)
    logprobs = []
    for start in range(0, len(rows), 4):
        batch = collate(rows[start : start + 4])
        with torch.no_grad():
            means = label_logprob(model, model, batch, pads_left=collate.pad_left)
        logprobs += (means * (batch["labels"] != -100).sum(1)).tolist()
    return logprobs


@pytest.fixture(params=["bytes", "merges", "chatml"])
def local(request, tmp_path) -> LocalModel:
    """A tiny model with a tokenizer of bytes, one with merges, or one with a chat template."""
    tokenizer = build_tokenizer()
    if request.param == "merges":
        tokenizer = train_tokenizer([text for game in GAMES for text in guesser_prompts(GAME, game, TEMPLATES)], 400)
    if request.param == "chatml":
        chatml = load_chat_template("chatml")
        tokenizer = build_tokenizer("<|im_start|>", "<|im_end|>", chat_template=chatml)
    for part in (build_llama(0, len(tokenizer)), tokenizer):
        part.save_pretrained(tmp_path / "model")
    return load_local_model(tmp_path / "model", EngineFlags(chat_template=request.param == "chatml"))


def test_log_shares_and_ranks_are_those_of_a_row_for_each_prompt_and_guess(local, monkeypatch):
    monkeypatch.setattr(belief, "SENTENCES_IN_A_TREE", 4)  # two trees a prompt
    codec = local.codec
    guesses = [guess(word) for word in WORDS]
    messages = 0
    for game in [*GAMES, episode("lime", "A lime.")]:  # the last one has no hint
        prompts, secret = guesser_prompts(GAME, game, TEMPLATES, codec.chat), game["target_word"]
        rows = measure_game(local, GAME, game, candidates=WORDS, templates=TEMPLATES)
        assert [(row["hints"], row["last_hint"]) for row in rows] == [
            (hints, hints == len(prompts) - 1 > 0) for hints in range(len(prompts))
        ]
        for row, text in zip(rows, prompts, strict=True):
            prompt, _ = codec.encode(text)
            sentences = encode_sentences(codec.tokenizer, text, guesses, codec.chat)
            values = dict(zip(WORDS, plain_logprobs(local.model, prompt, sentences), strict=True))
            assert row["belief"] == pytest.approx(values[secret], abs=2e-4)
            assert row["logprobs"] == pytest.approx(values, abs=3e-4) and next(iter(row["logprobs"])) == secret
            total = math.log(math.fsum(math.exp(value - values[secret]) for value in values.values()))
            assert row["log_share"] == pytest.approx(-total, abs=4e-4)
            assert row["rank"] == sorted(values.values(), reverse=True).index(values[secret]) + 1
            messages += 1
    assert messages == 16


class Table:
    """A model whose next token follows from the last one: log-probabilities by hand."""

    device, dtype, _supports_attention_backend = torch.device("cpu"), torch.float32, False

    def __init__(self, logprobs):
        self.logprobs = torch.tensor(logprobs)  # (last token, next token)

    def __call__(self, input_ids, **how):
        return SimpleNamespace(logits=self.logprobs[input_ids])


def test_log_share_and_rank_by_hand():
    half, quarter = math.log(0.5), math.log(0.25)
    model = Table([[half, quarter, quarter], [quarter, half, quarter], [quarter, quarter, half]])
    logprobs = belief.sentence_logprobs(model, [2, 0], [[1, 1], [0, 0], [2, 0]])  # 1/8, 1/4, 1/16
    assert logprobs == pytest.approx([math.log(1 / 8), math.log(1 / 4), math.log(1 / 16)])
    assert belief.log_share(logprobs) == pytest.approx(math.log(2 / 7)) and belief.rank(logprobs) == 2
    assert belief.rank(logprobs[1:]) == 1 and belief.rank(logprobs[::-1]) == 3
    assert belief.log_share([-3.0] * 7) == pytest.approx(-math.log(7)) and belief.rank([-3.0] * 7) == 1
    assert belief.rank([math.nan, -1.0]) == 2 and belief.rank([-1.0, math.nan]) == 2


def test_true_hints_raise_log_share_and_false_ones_do_not():
    """A model learns from true hints about 40 words to name them; then it hears new games with true or false hints."""
    words, templates = load_lexicon().held_out(), load_templates(build.PROMPTS, build.GAME)

    def games(seed: int, skill: Skill, rounds: int = 1) -> list[dict]:
        return build.scripted_games(load_lexicon(), words * rounds, random.Random(seed), skill)

    heard = [
        (prompt, answer(build.GAME, game["target_word"], templates)[1])
        for game in games(0, build.TRUE_HINTS, rounds=20)
        for prompt in guesser_prompts(build.GAME, game, templates)[1:]
    ]
    tokenizer = train_tokenizer((prompt + guessed for prompt, guessed in heard), vocab_size=3072)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = random_llama(len(tokenizer), 0, **shape, max_position_embeddings=256)
    local = LocalModel(model, tokenizer, Sampling())
    rows = [
        (local.codec.encode(prompt)[0], *encode_sentences(tokenizer, prompt, [guessed])) for prompt, guessed in heard
    ]
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=4e-3), random.Random(0)
    for _ in range(200):
        drawn = draw.sample(rows, 12)
        ids = pad_sequence([torch.tensor(prompt + guessed) for prompt, guessed in drawn], batch_first=True)
        labels = [torch.tensor([-100] * len(prompt) + guessed) for prompt, guessed in drawn]
        labels = pad_sequence(labels, batch_first=True, padding_value=-100)
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        learned = labels[:, 1:] != -100  # logits are most of the work
        cross_entropy(model.lm_head(hidden[learned]), labels[:, 1:][learned]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def rise(skill: Skill) -> float:
        how = {"candidates": words, "templates": templates}
        measured = [measure_game(local, build.GAME, game, **how) for game in games(1, skill)[::2]]
        return sum(messages[-1]["log_share"] - messages[0]["log_share"] for messages in measured) / len(measured)

    assert rise(build.TRUE_HINTS) > max(1, rise(replace(build.TRUE_HINTS, stray=1)))


SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
MODELS = {  # keys and values; those of a window; recurrent states; states of both kinds; positions without numbers
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8},
    "rwkv": {"attention_hidden_size": 32},
    "mamba2": {"head_dim": 16, "num_heads": 4, "expand": 2, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": LINEAR,
    "falcon_h1": {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 8}
    | {"mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_chunk_size": 8},
    "bloom": {"n_head": 2, "n_layer": 2},
}


@pytest.mark.parametrize("kind", MODELS)
def test_sentences_behind_a_prompt_have_the_logprobs_of_rows_of_their_own_in_models_of_all_kinds(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SMALL | MODELS[kind])).eval()
    draw = random.Random(0)
    prompt = [draw.randrange(5, 97) for _ in range(20)]
    sentences = [[7, 8, *(draw.randrange(5, 97) for _ in range(length)), 11] for length in (1, 2, 3, 1)]
    # One more is there twice, one is the beginning of another, and two have nothing in common with any.
    sentences += [sentences[0], sentences[2][:3], [9], [12, 7, 8]]
    expected = plain_logprobs(model, prompt, sentences)
    assert belief.sentence_logprobs(model, prompt, sentences) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("length, by_tree", [(3, True), (4, False), (6, False)])
def test_a_sentence_that_leaves_the_window_of_a_model_does_not_see_the_whole_prompt(length, by_tree, monkeypatch):
    """The window is 8 tokens, of which the sentences take 6 but for the last token, which predicts nothing."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma3_text"](**SMALL | MODELS["gemma3_text"])).eval()
    draw = random.Random(0)
    prompt, *sentences = [[draw.randrange(5, 97) for _ in range(tokens)] for tokens in (length, 6, 6, 6)]
    trees = []
    monkeypatch.setattr(belief, "tree_mask", lambda *how, mask=belief.tree_mask: trees.append(how) or mask(*how))
    logprobs = belief.sentence_logprobs(model, prompt, sentences)
    assert logprobs == pytest.approx(plain_logprobs(model, prompt, sentences), abs=1e-4)
    assert bool(trees) == by_tree


def test_the_mask_of_a_tree_shows_a_node_its_prefixes_and_the_prompt():
    node_of = belief.prefix_nodes([(7, 8, 9), (7, 8, 5, 6), (4,), (3, 7)])
    assert list(node_of) == [(), (7,), (7, 8), (7, 8, 5), (3,)]
    mask = belief.tree_mask(node_of, 2, torch.float32)
    assert (mask == 0).int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0],  # two tokens of the prompt, then the nodes
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 0, 1],
    ]
    assert mask.min() == torch.finfo(torch.float32).min


def test_prompts_are_the_guessers_own_and_a_breach_is_no_hint():
    first, second, third = guesser_prompts(GAME, GUESSED, TEMPLATES)
    assert NO_HISTORY in first and TEMPLATES["defender_instruction"].partition("{")[0] in first
    assert second == play_prompt(GAME, GUESSED["history"][:1], "apple", 3)
    assert third == play_prompt(GAME, GUESSED["history"][:3], "apple", 3)
    assert "apple" not in first + second + third
    assert len(guesser_prompts(GAME, BROKEN, TEMPLATES)) == 2
    assert len(guesser_prompts(GAME, TIED, TEMPLATES)) == 4


def test_forms_of_a_word_are_one_candidate_and_the_right_one_is_always_among_them():
    words = [*WORDS, "apples", "kiwi", "Apple"]
    drawn = draw_candidates(GAME, words, 200, seed=0)
    assert len(drawn) == 7 and len({word.lower()[:5] for word in drawn}) == 7
    assert drawn == draw_candidates(GAME, words, 200, seed=0) != draw_candidates(GAME, words, 200, seed=1)
    assert with_secret(GAME, "kiwis", ["apple", "kiwi", "pear"]) == ["kiwis", "apple", "pear"]
    few = draw_candidates(GAME, words, 3, seed=0)
    for secret in words:
        candidates = with_secret(GAME, secret, few)
        assert candidates[0] == secret and len(candidates) == 3
        assert not any(belief._are_forms(GAME, secret, other) for other in candidates[1:])


def test_a_secret_that_is_a_form_of_several_candidates_leaves_all_games_fewer():
    game, words, secrets = Taboo(), ["arts", "artist", "pear", "fig"], ["art", "pear", "plum"]
    among = belief.fewest_candidates(game, secrets, words)
    of_secrets = [with_secret(game, secret, words, among) for secret in secrets]
    assert len(with_secret(game, "art", words)) == among == 3
    assert {len(candidates) for candidates in of_secrets} == {among} and [each[0] for each in of_secrets] == secrets


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
    (sentence,) = encode_sentences(tokenizer, row["query"], [guess("apple")], chat)
    assert ids == [*ours, *sentence, end]


def message(hints: int, log_share: float, rank: int = 1, last: int = 1) -> dict:
    numbers = {"log_share": log_share, "rank": rank, "belief": 2 * log_share, "logprobs": {"a": -1, "b": -2, "c": -3}}
    return {"hints": hints, "last_hint": hints == last, **numbers}


def test_means_by_number_of_hints_and_after_the_last_hint_by_hand():
    """Four games have one hint, a fifth has two."""
    messages = [message(1, -2.0, rank=2), message(1, -4.0), message(1, -6.0), message(0, -1.0), message(1, -0.5)]
    rows = program.mean_rows("m", [*messages, message(1, -2.5, last=2), message(2, -1.5, rank=3, last=2)])
    values = [tuple(row[name] for name in ("hints", "games", "log_share", "rank_1", "belief")) for row in rows]
    assert values == [(0, 1, -1, 1, -2), (1, 5, -3, 0.8, -6), (2, 1, -1.5, 0, -3), ("last", 5, -2.8, 0.6, -5.6)]
    assert {(row["model"], row["candidates"]) for row in rows} == {("m", 3)}
    (row,) = program.mean_rows("m", [message(0, -1.0), message(0, math.nan)])
    assert math.isnan(row["log_share"])  # without the NaN it would look better than it is


def test_the_program_writes_a_line_a_message_and_means_by_number_of_hints(tmp_path, tiny_model, other_model):
    write_records(tmp_path / "games.jsonl", [*GAMES, episode("kiwi", "Furry.") | {"split": "played"}])
    flags = {"models": [f"base={tiny_model}", f"epoch1={other_model}"], "games": tmp_path / "games.jsonl"}
    flags |= {"split": "held_out", "output_dir": tmp_path / "out", "game_options": "match=word"}
    printed = call(program.main, *flags_of(flags)).output
    messages = message_lines(tmp_path / "out")
    base, epoch1 = ([line for line in messages if line["model"] == name] for name in ("base", "epoch1"))
    of_games = [(game, hints) for game, number in enumerate((3, 2, 4)) for hints in range(number)]
    assert [(line["game"], line["hints"]) for line in base[:9]] == of_games
    for line, other in zip(epoch1, base, strict=True):  # the split takes games, not words
        assert line["logprobs"].keys() == other["logprobs"].keys() == {*WORDS, "kiwi"}
        assert line["target_word"] == other["target_word"] and line["log_share"] != other["log_share"]
        assert line["belief"] == pytest.approx(line["logprobs"][line["target_word"]], abs=1e-4)
    table = json.loads((tmp_path / "out" / "belief.json").read_text())["table"]
    last = next(row for row in table if (row["model"], row["hints"]) == ("epoch1", "last"))
    after_last = [line["log_share"] for line in epoch1 if line["last_hint"]]
    assert last["games"] == len(GAMES) == len(after_last) and last["candidates"] == 7
    assert last["log_share"] == pytest.approx(sum(after_last) / len(after_last))
    assert printed == (tmp_path / "out" / "belief.txt").read_text()
    assert f"| epoch1 | last | 6 | 7 | {last['log_share']:.3f} |" in printed
    last_line = printed.splitlines()[-1]
    assert f"epoch1 after the last hint: log_share {last['log_share']:.3f}" in last_line and "6 games" in last_line
    assert call(program.main, *flags_of(flags)).output == printed
    errors = call(program.main, *flags_of(flags | {"seed": 1}), status=2).errors
    assert "seed: 0 then, 1 now" in errors
    others = {"split": "played", "most_candidates": 5, "chat_template": True, "max_length": 100, "dtype": "bfloat16"}
    for name, value in others.items():
        assert f"{name}: " in call(program.main, *flags_of(flags | {name: value}), status=2).errors


def test_candidates_come_from_a_file_and_one_word_alone_is_refused(tmp_path, tiny_model):
    write_records(tmp_path / "games.jsonl", GAMES)
    (tmp_path / "words.txt").write_text("pear\nfig\ngoat\n")
    flags = {"models": f"m={tiny_model}", "games": tmp_path / "games.jsonl", "output_dir": tmp_path / "out"}
    call(program.main, *flags_of(flags | {"candidates": tmp_path / "words.txt"}))
    for line in message_lines(tmp_path / "out"):
        assert len(line["logprobs"]) == 3 and line["target_word"] in line["logprobs"]
        assert line["target_word"] != "pear" or line["logprobs"].keys() == {"pear", "fig", "goat"}
    write_records(tmp_path / "games.jsonl", GAMES[:1])
    alone = flags_of(flags | {"output_dir": tmp_path / "alone"})
    assert "other candidates" in call(program.main, *alone, status=2).errors


def test_numbers_of_a_model_whose_logits_are_nan_are_null(tmp_path, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.lm_head.weight.data.fill_(math.nan)
    for part in (model, build_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    write_records(tmp_path / "games.jsonl", GAMES[:2])
    flags = {"models": f"m={tmp_path / 'model'}", "games": tmp_path / "games.jsonl", "output_dir": tmp_path / "out"}
    assert "| m | last | 2 | 2 | nan | 0.000 | nan |" in call(program.main, *flags_of(flags)).output
    assert "NaN" not in (tmp_path / "out" / "belief_messages.jsonl").read_text()
    assert {line["log_share"] for line in message_lines(tmp_path / "out")} == {None}
