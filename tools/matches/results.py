"""The files that an evaluation by match leaves: statistics of its games as JSON, text and a plot."""

import logging
from pathlib import Path

from tools.games.game import Game
from tools.matches.stats import BOTH, count_matches, result_rows
from tools.matches.text import as_role, matches_text, shown_rows
from utils import iter_records, replacing, write_json

RESULTS = MATCHES, TEXT, PLOT = "matches.json", "matches.txt", "matches.svg"
# Colour and marker for both roles, the first and the second; colours that colour-blind readers can tell apart.
ROLE_STYLES = (("#222222", "D"), ("#D55E00", "o"), ("#0072B2", "s"))
PANELS = ("points", "win", "tie", "breach")
logger = logging.getLogger(__name__)


def write_results(folder: Path, games_path: Path, settings: dict, game: Game) -> str:
    """Write the statistics of all games into the folder; returns the text. The plot, which may fail, comes last."""
    counts = count_matches((episode for _, episode in iter_records(games_path)), game)
    results = {"settings": settings, "results": list(result_rows(counts)), "games_path": games_path.name}
    text = matches_text(results, game)
    with replacing(folder / TEXT) as file:
        file.write(text)
    write_json(folder / MATCHES, results)
    try:
        write_plot(folder / PLOT, results, game)
    except ImportError:
        logger.warning("%s is not drawn: that needs pip install matplotlib", folder / PLOT)
    except Exception as error:  # whatever a drawing library makes of odd names
        logger.warning("%s is not drawn: %r", folder / PLOT, error)
    return text


def write_plot(path: Path, results: dict, game: Game) -> None:
    """Draw points and rates over all words as SVG; needs matplotlib, which is optional."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = shown_rows(results)
    rows = [row for row in shown if row["words"] == shown[0]["words"]]
    pairs = list(dict.fromkeys((row["player"], row["opponent"]) for row in rows))
    # Text stays text, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name, "font.family": "sans-serif"}):
        figure = Figure(figsize=(2 + 2.6 * len(PANELS), 1.5 + 0.6 * len(pairs)), layout="constrained")
        axes = figure.subplots(1, len(PANELS), sharey=True)
        axes[0].set_yticks(range(len(pairs)), [f"{one}\nvs {other}" for one, other in pairs], parse_math=False)
        axes[0].set_ylim(len(pairs) - 0.5, -0.5)
        axes[0].axvline(50, color="#666666", linewidth=1.2, linestyle="--")
        for axis, panel in zip(axes, PANELS, strict=True):
            axis.set_title(f"{panel}, %", fontsize=10)
            axis.grid(axis="x", color="#eeeeee")
            axis.spines[["top", "right", "left"]].set_visible(False)
            for row in rows:
                place = pairs.index((row["player"], row["opponent"]))
                number = (BOTH, *game.roles).index(row["role"])
                rate = row["rates"].get(panel, {"share": row["points"], "interval": row["points_interval"]})
                share, (low, high) = rate["share"], rate["interval"]
                bars = [[100 * (share - low)], [100 * (high - share)]]
                style = dict(zip(("color", "fmt"), ROLE_STYLES[number], strict=True))
                label = None if place else as_role(row["role"])
                axis.errorbar(100 * share, place + (number - 1) * 0.24, xerr=bars, label=label, capsize=3, **style)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        with replacing(path, "wb") as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
