"""The report: its numbers and its games, from whole and from partial folders, and the page, parsed."""

import json
import re
from collections.abc import Mapping
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import call
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs
from scripted import messages

from tools import report
from tools.common.errors import UserError
from tools.common.files import read_json, write_json, write_records
from tools.games import load_game
from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, DEFENDER_WINS, TIED
from tools.measure import report_page
from tools.measure.estimates import UNKNOWN
from tools.measure.matches import result_rows, shown_rows
from tools.measure.report_contents import read_folder, shown_game, split_at_marks

TABOO, TWENTY_QUESTIONS = load_game("taboo"), load_game("twenty_questions")
SELF_PLAY = {ATTACKER_WINS: 6, DEFENDER_WINS: 8, ATTACKER_BREAKS: 4, TIED: 2}
BELIEF = {  # means by number of hints
    0: {"log_share": -5.0, "rank_1": 0.0, "belief": -9.0},
    1: {"log_share": -2.0, "rank_1": 0.5, "belief": -4.0},
    "last": {"log_share": -1.0, "rank_1": 1.0, "belief": -3.0},
}
NASTY = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!-- \u2028 &lt; 'lemon'"


def played(outcomes: Mapping[str, int], game=TABOO, **more) -> list[dict]:
    """So many games of each outcome, each with a word of its own; the second message is empty, both are cut off."""
    shared = {"game": game.name, "max_turns": 5, "history": messages(game, "Hello!", ""), "length": 2}
    shared |= {"replies": [{"finish_reason": "length"}] * 2}
    ends = [outcome for outcome, number in outcomes.items() for _ in range(number)]
    return [shared | {"target_word": f"word{n}", "outcome": end} | more for n, end in enumerate(ends)]


def met(first: str, second: str, outcomes: Mapping[str, int], words: str = "w") -> list[dict]:
    """The same of a match; `first` has the first role."""
    return played(outcomes, attacker=first, defender=second, words=words, seed=0)


def make_match(folder: Path, games: list[dict], players: list[str], against: str | None = None) -> None:
    """Write what tools/evaluate_games.py leaves of these games."""
    write_records(folder / "games_results.json", games)
    results = {"settings": {"players": players, "against": against}, "games_path": "games_results.json"}
    write_json(folder / "matches.json", results | {"results": list(result_rows(games, TABOO))})


@pytest.fixture
def output(tmp_path) -> Path:
    """A finished run of two epochs."""
    folder = tmp_path / "demo"
    for name, metric in (("imitation", "kl"), ("epoch1", "policy_loss"), ("epoch2", "policy_loss")):
        entries = [{"step": step, "loss": 1 / step, metric: 0.1} for step in (1, 2, 3)]
        write_json(folder / name / "model/trainer_state.json", {"log_history": [*entries, {"step": 3}]})
        write_json(folder / name / "model/train_results.json", {"train_loss": 1.0})  # named like a file of games
    for number in (1, 2):
        epoch = folder / f"epoch{number}"
        write_records(epoch / "episodes/words_results.json", played(SELF_PLAY))
        games = []
        for words in ("played", "held_out"):
            games += met(epoch.name, "imitation", {ATTACKER_WINS: 5 + number, TIED: 5 - number}, words=words)
            games += met("imitation", epoch.name, {ATTACKER_BREAKS: 4, DEFENDER_WINS: 6}, words=words)
        make_match(epoch / "eval", games, ["imitation", epoch.name], against="imitation")
        rows = [
            {"model": model, "hints": hints, "games": 9, "candidates": 40, **means}
            for model in (["base"] if number == 1 else []) + [epoch.name]  # as the loop asks them
            for hints, means in BELIEF.items()
        ]
        write_json(epoch / "belief/belief.json", {"table": rows})
    return folder


def points(figure: Figure) -> dict[str, list]:
    """The points (x, y) of each line, by its name."""
    return {line.name: list(zip(line.x, line.y, strict=True)) for line in figure.data}


