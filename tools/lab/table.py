"""The numbers of a study: a small JSON file for each seed, and one table over seeds.

    {"seed": 20, "arms": {ARM: {"settings": {...}, "made": {...}, "epochs": {"1": {MEASURE: number}, ...},
                                "counts": {"1": {...}, ...}}}}

"settings" are those of the loop, in which {folder} stands for the folder of the seed; "made" has package versions and
this project's commit; "counts" are what a study's own measures were computed from. The arms "base" and "imitation" are
the models that all arms of a seed share; their epoch is 0.

A seed counts as one observation, because all its games come from the same trainings: intervals are Student's t over
seeds. Differences are taken seed by seed, because the arms of a seed usually share the imitation model.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from tools.common.files import ROOT, read_json, write_json
from tools.loop.settings import read_record
from tools.measure.estimates import CONFIDENCE, EQUIVALENCE, UNKNOWN, holm, markdown, student, with_interval
from tools.measure.matches import BOTH, MEASURES, read_matches

BASE = "base"
IMITATION = "imitation"
OWN_MEASURES = "measures.json"  # of a loop: what a study's own function measures
LEGEND = f"Brackets: {CONFIDENCE:.0%} over seeds, by Student's t. Differences are paired by seed."
EQUAL = (
    "Equal: the p value is the larger one of two one-sided tests (TOST) that the difference is not below -margin, and "
    f"not above the margin; {EQUIVALENCE:.0%} is the interval that goes with them, by Student's t."
)
Numbers = dict[str, float]  # by measure
Comparisons = Sequence[Sequence[str]]  # measure, arm, other arm, and where equality is tested the margin
Lines = Iterable[Sequence]  # of a table


# From the folders of loops to the file of a seed.


def collect(folder: Path, arms: Iterable[str]) -> None:
    """Write the numbers of these arms, whose loops are in the folder of a seed, to FOLDER.json."""
    of_arms: dict[str, dict] = {}
    for arm in arms:
        loop = folder / arm
        record = read_record(loop)
        numbers: dict[str, dict] = {"epochs": {}, "counts": {}}
        counts = {model: measured["counts"] for model, measured in own_measures(loop).items()}
        for kind, of_models in (("epochs", loop_numbers(loop)), ("counts", counts)):
            for model, of_model in of_models.items():
                if model in (BASE, IMITATION):
                    # Several arms may have measured it. The first one counts, even if a later arm has another one.
                    of_shared = of_arms.setdefault(model, {"epochs": {"0": {}}, "counts": {"0": {}}})[kind]
                    of_shared["0"] = of_model | of_shared["0"]
                else:
                    numbers[kind][model.removeprefix("epoch")] = of_model
        settings = {name: without_folder(value, folder) for name, value in record["settings"].items()}
        of_arms[arm] = {"settings": settings, "made": record["made_by"], **numbers}
    write_json(folder.with_suffix(".json"), {"seed": int(folder.name.removeprefix("seed")), "arms": of_arms})


def without_folder(value, folder: Path):
    """A setting in which no path tells where the folder of the seed is, or this project."""
    if isinstance(value, list):
        return [without_folder(item, folder) for item in value]
    if isinstance(value, str):
        for path, name in ((folder.resolve(), "{folder}/"), (folder, "{folder}/"), (ROOT, "")):
            path_begins = rf"(?<![^\s=]){re.escape(str(path))}/"
            value = re.sub(path_begins, name, value)
    return value


def loop_numbers(loop: Path) -> dict[str, Numbers]:
    """The numbers of each model of a loop by name: base, imitation, epoch1, ..."""
    numbers: dict[str, Numbers] = defaultdict(dict)
    player = IMITATION
    epoch_folders = loop.glob("epoch*[0-9]")
    for epoch_folder in sorted(epoch_folders, key=lambda path: int(path.name.removeprefix("epoch"))):
        for path in epoch_folder.glob("episodes/*_summary.json"):
            numbers[player] |= play_numbers(read_json(path))  # the model of the epoch before plays these games
        player = epoch_folder.name
        match = epoch_folder / "eval" / "matches.json"
        if match.is_file():
            numbers[player] |= match_numbers(read_matches(match), player)
        state = epoch_folder / "model" / "trainer_state.json"
        if state.is_file():
            numbers[player] |= training_numbers(read_json(state)["log_history"])
    for path in loop.glob("epoch*/belief/belief.json"):
        for row in read_json(path)["table"]:
            numbers[row["model"]] |= belief_numbers(row)
    benchmarks = loop / "reasoning" / "results.json"
    if benchmarks.is_file():
        for row in read_json(benchmarks)["results"]:
            numbers[row["model"]][row["benchmark"]] = row["value"]
    for model, measured in own_measures(loop).items():
        numbers[model] |= measured["measures"]
    return dict(numbers)


def own_measures(loop: Path) -> dict[str, dict]:
    """What a study's function `after` has left: {MODEL: {"measures": {NAME: number}, "counts": {...}}}."""
    path = loop / OWN_MEASURES
    return read_json(path) if path.is_file() else {}


