"""What models do in games of the embedded world: counts and measures of made-up games, worked by hand."""

import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers import call
from scripted import messages

from tools.common.files import read_json, write_json, write_records
from tools.games.taboo import TIED, Taboo
from tools.lab import preparations, results, table
from tools.lab.world.behaviour import count_games, count_rows, measures, row_measures
from tools.lab.world.players import Lexicon
from tools.loop.settings import FORMAT

TABOO = Taboo()
LEXICON = Lexicon(
    own={"cat": ("purr", "meow"), "cow": ("milk", "moo")},
    shared={"cat": ("animal", "pet"), "cow": ("animal", "farm")},
)


def game(attacker: str, defender: str, *texts: str, word: str = "cat") -> dict:
    """A stored game. Its stored outcome is that of a rule under which a wrong guess is a tie."""
    episode = {"attacker": attacker, "defender": defender, "target_word": word, "max_turns": 3, "outcome": TIED}
    return episode | {"history": messages(TABOO, *texts), "length": len(texts)}


GAMES = [
    game("new", "old", "It goes with purr.", "I know the word! It is cat!"),
    game("old", "new", "It goes with pet.", "I think of milk.", "It goes with milk.", "I know the word! It is cow!"),
    game("new", "old", "It goes with animal.", "Perhaps cat, who knows."),
    game("old", "new", "It goes with meow.", "Hm.", "It goes with cat."),  # breaks the rules: no hint
    game("old", "new", *["Hm."] * 6),
]


def test_hints_ends_and_guesses_of_both_roles_are_counted_by_hand():
    counts = count_games(GAMES, LEXICON)
    assert counts == {
        "games": 5,
        "messages": 2 + 4 + 2 + 3 + 6,
        "games as attacker": 5,
        "games as defender": 5,
        "points as attacker": 0 + 1 + 1 + 0 + 0.5,
        "points as defender": 1 + 0 + 0 + 1 + 0.5,
        "clear hints": 2,
        "ambiguous hints": 2,
        "false hints": 1 + 3,
        "wins by a wrong guess": 1,
        "wins by the word said": 1,
        "guesses in turn 1": 1,
        "right guesses in turn 1": 1,
        "guesses in turn 2": 1,
        "right guesses in turn 2": 0,
    }
    shares = measures(counts)
    assert [shares[f"{kind} hints"] for kind in ("clear", "ambiguous", "false")] == [2 / 8, 2 / 8, 4 / 8]
    assert (shares["wins by a wrong guess"], shares["wins by the word said"]) == (1 / 2, 1 / 2)
    assert (shares["games with a guess"], shares["turn of the guess"], shares["right guesses"]) == (2 / 5, 1.5, 1 / 2)
    assert (shares["points"], shares["points as attacker"], shares["messages"]) == (0.5, 0.5, 17 / 5)


def test_in_a_match_only_what_the_player_does_counts():
    counts = count_games(GAMES, LEXICON, "new")
    assert (counts["games as attacker"], counts["games as defender"]) == (2, 3)
    assert [counts[f"{kind} hints"] for kind in ("clear", "ambiguous", "false")] == [1, 1, 0]
    assert (counts["wins by a wrong guess"], counts["wins by the word said"]) == (0, 1)
    assert (counts["guesses in turn 2"], counts["right guesses in turn 2"]) == (1, 0)
    shares = measures(counts)
    assert (shares["points as attacker"], shares["points as defender"], shares["points"]) == (1 / 2, 1.5 / 3, 2.5 / 5)
    assert "turn of the guess" not in measures(count_games(GAMES[2:3], LEXICON))  # nobody guessed


def test_the_clearest_clue_of_a_message_counts_and_messages_after_the_end_do_not():
    late = game("a", "b", "It goes with pet. It goes with purr.", "I know the word! It is cat!", "It goes with farm.")
    counts = count_games([late], LEXICON)
    assert (counts["clear hints"], counts["ambiguous hints"], counts["false hints"]) == (1, 0, 0)


def test_rows_are_counted_by_role_with_their_weights():
    rows = [
        {"role": "attacker", "weight": 3.0},
        {"role": "attacker", "weight": 2.0},
        {"role": "defender", "weight": 1},
    ]
    counts = count_rows([*rows, {"type": "sft", "weight": 1}])
    assert [counts[f"rows of the {role}"] for role in TABOO.roles] == [2, 1]
    assert [counts[f"weights of the {role}"] for role in TABOO.roles] == [5, 1]
    assert row_measures(counts)["weight of a row of the attacker"] == 2.5
    of_attacker = {"rows of the attacker": 2, "weight of a row of the attacker": 2.5}
    assert row_measures(count_rows(rows[:2])) == of_attacker | {"rows of the defender": 0}
    assert row_measures({}) == {}


