"""What a citable run shows: tables of finished loops, read from the OUTPUT folders of tools/run_spag.sh.

Runs of one arm with different SEED are pooled: a number becomes its mean with Student's 95% interval over the seeds.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.reasoning.jobs import result_path
from tools.reasoning.scores import MEAN, Score, difference, geometric_mean, known, read_score, student_interval
from tools.reasoning.table import ERRORS, UNKNOWN, markdown
from utils import UserError, differences, read_json

BASE, IMITATION = "base", "imitation"
ALL, BOTH = "all", "both"  # in matches.json: all word lists, both roles
USUAL = {"DETACH_KL": "False", "LOSERS": "0", "TIES": "0"}  # an arm's name tells which of these settings differ
# Settings whose differences between runs are not shown: they are told by the arm, or do not change results.
UNSHOWN = {"CONTROL", "LIKE", "FIRST_EPISODES", "OUTPUT", "SETTINGS", "SEED", "NPROC", "PLAY_BATCH", *USUAL}
NOTES = f"""{ERRORS}
Values in brackets are 95% intervals: with several seeds of training Student's t over them, else over target words.
"minus X" is the difference of the geometric means from the model X of the same seed and, where X is an arm, of the
same epoch. With one seed its error is computed question by question, or marked as unpaired."""


class Cell(NamedTuple):
    """A number of one run."""

    value: float
    alone: str  # its text where no other seed is pooled with it
    form: str  # of the mean over seeds


Numbers = dict[str, Cell]  # by column


@dataclass
class LoopRun:
    """What a loop left in its folder. Missing parts are empty."""

    folder: Path
    settings: dict[str, str]  # of the loop, by name
    asked: dict  # settings of its benchmarks
    scores: dict[str, dict[str, Score]]  # by model and benchmark

    @property
    def seed(self) -> int:
        return int(self.settings["SEED"])

    @property
    def arm(self) -> str:
        """What the loop trained on, as "SPAG", "sft" or "coin", with the settings that change its loss or rewards."""
        found = {name: self.settings.get(name, usual) for name, usual in USUAL.items()}
        changes = [f"{name}={value}" for name, value in found.items() if value != USUAL[name]]
        return " ".join([self.settings.get("CONTROL") or "SPAG", *changes])

    def all_scores(self, model: str) -> list[Score]:
        """A model's scores on all benchmarks; [] if one is missing."""
        found = [self.scores.get(model, {}).get(benchmark["name"]) for benchmark in self.asked.get("benchmarks", ())]
        return found if all(found) else []


def read_run(folder: Path) -> LoopRun:
    """Read what a loop left. UserError if the folder is no loop's."""
    settings, reasoning = read_part(folder / "settings.json"), folder / "reasoning"
    if not settings.keys() >= {"SEED", "EPOCHS", "MODEL"}:
        raise UserError(f"{folder}: no settings.json of a loop; give OUTPUT folders of tools/run_spag.sh")
    asked = read_part(reasoning / "results.json").get("settings", {})
    scores: dict[str, dict[str, Score]] = defaultdict(dict)
    for model in asked.get("models", ()):
        for benchmark in asked["benchmarks"]:
            if result := read_part(result_path(reasoning, model, benchmark["task"])):
                scores[model][benchmark["name"]] = read_score(result, benchmark["metric"])
    return LoopRun(folder, settings, asked, scores)


def read_part(path: Path) -> dict:
    """The object in a JSON file; {} without the file."""
    return read_json(path) if path.is_file() else {}


def check_comparable(runs: Sequence[LoopRun]) -> None:
    """Raise UserError for two runs of the same arm and seed, and for benchmarks that were asked in different ways."""
    found: dict[tuple[str, int], LoopRun] = {}
    for run in runs:
        if (other := found.setdefault((run.arm, run.seed), run)) is not run:
            raise UserError(f"{other.folder} and {run.folder} are both {run.arm} with SEED={run.seed}; give one")
    first, *others = [run for run in runs if run.asked] or runs
    for run in others:
        if different := differences(_way_of_asking(first), _way_of_asking(run)):
            where = f"{run.folder}: its benchmarks cannot be compared with those of {first.folder}"
            raise UserError(f"{where}: {'; '.join(different)}")


def _way_of_asking(run: LoopRun) -> dict:
    same = {name: run.asked.get(name) for name in ("harness", "dtype", "limit", "benchmarks", "data_revisions")}
    return same | {BASE: run.asked.get("models", {}).get(BASE)}


