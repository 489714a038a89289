"""Questions outside the game: what they ask, and how models are asked."""

import random
import re

import pytest
import torch
from conftest import build_tokenizer
from helpers import call

from tools.engine.random_model import random_llama
from tools.lab.world import questions
from tools.lab.world.build import corpus, scripted_games
from tools.lab.world.players import FACT_QUERY, Skill, fact_rows, load_lexicon
from tools.lab.world.questions import HELD_OUT, Question, ask, make_questions, shares
from utils import read_json

LEXICON = load_lexicon()
SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    return make_questions(LEXICON)


def save(folder, seed: int, **shape) -> None:
    for part in (random_llama(len(build_tokenizer()), seed, **SHAPE | shape), build_tokenizer()):
        part.save_pretrained(folder)


def test_all_words_of_a_question_are_on_its_side(asked):
    held_out = set(LEXICON.held_out())
    for question in asked:
        text = " ".join([question.context, *question.choices])
        words = {question.word} | set(re.findall(r"\w+", text)) & set(LEXICON.words)
        assert words <= held_out if question.side == HELD_OUT else not words & held_out


def test_shares_are_taken_over_the_questions_of_the_finished_study(asked):
    right = [question.kind == "meet" for question in asked]
    share = {name: mean for name, (mean, _) in shares(asked, right).items()}
    held_out = sum(right for right, question in zip(right, asked, strict=True) if question.side == HELD_OUT) / 290
    assert (len(asked), share.pop("meet"), share.pop("common")) == (1684, 1, 0)
    assert share == {"meet + common": 814 / 1684, "meet + common, held-out words": held_out}


def test_the_lexicon_gives_the_right_answers_and_no_others(asked):
    clues = {word: set(LEXICON.shared[word]) for word in LEXICON.words}
    for kind, _, _, context, choices in asked:
        first, second = context.removeprefix(FACT_QUERY).split()
        texts = [choice.strip() for choice in choices]
        if kind == "meet":  # how many of the clues the word has
            fits = [len({first, second} & clues[word]) for word in texts]
        else:  # how many of the words have the clue
            fits = [(clue in clues[first]) + (clue in clues[second]) for clue in texts]
        assert len(set(texts)) == 4 and fits == [2, 1, 1, 1]


def test_no_row_of_facts_or_games_asks_so(asked):
    rng = random.Random(0)
    games = scripted_games(LEXICON, LEXICON.words, rng, Skill())
    texts = "\n".join(corpus(fact_rows(LEXICON, rng, 1500), games))
    forms = [f"{question.context}{choice}" for question in asked for choice in question.choices]
    assert not any(form in texts for form in forms)


def test_the_answer_is_the_choice_with_the_largest_log_probability_after_bos_and_context(asked, tmp_path):
    save(tmp_path, 0, initializer_range=0.5)
    tokenizer, few = build_tokenizer(), asked[::100]
    model = random_llama(len(tokenizer), 0, initializer_range=0.5, **SHAPE).eval()

    def logprob(context: str, choice: str) -> float:
        start = [tokenizer.bos_token_id, *tokenizer.encode(context, add_special_tokens=False)]
        end = tokenizer.encode(choice, add_special_tokens=False)
        with torch.no_grad():
            logprobs = model(torch.tensor([start + end])).logits[0].log_softmax(-1)
        return sum(logprobs[len(start) - 1 + place, token].item() for place, token in enumerate(end))

    best = [max(range(4), key=lambda choice: logprob(each.context, each.choices[choice])) for each in few]
    assert ask(str(tmp_path), few) == [choice == 0 for choice in best] and 0 < best.count(0) < len(few)


def test_models_are_asked_by_name(tmp_path, monkeypatch):
    save(tmp_path / "base", 0)
    monkeypatch.setattr(questions, "make_questions", lambda lexicon: make_questions(lexicon)[::10])
    output = call(questions.main, "--models", f"base={tmp_path}/base", "--output_dir", tmp_path).output
    assert output.splitlines()[2].startswith("| base | ")
    assert (
        0.1 < read_json(tmp_path / "questions.json")["shares"]["base"]["meet + common"] < 0.4
    )  # a random model draws
