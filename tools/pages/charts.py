"""Charts as Plotly figures: all that the page's script has to do is to draw them."""

import html
from collections.abc import Iterable, Mapping, Sequence

from tools.games.game import Game
from tools.matches.text import with_interval
from tools.pages.games import Estimate, visible

# Okabe and Ito's colours, which colour-blind people tell apart; markers and dashes differ as well.
COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b0578d", "#b97f00", "#3a9bd5", "#6b7075")
SECOND_WINS, FIRST_WINS, ALL_GAMES, BREACH, DECIDED, _, UNDECIDED = range(len(COLOURS))
DASHES, MARKERS = ("solid", "dash", "dot"), ("circle", "square", "triangle-up", "diamond")
QUIET, GRID = "#5c6168", "#d9dbde"
PERCENT = ".1%"
LONGEST_LABEL = 24  # characters of a tick
MOST_TICKS = 12
NARROWEST = 300  # pixels for which a legend has room
MOST_POINTS = 200  # of a curve
Line = tuple[str, int, Sequence[tuple]]  # name, number (of the colour and dashes), points (x, y, low, high)


def at_places(name: str, number: int, estimates: Iterable[Estimate | None]) -> Line:
    """A line over x = 0, 1, ..., without the places where there is nothing."""
    return name, number, [(x, *estimate) for x, estimate in enumerate(estimates) if estimate is not None]


def curve(name: str, number: int, log: Sequence[Mapping], metric: str) -> Line:
    """A logged metric by step; a long log gives means of equally many logged values."""
    logged = [(entry["step"], entry[metric]) for entry in log if isinstance(entry.get(metric), (int, float))]
    size = -(-len(logged) // MOST_POINTS) or 1
    groups = [logged[start : start + size] for start in range(0, len(logged), size)]
    means = ([sum(numbers) / len(group) for numbers in zip(*group, strict=True)] for group in groups)
    return name, number, [(*mean, None, None) for mean in means]


def chart(
    title: str,
    lines: Iterable[Line],
    *,
    x_label: str = "",
    y_label: str = "",
    labels: Sequence[str] = (),
    form: str = ".4g",
    joined: bool = True,
    whole: bool = False,
    reference: tuple[str, float] | None = None,
) -> dict:
    """Title, and data and layout of Plotly, of the lines that have points.

    `labels` are the names of x = 0, 1, ...; without them x is a number. `form` is that of the values. `whole`
    shows all from 0 to 1. `reference` is the name and height of a dashed line.
    """
    drawn = [line for line in lines if line[2]]
    gap = min(0.03 * len(labels), 0.8 / max(1, len(drawn)))  # so that intervals at one x do not hide each other
    mode = "+".join(["lines"] * joined + ["markers"] * bool(labels or not joined))
    data = [
        _trace(line, place, (place - (len(drawn) - 1) / 2) * gap, mode, labels, form)
        for place, line in enumerate(drawn)
    ]
    if reference and drawn:
        style = {"color": QUIET, "dash": "dash", "width": 1.5}
        ends = {"x": [-0.5, len(labels) - 0.5], "y": [reference[1]] * 2, "mode": "lines", "line": style}
        data.insert(0, {"name": plain(reference[0]), "type": "scatter", "hoverinfo": "skip", **ends})
    layout = _layout([trace["name"] for trace in data], x_label, y_label, labels, form)
    if whole:
        layout["yaxis"]["range"] = [0, 1]
    return {"title": title, "data": data, "layout": layout}


def plain(text: str) -> str:
    """Plotly takes <b>, <a href>, ... and entities in texts for markup; escaped, every text is shown as it is."""
    return html.escape(visible(text), quote=False)


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


def _trace(line: Line, place: int, offset: float, mode: str, labels: Sequence[str], form: str) -> dict:
    name, number, points = line
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
    trace = {
        "type": "scatter",
        "name": plain(name),
        "x": [x + offset for x, *_ in points],
        "y": [y for _, y, *_ in points],
        "mode": mode if len(points) > 1 else "markers",
        "line": {"color": colour, "width": 1.5, "dash": dash},
        "marker": {"color": colour, "size": 8, "symbol": MARKERS[place % len(MARKERS)]},
        "cliponaxis": False,
        "hoverinfo": "text",
        "hovertext": [
            plain(f"{name}, {labels[x] if labels else f'{x:g}'}: ")
            + with_interval(y, None if low is None else (low, high), form)
            for x, y, low, high in points
        ],
    }
    if any(low is not None for _, _, low, _ in points):
        above = [0 if high is None else high - y for _, y, _, high in points]
        below = [0 if low is None else y - low for _, y, low, _ in points]
        bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        trace["error_y"] = bars | {"color": colour, "thickness": 1.8, "width": 0}
    return trace


def _layout(names: Sequence[str], x_label: str, y_label: str, labels: Sequence[str], form: str) -> dict:
    axis = {"gridcolor": GRID, "linecolor": GRID, "zeroline": False, "automargin": True, "exponentformat": "e"}
    ticks = {}
    if labels:
        places = range(0, len(labels), -(-len(labels) // MOST_TICKS))
        short = [label[: LONGEST_LABEL - 1] + "…" if len(label) > LONGEST_LABEL else label for label in labels]
        ticks = {"tickvals": list(places), "ticktext": [plain(short[x]) for x in places], "showgrid": False}
        ticks["range"] = [-0.5, len(labels) - 0.5]
    values = {"tickformat": ".1~%" if form == PERCENT else "", "rangemode": "tozero" if labels else "normal"}
    columns = max(1, NARROWEST // (50 + 7 * max(map(len, names), default=0)))
    return {
        "height": 310 + 20 * -(-len(names) // columns),
        "margin": {"l": 50, "r": 10, "t": 10, "b": 40},
        "paper_bgcolor": "transparent",
        "plot_bgcolor": "transparent",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": QUIET},
        "xaxis": axis | ticks | {"title": {"text": plain(x_label)}},
        "yaxis": axis | values | {"title": {"text": plain(y_label)}},
        "showlegend": True,
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "#ffffff", "font": {"size": 12}},
    }
