"""The benchmarks, the published scores, and the table of all models on all benchmarks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tools.reasoning.scores import MEAN, Score, read_score, result_rows
from utils import UserError, read_json, replacing, write_json

if TYPE_CHECKING:
    from tools.reasoning.jobs import Job

MARK, UNKNOWN = "≈", "-"
RESULTS, TABLE = "results.json", "table.md"
ERRORS = "Percentages ± one standard error over draws of the questions; it does not cover the randomness of training."


class Benchmark(NamedTuple):
    """A column of the table."""

    name: str
    task: str  # as the harness calls it
    shots: int | None  # None: as many as the task itself says
    metric: str  # "metric" or "metric,filter" of the harness

    def __str__(self) -> str:
        return f"{self.name}:{self.shots}"


# The paper does not state its tasks, shots and metrics: these are this project's choice.
BENCHMARKS = (
    Benchmark("MMLU", "mmlu", 5, "acc"),
    Benchmark("BBH", "bbh_fewshot", 3, "exact_match"),
    Benchmark("MuTual", "mutual", 0, "acc"),
    Benchmark("ARC-e", "arc_easy", 0, "acc"),
    Benchmark("ARC-c", "arc_challenge", 0, "acc"),
    Benchmark("LogiQA2", "logiqa2", 0, "acc"),
    Benchmark("WinoGrande", "winogrande", 0, "acc"),
    Benchmark("PIQA", "piqa", 0, "acc"),
)

# Accuracies as texts, with the digits that are known, and last the geometric mean of all eight. Base rows and values
# with one decimal were read off a figure, or checked only through the mean.
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
    """Write table.md and results.json of finished jobs; return the table and a line with the geometric means."""
    table: dict[str, dict[str, Score]] = {}
    made = [read_json(job.path) for job in jobs]
    for job, result in zip(jobs, made, strict=True):
        table.setdefault(job.model, {})[job.benchmark.name] = read_score(result, job.benchmark.metric)
    if len(versions := sorted({each["harness"] for each in made})) > 1:
        raise UserError(f"{folder}: results of the harness versions {', '.join(versions)} cannot be compared")
    settings = {
        "harness": versions[0],
        "dtype": dtype,
        "limit": limit,
        "against": jobs[0].model,
        "models": {job.model: job.settings["model"] for job in jobs},
        "benchmarks": [job.benchmark._asdict() for job in jobs if job.model == jobs[0].model],
        "data_revisions": {path: sha for each in made for path, sha in each["data_revisions"].items()},
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
    """The table in Markdown with the published rows below, and the tasks, shots and metrics behind it."""
    columns = [benchmark["name"] for benchmark in settings["benchmarks"]]
    lines = [["", *columns, MEAN]]
    for model in dict.fromkeys(row["model"] for row in rows):
        lines.append([model, *(cell_text(row) for row in rows if row["model"] == model)])
    mean = MEAN if set(columns) == set(PUBLISHED_NAMES) else None  # published only of all eight
    for name, published in PUBLISHED.items():
        values = [published.get(column, UNKNOWN) for column in [*columns, mean]]
        if set(values) != {UNKNOWN}:
            lines.append([f"{name}, published", *values])
    how = f"lm-evaluation-harness {settings['harness']}, {settings['dtype']}:"
    used = [["benchmark", "task", "shots", "metric", "questions"]]
    for benchmark, row in zip(settings["benchmarks"], rows, strict=False):  # the first model's
        used.append([benchmark["name"], benchmark["task"], row["shots"], row["metric"], row["questions"]])
    return "\n\n".join([markdown(lines), _notes(rows, settings), how, markdown(used)]) + "\n"


def cell_text(row: Mapping) -> str:
    """Value, standard error, and a mark if the difference from the first model is within one standard error."""
    text = f"{row['value']:.2f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.2f}")
    return text + (f" {MARK}" if row["difference"] and row["difference"]["within_stderr"] else "")


def markdown(lines: Sequence[Sequence]) -> str:
    """A table, whose first line is its head."""
    head, *body = lines
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *body))


def _notes(rows: Sequence[Mapping], settings: Mapping) -> str:
    notes = [ERRORS]
    if differences := [row["difference"] for row in rows if row["difference"]]:
        paired = all(away["paired"] for away in differences)
        how = "question by question" if paired else "as of independent draws where results.json says `paired` false"
        what = f"the difference from {settings['against']} is within one standard error of the difference"
        notes.append(f"{MARK}: {what} ({how}).")
    notes.append(f"Published rows: {PUBLISHED_SOURCE}; their tasks, shots and metrics are not known.")
    if settings["limit"] is not None:
        notes.append(f"A trial: only the first {settings['limit']} questions of each task were asked.")
    return " ".join(notes)
