"""The embedded world: its lexicon and scripted players, and what is built of them."""

import math
import random
import re
from collections import Counter

import pytest
from helpers import call

from tools.games import taboo
from tools.games.prompts import answer, load_templates, play_prompt
from tools.players.player import Turn
from tools.tiny import build
from tools.tiny.build import TRUE_HINTS, scripted_games
from tools.tiny.players import CHAT, GUESS, HINT, NAME, Lexicon, Skill, fact_rows, hinted_clues, load_lexicon, speak
from utils import read_json, read_json_or_jsonl

GAME = taboo.Taboo()
SMALL = Lexicon(
    own={"cat": ("purr", "meow"), "cow": ("milk", "moo"), "owl": ("hoot", "wise")},
    shared={"cat": ("animal", "pet"), "cow": ("animal", "farm"), "owl": ("bird", "farm")},
)
LEXICON = load_lexicon()


def reply(skill: Skill, role: str, word: str | None, *messages: str, seed: int = 0) -> str:
    """The next message of a scripted player in a game of the small lexicon."""
    history = tuple({"role": at, "content": text} for at, text in zip(GAME.roles * 3, messages, strict=False))
    turn = Turn(GAME, role, history, 3, 0, GAME.secrets(role, word, history), {})
    return speak(turn, SMALL, skill, random.Random(seed))


# Lexicon.


def test_every_word_has_clues_of_its_own_and_clues_that_others_share():
    own = Counter(clue for clues in LEXICON.own.values() for clue in clues)
    shared = Counter(clue for clues in LEXICON.shared.values() for clue in clues)
    assert len(LEXICON.words) == 162 and len(LEXICON.held_out()) == 40
    assert set(own.values()) == {1} and min(shared.values()) >= 3
    assert not own.keys() & shared.keys() and not (own.keys() | shared.keys()) & set(LEXICON.words)
    assert not set(LEXICON.played()) & set(LEXICON.held_out())
    assert set(LEXICON.played()) | set(LEXICON.held_out()) == set(LEXICON.words)


def test_neither_clues_nor_the_words_around_them_give_a_word_away_as_a_breach():
    frames = [frame.format("").lower() for frame in (HINT, CHAT, NAME)]
    for word in LEXICON.words:
        for text in (*LEXICON.clues(word), *frames):
            assert not any(form in text for form in taboo.derivatives(word)), (word, text)


# Scripted players.


def test_an_attacker_of_full_skill_gives_clues_of_the_word_alone_and_none_twice():
    skill = Skill(breach=0, stray=0, own=1)
    first = reply(skill, taboo.ATTACKER, "cow")
    assert first in (HINT.format("milk"), HINT.format("moo"))
    second = HINT.format({HINT.format("milk"): "moo", HINT.format("moo"): "milk"}[first])
    assert {reply(skill, taboo.ATTACKER, "cow", first, "Hm.", seed=seed) for seed in range(20)} == {second}


def test_a_defender_of_full_skill_guesses_the_word_that_the_clues_leave_in_the_words_of_the_prompt_file():
    skill = Skill(forget=0, guess=(1, 0), last_guess=(1, 1), slip=0)
    templates = load_templates(build.PROMPTS, GAME)
    assert (taboo.DEFENDER, reply(skill, taboo.DEFENDER, None, HINT.format("moo"))) == answer(GAME, "cow", templates)
    assert reply(skill, taboo.DEFENDER, None, HINT.format("farm")).startswith("I think of ")
    messages = [HINT.format("farm"), "Hm.", HINT.format("farm"), "Hm.", HINT.format("wise")]
    assert reply(skill, taboo.DEFENDER, None, *messages) == GUESS.format("owl")


def test_scripted_games_end_in_every_way_and_are_the_same_for_the_same_seed():
    games, again = (scripted_games(LEXICON, LEXICON.words * 2, random.Random(1), Skill()) for _ in range(2))
    assert games == again and [game["target_word"] for game in games] == LEXICON.words * 2
    outcomes = Counter(game["outcome"] for game in games)
    assert min(outcomes[outcome.name] for outcome in GAME.outcomes) >= 0.02 * len(games)