def test_a_run_is_reported_whole(output):
    contents = read_folder(output, TABOO)
    assert contents.sources == [f"epoch{k}, {kind}" for k in (1, 2) for kind in ("self-play", "match")]
    assert len(contents.games) == 120
    (_, ends), (_, lengths), (_, faults), *_ = report_page.play_charts(contents.plays)
    shares = dict.fromkeys((outcome.name for outcome in TABOO.outcomes), 0) | {
        outcome: number / 20 for outcome, number in SELF_PLAY.items()
    }
    assert points(ends) == {outcome: [("epoch1", share), ("epoch2", share)] for outcome, share in shares.items()}
    assert points(lengths) == {"all games": [("epoch1", 2), ("epoch2", 2)]}
    assert points(faults) == {
        "empty": [("epoch1", 1 / 2), ("epoch2", 1 / 2)],
        "cut off at the token limit": [("epoch1", 1), ("epoch2", 1)],
    }
    charts = {title: points(figure) for title, figure in report_page.training_charts(contents.logs)}
    assert list(charts) == ["loss", "kl", "policy_loss"] and list(charts["kl"]) == ["imitation"]
    assert charts["loss"]["epoch1"] == [(1, 1), (2, 1 / 2), (3, 1 / 3)]
    charts = report_page.belief_charts(contents.belief)
    for (title, figure), name in zip(charts, ("log_share", "rank_1", "belief"), strict=True):
        line = [(hints, BELIEF[hints][name]) for hints in (0, 1)]
        assert points(figure) == dict.fromkeys(("base", "epoch1", "epoch2"), line)
        assert name in title and ("40 candidates" in title) == (name != "belief")


def test_belief_of_a_model_whose_logits_are_nan_is_a_gap(output):
    row = {"model": "m", "hints": 0, "candidates": 9, "log_share": None, "rank_1": 0.0, "belief": None}
    write_json(output / "epoch2/belief/belief.json", {"table": [row]})
    for _, figure in report_page.belief_charts(read_folder(output, TABOO).belief):
        assert len(points(figure)["base"]) == 2 and len(points(figure)["m"]) == 1


def test_points_by_epoch_are_those_of_the_matches_with_their_intervals(output):
    rows = [
        row
        for epoch in ("epoch1", "epoch2")
        for row in json.loads((output / epoch / "eval/matches.json").read_text())["results"]
        if row["player"] == epoch and row["seed"] is None
    ]
    charts = report_page.match_charts([row for each in read_folder(output, TABOO).matches for row in shown_rows(each)])
    titles = {"both": "in both roles", "attacker": "as attacker", "defender": "as defender"}
    for (title, figure), (role, words) in zip(charts, titles.items(), strict=True):
        assert title == f"Points {words} against imitation"
        assert [line.name for line in figure.data] == ["all", "played", "held_out"]
        for line in figure.data:
            expected = [row for row in rows if row["role"] == role and line.name == row["words"]]
            columns = zip(line.x, line.y, line.error_y.arrayminus, line.error_y.array, expected, strict=True)
            for x, y, below, above, row in columns:
                assert (x, y) == (row["player"], row["points"])
                assert [y - below, y + above] == pytest.approx(row["points_interval"])


def axis_titles(charts) -> set[str]:
    return {figure.layout.xaxis.title.text for _, figure in charts}


def test_axes_say_epoch_where_players_and_games_are_those_of_epochs(tmp_path, output):
    contents = read_folder(output, TABOO)
    rows = shown_rows(contents.matches[0])
    assert axis_titles(report_page.match_charts(rows)) == {"epoch"}
    assert axis_titles(report_page.play_charts(contents.plays)) == {"epoch"}
    others = [row | {"player": "a_model"} for row in rows]
    assert axis_titles(report_page.match_charts(others)) == {"player"}
    write_records(tmp_path / "games/a_results.json", played(SELF_PLAY))
    assert axis_titles(report_page.play_charts(read_folder(tmp_path / "games", TABOO).plays)) == {"file"}


