"""The reasoning table: benchmarks, published rows, and the files that show all models on all benchmarks."""

import logging
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.reasoning.scores import MEAN, Score, result_rows
from utils import replacing, write_json

MARK, UNKNOWN = "≈", "-"
FEWEST_AXES = 3  # of a radar plot
RESULT_FILES = RESULTS, TABLE, RADAR = "results.json", "table.md", "radar.svg"
logger = logging.getLogger(__name__)


class Benchmark(NamedTuple):
    """A column of the table."""

    name: str
    task: str  # as the harness calls it
    shots: int | None  # None: as many as the task itself says
    metric: str  # "metric" or "metric,filter" of the harness

    def __str__(self) -> str:
        return f"{self.name}:{self.shots}"


# The paper does not tell tasks, shots and metrics of each benchmark: these are this project's choice.
BENCHMARKS = (
    Benchmark("MMLU", "mmlu", 5, "acc"),
    Benchmark("BBH", "bbh_fewshot", 3, "exact_match"),
    Benchmark("MuTual", "mutual", 0, "r@1"),
    Benchmark("ARC-e", "arc_easy", 0, "acc"),
    Benchmark("ARC-c", "arc_challenge", 0, "acc"),
    Benchmark("LogiQA2", "logiqa2", 0, "acc"),
    Benchmark("WinoGrande", "winogrande", 0, "acc"),
    Benchmark("PIQA", "piqa", 0, "acc"),
)

# Accuracies as texts, with the digits that are known, and last the mean over all eight; base rows and values with one
# decimal were read off a figure or checked through the mean only.
PUBLISHED_SOURCE = "Cheng et al., NeurIPS 2024, arXiv 2404.10642"
PUBLISHED_NAMES = tuple(benchmark.name for benchmark in BENCHMARKS)
PUBLISHED = {
    name: dict(zip((*PUBLISHED_NAMES, MEAN), values.split(), strict=True))
    for name, values in {
        "LLaMA-2-7B base": "45.80 32.48 50.90 76.30 43.26 25.32 69.14 78.07 49.17",
        "LLaMA-2-7B SPAG-1": "- 34.4 54.8 77.7 45.7 29.8 68.9 78.8 51.69",
        "LLaMA-2-7B SPAG-2": "- 34.7 55.0 78.2 46.9 30.1 69.6 79.1 52.19",
        "LLaMA-2-7B SPAG-3": "- 34.94 55.30 78.54 47.53 30.98 69.93 79.38 52.58",
        "Baichuan-2-13B base": "- - - - - - - - 54.21",
        "Baichuan-2-13B SPAG-1": "- - - - - - - - 56.09",
        "Baichuan-2-13B SPAG-2": "- - - - - - - - 56.52",
        "Baichuan-2-13B SPAG-3": "- - - - - - - - 56.75",
    }.items()
}


def write_results(folder: Path, table: Mapping[str, Mapping[str, Score]], settings: Mapping) -> str:
    """Write table.md, radar.svg and results.json of the scores by model and benchmark; returns table and result."""
    rows = result_rows(table, settings["against"])
    text = table_text(rows, settings)
    with replacing(folder / TABLE) as file:
        file.write(text)
    write_radar(folder / RADAR, table)
    published = {"source": PUBLISHED_SOURCE, "rows": PUBLISHED}
    write_json(folder / RESULTS, {"settings": settings, "results": rows, "published": published})
    means = ", ".join(f"{row['model']} {cell_text(row)}" for row in rows if row["benchmark"] == MEAN)
    return f"{text}\nreasoning, {MEAN}: {means}\n"


def table_text(rows: Sequence[Mapping], settings: Mapping) -> str:
    """The table in Markdown, with the published rows below, and how it was made."""
    columns = [benchmark["name"] for benchmark in settings["benchmarks"]]
    lines = [["", *columns, MEAN], ["---"] * (len(columns) + 2)]
    for model in dict.fromkeys(row["model"] for row in rows):
        lines.append([model, *(cell_text(row) for row in rows if row["model"] == model)])
    mean = MEAN if set(columns) == set(PUBLISHED_NAMES) else None  # of these eight
    for name, published in PUBLISHED.items():
        values = [published.get(column, UNKNOWN) for column in [*columns, mean]]
        if set(values) != {UNKNOWN}:
            lines.append([f"{name}, published", *values])
    how = f"lm-evaluation-harness {settings['harness']}, {settings['dtype']}:"
    used = [["benchmark", "task", "shots", "metric", "questions"], ["---"] * 5]
    for benchmark, row in zip(settings["benchmarks"], rows, strict=False):  # the first model's
        used.append([benchmark["name"], benchmark["task"], row["shots"], row["metric"], row["questions"]])
    return "\n\n".join([_markdown(lines), _notes(rows, settings), how, _markdown(used)]) + "\n"


def cell_text(row: Mapping) -> str:
    """Value, standard error, and a mark if the difference is within one standard error."""
    text = f"{row['value']:.2f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.2f}")
    return text + (f" {MARK}" if row["difference"] and row["difference"]["within_stderr"] else "")


def _markdown(lines: Sequence[Sequence]) -> str:
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _notes(rows: Sequence[Mapping], settings: Mapping) -> str:
    notes = ["Percentages ± one standard error, over draws of the questions; another training run is not in it."]
    if differences := [row["difference"] for row in rows if row["difference"]]:
        paired = all(away["paired"] for away in differences)
        how = "question by question" if paired else "as of independent draws where `paired` in results.json is false"
        what = f"the difference from {settings['against']} is within one standard error of the difference"
        notes.append(f"{MARK}: {what} ({how}).")
    notes.append(f"Published rows: {PUBLISHED_SOURCE}; tasks, shots and metrics there may be others.")
    if settings["limit"] is not None:
        notes.append(f"Only the first {settings['limit']} questions of each task were asked: no result to report.")
    return " ".join(notes)


def write_radar(path: Path, table: Mapping[str, Mapping[str, Score]]) -> None:
    """Draw the models, an axis per benchmark in shares of the best model's value, if that can be done."""
    names = list(next(iter(table.values())))
    values = np.array([[score.value for score in scores.values()] for scores in table.values()])
    best = values.max(axis=0)
    path.unlink(missing_ok=True)
    if len(names) < FEWEST_AXES or not best.all() or find_spec("matplotlib") is None:
        needs = f"needs matplotlib and {FEWEST_AXES} benchmarks, none with 0 for all models"
        logger.warning("%s is not drawn: %s", path, needs)
        return
    import matplotlib
    from matplotlib.figure import Figure

    shares = 100 * values / best
    start = max(0, 10 * math.floor(shares.min() / 10 - 0.5))
    angles = np.linspace(0, 2 * math.pi, len(names) + 1)
    figure = Figure(figsize=(7.5, 6), layout="constrained")
    axis = figure.add_subplot(projection="polar", theta_offset=math.pi / 2, theta_direction=-1)
    for model, row in zip(table, shares, strict=True):
        axis.plot(angles, [*row, row[0]], "o-", label=model, markersize=4)
    axis.set_xticks(angles[:-1], [f"{name}\n{value:.1f}" for name, value in zip(names, best, strict=True)])
    axis.tick_params(axis="x", pad=20)
    axis.set_ylim(start, 100)
    figure.legend(loc="outside right upper", frameon=False)
    figure.supxlabel(f"percent of the best value, given below each name; centre: {start}%", fontsize=9)
    with matplotlib.rc_context({"svg.fonttype": "none"}), replacing(path, "wb") as file:  # text stays text
        figure.savefig(file, format="svg")
