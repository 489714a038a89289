"""What an evaluation by match plays and leaves: its schedule, the tables as text, the plot."""

import json
import re
from xml.etree import ElementTree

import pytest
from conftest import ROOT

from tools.games import load_game
from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, DEFENDER_WINS, TIED
from tools.matches import text
from tools.matches.results import write_plot, write_results
from tools.matches.stats import Match, count_matches, pairs, result_rows, schedule
from utils import write_records

TABOO = load_game("taboo")

# --- the schedule --------------------------------------------------------------------------------------------------


def test_every_pair_meets_in_both_roles():
    assert pairs(["a", "b", "c"]) == [("a", "b"), ("b", "a"), ("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")]


def test_against_one_player_the_others_do_not_meet():
    assert pairs(["a", "b", "c"], "b") == [("a", "b"), ("b", "a"), ("c", "b"), ("b", "c")]


@pytest.mark.parametrize("against", [None, "a"])
def test_a_single_player_meets_itself(against):
    assert pairs(["a"], against) == [("a", "a")]


def test_the_schedule_is_match_after_match_and_the_list_again_for_each_game_of_a_word():
    games = schedule([("a", "a")], {"long": ["x", "y", "z"], "short": ["w"]}, [0], games_per_word=2)
    assert [word for _, word in games] == ["x", "y", "z", "x", "y", "z", "w", "w"]
    assert [match.words for match, _ in games] == ["long"] * 6 + ["short"] * 2


def test_every_pair_plays_each_list_with_each_seed():
    games = schedule(pairs(["a", "b"]), {"long": ["x", "y"], "short": ["z"]}, [3, 4], games_per_word=2)
    assert list(dict.fromkeys(match for match, _ in games))[:5] == [
        Match("a", "b", "long", 3),
        Match("a", "b", "long", 4),
        Match("a", "b", "short", 3),
        Match("a", "b", "short", 4),
        Match("b", "a", "long", 3),
    ]
    assert len(games) == 2 * 2 * 2 * 3


# --- the tables ----------------------------------------------------------------------------------------------------


def results_of(outcomes, against=None):
    """What the program writes, of games given as {(attacker, defender): outcomes}, one word each."""
    history = [{"role": "attacker", "content": "x"}]
    games = [
        {"attacker": attacker, "defender": defender, "words": "played", "seed": 0, "target_word": f"word{number}"}
        | {"outcome": outcome, "length": 1, "history": history}
        for (attacker, defender), ends in outcomes.items()
        for number, outcome in enumerate(ends)
    ]
    settings = {"players": ["old", "mid", "new"], "words": ["played"], "seeds": [0], "against": against}
    settings |= {"task_type": "sampling", "games_per_word": 1, "max_turns": 5}
    rows = list(result_rows(count_matches(games, TABOO)))
    return {"settings": settings, "results": rows, "games_path": "games.json"}


WIN, LOSS, TIE, BREACH = ATTACKER_WINS, DEFENDER_WINS, TIED, ATTACKER_BREAKS
ROUND_ROBIN = {
    ("old", "mid"): [WIN, LOSS, TIE, BREACH],
    ("mid", "old"): [WIN, WIN, TIE, LOSS],
    ("old", "new"): [LOSS, LOSS, LOSS, BREACH],
    ("new", "old"): [WIN, WIN, WIN, TIE],
    ("mid", "new"): [TIE, TIE, TIE, TIE],
    ("new", "mid"): [WIN, LOSS, WIN, LOSS],
}


def test_the_table_shows_each_pair_once_in_every_role():
    shown = text.matches_text(results_of(ROUND_ROBIN), TABOO)
    lines = [line.split() for line in shown.splitlines()]
    details = lines[next(at for at, line in enumerate(lines) if line[:2] == ["player", "opponent"]) + 1 : -2]
    pairs_shown = [["mid", "old"], ["new", "old"], ["new", "mid"]]
    roles = ("both", "attacker", "defender")
    assert [line[:4] for line in details] == [[*pair, "played", role] for pair in pairs_shown for role in roles]
    assert details[3][4:6] == ["8", "93.8"]  # new against old: seven wins and a tie
    assert "nan" not in shown
    assert shown.splitlines()[-1].startswith("mid against old in both roles: points 62.5% [")


def test_one_line_tells_the_points_of_each_pair():
    line = text.points_line(text.shown_rows(results_of({("old", "mid"): [WIN, LOSS], ("mid", "old"): [WIN, TIE]})))
    assert re.fullmatch(r"mid against old in both roles: points 62.5% \[[\d.]+, [\d.]+\] in 4 games", line)
    assert "new against new as attacker: points" in text.points_line(
        text.shown_rows(results_of({("new", "new"): [WIN]}))
    )


