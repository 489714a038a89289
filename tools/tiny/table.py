"""The tables of the study, made of the results of its seeds (results.py).

A seed is a world of its own and counts as one observation: every interval is Student's t over seeds, and differences
are taken seed by seed.
"""

from collections.abc import Iterable, Iterator, Sequence

from tools.games.guess_my_city import FOUND
from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, DEFENDER_WINS, TIED, Taboo
from tools.matches.stats import mean_difference
from tools.matches.text import with_interval
from tools.tiny.arms import ARMS, BASE, IMITATION, MEETING, PAIRS, REASONING_PAIRS, RELEASED, Arm
from tools.tiny.questions import ALL_KINDS, COLUMNS, KINDS, PRIMARY, PRIMARY_HELD_OUT
from tools.tiny.results import EMPTY, LENGTH

POINTS = {"points": "points", "attacker": "as attacker", "defender": "as defender", "played": "played words"}
POINTS |= {"held_out": "held-out words"}
RATES = {"clean": "clean games", "breach": "own breaches as attacker", "tie": "ties"}
# Shares in the tables of self-play: of Taboo, and of the games that both players win together.
SELF_PLAY = {"attacker wins": ATTACKER_WINS, "defender wins": DEFENDER_WINS, "breaches": ATTACKER_BREAKS, "ties": TIED}
SELF_PLAY |= {name: name for name in (EMPTY, *(f"about {role}" for role in Taboo.roles), LENGTH)}
OWN_GAME = {"both win": FOUND, LENGTH: LENGTH}
LEAST_GUESSED = 0.1  # share of the imitation model's games that end in a right guess, below which it is no yardstick
LOST, LEAST_KNOWN, LEAST_LEARNED = 0.05, 0.35, 0.1  # the gate of the questions, see `questions_refusal`
Lines = Iterator[list[str]]


def tables(results: Sequence[dict]) -> str:
    """All tables of the study in Markdown, and which seeds do not count."""
    refusals = list(filter(None, map(refusal, results)))
    results = sorted((each for each in results if not refusal(each)), key=lambda each: each["seed"])
    parts = [match_lines(results), difference_lines(results), meeting_lines(results)]
    matched = [each for each in results if any(each["points"].values())]  # the others have no last games
    parts += [self_play_lines(matched, shown) for shown in (SELF_PLAY, OWN_GAME)]
    tested = [each for each in results if not questions_refusal(each)]
    parts += [question_lines(results), gain_lines(tested), game_lines(results)]
    refusals += filter(None, map(questions_refusal, results))
    return "\n".join([*filter(None, map(markdown, parts)), *refusals]) + "\n"


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """A table with its head; nothing for a head alone."""
    head, *body = (f"| {' | '.join(line)} |\n" for line in lines)
    return head + "|---" * head.count(" | ") + "|---|\n" + "".join(body) if body else ""


def over_seeds(values: Sequence[float], form: str = ".3f") -> str:
    """The mean of one value for each seed, with its interval if there are several seeds."""
    if len(values) < 2:
        return format(values[0], form) if values else "-"
    return with_interval(*mean_difference([1] * len(values), values), form)


def each_seed(values: Sequence[float], form: str = ".3f") -> str:
    """The values of the seeds, in their order."""
    return ", ".join(format(value, form) for value in values)


def refusal(result: dict) -> str | None:
    """Why this seed is left out, if it is: points against a model that cannot play would say little."""
    guessed = result["self_play"][RELEASED]["0"][DEFENDER_WINS]
    if guessed >= LEAST_GUESSED:
        return None
    return f"Seed {result['seed']} is left out: its imitation model guesses the word in {guessed:.1%} of its games."


# Matches and self-play.


def match_lines(results: Sequence[dict]) -> Lines:
    """A line for each model that had matches against imitation."""
    yield ["learning", "epoch", *POINTS.values(), *RATES.values(), "points of each seed"]
    for arm, epoch in arms_and_epochs(results, "points"):
        found = values_of(results, "points", arm, epoch)
        cells = [over_seeds([each[name] for each in found]) for name in POINTS]
        cells += [format(sum(each[name] for each in found) / len(found), ".3f") for name in RATES]
        yield [arm.title, epoch, *cells, each_seed([each["points"] for each in found])]


def arms_and_epochs(results: Sequence[dict], part: str) -> list[tuple[Arm, str]]:
    """The arms and epochs for which any seed has this part of the results."""
    numbers = {name: sorted({int(epoch) for each in results for epoch in each[part].get(name, ())}) for name in ARMS}
    return [(ARMS[name], str(number)) for name in ARMS for number in numbers[name]]


