"""Statistics of match play: counts seen from both sides, and intervals against numbers worked by hand."""

import math

import pytest
from scripted import messages

from tools.games import load_game
from tools.games.taboo import ATTACKER, ATTACKER_BREAKS, ATTACKER_WINS, DEFENDER, DEFENDER_WINS, TIED
from tools.measure.estimates import (
    clustered_standard_error,
    estimate,
    holm,
    student,
    t_quantile,
    wilson,
)
from tools.measure.matches import ALL, BOTH, result_rows

TABOO = load_game("taboo")


def test_the_standard_error_is_that_of_words_worked_by_hand():
    """Three words of 2, 2 and 4 games with 2, 0 and 3 points: mean 5/8, residuals 3/4, -5/4 and 1/2."""
    by_hand = math.sqrt(3 / 2 * (0.75**2 + 1.25**2 + 0.5**2)) / 8
    assert clustered_standard_error([2, 2, 4], [2, 0, 3]) == pytest.approx(by_hand)


def test_wilsons_interval_is_that_of_the_textbooks():
    assert wilson(0.0, 10, 1.96) == pytest.approx([0.0, 0.2775], abs=1e-4)
    assert wilson(8 / 10, 10, 1.96) == pytest.approx([0.4902, 0.9433], abs=1e-4)


@pytest.mark.parametrize(
    "sizes, totals, mean, interval",
    [
        ([1], [1], 1.0, [0.2065, 1.0]),  # Wilson's for one observation
        ([6], [3], 0.5, [0.0546, 0.9454]),  # one word: its games say nothing about other words
        ([5] * 16, [5] * 16, 1.0, [0.8064, 1.0]),  # 16 words
        ([5] * 16, [0] * 16, 0.0, [0.0, 0.1936]),
        ([4, 4], [2.0, 2.0], 0.5, [0.0945, 0.9055]),  # all tied
    ],
)
def test_games_that_are_all_alike_count_once_a_word(sizes, totals, mean, interval):
    assert estimate(sizes, totals) == (mean, pytest.approx(interval, abs=1e-4))


def test_intervals_and_p_values_of_independent_values_are_students_and_holm_adjusts_p_values():
    # Mean 0.6, standard deviation 0.1, standard error 0.1 / sqrt(3), t(2) = 4.303; t = 10.39, p = 0.00913.
    mean, interval, p = student([0.5, 0.6, 0.7])
    assert (mean, p) == (pytest.approx(0.6), pytest.approx(0.00913, abs=1e-5))
    assert interval == pytest.approx([0.3516, 0.8484], abs=1e-4)
    assert math.isnan(student([0.55 - 0.5, 0.6 - 0.55])[2])  # equal up to rounding
    assert student([0.5])[:2] == (0.5, None) and student([0.5, 0.5])[:2] == (0.5, None)
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.04, math.nan]) == pytest.approx([0.08, math.nan], nan_ok=True)


def test_two_arms_are_equal_where_the_larger_p_of_two_one_sided_tests_says_so():
    # Mean 0.01, standard error 0.01 / sqrt(3). To the nearer margin t(2) = sqrt(3), p = 1/2 - sqrt(3) / (2 sqrt(5)).
    mean, interval, p = student([0.0, 0.01, 0.02], 0.02)
    assert (mean, p) == (pytest.approx(0.01), pytest.approx(0.5 - math.sqrt(3 / 5) / 2))
    half = 2.91999 * 0.01 / math.sqrt(3)  # the 95% quantile of t(2)
    assert interval == pytest.approx([0.01 - half, 0.01 + half], abs=1e-6)
    assert student([0.0, -0.01, -0.02], 0.02)[2] == pytest.approx(p)
    assert student([0.0, 0.01, 0.02], 0.01 + half)[2] == pytest.approx(0.05, abs=1e-6)
    assert math.isnan(student([0.01], 0.02)[2])


def game(attacker, defender, outcome, word="a", *, words="played", seed=0, texts=("x", "y"), length=2):
    who = {"attacker": attacker, "defender": defender, "words": words, "seed": seed}
    return {"target_word": word, "history": messages(TABOO, *texts), "outcome": outcome, "length": length, **who}


def rows_of(games, of=TABOO):
    rows = list(result_rows(games, of))
    by_key = {(row["player"], row["opponent"], row["words"], row["role"], row["seed"]): row for row in rows}
    assert len(by_key) == len(rows)  # no row twice
    return by_key


def counts(row):
    """Games, wins, losses, ties; breaches."""
    return [row[name] for name in ("games", "wins", "losses", "ties")] + [round(row["breach"] * row["games"])]