def play_numbers(summary: Mapping) -> Numbers:
    """How a model's games against itself ended, as shares of games."""
    outcomes = {name: number / summary["games"] for name, number in summary["outcomes"].items()}
    empty = summary["empty_replies"] / summary["messages"]
    return outcomes | {"empty replies": empty, "messages": summary["mean_length"]}


def match_numbers(match: Mapping, player: str) -> Numbers:
    """What a model does against imitation; as one role; and its points with each word list."""
    sides = (player, match["settings"]["against"], None)  # None: the seeds together
    rows = [row for row in match["results"] if (row["player"], row["opponent"], row["seed"]) == sides]
    pooled = rows[-1]["words"]  # all lists, or the only one
    numbers: Numbers = {}
    for row in rows:
        if row["words"] == pooled:
            where = "" if row["role"] == BOTH else f" as {row['role']}"
            numbers |= {f"{measure.name}{where}": row[measure.name] for measure in MEASURES}
        elif row["role"] == BOTH:
            numbers[f"points, {row['words']} words"] = row["points"]
    return numbers


def training_numbers(history: Iterable[Mapping]) -> Numbers:
    """How far a training on games moved from its reference: the clipped share of its rows, and log-ratios of steps."""
    steps = [logged for logged in history if "log_ratio" in logged]
    if not steps:
        return {}
    log_ratios = [step["log_ratio"] for step in steps]
    clipped = sum(step["clip_fraction"] for step in steps) / len(steps)
    return {
        "training: clip_fraction": clipped,
        "training: lowest log_ratio of a step": min(log_ratios),
        "training: highest log_ratio of a step": max(log_ratios),
    }


def belief_numbers(row: Mapping) -> Numbers:
    """The numbers of a row of belief. Their names tell the candidates, and the hints unless last.

    Values among different numbers of candidates do not compare, so the number is a part of the name. `belief` is left
    out, because it also rises when a model only becomes readier to guess.
    """
    where = f"among {row['candidates']}"
    if row["hints"] != "last":
        where += f", {row['hints']} hints"
    names = {"log_share": "log_share", "rank 1": "rank_1"}
    return {f"{name} {where}": row[key] for name, key in names.items()}


# From the files of seeds to the table.


def to_frame(seeds: Sequence[Mapping]) -> pd.DataFrame:
    lines = [
        (measure, arm, int(epoch), seed["seed"], value)
        for seed in seeds
        for arm, run in seed["arms"].items()
        for epoch, numbers in run["epochs"].items()
        for measure, value in numbers.items()
    ]
    return pd.DataFrame(lines, columns=["measure", "arm", "epoch", "seed", "value"]).dropna()


def mean_lines(frame: pd.DataFrame) -> Lines:
    yield ["measure", "arm", "epoch", "seeds", "mean"]
    for measure, of_measure in frame.groupby("measure", sort=False):
        for (arm, epoch), lines in of_measure.groupby(["arm", "epoch"], sort=False):
            mean, interval, _ = student(lines.value.tolist())
            yield [measure, arm, epoch, len(lines), with_interval(mean, interval, form_of(mean))]


