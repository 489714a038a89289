"""The page as one HTML file that needs no network: charts by Plotly, tables, and games to read."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from tools.matches.text import HEAD, HOW_COUNTED, as_role, cells, points_line, shown_rows
from tools.pages.contents import SAMPLE, Report

FOLDER = Path(__file__).parent
NO_CURVES = {"step", "epoch"}  # of a log entry
# Okabe and Ito's colours, which colour-blind people tell apart.
COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b0578d", "#b97f00", "#3a9bd5", "#6b7075")
LAYOUT = {
    "height": 340,
    "margin": {"l": 50, "r": 10, "t": 10, "b": 40},
    "colorway": COLOURS,
    "showlegend": True,
    "legend": {"orientation": "h", "y": -0.2},
}
SHARES = {"yaxis": {"rangemode": "tozero", "tickformat": ".1%"}}
POINTS = {"yaxis": {"range": [0, 1], "tickformat": ".0%"}}
REASONING = "Percent ± one standard error over questions. reasoning/table.md compares models question by question."
BELIEF = "The log share of the right guess among all candidates after each hint of stored games: 0 is certainty."

Chart = tuple[str, list[dict], dict]  # title, traces and layout, as Plotly takes them


def page_html(report: Report) -> str:
    """The whole page. Texts of models, players and files are escaped, in the script's JSON too ("<" as \\u003c)."""
    from plotly.offline import get_plotlyjs

    outcomes = [outcome.name for outcome in report.game.outcomes]
    data = {"outcomes": outcomes, "sources": report.sources, "games": report.games}
    rows = [row for matches in report.matches for row in shown_rows(matches)]
    match_table = table_html(HEAD, map(cells, rows)) if rows else ""
    parts = {
        "name": escape(report.name),
        "game": escape(report.game.title),
        "verdict": escape(points_line(rows) or "No match was played."),
        "matches": section("Matches", HOW_COUNTED, match_charts(rows), match_table),
        "plays": section("Games", "All games of self-play are counted.", play_charts(report.plays)),
        "reasoning": section("Reasoning", REASONING, [], reasoning_table(report.reasoning)),
        "belief": section("Belief", BELIEF, belief_charts(report.belief)),
        "training": section("Training", "As train.py logs them, by optimizer step.", training_charts(report.logs)),
        "sample": str(SAMPLE),
        "data": json.dumps(data).replace("<", "\\u003c"),
        "plotly": get_plotlyjs(),
        "script": (FOLDER / "page.js").read_text(encoding="utf-8"),
    }
    return Template((FOLDER / "template.html").read_text(encoding="utf-8")).substitute(parts)


def section(title: str, intro: str, charts: Iterable[Chart], table: str = "") -> str:
    """A section of the page; "" without charts and table."""
    from plotly.io import to_html

    options = {"full_html": False, "include_plotlyjs": False, "validate": False, "config": {"displayModeBar": False}}
    figures = [
        f"<figure><h3>{escape(name)}</h3>{to_html({'data': traces, 'layout': LAYOUT | layout}, **options)}</figure>"
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


def trace(name: str, points: Mapping[str | int, float], intervals: Sequence = (), *, mode="lines+markers") -> dict:
    """A line of a chart from y by x, with an interval (low, high) for each point or for none."""
    line = {"type": "scatter", "name": plain(name), "mode": mode, "y": list(points.values())}
    line["x"] = [plain(x) if isinstance(x, str) else x for x in points]
    if intervals:
        lengths = [(y - low, high - y) for y, (low, high) in zip(points.values(), intervals, strict=True)]
        below, above = zip(*lengths, strict=True)
        line["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return line


def match_charts(rows: Sequence[Mapping]) -> list[Chart]:
    """Points by role against the one opponent, with a line for each word list; none where there are more opponents."""
    rows = [row for row in rows if row["player"] != row["opponent"]]
    if len({row["opponent"] for row in rows}) != 1:
        return []
    lines: dict[str, dict[str, list[Mapping]]] = defaultdict(lambda: defaultdict(list))  # rows by role, then word list
    for row in rows:
        lines[row["role"]][row["words"]].append(row)
    charts = []
    for role, by_words in lines.items():
        traces = []
        for words, of_line in by_words.items():
            points = {row["player"]: row["points"] for row in of_line}
            traces.append(trace(f"words: {words}", points, [row["points_interval"] for row in of_line]))
        charts.append((f"Points {as_role(role)} against {rows[0]['opponent']}", traces, POINTS))
    return charts


def play_charts(plays: Mapping[str, Mapping]) -> list[Chart]:
    """How games ended, how long they were, and faulty replies, from summaries of play by name."""
    if not plays:
        return []
    ends = [
        trace(outcome, {name: play["outcomes"][outcome] / play["games"] for name, play in plays.items()})
        for outcome in next(iter(plays.values()))["outcomes"]
    ]
    faults = [
        trace(fault, {name: play[key] / play["messages"] for name, play in plays.items()})
        for fault, key in (("empty", "empty_replies"), ("cut off at the token limit", "cut_off_replies"))
    ]
    lengths = trace("all games", {name: play["mean_length"] for name, play in plays.items()})
    return [
        ("How games ended: share of games", ends, SHARES),
        ("Messages up to the deciding one", [lengths], {}),
        ("Faulty replies: share of messages", faults, SHARES),
    ]


def belief_charts(rows: Sequence[Mapping]) -> list[Chart]:
    """Log share of the right guess by number of hints, with a line for each model."""
    rows, traces = [row for row in rows if "share" in row], []  # older versions measured something else
    for model in dict.fromkeys(row["model"] for row in rows):
        by_hints = {row["hints"]: row for row in rows if row["model"] == model}  # each epoch asks the base model again
        intervals = [row["share interval"] for row in by_hints.values()]
        points = {hints: row["share"] for hints, row in by_hints.items()}
        traces.append(trace(model, points, intervals if all(intervals) else ()))
    numbers = " or ".join(map(str, dict.fromkeys(row["candidates"] for row in rows)))
    return [(f"Log share among {numbers} candidates by number of hints, in nats", traces, {})] if traces else []


def training_charts(logs: Mapping[str, Sequence[Mapping]]) -> list[Chart]:
    """A chart for each number that is logged with the loss, with a line for each training."""
    curves: dict[str, dict[str, dict]] = defaultdict(lambda: defaultdict(dict))  # points by metric, then training
    for name, log in logs.items():
        for entry in log:
            for metric in entry if "loss" in entry else ():
                curves[metric][name][entry["step"]] = entry[metric]
    return [
        (metric, [trace(name, points, mode="lines") for name, points in by_training.items()], {})
        for metric, by_training in curves.items()
        if metric not in NO_CURVES
    ]


def reasoning_table(rows: Sequence[Mapping]) -> str:
    """A row for each model, a column for each benchmark; "" without scores."""
    head, lines = ["model", *dict.fromkeys(row["benchmark"] for row in rows)], {}
    for row in rows:
        error = f" ± {row['stderr']:.1f}" if row["stderr"] else ""
        line = lines.setdefault(row["model"], dict.fromkeys(head, "-") | {"model": row["model"]})
        line[row["benchmark"]] = f"{row['value']:.1f}{error}"
    return table_html(head, map(dict.values, lines.values())) if rows else ""
