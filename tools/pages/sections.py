"""What the page says: the verdict on top, and sections with tables and with charts as Plotly figures."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from tools.games.game import Game
from tools.matches.stats import BOTH, CONFIDENCE, wilson
from tools.matches.text import HEAD, HOW_COUNTED, as_role, cells, shown_rows, with_interval
from tools.pages.contents import IMITATION, GameSample, Report, visible

METRICS = {  # of a training log, as the README's glossary names them
    "loss": "whole loss of a step",
    "policy_loss": "loss of the game rows",
    "sft_loss": "loss of the SFT rows, or of imitation without its KL",
    "log_ratio": "mean of l - l_ref, the estimate of the KL to the reference",
    "kl": "imitation's penalty exp(l) (l - l_ref), before its coefficient",
    "clip_fraction": "share of game rows whose ratio the clip holds back",
    "learning_rate": "learning rate of the step",
    "grad_norm": "norm of the gradient, before it is clipped",
}
OF_GAMES = "policy_loss"  # logged by self-play training only
# Okabe and Ito's colours, which colour-blind people tell apart; markers and dashes differ as well.
COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b0578d", "#b97f00", "#3a9bd5", "#6b7075")
SECOND_WINS, FIRST_WINS, ALL_GAMES, BREACH, DECIDED, _, UNDECIDED = range(len(COLOURS))
DASHES, MARKERS = ("solid", "dash", "dot"), ("circle", "square", "triangle-up", "diamond")
QUIET = "#5c6168"
AXIS = {"gridcolor": "#d9dbde", "linecolor": "#d9dbde", "zeroline": False, "automargin": True, "exponentformat": "e"}
LAYOUT = {
    "height": 360,
    "margin": {"l": 50, "r": 10, "t": 10, "b": 40},
    "paper_bgcolor": "transparent",
    "plot_bgcolor": "transparent",
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": QUIET},
    "showlegend": True,
    "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
    "hovermode": "closest",
    "hoverlabel": {"bgcolor": "#ffffff", "font": {"size": 12}},
}
PERCENT = ".1%"
MOST_POINTS = 200  # of a curve
Line = tuple[str, int, Sequence[tuple]]  # name, number (of its looks), points (x, y, interval)


@dataclass
class Section:
    """A part of the page; charts are data and layout of Plotly with a title, tables (title, head, rows)."""

    id: str
    title: str
    intro: str
    charts: list[dict] = field(default_factory=list)
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = field(default_factory=list)


def sections(report: Report) -> list[Section]:
    """All parts for which there is something."""
    by_games = [(name, log) for name, log in report.logs if any(OF_GAMES in entry for entry in log)]
    supervised = [pair for pair in report.logs if pair not in by_games]
    roles = {f"reward_{role}": f"mean reward of the {role}'s rows" for role in report.game.roles}
    intro = "As logged by train.py. Each epoch starts from the model of the one before, which is its reference."
    found = [
        match_section(report) if shown_rows(report.matches) else None,
        play_section(report.plays) if report.plays else None,
        reasoning_section(report.reasoning) if report.reasoning else None,
        training_section("learning", "Training on games", intro, by_games, METRICS | roles),
        training_section("supervised", "Supervised training", "As logged by train.py.", supervised, METRICS),
    ]
    return [section for section in found if section and (section.charts or section.tables)]


def verdict(report: Report) -> list[str]:
    """Whether the last player is better than the first opponent, over all words, and in which role."""
    if not (shown := shown_rows(report.matches)):
        return ["No match was played, so nothing here says whether a model plays better than another."]
    opponent = shown[0]["opponent"]
    player = [row["player"] for row in shown if row["opponent"] == opponent][-1]
    rows = {row["role"]: row for row in reversed(shown) if (row["player"], row["opponent"]) == (player, opponent)}
    _, heights = reference(report)
    points = {role: with_interval(row["points"], row["points_interval"], PERCENT) for role, row in rows.items()}
    parts = []
    for role in filter(rows.get, report.game.roles):
        alone = f" ({opponent} against itself {heights[role]:.1%})" if role in heights else ""
        parts.append(f"{as_role(role)} {points[role]}{alone}")
    by_role = f"It scores {', '.join(parts)}."
    if BOTH not in rows:
        return [f"{player} played itself only.", by_role]
    equal, (low, high) = heights.get(BOTH, 0.5), rows[BOTH]["points_interval"]
    better = "plays better than" if low > equal else "plays worse than" if high < equal else "cannot be told from"
    return [
        f"{player} {better} {opponent}: {points[BOTH]} of the points in both roles, where equals score {equal:.1%}, "
        f"in {rows[BOTH]['games']:,} games.",
        by_role,
    ]


def reference(report: Report) -> tuple[str, dict[str, float]]:
    """What the opponent of all scores against itself in each role, and the name of that: its own match, or the games
    that the imitation model played with itself. Nothing where neither is there."""
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


def match_section(report: Report) -> Section:
    """Points by role and word list, and the table."""
    rows = shown_rows(report.matches)
    drawn = [row for row in rows if row["player"] != row["opponent"]] or rows
    one = len({row["opponent"] for row in drawn}) == 1
    against = f" against {drawn[0]['opponent']}" if one else ""
    name, heights = reference(report)
    charts = []
    for role in (BOTH, *report.game.roles):
        lines: dict[str, list[tuple]] = {f"words: {row['words']}": [] for row in drawn}
        for row in drawn:
            if row["role"] == role:
                place = row["player"] if one else f"{row['player']} – {row['opponent']}"
                lines[f"words: {row['words']}"].append((place, row["points"], row["points_interval"]))
        line = (name, heights[role]) if one and role in heights else ("equality", 0.5)
        numbered = [(words, number, points) for number, (words, points) in enumerate(lines.items())]
        charts.append(chart(f"Points {as_role(role)}{against}", numbered, form=PERCENT, joined=one, reference=line))
    table = ("All numbers of match play", HEAD, [cells(row) for row in rows])
    intro = f"{HOW_COUNTED} Bars are the same intervals."
    return Section("match", f"Matches{against}", intro, [one for one in charts if one["data"]], [table])


def play_section(plays: Sequence[tuple[str, GameSample]]) -> Section:
    """How games ended, how long they were, and replies that are none."""
    ends = [
        share_line(name, colour, [(label, games.outcomes[name], games.games) for label, games in plays])
        for name, colour in outcome_colours(plays[0][1].game).items()
    ]
    lengths = [(label, games.mean_length, None) for label, games in plays if games.games]
    empty = [(label, games.empty_replies.total(), games.messages.total()) for label, games in plays]
    telling = [(label, games) for label, games in plays if games.tells_replies]
    cut_off = [(label, games.cut_off_replies.total(), games.messages.total()) for label, games in telling]
    faults = [share_line("empty", 0, empty), share_line("cut off at the token limit", 1, cut_off)]
    joined = plays[0][0] == "epoch1"
    charts = [
        chart("How games ended: share of games", ends, form=PERCENT, joined=joined),
        chart("Game length: messages up to the deciding one", [("all games", ALL_GAMES, lengths)], joined=joined),
        chart("Faulty replies: share of messages", faults, form=PERCENT, joined=joined),
    ]
    intro = "All games are counted. Bars are 95% intervals that take games, or messages, as independent: they are too "
    intro += "narrow where a word was played several times."
    return Section("play", "Games", intro, charts)


def share_line(name: str, number: int, counts: Iterable[tuple[str, int, int]]) -> Line:
    """Shares with Wilson's intervals, as if observations were independent; `counts` are (x, count, total)."""
    quantile = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    points = [(x, count / total, wilson(count / total, total, quantile)) for x, count, total in counts if total]
    return name, number, points


