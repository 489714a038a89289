"""The table of all models on all benchmarks, beside the published scores."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tools.reasoning.jobs import BENCHMARKS, Job
from tools.reasoning.scores import MEAN, NORMAL, Score, read_score, result_rows
from utils import UserError, read_json, replacing, write_json

MARK, UNKNOWN = "≈", "-"
RESULTS, TABLE = "results.json", "table.md"
ERRORS = "Percentages ± one standard error over draws of the questions; it does not cover the randomness of training."

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


def write_results(
    folder: Path, jobs: Sequence[Job], problems: Mapping[Path, str], dtype: str, limit: int | None
) -> str:
    """Write table.md and results.json; return the table and a line with the geometric means.

    `problems`: why a job has no result, by job.path. UserError if results cannot be compared.
    """
    made = {job.path: read_json(job.path) for job in jobs if job.path not in problems}
    table: dict[str, dict[str, Score]] = {job.model: {} for job in jobs}
    for job in jobs:
        if job.path in made:
            table[job.model][job.benchmark.name] = read_score(made[job.path], job.benchmark.metric)
    settings = {
        "harness": _same(folder, "the harness", (each["harness"] for each in made.values())),
        "dtype": dtype,
        "limit": limit,
        "against": jobs[0].model,
        "models": {job.model: job.settings["model"] for job in jobs},
        "benchmarks": [job.benchmark._asdict() for job in jobs if job.model == jobs[0].model],
        "data_revisions": {
            name: _same(folder, name, (each["data_revisions"].get(name) for each in made.values()))
            for name in dict.fromkeys(name for each in made.values() for name in each["data_revisions"])
        },
    }
    missing = [
        {"model": job.model, "benchmark": job.benchmark.name, "reason": problems[job.path]}
        for job in jobs
        if job.path in problems
    ]
    rows = result_rows(table, settings["against"], [benchmark["name"] for benchmark in settings["benchmarks"]])
    text = table_text(rows, settings, missing)
    with replacing(folder / TABLE) as file:
        file.write(text)
    published = {"source": PUBLISHED_SOURCE, "rows": PUBLISHED}
    found = {"settings": settings, "results": rows, "missing": missing, "published": published}
    write_json(folder / RESULTS, found)
    means = ", ".join(f"{row['model']} {cell_text(row)}" for row in rows if row["benchmark"] == MEAN)
    return f"{text}\nreasoning, {MEAN}: {means or UNKNOWN}\n"


def _same(folder: Path, what: str, versions: Iterable[str | None]) -> str | None:
    """The one version that is known; None if none is."""
    found = sorted(set(filter(None, versions)))
    if len(found) > 1:
        raise UserError(f"{folder}: results of {what} in the versions {', '.join(found)} cannot be compared")
    return found[0] if found else None


def table_text(rows: Sequence[Mapping], settings: Mapping, missing: Sequence[Mapping]) -> str:
    """The table in Markdown with the published rows below, and the tasks, shots and metrics behind it."""
    columns = [benchmark["name"] for benchmark in settings["benchmarks"]]
    cells = {(row["model"], row["benchmark"]): cell_text(row) for row in rows}
    head = ["", *columns, MEAN]
    lines = [
        head,
        *([model, *(cells.get((model, name), UNKNOWN) for name in head[1:])] for model in settings["models"]),
    ]
    mean = MEAN if set(columns) == set(PUBLISHED_NAMES) else None  # published only of all eight
    for name, published in PUBLISHED.items():
        values = [published.get(column, UNKNOWN) for column in [*columns, mean]]
        if set(values) != {UNKNOWN}:
            lines.append([f"{name}, published", *values])
    how = f"lm-evaluation-harness {settings['harness']}, {settings['dtype']}:"
    used = [["benchmark", "task", "shots", "metric", "questions"]]
    first = {row["benchmark"]: row for row in reversed(rows)}
    for benchmark in settings["benchmarks"]:
        row = first.get(benchmark["name"], {})
        used.append([benchmark["name"], benchmark["task"], *(row.get(key, UNKNOWN) for key in used[0][2:])])
    return "\n\n".join([markdown(lines), *_notes(rows, settings, missing), how, markdown(used)]) + "\n"


def cell_text(row: Mapping) -> str:
    """Value, standard error, and a mark if the difference from the first model may be 0."""
    text = f"{row['value']:.2f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.2f}")
    return text + (f" {MARK}" if row["difference"] and row["difference"]["unclear"] else "")


def markdown(lines: Sequence[Sequence]) -> str:
    """A table, whose first line is its head."""
    head, *body = lines
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *body))


def _notes(rows: Sequence[Mapping], settings: Mapping, missing: Sequence[Mapping]) -> list[str]:
    """Paragraphs below the table."""
    notes = [ERRORS]
    if differences := [row["difference"] for row in rows if row["difference"]]:
        paired = all(away["paired"] for away in differences)
        how = "question by question" if paired else "as of independent draws where results.json says `paired` false"
        what = f"the difference from {settings['against']} is at most {NORMAL} of its standard errors"
        notes.append(f"{MARK}: {what} ({how}).")
    notes.append(f"Published rows: {PUBLISHED_SOURCE}; their tasks, shots and metrics are not known.")
    if settings["limit"] is not None:
        notes.append(f"A trial: only the first {settings['limit']} questions of each task were asked.")
    lines = [
        f"The {MEAN} of {row['model']} is 0 because its {row['benchmark']} is 0."
        for row in rows
        if row["value"] == 0 and row["benchmark"] != MEAN
    ]
    lines += [f"No result of {each['model']} on {each['benchmark']}: {each['reason']}" for each in missing]
    return [" ".join(notes), *lines]