NEW_AGAINST_OLD = [
    game("new", "old", ATTACKER_WINS, "a", texts=("x", "y", "x", "y"), length=4),
    game("new", "old", ATTACKER_WINS, "a", texts=("x", "y", "", "y"), length=4),
    game("new", "old", ATTACKER_BREAKS, "b", texts=("x",), length=1),
    game("new", "old", TIED, "b", texts=("x", ""), length=2),
    game("old", "new", DEFENDER_WINS, "a"),
    game("old", "new", ATTACKER_BREAKS, "b", texts=("x",), length=1),
    game("old", "new", ATTACKER_WINS, "b"),
]


def test_a_row_counts_its_players_games_in_its_role():
    row = rows_of(NEW_AGAINST_OLD)["new", "old", "played", ATTACKER, None]
    assert counts(row) == [4, 2, 1, 1, 1]
    assert row["empty"] == 1 / 6  # of six messages; the other's empty reply counts for the other
    assert row["points"] == 2.5 / 4
    assert [row[name] for name in ("win", "loss", "tie", "breach")] == [0.5, 0.25, 0.25, 0.25]
    assert row["length"] == (4 + 4 + 1 + 2) / 4


def test_a_breach_of_the_attacker_is_the_defenders_win():
    row = rows_of(NEW_AGAINST_OLD)["new", "old", "played", DEFENDER, None]
    assert counts(row) == [3, 2, 1, 0, 1]


def test_both_roles_are_the_sum_of_the_two_and_the_opponents_row_is_the_mirror_image():
    rows = rows_of(NEW_AGAINST_OLD)
    both = rows["new", "old", "played", BOTH, None]
    sides = [counts(rows["new", "old", "played", role, None]) for role in TABOO.roles]
    assert counts(both) == list(map(sum, zip(*sides, strict=True)))
    mirror = rows["old", "new", "played", BOTH, None]
    assert (mirror["wins"], mirror["losses"], mirror["ties"]) == (both["losses"], both["wins"], both["ties"])
    assert mirror["points"] == pytest.approx(1 - both["points"])
    assert mirror["points_interval"] == pytest.approx([1 - bound for bound in reversed(both["points_interval"])])


def test_the_interval_of_both_roles_takes_games_of_a_word_together():
    """Word a: 3 games, 3 points; word b: 4 games, 1.5 points. Mean 4.5/7, residuals 15/14 and -15/14, t of 1."""
    row = rows_of(NEW_AGAINST_OLD)["new", "old", "played", BOTH, None]
    mean = 4.5 / 7
    error = math.sqrt(2 * 2 * (15 / 14) ** 2) / 7
    assert row["points"] == pytest.approx(mean)
    assert row["points_interval"] == pytest.approx(wilson(mean, mean * (1 - mean) / error**2, t_quantile(1)))


def test_seeds_and_lists_are_pooled_and_a_word_of_several_stays_one():
    games = [
        game("new", "old", outcome, "a", words=words, seed=seed)
        for words in ("played", "held_out")
        for seed, outcome in ((0, ATTACKER_WINS), (7, DEFENDER_WINS))
    ]
    rows = rows_of(games)
    assert {key[2] for key in rows} == {"played", "held_out", ALL}
    assert {key[4] for key in rows} == {None, 0, 7}
    pooled = rows["new", "old", ALL, ATTACKER, None]
    assert (pooled["games"], pooled["points"]) == (4, 0.5)
    assert pooled["points_interval"] == estimate([4], [2])[1]
    assert rows["new", "old", ALL, ATTACKER, 0]["points"] == 1.0
    assert rows["new", "old", "played", ATTACKER, 7]["games"] == 1


def test_a_player_against_itself_counts_each_game_once_in_each_role():
    rows = rows_of([game("new", "new", ATTACKER_WINS), game("new", "new", TIED, "b")])
    assert set(rows) == {("new", "new", "played", role, seed) for role in TABOO.roles for seed in (None, 0)}
    assert [rows["new", "new", "played", role, None]["points"] for role in TABOO.roles] == [0.75, 0.25]
    assert rows["new", "new", "played", ATTACKER, None]["games"] == 2


def test_points_and_roles_are_those_of_the_game():
    """20 Questions: both gain the point or none does, and a breach has no winner."""
    questions = load_game("twenty_questions")
    history = messages(questions, "Is it old?", "Is it old?")
    who = {"guesser": "new", "answerer": "old", "words": "played", "seed": 0, "history": history, "length": 2}
    games = [
        who | {"target_word": word, "outcome": outcome}
        for word, outcome in (("a", "found"), ("a", "found"), ("a", "no answer"), ("b", "not found"))
    ]
    rows = rows_of(games, questions)
    assert {key[3] for key in rows} == {"guesser", "answerer", BOTH}
    for player, opponent, role in (("new", "old", "guesser"), ("old", "new", "answerer")):
        row = rows[player, opponent, "played", role, None]
        assert counts(row) == [4, 0, 0, 4, 1] and row["points"] == 0.5
        assert row["points_interval"] == estimate([3, 1], [2, 0])[1]
