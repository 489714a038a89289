"""The tables of the study: points against imitation, differences, self-play, questions outside the game.

A seed is a world of its own and counts as one observation: every interval is Student's t over seeds, and differences
are taken seed by seed.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.games.game import DEFAULT_GAME, load_game
from tools.games.guess_my_city import FOUND
from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, DEFENDER_WINS, TIED, Taboo
from tools.matches.stats import ALL, BOTH, count_matches, mean_difference, result_rows
from tools.matches.text import with_interval
from tools.tiny.arms import ARMS, BASE, IMITATION, REASONING_PAIRS, RELEASED, Arm
from tools.tiny.questions import ALL_KINDS, COLUMNS, KINDS, PRIMARY, PRIMARY_HELD_OUT, by_word
from utils import iter_records, read_json

FIRST_GAMES = f"{RELEASED}/epoch1/episodes"  # of the imitation model, shared by all arms of a seed
EMPTY = "empty replies"
POINTS = ["learning", "epoch", "points", "of each seed", "as attacker", "as defender", "played words"]
POINTS += ["held-out words", "clean games", "own breaches as attacker", "ties"]
# Shares in the tables of self-play: of Taboo, and of the games that both players win together.
SELF_PLAY = {"attacker wins": ATTACKER_WINS, "defender wins": DEFENDER_WINS, "breaches": ATTACKER_BREAKS, "ties": TIED}
SELF_PLAY |= {EMPTY: EMPTY} | {name: name for name in (f"about {role}" for role in Taboo.roles)}
OWN_GAME = {"both win": FOUND}
Lines = Iterator[list[str]]
LOST, LEAST_KNOWN, LEAST_LEARNED = 0.05, 0.35, 0.1  # the gate of the questions, see `Answers.refusal`


def over_seeds(values: Sequence[float], form: str = ".3f") -> str:
    """The mean of one value for each seed, with its interval if there are several seeds."""
    if len(values) < 2:
        return format(values[0], form) if values else "-"
    return with_interval(*mean_difference([1] * len(values), values), form)


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """A table with its head."""
    head, *body = (f"| {' | '.join(line)} |\n" for line in lines)
    return head + "|---" * head.count(" | ") + "|---|\n" + "".join(body)


# Matches.


def match_rows(worlds: Mapping[int, Path], arms: Iterable[Arm]) -> list[dict]:
    """The rows of all matches of all seeds; an epoch's model is called by its arm and number, as released1."""

    def episodes() -> Iterator[dict]:
        for folder in (world / arm.name for world in worlds.values() for arm in arms):
            for path in sorted(folder.glob("epoch*/eval/games_results.json")):
                for _, episode in iter_records(path):
                    yield episode | {role: episode[role].replace("epoch", folder.name) for role in Taboo.roles}

    return list(result_rows(count_matches(episodes(), Taboo())))


def seed_values(rows: Iterable[Mapping], player: str, words: str = ALL, role: str = BOTH) -> dict[int, dict]:
    """A player's rows against imitation by seed."""
    wanted = {"player": player, "opponent": IMITATION, "words": words, "role": role}
    found = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return {row["seed"]: row for row in found if row["seed"] is not None}


def match_lines(rows: Sequence[Mapping], arms: Iterable[Arm], epochs: int) -> Lines:
    """A line for each model that had matches."""
    yield POINTS
    for arm, epoch in ((arm, epoch) for arm in arms for epoch in range(1, epochs + 1)):
        player = f"{arm.name}{epoch}"
        if not (whole := seed_values(rows, player)):
            continue
        parts = [whole, *(seed_values(rows, player, role=role) for role in Taboo.roles)]
        parts += [seed_values(rows, player, words=words) for words in ("played", "held_out")]
        points = [[row["points"] for row in part.values()] for part in parts]
        cells = [over_seeds(each) for each in points]
        rates = {
            "clean": [row["clean"]["points"] for row in whole.values()],
            "breach": [row["rates"]["breach"]["share"] for row in parts[1].values()],
            "tie": [row["rates"]["tie"]["share"] for row in whole.values()],
        }
        shares = [f"{sum(each) / len(each):.3f}" for each in rates.values()]
        yield [arm.title, str(epoch), cells[0], ", ".join(f"{each:.3f}" for each in points[0]), *cells[1:], *shares]


def difference_lines(rows: Sequence[Mapping], pairs: Iterable[tuple[Arm, Arm]], epochs: int) -> Lines:
    """A line for each pair of arms: by how much the first one's last model has more points."""
    yield ["points after the last epoch", "minus", "difference", "of each seed"]
    for arm, other in pairs:
        ours, theirs = (seed_values(rows, f"{each.name}{epochs}") for each in (arm, other))
        values = [ours[seed]["points"] - theirs[seed]["points"] for seed in ours if seed in theirs]
        yield [arm.title, other.title, over_seeds(values, "+.3f"), ", ".join(f"{each:+.3f}" for each in values)]


def meeting_lines(worlds: Mapping[int, Path], one: Arm, other: Arm) -> Lines:
    """The points of an arm's last model against another's."""
    yield ["last model", "against", "points", "of each seed"]
    wanted = {"player": one.name, "opponent": other.name, "words": ALL, "role": BOTH, "seed": None}
    results = [read_json(world / meeting(one, other) / "matches.json")["results"] for world in worlds.values()]
    values = [row["points"] for rows in results for row in rows if all(row[key] == wanted[key] for key in wanted)]
    yield [one.title, other.title, over_seeds(values), ", ".join(f"{each:.3f}" for each in values)]


