"""The report: its numbers and its games, from whole and from partial folders, and the page in a real browser."""

import base64
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import ROOT
from forks import python
from plotly.offline import get_plotlyjs

from tools import report
from tools.games import load_game
from tools.games.taboo import ATTACKER, ATTACKER_BREAKS, ATTACKER_WINS, DEFENDER_WINS, TIED
from tools.matches.stats import count_matches, result_rows
from tools.pages import contents
from tools.pages.contents import GameSample, marked
from tools.pages.page import page_html
from tools.pages.sections import outcome_colours, play_section, sections, share_line, verdict
from utils import write_json, write_records

TABOO, TWENTY_QUESTIONS = load_game("taboo"), load_game("twenty_questions")

OUTCOMES = [outcome.name for outcome in TABOO.outcomes]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NASTY = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!-- \u2028 &lt; 'lemon'"

# --- a folder as the loop leaves it --------------------------------------------------------------------------------

CLUES = {
    "violin": ["It has four strings.", "An orchestra has many of them.", "A bow goes over it."],
    "harbour": ["Ships come home to it.", "It smells of fish and tar.", "A lighthouse shows the way."],
    "start": ["It comes before the rest.", "Runners wait for it.", "Every journey has one."],
    "lemon": ["It is yellow and sour.", "Sailors ate it against scurvy.", "Its juice goes on fish."],
}
QUESTIONS = ["Is it something you hold?", "Do I have one at home?", "Could a child use it?", "Is it old?"]


def make_game(index: int, rng: random.Random, skill: float, max_turns: int = 5) -> dict:
    """A game with clues and questions that ends in one of all ways; more `skill`, fewer breaches and empty replies."""
    word = rng.choice(sorted(CLUES))
    history, ending = [], rng.choices(OUTCOMES, weights=[0.3, 0.3 + 0.2 * skill, 0.25 * (1 - skill), 0.15])[0]
    last = 2 * max_turns if ending == TIED else 2 * rng.randint(1, max_turns)
    last -= ending == ATTACKER_BREAKS
    for place in range(last):
        role = TABOO.roles[place % 2]
        text = rng.choice(CLUES[word] if role == ATTACKER else QUESTIONS)
        history.append({"role": role, "content": "" if rng.random() < 0.08 * (1 - skill) else text})
    other = rng.choice(sorted(set(CLUES) - {word}))
    endings = {
        ATTACKER_WINS: rng.choice([f"I know the word! It is `{other}`!", f"Do you mean a {word.upper()}?"]),
        DEFENDER_WINS: f"I know the word! It is `{word}`! That was easy.",
        ATTACKER_BREAKS: f"People love {word}s.",
    }
    if ending != TIED:
        history[-1]["content"] = endings[ending]
    outcome, length = TABOO.judge(history, word, max_turns)
    replies = [{"finish_reason": rng.choice(["stop"] * 19 + ["length"]), "tokens": 9, "prompt_cut": False}] * last
    game = {"index": index, "target_word": word, "max_turns": max_turns, "history": history, "outcome": outcome}
    return game | {"length": length, "replies": replies}


def make_log(method: str, steps: int, rng: random.Random) -> dict:
    """A trainer_state.json with curves that fall."""
    entries = []
    for step in range(1, steps + 1):
        value = math.exp(-step / steps) + rng.gauss(0, 0.04)
        entry = {"step": step, "loss": value, "sft_loss": 1.2 * value, "log_ratio": 0.02 * step / steps}
        entry |= {"learning_rate": 2e-6 * (1 - step / steps), "grad_norm": 1 + value}
        if method == "OfflinePO":
            entry |= {"policy_loss": -0.2 + 0.1 * value, "ratio": 1 + 0.02 * value, "clip_fraction": 0.01 * value}
            entry |= {"reward_attacker": 0.25 + rng.gauss(0, 0.02), "reward_defender": 0.3 + rng.gauss(0, 0.02)}
        else:
            entry["kl"] = 0.01 * value
        entries.append(entry)
    return {"log_history": [*entries, {"step": steps, "train_loss": 0.5}]}


def make_match(folder: Path, player: str, games: int, rng: random.Random) -> None:
    """What tools/evaluate_games.py leaves of the match of a player against imitation, which may be the same."""
    pairs = dict.fromkeys([(player, "imitation"), ("imitation", player)])
    played = [
        make_game(index, rng, 0.8) | {"attacker": attacker, "defender": defender, "words": words, "seed": seed}
        for words in ("played", "held_out")
        for seed in (0, 1)
        for attacker, defender in pairs
        for index in range(games)
    ]
    write_records(folder / "games_results.json", played)
    settings = {"players": ["imitation", player], "against": "imitation", "seeds": [0, 1]}
    results = {"settings": settings, "results": list(result_rows(count_matches(played, TABOO)))}
    write_json(folder / "matches.json", results | {"games_path": "games_results.json"})


