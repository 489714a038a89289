"""Checkpoints on reasoning benchmarks, through lm-evaluation-harness, as a table beside the published one.

    python -m tools.evaluate_reasoning --models base=MODEL imitation=DIR epoch1=DIR epoch2=DIR --output_dir DIR

Needs the harness (pip install lm-eval==0.4.13); its data sets come from the Hugging Face hub. Every model meets every
task in a process of its own, one per GPU at a time. DIR/MODEL/TASK.json is a finished one: the same command runs those
that are missing, and refuses those that were made in another way. Writes DIR/results.json, table.md and radar.svg;
tools/reasoning/README.md tells what is in them.
"""

import argparse
import logging
import re
from importlib import metadata
from pathlib import Path

from tools.reasoning.jobs import gpus, make_jobs, run_job, run_jobs, unfinished
from tools.reasoning.results import RESULT_FILES, write_results
from tools.reasoning.table import BENCHMARKS, Benchmark
from utils import (
    NamedPath,
    lock,
    named_path,
    parse_bool,
    run_program,
    set_up_logging,
    world_size,
)

HARNESS, HARNESS_VERSION = "lm-eval", "0.4.13"
LOCK = ".evaluate_reasoning.lock"
OWN_METRIC = "acc"  # of tasks that are none of the eight
logger = logging.getLogger(__name__)


# --- the program ---------------------------------------------------------------------------------------------------


def benchmark_of(text: str) -> Benchmark:
    """The `type` of --tasks: one of the eight or a task of the harness, perhaps with shots."""
    name, colon, shots = text.partition(":")
    if not name or (colon and not shots.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected NAME or NAME:SHOTS, got {text!r}")
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    found = known.get(name, Benchmark(name, name, None, OWN_METRIC))
    return found._replace(shots=int(shots)) if colon else found


def metric_of(text: str) -> NamedPath:
    """The `type` of --metrics."""
    name, equals, metric = text.partition("=")
    if not (name and equals and metric):
        raise argparse.ArgumentTypeError(f"expected NAME=METRIC, got {text!r}")
    return NamedPath(name, metric)


def batch_size_of(text: str) -> int | str:
    """The `type` of --batch_size."""
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a number or auto, got {text!r}")
    return text if text == "auto" else int(text)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Checkpoints on reasoning benchmarks, through lm-evaluation-harness.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--models", nargs="+", required=True, type=named_path, metavar="NAME=MODEL", help="folders or hub names")
    add("--against", metavar="NAME", help="the model that differences are from; unset: the first one")
    shots = " ".join(f"{benchmark.name}:{benchmark.shots}" for benchmark in BENCHMARKS)
    add(
        "--tasks",
        nargs="+",
        type=benchmark_of,
        default=argparse.SUPPRESS,
        metavar="NAME[:SHOTS]",
        help=f"of the eight, or as the harness names them (default: {shots})",
    )
    add(
        "--metrics",
        nargs="+",
        type=metric_of,
        default=[],
        metavar="NAME=METRIC",
        help="another metric of a task, such as ARC-c=acc_norm; needs no new run",
    )
    add("--output_dir", required=True, help="folder of the results")
    add("--limit", type=int, help="ask only the first so many questions of each task, for a trial")
    add("--batch_size", type=batch_size_of, help="of the harness, auto: by the free memory; unset: auto, on a CPU 8")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="the models compute in this")
    add("--num_processes", type=int, help="models that run at a time; unset: one per GPU, else one")
    add("--include_path", metavar="DIR", help="folder of your own tasks, as YAML files of the harness")
    add("--trust_remote_code", type=parse_bool, default=False, help="True: run the code that comes with a model")
    add("--harness_version", default=HARNESS_VERSION, help=f"of {HARNESS}; results of another one may be others")
    add("--overwrite", type=parse_bool, default=False, help="True: run again what was made under other settings")
    args = parser.parse_args(arguments)
    args.tasks = getattr(args, "tasks", list(BENCHMARKS))
    metrics = {name: metric for name, metric in args.metrics}
    args.tasks = [task._replace(metric=metrics.get(task.name, task.metric)) for task in args.tasks]
    return args


def check_args(args: argparse.Namespace) -> None:
    """Raise one ValueError for all that is wrong with the flags, and for a harness that is not the one to use."""
    names, tasks = [model.name for model in args.models], [task.task for task in args.tasks]
    problems = []
    for flag, values in (("models", names), ("tasks", tasks), ("metrics", [metric.name for metric in args.metrics])):
        if repeated := sorted({value for value in values if values.count(value) > 1}):
            problems.append(f"--{flag} names {repeated[0]} twice")
    problems += [
        f"--models {name}: a name is also a folder's; use letters, digits, . _ and -"
        for name in names
        if not re.fullmatch(r"\w[\w.-]*", name)
    ]
    tasks = [task.name for task in args.tasks]
    problems += [f"--metrics {name} is none of the --tasks" for name, _ in args.metrics if name not in tasks]
    if args.against is not None and args.against not in names:
        problems.append(f"--against {args.against} is none of the --models {', '.join(names)}")
    for flag in ("limit", "num_processes"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            problems.append(f"--{flag} must be at least 1")
    if world_size() > 1:
        problems.append("start it without torchrun: it uses every GPU that it sees by itself")
    if problems:
        raise ValueError("; ".join(problems))
    check_harness(args.harness_version)


def check_harness(version: str) -> None:
    """Raise ValueError unless this version of the harness is installed; it is not imported."""
    install = f"pip install {HARNESS}=={version}"
    try:
        installed = metadata.version(HARNESS)
    except metadata.PackageNotFoundError:
        raise ValueError(f"tools.evaluate_reasoning needs lm-evaluation-harness: {install}") from None
    if installed != version:
        raise ValueError(
            f"{HARNESS} {installed} is installed, and results change with its version: {install},"
            f" or --harness_version {installed} to use this one throughout"
        )


def main() -> None:
    args = parse_args()
    set_up_logging()
    check_args(args)
    jobs = make_jobs(args)
    if unfinished(jobs, overwrite=args.overwrite):
        lock(Path(args.output_dir) / LOCK)
    to_run = unfinished(jobs, overwrite=args.overwrite)  # another launch may have ended in between
    logger.info("%d of %d results are there", len(jobs) - len(to_run), len(jobs))
    if to_run:
        for name in RESULT_FILES:  # of other results than those to come
            (Path(args.output_dir) / name).unlink(missing_ok=True)
        devices: list[str | None] = list(gpus()) or [None]
        if args.num_processes:
            devices = [devices[number % len(devices)] for number in range(args.num_processes)]
        run_jobs(to_run, devices, run_job)
    settings = {
        "harness": args.harness_version,
        "dtype": args.dtype,
        "limit": args.limit,
        "against": args.against or args.models[0].name,
    }
    print(write_results(Path(args.output_dir), jobs, args.tasks, settings), end="")


if __name__ == "__main__":
    run_program(main)
