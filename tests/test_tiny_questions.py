"""Questions outside the game: what they ask, how models are asked, and what is asked again."""

import json
import random
import re

import pytest
import torch
from helpers import call

from tools import tiny_world
from tools.tiny.build import GAMES, corpus, scripted_games
from tools.tiny.models import byte_tokenizer, random_llama
from tools.tiny.players import FACT_QUERY, fact_rows, load_lexicon
from tools.tiny.questions import (
    COLUMNS,
    HELD_OUT,
    IN_PLAY,
    KINDS,
    PLAYED,
    PRACTISED,
    UNPRACTISED,
    Question,
    asked_questions,
    by_word,
    choice_logprobs,
    make_questions,
    practice_rows,
    true_hints,
    words_of_side,
)

LEXICON = load_lexicon()


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    return asked_questions()


def words_of(question: Question) -> set[str]:
    text = " ".join([question.context, *question.choices])
    return {question.word} | set(re.findall(r"\w+", text)) & set(LEXICON.words)


def test_all_words_of_a_question_are_on_its_side(asked):
    for question in asked + make_questions(PRACTISED):
        assert words_of(question) <= set(words_of_side(LEXICON, question.side))
    held_out, played = (set(words_of_side(LEXICON, side)) for side in (HELD_OUT, PLAYED))
    practised, unpractised = (set(words_of_side(LEXICON, side)) for side in (PRACTISED, UNPRACTISED))
    assert practised | unpractised == played and not practised & unpractised and not held_out & played


def test_practice_holds_neither_a_held_out_nor_an_unpractised_word():
    known = set(words_of_side(LEXICON, HELD_OUT) + words_of_side(LEXICON, UNPRACTISED))
    made = practice_rows()
    assert len(made) > 1000
    assert not any(known & set((row["query"] + row["target"]).split()) for row in made)


def test_questions_of_the_first_study_and_those_about_unpractised_words_are_counted_apart(asked):
    sizes = {column: sum(by_word([1] * len(asked), column)[0]) for column in COLUMNS}
    assert (sizes["all"], sizes["meet + common, held-out words"]) == (3354, 290)
    assert sizes["all"] + len(make_questions(UNPRACTISED)) + sizes["in play"] == len(asked)
    assert (sizes["in play"], sizes["in play, held-out words"]) == (sizes["meet"], 118)
    assert sizes["meet + common, unpractised words"] > 500


def test_the_lexicon_gives_the_right_answers_and_no_others(asked):
    clues = {word: set(LEXICON.shared[word]) for word in LEXICON.words}
    outside = [question for question in asked if question.kind != IN_PLAY]
    for kind, word, _, context, choices in outside + make_questions(PRACTISED):
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


def test_questions_in_play_are_those_of_meet_behind_the_prompt_of_a_defender(asked):
    kinds = ("meet", IN_PLAY)
    meet, play = ([each for each in asked if each.kind == kind and each.side != UNPRACTISED] for kind in kinds)
    for question, same in zip(meet, play, strict=True):
        assert (question.word, question.side) == (same.word, same.side)
        first, second = question.context.removeprefix(FACT_QUERY).split()
        assert same.choices == tuple(f"I know the word! It is{choice}!" for choice in question.choices)
        rules, said = same.context.split("### Game History:")
        assert said.splitlines() == [
            "",
            f"  - attacker: It goes with {first}.",
            f"  - defender: I think of {first}.",
            f"  - attacker: It goes with {second}.",
            "",
            "### Instruction: Defender, reply or guess.",
            "",
            "### Response:",
        ]
        assert rules.startswith("Taboo in 3 turns.")


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
    tokenizer, questions = byte_tokenizer(), asked_questions()[::1000]
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
    of_meet = [question for question in asked if question.kind == "meet" and question.side != UNPRACTISED]
    assert sum(sizes) == len(of_meet)
    assert sum(totals) == sum(question.word == "cat" for question in of_meet)


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
    assert after["epoch2"]["right"] != before["epoch2"]["right"]


def test_true_hints_are_counted_in_the_games_that_follow_a_model(tmp_path):
    def said(*texts: str) -> list[dict]:
        return [{"role": ("attacker", "defender")[place % 2], "content": text} for place, text in enumerate(texts)]

    hints = ("It goes with purr.", "I think of cat.", "It goes with bark.", "Hm.", "It goes with cat.", "Hm.")
    games = [
        {"target_word": "cat", "history": said(*hints), "length": 6},  # 1 of 3 hints is true
        {"target_word": "cat", "history": said(hints[0], "It is cat.", hints[0]), "length": 2},  # 1 of 1
    ]
    path = tmp_path / "epoch3" / "episodes" / "epoch2_sampling_words_results.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(games))
    assert true_hints(tmp_path / "epoch2" / "model") == {"true hints": 0.5}
    assert true_hints(tmp_path / "epoch3" / "model") == true_hints(tmp_path / "base") == {}
    path.parent.parent.rename(tmp_path / "epoch1")
    assert true_hints(tmp_path / "imitation" / "model") == {"true hints": 0.5}


def test_the_models_of_a_seed_of_a_study_are_asked_by_arm(tmp_path, monkeypatch):
    for path in (
        "base",
        "released/imitation/model",
        "released/epoch1/model",
        "released/epoch2/model",
        "sft/epoch1/model",
    ):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "config.json").write_text("{}")
    for arm in ("released", "sft"):
        (tmp_path / arm / "settings.json").write_text("{}")
    models = {}
    monkeypatch.setattr("tools.tiny.questions.ask", lambda found, path: models.update(found) or {"imitation": right})
    right = [place % 2 for place in range(len(asked_questions()))]
    call(tiny_world.main, "reason", "--output_dir", tmp_path)
    assert {name: str(path.relative_to(tmp_path)) for name, path in models.items()} == {
        "base": "base",
        "imitation": "released/imitation/model",
        "released": "released/epoch2/model",
        "sft": "sft/epoch1/model",
    }
