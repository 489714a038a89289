"""The tables of a study, from the files of its seeds or from the folders of finished loops.

    python -m tools.lab.table --results data/results/tiny/*.json --primary points losers_ties detached_matched
    python -m tools.lab.table --results spag=outputs/spag42 spag=outputs/spag43 sft=outputs/sft42 sft=outputs/sft43

A seed counts as one observation: intervals are Student's t over seeds, and differences are taken seed by seed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from tools.flags import flag, parse_flags
from tools.lab import collect
from tools.lab.collect import (
    BASE,
    BELIEF,
    GUESSES,
    IMITATION,
    POINTS,
    REASONING,
    TABLES,
    TRAINED,
    TRAINING,
)
from tools.loop.record import FREE, MEASURES, MICRO_BATCH, THIS_MACHINE, is_free
from tools.measure.estimates import CONFIDENCE, MEAN, ROUNDING, UNKNOWN, markdown, with_interval
from utils import UserError, differences, read_json, run_program

# Keys of settings in which the runs of one arm may differ: seeds, places, how far and how fast it runs.
RUNS_DIFFER_IN = FREE | THIS_MACHINE | {"seed", "seeds", "like", "imitation_model", "first_episodes", "tasks"}
RUNS_DIFFER_IN |= {"logging_steps"}
# Of finished studies, whose loop was a shell script.
RUNS_DIFFER_IN |= set(
    "SEED EVAL_SEEDS OUTPUT LIKE IMITATION_MODEL FIRST_EPISODES EPOCHS UNTIL EVAL_EVERY EVAL_TASKS REPORT SAVE_STEPS "
    "NPROC NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID PLAY_BATCH TENSOR_PARALLEL_SIZE GRADIENT_CHECKPOINTING "
    "DEEPSPEED".split()
)
FORMS = {BELIEF: ".2f", REASONING: ".2f"} | dict.fromkeys(TRAINED, ".0f")  # of tables and columns; others are shares
COMPARISON = {"type": str, "nargs": 3, "action": "append", "metavar": ("MEASURE", "ARM", "OTHER")}
LEGEND = """Brackets: 95% over seeds, by Student's t. ±: one standard error over questions. (n=K): only K of the seeds.
The p values of primary comparisons are adjusted for their number, others are not.
"""
Comparisons = Sequence[Sequence[str]]  # measure, arm, other arm
Lines = Iterable[Sequence[str]]


@dataclass(kw_only=True)
class Flags:
    results: list[str] = flag("files of seeds, seedN.json, or loops as ARM=OUTPUT", metavar="FILE")
    primary: list[list[str]] = flag("a planned difference of two arms in a column", default=[], **COMPARISON)
    minus: list[list[str]] = flag("a further one; without any: each arm minus the first one", default=[], **COMPARISON)


def read_results(names: Sequence[str | Path]) -> list[dict]:
    """Read files of seeds, and loops given as ARM=OUTPUT. Returns what they hold, in collect.py's form, by seed."""
    parts = [str(name).partition("=") for name in names]
    results = [collect.read_loop(arm, Path(loop)) if loop else read_json(arm) for arm, _, loop in parts]
    for name, result in zip(names, results, strict=True):
        if "seed" not in result:
            raise UserError(f"{name}: not the results of a seed, as tools/lab/collect.py writes them")
    return sorted(results, key=lambda result: result["seed"])


def may_differ(name: str) -> bool:
    """Whether the runs of one arm may differ in a setting."""
    stage, dot, key = name.rpartition(".")
    if key in RUNS_DIFFER_IN:
        return True
    is_of_loop = dot and stage not in MEASURES and key != MICRO_BATCH  # over a micro-batch a loss is averaged
    return bool(is_of_loop) and is_free(name)


def refuse_mixed(results: Sequence[dict]) -> None:
    """Raise UserError for two runs of an arm with the same seed, or with other settings."""
    first, runs = {}, set()
    of_all = [(result["seed"], *item) for result in results for item in result["arms"].items()]
    for seed, arm, run in of_all:
        settings = {name: value for name, value in run.get("settings", {}).items() if not may_differ(name)}
        if different := differences(first.setdefault(arm, settings), settings):
            raise UserError(f"seed {seed}, {arm}: {'; '.join(different)}; do not mix these runs")
        if settings and (seed, arm) in runs:
            raise UserError(f"there are two runs of {arm} with seed {seed}; give one")
        runs.add((seed, arm))


def to_frame(results: Sequence[dict]) -> pd.DataFrame:
    """All numbers, one a line; those of base and imitation once a seed. `stderr` is that of a benchmark."""
    lines = [
        (table, column, arm, int(epoch), result["seed"], *(value if isinstance(value, list) else (value, None)))
        for result in results
        for arm, run in result["arms"].items()
        for epoch, tables in run["epochs"].items()
        for table, columns in tables.items()
        for column, value in columns.items()
    ]
    keys = ["table", "column", "arm", "epoch", "seed"]
    frame = pd.DataFrame(lines, columns=[*keys, "value", "stderr"]).dropna(subset=["value"]).astype({"stderr": float})
    return frame.drop_duplicates(keys).sort_values("arm", key=lambda arms: arms != BASE, kind="stable")