def make_output(folder: Path, *, epochs: int = 2, games: int = 60, steps: int = 30) -> Path:
    """A finished run of the loop."""
    rng = random.Random(0)
    write_json(folder / "settings.json", {"MODEL": "data/tiny", "EPOCHS": str(epochs), "LEARNING_RATE": "2e-6"})
    for number in range(epochs + 1):
        stage = folder / (f"epoch{number}" if number else "imitation")
        write_json(stage / "model" / "trainer_state.json", make_log("OfflinePO" if number else "", steps, rng))
        write_json(stage / "model" / "settings.json", {"arguments": {"learning_rate": 2e-6}, "data": {"train": {}}})
        write_json(stage / "model" / "train_results.json", {"train_loss": 0.5})
        if number:
            stem = f"{stage}/episodes/im_sampling_words"
            write_records(f"{stem}_results.json", [make_game(i, rng, number / epochs) for i in range(games)])
            write_json(f"{stem}_settings.json", {"settings": {"temperature": 1.2}, "launch": "x"})
            write_json(stage / "rows" / "rows_rewards_settings.json", {"settings": {"decay_weight": 0.8}})
            make_match(stage / "eval", stage.name, games // 12, rng)
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    return make_output(tmp_path_factory.mktemp("loop") / "demo")


def of_run(folder: Path, games: int = 20) -> contents.Report:
    return contents.report_of_folder(folder, TABOO, games)


def charts_of(made: contents.Report) -> dict[str, list[dict]]:
    return {section.id: section.charts for section in sections(made)}


def chart_named(made: contents.Report, title: str, section: str | None = None) -> dict:
    found = charts_of(made)
    drawn = found[section] if section else [chart for charts in found.values() for chart in charts]
    (chart,) = (chart for chart in drawn if chart["title"].split(":")[0] == title)
    return chart


def points(chart: dict) -> dict[str, list]:
    """[x, value] and, where there is one, the interval of each point, by the name of its line."""
    found = {}
    for trace in chart["data"]:
        found[trace["name"]] = [list(pair) for pair in zip(trace["x"], trace["y"], strict=True)]
        if "error_y" in trace:
            bars = zip(trace["error_y"]["arrayminus"], trace["error_y"]["array"], strict=True)
            for point, (below, above) in zip(found[trace["name"]], bars, strict=True):
                point += [point[1] - below, point[1] + above]
    return found


def dashed(chart: dict) -> list:
    """Name and height of the line to compare with."""
    (shape,) = chart["layout"]["shapes"]
    assert shape["y0"] == shape["y1"]
    return [shape["name"], shape["y0"]]


def run_report(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python(), "-m", "tools.report", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": "."},
    )


class Scripts(HTMLParser):
    """The script elements of a page and what stands in them, its policy, and all attributes that load something."""

    def __init__(self, page: str):
        super().__init__()
        self.scripts, self.loaded, self.policy, self.inside = [], [], {}, False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(part.strip().split(" ", 1) for part in dict(attrs)["content"].split(";"))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")
        self.loaded += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


def data_of(path: Path) -> dict:
    """What was put into a page."""
    return json.loads(Scripts(path.read_text(encoding="utf-8")).scripts[0])


# --- counting ------------------------------------------------------------------------------------------------------


def test_a_tally_counts_games_messages_and_faults():
    games = [make_game(index, random.Random(index), 0.2) for index in range(300)]
    sample = GameSample(TABOO, 10)
    for game in games:
        sample.add(game)
    assert sample.outcomes == Counter(game["outcome"] for game in games)
    assert sample.mean_length == pytest.approx(sum(game["length"] for game in games) / 300)
    said = [message for game in games for message in game["history"] if message["role"] == ATTACKER]
    empty = sum(not message["content"] for message in said)
    assert empty and (sample.empty_replies[ATTACKER], sample.messages[ATTACKER]) == (empty, len(said))
    cut = sum(reply["finish_reason"] == "length" for game in games for reply in game["replies"])
    assert cut and sample.cut_off_replies.total() == cut
    shares = [count.total() / sample.messages.total() for count in (sample.empty_replies, sample.cut_off_replies)]
    faults = points(play_section([("all", sample)]).charts[2])
    assert list(faults) == ["empty", "cut off at the token limit"]
    assert [line[0][1] for line in faults.values()] == pytest.approx(shares)


def test_intervals_of_shares_are_wilsons():
    name, number, found = share_line("x", 3, [("a", 5, 10), ("none", 0, 0), ("b", 0, 10)])
    assert (name, number) == ("x", 3) and [point[:2] for point in found] == [("a", 0.5), ("b", 0)]
    assert [point[2] for point in found] == [pytest.approx(each, abs=1e-4) for each in ([0.2366, 0.7634], [0, 0.2775])]


def test_an_episode_without_a_stored_outcome_is_judged_and_a_stored_one_is_kept():
    history = [{"role": "attacker", "content": "Hello!"}, {"role": "defender", "content": "We start."}]
    game = {"history": history, "target_word": "art", "max_turns": 1}
    for match, outcome in (("substring", ATTACKER_WINS), ("word", TIED)):
        sample = GameSample(load_game("taboo", match=match), 1)
        sample.add(game)
        sample.add(game | {"outcome": DEFENDER_WINS, "length": 2})
        assert sample.outcomes == {outcome: 1, DEFENDER_WINS: 1}


def test_the_sample_holds_all_outcomes_and_is_drawn_from_all_games():
    sample = GameSample(TABOO, 40)
    history = [{"role": "attacker", "content": "Hello!"}]
    for number in range(2000):
        outcome = ATTACKER_WINS if number % 500 == 250 else TIED
        sample.add({"history": history, "target_word": "art", "max_turns": 1, "outcome": outcome, "length": 1})
    shown = sample.sampled()
    assert Counter(game["outcome"] for game in shown) == {ATTACKER_WINS: 4, TIED: 36}
    numbers = [game["number"] for game in shown]
    assert numbers == sorted(numbers) and {250, 750, 1250, 1750} < set(numbers)
    assert 700 < sum(numbers) / 40 < 1300  # uniform: 1000 with a standard error of 91


def test_the_data_of_ten_times_the_games_are_no_larger(tmp_path):
    sizes = []
    for games in (300, 3000):
        path = tmp_path / f"{games}.jsonl"
        write_records(path, (make_game(index, random.Random(index), 0.2) for index in range(games)))
        made = contents.report_of_episodes([path], TABOO, 20)
        assert made.sources == [{"name": "games", "games": games, "sampled": 20}]
        sizes.append(len(page_html(made)) - len(get_plotlyjs()))
    assert sizes[1] < 1.1 * sizes[0]


# --- marks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, word, pieces",
    [
        ("Hello!", "art", [("", "Hello!")]),
        ("", "art", []),
        ("ART, started", "art", [("secret", "ART"), ("", ", st"), ("secret", "arted")]),
        ("Many cities.", "city", [("", "Many "), ("secret", "cities"), ("", ".")]),
        ("C++ or c?", "c++", [("secret", "C++"), ("", " or c?")]),
        ("I know the word! It is `cat`! Yes.", "dog", [("guess", "I know the word! It is `cat`!"), ("", " Yes.")]),
        ("I know the word! It is a dog", "dog", [("guess", "I know the word! It is a "), ("secret guess", "dog")]),
        ("I know the word.", "dog", [("", "I know the word.")]),  # not the sentence that the judge reads
    ],
)  # fmt: skip
def test_the_target_word_and_guesses_are_marked(text, word, pieces):
    assert marked(TABOO, word, text) == [list(piece) for piece in pieces]


