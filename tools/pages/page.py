"""The page as one HTML file that needs no network: the verdict, charts by Plotly, tables, and games to read."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from tools.games.game import Game
from tools.matches.stats import BOTH, normal_quantile, wilson
from tools.matches.text import HEAD, HOW_COUNTED, as_role, cells, shown_rows, with_interval
from tools.pages.contents import IMITATION, GameSample, Report, visible

FOLDER = Path(__file__).parent
METRICS = ("loss", "policy_loss", "sft_loss", "log_ratio", "kl", "clip_fraction", "learning_rate", "grad_norm")
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
    data = {
        "outcomes": {name: style["color"] for name, style in outcome_styles(report.game).items()},
        "sources": [visible(source["name"]) for source in report.sources],
        "games": report.games,
    }
    parts = {
        "name": text(report.name),
        "made": text(f"{report.game.title}; report of {time.strftime('%Y-%m-%d %H:%M')}"),
        "verdict": "".join(f'<p class="verdict">{text(sentence)}</p>' for sentence in verdict(report)),
        "missing": "".join(f"<li>{text(line)}</li>" for line in report.missing),
        "nothing_missing": "" if report.missing else "hidden",
        "sections": sections_html(report),
        "no_games": "" if report.games else "hidden",
        "sources": text("; ".join("{name}: {sampled:,} of {games:,}".format(**one) for one in report.sources)),
        "settings": "".join(
            f"<details><summary>{text(name)}</summary><p class='text'>{text(content)}</p></details>"
            for name, content in report.settings
        ),
        "data": json.dumps(data).replace("<", "\\u003c"),
        "script": (FOLDER / "page.js").read_text(encoding="utf-8"),
    }
    return Template((FOLDER / "template.html").read_text(encoding="utf-8")).substitute(parts)


def sections_html(report: Report) -> str:
    """All sections that have a chart or a table."""
    against, points_charts = match_charts(report)
    table = table_html(HEAD, [cells(row) for row in shown_rows(report.matches)])
    found = [
        (f"Matches{against}", HOW_COUNTED, points_charts, table if points_charts else ""),
        ("Games", "All games are counted. Bars are 95% intervals.", play_charts(report.plays), ""),
        ("Reasoning", "Percent ± one standard error.", [], reasoning_table(report.reasoning)),
        ("Training", "As logged by train.py.", training_charts(report.logs, report.game), ""),
    ]
    html, plotly_js = "", True
    for title, intro, charts, table in found:
        if charts or table:
            figures = []
            for chart in charts:
                figures.append(chart_html(*chart, plotly_js=plotly_js))
                plotly_js = False  # the page holds it once
            html += f'<section><h2>{text(title)}</h2><p class="quiet">{text(intro)}</p>'
            html += f'<div class="charts">{"".join(figures)}</div>{table}</section>'
    return html


def chart_html(title: str, traces: list[dict], layout: dict, *, plotly_js: bool) -> str:
    """A chart with its title above it; Plotly writes the traces and the layout as escaped JSON."""
    from plotly.io import to_html

    chart = {"data": traces, "layout": LAYOUT | layout}
    how = {"full_html": False, "include_plotlyjs": plotly_js, "validate": False, "config": {"displayModeBar": False}}
    return f"<figure><h3>{text(title)}</h3>{to_html(chart, **how)}</figure>"


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{text(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="table"><table>{line(head, "th")}{body}</table></div>'


def text(value: str) -> str:
    """Any text as HTML shows it."""
    return escape(visible(value))


def plain(value: str) -> str:
    """Any text as Plotly shows it, which otherwise reads <b>, <a href> and entities in names as markup."""
    return escape(visible(value), quote=False)


def verdict(report: Report) -> list[str]:
    """Whether the last player is better than the first opponent, over all words, and in which role."""
    if not (shown := shown_rows(report.matches)):
        return ["No match was played, so nothing here says whether a model plays better than another."]
    opponent = shown[0]["opponent"]
    player = [row["player"] for row in shown if row["opponent"] == opponent][-1]
    rows = {row["role"]: row for row in reversed(shown) if (row["player"], row["opponent"]) == (player, opponent)}
    _, equals = reference(report)
    points = {role: with_interval(row["points"], row["points_interval"], PERCENT) for role, row in rows.items()}
    parts = []
    for role in filter(rows.get, report.game.roles):
        alone = f" ({opponent} against itself {equals[role]:.1%})" if role in equals else ""
        parts.append(f"{as_role(role)} {points[role]}{alone}")
    by_role = f"It scores {', '.join(parts)}."
    if BOTH not in rows:
        return [f"{player} played itself only.", by_role]
    equal, (low, high) = equals.get(BOTH, 0.5), rows[BOTH]["points_interval"]
    better = "plays better than" if low > equal else "plays worse than" if high < equal else "cannot be told from"
    return [
        f"{player} {better} {opponent}: {points[BOTH]} of the points in both roles, where equals score {equal:.1%}, "
        f"in {rows[BOTH]['games']:,} games.",
        by_role,
    ]


def reference(report: Report) -> tuple[str, dict[str, float]]:
    """The points by role of the common opponent against itself, and a name for them; {} where they are not known.

    They come from its own match or, for imitation, from the self-play of epoch 1, in which it played itself.
    """
    rows = shown_rows(report.matches)
    opponent, words = rows[0]["opponent"], rows[0]["words"]
    own = {
        row["role"]: row["points"]
        for row in report.matches["results"]
        if (row["player"], row["opponent"], row["words"], row["seed"]) == (opponent, opponent, words, None)
    }
    name = f"{opponent} against itself"
    if not own and opponent == IMITATION and report.plays and report.plays[0][0] == "epoch1":
        games = report.plays[0][1]
        own = {role: games.points[role] / games.games for role in report.game.roles}
        name += ", in self-play"
    return name, own and own | {BOTH: sum(own.values()) / len(own)}


def match_charts(report: Report) -> tuple[str, list[tuple]]:
    """A chart of points for each role, with a line for each word list; and " against X" where there is one opponent.

    A dashed line shows what the opponent scores against itself.
    """
    rows = shown_rows(report.matches)
    met = [row for row in rows if row["player"] != row["opponent"]] or rows
    if not met:
        return "", []
    one = len({row["opponent"] for row in met}) == 1
    against = f" against {met[0]['opponent']}" if one else ""
    name, equals = reference(report)
    charts = []
    for role in (BOTH, *report.game.roles):
        lines: dict[str, list[tuple]] = {}
        for row in met:
            if row["role"] == role:
                place = row["player"] if one else f"{row['player']} – {row['opponent']}"
                points = lines.setdefault(f"words: {row['words']}", [])
                points.append((place, row["points"], row["points_interval"]))
        label, height = (name, equals[role]) if one and role in equals else ("equality", 0.5)
        dashed = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height}
        dashed |= {"name": plain(label), "showlegend": True, "line": {"dash": "dash", "color": UNDECIDED}}
        layout = {"xaxis": {"type": "category"}, "yaxis": {"range": [0, 1], "tickformat": ".0%"}, "shapes": [dashed]}
        mode = "lines+markers" if one else "markers"
        if lines:
            traces = [trace(words, points, mode=mode) for words, points in lines.items()]
            charts.append((f"Points {as_role(role)}{against}", traces, layout))
    return against, charts


def play_charts(plays: Sequence[tuple[str, GameSample]]) -> list[tuple]:
    """How games ended, how long they were, and faulty replies."""
    if not plays:
        return []
    ends = [
        share_line(name, [(label, games.outcomes[name], games.games) for label, games in plays], **style)
        for name, style in outcome_styles(plays[0][1].game).items()
    ]
    lengths = [(label, games.mean_length, None) for label, games in plays if games.games]
    empty = [(label, games.empty_replies.total(), games.messages.total()) for label, games in plays]
    cut_off = [(label, games.cut_off_replies.total(), games.messages.total()) for label, games in plays]
    faults = [share_line("empty", empty), share_line("cut off at the token limit", cut_off)]
    of_names: dict = {"xaxis": {"type": "category"}, "yaxis": {"rangemode": "tozero"}}
    shares = of_names | {"yaxis": {"rangemode": "tozero", "tickformat": PERCENT}}
    return [
        ("How games ended: share of games", ends, shares),
        ("Game length: messages up to the deciding one", [trace("all games", lengths)], of_names),
        ("Faulty replies: share of messages", faults, shares),
    ]


def share_line(name: str, counts: Iterable[tuple[str, int, int]], **style) -> dict:
    """Shares with Wilson's intervals, as if the observations were independent; `counts` are (x, count, total)."""
    quantile = normal_quantile()
    points = [(x, count / total, wilson(count / total, total, quantile)) for x, count, total in counts if total]
    return trace(name, points, **style)