def values_of(results: Sequence[dict], part: str, arm: Arm, epoch: str) -> list[dict]:
    """This part of the results for an arm's model, of the seeds that have it."""
    return [each[part][arm.name][epoch] for each in results if epoch in each[part].get(arm.name, ())]


def difference_lines(results: Sequence[dict]) -> Lines:
    """A line for each of PAIRS: by how much the first arm's last model has more points, seed by seed."""
    yield ["points after the last epoch", "minus", "difference", "of each seed"]
    for one, other in PAIRS:
        both = [each["points"] for each in results if each["points"].get(one) and each["points"].get(other)]
        values = [last_points(points[one]) - last_points(points[other]) for points in both]
        if values:
            yield [ARMS[one].title, ARMS[other].title, over_seeds(values, "+.3f"), each_seed(values, "+.3f")]


def last_points(by_epoch: dict[str, dict]) -> float:
    """The points after an arm's last epoch."""
    return by_epoch[max(by_epoch, key=int)]["points"]


def meeting_lines(results: Sequence[dict]) -> Lines:
    """The points of an arm's last model against another's."""
    yield ["last model", "against", "points", "of each seed"]
    values = [each["meeting"] for each in results if "meeting" in each]
    if values:
        yield [*(ARMS[name].title for name in MEETING), over_seeds(values), each_seed(values)]


def self_play_lines(results: Sequence[dict], shown: dict[str, str]) -> Lines:
    """A line for the model of each epoch, the imitation model first: means over the seeds, of those games that have
    the outcomes shown."""
    yield ["learning", "model", *shown]
    for arm, epoch in arms_and_epochs(results, "self_play"):
        found = values_of(results, "self_play", arm, epoch)
        if arm.plays_on and set(shown.values()) <= set(found[0]):
            means = [sum(each[name] for each in found) / len(found) for name in shown.values()]
            model = IMITATION if epoch == "0" else f"epoch {epoch}"
            yield [arm.title, model, *(format(mean, ".3f") for mean in means)]


def game_lines(results: Sequence[dict]) -> Lines:
    """A line for each arm: games of its last model against the imitation model, of the first seed."""
    yield ["learning", "games of the last model"]
    for name, games in results[0]["games"].items() if results else ():
        yield [ARMS[name].title, "<br>".join(games)]


# Questions outside the game.


def questions_refusal(result: dict) -> str | None:
    """Why this seed's test cannot show a gain, if it cannot; fixed before the study.

    Imitation must not have forgotten more than LOST of what base knows, and must be above LEAST_KNOWN in each kind.
    The positive control must gain LEAST_LEARNED on held-out words, with an interval over words above 0.
    """
    if "practice" not in result:
        return None
    imitation, (gain, interval) = result["questions"][IMITATION], result["practice"]
    base, lowest = result["questions"][BASE][ALL_KINDS], min(imitation[kind] for kind in KINDS)
    if abs(base - imitation[ALL_KINDS]) <= LOST and lowest > LEAST_KNOWN and gain >= LEAST_LEARNED and interval[0] > 0:
        return None
    return (
        f"Seed {result['seed']} misses the gate of the questions: base {base:.3f}, imitation "
        f"{imitation[ALL_KINDS]:.3f} (lowest kind {lowest:.3f}), forms minus silent on held-out words "
        f"{with_interval(gain, interval, '+.3f')}."
    )


def question_lines(results: Sequence[dict]) -> Lines:
    """A line for base, imitation and each arm's last model: shares of right answers, means over the seeds."""
    yield ["model", *COLUMNS]
    for title, model in ((BASE, BASE), (IMITATION, IMITATION), *((arm.title, arm.name) for arm in ARMS.values())):
        if found := [each["questions"][model] for each in results if model in each["questions"]]:
            yield [title, *(f"{sum(each[column] for each in found) / len(found):.3f}" for column in COLUMNS)]


def gain_lines(results: Sequence[dict]) -> Lines:
    """A line for each of REASONING_PAIRS: differences in right answers, seed by seed."""
    columns = (ALL_KINDS, PRIMARY, PRIMARY_HELD_OUT)
    yield ["last model", "minus", *columns, f"{PRIMARY} of each seed"]
    for one, other in REASONING_PAIRS:
        both = [each["questions"] for each in results if {one, other} <= set(each["questions"])]
        gains = {column: [asked[one][column] - asked[other][column] for asked in both] for column in columns}
        if both:
            title = ARMS[other].title if other in ARMS else other
            cells = [over_seeds(values, "+.3f") for values in gains.values()]
            yield [ARMS[one].title, title, *cells, each_seed(gains[PRIMARY], "+.3f")]