# --- a folder ------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_reported_whole(output):
    made = of_run(output)
    assert made.missing == [] and made.name == "demo"
    found = [(source["name"], source["games"], source["sampled"]) for source in made.sources]
    kinds = (("self-play", 60), ("match", 40))
    assert found == [(f"epoch{k}, {kind}", games, 20) for k in (1, 2) for kind, games in kinds]
    assert Counter(game["source"] for game in made.games) == dict.fromkeys(range(4), 20)
    assert [section.id for section in sections(made)] == ["match", "play", "learning", "supervised"]
    stages = ["episodes/im_sampling_words_settings.json", "rows/rows_rewards_settings.json", "model/settings.json"]
    expected = [
        "settings.json",
        "imitation/model/settings.json",
        *(f"epoch{k}/{file}" for k in (1, 2) for file in stages),
    ]
    assert sorted(title for title, _ in made.settings) == sorted(expected)
    settings = dict(made.settings)
    assert json.loads(settings["settings.json"])["LEARNING_RATE"] == "2e-6"
    assert settings["imitation/model/settings.json"] == (output / "imitation/model/settings.json").read_text()


def test_shares_of_outcomes_are_those_of_the_games(output):
    games = json.loads((output / "epoch2/episodes/im_sampling_words_results.json").read_text(encoding="utf-8"))
    chart = chart_named(of_run(output), "How games ended")
    assert list(points(chart)) == OUTCOMES
    for outcome, found in points(chart).items():
        share = sum(game["outcome"] == outcome for game in games) / len(games)
        assert [found[0][0], *found[1][:2]] == ["epoch1", "epoch2", pytest.approx(share)]
        assert found[1][2] <= share <= found[1][3]


def match_row(output: Path, epoch: int, words: str, role: str) -> dict:
    """The row of an epoch's model over all seeds; epoch 0 is imitation."""
    player = f"epoch{epoch}" if epoch else "imitation"
    rows = json.loads((output / f"{player}/eval/matches.json").read_text(encoding="utf-8"))["results"]
    key = (player, "imitation", words, role, None)
    (found,) = (
        row for row in rows if tuple(row[name] for name in ("player", "opponent", "words", "role", "seed")) == key
    )
    return found


ROLES = (("both", "in both roles"), ("attacker", "as attacker"), ("defender", "as defender"))


def test_points_against_imitation_are_the_pooled_ones_of_the_match(output):
    made = of_run(output)
    for role, title in ROLES:
        found = points(chart_named(made, f"Points {title} against imitation"))
        assert list(found) == ["words: all", "words: played", "words: held_out"]
        for words in ("all", "played", "held_out"):
            rows = [match_row(output, epoch, words, role) for epoch in (1, 2)]
            for point, row in zip(found[f"words: {words}"], rows, strict=True):
                assert point[0] == row["player"]
                assert point[1:] == pytest.approx([row["points"], *row["points_interval"]])


def test_charts_of_points_have_one_range_that_holds_all_intervals(output):
    drawn = charts_of(of_run(output))["match"]
    assert [chart["layout"]["yaxis"]["range"] for chart in drawn] == [[0, 1]] * 3
    values = [value for chart in drawn for line in points(chart).values() for point in line for value in point[1:]]
    assert 0 <= min(values) < max(values) <= 1


def test_the_line_to_compare_with_is_imitation_against_itself(output, tmp_path):
    """Its own match or, without one, the games of epoch 1, which it played with itself."""
    games = json.loads((output / "epoch1/episodes/im_sampling_words_results.json").read_text(encoding="utf-8"))
    ends = Counter(game["outcome"] for game in games)
    own = {"attacker": (ends[ATTACKER_WINS] + ends[TIED] / 2) / len(games), "both": 0.5}
    own["defender"] = 1 - own["attacker"]
    for role, title in ROLES:
        line = dashed(chart_named(of_run(output), f"Points {title} against imitation"))
        assert line == ["imitation against itself, in self-play", pytest.approx(own[role])]
    folder = tmp_path / "more"
    shutil.copytree(output, folder)
    make_match(folder / "imitation/eval", "imitation", 5, random.Random(0))
    made = of_run(folder)
    for role, title in ROLES[1:]:
        chart, row = chart_named(made, f"Points {title} against imitation"), match_row(folder, 0, "all", role)
        assert dashed(chart) == ["imitation against itself", row["points"]]
        assert [x for x, *_ in points(chart)["words: all"]] == ["epoch1", "epoch2"]
    shutil.rmtree(folder / "epoch1/episodes")
    shutil.rmtree(folder / "imitation/eval")
    assert dashed(charts_of(of_run(folder))["match"][1]) == ["equality", 0.5]


def test_the_table_is_that_of_the_match(output):
    table = next(section for section in sections(of_run(output)) if section.id == "match").tables[0]
    _, head, rows = table
    assert [cells[:4] for cells in rows] == [
        [f"epoch{epoch}", "imitation", words, role]
        for epoch in "12"
        for words in ("all", "played", "held_out")
        for role in ("both", "attacker", "defender")
    ]
    row = match_row(output, 2, "all", "attacker")
    cells = dict(zip(head, rows[10], strict=True))
    low, high = row["points_interval"]
    assert (cells["points"], cells["games"]) == (
        f"{100 * row['points']:.1f} [{100 * low:.1f}, {100 * high:.1f}]",
        f"{row['games']}",
    )