def outcome_styles(game: Game) -> dict[str, dict]:
    """Colours by who won, breach or neither; dashes tell apart outcomes of one colour."""
    styles = {}
    for number, outcome in enumerate(game.outcomes):
        neither = UNDECIDED if outcome is game.outcomes[-1] else DECIDED
        by_winner = {game.roles[0]: FIRST_WINS, game.roles[1]: SECOND_WINS}
        colour = BREACH if outcome.breach else by_winner.get(outcome.winner, neither)
        styles[outcome.name] = {"color": colour, "dash": DASHES[number % len(DASHES)]}
    return styles


def reasoning_table(rows: Sequence[Mapping]) -> str:
    """A row for each model, a column for each benchmark."""
    models, benchmarks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "benchmark"))
    scores = {
        (row["model"], row["benchmark"]): f"{row['value']:.1f}" + (f" ± {row['stderr']:.1f}" if row["stderr"] else "")
        for row in rows
    }
    lines = [[model, *(scores.get((model, benchmark), "-") for benchmark in benchmarks)] for model in models]
    return table_html(["model", *benchmarks], lines) if rows else ""


def training_charts(logs: Sequence[tuple[str, Sequence[Mapping]]], game: Game) -> list[tuple]:
    """A chart for each logged metric, with a curve for each training."""
    charts = []
    for metric in (*METRICS, *(f"reward_{role}" for role in game.roles)):
        traces = []
        for name, log in logs:
            points = [(entry["step"], entry[metric], None) for entry in log if metric in entry]
            traces += [trace(name, points, mode="lines" if len(points) > 1 else "markers")] if points else []
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