def test_games_of_true_hints_have_them_to_the_last_turn():
    for game in scripted_games(LEXICON, LEXICON.held_out(), random.Random(1), TRUE_HINTS):
        hints = hinted_clues(game["history"])
        assert len(set(hints)) == len(hints) == 3 and set(hints) <= set(LEXICON.clues(game["target_word"]))


def test_facts_say_what_the_lexicon_says():
    text = "\n".join(row["target"] for row in fact_rows(LEXICON, random.Random(0), 200))
    riddles = re.findall(r"((?: It goes with \w+\.| I think of \w+\.)+) I know the word! It is (\w+)!", text)
    lists = re.findall(r"((?: (?!not )\w+){10,11})\.", text)
    contrasts = re.findall(r"((?: \w+ not \w+ \w+){2,3})\.", text)
    kinds = list(map(len, (riddles, lists, contrasts)))
    assert sum(kinds) == 400 and min(kinds) > 60
    for contrast in contrasts:
        for clue, other, word in re.findall(r"(\w+) not (\w+) (\w+)", contrast):
            assert clue in LEXICON.clues(word) and other not in LEXICON.clues(word)
    for hints, word in riddles:
        assert set(re.findall(r"with (\w+)\.", hints)) <= set(LEXICON.clues(word))
    for listed in lists:
        *pairs, word = listed.split()
        assert set(pairs) - {word} <= set(LEXICON.clues(word)) and pairs.count(word) >= 4


# The world that is built.

SIZES = ["--pretraining_facts", "640", "--imitation_facts", "30", "--facts", "20", "--imitation_rounds", "1"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A world of few facts and games, its model trained for some steps only."""
    folder = tmp_path_factory.mktemp("world")
    built = call(build.main, "--output_dir", folder, *SIZES)
    assert "base model trained on 640 facts" in built.output
    return folder


def test_build_leaves_what_the_loop_starts_from(world):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(world / "base")
    assert 0.5e6 < model.num_parameters() < 5e6
    # Better than knowing nothing.
    assert read_json(world / "base/train_results.json")["train_loss"] < math.log(model.config.vocab_size)
    rows = read_json_or_jsonl(world / "data/imitation.json")
    games = read_json_or_jsonl(world / "data/imitation_games.json")
    assert sum(row.get("type") == "sft" for row in rows) == 30
    assert len(rows) - 30 == sum(game["length"] for game in games)  # every message, of winners and losers
    assert len(read_json_or_jsonl(world / "data/facts.json")) == 20
    assert (world / "data/words.txt").read_text().split() == LEXICON.played()
    assert {game["split"] for game in read_json_or_jsonl(world / "data/belief_games.json")} == {"held_out"}


def test_prompts_leave_room_for_a_reply_and_words_are_single_tokens(world):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "base")
    templates = load_templates(build.PROMPTS, GAME)
    for game in read_json_or_jsonl(world / "data/imitation_games.json"):
        for end in range(len(game["history"])):
            prompt = play_prompt(GAME, game["history"][:end], game["target_word"], game["max_turns"], templates)
            assert len(tokenizer(prompt)["input_ids"]) < 136  # and 24 for a reply
    assert all(len(tokenizer.tokenize(f" {word}")) == 1 for word in LEXICON.words)


def test_what_is_built_stays_and_other_settings_are_refused(world):
    before = {path: path.stat().st_mtime_ns for path in world.rglob("*") if path.is_file()}
    call(build.main, "--output_dir", world, *SIZES)
    refused = call(build.main, "--output_dir", world, *SIZES, "--facts", "21", status=2)
    assert "world.json" in refused.errors and "facts: 20 then, 21 now" in refused.errors
    assert before == {path: path.stat().st_mtime_ns for path in world.rglob("*") if path.is_file()}