def meeting(one: Arm, other: Arm) -> str:
    """The folder of two arms' match, in that of a seed."""
    return f"{one.name}_against_{other.name}"


def example_games(world: Path, arms: Iterable[Arm], number: int = 5) -> str:
    """Games of each arm's last model against the imitation model, drawn at random."""
    text = ""
    for arm in arms:
        paths = list((world / arm.name).glob("epoch*/eval/games_results.json"))
        if paths:
            last = max(paths, key=lambda path: int(path.parts[-3].removeprefix("epoch")))
            games = [episode for _, episode in iter_records(last)]
            text += f"\n{arm.title}:\n\n"
            for episode in random.Random(0).sample(games, min(number, len(games))):
                said = " / ".join(message["content"] for message in episode["history"][: episode["length"]])
                own = next(role for role in Taboo.roles if episode[role] != IMITATION)
                text += f"- {episode['target_word']}, it is the {own}: {said} ({episode['outcome']})\n"
    return text


# Self-play.


def self_play(folders: Iterable[Path], game: str = DEFAULT_GAME) -> dict[str, float]:
    """How a model's games against itself ended, over all folders: shares by outcome, of empty replies; messages.

    `about ROLE` is the mean over folders of what the summary of play says of the role's messages.
    """
    total, about = Counter(), {}
    for folder in folders:
        summary = read_json(next(folder.glob("*_summary.json")))
        total.update(summary["outcomes"])
        total.update({name: summary[name] for name in ("games", "empty_replies", "messages")})
        total["length"] += summary["mean_length"] * summary["games"]
        for role, value in summary["about"].items():
            about.setdefault(f"about {role}", []).append(value or 0.0)
    shares = {outcome.name: total[outcome.name] / total["games"] for outcome in load_game(game).outcomes}
    shares |= {name: sum(values) / len(values) for name, values in about.items()}
    return shares | {EMPTY: total["empty_replies"] / total["messages"], "length": total["length"] / total["games"]}


def self_play_lines(worlds: Sequence[Path], arms: Iterable[Arm], epochs: int, shown: Mapping[str, str]) -> Lines:
    """A line for the model of each epoch, the imitation model first."""
    yield ["learning", "model", *shown, "messages"]
    for arm, epoch in ((arm, epoch) for arm in arms for epoch in range(epochs + 1)):
        first = arm.game == DEFAULT_GAME and epoch == 0
        place = FIRST_GAMES if first else f"{arm.name}/epoch{epoch + 1}/episodes"
        if not (folders := [world / place for world in worlds if (world / place).is_dir()]):
            continue
        shares = self_play(folders, arm.game)
        model = f"epoch {epoch}" if epoch else IMITATION
        yield [arm.title, model, *(f"{shares[name]:.3f}" for name in shown.values()), f"{shares['length']:.2f}"]


# Questions outside the game.


@dataclass(frozen=True)
class Answers:
    """A seed's answers to the questions outside the game, by model."""

    seed: int
    right: dict[str, list[int]]

    def share(self, model: str, column: str) -> float:
        """The share of right answers."""
        sizes, totals = by_word(self.right[model], column)
        return sum(totals) / sum(sizes)

    def refusal(self) -> str | None:
        """Why this seed's test cannot show a gain, if it cannot; fixed before the study.

        Imitation must not have forgotten more than LOST of what base knows, and must be above LEAST_KNOWN in each
        kind. The positive control must gain LEAST_LEARNED on held-out words, with an interval over words above 0.
        """
        base, imitation = (self.share(model, ALL_KINDS) for model in (BASE, IMITATION))
        lowest = min(self.share(IMITATION, kind) for kind in KINDS)
        gains = [one - other for one, other in zip(self.right["forms"], self.right["silent"], strict=True)]
        gain, interval = mean_difference(*by_word(gains, PRIMARY_HELD_OUT))
        if abs(base - imitation) <= LOST and lowest > LEAST_KNOWN and gain >= LEAST_LEARNED and interval[0] > 0:
            return None
        return (
            f"Seed {self.seed} misses the gate of the questions: base {base:.3f}, imitation {imitation:.3f} (lowest "
            f"kind {lowest:.3f}), forms minus silent on held-out words {with_interval(gain, interval, '+.3f')}."
        )


def question_lines(answers: Sequence[Answers], arms: Iterable[Arm]) -> Lines:
    """A line for base, imitation and each arm's last model: shares of right answers, means over the seeds."""
    yield ["model", *COLUMNS]
    for title, model in ((BASE, BASE), (IMITATION, IMITATION), *((arm.title, arm.name) for arm in arms)):
        own = [each for each in answers if model in each.right]
        yield [title, *(f"{sum(each.share(model, column) for each in own) / len(own):.3f}" for column in COLUMNS)]


def gain_lines(answers: Sequence[Answers]) -> Lines:
    """A line for each pair of REASONING_PAIRS: differences in right answers, by seed."""
    yield ["last model", "minus", *(ALL_KINDS, PRIMARY, PRIMARY_HELD_OUT)]
    for one, other in REASONING_PAIRS:
        columns = (ALL_KINDS, PRIMARY, PRIMARY_HELD_OUT)
        gains = [[each.share(one, name) - each.share(other, name) for each in answers] for name in columns]
        yield [ARMS[one].title, ARMS[other].title if other in ARMS else other, *(over_seeds(g, "+.3f") for g in gains)]
