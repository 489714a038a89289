"""The reasoning table: benchmarks, published rows, standard errors, the geometric mean, Markdown and the radar plot.

All values are percentages.
"""

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils import replacing

MEAN = "geometric mean"
MATCHING = 1e-6  # how near the mean of the questions' scores must be to the harness' value, to be what it is made of
MARK = "≈"
FEWEST_AXES = 3  # of a radar plot
COLOURS = ("#444444", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d31")
logger = logging.getLogger(__name__)


class Benchmark(NamedTuple):
    """A column of the table."""

    name: str
    task: str  # as the harness calls it
    shots: int | None  # None: as many as the task itself says
    metric: str  # "metric" or "metric,filter" of the harness


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
PUBLISHED_NAMES = ("MMLU", "BBH", "MuTual", "ARC-e", "ARC-c", "LogiQA2", "WinoGrande", "PIQA")

# Accuracies as texts, with the digits that are known, and last the mean over all eight; base rows and values with one
# decimal were read off a figure or checked through the mean only.
PUBLISHED_SOURCE = "Cheng et al., NeurIPS 2024, arXiv 2404.10642"
UNKNOWN = "-"
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


# --- numbers -------------------------------------------------------------------------------------------------------


class Score(NamedTuple):
    """A model on a benchmark."""

    value: float
    stderr: float | None
    questions: int
    shots: int | list[int]
    metric: str
    scores: np.ndarray | None  # of each question, if their mean is the value


class Difference(NamedTuple):
    """How far a model is from another one; `paired` if question by question."""

    value: float
    stderr: float | None
    paired: bool

    @property
    def within_stderr(self) -> bool | None:
        """Whether it is at most one standard error of the difference; None where that is not known."""
        return None if self.stderr is None else abs(self.value) <= self.stderr


def read_score(result: Mapping, metric: str) -> Score:
    """One metric of a result of tools/reasoning/harness.py.

    Raises ValueError, naming those that there are, unless exactly one fits, and for values that are no shares.
    """
    metrics = result["metrics"]
    fitting = [key for key in metrics if metric in (key, key.partition(",")[0])]
    if len(fitting) != 1:
        kind = "no metric" if not fitting else "more than one metric"
        raise ValueError(f"{kind} {metric!r}; there are: {' '.join(metrics)}; choose with --metrics NAME=METRIC")
    value, stderr = metrics[fitting[0]]["value"], metrics[fitting[0]]["stderr"]
    if not 0 <= value <= 1:
        raise ValueError(f"{fitting[0]} is {value}, no share between 0 and 1; choose another with --metrics")
    scores = np.array(result["scores"].get(fitting[0], []))
    whole = len(scores) > 1 and abs(scores.mean() - value) < MATCHING
    return Score(
        value=100 * value,
        stderr=None if stderr is None else 100 * stderr,
        questions=result["questions"],
        shots=result["shots"],
        metric=fitting[0],
        scores=100 * scores if whole else None,
    )


def is_paired(own: Score, other: Score) -> bool:
    """Whether both scores are known question by question, for as many questions."""
    return own.scores is not None and other.scores is not None and len(own.scores) == len(other.scores)


def weighted_stderr(own: Score, other: Score, weight: float = 1.0, other_weight: float = 1.0) -> float | None:
    """Standard error of weight * own - other_weight * other, over draws of the questions that both were asked.

    Where the questions' scores are not known, as if the two had been asked different ones; None without any error.
    """
    if is_paired(own, other):
        terms = weight * own.scores - other_weight * other.scores
        return float(terms.std(ddof=1)) / math.sqrt(len(terms))
    if own.stderr is None or other.stderr is None:
        return None
    return math.hypot(weight * own.stderr, other_weight * other.stderr)


def difference(own: Score, other: Score) -> Difference:
    """Own minus other."""
    return Difference(own.value - other.value, weighted_stderr(own, other), is_paired(own, other))


def geometric_mean(scores: Sequence[Score]) -> tuple[float, float | None]:
    """Geometric mean G of values x_i, and its standard error to first order, G/k sqrt(sum (s_i / x_i)^2).

    The error is None where a value is 0 or has none.
    """
    values, stderrs = [score.value for score in scores], [score.stderr for score in scores]
    if min(values) <= 0:
        return 0.0, None
    mean = math.exp(sum(map(math.log, values)) / len(values))
    if None in stderrs:
        return mean, None
    relative = math.sqrt(sum((stderr / value) ** 2 for value, stderr in zip(values, stderrs, strict=True)))
    return mean, mean / len(values) * relative


def mean_difference(own: Sequence[Score], other: Sequence[Score]) -> Difference:
    """Difference of two geometric means; its standard error to first order, the benchmarks being independent."""
    means = geometric_mean(own)[0], geometric_mean(other)[0]
    paired = all(map(is_paired, own, other))
    if not all(means):
        return Difference(means[0] - means[1], None, paired)
    slopes = [[mean / len(own) / one.value for one in side] for mean, side in zip(means, (own, other), strict=True)]
    stderrs = list(map(weighted_stderr, own, other, *slopes))
    return Difference(means[0] - means[1], None if None in stderrs else math.hypot(*stderrs), paired)


# --- the table -----------------------------------------------------------------------------------------------------


def result_rows(table: Mapping[str, Mapping[str, Score]], against: str) -> list[dict]:
    """A row per model and benchmark, and per model for the geometric mean, with the difference from `against`."""
    rows = []
    for model, scores in table.items():
        others = table[against]
        for name, score in scores.items():
            row = {"model": model, "benchmark": name} | score._asdict()
            del row["scores"]
            rows.append(row | {"difference": difference_row(difference(score, others[name]), model, against)})
        value, stderr = geometric_mean(list(scores.values()))
        away = mean_difference(list(scores.values()), list(others.values()))
        row = {"model": model, "benchmark": MEAN, "value": value, "stderr": stderr}
        rows.append(row | {"difference": difference_row(away, model, against)})
    return rows


def difference_row(found: Difference, model: str, against: str) -> dict | None:
    """A difference as results.json has it; None for the model itself."""
    if model == against:
        return None
    return {"from": against} | found._asdict() | {"within_stderr": found.within_stderr}


def table_text(rows: Sequence[Mapping], benchmarks: Sequence[Benchmark], settings: Mapping) -> str:
    """The table in Markdown, with the published rows below, and how it was made."""
    columns = [benchmark.name for benchmark in benchmarks]
    cells = {(row["model"], row["benchmark"]): row for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = ["| | " + " | ".join([*columns, MEAN]) + " |", "|---" * (len(columns) + 2) + "|"]
    for model in models:
        lines.append(f"| {model} | " + " | ".join(cell_text(cells[model, name]) for name in [*columns, MEAN]) + " |")
    for name, published in PUBLISHED.items():
        values = [published.get(column, UNKNOWN) for column in columns]
        values.append(published[MEAN] if set(columns) == set(PUBLISHED_NAMES) else UNKNOWN)
        if set(values) != {UNKNOWN}:
            lines.append(f"| {name}, published | " + " | ".join(values) + " |")
    return "\n".join([*lines, "", *_notes(rows, settings), "", *_how(cells, models[0], benchmarks, settings), ""])


def cell_text(row: Mapping) -> str:
    """Value, standard error, and a mark if the difference is within one standard error."""
    text = f"{row['value']:.2f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.2f}")
    return text + (f" {MARK}" if row["difference"] and row["difference"]["within_stderr"] else "")


def _notes(rows: Sequence[Mapping], settings: Mapping) -> list[str]:
    notes = ["Percentages ± one standard error, over draws of the questions; another training run is not in it."]
    differences = [row["difference"] for row in rows if row["difference"]]
    if differences:
        paired = all(item["paired"] for item in differences)
        how = "question by question" if paired else "as of independent draws where `paired` in results.json is false"
        other = settings["against"]
        notes.append(f"{MARK}: the difference from {other} is within one standard error of the difference ({how}).")
    notes.append(f"Published rows: {PUBLISHED_SOURCE}; tasks, shots and metrics there may be others.")
    if settings["limit"] is not None:
        notes.append(f"Only the first {settings['limit']} questions of each task were asked: no result to report.")
    return [" ".join(notes)]


def _how(cells: Mapping, model: str, benchmarks: Sequence[Benchmark], settings: Mapping) -> list[str]:
    lines = [f"lm-evaluation-harness {settings['harness']}, {settings['dtype']}:", ""]
    lines += ["| benchmark | task | shots | metric | questions |", "|---|---|---|---|---|"]
    for benchmark in benchmarks:
        row = cells[model, benchmark.name]
        lines.append(
            f"| {benchmark.name} | {benchmark.task} | {row['shots']} | {row['metric']} | {row['questions']} |"
        )
    return lines


# --- the plot ------------------------------------------------------------------------------------------------------


def lower_end(shares: Sequence[float]) -> float:
    """Where the axes of the plot begin: below the least share of the best, in steps of 0.1."""
    return max(0.0, math.floor(10 * min(shares) - 0.5) / 10)


def write_radar(path: Path, table: Mapping[str, Mapping[str, Score]]) -> bool:
    """Draw the models, an axis per benchmark in shares of the best model's value; False if that cannot be done."""
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("%s is not drawn: that needs pip install matplotlib", path)
        return False
    names = list(next(iter(table.values())))
    best = {name: max(scores[name].value for scores in table.values()) for name in names}
    if len(names) < FEWEST_AXES or not all(best.values()):
        logger.warning("%s is not drawn: that needs %d benchmarks, none with 0 for all models", path, FEWEST_AXES)
        return False
    import matplotlib
    from matplotlib.figure import Figure

    shares = {model: [scores[name].value / best[name] for name in names] for model, scores in table.items()}
    start = lower_end([share for row in shares.values() for share in row])
    angles = [2 * math.pi * number / len(names) for number in range(len(names))]
    # Text stays text, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name, "font.family": "sans-serif"}):
        figure = Figure(figsize=(7.5, 6), layout="constrained")
        axis = figure.add_subplot(projection="polar", theta_offset=math.pi / 2, theta_direction=-1)
        for number, (model, row) in enumerate(shares.items()):
            colour = COLOURS[number % len(COLOURS)]
            style = ("o-", "s--", "^-.")[number // len(COLOURS) % 3]
            axis.plot([*angles, 0], [*row, row[0]], style, color=colour, label=model, markersize=4, linewidth=1.6)
        axis.set_xticks(angles, [f"{name}\n{best[name]:.1f}" for name in names])
        axis.tick_params(axis="x", pad=20)
        ticks = [tick / 20 for tick in range(1, 21) if tick / 20 > start and (start > 0.7 or tick % 2 == 0)]
        axis.set_ylim(start, 1.0)
        axis.set_yticks(ticks, [f"{100 * tick:.0f}%" for tick in ticks], fontsize=8, color="#666666")
        figure.legend(loc="outside right upper", frameon=False)
        figure.supxlabel(f"share of the best model's value (below its name); centre: {100 * start:.0f}%", fontsize=9)
        with replacing(path, "wb") as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
    return True