def student(values: Sequence[float]) -> tuple[float, list[float] | None, float]:
    """Mean over seeds, Student's 95% interval, p value of a mean of 0 (None and nan: one seed, or equal values)."""
    mean = float(np.mean(values))
    if len(values) < 2 or np.ptp(values) < ROUNDING:
        return mean, None, math.nan
    test = stats.ttest_1samp(values, 0.0)
    return mean, list(test.confidence_interval(CONFIDENCE)), float(test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for their number, that of nan too, by Holm's method (Scand. J. Stat. 6, 1979)."""
    ordered = pd.Series(p_values, dtype=float).sort_values()
    factors = len(ordered) - np.arange(len(ordered))
    return (ordered * factors).clip(upper=1).cummax().sort_index().tolist()


def paired(frame: pd.DataFrame, measure: str, arm: str, other: str) -> tuple[str, int, list[float]] | None:
    """An arm's measure minus another's for each seed: table, epoch, differences. None without any.

    The measure points@NAME is points against NAME. The epoch is the last one that both have in all of their seeds;
    base and imitation have one for all epochs.
    """
    column, _, opponent = measure.partition("@")
    lines = frame[(frame.column == column) & frame.table.isin([f"{POINTS} {opponent or IMITATION}", *TABLES])]
    values, others = (
        lines[lines.arm == name].pivot(index="seed", columns="epoch", values="value") for name in (arm, other)
    )
    gaps = values.sub(others.squeeze("columns"), axis="index") if other in (BASE, IMITATION) else values - others
    gaps = gaps.dropna(how="all").dropna(axis="columns")
    if gaps.empty:
        return None
    return lines.table.iloc[0], gaps.columns[-1], gaps.iloc[:, -1].tolist()


def cell(lines: pd.DataFrame, table: str, column: str, seeds: int) -> str:
    """The cell of a model in a column, from a line for each of its seeds that have it."""
    values, error = lines.value.tolist(), lines.stderr.iloc[0]
    form = "+" * (" minus " in column) + FORMS.get(column, FORMS.get(table, ".3f"))
    fewer = f" (n={len(values)})" if len(values) < seeds else ""
    if len(values) == 1 and error > 0:
        return f"{values[0]:{form}} ± {error:.2f}{fewer}"
    return with_interval(*student(values)[:2], form) + fewer


def model_lines(frame: pd.DataFrame, table: str) -> Lines:
    frame = frame[frame.table == table]
    columns = frame.column.unique()
    yield ["arm", "epoch", "seeds", *columns]
    for (arm, epoch), lines in frame.groupby(["arm", "epoch"], sort=False):
        seeds = lines.seed.nunique()
        cells = {column: cell(of_column, table, column, seeds) for column, of_column in lines.groupby("column")}
        yield [arm, epoch, seeds, *(cells.get(column, UNKNOWN) for column in columns)]


def arm_lines(results: Sequence[dict], frame: pd.DataFrame) -> Lines:
    """A line for each arm: its settings that are not the first one's, its last epoch, and the commits that made it."""
    yield ["arm", "settings", "seeds", "epochs", *TRAINED, "commits"]
    first: dict[str, str] = {}
    for arm, lines in frame[frame.table == TRAINING].groupby("arm", sort=False):
        runs = [result["arms"][arm] for result in results if arm in result["arms"]]
        first = first or runs[0]["settings"]
        own = {name: value for name, value in sorted(runs[0]["settings"].items()) if value != first.get(name)}
        settings = "; ".join(f"{name}={value}" for name, value in own.items() if value and not may_differ(name))
        trained = lines[lines.epoch == lines.epoch.max()].groupby("column").value.mean()
        commits = ", ".join(sorted({run["made"].get("spag", UNKNOWN)[:9] for run in runs}))
        yield [arm, settings, len(runs), lines.epoch.max(), *(f"{trained[name]:.0f}" for name in TRAINED), commits]


def difference_lines(frame: pd.DataFrame, comparisons: Comparisons, *, primary: bool = False) -> Lines:
    """A line for each difference. The p values of primary ones are adjusted for their number."""
    yield ["measure", "arm", "minus", "epoch", "difference", "p by Holm" if primary else "p", "of each seed"]
    pairs = [paired(frame, *comparison) for comparison in comparisons]
    p_values = [student(pair[-1])[-1] if pair else math.nan for pair in pairs]
    for comparison, pair, p in zip(comparisons, pairs, holm(p_values) if primary else p_values, strict=True):
        if pair:
            table, epoch, gaps = pair
            form = "+" + FORMS.get(table, ".3f")
            difference = with_interval(*student(gaps)[:2], form)
            p_text = UNKNOWN if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"
            yield [*comparison, epoch, difference, p_text, ", ".join(format(gap, form) for gap in gaps)]
        else:
            yield [*comparison, *[UNKNOWN] * 4]


def tables(results: Sequence[dict], primary: Comparisons, minus: Comparisons) -> str:
    refuse_mixed(results)
    frame = to_frame(results)
    arms = [arm for arm in frame.arm.unique() if arm not in (BASE, IMITATION)]
    if not arms:
        raise UserError("no epoch of these loops has ended, so there is nothing to show")
    first, *others = arms
    shares = [column for column in frame[frame.table == GUESSES].column.unique() if column.startswith("share")]
    from_first = [(measure, arm, first) for measure in ("points", *shares, MEAN) for arm in others]
    minus = minus or [comparison for comparison in from_first if paired(frame, *comparison)]
    points = sorted({table for table in frame.table if table.startswith(POINTS)})
    lines_by_title = {
        "Arms": arm_lines(results, frame),
        "Primary comparisons": difference_lines(frame, primary, primary=True),
        **{table: model_lines(frame, table) for table in points},
        "Differences, paired by seed": difference_lines(frame, minus),
        **{table: model_lines(frame, table) for table in TABLES},
    }
    filled = {title: rows for title, lines in lines_by_title.items() if len(rows := list(lines)) > 1}
    return f"{LEGEND}\n" + "\n".join(f"## {title}\n\n{markdown(rows)}\n" for title, rows in filled.items())


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    print(tables(read_results(flags.results), flags.primary, flags.minus), end="")


if __name__ == "__main__":
    run_program(main)
