"""Tables of a study, from the results of its seeds or from the folders of finished loops.

    python -m tools.study.table --arms configs/arms/tiny.txt --results data/tiny/results/*.json
    python -m tools.study.table --results spag=outputs/spag42 spag=outputs/spag43 sft=outputs/sft42 sft=outputs/sft43

A seed counts as one observation: intervals are Student's t over seeds, and differences are taken seed by seed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tools.flags import flag, parse_flags
from tools.matches.stats import ALL, BOTH
from tools.matches.text import with_interval
from tools.reasoning.scores import MEAN
from tools.study.arms import BASE, IMITATION, Plan, read_plan
from tools.study.loops import MESSAGES
from tools.study.seeds import (
    FREE,
    all_numbers,
    at,
    check_comparable,
    holm,
    mean_interval,
    models,
    p_value,
    paired,
    read_results,
    refusal,
    values_at,
)
from utils import run_program

APART = 0.3  # a mean of values that lie further apart than this is shown with the values
UNKNOWN = "-"
Lines = Iterable[Sequence[str]]


@dataclass(kw_only=True)
class Flags:
    """The flags of this program."""

    results: list[str] = flag("files of seeds that tools.study.keep made, or loops as ARM=OUTPUT", metavar="FILE")
    arms: str | None = flag("file of arms, which says what is compared", default=None, metavar="FILE")


def over_seeds(values: Sequence[float], form: str = ".3f") -> str:
    """The mean with its interval."""
    return with_interval(*mean_interval(values), form) if values else UNKNOWN


def mean_text(values: Sequence[float], form: str = ".3f", *, apart: float = APART) -> str:
    """The mean; where it hides values that lie further apart than this, these too."""
    if not values:
        return UNKNOWN
    text = format(sum(values) / len(values), form)
    return f"{text} ({each_seed(values, form)})" if max(values) - min(values) > apart else text


def each_seed(values: Iterable[float], form: str = ".3f") -> str:
    return ", ".join(format(value, form) for value in values)


def markdown(title: str, lines: Lines) -> str:
    """A table under its title; nothing for a head alone."""
    head, *body = lines
    rows = [f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *body)]
    return f"## {title}\n\n" + "\n".join(rows) + "\n" if body else ""


def arm_lines(results: Sequence[dict], plan: Plan) -> Iterator[list[str]]:
    """A line for each arm: what it is, in how many seeds, and its rows and optimizer steps until the last epoch."""
    yield ["arm", "what it is", "settings", "seeds", "epochs", "steps", "rows"]
    for name in dict.fromkeys([*plan.titles, *(arm for result in results for arm in result["arms"])]):
        runs = [result for result in results if name in result["arms"]]
        if runs and name not in (BASE, IMITATION):
            last = max(int(epoch) for result in runs for epoch in result["arms"][name]["epochs"] or {"0": {}})
            words = plan.words.get(name, {})
            said = [f"{key}={value}" for key, value in words.items() if key not in FREE and "{" not in value]
            about = [plan.titles.get(name, ""), "; ".join(said), str(len(runs)), str(last)]
            yield [name, *about, *effort_cells(runs, name, last)]


def effort_cells(results: Sequence[dict], arm: str, last: int) -> list[str]:
    """Optimizer steps and rows of an arm up to an epoch, where they are known for all its epochs."""
    cells = []
    for what in ("steps", "rows"):
        known = [[at(each, arm, str(epoch), "training", what) for epoch in range(1, last + 1)] for each in results]
        cells.append(mean_text([sum(each) for each in known if each and None not in each], ".0f", apart=math.inf))
    return cells


def point_lines(results: Sequence[dict], plan: Plan, opponent: str) -> Iterator[list[str]]:
    """A line for each model that has met this opponent: points by role and word list, and how the games ended."""
    place = ("matches", opponent)
    found = models(results, plan, *place)
    rows = [row for result in results for model in found if (row := at(result, *model, *place))]
    roles = dict.fromkeys(role for row in rows for role in row[ALL] if role != BOTH)
    lists = dict.fromkeys(words for row in rows for words in row if words != ALL)
    with_interval = {f"as {role}": (ALL, role, "points") for role in roles}
    with_interval |= {f"{words} words": (words, BOTH, "points") for words in lists} if len(lists) > 1 else {}
    shares = {share: (ALL, BOTH, share) for share in ("win", "tie", "loss")}
    rates = {"clean games": (ALL, BOTH, "clean")}
    rates |= {f"own breaches as {role}": (ALL, role, "breach") for role in roles}
    yield ["arm", "epoch", "points", *shares, *with_interval, *rates, "steps", "rows", "points of each seed"]
    for arm, epoch in found:

        def values(where: tuple[str, str, str], model: tuple[str, str] = (arm, epoch)) -> list[float]:
            return values_at(results, *model, *place, *where)

        points = values((ALL, BOTH, "points"))
        cells = [over_seeds(points), *(mean_text(values(where)) for where in shares.values())]
        cells += [over_seeds(values(where)) for where in with_interval.values()]
        cells += [mean_text(values(where)) for where in rates.values()]
        yield [arm, epoch, *cells, *effort_cells(results, arm, int(epoch)), each_seed(points)]


def difference_lines(
    results: Sequence[dict], pairs: Sequence[tuple[str, str, str | None]], *, primary: bool = False
) -> Iterator[list[str]]:
    """A line for each difference, of those that can be had. p values of primary ones are adjusted for their number."""
    yield ["measure", "arm", "minus", "epoch", "difference", "p", *(["p by Holm"] if primary else []), "of each seed"]
    found = [paired(results, *pair) for pair in pairs]
    p_values = [p_value(list(each[1].values())) if each else None for each in found]
    for (measure, arm, other), each, p, adjusted in zip(pairs, found, p_values, holm(p_values), strict=True):
        if each:
            epoch, values = each[0], list(each[1].values())
            form = "+.3f" if max(map(abs, values)) <= 1 else "+.2f"
            shown = [p_text(p), *([p_text(adjusted)] if primary else []), each_seed(values, form)]
            yield [measure, arm, other or "0.5", str(epoch), over_seeds(values, form), *shown]


def default_pairs(results: Sequence[dict]) -> list[tuple[str, str, str]]:
    """The differences that are shown without a file of arms: the other arms minus the first one."""
    first, *others = [name for name in results[0]["arms"] if name not in (BASE, IMITATION)]
    return [(measure, other, first) for measure in ("points", MEAN) for other in others]


def share_lines(results: Sequence[dict], plan: Plan, part: str) -> Iterator[list[str]]:
    """A line for each model with this part of the numbers: means over its seeds."""
    found = models(results, plan, part)
    columns = dict.fromkeys(name for result in results for model in found for name in at(result, *model, part) or ())
    yield ["arm", "epoch", "seeds", *columns]
    for arm, epoch in found:
        values = [values_at(results, arm, epoch, part, column) for column in columns]
        apart = [math.inf if column == MESSAGES else APART for column in columns]
        cells = [mean_text(each, apart=limit) for each, limit in zip(values, apart, strict=True)]
        yield [arm, epoch, str(max(map(len, values))), *cells]


def benchmark_lines(results: Sequence[dict], plan: Plan) -> Iterator[list[str]]:
    """A line for each model on the benchmarks, in percent, with its difference from base and imitation.

    Intervals are over seeds. A single seed has standard errors over questions instead.
    """
    found = models(results, plan, "benchmarks")
    rows = [at(result, *model, "benchmarks") for result in results for model in found]
    columns = dict.fromkeys(name for row in rows if row for name in row["scores"])
    yield ["arm", "epoch", "seeds", *columns, *(f"{MEAN} minus {other}" for other in (BASE, IMITATION))]
    for arm, epoch in found:
        cells = [values_at(results, arm, epoch, "benchmarks", "scores", column) for column in columns]
        away = [values_at(results, arm, epoch, "benchmarks", "minus", other) for other in (BASE, IMITATION)]
        texts = [*(score_text(each, ".2f") for each in cells), *(score_text(each, "+.2f") for each in away)]
        yield [arm, epoch, str(max(map(len, cells))), *texts]


def p_text(p: float | None) -> str:
    return UNKNOWN if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def score_text(scores: Sequence[Sequence[float | None]], form: str) -> str:
    """Values with their standard errors, one for each seed, as a cell."""
    if len(scores) == 1 and scores[0][1] is not None:
        return f"{scores[0][0]:{form}} ± {scores[0][1]:.2f}"
    return over_seeds([value for value, _ in scores], form)


def run_lines(results: Sequence[dict]) -> Iterator[list[str]]:
    """A line for each run whose circumstances are stored."""
    yield ["seed", "arm", "commit", "CPU", "precision", "hours of training", "of play", "of benchmarks"]
    for result in results:
        for name, arm in result["arms"].items():
            if made := arm.get("made"):
                shown = [str(made.get(key) or UNKNOWN) for key in ("spag", "cpu", "precision")]
                yield [str(result["seed"]), name, *shown, *(f"{number:.2f}" for number in made["hours"].values())]


def game_lines(results: Sequence[dict]) -> Iterator[list[str]]:
    """A line for each arm: games of its last model against imitation, of the first seed that has some."""
    yield ["arm", "seed", "games of the last model"]
    shown = set()
    for result in results:
        for name, arm in result["arms"].items():
            if arm.get("games") and name not in shown:
                shown.add(name)
                yield [name, str(result["seed"]), "<br>".join(arm["games"])]


def tables(results: Sequence[dict], plan: Plan) -> str:
    """All tables in Markdown, and which seeds are left out."""
    check_comparable(results)
    refusals = [f"{text}\n" for result in results if (text := refusal(result, plan))]
    results = [result for result in results if not refusal(result, plan)]
    matched = [result for result in results if any("matches" in each for each in all_numbers(result))]
    found = (name for result in results for each in all_numbers(result) for name in each.get("matches", ()))
    met = dict.fromkeys([IMITATION, *found])
    parts = {"Arms": arm_lines(results, plan)}
    parts["Primary comparisons"] = difference_lines(results, plan.primaries, primary=True)
    parts |= {f"Points against {opponent}": point_lines(results, plan, opponent) for opponent in met}
    pairs = plan.minus if plan.words else default_pairs(results)
    parts["Differences, paired by seed"] = difference_lines(results, pairs)
    parts["Self-play"] = share_lines(matched or results, plan, "self_play")
    parts["Questions"] = share_lines(results, plan, "questions")
    parts["Reasoning benchmarks"] = benchmark_lines(results, plan)
    parts |= {"Runs": run_lines(results), "Games": game_lines(results)}
    return "\n".join(filter(None, [*(markdown(title, lines) for title, lines in parts.items()), *refusals]))


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    plan = read_plan(flags.arms) if flags.arms else Plan()
    print(tables(read_results(flags.results), plan), end="")


if __name__ == "__main__":
    run_program(main)
