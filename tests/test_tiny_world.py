"""The embedded world: its lexicon and scripted players, what is built of them, and what is shown."""

import asyncio
import json
import math
import random
import re
from collections import Counter

import pytest
from helpers import call

from tools import tiny_world
from tools.games import taboo
from tools.games.prompts import load_templates, play_prompt
from tools.games.twenty_questions import NO_ANSWER
from tools.matches.stats import count_matches, result_rows
from tools.players.player import Turn
from tools.tiny.build import GAMES, ORACLE, scripted_games, suffix
from tools.tiny.players import (
    CHAT,
    GUESS,
    HINT,
    NAME,
    TOLD,
    Lexicon,
    LexiconAttacker,
    LexiconDefender,
    Skill,
    city_task,
    fact_rows,
    load_lexicon,
)
from tools.tiny.questions import practice_rows
from utils import read_json_or_jsonl

GAME = taboo.Taboo()
SMALL = Lexicon(
    own={"cat": ("purr", "meow"), "cow": ("milk", "moo"), "owl": ("hoot", "wise")},
    shared={"cat": ("animal", "pet"), "cow": ("animal", "farm"), "owl": ("bird", "farm")},
)


@pytest.fixture(scope="module")
def lexicon() -> Lexicon:
    return load_lexicon()


def reply(player, role: str, word: str | None, *messages: str, max_turns: int = 3) -> str:
    roles = GAME.roles * max_turns
    history = tuple({"role": at, "content": text} for at, text in zip(roles, messages, strict=False))
    secrets = GAME.secrets(role, word, history)
    return asyncio.run(player.reply(Turn(GAME, role, history, max_turns, 0, secrets, {}))).text


# --- lexicon -------------------------------------------------------------------------------------------------------


def test_every_word_has_clues_of_its_own_and_clues_that_others_share(lexicon):
    own = Counter(clue for clues in lexicon.own.values() for clue in clues)
    shared = Counter(clue for clues in lexicon.shared.values() for clue in clues)
    assert len(lexicon.words) >= 150
    assert set(own.values()) == {1} and min(shared.values()) >= 3
    assert not own.keys() & shared.keys() and not (own.keys() | shared.keys()) & set(lexicon.words)


def test_no_clue_gives_its_word_away_as_a_breach(lexicon):
    for word in lexicon.words:
        for clue in lexicon.clues(word):
            assert not any(form in clue for form in taboo.derivatives(word)), (word, clue)


def test_no_word_stands_in_what_the_players_say_around_it(lexicon):
    frames = [frame.format("").lower() for frame in (HINT, CHAT, NAME)]
    for word in lexicon.words:
        assert not any(form in frame for form in taboo.derivatives(word) for frame in frames), word


def test_held_out_words_are_not_played(lexicon):
    assert set(lexicon.played()) | set(lexicon.held_out()) == set(lexicon.words)
    assert not set(lexicon.played()) & set(lexicon.held_out())
    assert len(lexicon.held_out()) == 40


def test_a_line_without_all_its_clues_is_named(tmp_path):
    path = tmp_path / "lexicon.txt"
    path.write_text("# comment\ncat: purr | pet\n")
    with pytest.raises(ValueError, match=r"lexicon.txt:2: expected 'word: 6 clues \| 3 shared clues'"):
        load_lexicon(path)


# --- scripted players ----------------------------------------------------------------------------------------------


def test_an_attacker_of_full_skill_gives_clues_of_the_word_alone_and_none_twice():
    attacker = LexiconAttacker(SMALL, Skill(breach=0, stray=0, own=1), random.Random(0))
    first = reply(attacker, taboo.ATTACKER, "cow")
    assert first in (HINT.format("milk"), HINT.format("moo"))
    assert {reply(attacker, taboo.ATTACKER, "cow", first, "Hm.") for _ in range(20)} == {
        HINT.format({HINT.format("milk"): "moo", HINT.format("moo"): "milk"}[first])
    }


def test_a_defender_of_full_skill_guesses_the_word_that_the_clues_leave():
    defender = LexiconDefender(SMALL, Skill(forget=0, guess=(1, 0), last_guess=(1, 1), slip=0), random.Random(0))
    assert reply(defender, taboo.DEFENDER, None, HINT.format("moo")) == GUESS.format("cow")
    assert reply(defender, taboo.DEFENDER, None, HINT.format("farm")).startswith("I think of ")
    told = [HINT.format("farm"), "Hm.", HINT.format("farm"), "Hm.", HINT.format("wise")]
    assert reply(defender, taboo.DEFENDER, None, *told) == GUESS.format("owl")