def difference_lines(frame: pd.DataFrame, comparisons: Comparisons, *, adjusted: bool) -> Lines:
    """A line for each comparison. Adjusted p values are Holm's for all of these, tests of equality too."""
    p_title = "p by Holm" if adjusted else "p"
    yield ["measure", "arm", "minus", "epoch", "difference", "equal", p_title, "of each seed"]
    all_gaps = [paired(frame, *comparison[:3]) for comparison in comparisons]
    margins = [float(comparison[3]) if comparison[3:] else None for comparison in comparisons]
    p_values = [
        math.nan if gaps.empty else student(gaps.tolist(), margin)[-1]
        for gaps, margin in zip(all_gaps, margins, strict=True)
    ]
    if adjusted:
        p_values = holm(p_values)
    for comparison, gaps, margin, p in zip(comparisons, all_gaps, margins, p_values, strict=True):
        names = comparison[:3]
        if gaps.empty:  # also for a misspelt measure: the names of measures come from results
            yield [*names, *[UNKNOWN] * 5]
            continue
        mean, interval, _ = student(gaps.tolist())
        form = "+" + form_of(mean)
        of_each_seed = ", ".join(format(gap, form) for gap in gaps)
        equal = UNKNOWN if margin is None else equality_text(gaps, margin)
        yield [*names, gaps.name, with_interval(mean, interval, form), equal, p_text(p), of_each_seed]


def equality_text(gaps: pd.Series, margin: float) -> str:
    _, interval, _ = student(gaps.tolist(), margin)
    if interval is None:
        return f"margin {margin}"
    low, high = interval
    return f"margin {margin}: {EQUIVALENCE:.0%} [{low:+.3f}, {high:+.3f}]"


def paired(frame: pd.DataFrame, measure: str, arm: str, other: str) -> pd.Series:
    """An arm's measure minus another's for each seed that has both; its name is the epoch. Empty without any.

    The epoch is the last one that both have in all of these seeds. Base and imitation have one, for all epochs.
    """
    lines = frame[frame.measure == measure]
    values, others = (by_seed_and_epoch(lines, each) for each in (arm, other))
    epochs = others.columns if arm in (BASE, IMITATION) else values.columns
    gaps = in_epochs(values, epochs) - in_epochs(others, epochs)
    gaps = gaps.dropna(how="all")  # seeds that lack one of the arms
    gaps = gaps.dropna(axis="columns")  # epochs that an arm lacks in one of these seeds
    return pd.Series(dtype=float) if gaps.empty else gaps.iloc[:, -1]


def in_epochs(values: pd.DataFrame, epochs: pd.Index) -> pd.DataFrame:
    """Base and imitation have the values of their one epoch, 0, in all of these; any other arm has its own."""
    return pd.DataFrame({epoch: values[0] for epoch in epochs}) if list(values.columns) == [0] else values


def by_seed_and_epoch(lines: pd.DataFrame, arm: str) -> pd.DataFrame:
    """The values of an arm: a row for each seed, a column for each epoch."""
    return lines[lines.arm == arm].pivot(index="seed", columns="epoch", values="value")


def form_of(value: float) -> str:
    """Three decimals for shares, points and nats, one for percentages and rows."""
    return ".3f" if abs(value) < 10 else ".1f"


def p_text(p: float) -> str:
    if math.isnan(p):
        return UNKNOWN
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def table_text(seeds: Sequence[Mapping], primary: Comparisons, minus: Comparisons) -> str:
    """The comparisons that the file of arms declares, and all means, in Markdown."""
    frame = to_frame(seeds)
    legend = f"{LEGEND} {EQUAL}" if any(comparison[3:] for comparison in (*primary, *minus)) else LEGEND
    text = f"{legend}\n"
    if primary:
        text += f"\n## Primary comparisons\n\n{markdown(difference_lines(frame, primary, adjusted=True))}\n"
    if minus:
        text += f"\n## Further comparisons\n\n{markdown(difference_lines(frame, minus, adjusted=False))}\n"
    return f"{text}\n## Means over seeds\n\n{markdown(mean_lines(frame))}\n"