def outcome_colours(game: Game) -> dict[str, int]:
    """By who won, breach or neither; those that would be alike differ in their dashes."""
    colours: dict[str, int] = {}
    for outcome in game.outcomes:
        neither = UNDECIDED if outcome is game.outcomes[-1] else DECIDED
        by_winner = {game.roles[0]: FIRST_WINS, game.roles[1]: SECOND_WINS}
        colour = BREACH if outcome.breach else by_winner.get(outcome.winner, neither)
        alike = sum(other % len(COLOURS) == colour for other in colours.values())
        colours[outcome.name] = colour + len(COLOURS) * alike
    return colours


def reasoning_section(rows: Sequence[Mapping]) -> Section:
    """The scores of models on benchmarks."""
    models, benchmarks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "benchmark"))
    scores = {
        (row["model"], row["benchmark"]): f"{row['value']:.1f}" + (f" ± {row['stderr']:.1f}" if row["stderr"] else "")
        for row in rows
    }
    table = [[model, *(scores.get((model, benchmark), "-") for benchmark in benchmarks)] for model in models]
    intro = "Percent, and standard errors that cover the choice of questions, not the randomness of training."
    return Section("reasoning", "Reasoning", intro, tables=[("Scores", ["model", *benchmarks], table)])


def training_section(
    id: str, title: str, intro: str, logs: Sequence[tuple[str, Sequence[Mapping]]], metrics: Mapping[str, str]
) -> Section:
    """A chart for each metric that was logged, with a curve per training."""
    drawn = []
    for metric, note in metrics.items():
        lines = [(name, number, curve(log, metric)) for number, (name, log) in enumerate(logs)]
        drawn.append(chart(f"{metric}: {note}", lines))
    return Section(id, title, intro, [one for one in drawn if one["data"]])