@pytest.mark.parametrize("scripted", GAMES.values(), ids=GAMES)
def test_scripted_games_end_in_every_way_and_are_the_same_for_the_same_seed(lexicon, scripted):
    games = scripted_games(scripted, lexicon, rounds=2, rng=random.Random(1))
    assert len(games) == 2 * len(lexicon.words)
    shares = Counter(game["outcome"] for game in games)
    ends = [outcome.name for outcome in scripted.game.outcomes if outcome.name != NO_ANSWER]  # they know how to answer
    assert min(shares[end] for end in ends) >= 0.02 * len(games)
    assert games == scripted_games(scripted, lexicon, rounds=2, rng=random.Random(1))


def test_all_hints_and_guesses_of_the_oracle_are_right(lexicon):
    words = lexicon.played()
    games = scripted_games(GAMES["taboo"], lexicon, rounds=2, rng=random.Random(1), words=words, skill=ORACLE)
    assert Counter(game["target_word"] for game in games) == dict.fromkeys(words, 2)
    guesses = 0
    for game in games:
        hints = [TOLD.search(message["content"])[1] for message in game["history"][::2]]
        assert set(hints) <= set(lexicon.clues(game["target_word"])) and len(set(hints)) == len(hints)
        for message in game["history"]:
            if message["content"].startswith("I know the word!"):
                assert message["content"] == GUESS.format(game["target_word"])
                guesses += 1
    assert guesses > len(games) / 2


def test_facts_say_what_the_lexicon_says(lexicon):
    rows = list(fact_rows(lexicon, random.Random(0), 200))
    text = "\n".join(row["target"] for row in rows)
    riddles = re.findall(r"((?: It goes with \w+\.| I think of \w+\.)+) I know the word! It is (\w+)!", text)
    lists = re.findall(r"((?: (?!not )\w+){10,11})\.", text)
    contrasts = re.findall(r"((?: \w+ not \w+ \w+){2,3})\.", text)
    kinds = list(map(len, (riddles, lists, contrasts)))
    assert sum(kinds) == 400 and min(kinds) > 60
    for contrast in contrasts:
        for clue, other, word in re.findall(r"(\w+) not (\w+) (\w+)", contrast):
            assert clue in lexicon.clues(word) and other not in lexicon.clues(word)
    for hints, word in riddles:
        assert set(re.findall(r"with (\w+)\.", hints)) <= set(lexicon.clues(word))
    for listed in lists:
        *pairs, word = listed.split()
        assert set(pairs) - {word} <= set(lexicon.clues(word)) and pairs.count(word) >= 4


# --- the world that is built ---------------------------------------------------------------------------------------


