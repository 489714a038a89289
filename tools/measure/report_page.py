"""The report as one HTML file that needs no network: Plotly charts, tables, and games to read."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tools.measure.estimates import CONFIDENCE, UNKNOWN
from tools.measure.matches import HEAD, HOW_COUNTED, as_role, cells, pooled_rows, shown_rows
from tools.measure.report_contents import SAMPLE, Report

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

FOLDER = Path(__file__).parent
EPOCH = re.compile(r"epoch\d+")  # the loop's names of models and folders
NO_CURVES = {"step", "epoch"}  # fields of a log entry without a chart
# Based on Okabe and Ito's palette, which colour-blind people can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b0578d", "#b97f00", "#3a9bd5", "#6b7075")
LAYOUT = {
    "height": 340,
    "margin": {"l": 50, "r": 25, "t": 10, "b": 40},
    "showlegend": True,
    "legend": {"orientation": "h", "y": -0.25},
}
SHARES = {"rangemode": "tozero", "tickformat": ".1%"}
COUNTS = {"dtick": 1}
POINTS = {"range": [0, 1], "tickformat": ".0%"}
REASONING = "Percent ± one standard error over questions."
BELIEF = (
    "Means over stored games after each hint; log_share and belief are in nats. log_share: log p of the right guess "
    "among all candidates; 0 is certainty. rank_1: how often the right guess is the likeliest. belief: log p of the "
    "right guess by itself, which also rises if a model merely becomes readier to guess."
)

Chart = tuple[str, "Figure"]  # title, figure


def page_html(report: Report) -> str:
    """The whole page. Texts of models, players and files are escaped, also in the script's JSON ("<" as \\u003c)."""
    from plotly.offline import get_plotlyjs

    outcomes = [outcome.name for outcome in report.game.outcomes]
    data = {"outcomes": outcomes, "sources": report.sources, "games": report.games}
    rows = [row for matches in report.matches for row in shown_rows(matches)]
    match_table = table_html(HEAD, map(cells, rows)) if rows else ""
    parts = {
        "name": escape(report.name),
        "game": escape(report.game.title),
        "headline": headline(report.matches),
        "matches": section("Matches", HOW_COUNTED, match_charts(rows), match_table),
        "plays": section("Games", "All games of self-play are counted.", play_charts(report.plays)),
        "reasoning": section("Reasoning", REASONING, [], reasoning_table(report.reasoning)),
        "belief": section("Belief", BELIEF, belief_charts(report.belief)),
        "training": section("Training", "As train.py logs them, by optimizer step.", training_charts(report.logs)),
        "sample": str(SAMPLE),
        "data": json.dumps(data).replace("<", "\\u003c"),
        "plotly": get_plotlyjs(),
        "script": (FOLDER / "report_page.js").read_text(encoding="utf-8"),
    }
    return Template((FOLDER / "report_page.html").read_text(encoding="utf-8")).substitute(parts)


def section(title: str, intro: str, charts: Iterable[Chart], table: str = "") -> str:
    """A section of the page; "" without charts and table."""
    options = {"full_html": False, "include_plotlyjs": False, "validate": False, "config": {"displayModeBar": False}}
    figures = [f"<figure><h3>{escape(name)}</h3>{drawn.to_html(**options)}</figure>" for name, drawn in charts]
    if not (figures or table):
        return ""
    charts_html = f'<div class="charts">{"".join(figures)}</div>'
    return f'<section><h2>{title}</h2><p class="quiet">{intro}</p>{charts_html}{table}</section>'


def headline(matches: Sequence[dict]) -> str:
    """The top of the page: a small table with the points of each pair of players, over all word lists."""
    pairs = [row for results in matches for row in pooled_rows(results)]
    if not pairs:
        return "<p>No match was played.</p>"
    player = name_of(row["player"] for row in pairs)
    lines = []
    for row in pairs:
        low, high = (f"{bound:.1%}".removesuffix("%") for bound in row["points_interval"])
        line = {
            player: row["player"],
            "against": f"{row['opponent']} {as_role(row['role'])}",
            "points": f"{row['points']:.1%}",
            f"{CONFIDENCE:.0%} interval": f"{low} to {high}",
            "wins": f"{row['wins']:,}",
            "ties": f"{row['ties']:,}",
            "losses": f"{row['losses']:,}",
        }
        lines.append(line)
    intro = "Points of each pair of players:"
    if len({line["against"] for line in lines}) == 1:
        intro = f"Points against {lines[0]['against']}:"
        for line in lines:
            del line["against"]
    return f"<p>{escape(intro)}</p>{table_html(list(lines[0]), map(dict.values, lines))}"


def name_of(names: Iterable[str], otherwise: str = "player") -> str:
    """The label of an axis or column with these names of models or files: "epoch" if all are epochs."""
    return "epoch" if all(EPOCH.fullmatch(name) for name in names) else otherwise


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="table"><table>{line(head, "th")}{body}</table></div>'