def curve(log: Sequence[Mapping], metric: str) -> list[tuple]:
    """Points of a logged metric by step; a long log gives means of equally many logged values."""
    logged = [(entry["step"], entry[metric]) for entry in log if isinstance(entry.get(metric), (int, float))]
    size = math.ceil(len(logged) / MOST_POINTS) or 1
    groups = [logged[start : start + size] for start in range(0, len(logged), size)]
    return [(*(sum(numbers) / len(group) for numbers in zip(*group, strict=True)), None) for group in groups]


def chart(
    title: str,
    lines: Iterable[Line],
    *,
    form: str = ".4g",
    joined: bool = True,
    reference: tuple[str, float] | None = None,
) -> dict:
    """Title, and data and layout of Plotly, of the lines that have points; x is a name, or a curve's optimizer step.

    `form` is that of the values; `joined` points of names have a line through them. `reference` is the name and height
    of a dashed line, where all from 0 to 1 is shown.
    """
    drawn = [line for line in lines if line[2]]
    named = any(isinstance(x, str) for _, _, points in drawn for x, *_ in points)
    mode = "markers" if not joined else "lines+markers" if named else "lines"
    layout: dict = LAYOUT | {"yaxis": AXIS | {"tickformat": ".3~%" if form == PERCENT else ""}}
    if named:
        layout |= {"scattermode": "group", "scattergap": 0.8}  # intervals at one place stand side by side
        layout["xaxis"] = AXIS | {"type": "category", "showgrid": False}
        layout["yaxis"]["rangemode"] = "tozero"
    else:
        layout["xaxis"] = AXIS | {"title": {"text": "optimizer step"}}
    if reference:
        name, height = reference
        ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height}
        style = {"line": {"color": QUIET, "dash": "dash", "width": 1.5}, "showlegend": True}
        layout["shapes"] = [{"type": "line", "name": plain(name), **ends, **style}]
        layout["yaxis"]["range"] = [0, 1]
    return {"title": title, "data": [_trace(*line, mode, form) for line in drawn], "layout": layout}


def plain(text: str) -> str:
    """Plotly takes <b>, <a href>, ... and entities in texts for markup; escaped, every text is shown as it is."""
    return html.escape(visible(text), quote=False)


def _trace(name: str, number: int, points: Sequence[tuple], mode: str, form: str) -> dict:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
    trace = {
        "type": "scatter",
        "name": plain(name),
        "x": [plain(x) if isinstance(x, str) else x for x, *_ in points],
        "y": [y for _, y, _ in points],
        "mode": mode if len(points) > 1 else "markers",
        "line": {"color": colour, "width": 1.5, "dash": dash},
        "marker": {"color": colour, "size": 8, "symbol": MARKERS[number % len(MARKERS)]},
        "cliponaxis": False,
        "hoverinfo": "text",
        "hovertext": [
            plain(f"{name}, {x if isinstance(x, str) else f'{x:g}'}: ") + with_interval(y, interval, form)
            for x, y, interval in points
        ],
    }
    if all(interval for *_, interval in points):
        above, below = ([abs(interval[side] - y) for _, y, interval in points] for side in (1, 0))
        bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        trace["error_y"] = bars | {"color": colour, "thickness": 1.8, "width": 0}
    return trace
