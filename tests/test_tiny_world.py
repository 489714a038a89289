"""The embedded world: its lexicon and scripted players, what is built of them, and what is shown."""

import asyncio
import json
import math
import random
import re
import subprocess
from collections import Counter
from dataclasses import replace

import pytest
from conftest import ROOT
from forks import python

from tools import evaluate_reasoning, tiny_world
from tools.flags import parse_command, parse_flags
from tools.games import taboo
from tools.games.prompts import load_templates, play_prompt
from tools.games.twenty_questions import NO_ANSWER
from tools.matches.stats import count_matches, result_rows
from tools.players.player import Turn
from tools.tiny import questions
from tools.tiny.build import GAMES, scripted_games, suffix
from tools.tiny.players import (
    CHAT,
    GUESS,
    HINT,
    NAME,
    CityAnswerer,
    CityGuesser,
    Lexicon,
    LexiconAnswerer,
    LexiconAttacker,
    LexiconDefender,
    LexiconGuesser,
    Skill,
    city_task,
    fact_rows,
    load_lexicon,
)
from tools.tiny.questions import KINDS, METRIC, TASK, TASKS, tasks_digest
from tools.tiny.reproduce import LARGER_LEXICON
from utils import read_json_or_jsonl, write_json

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


both_lexicons = pytest.mark.parametrize(
    "lexicon", [load_lexicon(), load_lexicon(LARGER_LEXICON)], ids=["small", "large"]
)


@both_lexicons
def test_every_word_has_clues_of_its_own_and_clues_that_others_share(lexicon):
    own = Counter(clue for clues in lexicon.own.values() for clue in clues)
    shared = Counter(clue for clues in lexicon.shared.values() for clue in clues)
    assert len(lexicon.words) >= 150
    assert set(own.values()) == {1} and min(shared.values()) >= 3
    assert not own.keys() & shared.keys() and not (own.keys() | shared.keys()) & set(lexicon.words)


@both_lexicons
def test_no_clue_gives_its_word_away_as_a_breach(lexicon):
    for word in lexicon.words:
        for clue in lexicon.clues(word):
            assert not any(form in clue for form in taboo.derivatives(word)), (word, clue)


@both_lexicons
def test_no_word_stands_in_what_the_players_say_around_it(lexicon):
    frames = [frame.format("").lower() for frame in (HINT, CHAT, NAME)]
    for word in lexicon.words:
        assert not any(form in frame for form in taboo.derivatives(word) for frame in frames), word


def test_the_larger_world_begins_with_the_small_one(lexicon):
    large = load_lexicon(LARGER_LEXICON)
    assert len(large.words) == 500 and large.words[: len(lexicon.words)] == lexicon.words


def test_held_out_words_are_not_played(lexicon):
    assert set(lexicon.played()) | set(lexicon.held_out()) == set(lexicon.words)
    assert not set(lexicon.played()) & set(lexicon.held_out())
    assert len(lexicon.held_out()) == 40


def test_a_line_without_all_its_clues_is_named(tmp_path):
    path = tmp_path / "lexicon.txt"
    path.write_text("# comment\ncat: purr | pet\n")
    with pytest.raises(ValueError, match=r"lexicon.txt:2: expected 'word: 6 clues \| 3 shared clues'"):
        load_lexicon(path)


def test_best_matches_are_the_words_that_most_clues_go_with():
    assert SMALL.best_matches([]) == ["cat", "cow", "owl"]
    assert SMALL.best_matches(["farm"]) == ["cow", "owl"]
    assert SMALL.best_matches(["farm", "animal"]) == ["cow"]
    assert SMALL.best_matches(["farm", "hoot", "milk", "wise"]) == ["owl"]


# --- scripted players ----------------------------------------------------------------------------------------------


def test_an_attacker_of_full_skill_gives_clues_of_the_word_alone_and_none_twice():
    attacker = LexiconAttacker(SMALL, Skill(breach=0, stray=0, own=1), random.Random(0))
    first = reply(attacker, taboo.ATTACKER, "cow")
    assert first in (HINT.format("milk"), HINT.format("moo"))
    assert {reply(attacker, taboo.ATTACKER, "cow", first, "Hm.") for _ in range(20)} == {
        HINT.format({HINT.format("milk"): "moo", HINT.format("moo"): "milk"}[first])
    }


def test_an_attacker_can_breach_and_can_hint_at_another_word():
    breaching = LexiconAttacker(SMALL, Skill(breach=1), random.Random(0))
    assert reply(breaching, taboo.ATTACKER, "cow") == HINT.format("cow")
    straying = LexiconAttacker(SMALL, Skill(breach=0, stray=1), random.Random(0))
    hints = {reply(straying, taboo.ATTACKER, "cow") for _ in range(200)}
    assert hints == {HINT.format(clue) for word in ("cat", "owl") for clue in SMALL.clues(word)}