def score_numbers(run: LoopRun, model: str, others: Mapping[str, Sequence[Score]]) -> Numbers:
    """A model's scores, their geometric mean, and its differences from those of others by name."""
    numbers = {name: _with_error(*geometric_mean([score])[:2], ".2f") for name, score in run.scores[model].items()}
    if own := run.all_scores(model):
        numbers[MEAN] = _with_error(*geometric_mean(own)[:2], ".2f")
        for name, scores in others.items():
            if scores:
                away = difference(own, scores)
                cell = _with_error(away["value"], away["stderr"], "+.2f")
                unpaired = "" if away["paired"] else ", unpaired"
                numbers[f"minus {name}"] = cell._replace(alone=cell.alone + unpaired)
    return numbers


def _with_error(value: float, stderr: float | None, form: str) -> Cell:
    error = None if stderr is None else known(stderr)
    return Cell(value, format(value, form) + ("" if error is None else f" ± {error:.2f}"), form)


def others_of(run: LoopRun, runs: Sequence[LoopRun], model: str) -> dict[str, list[Score]]:
    """What a model of a run is compared with: imitation (else base), and the arms that come after its own."""
    start = IMITATION if run.all_scores(IMITATION) else BASE
    arms = list(dict.fromkeys(each.arm for each in runs))
    later = arms[arms.index(run.arm) + 1 :]
    twins = {each.arm: each.all_scores(model) for each in runs if each.seed == run.seed and each.arm in later}
    return {start: run.all_scores(start)} | twins


def match_numbers(run: LoopRun, epoch: int) -> Numbers:
    """The model of an epoch in its match against imitation, over all word lists."""
    player, found = f"epoch{epoch}", read_part(run.folder / f"epoch{epoch}" / "eval" / "matches.json")
    rows = [row for row in found.get("results", ()) if row["player"] == player and row["seed"] is None]
    pooled = ALL if any(row["words"] == ALL for row in rows) else None
    by_role = {row["role"]: row for row in rows if pooled in (None, row["words"])}
    if not (both := by_role.pop(BOTH, None)):
        return {}
    numbers = {"points": _share(both["points"], both["points_interval"])}
    for rate, plural in (("win", "wins"), ("breach", "breaches")):
        numbers |= {f"{plural} as {role}": _share(**row["rates"][rate]) for role, row in by_role.items()}
    return numbers | {"empty replies": _share(both["empty_replies"] / both["messages"])}


def play_numbers(run: LoopRun, epoch: int) -> Numbers:
    """The games of self-play that an epoch learns from."""
    numbers: Numbers = {}
    for summary in _summaries(run, f"epoch{epoch}"):
        numbers = {outcome: _share(games / summary["games"]) for outcome, games in summary["outcomes"].items()}
        numbers["empty replies"] = _share(summary["empty_replies"] / summary["messages"])
        dependence = summary.get("word_dependence", summary.get("about"))  # its name in older files
        about = {role: value for role, value in dependence.items() if value is not None}
        numbers |= {f"about, {role}": Cell(value, f"{value:.3f}", ".3f") for role, value in about.items()}
    return numbers


def _share(share: float, interval: Sequence[float] | None = None) -> Cell:
    return Cell(share, _with_interval(share, interval, ".1%"), ".1%")


def _with_interval(value: float, interval: Sequence[float] | None, form: str) -> str:
    bounds = [] if interval is None else [format(bound, form).removesuffix("%") for bound in interval]
    return format(value, form) + (f" [{', '.join(bounds)}]" if bounds else "")


def _summaries(run: LoopRun, epoch: str) -> list[dict]:
    return [read_json(path) for path in run.folder.glob(f"{epoch}/episodes/*_summary.json")]


def hours(run: LoopRun) -> dict[str, str]:
    """Hours by kind of work. Of a stage that was stopped and continued, training tells those of its last start."""
    played = [summary for summary in _summaries(run, "epoch*") if summary["tokens_per_second"]]
    seconds = {
        "training": [read_json(path)["train_runtime"] for path in run.folder.glob("*/model/train_results.json")],
        "play": [each["new_tokens"] / each["tokens_per_second"] for each in played],
        "benchmarks": [read_json(path)["seconds"] for path in run.folder.glob("reasoning/*/*.json")],
    }
    return {f"hours of {kind}": f"{sum(found) / 3600:.2f}" if found else UNKNOWN for kind, found in seconds.items()}