SIZES = ["--pretraining_facts", "640", "--imitation_facts", "30", "--facts", "20", "--imitation_rounds", "1"]
SIZES += ["--games", *GAMES]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A world of few facts and games, its model trained for some steps only."""
    folder = tmp_path_factory.mktemp("world")
    built = call(tiny_world.main, "build", "--output_dir", folder, *SIZES)
    assert "122 words and 40 held out, " in built.output.splitlines()[-1]
    return folder


def test_a_world_without_taboo_is_refused(tmp_path):
    refused = call(tiny_world.main, "build", "--output_dir", tmp_path, "--games", "guess_my_city", status=2)
    assert "--games guess_my_city: taboo" in refused.errors


def test_build_leaves_what_the_loop_starts_from(world, lexicon):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(world / "base")
    assert 0.5e6 < model.num_parameters() < 5e6
    results = json.loads((world / "base" / "train_results.json").read_text())
    assert results["train_loss"] < math.log(model.config.vocab_size)  # better than knowing nothing
    rows = read_json_or_jsonl(world / "data" / "imitation.json")
    games = read_json_or_jsonl(world / "data" / "imitation_games.json")
    assert sum(row.get("type") == "sft" for row in rows) == 30
    assert len(rows) - 30 == sum(game["length"] for game in games)  # every message, of winners and losers
    assert len(read_json_or_jsonl(world / "data" / "facts.json")) == 20
    practice = read_json_or_jsonl(world / "data" / "practice.json")
    assert practice[20:1212] == practice[1212:] == practice_rows()
    words = (world / "data" / "words.txt").read_text().split()
    assert words == lexicon.played()
    oracle = [read_json_or_jsonl(world / "data" / f"oracle_games{epoch}.json") for epoch in (1, 2, 3)]
    assert {len(games) for games in oracle} == {12 * len(words)} and oracle[0] != oracle[1]
    cities = (world / "data" / "words_guess_my_city.txt").read_text().splitlines()
    assert cities == [city_task(lexicon, word) for word in words]
    for game in ("twenty_questions", "guess_my_city"):
        games = read_json_or_jsonl(world / "data" / f"imitation_games_{game}.json")
        rows = read_json_or_jsonl(world / "data" / f"imitation_{game}.json")
        assert {each["game"] for each in games} == {game} and len(rows) == sum(each["length"] for each in games)


def test_prompts_leave_room_for_a_reply_and_words_are_single_tokens(world, lexicon):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "base")
    for name, scripted in GAMES.items():
        game, templates = scripted.game, load_templates(scripted.prompts, scripted.game)
        for played in read_json_or_jsonl(world / "data" / f"imitation_games{suffix(name)}.json"):
            for end in range(len(played["history"])):
                prompt = play_prompt(
                    game, played["history"][:end], played["target_word"], played["max_turns"], templates
                )
                assert len(tokenizer(prompt)["input_ids"]) < 136  # and 24 for a reply
    assert all(len(tokenizer.tokenize(f" {word}")) == 1 for word in lexicon.words)


def test_what_is_built_stays_and_other_settings_are_refused(world):
    before = {path: path.stat().st_mtime_ns for path in world.rglob("*") if path.is_file()}
    call(tiny_world.main, "build", "--output_dir", world, *SIZES)
    refused = call(tiny_world.main, "build", "--output_dir", world, *SIZES, "--facts", "21", status=2)
    assert "world.json" in refused.errors and "facts: 20 then, 21 now" in refused.errors
    assert before == {path: path.stat().st_mtime_ns for path in world.rglob("*") if path.is_file()}


# --- showing -------------------------------------------------------------------------------------------------------


def write_match(folder, player: str, outcomes: dict[str, str]) -> None:
    """A match on two word lists; `outcomes` of the games in which each player attacks."""
    folder.mkdir(parents=True)
    games = [
        {"attacker": attacker, "defender": defender, "words": words, "seed": 0, "target_word": word, "length": 1}
        | {"outcome": outcomes[attacker], "history": [{"role": taboo.ATTACKER, "content": f"{attacker} speaks"}]}
        for attacker, defender in ((player, "imitation"), ("imitation", player))
        for words, word in (("played", "cat"), ("held_out", "cow"))
    ]
    (folder / "games_results.json").write_text(json.dumps(games))
    (folder / "matches.json").write_text(json.dumps({"results": list(result_rows(count_matches(games, GAME)))}))


def test_show_prints_points_by_epoch_a_game_of_each_outcome_and_the_report(tmp_path):
    won = {"imitation": taboo.DEFENDER_WINS}
    write_match(tmp_path / "epoch10" / "eval", "epoch10", won | {"epoch10": taboo.ATTACKER_WINS})
    write_match(tmp_path / "epoch2" / "eval", "epoch2", won | {"epoch2": taboo.TIED})
    out = call(tiny_world.main, "show", "--output_dir", tmp_path).output
    lines = [line.split() for line in out.splitlines() if line.startswith("epoch")]
    assert lines[0][:6] == ["epoch2", "4", "0.500", "0.500", "0.000", "0.750"]  # wins, ties, losses, points
    assert lines[1][:6] == ["epoch10", "4", "1.000", "0.000", "0.000", "1.000"]
    assert lines[0][8] == "0.500" and lines[0][11] == "1.000"  # as attacker all ties, as defender all won
    assert "epoch10 attacks, imitation defends\n--- cat ---\nattacker: epoch10 speaks\n--- attacker wins ---" in out
    assert "imitation attacks, epoch10 defends\n--- cat ---" in out and "tied game" not in out
    assert str(tmp_path / "report.html") in out


def test_show_and_reason_before_there_is_anything_say_so(tmp_path):
    assert str(tmp_path) in call(tiny_world.main, "show", "--output_dir", tmp_path, status=2).errors
    assert str(tmp_path) in call(tiny_world.main, "reason", "--output_dir", tmp_path, status=2).errors