def chart(
    title: str, points: Sequence[Mapping] | pd.DataFrame, x: str, y: str, line: str, interval: str = "", **layout
) -> Chart:
    """A chart of y by x, with a line for each value of `line`. `interval` names the column of (low, high) pairs.

    `layout` is Plotly's. Names of models are escaped, because Plotly interprets <b>, <a href> and entities in texts.
    """
    from plotly import express

    frame = pd.DataFrame(points)
    texts = frame.select_dtypes(exclude="number").columns.intersection([x, line])
    frame[texts] = frame[texts].map(partial(escape, quote=False))
    bars = {}
    if interval:
        low, high = np.array(frame[interval].tolist()).T
        bars = {"error_y": high - frame[y], "error_y_minus": frame[y] - low}
    # No markers for training, which has many steps.
    how = {"markers": x != "step", "template": "none", "color_discrete_sequence": COLOURS}
    figure = express.line(frame, x, y, color=line, **how, **bars)
    figure.update_layout(LAYOUT | layout)
    figure.update_xaxes(title_standoff=5)  # otherwise the legend covers the title
    figure.update_yaxes(title_standoff=5, automargin=True)  # otherwise the title covers the numbers
    return title, figure


def match_charts(rows: Sequence[Mapping]) -> list[Chart]:
    """Points by role against the only opponent, with a line for each word list.

    No charts if there are several opponents, because points against different opponents are not comparable.
    """
    rows = [row for row in rows if row["player"] != row["opponent"]]
    if len({row["opponent"] for row in rows}) != 1:
        return []
    return [
        chart(
            f"Points {as_role(role)} against {rows[0]['opponent']}",
            of_role,
            "player",
            "points",
            "words",
            "points_interval",
            xaxis_title=name_of(row["player"] for row in rows),
            yaxis=POINTS,
        )
        for role, of_role in pd.DataFrame(rows).groupby("role", sort=False)
    ]


def play_charts(plays: Mapping[str, Mapping]) -> list[Chart]:
    if not plays:
        return []
    axis = name_of(plays, otherwise="file")
    ends = []
    lengths = []
    faults = []
    for name, play in plays.items():
        of_play = {axis: name, "messages": play["mean_length"], "games": "all games"}
        lengths.append(of_play)
        for outcome, number in play["outcomes"].items():
            ends.append(of_play | {"end": outcome, "share": number / play["games"]})
        for fault, key in (("empty", "empty_replies"), ("cut off at the token limit", "cut_off_replies")):
            faults.append(of_play | {"fault": fault, "share": play[key] / max(1, play["messages"])})
    return [
        chart("How games ended: share of games", ends, axis, "share", "end", yaxis=SHARES),
        chart("Messages up to the deciding one", lengths, axis, "messages", "games"),
        chart("Faulty replies: share of messages", faults, axis, "share", "fault", yaxis=SHARES),
    ]


def belief_charts(rows: Sequence[Mapping]) -> list[Chart]:
    if not rows:
        return []
    numbers = " or ".join(map(str, dict.fromkeys(row["candidates"] for row in rows)))
    titles = {
        "log_share": f"log_share among {numbers} candidates",
        "rank_1": f"rank_1 among {numbers} candidates",
        "belief": "belief: log p of the right guess",
    }
    axes = {"rank_1": POINTS}
    return [
        chart(title, rows, "hints", number, "model", xaxis=COUNTS, yaxis=axes.get(number, {}))
        for number, title in titles.items()
    ]


def training_charts(logs: Mapping[str, Sequence[Mapping]]) -> list[Chart]:
    """A chart for each metric that is logged with the loss, with a line for each training.

    Evaluations (eval_loss) and final totals have no "loss" and are not drawn.
    """
    points = [
        {"training": name, "step": entry["step"], "metric": metric, "value": value}
        for name, log in logs.items()
        for entry in log
        if "loss" in entry
        for metric, value in entry.items()
        if metric not in NO_CURVES
    ]
    by_metric = pd.DataFrame(points).groupby("metric", sort=False) if points else ()
    return [chart(metric, lines, "step", "value", "training") for metric, lines in by_metric]


def reasoning_table(rows: Sequence[Mapping]) -> str:
    """A row per model and a column per benchmark; "" without scores."""
    head = ["model", *dict.fromkeys(row["benchmark"] for row in rows)]
    lines = {}
    for row in rows:
        error = f" ± {row['stderr']:.1f}" if row["stderr"] else ""
        line = lines.setdefault(row["model"], dict.fromkeys(head, UNKNOWN) | {"model": row["model"]})
        line[row["benchmark"]] = f"{row['value']:.1f}{error}"
    return table_html(head, map(dict.values, lines.values())) if rows else ""
