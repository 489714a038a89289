"""Questions outside the game: what they ask, how models are asked, and what is asked again."""

import json
import random
from statistics import mean

import pytest
import torch
from helpers import call

from tools import tiny_world
from tools.tiny.build import GAMES, corpus, scripted_games
from tools.tiny.models import byte_tokenizer, random_llama
from tools.tiny.players import FACT_QUERY, fact_rows, load_lexicon
from tools.tiny.questions import KINDS, Question, by_word, choice_logprobs, make_questions

LEXICON = load_lexicon()


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    return make_questions()


def words_of(question: Question) -> set[str]:
    text = " ".join([question.context, *question.choices])
    return {question.word} | set(text.split()) & set(LEXICON.words)


def test_all_words_of_a_question_are_on_one_side_of_the_split(asked):
    held_out = set(LEXICON.held_out())
    for question in asked:
        assert words_of(question) <= held_out if question.held_out else not words_of(question) & held_out
    assert 0.1 < mean(question.held_out for question in asked) < 0.3


def test_the_lexicon_gives_the_right_answers_and_no_others(asked):
    clues = {word: set(LEXICON.shared[word]) for word in LEXICON.words}
    for kind, word, _, context, choices in asked:
        given = context.removeprefix(FACT_QUERY).split()
        said = [choice.split() for choice in choices]
        assert len(set(choices)) == 4
        if kind == "meet":
            fits = [set(given) <= clues[one] for (one,) in said]
            assert all(set(given) & clues[one] for (one,) in said)  # the others have one of the clues
        elif kind == "common":
            fits = [all(one in clues[each] for each in given) for (one,) in said]
            assert all(any(one in clues[each] for each in given) for (one,) in said)
        elif kind == "shared":
            assert given[0] == word
            fits = [given[1] in clues[one] for (one,) in said]
            assert all(clues[one] & clues[word] for (one,) in said)
        else:
            fits = [all(given[0] in clues[one] for one in three) for three in said]
        assert fits == [True, False, False, False]


def test_there_are_hundreds_of_each_kind_and_no_row_of_facts_or_games_asks_so(asked):
    rng = random.Random(0)
    games = {name: scripted_games(scripted, LEXICON, rounds=1, rng=rng) for name, scripted in GAMES.items()}
    texts = "\n".join(corpus(fact_rows(LEXICON, rng, 1500), games))
    for kind in KINDS:
        own = [question for question in asked if question.kind == kind]
        assert len(own) > 700
        forms = [f"{question.context}{choice}" for question in own for choice in question.choices]
        assert not any(form in texts for form in forms if len(form.split()) > 4), kind


def test_a_choice_has_the_sum_of_its_tokens_log_probabilities_after_bos_and_context():
    tokenizer, questions = byte_tokenizer(), make_questions()[::800]
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = random_llama(len(tokenizer), 0, initializer_range=0.5, **shape).eval()
    sums = choice_logprobs(model, tokenizer, questions)
    assert sums.shape == (len(questions), 4)
    for question, row in zip(questions, sums, strict=True):
        for choice, found in zip(question.choices, row, strict=True):
            start = [tokenizer.bos_token_id, *tokenizer.encode(question.context, add_special_tokens=False)]
            end = tokenizer.encode(choice, add_special_tokens=False)
            with torch.no_grad():
                logprobs = model(torch.tensor([start + end])).logits[0].log_softmax(-1)
            expected = sum(logprobs[len(start) - 1 + place, token] for place, token in enumerate(end))
            assert found == pytest.approx(expected.item(), rel=1e-4)


def test_counts_by_word_are_those_of_the_columns_questions(asked):
    values = [float(question.word == "cat") for question in asked]
    sizes, totals = by_word(values, "meet")
    assert sum(sizes) == sum(question.kind == "meet" for question in asked)
    assert sum(totals) == sum(question.kind == "meet" and question.word == "cat" for question in asked)


def test_reason_asks_each_model_of_a_loop_once_and_again_when_it_has_changed(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer()
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}

    def save(name: str, seed: int) -> None:
        for part in (random_llama(len(tokenizer), seed, **shape), tokenizer):
            part.save_pretrained(tmp_path / name)

    for seed, name in enumerate(("base", "imitation/model", "epoch2/model/merged", "epoch10/model")):
        save(name, seed)
    out = call(tiny_world.main, "reason", "--output_dir", tmp_path).output
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert list(lines)[-4:] == ["base", "imitation", "epoch2", "epoch10"]
    assert lines["imitation"][-3:] == ["+0.000", "[+0.000,", "+0.000]"]
    assert 0.1 < float(lines["epoch10"][1]) < 0.4  # a random model draws
    before = json.loads((tmp_path / "questions.json").read_text())["models"]
    save("epoch2/model/merged", 9)
    times = []
    monkeypatch.setattr(
        "tools.tiny.questions.choice_logprobs", lambda *args: times.append(1) or choice_logprobs(*args)
    )
    call(tiny_world.main, "reason", "--output_dir", tmp_path)
    after = json.loads((tmp_path / "questions.json").read_text())["models"]
    assert len(times) == 1
    assert {name for name in before if before[name] != after[name]} == {"epoch2"}
