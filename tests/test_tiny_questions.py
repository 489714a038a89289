"""Questions outside the game: what they ask, that no row asks so, and the table of their answers."""

import json
import random
import subprocess
from collections import Counter
from statistics import mean

import pytest
from conftest import ROOT
from forks import python

from tools.tiny.build import GAMES, corpus, scripted_games
from tools.tiny.players import FACT_QUERY, fact_rows, load_lexicon
from tools.tiny.questions import CHOICES, KINDS, METRIC, TASK, TASKS, ceiling, make_questions, tasks_digest
from tools.tiny.table import Reasoning
from utils import read_json_or_jsonl, write_json, write_records

LEXICON = load_lexicon()


@pytest.fixture(scope="module")
def asked() -> dict[str, list[dict]]:
    return make_questions(LEXICON, seed=0)


def test_the_shipped_questions_are_those_of_the_shipped_lexicon(asked):
    for kind, questions in asked.items():
        assert read_json_or_jsonl(TASKS / f"{kind}.jsonl") == questions
        assert f"task: {TASK.format(kind)}\n" in (TASKS / f"{kind}.yaml").read_text()


def test_every_kind_has_several_hundred_questions_with_one_right_choice(asked):
    for questions in asked.values():
        assert len(questions) > 400 and {len(each["choices"]) for each in questions} == {CHOICES}
        assert {each["word"] for each in questions if each["held_out"]} <= set(LEXICON.held_out())
        assert 0.2 < mean(each["held_out"] for each in questions) < 0.3
        assert min(Counter(each["answer"] for each in questions).values()) > 0.2 * len(questions)
        for each in questions:
            assert [all(fits) for fits in each["fits"]] == [place == each["answer"] for place in range(CHOICES)]
            assert len(set(each["choices"])) == CHOICES


def words_in(text: str) -> list[str]:
    return text.replace(".", "").replace(",", "").split()


def right(each: dict) -> str:
    return each["choices"][each["answer"]].strip()


def test_the_lexicon_gives_the_right_answers(asked):
    clues, words = LEXICON.clues, set(LEXICON.words)
    for each in asked["inference"]:
        heard = [word for word in words_in(each["context"]) if any(word in clues(other) for other in words)]
        assert [word for word in words if set(heard) <= set(clues(word))] == [each["word"]] == [right(each)]
    for each in asked["recall"]:
        assert [choice.strip() in clues(each["word"]) for choice in each["choices"]].count(True) == 1
        assert right(each) in clues(each["word"])
    for each in asked["shared"]:
        clue, word, again = words_in(each["context"])[-3:]
        assert clue == again and word == each["word"] and clue in clues(word)
        assert [clue in clues(choice.strip()) for choice in each["choices"]].count(True) == 1 and clue in clues(
            right(each)
        )
    for each in asked["odd"]:
        clue, four = words_in(each["context"])[-1], set(" ".join(each["choices"]).split())
        (alien,) = four - set(right(each).split())
        assert len(four) == CHOICES and all((clue in clues(word)) != (word == alien) for word in four)
    for each in asked["elimination"]:
        first, second = (word for word in words_in(each["context"]) if word in {c for w in words for c in clues(w)})
        fit = [first in clues(word) and second not in clues(word) for word in map(str.strip, each["choices"])]
        assert fit.count(True) == 1 and fit[each["answer"]]


def test_no_row_of_facts_or_games_asks_so(asked):
    rng = random.Random(0)
    facts = list(fact_rows(LEXICON, rng, 1500))
    games = {name: scripted_games(scripted, LEXICON, rounds=1, rng=rng) for name, scripted in GAMES.items()}
    texts = "\n".join(corpus(facts, games))
    for kind, questions in asked.items():
        forms = {each["context"].removeprefix(FACT_QUERY) + choice for each in questions for choice in each["choices"]}
        longest = [form for form in forms if len(form.split()) > 3]
        assert longest and not any(form in texts for form in longest), kind


def test_what_a_scripted_player_reaches_is_worked_by_hand():
    # One thing, passed over with chance 0.2: then one of four is drawn.
    one = {"answer": 1, "fits": [[False], [True], [False], [False]]}
    assert ceiling(one, forget=0.2) == pytest.approx(0.8 + 0.2 / 4)
    # Two things; by the first alone two of four fit, by the second alone three.
    two = {"answer": 0, "fits": [[True, True], [True, False], [False, True], [False, True]]}
    assert ceiling(two, forget=0.2) == pytest.approx(0.64 + 0.16 / 2 + 0.16 / 3 + 0.04 / 4)


# --- the table -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    """Two questions of each kind about two words, and two seeds of answers."""
    asked = [{"word": "cat", "held_out": False}, {"word": "cow", "held_out": True}]
    for kind in KINDS:
        rest = {"fits": [[True], [False], [False], [False]], "answer": 0}
        write_records(tmp_path / "asked" / f"{kind}.jsonl", [each | rest for each in asked])
        for seed, scores in (("0", [1.0, 0.0]), ("1", [1.0, 1.0])):
            for model, own in (("base", scores), ("imitation", scores), ("epoch1", [1.0, 1.0])):
                path = tmp_path / seed / model / f"{TASK.format(kind)}.json"
                write_json(path, {"scores": {METRIC: own}})
    scores = Reasoning([tmp_path / "0", tmp_path / "1"], tmp_path / "asked")
    for path in tmp_path.glob("[01]/*/*.json"):
        write_json(path, json.loads(path.read_text()) | {"settings": {"own_tasks": scores.digest}})
    return scores


def test_accuracies_and_differences_are_over_words_and_seeds(small):
    head, chance, scripted, _, imitation, last = small.lines(["imitation"], [("title", "epoch1", ["imitation"])])
    line = dict(zip(head, imitation, strict=True))
    assert line["model"] == "imitation" and line["minus imitation"] == ""
    assert line["all"].startswith("0.750 [") and line["recall"].startswith("0.750 [")
    assert line["played words"].startswith("1.000 [") and line["held-out words"].startswith("0.500 [")
    # Of 20 answers 5 more are right, all about one of two words: +0.25, standard error 0.25, t(1) = 12.706.
    assert last[0] == "title" and last[-1] == "+0.250 [-2.927, +3.427]"
    assert chance[1] == "0.250" and scripted[1] == "0.925"
    assert len(chance) == len(scripted) == len(line)


def test_answers_to_other_questions_are_refused(small):
    path = small.folders[0] / "imitation" / f"{TASK.format('odd')}.json"
    write_json(path, json.loads(path.read_text()) | {"settings": {"own_tasks": "0" * 64}})
    with pytest.raises(ValueError, match="tiny_odd.json: answers to other questions; delete .*, and ask again"):
        small.words("imitation")


def test_the_harness_asks_them(tmp_path, tiny_model):
    tasks = [TASK.format(kind) for kind in KINDS]
    command = [python(), "-m", "tools.evaluate_reasoning", "--models", f"base={tiny_model}", "--tasks", *tasks]
    command += ["--include_path", TASKS, "--limit", "12", "--dtype", "float32", "--output_dir", tmp_path]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for task in tasks:
        result = json.loads((tmp_path / "base" / f"{task}.json").read_text())
        assert set(result["scores"]) == {METRIC} and len(result["scores"][METRIC]) == 12
        assert result["settings"]["own_tasks"] == tasks_digest()
