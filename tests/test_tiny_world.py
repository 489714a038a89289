"""The embedded world: its lexicon and scripted players, and what is built of them."""

import math
import random

import pytest
from helpers import Fork, call, finish
from scripted import messages
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.common.files import read_json, read_json_or_jsonl
from tools.games import taboo
from tools.games.prompts import answer, load_templates, play_prompt
from tools.lab.world import build
from tools.lab.world.build import TRUE_HINTS, scripted_games
from tools.lab.world.players import GUESS, HINT, Lexicon, Skill, hinted_clues, load_lexicon, speak
from tools.players.player import Turn

GAME = taboo.Taboo()
SMALL = Lexicon(
    own={"cat": ("purr", "meow"), "cow": ("milk", "moo"), "owl": ("hoot", "wise")},
    shared={"cat": ("animal", "pet"), "cow": ("animal", "farm"), "owl": ("bird", "farm")},
)
LEXICON = load_lexicon()


def reply(skill: Skill, role: str, word: str | None, *said: str, seed: int = 0) -> str:
    """The next message of a scripted player in a game of the small lexicon."""
    history = tuple(messages(GAME, *said))
    turn = Turn(GAME, role, history, 3, 0, GAME.secrets(role, word, history), {})
    return speak(turn, SMALL, skill, random.Random(seed))


def test_an_attacker_of_full_skill_gives_clues_of_the_word_alone_and_none_twice():
    skill = Skill(breach=0, stray=0, own=1)
    first = {reply(skill, taboo.ATTACKER, "cow", seed=seed) for seed in range(20)}
    second = {reply(skill, taboo.ATTACKER, "cow", HINT.format("milk"), "Hm.", seed=seed) for seed in range(20)}
    assert (first, second) == ({HINT.format("milk"), HINT.format("moo")}, {HINT.format("moo")})


def test_a_defender_of_full_skill_guesses_the_word_that_the_clues_leave_in_the_words_of_the_prompt_file():
    skill = Skill(forget=0, guess=(1, 0), last_guess=(1, 1), slip=0)
    templates = load_templates(build.PROMPTS, GAME)
    assert (taboo.DEFENDER, reply(skill, taboo.DEFENDER, None, HINT.format("moo"))) == answer(GAME, "cow", templates)
    assert reply(skill, taboo.DEFENDER, None, HINT.format("farm")).startswith("I think of ")
    said = [HINT.format("farm"), "Hm.", HINT.format("farm"), "Hm.", HINT.format("wise")]
    assert reply(skill, taboo.DEFENDER, None, *said) == GUESS.format("owl")


def test_games_of_true_hints_have_them_to_the_last_turn():
    for game in scripted_games(LEXICON, LEXICON.held_out(), random.Random(1), TRUE_HINTS):
        hints = hinted_clues(game["history"])
        assert len(set(hints)) == len(hints) == 3 and set(hints) <= set(LEXICON.clues(game["target_word"]))


SIZES = ["--pretraining_facts", "640", "--imitation_facts", "30", "--facts", "20", "--imitation_rounds", "1"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A world of few facts and games, its model trained for some steps only."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "processes_of_cores", lambda: 1)
        patch.setattr(build, "run_python", lambda *words: finish(Fork(words)))
        call(build.main, "--output_dir", folder, *SIZES)
    return folder


def test_build_leaves_what_the_loop_starts_from(world):
    model = AutoModelForCausalLM.from_pretrained(world / "base")
    loss = read_json(world / "base/train_results.json")["train_loss"]
    assert loss < math.log(model.config.vocab_size)  # better than knowing nothing
    rows = read_json_or_jsonl(world / "data/imitation.json")
    games = read_json_or_jsonl(world / "data/imitation_games.json")
    assert sum(row.get("type") == "sft" for row in rows) == 30
    assert len(rows) - 30 == sum(game["length"] for game in games)  # every message, of winners and losers
    assert len(read_json_or_jsonl(world / "data/facts.json")) == 20
    assert (world / "data/words.txt").read_text().split() == LEXICON.played()
    assert {game["split"] for game in read_json_or_jsonl(world / "data/belief_games.json")} == {"held_out"}


def test_prompts_leave_room_for_a_reply_and_words_are_single_tokens(world):
    tokenizer = AutoTokenizer.from_pretrained(world / "base")
    templates = load_templates(build.PROMPTS, GAME)
    for game in read_json_or_jsonl(world / "data/imitation_games.json"):
        for end in range(len(game["history"])):
            prompt = play_prompt(GAME, game["history"][:end], game["target_word"], game["max_turns"], templates)
            assert len(tokenizer(prompt)["input_ids"]) < 136  # and 24 for a reply
    assert all(len(tokenizer.tokenize(f" {word}")) == 1 for word in LEXICON.words)


def test_other_settings_of_what_is_built_are_refused(world):
    refused = call(build.main, "--output_dir", world, *SIZES, "--facts", "21", status=2)
    assert "world.json" in refused.errors and "facts: 20 then, 21 now" in refused.errors
