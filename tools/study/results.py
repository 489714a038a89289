"""The results of several seeds: which may be compared, their numbers as one flat list, and statistics over seeds."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from scipy import stats

from tools.matches.stats import ROUNDING, t_quantile
from tools.study.loops import BENCHMARKS, POINTS, QUESTIONS, SELF_PLAY, read_loop
from tools.study.plan import BASE, IMITATION, Plan
from utils import UserError, differences, read_json

# Settings of tools/run_spag.sh that may differ between runs of one arm: seeds, places, how far and how fast it runs.
FREE = "SEED EVAL_SEEDS OUTPUT LIKE EPOCHS UNTIL EVAL_EVERY EVAL_IMITATION EVAL_TASKS REPORT SAVE_STEPS".split()
FREE += "NPROC NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID PLAY_BATCH TENSOR_PARALLEL_SIZE GRADIENT_CHECKPOINTING".split()
FREE += "DEEPSPEED FIRST_EPISODES VERBOSE".split()
SEEDS, EACH_SEED = "seeds", "points of each seed"  # columns that show their values in another way


class Number(NamedTuple):
    """What a model of one seed has in a column of a table. A score on a benchmark has its standard error."""

    table: str
    column: str
    arm: str
    epoch: int
    seed: int
    value: float | list[float | None] | None  # None: unknown


def read_results(names: Sequence[str]) -> list[dict]:
    """Read files of seeds, and loops given as ARM=OUTPUT. Returns the results by seed; loops.py has their form.

    Raises UserError for an arm that is there twice with one seed.
    """
    seeds: dict[int, dict] = {}
    for name in names:
        arm, equals, folder = name.partition("=")
        if equals:
            arms = read_loop(arm, Path(folder), Path(folder))
            seed = int(arms[arm]["settings"]["SEED"])
        else:
            stored = read_json(name)
            if "arms" not in stored:
                raise UserError(f"{name}: not the results of a seed of a study")
            seed, arms = stored["seed"], stored["arms"]
        known = seeds.setdefault(seed, {"seed": seed, "arms": {}})["arms"]
        if twice := known.keys() & arms.keys() - {BASE, IMITATION}:
            raise UserError(f"{name}: there are two runs of {', '.join(sorted(twice))} with seed {seed}; give one")
        for arm, found in arms.items():
            if arm in known:  # a model that loops share: what one of them does not know of it, another may
                for epoch, tables in found["epochs"].items():
                    known[arm]["epochs"][epoch] = tables | known[arm]["epochs"].get(epoch, {})
            else:
                known[arm] = found
    return [seeds[seed] for seed in sorted(seeds)]


def check_comparable(results: Sequence[dict]) -> None:
    """Raise UserError for runs that differ in more than their seed and what the words of their arm say.

    Of runs without stored settings, and of arms without words, less is known and compared.
    """
    first_of_arm: dict[str, tuple[int, dict]] = {}
    for result in results:
        seed, runs = result["seed"], {name: arm for name, arm in result["arms"].items() if arm.get("settings")}
        first = next(iter(runs), None)
        for name, arm in runs.items():
            other_seed, other = first_of_arm.setdefault(name, (seed, arm))
            where = f"{name} with seed {seed} differs from"
            _refuse(other["settings"], arm["settings"], FREE, f"{where} {name} with seed {other_seed}")
            if "words" in arm:
                free = [*FREE, *arm["words"], *runs[first].get("words", ())]
                _refuse(runs[first]["settings"], arm["settings"], free, f"{where} {first} in more than its words say")
    asked = [
        (result["seed"], arm["asked"]) for result in results for arm in result["arms"].values() if arm.get("asked")
    ]
    for seed, way in asked[1:]:
        where = f"benchmarks of seed {seed} were asked in another way than those of seed {asked[0][0]}"
        _refuse(asked[0][1], way, (), where)


def _refuse(one: dict, other: dict, free: Iterable[str], where: str) -> None:
    """Raise UserError if the settings differ in more than the free ones."""
    if different := differences(*({name: each[name] for name in each if name not in free} for each in (one, other))):
        raise UserError(f"{where}: {'; '.join(different)}")


def refusal(result: dict, plan: Plan) -> str | None:
    """Why a seed is left out, if it is: its imitation model cannot play."""
    played = result["arms"].get(IMITATION, {"epochs": {"0": {}}})["epochs"]["0"].get(SELF_PLAY)
    if not (plan.gate and played) or played[plan.gate[0]] >= plan.gate[1]:
        return None
    share = played[plan.gate[0]]
    return f"Seed {result['seed']} is left out: {share:.1%} of its imitation model's own games end: {plan.gate[0]}."


def all_numbers(results: Sequence[dict], plan: Plan) -> list[Number]:
    """The numbers of all seeds, by arm in the order of the plan, epoch and seed."""
    found = [
        Number(table, column, name, int(epoch), result["seed"], value)
        for result in results
        for name, arm in result["arms"].items()
        for epoch, tables in arm["epochs"].items()
        for table, columns in tables.items()
        for column, value in _with_seeds(table, columns).items()
    ]
    order = list(dict.fromkeys([BASE, IMITATION, *plan.titles, *(number.arm for number in found)]))
    found.sort(key=lambda number: (order.index(number.arm), number.epoch))
    matched = {number.seed for number in found if number.table.startswith(POINTS)}
    # Self-play is shown of the same seeds as points.
    return [number for number in found if number.table != SELF_PLAY or not matched or number.seed in matched]


def _with_seeds(table: str, columns: dict) -> dict:
    """The columns, and one that shows how many seeds there are, or the points of each."""
    return columns | {EACH_SEED: columns["points"]} if table.startswith(POINTS) else {SEEDS: 1} | columns


def measured(numbers: Sequence[Number], measure: str, arm: str) -> dict[tuple[int, int], float]:
    """A measure of an arm, by epoch and seed: a column of the questions, of the benchmarks, or of the points against
    imitation, or with @OPPONENT against another."""
    column, _, opponent = measure.partition("@")
    tables = (f"{POINTS} {opponent or IMITATION}", QUESTIONS, BENCHMARKS)
    return {
        (number.epoch, number.seed): number.value[0] if isinstance(number.value, list) else number.value
        for number in numbers
        if (number.arm, number.column) == (arm, column) and number.table in tables and number.value is not None
    }


def paired(numbers: Sequence[Number], measure: str, arm: str, other: str | None) -> tuple[int, list[float]] | None:
    """An arm's measure minus another's, for each seed, after the last epoch that both have in all of their seeds.

    Without another arm, minus 0.5. A shared model is compared with every epoch.
    """
    own = measured(numbers, measure, arm)
    others = measured(numbers, measure, other) if other else dict.fromkeys(own, 0.5)
    if other in (BASE, IMITATION):
        others = {(epoch, seed): others[0, seed] for epoch, seed in own if (0, seed) in others}
    both = own.keys() & others.keys()
    seeds = sorted({seed for _, seed in both})
    for epoch in sorted({epoch for epoch, _ in both}, reverse=True):
        if all((epoch, seed) in both for seed in seeds):
            return epoch, [own[epoch, seed] - others[epoch, seed] for seed in seeds]
    return None


def student(values: Sequence[float]) -> tuple[float, list[float] | None, float | None]:
    """The mean of one value for each seed, Student's 95% interval, and the p value for a mean of 0.

    A single seed has neither, and equal values have no p value.
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None, None
    error = float(stats.sem(values))
    error = error if error > ROUNDING else 0.0
    half = t_quantile(len(values) - 1) * error
    return (
        mean,
        [mean - half, mean + half],
        float(2 * stats.t.sf(abs(mean) / error, len(values) - 1)) if error else None,
    )


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p values adjusted for their number by Holm's method (Scand. J. Stat. 6, 1979).

    An unknown one, None, counts and stays None.
    """
    known = sorted((value, place) for place, value in enumerate(values) if value is not None)
    adjusted, least = [None] * len(values), 0.0
    for rank, (value, place) in enumerate(known):
        least = max(least, min(1.0, (len(values) - rank) * value))
        adjusted[place] = least
    return adjusted
