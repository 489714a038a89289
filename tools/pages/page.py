"""The page as one HTML file that needs no network: the verdict, charts by Plotly, tables, and games to read."""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from tools.games.game import Game
from tools.matches.stats import BOTH
from tools.matches.text import HEAD, HOW_COUNTED, as_role, cells, shown_rows, with_interval
from tools.pages.contents import IMITATION, GameSample, Report
from utils import shown

FOLDER = Path(__file__).parent
METRICS = ("loss", "policy_loss", "sft_loss", "kl", "clip_fraction", "grad_norm")
# Okabe and Ito's colours, which colour-blind people tell apart.
FIRST_WINS, SECOND_WINS, BREACH, DECIDED, UNDECIDED = "#d55e00", "#0072b2", "#b0578d", "#b97f00", "#6b7075"
COLOURS = (SECOND_WINS, FIRST_WINS, "#00875f", BREACH, DECIDED, "#3a9bd5", UNDECIDED)
DASHES = ("solid", "dash", "dot", "dashdot")
PERCENT = ".1%"
LAYOUT = {
    "height": 340,
    "margin": {"l": 50, "r": 10, "t": 10, "b": 40},
    "colorway": COLOURS,
    "showlegend": True,
    "legend": {"orientation": "h", "y": -0.2},
}


def page_html(report: Report) -> str:
    """The whole page. Texts of models, players and files are escaped, in the script's JSON too ("<" as \\u003c)."""
    from plotly.offline import get_plotlyjs

    data = {
        "outcomes": {name: style["color"] for name, style in outcome_styles(report.game).items()},
        "sources": [source["name"] for source in report.sources],
        "games": report.games,
    }
    table = table_html(HEAD, [cells(row) for row in shown_rows(report.matches)])
    matches = f"Matches of {escape(shown(report.match_game))}" if report.match_game else "Matches"
    parts = {
        "name": escape(shown(report.name)),
        "made": escape(f"{report.game.title}; report of {time.strftime('%Y-%m-%d %H:%M')}"),
        "verdict": "".join(f'<p class="verdict">{escape(sentence)}</p>' for sentence in verdict(report)),
        "missing": "".join(f"<li>{escape(line)}</li>" for line in report.missing),
        "nothing_missing": "" if report.missing else "hidden",
        "matches": section(matches, HOW_COUNTED, match_charts(report), table if report.matches["results"] else ""),
        "plays": section("Games", "All games of self-play are counted.", play_charts(report.plays)),
        "reasoning": section("Reasoning", "Percent ± one standard error.", [], reasoning_table(report.reasoning)),
        "training": section("Training", "As logged by train.py.", training_charts(report.logs)),
        "no_games": "" if report.games else "hidden",
        "sources": escape("; ".join("{name}: {sampled:,} of {games:,}".format(**one) for one in report.sources)),
        "data": json.dumps(data).replace("<", "\\u003c"),
        "plotly": get_plotlyjs(),
        "script": (FOLDER / "page.js").read_text(encoding="utf-8"),
    }
    return Template((FOLDER / "template.html").read_text(encoding="utf-8")).substitute(parts)


def section(title: str, intro: str, charts: Iterable[tuple[str, list[dict], dict]], table: str = "") -> str:
    """A section of the page; "" without charts and table. A chart is its title, its traces and its layout."""
    from plotly.io import to_html

    how = {"full_html": False, "include_plotlyjs": False, "validate": False, "config": {"displayModeBar": False}}
    figures = [
        f"<figure><h3>{escape(name)}</h3>{to_html({'data': traces, 'layout': LAYOUT | layout}, **how)}</figure>"
        for name, traces, layout in charts
    ]
    if not (figures or table):
        return ""
    charts_html = f'<div class="charts">{"".join(figures)}</div>'
    return f'<section><h2>{title}</h2><p class="quiet">{intro}</p>{charts_html}{table}</section>'


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="table"><table>{line(head, "th")}{body}</table></div>'


def plain(value: str) -> str:
    """Any text as Plotly shows it, which otherwise reads <b>, <a href> and entities in names as markup."""
    return escape(value, quote=False)