@pytest.fixture
def seeds(tmp_path, monkeypatch) -> Path:
    """The folder of two seeds with the arms released and sft, counted from stored games."""
    monkeypatch.setattr(preparations, "load_lexicon", lambda: LEXICON)
    monkeypatch.setattr(preparations, "match_of_imitation", lambda folder: None)
    for seed in (1, 2):
        for arm, of_match in (("released", GAMES[:3]), ("sft", GAMES[seed:])):
            loop = tmp_path / f"seed{seed}" / arm
            record = {"format": FORMAT, "settings": {"seed": str(seed)}, "became": {}, "made_by": {"spag": "abc"}}
            write_json(loop / "settings.json", record)
            write_records(loop / "epoch1/episodes/imitation_results.json", GAMES)
            playing = [{**each, "attacker": "epoch1"} for each in of_match]
            write_records(loop / "epoch1/eval/games_results.json", playing)
            write_records(loop / "epoch1/rows/rows.json", [{"role": "attacker", "weight": 3.0}])
            preparations.what_models_do(str(loop))
        table.collect(tmp_path / f"seed{seed}", ["released", "sft"])
    return tmp_path


def test_a_seed_stores_counts_and_the_measures_made_of_them(seeds):
    stored = read_json(seeds / "seed2.json")["arms"]
    assert stored["imitation"]["counts"]["0"]["self-play"] == count_games(GAMES, LEXICON)
    assert stored["imitation"]["epochs"]["0"]["self-play: false hints"] == 1 / 2
    of_sft = stored["sft"]["counts"]["1"]
    assert of_sft["match"]["clear hints"] == 1 and of_sft["rows"] == {
        "rows of the attacker": 1,
        "weights of the attacker": 3,
    }
    # Games 1 to 3: clear; ambiguous, false; ambiguous. Games 3 to 5: ambiguous; clear; three false.
    measured = {arm: stored[arm]["epochs"]["1"]["match: clear hints"] for arm in ("released", "sft")}
    assert measured == {"released": 1 / 4, "sft": 1 / 5}


def test_one_command_makes_table_and_picture_of_stored_seeds(seeds):
    arms = seeds / "arms.toml"
    arms.write_text(
        'picture = ["match: clear hints"]\n'
        'primary = [["match: points", "released", "sft", "0.02"], ["match: clear hints", "released", "sft"]]\n'
        "[arms.released]\nmodel = 'm'\nwords = 'w'\n[arms.sft]\ncontrol = 'sft'\n"
    )
    call(results.main, arms, seeds)
    lines = [line.split(" | ") for line in (seeds / "table.md").read_text().splitlines()]
    points, hints = (
        next(line for line in lines if line[0] == f"| match: {name}") for name in ("points", "clear hints")
    )
    # Points are 2/3 in both seeds of released, 2.5/4 and 1.5/3 in sft.
    assert points[4].startswith("+0.104 [") and points[5].startswith("margin 0.02: 90% [")
    assert hints[4].startswith("+0.079 [") and hints[5] == "-"  # clear hints are 1/4, and 1/7 and 1/5 in sft
    picture = (seeds / "picture.svg").read_text()
    call(results.main, arms, seeds)
    assert (seeds / "picture.svg").read_text() == picture and "<svg" in picture


def test_imitation_plays_the_match_of_the_first_epoch_against_itself(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(preparations, "run_python", lambda *words: commands.append(list(map(str, words))))
    log = tmp_path / "logs/epoch1_eval.log"
    log.parent.mkdir()
    started = f"=== Sun Nov 29 01:34:54 2026: {sys.executable} /x/tools/evaluate_games.py"
    log.write_text(f"\n{started} --seeds 1\nplay: 3 games\n\n{started} --seeds 2 --words 'a b.txt'\n")
    preparations.match_of_imitation(tmp_path)
    (command,) = commands
    assert command[:5] == ["/x/tools/evaluate_games.py", "--seeds", "2", "--words", "a b.txt"]
    assert command[5:] == [
        "--players",
        f"imitation={tmp_path}/imitation/model",
        "--output_dir",
        f"{tmp_path}/imitation/eval",
    ]


def test_a_picture_shows_each_mean_of_each_arm():
    values = {("imitation", 0): 0.4, ("released", 1): 0.1, ("sft", 1): 0.9}
    lines = [
        (measure, arm, epoch, seed, size * value + seed / 1000)
        for measure, size in (("small", 0.1), ("large", 1.0))
        for (arm, epoch), value in values.items()
        for seed in (1, 2)
    ]
    frame = pd.DataFrame(lines, columns=["measure", "arm", "epoch", "seed", "value"])
    figure = results.draw(frame, ["small", "large"], ["released", "sft"])
    for panel, size in zip(figure.axes, (0.1, 1.0), strict=True):
        low, high = panel.get_ylim()
        heights = [list(bars.lines[0].get_ydata()) for bars in panel.containers]
        means = [[size * value + 0.0015 for value in pair] for pair in ((0.4, 0.1), (0.4, 0.9))]
        assert heights == [pytest.approx(pair) for pair in means]
        assert low == 0 and max(map(max, heights)) < high
