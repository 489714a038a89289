"""Who meets whom in an evaluation by match, and its tables."""

from tools.games import load_game
from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, DEFENDER_WINS, TIED
from tools.measure.matches import matches_text, pairs, result_rows, shown_rows

TABOO = load_game("taboo")
SETTINGS = {"players": ["old", "mid", "new"], "words": ["played"], "seeds": [0], "against": None}
SETTINGS |= {"task_type": "sampling", "games_per_word": 1, "max_turns": 5}


def test_every_pair_meets_in_both_roles_or_all_meet_one_player():
    assert pairs(["a", "b", "c"]) == [("a", "b"), ("b", "a"), ("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")]
    assert pairs(["a", "b", "c"], "b") == [("a", "b"), ("b", "a"), ("c", "b"), ("b", "c")]
    assert pairs(["a"]) == pairs(["a"], "a") == [("a", "a")]


def results_of(outcomes, against=None):
    """What the program writes, of games given as {(attacker, defender): outcomes}, one word each."""
    history = [{"role": "attacker", "content": "x"}]
    games = [
        {"attacker": attacker, "defender": defender, "words": "played", "seed": 0, "target_word": f"word{number}"}
        | {"outcome": outcome, "length": 1, "history": history}
        for (attacker, defender), ends in outcomes.items()
        for number, outcome in enumerate(ends)
    ]
    return {"settings": SETTINGS | {"against": against}, "results": list(result_rows(games, TABOO))}


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
    shown = matches_text(results_of(ROUND_ROBIN), TABOO)
    lines = [line.split() for line in shown.splitlines()]
    details = lines[next(at for at, line in enumerate(lines) if line[:2] == ["player", "opponent"]) + 1 : -2]
    pairs_shown = [["mid", "old"], ["new", "old"], ["new", "mid"]]
    roles = ("both", "attacker", "defender")
    assert [line[:4] for line in details] == [[*pair, "played", role] for pair in pairs_shown for role in roles]
    assert details[3][4:6] == ["8", "93.8"]  # new against old: seven wins and a tie
    assert "nan" not in shown
    assert shown.splitlines()[-1].startswith("mid against old in both roles: points 62.5% [")


def test_against_one_player_all_others_are_shown_against_it():
    met = {pair: ends for pair, ends in ROUND_ROBIN.items() if "mid" in pair}
    shown = shown_rows(results_of(met, against="mid"))
    assert [(row["player"], row["opponent"]) for row in shown[::3]] == [("old", "mid"), ("new", "mid")]