def test_against_one_player_all_others_are_shown_against_it():
    met = {pair: ends for pair, ends in ROUND_ROBIN.items() if "mid" in pair}
    shown = text.shown_rows(results_of(met, against="mid"))
    assert [(row["player"], row["opponent"]) for row in shown[::3]] == [("old", "mid"), ("new", "mid")]


def test_the_plot_names_players_lists_and_roles(tmp_path):
    pytest.importorskip("matplotlib")
    write_plot(tmp_path / "matches.svg", results_of(ROUND_ROBIN), TABOO)
    shown = "".join(ElementTree.parse(tmp_path / "matches.svg").getroot().itertext())
    labels = ("new", "vs old", "vs mid", "points, %", "breach, %", "as defender", "in both roles")
    assert not [label for label in labels if label not in shown]


def test_a_plot_takes_names_as_they_are(tmp_path):
    """Not as the mathematics that matplotlib reads between dollars."""
    pytest.importorskip("matplotlib")
    made = results_of({("a$\\frac{$", "new"): [WIN], ("new", "a$\\frac{$"): [WIN]})
    made["settings"]["players"] = ["new", "a$\\frac{$"]
    write_plot(tmp_path / "matches.svg", made, TABOO)
    assert "a$\\frac{$" in "".join(ElementTree.parse(tmp_path / "matches.svg").getroot().itertext())


def test_a_plot_that_fails_leaves_the_results(tmp_path, monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("no fonts")

    monkeypatch.setattr("tools.matches.results.write_plot", fail)
    made = results_of({("old", "new"): [WIN]})
    history = [{"role": "attacker", "content": "x"}]
    game = {"attacker": "old", "defender": "new", "words": "played", "seed": 0, "target_word": "a", "length": 1}
    write_records(tmp_path / "games.json", [game | {"history": history, "outcome": WIN}])
    shown = write_results(tmp_path, tmp_path / "games.json", made["settings"], TABOO)
    assert (tmp_path / "matches.txt").read_text() == shown and (tmp_path / "matches.json").is_file()
    assert "matches.svg is not drawn: RuntimeError('no fonts')" in caplog.text


def test_matches_of_another_game_are_written_under_its_roles(tmp_path):
    questions = load_game("twenty_questions")
    games = [
        {"guesser": guesser, "answerer": answerer, "words": "played", "seed": 0, "target_word": word}
        | {"outcome": outcome, "length": 1, "history": [{"role": "guesser", "content": "Is it `tea`?"}]}
        for guesser, answerer in (("old", "new"), ("new", "old"))
        for word, outcome in (("tea", "found"), ("cup", "not found"), ("jug", "no answer"))
    ]
    write_records(tmp_path / "games.json", games)
    settings = {"players": ["old", "new"], "words": ["played"], "seeds": [0], "against": None}
    settings |= {"task_type": "sampling", "games_per_word": 1, "max_turns": 20}
    shown = write_results(tmp_path, tmp_path / "games.json", settings, questions)
    assert shown == (tmp_path / "matches.txt").read_text() and shown.startswith("20 Questions by match")
    assert "Points are the mean points of a game" in shown
    rows = json.loads((tmp_path / "matches.json").read_text())["results"]
    assert {row["role"] for row in rows} == {"guesser", "answerer", "both"}
    assert all(row["points"] == pytest.approx(1 / 3) for row in rows)
    assert (tmp_path / "matches.svg").is_file()


def test_intervals_are_written_alike_everywhere():
    assert text.with_interval(0.54, [0.512, 0.568]) == "0.540 [0.512, 0.568]"
    assert text.with_interval(0.54, [0.512, 0.568], ".1%") == "54.0% [51.2, 56.8]"
    assert text.with_interval(0.54, [-0.512, 0.568], "+.3f") == "+0.540 [-0.512, +0.568]"
    assert text.with_interval(None, None) == "-"


def test_the_documentation_names_every_field_of_a_row():
    section = (ROOT / "tools/matches/README.md").read_text(encoding="utf-8").partition("## Files")[2]
    example = json.loads(re.search(r"```json\n(.*?)```", section, flags=re.DOTALL)[1])
    table = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", section, flags=re.MULTILINE))))
    for row in results_of(ROUND_ROBIN)["results"]:
        assert list(row) == list(example)
        assert set(row) <= table
        assert list(row["rates"]) == list(example["rates"]) and list(row["clean"]) == list(example["clean"])
