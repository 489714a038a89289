"""The files that the reasoning table leaves: scores of all models on all benchmarks as JSON, Markdown and a plot."""

import logging
from collections.abc import Sequence
from pathlib import Path

from tools.reasoning.jobs import Job
from tools.reasoning.table import (
    PUBLISHED,
    PUBLISHED_SOURCE,
    Benchmark,
    Score,
    read_score,
    result_rows,
    table_text,
    write_radar,
)
from utils import replacing, write_json

RESULT_FILES = ("results.json", "table.md", "radar.svg")
logger = logging.getLogger(__name__)


def collect(jobs: Sequence[Job]) -> dict[str, dict[str, Score]]:
    """The scores by model and benchmark, in the order of the command line."""
    table: dict[str, dict[str, Score]] = {}
    for job in jobs:
        try:
            score = read_score(job.finished(), job.benchmark.metric)
        except ValueError as error:
            raise ValueError(f"{job.path}: {error}") from None
        if job.benchmark.shots not in (None, score.shots):
            logger.warning("%s: %s shots, since the task fixes them", job.name, score.shots)
        table.setdefault(job.model.name, {})[job.benchmark.name] = score
    return table


def write_results(folder: Path, jobs: Sequence[Job], benchmarks: Sequence[Benchmark], settings: dict) -> str:
    """Write results.json, table.md and radar.svg; returns the table. `settings` are those of the whole table."""
    table = collect(jobs)
    models = {job.model.name: {"path": job.model.path, "sha256": job.settings["model"]["sha256"]} for job in jobs}
    settings |= {"models": models, "benchmarks": [benchmark._asdict() for benchmark in benchmarks]}
    rows = result_rows(table, settings["against"])
    text = table_text(rows, benchmarks, settings)
    with replacing(folder / "table.md") as file:
        file.write(text)
    if not write_radar(folder / "radar.svg", table):
        (folder / "radar.svg").unlink(missing_ok=True)
    published = {"source": PUBLISHED_SOURCE, "rows": PUBLISHED}
    write_json(folder / "results.json", {"settings": settings, "results": rows, "published": published})
    return text