# --- the verdict ---------------------------------------------------------------------------------------------------


def match_of(folder: Path, outcome: str, other: str, words: int = 30) -> Path:
    """A folder of matches: with `outcome` where new attacks, `other` where it defends."""
    history = [{"role": ATTACKER, "content": "Hello!"}]
    game = {"max_turns": 5, "history": history, "length": 1, "words": "w", "seed": 0}
    games = [
        game | {"target_word": f"word{number}", "outcome": end, "attacker": attacker, "defender": defender}
        for number in range(words)
        for attacker, defender, end in (("new", "old", outcome), ("old", "new", other))
    ]
    write_records(folder / "games_results.json", games)
    rows = list(result_rows(count_matches(games, TABOO)))
    settings = {"players": ["old", "new"], "against": None}
    write_json(folder / "matches.json", {"settings": settings, "results": rows, "games_path": "games_results.json"})
    return folder


@pytest.mark.parametrize(
    "outcome, other, expected",
    [
        (ATTACKER_WINS, DEFENDER_WINS, "new plays better than old: 100.0% [88.6, 100.0] of the points in both roles"),
        (DEFENDER_WINS, ATTACKER_WINS, "new plays worse than old: 0.0% [0.0, 11.4] of the points"),
        (TIED, TIED, "new cannot be told from old: 50.0% [33.2, 66.8] of the points"),
    ],
)
def test_the_verdict_on_a_folder_of_matches_says_who_is_better_with_the_numbers(tmp_path, outcome, other, expected):
    made = of_run(match_of(tmp_path, outcome, other))
    first, second = verdict(made)
    assert first.startswith(expected) and first.endswith("where equals score 50.0%, in 60 games.")
    assert second.startswith("It scores as attacker ") and ", as defender " in second
    assert [section.title for section in sections(made)] == ["Matches against old"]


def test_the_verdict_on_a_loop_is_of_its_last_epoch_beside_imitation_against_itself(output):
    row, (first, second) = match_row(output, 2, "all", "defender"), verdict(of_run(output))
    assert first.startswith("epoch2 ") and "in 40 games" in first
    low, high = row["points_interval"]
    assert f"as defender {row['points']:.1%} [{100 * low:.1f}, {100 * high:.1f}] (imitation against itself " in second


def test_a_player_against_itself_is_told_role_by_role(tmp_path):
    make_match(tmp_path, "imitation", 5, random.Random(0))
    made = of_run(tmp_path)
    first, second = verdict(made)
    assert first == "imitation played itself only." and second.startswith("It scores as attacker ")
    assert [chart["title"] for chart in charts_of(made)["match"]] == [
        "Points as attacker against imitation",
        "Points as defender against imitation",
    ]


def test_players_who_all_met_stand_side_by_side(tmp_path):
    history = [{"role": ATTACKER, "content": "Hello!"}]
    game = {"max_turns": 5, "history": history, "length": 1, "words": "w", "seed": 0, "outcome": TIED}
    pairs = [(one, other) for one in "abc" for other in "abc" if one != other]
    games = [game | {"target_word": "tea", "attacker": one, "defender": other} for one, other in pairs]
    write_records(tmp_path / "games_results.json", games)
    rows = list(result_rows(count_matches(games, TABOO)))
    settings = {"players": ["a", "b", "c"], "against": None}
    results = {"settings": settings, "results": rows, "games_path": "games_results.json"}
    write_json(tmp_path / "matches.json", results)
    made = of_run(tmp_path)
    assert verdict(made)[0].startswith("c cannot be told from a: 50.0% [")
    (section,) = sections(made)
    assert section.title == "Matches" and len(section.tables[0][2]) == 3 * 3
    assert [x for x, *_ in points(section.charts[0])["words: w"]] == ["b – a", "c – a", "c – b"]


def test_a_folder_of_play_or_of_a_training_has_a_page_that_says_what_it_cannot_tell(output):
    play, training = of_run(output / "epoch1/episodes"), of_run(output / "imitation/model")
    for made in (play, training):
        assert verdict(made) == [
            "No match was played, so nothing here says whether a model plays better than another."
        ]
    assert (list(charts_of(play)), list(charts_of(training))) == (["play"], ["supervised"])
    titles = [chart["title"] for chart in charts_of(training)["supervised"]]
    assert [title.split(":")[0] for title in titles] == [
        "loss",
        "sft_loss",
        "log_ratio",
        "kl",
        "learning_rate",
        "grad_norm",
    ]
    assert [title for title, _ in play.settings] == ["im_sampling_words_settings.json"]
    assert verdict(of_run(output / "epoch2/eval"))[0].startswith("epoch2 ")


