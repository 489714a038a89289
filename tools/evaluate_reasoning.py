"""Checkpoints on reasoning benchmarks, through lm-evaluation-harness, as a table.

python -m tools.evaluate_reasoning --models base=MODEL imitation=DIR epoch1=DIR epoch2=DIR --output_dir DIR
"""

import itertools
import logging
import shlex
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from tools.common.errors import UserError, require
from tools.common.files import read_json, write_json, write_text
from tools.common.flags import (
    NAMED_MODELS,
    NamedPath,
    compared_flags,
    defaults,
    file_name,
    flag,
    named_path,
    parse_flags,
)
from tools.common.models import model_setting
from tools.common.programs import run_program
from tools.common.records import stage
from tools.engine.flags import ModelFlags
from tools.measure.reasoning import (
    BENCHMARKS,
    MEAN,
    Benchmark,
    NoResult,
    Score,
    ask,
    cell_text,
    read_score,
    score_rows,
    table_text,
)

logger = logging.getLogger(__name__)


def benchmark_of(text: str) -> Benchmark:
    """The `type` of --tasks: one of the eight benchmarks or a task of the harness, perhaps with shots and metric."""
    name, *changes = text.split(":")
    if set(name) & set(",*?["):
        raise ArgumentTypeError(f"{name!r} is a list or a pattern; name each task, with blanks between them")
    benchmark = {each.name: each for each in BENCHMARKS}.get(name, Benchmark(name, name, None, "acc"))
    for change in changes:
        field = {"shots": int(change)} if change.isdecimal() else {"metric": change}
        benchmark = benchmark._replace(**field)
    return benchmark


def named_model(text: str) -> NamedPath:
    """The `type` of --models: NAME=MODEL. The results of a model are in a folder of its name."""
    model = named_path(text)
    file_name(model.name)
    return model


@dataclass(kw_only=True)
class Flags(ModelFlags):
    models: list[NamedPath] = flag("models to ask", compared=False, **NAMED_MODELS | {"type": named_model})
    tasks: list[Benchmark] = flag(
        "benchmarks of the table, or other tasks by the harness's names",
        default=list(BENCHMARKS),
        type=benchmark_of,
        metavar="NAME[:SHOTS][:METRIC]",
        unique=attrgetter("task"),  # their results are in a file of the task's name
        compared=False,  # each has a record of its own, and so has each model
    )
    output_dir: str = flag("folder of the results", compared=False)
    chat_template: bool = flag(
        "True: ask in the chat template of each model, for instruct models", default=False, shared=True
    )
    limit: int | None = flag(
        "for a trial: ask only the first so many questions of each task", default=None, at_least=1
    )
    batch_size: str | None = flag("the harness's --batch_size; unset: auto, on a CPU 8", default=None)
    lm_eval: str | None = flag(
        "the harness's command, such as 'accelerate launch -m lm_eval'", default=None, machine=True
    )


def ask_all(flags: Flags) -> tuple[dict[str, dict[str, Score]], set[str]]:
    """Scores by model and benchmark, and the harness's versions.

    Each model and benchmark is a run of the harness of its own, which loads the model again. So a run that fails is
    only logged, and the same command asks what is missing. The harness's own words are in OUTPUT_DIR/MODEL/TASK.log.
    """
    import torch

    if flags.lm_eval is None:
        require("lm_eval", "lm-eval==0.4.13")
    command = shlex.split(flags.lm_eval) if flags.lm_eval else [sys.executable, "-m", "lm_eval"]
    command += ["run", "--trust_remote_code"] if flags.trust_remote_code else ["run"]
    # On CPUs the harness's search for a size takes long.
    batch_size = flags.batch_size or ("auto" if torch.cuda.is_available() else "8")
    settings = compared_flags(flags) | {"batch_size": batch_size}
    scores: dict[str, dict[str, Score]] = {name: {} for name, _ in flags.models}
    versions = set()
    models = [(name, model_setting(model)) for name, model in flags.models]  # here it ends if one is missing
    for (name, model), benchmark in itertools.product(models, flags.tasks):
        logger.info("%s on %s", name, benchmark.name)
        path = Path(flags.output_dir, name, f"{benchmark.task.replace('/', '_')}.json")
        record = path.with_name(f"{path.stem}_settings.json")
        log = path.with_suffix(".log")
        # The metric is no part: all metrics of a task are stored, so another one needs no new run.
        asked = settings | {"model": model, "task": benchmark.task, "shots": benchmark.shots}
        try:
            with stage(record, asked, results=[path.name], defaults=defaults(Flags), ranks=False) as work:
                if work.todo:
                    write_json(path, ask(command, asked, log))
        except subprocess.CalledProcessError:
            logger.error("%s on %s: the harness failed; see %s", name, benchmark.name, log)
            continue
        except NoResult as error:
            logger.error("%s on %s: the harness left no result (%s); see %s", name, benchmark.name, error, log)
            continue
        result = read_json(path)
        versions.add(result["harness"])
        try:
            scores[name][benchmark.name] = read_score(result, benchmark.metric)
        except UserError as error:
            logger.error("%s on %s: %s", name, benchmark.name, error)
    return scores, versions


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    scores, versions = ask_all(flags)
    settings = {
        "harness": ", ".join(sorted(versions)),
        "dtype": flags.dtype,
        "limit": flags.limit,
        "chat_template": flags.chat_template,
        "models": dict(flags.models),
        "benchmarks": [benchmark._asdict() for benchmark in flags.tasks],
    }
    rows = score_rows(scores, [benchmark.name for benchmark in flags.tasks])
    write_json(f"{flags.output_dir}/results.json", {"settings": settings, "results": rows})
    text = table_text(rows, settings)
    write_text(f"{flags.output_dir}/table.md", text)
    means = ", ".join(f"{row['model']} {cell_text(row)}" for row in rows if row["benchmark"] == MEAN)
    print(f"{text}\nreasoning, {MEAN}: {means or '-'}")
    if number := len(flags.models) * len(flags.tasks) - sum(map(len, scores.values())):
        logger.error("%d results are missing, see above; the same command asks what failed", number)
        sys.exit(1)


if __name__ == "__main__":
    run_program(main, kept="finished results are kept, and the same command asks the others")