def test_a_defender_of_full_skill_guesses_the_word_that_the_clues_leave():
    defender = LexiconDefender(SMALL, Skill(forget=0, guess=(1, 0), last_guess=(1, 1), slip=0), random.Random(0))
    assert reply(defender, taboo.DEFENDER, None, HINT.format("moo")) == GUESS.format("cow")
    assert reply(defender, taboo.DEFENDER, None, HINT.format("farm")).startswith("I think of ")
    told = [HINT.format("farm"), "Hm.", HINT.format("farm"), "Hm.", HINT.format("wise")]
    assert reply(defender, taboo.DEFENDER, None, *told) == GUESS.format("owl")


def test_a_defender_can_let_the_word_slip():
    defender = LexiconDefender(SMALL, Skill(forget=0, guess=(0,), last_guess=(0,), slip=1), random.Random(0))
    assert reply(defender, taboo.DEFENDER, None, HINT.format("moo")) == NAME.format("cow")


@pytest.mark.parametrize("scripted", GAMES.values(), ids=GAMES)
def test_scripted_games_end_in_every_way_and_are_the_same_for_the_same_seed(lexicon, scripted):
    games = scripted_games(scripted, lexicon, rounds=2, rng=random.Random(1))
    assert len(games) == 2 * len(lexicon.words)
    shares = Counter(game["outcome"] for game in games)
    ends = [outcome.name for outcome in scripted.game.outcomes if outcome.name != NO_ANSWER]  # they know how to answer
    assert min(shares[end] for end in ends) >= 0.02 * len(games)
    assert games == scripted_games(scripted, lexicon, rounds=2, rng=random.Random(1))


def answer(player, game: str, role: str, task: str, *messages: str, max_turns: int = 4) -> str:
    scripted = GAMES[game].game
    roles = scripted.roles * max_turns
    history = tuple({"role": at, "content": text} for at, text in zip(roles, messages, strict=False))
    return asyncio.run(
        player.reply(Turn(scripted, role, history, max_turns, 0, scripted.secrets(role, task, history), {}))
    ).text


FULL = Skill(breach=0, stray=0, forget=0, wrong=0, remark=0, own=1, guess=(1, 0), last_guess=(1, 1))


def test_partners_of_20_questions_find_the_word_by_yes_and_no():
    guesser, answerer = (kind(SMALL, FULL, random.Random(0)) for kind in (LexiconGuesser, LexiconAnswerer))
    game = "twenty_questions"
    assert answer(answerer, game, "answerer", "cow", "Does it go with milk?") == "Yes."
    assert answer(answerer, game, "answerer", "cow", "Does it go with purr?") == "No."
    assert answer(answerer, game, "answerer", "cow", "Is it ` cat`?") == "No."
    hinting = LexiconAnswerer(SMALL, replace(FULL, remark=1), random.Random(0))
    told = "No. It goes with milk."
    assert answer(hinting, game, "answerer", "cow", "Is it ` cat`?", told, "Is it ` owl`?") == "No. It goes with moo."
    first = answer(guesser, game, "guesser", "")
    assert re.fullmatch(r"Does it go with (animal|pet|farm|bird)\?", first)
    assert answer(guesser, game, "guesser", "", "Does it go with farm?", "No.") == "Is it ` cat`?"
    asked = ("Does it go with farm?", "Yes.", "Does it go with animal?", "Yes.")
    assert answer(guesser, game, "guesser", "", *asked) == "Is it ` cow`?"
    named = ("Is it ` cat`?", "No. It goes with animal.")
    assert answer(guesser, game, "guesser", "", *named) == "Is it ` cow`?"


