"""The reasoning table: benchmarks, published rows, and the files that show all models on all benchmarks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tools.reasoning.scores import MEAN, Score, result_rows
from utils import UserError, read_json, replacing, write_json

if TYPE_CHECKING:
    from tools.reasoning.jobs import Job

MARK, UNKNOWN = "≈", "-"
RESULTS, TABLE = "results.json", "table.md"


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


def write_results(folder: Path, jobs: Sequence["Job"], dtype: str, limit: int | None) -> str:
    """Write table.md and results.json of finished jobs; the table and a line with the result."""
    table: dict[str, dict[str, Score]] = {}
    for job in jobs:
        table.setdefault(job.model, {})[job.benchmark.name] = job.score()
    made = {job.path: read_json(job.path) for job in jobs}
    if len(versions := sorted({each["harness"] for each in made.values()})) > 1:
        raise UserError(f"{folder}: results of the harness versions {', '.join(versions)} cannot be compared")
    settings = {
        "harness": versions[0],
        "dtype": dtype,
        "limit": limit,
        "against": jobs[0].model,
        "models": {job.model: job.settings["model"] for job in jobs},
        "benchmarks": [job.benchmark._asdict() for job in jobs if job.model == jobs[0].model],
        "data_revisions": {path: sha for each in made.values() for path, sha in each["data_revisions"].items()},
    }
    rows = result_rows(table, settings["against"])
    text = table_text(rows, settings)
    with replacing(folder / TABLE) as file:
        file.write(text)
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