def cells_of(html: str) -> list[list[str]]:
    """The cells of a table, line by line."""
    lines = re.findall("<tr>(.*?)</tr>", html)
    return [[unescape(cell) for cell in re.findall("<t[hd]>(.*?)</t[hd]>", line)] for line in lines]


def test_the_page_begins_with_a_table_of_points_by_epoch(output):
    call(report.main, output)
    page = (output / "report.html").read_text(encoding="utf-8")
    first_lines = page[page.index("<h1>") : page.index("<script>")]
    assert "against imitation in both roles" in first_lines
    head, *lines = cells_of(first_lines)
    assert head == ["epoch", "points", "95% interval", "wins", "ties", "losses"]
    assert [[line[0], *line[3:]] for line in lines] == [["epoch1", "32", "8", "0"], ["epoch2", "34", "6", "0"]]
    for line in lines:
        (row,) = (
            row
            for row in json.loads((output / line[0] / "eval/matches.json").read_text())["results"]
            if (row["player"], row["words"], row["role"], row["seed"]) == (line[0], "all", "both", None)
        )
        low, high = row["points_interval"]
        assert line[1:3] == [f"{row['points']:.1%}", f"{100 * low:.1f} to {100 * high:.1f}"]


def test_a_measure_that_an_older_file_of_a_match_lacks_is_unknown_and_the_others_are_shown(output):
    path = output / "epoch1/eval/matches.json"
    results = read_json(path)
    for row in results["results"]:
        del row["breach"], row["breach_interval"]
    write_json(path, results)
    call(report.main, output)
    page = (output / "report.html").read_text(encoding="utf-8")
    head, *lines = cells_of(page[page.index("<h2>Matches") : page.index("<h2>Games")])
    breaches = {line[0]: line[head.index("breach")] for line in lines if line[head.index("role")] == "both"}
    assert breaches["epoch1"] == UNKNOWN and breaches["epoch2"].startswith("20.0 [")
    assert all(UNKNOWN not in line[head.index("points")] for line in lines)


def test_the_first_table_tells_the_opponents_if_there_are_several(tmp_path):
    games = [game for pair in ("ab", "ba", "ac", "ca", "bc", "cb") for game in met(*pair, {ATTACKER_WINS: 1})]
    make_match(tmp_path, games, ["a", "b", "c"])
    head, *lines = cells_of(report_page.headline(read_folder(tmp_path, TABOO).matches))
    assert head[:2] == ["player", "against"]
    assert [line[:2] for line in lines] == [[a, f"{b} in both roles"] for a, b in ("ba", "ca", "cb")]


@pytest.mark.parametrize("match, outcome", [("substring", ATTACKER_WINS), ("word", TIED)])
def test_a_stored_outcome_counts_and_a_released_game_without_one_is_judged(tmp_path, match, outcome):
    game = {"history": messages(TABOO, "Hello!", "We start."), "target_word": "art", "max_turns": 1}
    write_json(tmp_path / "im_sampling_words_results.json", [game, game | {"outcome": DEFENDER_WINS, "length": 2}])
    contents = read_folder(tmp_path, load_game("taboo", match=match))
    assert [(game["outcome"], game["length"]) for game in contents.games] == [(outcome, 2), (DEFENDER_WINS, 2)]


@pytest.mark.parametrize("own", [{"outcome": "attacker_wins", "length": 1}, {"outcome": TIED}, {"outcome": None}])
def test_games_of_others_with_an_outcome_of_their_own_or_without_a_length_are_judged(tmp_path, own):
    game = {"history": messages(TABOO, "Hm?", "I know the word! It is art!"), "target_word": "art", "max_turns": 1}
    write_json(tmp_path / "other_results.json", [game | own])
    contents = read_folder(tmp_path, TABOO)
    assert [(game["outcome"], game["length"]) for game in contents.games] == [(DEFENDER_WINS, 2)]
    (summary,) = contents.plays.values()
    assert sum(summary["outcomes"].values()) == summary["games"] == 1