def test_partners_of_guess_my_city_find_the_place_by_its_clues():
    guesser, answerer = (kind(SMALL, FULL, random.Random(0)) for kind in (CityGuesser, CityAnswerer))
    task, game = city_task(SMALL, "cow"), "guess_my_city"
    assert task == "cow, animal, farm"
    assert answer(answerer, game, "answerer", task, "What does it go with?") in (
        "It goes with milk.",
        "It goes with moo.",
    )
    both = (
        "What does it go with?",
        "It goes with milk.",
        "What does it go with?",
        "It goes with moo.",
        "Are you from ` owl`?",
    )
    replies = {answer(answerer, game, "answerer", task, *both) for _ in range(40)}
    assert replies == {f"It goes with {clue}." for clue in ("milk", "moo", "farm")}  # never the country
    assert answer(guesser, game, "guesser", task) == "What does it go with?"
    heard = ("What does it go with?", "It goes with farm.")
    assert answer(guesser, game, "guesser", task, *heard) == "What does it go with?"
    assert (
        answer(guesser, game, "guesser", task, *heard, "Are you from ` owl`?", "It goes with farm.")
        == "Are you from ` cow`?"
    )


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
    command = [python(), "-m", "tools.tiny_world", "build", "--output_dir", str(folder), *SIZES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "122 words and 40 held out, " in done.stdout.splitlines()[-1]
    return folder


def test_a_world_without_taboo_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--games guess_my_city: taboo must be one of them"):
        build("--output_dir", str(tmp_path), "--games", "guess_my_city")


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
    words = (world / "data" / "words.txt").read_text().split()
    assert words == lexicon.played()
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


def test_what_is_built_stays_and_other_settings_are_refused(world, capsys):
    before = {path: path.stat().st_mtime_ns for path in world.rglob("*") if path.is_file()}
    build("--output_dir", str(world), *SIZES)
    assert capsys.readouterr().out == f"{world}: all is there\n"
    with pytest.raises(ValueError, match=r"world.json: made with other settings \(facts: 20 then, 21 now\); use ano"):
        build("--output_dir", str(world), *SIZES, "--facts", "21")
    assert before == {path: path.stat().st_mtime_ns for path in world.rglob("*") if path.is_file()}


# --- showing -------------------------------------------------------------------------------------------------------


def build(*flags):
    parse_command(tiny_world.COMMANDS, ["build", *flags], description="").run()


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


def test_show_prints_points_by_epoch_a_game_of_each_outcome_and_the_report(tmp_path, capsys):
    won = {"imitation": taboo.DEFENDER_WINS}
    write_match(tmp_path / "epoch10" / "eval", "epoch10", won | {"epoch10": taboo.ATTACKER_WINS})
    write_match(tmp_path / "epoch2" / "eval", "epoch2", won | {"epoch2": taboo.TIED})
    tiny_world.Show(output_dir=str(tmp_path)).run()
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if line.startswith("epoch")]
    assert [line[:3] for line in lines[:2]] == [["epoch2", "4", "0.750"], ["epoch10", "4", "1.000"]]
    assert lines[0][5] == "0.500" and lines[0][8] == "1.000"  # as attacker all ties, as defender all won
    assert "epoch10 attacks, imitation defends\n--- cat ---\nattacker: epoch10 speaks\n--- attacker wins ---" in out
    assert "imitation attacks, epoch10 defends\n--- cat ---" in out and "tied game" not in out
    assert out.endswith(f"Report, to open in a browser: {tmp_path / 'report.html'}\n")


def write_answers(folder, model: str, share: float) -> None:
    for kind in KINDS:
        number = len(read_json_or_jsonl(TASKS / f"{kind}.jsonl"))
        scores = [float(place < share * number) for place in range(number)]
        settings = {"own_tasks": tasks_digest()}
        write_json(folder / model / f"{TASK.format(kind)}.json", {"scores": {METRIC: scores}, "settings": settings})


def test_show_prints_the_questions_outside_the_game_once_they_were_asked(tmp_path, capsys):
    write_match(tmp_path / "epoch1" / "eval", "epoch1", dict.fromkeys(("imitation", "epoch1"), taboo.TIED))
    tiny_world.Show(output_dir=str(tmp_path)).run()
    assert "Questions outside the game" not in capsys.readouterr().out
    for model, share in (("base", 0), ("imitation", 0.5), ("epoch1", 1)):
        write_answers(tmp_path / "reasoning", model, share)
    (tmp_path / "reasoning" / "results.json").touch()
    tiny_world.Show(output_dir=str(tmp_path)).run()
    table = capsys.readouterr().out.partition("Questions outside the game")[2].splitlines()[2:8]
    lines = {line.split()[0]: line.split() for line in table}
    assert lines["model"][1:] == [*KINDS, "all", "minus", "imitation"]
    assert lines["chance"][1:] == ["0.250"] * 6 and lines["scripted"][2] == "0.956"
    assert lines["imitation"][1:7] == ["0.500"] * 2 + ["0.501"] + ["0.500"] * 3
    assert lines["epoch1"][6] == "1.000" and lines["epoch1"][9].startswith("+0.500")


def test_reason_asks_all_models_of_a_loop_and_writes_its_report_anew(tmp_path, monkeypatch):
    for name in ("epoch10/model", "epoch2/model/merged"):
        (tmp_path / name).mkdir(parents=True)
    ran = []

    def run(command, **how):
        ran.append(command)
        return subprocess.CompletedProcess(command, 3 * ("tools.evaluate_reasoning" not in command))

    monkeypatch.setattr(questions.subprocess, "run", run)
    with pytest.raises(OSError, match="report.py ended with status 3"):
        questions.Reason(output_dir=str(tmp_path)).run()
    asked, report = ran
    start = asked.index("--models") + 1
    assert [name.partition("=")[0] for name in asked[start : start + 4]] == ["base", "imitation", "epoch2", "epoch10"]
    assert {f"epoch10={tmp_path}/epoch10/model", f"epoch2={tmp_path}/epoch2/model/merged"} < set(asked)
    assert report[1].endswith("tools/report.py")
    assert report[2:] == [str(tmp_path)]
    accepted = parse_flags(evaluate_reasoning.Flags, asked[3:], description="")
    assert [task.task for task in accepted.tasks] == [TASK.format(kind) for kind in KINDS]


def test_show_before_any_match_says_so(tmp_path):
    with pytest.raises(ValueError, match="has not come to a match yet"):
        tiny_world.Show(output_dir=str(tmp_path)).run()