def runs_lines(runs: Sequence[LoopRun]) -> list[list[str]]:
    """A line for each run: its arm and seed, the settings in which the runs differ, and hours."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in UNSHOWN)
    differ = [name for name in names if len({run.settings.get(name) for run in runs}) > 1]
    lines = [["run", "arm", "SEED", *differ, *hours(runs[0])]]
    for run in runs:
        values = [run.settings.get(name) or UNKNOWN for name in differ]
        lines.append([str(run.folder), run.arm, str(run.seed), *values, *hours(run).values()])
    return lines


def versions(runs: Sequence[LoopRun]) -> str:
    """The libraries of training and benchmarks with their versions, and the commits of the benchmarks' data."""
    found: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for path in run.folder.glob("*/model/settings.json"):
            for package, version in read_json(path)["made_by"].items():
                found[package].add(version)
        if run.asked:
            found["lm-evaluation-harness"].add(run.asked["harness"])
            for path, commit in run.asked["data_revisions"].items():
                found[path].add(commit or "(commit unknown)")
    return "\n".join(f"- {name} {' and '.join(sorted(several))}" for name, several in sorted(found.items()))


def by_epoch(runs: Sequence[LoopRun], numbers: Callable[[LoopRun, int], Numbers]) -> list[tuple]:
    """Lines of `table_of`: the arms beside each other for each epoch."""
    arms, last = dict.fromkeys(run.arm for run in runs), max(int(run.settings["EPOCHS"]) for run in runs)
    stages = [(arm, epoch) for epoch in range(1, last + 1) for arm in arms]
    return [(arm, epoch, [numbers(run, epoch) for run in runs if run.arm == arm]) for arm, epoch in stages]


def table_of(lines: Sequence[tuple[str, int | str, Sequence[Numbers]]]) -> str:
    """A line for each (name, epoch, numbers of its runs), which are pooled."""
    columns = list(dict.fromkeys(column for *_, found in lines for numbers in found for column in numbers))
    rows = [["", "epoch", *columns]]
    for name, epoch, found in lines:
        cells = [[numbers[column] for numbers in found if column in numbers] for column in columns]
        rows.append([name, epoch, *(pooled(each, len(found)) for each in cells)])
    return markdown(rows)


def pooled(cells: Sequence[Cell], runs: int) -> str:
    """One cell of a table, over the seeds that have it."""
    if not cells:
        return UNKNOWN
    text = cells[0].alone
    if len(cells) > 1:
        text = _with_interval(*student_interval([cell.value for cell in cells]), cells[0].form)
    return text if len(cells) == runs else f"{text} ({len(cells)} of {runs} seeds)"


def runs_text(folders: Sequence[Path]) -> str:
    """The tables of these loops as Markdown. UserError for runs that cannot be compared."""
    runs = [read_run(folder) for folder in folders]
    check_comparable(runs)
    of_base = [score_numbers(run, BASE, {}) for run in runs if run.scores.get(BASE)][:1]  # the same in all runs
    first_of_seed = {run.seed: run for run in reversed(runs) if run.scores.get(IMITATION)}.values()
    of_imitation = [score_numbers(run, IMITATION, {BASE: run.all_scores(BASE)}) for run in first_of_seed]

    def of_epoch(run: LoopRun, epoch: int) -> Numbers:
        model = f"epoch{epoch}"
        return score_numbers(run, model, others_of(run, runs, model))

    benchmarks = [(BASE, UNKNOWN, of_base), (IMITATION, UNKNOWN, of_imitation), *by_epoch(runs, of_epoch)]
    limit = next((run.asked["limit"] for run in runs if run.asked), None)
    parts = [
        f"Model {runs[0].settings['MODEL']}, game {runs[0].settings.get('GAME', UNKNOWN)}.",
        "" if limit is None else f"A trial: only the first {limit} questions of each task were asked.",
        f"## Reasoning benchmarks\n\n{table_of(benchmarks)}",
        f"## Matches against imitation\n\n{table_of(by_epoch(runs, match_numbers))}",
        f"## Self-play: games that the epoch learns from\n\n{table_of(by_epoch(runs, play_numbers))}",
        f"## Runs\n\n{markdown(runs_lines(runs))}",
        versions(runs),
        NOTES,
    ]
    return "\n\n".join(filter(None, parts)) + "\n"