def test_the_target_word_and_guesses_are_marked():
    assert split_at_marks(TABOO, "art", "") == []
    assert split_at_marks(TABOO, "city", "Many cities.") == [["", "Many "], ["secret", "cities"], ["", "."]]
    pieces = split_at_marks(TABOO, "dog", "I know the word! It is a dog")
    assert pieces == [["guess", "I know the word! It is a "], ["guess secret", "dog"]]


def test_the_deciding_message_and_those_after_it_are_marked():
    (game,) = played({ATTACKER_WINS: 1})
    shown = shown_game(TABOO, 0, game | {"length": 1})["messages"]
    assert [message["kinds"] for message in shown] == ["first decisive", "second late"]


def test_parts_of_a_run_have_a_page(output):
    rows = [
        {"model": model, "benchmark": name, "value": 40.0, "stderr": error}
        for model, name, error in (("base", "ARC-e", 2.0), ("base", "PIQA", None), ("epoch2", "ARC-e", 2.0))
    ]
    write_json(output / "reasoning/results.json", {"results": rows})
    for part in ("epoch1/episodes", "imitation/model", "reasoning"):
        call(report.main, output / part)
        assert "No match was played" in (output / part / "report.html").read_text()
    table = report_page.reasoning_table(read_folder(output / "reasoning", TABOO).reasoning)
    assert "<tr><td>base</td><td>40.0 ± 2.0</td><td>40.0</td></tr>" in table
    assert "<tr><td>epoch2</td><td>40.0 ± 2.0</td><td>-</td></tr>" in table


def test_bad_input_is_refused_by_its_name(tmp_path):
    refused = call(report.main, tmp_path, status=2)
    assert "no games, training, matches or scores" in refused.errors and not list(tmp_path.iterdir())
    refused = call(report.main, tmp_path, "--prompt_templates", "x.json", status=2)
    assert "unrecognized arguments: --prompt_templates" in refused.errors  # no prompt is on the page
    write_records(tmp_path / "a_results.json", played({TWENTY_QUESTIONS.outcomes[0].name: 1}, TWENTY_QUESTIONS))
    with pytest.raises(UserError, match="a_results.json: game 1: .*'twenty_questions', not of 'taboo'"):
        read_folder(tmp_path, TABOO)


class Scripts(HTMLParser):
    """The script elements of a page, and all attributes that load something."""

    def __init__(self, page: str):
        super().__init__()
        self.scripts, self.loaded, self.inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.inside = tag == "script"
        self.scripts += [""] * self.inside
        self.loaded += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


def test_the_page_loads_nothing_holds_plotly_once_and_escapes_what_players_wrote(tmp_path):
    history = messages(TABOO, NASTY, "")
    old, new = f"old {NASTY}", f"new {NASTY}"
    games = met(new, old, {ATTACKER_WINS: 1}, words=NASTY) + met(old, new, {ATTACKER_WINS: 1}, words=NASTY)
    make_match(tmp_path, [game | {"history": history} for game in games], [old, new])
    call(report.main, tmp_path)
    parsed = Scripts((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert parsed.loaded == ["data:,"]
    assert parsed.scripts.count(get_plotlyjs()) == 1
    assert sum(len(script) for script in parsed.scripts) < 1.2 * len(get_plotlyjs())
    assert not any("window.hacked" in script for script in parsed.scripts if "<script" in script)
    data = next(json.loads(script) for script in parsed.scripts if script.startswith('{"outcomes"'))
    assert "".join(text for _, text in data["games"][0]["messages"][0]["parts"]) == NASTY