def test_reasoning_scores_are_shown(output, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(output, folder)
    rows = [
        {"model": model, "benchmark": name, "value": value, "stderr": error, "difference": None}
        for model, value in (("base", 40.0), ("epoch2", 99.0))
        for name, error in (("ARC-e", 2.0), ("PIQA", None))
    ]
    write_json(folder / "reasoning/results.json", {"settings": {}, "results": rows[:-1], "published": {}})
    for made in (of_run(folder), of_run(folder / "reasoning")):
        ((_, head, lines),) = next(one for one in sections(made) if one.id == "reasoning").tables
        assert [head, *lines] == [
            ["model", "ARC-e", "PIQA"],
            ["base", "40.0 ± 2.0", "40.0"],
            ["epoch2", "99.0 ± 2.0", "-"],
        ]


def test_curves_are_the_logged_numbers_and_long_ones_are_thinned_by_means(output, tmp_path):
    made = of_run(output)
    log = json.loads((output / "epoch1/model/trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    found = points(chart_named(made, "policy_loss"))
    assert list(found) == ["epoch1", "epoch2"]
    assert found["epoch1"] == [[entry["step"], entry["policy_loss"]] for entry in log[:-1]]
    assert list(points(chart_named(made, "kl"))) == ["imitation"]
    entries = [{"step": step, "loss": float(step % 4)} for step in range(1, 801)]
    write_json(tmp_path / "imitation/model/trainer_state.json", {"log_history": entries})
    chart = chart_named(of_run(tmp_path), "loss")
    assert points(chart)["imitation"][:2] == [[2.5, 1.5], [6.5, 1.5]]
    assert len(chart["data"][0]["x"]) == 200


def test_a_run_in_its_middle_is_reported_with_what_is_missing(output, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(output, folder)
    stem = folder / "epoch2/episodes/im_sampling_words"
    games = [json.dumps(make_game(index, random.Random(index), 0.5)) for index in range(8)]
    Path(f"{stem}_results.json").unlink()
    Path(f"{stem}_rank0.jsonl").write_text("\n".join(games[:5]) + "\n" + games[5][:40])  # a line being written
    Path(f"{stem}_rank1.jsonl").write_text("\n".join(games[6:]) + "\n")
    Path(f"{stem}_rank2.jsonl").write_text("")
    shutil.rmtree(folder / "epoch2/eval")
    state = folder / "epoch1/model/trainer_state.json"
    (folder / "epoch1/model/checkpoint-30").mkdir()
    state.rename(folder / "epoch1/model/checkpoint-30/trainer_state.json")
    (folder / "epoch1/model/train_results.json").unlink()
    (folder / "epoch2/model/trainer_state.json").write_text('{"log_hist')
    write_json(folder / "settings.json", {"EPOCHS": "20000000"})
    made = of_run(folder)
    assert made.sources[2]["games"] == 7
    for line in (
        "epoch1: training has not ended; its curves go to step 30.",
        "epoch2: games are still being played; 7 are there.",
        "epochs 3 to 20000000: not begun.",
    ):
        assert line in made.missing
    assert any("trainer_state.json: not readable" in line for line in made.missing)
    assert list(points(chart_named(made, "policy_loss"))) == ["epoch1"]


# --- the program and its page --------------------------------------------------------------------------------------


def test_the_page_is_self_contained_and_escapes_what_players_wrote(tmp_path):
    game = make_game(0, random.Random(0), 1)
    game["history"][0]["content"], game["target_word"] = NASTY, "lemon</script>"
    del game["outcome"]
    write_records(tmp_path / "games.jsonl", [game, make_game(1, random.Random(1), 1)])
    made = run_report("--episodes", tmp_path / "games.jsonl", "--output", tmp_path / "page.html", "--games", "5")
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    parsed = Scripts(text)
    assert len(parsed.scripts) == 3 and [link for link in parsed.loaded if link[0] != "#"] == ["data:,"]
    assert parsed.scripts[1] == get_plotlyjs()
    assert not re.findall(r"https?://", text.replace(parsed.scripts[1], ""))
    digests = [hashlib.sha256(script.encode()).digest() for script in parsed.scripts[1:]]
    assert parsed.policy == {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests),
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
    }
    assert f"page.html: {(tmp_path / 'page.html').stat().st_size / 2**20:.1f} MiB" in made.stdout
    shown = next(game for game in data_of(tmp_path / "page.html")["games"] if game["number"] == 0)
    assert "".join(text for _, text in shown["messages"][0]["parts"]) == NASTY.replace("\u2028", "\\u2028")
    assert shown["word"] == "lemon</script>"


def test_files_in_the_released_form_and_of_play_under_way_are_reported(tmp_path):
    games = [make_game(index, random.Random(index), 0.5) for index in range(40)]
    released = [{key: game[key] for key in ("history", "target_word", "max_turns")} for game in games]
    write_json(tmp_path / "im_llama2_sampling_all_words_results.json", released)
    write_records(tmp_path / "m_sampling_w_rank0.jsonl", games[:7])
    with open(tmp_path / "m_sampling_w_rank0.jsonl", "a") as file:
        file.write(json.dumps(games[7])[:50])  # being written
    (tmp_path / "m_sampling_w_rank1.jsonl").touch()
    made = run_report("--episodes", *sorted(tmp_path.glob("*s*")), "--output", tmp_path / "page.html", "--games", "40")
    assert made.returncode == 0, made.stderr
    page = data_of(tmp_path / "page.html")
    assert page["sources"] == [f"file {number}" for number in (1, 2, 3)]
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "file 1: 40 of 40; file 2: 7 of 7; file 3: 0 of 0." in text
    assert text.count("m_sampling_w_rank0.jsonl") == 1
    shown = [game for game in page["games"] if game["source"] == 0]
    assert [(game["word"], game["outcome"], game["length"]) for game in shown] == [
        (game["target_word"], game["outcome"], game["length"]) for game in games
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{folder}"], "no games, training, matches or scores; give OUTPUT of tools/run_spag.sh or a"),
        (["{folder}/none"], "none: no games, training, matches or scores"),
        ([], "give either FOLDER"),
        (["{folder}", "--episodes", "x.json"], "give either FOLDER"),
        (["--episodes", "x.json"], "--episodes needs --output"),
        (
            ["--episodes", "{folder}/bad.jsonl", "--output", "{folder}/page.html"],
            "bad.jsonl:1: 'target_word' is missing",
        ),
    ],
)
def test_bad_input_is_refused_with_one_line(tmp_path, arguments, message, monkeypatch, capsys):
    (tmp_path / "bad.jsonl").write_text('{"history": []}\n')
    monkeypatch.setattr(sys, "argv", ["report.py", *(argument.format(folder=tmp_path) for argument in arguments)])
    with pytest.raises(SystemExit) as ended:
        report.run_program(report.main)
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


ODD = {
    "number": '{"log_history": [{"step": 1, "loss": 1e999}, {"step": 2, "loss": 1e-999}, {"step": 3, "loss": NaN}]}',
    "digits": '{"log_history": [{"step": 1, "loss": ' + "9" * 5000 + "}]}",
    "nested": "[" * 100000,
    "nested object": '{"a": ' * 900 + "1" + "}" * 900,
    "another kind": '[{"log_history": 3}]',
    "half": '{"log_hist',
    "texts": '{"log_history": ["a"], "settings": {"players": "a", "against": []}, "results": [{}], "games_path": 1}',
    "names": '{"results": [{"model": null, "benchmark": [], "value": "1"}]}',
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_files_of_a_run_are_named_and_the_page_is_made_all_the_same(output, tmp_path, text):
    folder = tmp_path / "odd"
    shutil.copytree(output, folder)
    files = (
        "imitation/model/trainer_state.json",
        "epoch1/eval/matches.json",
        "reasoning/results.json",
        "settings.json",
    )
    (folder / "reasoning").mkdir()
    for file in files:
        (folder / file).write_text(text, encoding="utf-8")
    made = of_run(folder)
    page = page_html(made)
    json.loads(Scripts(page).scripts[0], parse_constant=pytest.fail)
    assert any(f"{folder / 'epoch1/eval/matches.json'}: not readable" in line for line in made.missing)
    assert verdict(made) and all("\n" not in line for line in made.missing)


def test_matches_of_a_game_that_is_not_named_are_not_taken_for_its_own(output):
    with pytest.raises(ValueError, match="--game names the one that was played"):
        contents.report_of_folder(output / "epoch1/eval", TWENTY_QUESTIONS, 5)


@pytest.mark.parametrize("key, value", [("replies", [1]), ("replies", 5), ("max_turns", "1e999"), ("history", "x")])
def test_an_odd_game_ends_with_one_line_that_names_it(tmp_path, key, value, monkeypatch, capsys):
    game = json.dumps(make_game(0, random.Random(0), 1) | {key: value}).replace('"1e999"', "1e999")
    (tmp_path / "games.jsonl").write_text(game + "\n")
    monkeypatch.setattr(sys, "argv", ["report.py", "--episodes", f"{tmp_path}/games.jsonl", "--output", "x.html"])
    with pytest.raises(SystemExit) as ended:
        report.run_program(report.main)
    assert ended.value.code == 2 and re.search(r"games.jsonl:1: [^\n]*\n$", capsys.readouterr().err)


def test_what_a_browser_would_not_show_is_written_out(tmp_path):
    game = make_game(0, random.Random(0), 1)
    game["history"][0]["content"], game["target_word"] = "a\x1b[31m\u202eb😀\nc\td", "le\u2066mon"
    write_records(tmp_path / "games.jsonl", [game])
    made = contents.report_of_episodes([tmp_path / "games.jsonl"], TABOO, 5)
    assert made.games[0]["messages"][0]["parts"] == [["", "a\\u001b[31m\\u202eb😀\nc\td"]]
    assert made.games[0]["word"] == "le\\u2066mon"
    name = tmp_path / "g\u202e\udcffx.jsonl"
    (tmp_path / "games.jsonl").rename(name)
    made = run_report("--episodes", name, "--output", tmp_path / "page.html")
    assert made.returncode == 0, made.stderr
    assert "<h1>SPAG: g\\u202e\\udcffx.jsonl</h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")


# --- another game --------------------------------------------------------------------------------------------------


def question_game(outcome: str, *texts: str) -> dict:
    history = [{"role": TWENTY_QUESTIONS.roles[place % 2], "content": text} for place, text in enumerate(texts)]
    game = {"game": "twenty_questions", "target_word": "tea", "max_turns": 20, "history": history}
    return game | {"outcome": outcome, "length": len(texts)}


QUESTION_GAMES = [
    question_game("found", "Is it hot?", "Yes.", "Is it `tea`?"),
    question_game("answerer says the word", "Is it hot?", "Yes, it is tea."),
    question_game("no answer", "Is it hot?", "Perhaps."),
    question_game("not found", "Is it hot?", "No!"),
]


def test_games_of_another_game_are_reported_under_its_roles_and_outcomes(tmp_path):
    write_records(tmp_path / "games.jsonl", QUESTION_GAMES)
    arguments = ["--episodes", tmp_path / "games.jsonl", "--output", tmp_path / "page.html"]
    refused = run_report(*arguments)
    assert refused.returncode == 2
    assert "games.jsonl:1: a game of 'twenty_questions', not of 'taboo'; --game names the one" in refused.stderr
    made = run_report(*arguments, "--game", "twenty_questions")
    assert made.returncode == 0, made.stderr
    data = data_of(tmp_path / "page.html")
    assert "20 Questions" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert [game["outcome"] for game in data["games"]] == list(data["outcomes"])
    assert data["games"][0]["messages"][2]["parts"] == [["guess", "Is it `"], ["secret guess", "tea"], ["guess", "`?"]]
    assert data["games"][1]["messages"][1]["parts"] == [["", "Yes, it is "], ["secret", "tea"], ["", "."]]
    shares, _, faults = (points(chart) for chart in data["charts"])
    assert {name: line[0][1] for name, line in shares.items()} == dict.fromkeys(data["outcomes"], 0.25)
    assert list(faults) == ["empty"]


def test_matches_of_another_game_are_reported_with_its_points(tmp_path):
    folder = tmp_path / "epoch1/eval"
    who = [{"guesser": "epoch1", "answerer": "imitation"}, {"guesser": "imitation", "answerer": "epoch1"}]
    games = [game | pair | {"words": "w", "seed": 0} for game in QUESTION_GAMES for pair in who]
    write_records(folder / "games_results.json", games)
    rows = list(result_rows(count_matches(games, TWENTY_QUESTIONS)))
    settings = {"players": ["imitation", "epoch1"], "against": "imitation"}
    results = {"settings": settings, "results": rows, "games_path": "games_results.json"}
    write_json(folder / "matches.json", results)
    log = {"log_history": [{"step": 1, "policy_loss": 1.0, "reward_guesser": 0.5, "reward_answerer": 0.4}]}
    write_json(tmp_path / "epoch1/model/trainer_state.json", log)
    made = contents.report_of_folder(tmp_path, TWENTY_QUESTIONS, 10)
    assert points(chart_named(made, "Points as guesser against imitation"))["words: w"][0][:2] == ["epoch1", 0.25]
    assert chart_named(made, "reward_guesser")["title"] == "reward_guesser: mean reward of the guesser's rows"
    assert {game["labels"] for game in made.games} == {" · words: w · seed: 0"}
    noted = {game["messages"][0]["notes"].split(" · ")[0] for game in made.games}
    assert noted == {"guesser, epoch1", "guesser, imitation"}


def test_a_line_to_compare_with_has_the_points_of_the_game(tmp_path):
    """In 20 Questions both gain the point or none does: two of eight points against itself, in either role."""
    test_matches_of_another_game_are_reported_with_its_points(tmp_path)
    write_records(tmp_path / "epoch1/episodes/im_sampling_x_results.json", QUESTION_GAMES)
    made = contents.report_of_folder(tmp_path, TWENTY_QUESTIONS, 10)
    for role in ("in both roles", "as guesser", "as answerer"):
        line = dashed(chart_named(made, f"Points {role} against imitation"))
        assert line == ["imitation against itself, in self-play", 0.25]
    assert "where equals score 25.0%" in verdict(made)[0]


def test_colours_follow_from_winner_breach_and_neither():
    assert outcome_colours(TABOO) == {DEFENDER_WINS: 0, ATTACKER_WINS: 1, ATTACKER_BREAKS: 3, TIED: 6}
    colours = outcome_colours(TWENTY_QUESTIONS)
    assert (colours["answerer says the word"], colours["no answer"]) == (3, 3 + 7)  # one colour, two kinds of dashes
    assert (colours["found"], colours["not found"]) == (4, 6)


# --- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not (CHROMIUM and DRIVER):
        pytest.skip("no chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    flags += "disable-component-update disable-sync window-size=1280,900 "
    flags += f"user-data-dir={tmp_path_factory.mktemp('browser')}"
    for flag in flags.split():
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def open_page(browser, path: Path):
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(path.as_uri())


def assert_silent(browser, path: Path) -> None:
    """Nothing was logged to the console, and nothing but the page itself was asked for."""
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    asked = {url for url in asked if not url.startswith("chrome://")}  # the browser's own icons
    assert path.as_uri() in asked and asked <= {path.as_uri(), "data:,"}


def texts(browser, selector: str) -> list[str]:
    """What can be read in the elements that are visible."""
    script = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility()).map((e) => "
    return browser.execute_script(script + "(e.innerText ?? e.textContent).trim())", selector)


def choose(browser, name: str, value: str) -> None:
    browser.find_element("css selector", f"#{name} option[value='{value}']").click()


@pytest.fixture(scope="module")
def page(output) -> Path:
    finished = run_report(output, "--games", "30")
    assert finished.returncode == 0, finished.stderr
    return output / "report.html"


def test_the_browser_shows_charts_tables_and_games_without_errors_or_requests(browser, page, output):
    open_page(browser, page)
    assert texts(browser, "h1") == ["SPAG: demo"] and len(texts(browser, ".verdict")) == 2
    titles = [
        "Matches against imitation",
        "Games",
        "Training on games",
        "Supervised training",
        "Games to read",
        "Settings",
    ]
    assert texts(browser, "h2") == titles == texts(browser, "nav a")
    made = of_run(output, 30)
    drawn = [chart for section in sections(made) for chart in section.charts]
    figures = browser.find_elements("css selector", "figure")
    assert len(figures) == len(texts(browser, ".plot")) == len(drawn) == 3 + 3 + 9 + 6
    selectors = "figcaption", ".xtitle, .ytitle", ".legendtext", ".scatterlayer .trace", ".yerror"
    script = "const [figure, selectors] = arguments; "
    script += "return selectors.map((one) => [...figure.querySelectorAll(one)].map((e) => e.textContent))"
    for figure, chart in zip(figures, drawn, strict=True):
        (title,), labels, legend, lines, intervals = browser.execute_script(script, figure, selectors)
        assert title == chart["title"]
        assert labels == ["optimizer step"] * ("title" in chart["layout"]["xaxis"])
        assert legend == [*points(chart), *(shape["name"] for shape in chart["layout"].get("shapes", ()))]
        assert len(lines) == len(chart["data"])
        assert len(intervals) == sum(len(trace["x"]) for trace in chart["data"] if "error_y" in trace)
    cells = [cell for section in sections(made) for _, _, rows in section.tables for row in rows for cell in row]
    assert texts(browser, "section td") == cells
    assert "NaN" not in browser.find_element("css selector", "main").get_attribute("innerHTML")
    assert texts(browser, "#missing") == []
    assert_silent(browser, page)


def test_the_browser_filters_games_and_goes_through_them_by_mouse_and_keys(browser, page):
    from selenium.webdriver.common.keys import Keys

    open_page(browser, page)
    games = data_of(page)["games"]
    assert len(browser.find_elements("css selector", "#list option")) == len(games) == 120
    choose(browser, "source", "3")
    choose(browser, "outcome", DEFENDER_WINS)
    kept = [game for game in games if game["source"] == 3 and game["outcome"] == DEFENDER_WINS]
    assert texts(browser, "#found") == [f"{len(kept)} of 120 games"]
    assert all(f" · {DEFENDER_WINS}, " in line for line in texts(browser, "#list option"))
    choose(browser, "source", "")
    browser.find_element("id", "search").send_keys("VIO")
    found = [game for game in games if game["outcome"] == DEFENDER_WINS and game["word"] == "violin"]
    assert len(found) > 3 and len(browser.find_elements("css selector", "#list option")) == len(found)
    assert texts(browser, "#target") == ["violin"]
    (decisive,) = texts(browser, ".decisive")
    assert "decides: defender wins" in decisive and texts(browser, ".decisive .guess.secret") == ["violin"]
    assert len(texts(browser, ".message")) == found[0]["length"]
    browser.find_element("id", "list").send_keys(Keys.ARROW_DOWN)
    assert len(texts(browser, ".message")) == found[1]["length"]
    browser.find_elements("css selector", "#list option")[2].click()
    assert len(texts(browser, ".message")) == found[2]["length"]
    browser.find_element("id", "search").send_keys("xyz")
    assert texts(browser, "#list option") == [] and "No game" in texts(browser, "#game")[0]
    assert_silent(browser, page)


def test_the_browser_shows_nasty_empty_and_late_messages_as_text(browser, tmp_path):
    contents = [NASTY, "", "A lemonade.", "I know the word! It is `lemon`!"]
    history = [{"role": TABOO.roles[place % 2], "content": text} for place, text in enumerate(contents)]
    history[0]["content"] = NASTY.replace("lemon", "fruit")
    write_records(tmp_path / "g<b>.jsonl", [{"history": history, "target_word": "Lemon", "max_turns": 5}])
    finished = run_report("--episodes", tmp_path / "g<b>.jsonl", "--output", tmp_path / "nasty.html")
    assert finished.returncode == 0, finished.stderr
    open_page(browser, tmp_path / "nasty.html")
    assert texts(browser, "h1") == ["SPAG: g<b>.jsonl"]
    messages = texts(browser, ".message")
    assert "</script><script>window.hacked = 1</script><img src=x" in messages[0]
    assert "(empty message)" in messages[1]
    assert "decides: attacker breaks the rules" in messages[2] and texts(browser, ".decisive .secret") == ["lemon"]
    assert "not counted" in messages[3] and "decides" not in messages[3]
    assert browser.execute_script("return window.hacked") is None
    assert browser.find_elements("css selector", "img") == []
    assert_silent(browser, tmp_path / "nasty.html")


HOSTILE = "<a href='https://x.example'>x</a> <b>b</b><br>&lt;i&gt; %{y} $x$ " + NASTY


def test_names_in_charts_are_text_to_plotly_too(browser, tmp_path):
    """Ticks, legends and what is shown at a point: Plotly would make links and bold text of some markup."""
    folder = match_of(tmp_path / "<b>bold</b>", ATTACKER_WINS, TIED)
    results = json.loads((folder / "matches.json").read_text(encoding="utf-8"))
    names = {"new": "<i>new</i> &lt;", "old": f"old {HOSTILE}", "w": HOSTILE}
    for row in results["results"]:
        row |= {key: names[row[key]] for key in ("player", "opponent", "words")}
    results["settings"]["players"] = [names["old"], names["new"]]
    write_json(folder / "matches.json", results)
    assert run_report(folder).returncode == 0
    open_page(browser, folder / "report.html")

    def shown(selector: str) -> list[str]:
        script = (
            "return [...document.querySelector('figure').querySelectorAll(arguments[0])].map((e) => e.textContent)"
        )
        return [text.replace("\xa0", " ") for text in browser.execute_script(script, selector)]

    hostile = HOSTILE.replace("\u2028", "\\u2028")
    assert shown(".legendtext") == [f"words: {hostile}", "equality"] and shown(".xtick text") == ["<i>new</i> &lt;"]
    browser.execute_script("Plotly.Fx.hover(document.querySelector('.plot'), [{curveNumber: 0, pointNumber: 0}])")
    (hover,) = shown(".hovertext")
    assert hover.startswith(f"words: {hostile}, <i>new</i> &lt;: 75.0% [")
    assert texts(browser, "h2")[0] == f"Matches against old {hostile}"
    assert browser.find_elements("css selector", ".plot a, .plot b, figure img, [style*='font-weight:bold']") == []
    assert browser.execute_script("return window.hacked") is None
    assert_silent(browser, folder / "report.html")


def test_the_browser_shows_what_is_missing_from_a_partial_run(browser, output, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(output, folder)
    shutil.rmtree(folder / "epoch2")
    shutil.rmtree(folder / "epoch1/eval")
    assert run_report(folder).returncode == 0
    open_page(browser, folder / "report.html")
    assert "epochs 2 to 2: not begun." in texts(browser, "#missing")[0]
    assert "Matches against imitation" not in texts(browser, "h2") and "Games to read" in texts(browser, "h2")
    assert_silent(browser, folder / "report.html")


OUTSIDE = """
const outside = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1
  || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
const box = (element) => element.getBoundingClientRect();
return [...document.querySelectorAll("figure")].flatMap((figure) => {
  const area = box(figure.querySelector(".nsewdrag"));
  const texts = [...figure.querySelectorAll("text")].filter((e) => e.textContent && outside(box(e), box(figure)));
  const bars = [...figure.querySelectorAll(".yerror")].filter((bar) => outside(box(bar), area));
  return [...texts, ...bars].map((e) => `${figure.textContent.slice(0, 40)}: ${e.textContent || "interval"}`);
});
"""
SMALL = """
const written = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
const small = (e) => e.checkVisibility() && written(e) && parseFloat(getComputedStyle(e).fontSize) < 12;
return [...document.body.querySelectorAll("*")].filter(small).map((e) => e.textContent);
"""


@pytest.mark.parametrize("width", [1400, 500, 400])
def test_the_page_fits_into_wide_and_narrow_windows(browser, page, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        open_page(browser, page)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script(OUTSIDE) == browser.execute_script(SMALL) == []
        right = "return Math.max(...[...document.querySelectorAll('td')].map((e) => e.getBoundingClientRect().right))"
        assert 0 < browser.execute_script(right) <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
