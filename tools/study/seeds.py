"""The results of several seeds: which may be compared, and values over seeds. No torch."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from scipy import stats

from tools.matches.stats import ALL, BOTH
from tools.study.arms import BASE, IMITATION, Plan
from tools.study.loops import read_loop, read_seed, share_models
from utils import UserError, differences

# Settings of tools/run_spag.sh that may differ between runs of one arm: seeds, places, how far and how fast it runs.
FREE = "SEED EVAL_SEEDS OUTPUT LIKE EPOCHS UNTIL EVAL_EVERY EVAL_IMITATION EVAL_TASKS REPORT SAVE_STEPS".split()
FREE += "NPROC NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID PLAY_BATCH TENSOR_PARALLEL_SIZE GRADIENT_CHECKPOINTING".split()
FREE += "DEEPSPEED FIRST_EPISODES VERBOSE".split()
Values = dict[int, float]  # by seed


def read_results(names: Sequence[str]) -> list[dict]:
    """The results of all seeds, by seed. Raises UserError for an arm that is there twice with one seed."""
    seeds: dict[int, dict] = {}
    for name in names:
        arm, equals, folder = name.partition("=")
        if equals:
            loop = read_loop(Path(folder), Path(folder))
            found = {"seed": int(loop["seed"]), "arms": share_models({arm: loop})}
        else:
            found = read_seed(Path(name))
        arms = seeds.setdefault(found["seed"], {"seed": found["seed"], "arms": {}})["arms"]
        for arm, numbers in found["arms"].items():
            if arm in arms and arm not in (BASE, IMITATION):
                raise UserError(f"{name}: there are two runs of {arm} with seed {found['seed']}; give one")
            arms.setdefault(arm, numbers)
    return [seeds[seed] for seed in sorted(seeds)]


def check_comparable(results: Sequence[dict]) -> None:
    """Raise UserError for runs that differ in more than their seed and what the words of their arm say.

    Of runs without stored settings, and of arms without words, less is known and compared.
    """
    first_of_arm: dict[str, tuple[int, dict]] = {}
    for result in results:
        runs = {name: arm for name, arm in result["arms"].items() if arm.get("settings")}
        first = next(iter(runs), None)
        for name, arm in runs.items():
            other_seed, other = first_of_arm.setdefault(name, (result["seed"], arm))
            where = f"{name} with seed {result['seed']} differs from"
            _refuse_different(arm, other, FREE, f"{where} {name} with seed {other_seed}")
            if "words" in arm:
                words = [*FREE, *arm["words"], *runs[first].get("words", ())]
                _refuse_different(arm, runs[first], words, f"{where} {first} in more than its words say")
    asked = [
        (result["seed"], each["benchmarks"]["asked"])
        for result in results
        for each in all_numbers(result)
        if "benchmarks" in each
    ]
    for seed, way in asked[1:]:
        if different := differences(asked[0][1], way):
            where = f"benchmarks of seed {seed} were asked in another way than those of seed {asked[0][0]}"
            raise UserError(f"{where}: {'; '.join(different)}")


def _refuse_different(one: dict, other: dict, may_differ: Iterable[str], where: str) -> None:
    kept = [{name: value for name, value in arm["settings"].items() if name not in may_differ} for arm in (other, one)]
    if different := differences(*kept):
        raise UserError(f"{where}: {'; '.join(different)}")


def refusal(result: dict, plan: Plan) -> str | None:
    """Why a seed is left out, if it is: its imitation model cannot play."""
    played = result["arms"].get(IMITATION, {"epochs": {}})["epochs"].get("0", {}).get("self_play")
    if not (plan.gate and played) or played[plan.gate[0]] >= plan.gate[1]:
        return None
    share = played[plan.gate[0]]
    return f"Seed {result['seed']} is left out: {share:.1%} of its imitation model's own games end: {plan.gate[0]}."


# Values over seeds.


def mean_interval(values: Sequence[float]) -> tuple[float, list[float] | None]:
    """The mean of one value for each seed and Student's 95% interval; None for the interval of a single seed."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return mean, [mean - half, mean + half]


def p_value(values: Sequence[float]) -> float | None:
    """The p value of Student's t for a mean of 0; None for fewer than two seeds, and for equal values."""
    if len(values) < 2 or not (error := float(stats.sem(values))):
        return None
    return float(2 * stats.t.sf(abs(sum(values) / len(values)) / error, len(values) - 1))


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


def all_numbers(result: dict) -> list[dict]:
    """The numbers of all models of a seed."""
    return [numbers for arm in result["arms"].values() for numbers in arm["epochs"].values()]


def at(result: dict, arm: str, epoch: str, *path: str):
    """What a seed has at this place of an arm's epoch; None if it has nothing there."""
    found = result["arms"].get(arm, {}).get("epochs", {}).get(epoch)
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def values_at(results: Sequence[dict], arm: str, epoch: str, *path: str) -> list[float]:
    """The values at this place, of the seeds that have one."""
    found = (at(result, arm, epoch, *path) for result in results)
    return [value for value in found if value is not None]


def models(results: Sequence[dict], plan: Plan, *path: str) -> list[tuple[str, str]]:
    """The arms and epochs for which any seed has something at this place."""
    named = dict.fromkeys([BASE, IMITATION, *plan.titles, *(arm for result in results for arm in result["arms"])])
    found = []
    for arm in named:
        epochs = {int(epoch) for result in results for epoch in result["arms"].get(arm, {}).get("epochs", ())}
        found += [(arm, str(epoch)) for epoch in sorted(epochs) if values_at(results, arm, str(epoch), *path)]
    return found


def measured(results: Sequence[dict], measure: str, arm: str) -> dict[int, Values]:
    """A measure of an arm by epoch and seed: `points`, `win`, `tie` or `loss`, with @OPPONENT against another than
    imitation, a benchmark, or a column of the questions."""
    name, _, opponent = measure.partition("@")
    places = [("matches", opponent or IMITATION, ALL, BOTH, name), ("benchmarks", "scores", name), ("questions", name)]
    found: dict[int, Values] = {}
    for result in results:
        for epoch in result["arms"].get(arm, {}).get("epochs", ()):
            here = [value for place in places if (value := at(result, arm, epoch, *place)) is not None]
            for value in here[:1]:
                found.setdefault(int(epoch), {})[result["seed"]] = value[0] if isinstance(value, list) else value
    return found


def paired(results: Sequence[dict], measure: str, arm: str, other: str | None) -> tuple[int, Values] | None:
    """An arm's measure minus another's, by seed, after the last epoch that both have in all of their seeds.

    Without another arm, minus 0.5. A shared model is compared with every epoch.
    """
    own = measured(results, measure, arm)
    if other is None:
        others = {epoch: dict.fromkeys(values, 0.5) for epoch, values in own.items()}
    else:
        others = measured(results, measure, other)
        if other in (BASE, IMITATION):
            others = dict.fromkeys(own, others.get(0, {}))
    shared = {epoch: own[epoch].keys() & others[epoch].keys() for epoch in own.keys() & others.keys()}
    seeds = set().union(*shared.values())
    for epoch in sorted(shared, reverse=True):
        if seeds and shared[epoch] == seeds:
            return epoch, {seed: own[epoch][seed] - others[epoch][seed] for seed in sorted(seeds)}
    return None
