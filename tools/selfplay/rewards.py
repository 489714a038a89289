"""What a game pays: how it ended, the rewards of its roles, the share of each message, the weights. No files."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tools.flags import flag
from tools.games.game import EPISODE_KEYS, Game, History
from utils import BadRecordError, UserError

WINNER, ALL = "winner", "all"  # values of --messages
PAPER, NONE = "paper", "none"  # values of --role_weights
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RewardFlags:
    """Which messages become rows, and their rewards and weights."""

    decay_weight: float = flag("reward decay gamma, applied backwards from the last message", default=0.8)
    losers: float = flag("make rows of the loser too: -SHARE times the winner's reward", default=0.0, metavar="SHARE")
    ties: float = flag("make rows of both players of tied games: reward -COST", default=0.0, metavar="COST")
    role_weights: str = flag(
        "weights of rows: 'paper' gives both roles the same total, 'none' gives every row 1",
        default=PAPER,
        choices=(PAPER, NONE),
    )
    messages: str = flag("make rows of the winner's messages, or of all", default=WINNER, choices=(WINNER, ALL))

    def check_rewards(self) -> None:
        """Raise UserError for a coefficient outside its bounds, or one that is not used."""
        if not 0 < self.decay_weight <= 1:
            raise UserError(f"decay_weight is {self.decay_weight}; it must be above 0 and at most 1")
        for name, value in (("losers", self.losers), ("ties", self.ties)):
            if not 0 <= value < math.inf:
                raise UserError(f"{name} is {value}; it must be a finite number of at least 0")
        if self.messages == ALL and (self.losers or self.ties):
            raise UserError("--messages all pays every message 1; leave out --losers and --ties")


class Judged(NamedTuple):
    """How a game ended, and what it pays."""

    outcome: str
    length: int  # number of messages up to the decisive one, which is included
    rewards: tuple[float, float]  # of the game's first and second role


def judge_game(game: Game, episode: Mapping) -> Judged:
    """Judge a valid episode. Raises ValueError for rewards that no game may pay."""
    outcome, length = game.judge(*(episode[key] for key in EPISODE_KEYS))
    rewards = game.rewards(episode["target_word"], episode["history"][:length], outcome)
    for role, reward in rewards.items():
        if role not in game.roles or not (math.isfinite(reward) and reward >= 0):
            raise ValueError(f"{game.title} pays {reward!r} to {role!r}; rewards are finite, at least 0, to its roles")
    first, second = (rewards.get(role, 0.0) for role in game.roles)
    return Judged(outcome, length, (first, second))


class JudgedGames(NamedTuple):
    """All games of a run, without their texts."""

    games: list[Judged]
    replies: Counter  # replies with token ids ("with_ids"), and those whose text has other ids ("retokenized")


def judge_games(
    game: Game, episodes: Iterable[tuple[str, dict]], judge: Callable[[Game, Mapping], Judged] = judge_game
) -> JudgedGames:
    """Judge all games, since the weights of rows need the outcomes of all.

    `episodes` are pairs of a place, such as "file:line", and the episode there. Raises BadRecordError that names an
    invalid episode. An error in the game's own rules is raised as it is, after a log message that names the episode.
    """
    games, replies = [], Counter(with_ids=0, retokenized=0)
    known: dict[Judged, Judged] = {}  # equal results are one object, so that a game takes only 8 bytes
    for where, episode in episodes:
        try:
            game.check_episode(episode)
            stored = stored_replies(episode)
        except ValueError as error:
            raise BadRecordError(f"{where}: {error}") from None
        try:
            judged = judge(game, episode)
        except Exception:
            logger.error("%s: the rules of %s raised an error", where, game.title)
            raise
        games.append(known.setdefault(judged, judged))
        for reply in stored:
            if "token_ids" in reply:
                replies["with_ids"] += 1
                replies["retokenized"] += reply.get("retokenized") is True
    return JudgedGames(games, replies)


def stored_replies(episode: Mapping) -> list[dict]:
    """What play has stored with each message; empty if it stored nothing. ValueError for token ids that are none."""
    replies = episode.get("replies")
    if not isinstance(replies, list) or not all(isinstance(reply, dict) for reply in replies):
        return []
    for index, reply in enumerate(replies):
        if "token_ids" in reply and not _are_ids(reply["token_ids"]):
            raise ValueError(f"reply {index}: 'token_ids' must be a list of whole numbers of at least 0")
    return replies


def _are_ids(ids: object) -> bool:
    return isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)


def outcome_counts(game: Game, games: Sequence[Judged]) -> dict[str, int]:
    """The number of episodes, and of episodes with each outcome."""
    found = Counter(judged.outcome for judged in games)
    return {"episodes": len(games), **{outcome.name: found[outcome.name] for outcome in game.outcomes}}


def role_weights(game: Game, games: Iterable[Judged], kind: str = PAPER) -> dict[str, float]:
    """The weight of the rows of each role: N / (2 N_role), so that both roles count alike (arXiv 2404.10642).

    N_role games pay the role, and N is the sum of both. A role that no game pays has weight 0. With `kind` NONE all
    weights are 1.
    """
    if kind == NONE:
        return dict.fromkeys(game.roles, 1.0)
    paid = [0, 0]
    for judged in games:
        for place, reward in enumerate(judged.rewards):
            paid[place] += reward > 0
    weights = (sum(paid) / (2 * number) if number else 0.0 for number in paid)
    return dict(zip(game.roles, weights, strict=True))


def role_pay(
    game: Game, judged: Judged, weights: Mapping[str, float], flags: RewardFlags
) -> dict[str, tuple[float, float]]:
    """For each role whose messages become rows: its reward in this game, and the weight of its rows.

    With `losers` above 0, the loser gets -losers times the winner's reward at the winner's weight, so that both sides
    of a game weigh alike. With `ties` above 0, both roles of a tied game that pays nobody get -ties at weight 1. A
    breach pays nobody.
    """
    outcome = game.outcome(judged.outcome)
    pay = {role: (reward, weights[role]) for role, reward in zip(game.roles, judged.rewards, strict=True) if reward}
    if flags.losers and outcome.winner is not None and len(pay) == 1:
        ((winner, (reward, weight)),) = pay.items()
        (loser,) = set(game.roles) - {winner}
        pay[loser] = (-flags.losers * reward, weight)
    if flags.ties and outcome.winner is None and not outcome.breach and not pay:
        pay = dict.fromkeys(game.roles, (-flags.ties, 1.0))
    return pay


def message_pay(
    game: Game, messages: History, judged: Judged, weights: Mapping[str, float], flags: RewardFlags
) -> list[tuple[float, float] | None]:
    """The reward and the weight of each message; None for a message that gives no row.

    `messages` are those up to the decisive one. A message's reward is its role's reward times its share.
    """
    if flags.messages == ALL:
        return [(1.0, 1.0)] * len(messages)
    spoken = [message["role"] for message in messages]
    pay = role_pay(game, judged, weights, flags)
    shares = {role: iter(message_shares(spoken.count(role), flags.decay_weight)) for role in pay}
    return [(pay[role][0] * next(shares[role]), pay[role][1]) if role in pay else None for role in spoken]


def message_shares(count: int, decay_weight: float) -> list[float]:
    """Shares of a reward of 1 among a role's messages k = 1..T: gamma^(T-k) / sum_j gamma^(T-j).

    Numerator and denominator are divided by gamma^(T-1), which gives the released numbers to the last digit.
    """
    shares = [(1 / decay_weight) ** k for k in range(count)]
    total = sum(shares)
    if not math.isfinite(total):
        raise UserError(f"decay_weight {decay_weight} is too small for a game with {count} messages of a role")
    return [share / total for share in shares]
