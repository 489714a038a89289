"""Controls of self-play: runs that train as SPAG does, on other rows. They are values of assign_rewards --control.

coin             in each game that pays, a coin decides which role gets the winner's reward
coin_by_length   the outcomes of games that pay are permuted among games with equally many messages
cloning          the winner's messages as SFT rows: -reward * weight * l, without ratio, clip and KL; with
                 --messages all, the messages of both roles
sft              the SFT examples alone, repeated until they are as many as the rows of --like_rows
silent           the rows of --like_rows, with weight 0 for rows of games
"""

import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from tools.games.game import Game
from tools.selfplay.rewards import Judged, judge_game
from utils import BadRecordError, UserError, iter_records

SFT = "sft"  # the type of SFT rows, and the control that has no others
COIN, COIN_BY_LENGTH, CLONING, SILENT = "coin", "coin_by_length", "cloning", "silent"
CONTROLS = (COIN, COIN_BY_LENGTH, CLONING, SFT, SILENT)
WITHOUT_GAMES = (SFT, SILENT)  # these read no episodes


def check_winner(game: Game, control: str) -> None:
    """Raise UserError if the game always pays both roles alike, so that no winner can be drawn."""
    paying = (outcome for outcome in game.outcomes if not outcome.breach)
    if all(outcome.winner is None and outcome.points and len(set(outcome.points)) == 1 for outcome in paying):
        raise UserError(f"{control}: there is no winner to draw, {game.title} pays both roles alike")


def coin_game(game: Game, episode: Mapping) -> Judged:
    """Judge a game; if it pays, a coin draws who gets the higher reward. The same game always has the same coin."""
    judged = judge_game(game, episode)
    if not any(judged.rewards):
        return judged
    played = episode["history"][: judged.length]
    drawn = random.Random(json.dumps([episode["target_word"], played])).choice(game.roles)
    lower, higher = sorted(judged.rewards)
    return judged._replace(rewards=(higher, lower) if drawn == game.roles[0] else (lower, higher))


def permute_rewards(games: Sequence[Judged], rng: random.Random) -> tuple[list[Judged], int]:
    """Permute the rewards of games that pay, among games with equally many messages.

    Returns the games, and how many have another winner. Unlike a coin for each game, this keeps how many games of each
    length a role wins, so that brevity is not rewarded more than in self-play.
    """
    places = defaultdict(list)
    for place, judged in enumerate(games):
        if any(judged.rewards):
            places[judged.length].append(place)
    permuted, changed = list(games), 0
    for _, same_length in sorted(places.items()):
        rewards = [games[place].rewards for place in same_length]
        rng.shuffle(rewards)
        for place, (first, second) in zip(same_length, rewards, strict=True):
            before = games[place].rewards
            changed += (first > second) != (before[0] > before[1])
            permuted[place] = games[place]._replace(rewards=(first, second))
    return permuted, changed


def cloning(rows: Sequence[dict], sft_coeff: float, rows_at_once: float | None = None) -> Callable[[dict], dict]:
    """Return the function that turns each of these rows into an SFT row.

    OfflinePO averages game rows and SFT rows separately, over the `rows_at_once` rows of a micro-batch or of a step
    (None: over all), and multiplies the latter by `sft_coeff`. Here all rows are SFT rows in one average, and the
    weights give each kind the share in the loss that it has there on average: a batch of B rows has a kind of share p
    with 1 - (1 - p)^B.
    """
    total, at_once = len(rows), rows_at_once or math.inf
    number = sum(row.get("type") == SFT for row in rows)
    scale, sft_scale = ((1 - (1 - n / total) ** at_once) * total / n if n else 0.0 for n in (total - number, number))

    def clone(row: dict) -> dict:
        if row.get("type") == SFT:
            return row | {"weight": sft_scale}
        weight = row["reward"] * row["weight"] / sft_coeff * scale
        text = {key: value for key, value in row.items() if key not in ("reward", "role", "weight")}
        return text | {"type": SFT, "weight": weight}

    return clone


def repeated(rows: Sequence[dict], number: int, rng: random.Random) -> list[dict]:
    """`number` rows: all of them equally often, and a drawn part of them once more."""
    if not rows:
        raise UserError("there are no rows to repeat")
    times, rest = divmod(number, len(rows))
    return [*rows] * times + rng.sample(rows, rest)


def number_to_repeat_to(repeat_to: str) -> int:
    """The number that --repeat_to gives, or that of the game rows of its file."""
    if repeat_to.isdecimal():
        return int(repeat_to)
    return sum(row.get("type") != SFT for _, row in iter_records(repeat_to))


def silent_rows(path: str) -> Iterator[dict]:
    """The rows of a file, those of games with weight 0. Raises BadRecordError for a record that is no row."""
    for where, row in iter_records(path):
        if not isinstance(row.get("target"), str):
            raise BadRecordError(f"{where}: not a row that assign_rewards has made")
        yield row if row.get("type") == SFT else row | {"weight": 0.0}
