"""Tables of a study, from the results of its seeds or from the folders of finished loops.

    python -m tools.study.table --arms configs/arms/tiny.txt --results data/tiny/results/*.json
    python -m tools.study.table --results spag=outputs/spag42 spag=outputs/spag43 sft=outputs/sft42 sft=outputs/sft43

A seed counts as one observation: intervals are Student's t over seeds, and differences are taken seed by seed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.flags import flag, parse_flags
from tools.matches.text import with_interval
from tools.reasoning.scores import MEAN
from tools.study.loops import BENCHMARKS, IN_TRAINING, MESSAGES, POINTS, QUESTIONS, SELF_PLAY, TRAINING
from tools.study.plan import BASE, IMITATION, Plan, read_plan
from tools.study.results import (
    EACH_SEED,
    FREE,
    SEEDS,
    Number,
    all_numbers,
    check_comparable,
    holm,
    measured,
    paired,
    read_results,
    refusal,
    student,
)
from utils import run_program

APART = 0.3  # a mean of values that lie further apart than this is shown with the values
UNKNOWN = "-"
Lines = Iterable[Sequence[str]]


@dataclass(kw_only=True)
class Flags:
    """The flags of this program."""

    results: list[str] = flag("files of seeds, seedN.json, or loops as ARM=OUTPUT", metavar="FILE")
    arms: str | None = flag("file of arms, which says what is compared", default=None, metavar="FILE")


def cell(table: str, column: str, values: Sequence) -> str:
    """The cell of a model in a column, from one value for each seed."""
    if column == SEEDS:
        return str(len(values))
    if not values:
        return UNKNOWN
    if column == EACH_SEED:
        return each_seed(values)
    if table == BENCHMARKS:
        return score_text(values, "+.2f" if " minus " in column else ".2f")
    if table.startswith(POINTS) and (column == "points" or column.startswith("as ") or column.endswith(" words")):
        return over_seeds(values)
    mean = sum(values) / len(values)
    if column in IN_TRAINING:
        return f"{mean:.0f}"
    far = column != MESSAGES and max(values) - min(values) > APART
    return f"{mean:.3f} ({each_seed(values)})" if far else f"{mean:.3f}"


def over_seeds(values: Sequence[float], form: str = ".3f") -> str:
    """The mean with its interval."""
    return with_interval(*student(values)[:2], form)


def each_seed(values: Sequence[float], form: str = ".3f") -> str:
    return ", ".join(format(value, form) for value in values)


def score_text(scores: Sequence[tuple[float, float | None]], form: str) -> str:
    """The mean of scores with its interval; for a single seed the score with its standard error over questions."""
    value, error = scores[0]
    if len(scores) == 1 and error is not None:
        return f"{value:{form}} ± {error:.2f}"
    return over_seeds([value for value, _ in scores], form)


def p_text(p: float | None) -> str:
    return UNKNOWN if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def model_lines(numbers: Sequence[Number], table: str) -> Lines:
    """A line for each model in this table."""
    numbers = [number for number in numbers if number.table == table]
    columns = list(dict.fromkeys(number.column for number in numbers))
    yield ["arm", "epoch", *columns]
    for model in dict.fromkeys((number.arm, number.epoch) for number in numbers):
        yield [*map(str, model), *model_cells(numbers, table, model, columns)]


def model_cells(numbers: Sequence[Number], table: str, model: tuple[str, int], columns: Sequence[str]) -> list[str]:
    """The cells of a model in these columns of a table, from the values of its seeds."""
    own = [number for number in numbers if (number.table, number.arm, number.epoch) == (table, *model)]
    seeds = len({number.seed for number in own})
    cells = []
    for column in columns:
        values = [number.value for number in own if number.column == column and number.value is not None]
        fewer = f" ({len(values)} of {seeds} seeds)" if 0 < len(values) < seeds else ""
        cells.append(cell(table, column, values) + fewer)
    return cells


def arm_lines(results: Sequence[dict], numbers: Sequence[Number], plan: Plan) -> Lines:
    """A line for each arm: what it is, in how many seeds, and its rows and optimizer steps until the last epoch."""
    yield ["arm", "what it is", "settings", "seeds", "epochs", *IN_TRAINING]
    for name in dict.fromkeys([*plan.titles, *(arm for result in results for arm in result["arms"])]):
        runs = [result["arms"][name] for result in results if name in result["arms"]]
        if runs and name not in (BASE, IMITATION):
            last = max((int(epoch) for run in runs for epoch in run["epochs"]), default=0)
            words = plan.arms.get(name, {})
            said = [f"{key}={value}" for key, value in words.items() if key not in FREE and "{" not in value]
            trained = model_cells(numbers, TRAINING, (name, last), IN_TRAINING)
            yield [name, plan.titles.get(name, ""), "; ".join(said), str(len(runs)), str(last), *trained]


def difference_lines(
    numbers: Sequence[Number], pairs: Sequence[tuple[str, str, str | None]], *, primary: bool = False
) -> Lines:
    """A line for each difference, of those that can be had. p values of primary ones are adjusted for their number."""
    yield ["measure", "arm", "minus", "epoch", "difference", "p", *(["p by Holm"] if primary else []), "of each seed"]
    found = [paired(numbers, *pair) for pair in pairs]
    p_values = [student(each[1])[2] if each else None for each in found]
    for (measure, arm, other), each, p, adjusted in zip(pairs, found, p_values, holm(p_values), strict=True):
        if each:
            epoch, values = each
            form = "+.2f" if max(measured(numbers, measure, arm).values()) > 1 else "+.3f"  # percent, or shares
            shown = [p_text(p), *([p_text(adjusted)] if primary else []), each_seed(values, form)]
            yield [measure, arm, other or "0.5", str(epoch), over_seeds(values, form), *shown]


def run_lines(results: Sequence[dict]) -> Lines:
    """A line for each run whose circumstances are stored."""
    yield ["seed", "arm", "commit", "CPU", "precision", "hours of training", "of play"]
    for result in results:
        for name, arm in result["arms"].items():
            if made := arm.get("made"):
                shown = [str(made.get(key) or UNKNOWN) for key in ("spag", "cpu", "precision")]
                hours = (f"{made['hours'][kind]:.2f}" for kind in ("training", "play"))
                yield [str(result["seed"]), name, *shown, *hours]


def game_lines(results: Sequence[dict]) -> Lines:
    """A line for each arm: games of its last model against imitation, of the first seed that has some."""
    yield ["arm", "seed", "games of the last model"]
    shown = set()
    for result in results:
        for name, arm in result["arms"].items():
            if arm.get("games") and name not in shown:
                shown.add(name)
                yield [name, str(result["seed"]), "<br>".join(arm["games"])]


def markdown(title: str, lines: Lines) -> str:
    """A table under its title; nothing for a head alone."""
    head, *body = lines
    rows = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]
    return f"## {title}\n\n" + "\n".join(rows) + "\n" if body else ""


def tables(results: Sequence[dict], plan: Plan) -> str:
    """All tables in Markdown, and which seeds are left out."""
    check_comparable(results)
    refusals = [f"{text}\n" for result in results if (text := refusal(result, plan))]
    results = [result for result in results if not refusal(result, plan)]
    numbers = all_numbers(results, plan)
    opponents = dict.fromkeys(
        [f"{POINTS} {IMITATION}", *(each.table for each in numbers if each.table.startswith(POINTS))]
    )
    pairs = plan.minus
    if not plan.arms:  # every arm is compared with the first one
        arms = dict.fromkeys(name for result in results for name in result["arms"])
        first, *others = [name for name in arms if name not in (BASE, IMITATION)]
        pairs = [(measure, other, first) for measure in ("points", MEAN) for other in others]
    found = {
        "Arms": arm_lines(results, numbers, plan),
        "Primary comparisons": difference_lines(numbers, plan.primaries, primary=True),
        **{table: model_lines(numbers, table) for table in opponents},
        "Differences, paired by seed": difference_lines(numbers, pairs),
        **{table: model_lines(numbers, table) for table in (SELF_PLAY, QUESTIONS, BENCHMARKS)},
        "Runs": run_lines(results),
        "Games": game_lines(results),
    }
    return "\n".join(filter(None, [*(markdown(title, lines) for title, lines in found.items()), *refusals]))


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    plan = read_plan(flags.arms) if flags.arms else Plan()
    print(tables(read_results(flags.results), plan), end="")


if __name__ == "__main__":
    run_program(main)