def verdict(report: Report) -> list[str]:
    """Whether the last player scores more than the first opponent, over all words, and its points in each role."""
    if not (rows := shown_rows(report.matches)):
        return ["No match was played, so nothing here says whether a model scores more than another."]
    opponent = rows[0]["opponent"]
    player = [row["player"] for row in rows if row["opponent"] == opponent][-1]
    by_role: dict[str, dict] = {}
    for row in rows:
        if (row["player"], row["opponent"]) == (player, opponent):
            by_role.setdefault(row["role"], row)  # rows that pool word lists come first
    both = by_role.pop(BOTH, None)
    equals, where = reference(report)[1], f" at {report.match_game}" if report.match_game else ""
    parts = []
    for role, row in by_role.items():
        alone = f"; {opponent} against itself {equals[role]:.1%}" if equals else ""
        parts.append(f"{as_role(role)} {points_of(row)} ({ends_of(row)}{alone})")
    in_roles = f"It scores {', '.join(parts)}."
    if both is None:
        return [f"{player} played itself only{where}.", in_roles]
    if always_equal(report.matches["results"], player, opponent):
        return [f"Both players of a game{where} always got the same points, so matches rank nobody.", in_roles]
    equal, (low, high) = equals.get(BOTH, 0.5), both["points_interval"]
    better = "scores more than" if low > equal else "scores less than" if high < equal else "cannot be told from"
    return [
        f"{player} {better} {opponent}{where}: {points_of(both)} of the points in both roles ({ends_of(both)}), where "
        f"equals score {equal:.1%}, in {both['games']:,} games.",
        in_roles,
    ]


def points_of(row: Mapping) -> str:
    """The points of a row of matches, with their interval."""
    return with_interval(row["points"], row["points_interval"], PERCENT)


def ends_of(row: Mapping) -> str:
    """How the games of a row of matches ended for its player."""
    return ", ".join(f"{row[name] / row['games']:.1%} {name}" for name in ("wins", "ties", "losses"))


def always_equal(results: Sequence[Mapping], player: str, opponent: str) -> bool:
    """Whether both players of a game got the same points, as in cooperative games; False where all is a draw.

    Then what a player gets in a role is what his opponent gets in the other one.
    """
    rows = [row for row in results if {row["player"], row["opponent"]} == {player, opponent} and row["role"] != BOTH]
    points = {(row["player"], row["role"]): row["points"] for row in rows if row["seed"] is None}
    one, other = dict.fromkeys(row["role"] for row in rows)
    ours, theirs = [points[player, role] for role in (one, other)], [points[opponent, role] for role in (other, one)]
    return all(map(math.isclose, ours, theirs)) and ours != [0.5, 0.5]


def reference(report: Report) -> tuple[str, dict[str, float]]:
    """A name for the first opponent against itself, and its points by role; {} where they are not known.

    They come from its own match or, for imitation, from the self-play of epoch 1, in which it played itself.
    """
    first = shown_rows(report.matches)[0]
    name, opponent = f"{first['opponent']} against itself", first["opponent"]
    own = (opponent, opponent, first["words"], None)
    keys = ("player", "opponent", "words", "seed")
    rows = [row for row in report.matches["results"] if tuple(row[key] for key in keys) == own]
    points = {row["role"]: row["points"] for row in rows}
    games = dict(report.plays).get("epoch1")
    if not points and games and opponent == IMITATION and not report.match_game:
        points = {role: games.points[role] / games.games for role in report.game.roles}
        name += ", in self-play"
    return name, points and points | {BOTH: sum(points.values()) / len(points)}


def match_charts(report: Report) -> list[tuple]:
    """Points by role against the one opponent, with a line for each word list; none where there are more opponents.

    A dashed line shows what the opponent scores against itself.
    """
    rows = [row for row in shown_rows(report.matches) if row["player"] != row["opponent"]]
    if len({row["opponent"] for row in rows}) != 1:
        return []
    name, equals = reference(report)
    charts = []
    for role in dict.fromkeys(row["role"] for row in rows):
        lines: dict[str, list[tuple]] = {}
        for row in rows:
            if row["role"] == role:
                point = row["player"], row["points"], row["points_interval"]
                lines.setdefault(f"words: {row['words']}", []).append(point)
        label, height = (name, equals[role]) if equals else ("equality", 0.5)
        dashed = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height}
        dashed |= {"name": plain(label), "showlegend": True, "line": {"dash": "dash", "color": UNDECIDED}}
        layout = {"xaxis": {"type": "category"}, "yaxis": {"range": [0, 1], "tickformat": ".0%"}, "shapes": [dashed]}
        traces = [trace(words, points) for words, points in lines.items()]
        charts.append((f"Points {as_role(role)} against {rows[0]['opponent']}", traces, layout))
    return charts


def play_charts(plays: Sequence[tuple[str, GameSample]]) -> list[tuple]:
    """How games ended, how long they were, faulty replies, the game's own facts, and how much messages depend on the
    target word. Without facts, or where no dependence is known (one game a word), that chart is left out.
    """
    plays = [(label, games) for label, games in plays if games.games]
    if not plays:
        return []

    def line(name: str, value: Callable[[GameSample], float], **style) -> dict:
        return trace(name, [(label, value(games), None) for label, games in plays], **style)

    game = plays[0][1].game
    ends = [
        line(name, lambda games, name=name: games.outcomes[name] / games.games, **style)
        for name, style in outcome_styles(game).items()
    ]
    faults = [
        line("empty", lambda games: games.empty_replies.total() / games.messages.total()),
        line("cut off at the token limit", lambda games: games.cut_off_replies.total() / games.messages.total()),
    ]
    facts = [
        line(fact.replace("_", " "), lambda games, fact=fact: games.facts[fact] / games.games)
        for fact in plays[0][1].facts
    ]
    dependence = [
        line(role, lambda games, role=role: games.word_dependence()[role], color=color)
        for role, color in zip(game.roles, (FIRST_WINS, SECOND_WINS), strict=True)
    ]
    known = any(value is not None for role in dependence for value in role["y"])
    numbers: dict = {"xaxis": {"type": "category"}, "yaxis": {"rangemode": "tozero"}}
    shares = numbers | {"yaxis": {"rangemode": "tozero", "tickformat": PERCENT}}
    dependence_title = "Word dependence: 1 if no two words share a message, 0 if messages do not depend on the word"
    return [
        ("How games ended: share of games", ends, shares),
        ("Messages up to the deciding one", [line("all games", lambda games: games.mean_length)], numbers),
        ("Faulty replies: share of messages", faults, shares),
        *([("Facts that the game counts: share of games", facts, shares)] if facts else []),
        *([(dependence_title, dependence, numbers)] if known else []),
    ]


def outcome_styles(game: Game) -> dict[str, dict]:
    """Colours by who won, breach or neither; dashes tell apart outcomes of one colour."""
    by_winner = {game.roles[0]: FIRST_WINS, game.roles[1]: SECOND_WINS, None: DECIDED}
    styles = {
        outcome.name: {"color": BREACH if outcome.breach else by_winner[outcome.winner], "dash": dash}
        for outcome, dash in zip(game.outcomes, itertools.cycle(DASHES), strict=False)
    }
    styles[game.outcomes[-1].name]["color"] = UNDECIDED
    return styles


def reasoning_table(rows: Sequence[Mapping]) -> str:
    """A row for each model, a column for each benchmark; "" without scores."""
    models, benchmarks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "benchmark"))
    scores = {
        (row["model"], row["benchmark"]): f"{row['value']:.1f}" + (f" ± {row['stderr']:.1f}" if row["stderr"] else "")
        for row in rows
    }
    lines = [[model, *(scores.get((model, benchmark), "-") for benchmark in benchmarks)] for model in models]
    return table_html(["model", *benchmarks], lines) if rows else ""


def training_charts(logs: Sequence[tuple[str, Sequence[Mapping]]]) -> list[tuple]:
    """A chart for each logged metric, with a curve for each training."""
    charts = []
    for metric in METRICS:
        curves = {name: [(each["step"], each[metric], None) for each in log if metric in each] for name, log in logs}
        traces = [trace(name, points, mode="lines") for name, points in curves.items() if points]
        if traces:
            charts.append((metric, traces, {"xaxis": {"title": {"text": "optimizer step"}}}))
    return charts


def trace(name: str, points: Sequence[tuple], *, mode: str = "lines+markers", **line) -> dict:
    """A line of a chart from points (x, y, interval or None), as Plotly takes it."""
    made = {"type": "scatter", "name": plain(name), "mode": mode, "line": line, "marker": {"color": line.get("color")}}
    made |= {"x": [plain(x) if isinstance(x, str) else x for x, *_ in points], "y": [y for _, y, _ in points]}
    if points and points[0][2]:
        above, below = ([abs(interval[side] - y) for _, y, interval in points] for side in (1, 0))
        made["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return made
