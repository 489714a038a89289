"""What a game pays: its outcome, the rewards of its roles, the shares of messages. Pure functions; no torch."""

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tools.flags import check_values, flag
from tools.games.game import EPISODE_KEYS, Game
from utils import UserError, user_errors

WINNER, ALL = "winner", "all"  # values of --messages
PAPER, NONE, ROLE = "paper", "none", "role"  # values of --role_weights and --baseline


@dataclass(kw_only=True)
class RewardFlags:
    group = "rewards"

    decay_weight: float = flag(
        "reward decay gamma, applied backwards from the last message", default=0.8, above=0, at_most=1
    )
    losers: float = flag(
        "make rows of the loser too: -SHARE times the winner's reward", default=0.0, metavar="SHARE", at_least=0
    )
    ties: float = flag(
        "make rows of both players of tied games: reward -COST", default=0.0, metavar="COST", at_least=0
    )
    baseline: str = flag(
        "role: subtract from a role's reward the mean reward of that role", default=NONE, choices=(NONE, ROLE)
    )
    role_weights: str = flag(
        "weights of rows: 'paper' gives both roles the same total, 'none' gives every row 1",
        default=PAPER,
        choices=(PAPER, NONE),
    )
    messages: str = flag("make rows of the winner's messages, or of all", default=WINNER, choices=(WINNER, ALL))
    roles: str | None = flag("make rows of this role alone, with weight 1", default=None, metavar="ROLE")

    def __post_init__(self):
        check_values(self)
        if self.messages == ALL and (self.losers or self.ties or self.baseline == ROLE):
            raise UserError("--messages all pays every message 1; leave out --losers, --ties and --baseline")

    def check_rewards(self, game: Game) -> None:
        if self.roles not in (None, *game.roles):
            raise UserError(f"--roles {self.roles}: {game.title} has the roles {' and '.join(game.roles)}")


# Games.


class Result(NamedTuple):
    outcome: str
    length: int  # number of messages up to the decisive one, which is included
    rewards: tuple[float, float]  # of the game's first and second role


def check_episodes(game: Game, episodes: Sequence[Mapping], place: str, first: int) -> None:
    """Raise UserError that names the first invalid episode by `place` and its number, which counts from `first`."""
    for number, episode in enumerate(episodes, start=first):
        with user_errors(f"{place} {number}", ValueError, UserError):
            game.check_episode(episode)


def judge_episodes(game: Game, episodes: Sequence[Mapping], place: str, first: int) -> list[Result]:
    """Judge the episodes of which rows are made. UserError for an invalid one, and for a message out of turn.

    A query is the prompt of the role whose turn it is: under it, another role's message would be taught to the wrong
    player. `place` and `first` name an episode as in `check_episodes`.
    """
    check_episodes(game, episodes, place, first)
    results = [game_result(game, episode) for episode in episodes]
    for number, (episode, result) in enumerate(zip(episodes, results, strict=True), start=first):
        history, task = episode["history"][: result.length], episode["target_word"]
        for index, message in enumerate(history):
            speaker, expected = message["role"], game.next_role(task, history[:index])
            if speaker != expected:
                wrong = f"the {speaker} speaks, where it is the {expected}'s turn"
                raise UserError(f"{place} {number}: message {index}: {wrong}; leave this game out, or mend it")
    return results


def game_result(game: Game, episode: Mapping) -> Result:
    """Judge a valid episode. Raises ValueError for rewards that a game may not pay."""
    outcome, length = game.judge(*(episode[key] for key in EPISODE_KEYS))
    rewards = game.rewards(episode["target_word"], episode["history"][:length], outcome)
    for role, reward in rewards.items():
        if role not in game.roles or not 0 <= reward < math.inf:
            raise ValueError(f"{game.title} pays {reward!r} to {role!r}; rewards are finite, at least 0, to its roles")
    first, second = (rewards.get(role, 0.0) for role in game.roles)
    return Result(outcome, length, (first, second))


def permute_rewards(results: Sequence[Result], rng: random.Random) -> list[Result]:
    """Permute the rewards of games that pay, among games with equally many messages.

    How many games of each length a role wins stays the same, so brevity is rewarded as much as in self-play.
    """
    same_length = defaultdict(list)
    for place, result in enumerate(results):
        if any(result.rewards):
            same_length[result.length].append(place)
    permuted = list(results)
    for _, places in sorted(same_length.items()):
        shuffled = [results[place].rewards for place in places]
        rng.shuffle(shuffled)
        for place, rewards in zip(places, shuffled, strict=True):
            permuted[place] = results[place]._replace(rewards=rewards)
    return permuted


# Rewards and weights.


class Paid(NamedTuple):
    """What a role gets for a game."""

    reward: float  # of all its messages together; it may be below 0
    weight: float  # of each of its rows


Numbers = dict[str, dict[str, float]]  # of all games: "weights" and "baselines", each by role


def paid_roles(
    game: Game,
    results: Sequence[Result],
    flags: RewardFlags,
) -> tuple[list[dict[str, Paid]], Numbers]:
    """For each game what the roles are paid whose messages become rows; and the numbers behind it.

    Baselines are among the numbers if they were subtracted.
    """
    weights = role_weights(game, results) if flags.role_weights == PAPER else dict.fromkeys(game.roles, 1.0)
    baselines = role_baselines(game, results, flags) if flags.baseline == ROLE else None
    paid = [_paid(game, result, flags, weights, baselines) for result in results]
    return paid, {"weights": weights} | ({"baselines": baselines} if baselines else {})


def _paid(
    game: Game,
    result: Result,
    flags: RewardFlags,
    weights: Mapping[str, float],
    baselines: Mapping[str, float] | None,
) -> dict[str, Paid]:
    """The reward and weight of each role; a role whose reward is 0 in the end gets no rows and is left out.

    A baseline is subtracted, unless the game ended in a breach.
    """
    pay, breach = role_pay(game, result, flags), game.outcome(result.outcome).breach
    winners = [role for role in game.roles if pay[role] > 0]
    loser_weight = weights[winners[0]] if winners else 1.0  # rows of a loser weigh as those of the winner
    paid = {}
    for role in (flags.roles,) if flags.roles else game.roles:
        reward = pay[role] - baselines[role] if baselines and not breach else pay[role]
        weight = weights[role] if role in winners or baselines else loser_weight
        if flags.messages == ALL:
            reward, weight = 1.0, 1.0
        if reward:
            paid[role] = Paid(reward, 1.0 if flags.roles else weight)
    return paid


def role_weights(game: Game, results: Sequence[Result]) -> dict[str, float]:
    """The weight of the rows of each role: N / (2 N_role), so that both roles count alike (arXiv 2404.10642).

    N_role games pay the role, and N is the sum of both. A role that no game pays has weight 0.
    """
    rewards = [result.rewards for result in results]
    paid = [sum(each[place] > 0 for each in rewards) for place in (0, 1)]
    weights = (sum(paid) / (2 * number) if number else 0.0 for number in paid)
    return dict(zip(game.roles, weights, strict=True))


def role_pay(game: Game, result: Result, flags: RewardFlags) -> dict[str, float]:
    """What this game pays each role, before baseline and decay.

    With `losers` above 0, the loser gets -losers times the winner's reward. With `ties` above 0, both roles of a tied
    game that pays nobody get -ties. A breach costs nobody anything.
    """
    outcome = game.outcome(result.outcome)
    pay = dict(zip(game.roles, result.rewards, strict=True))
    winners = [role for role in game.roles if pay[role]]
    if flags.losers and outcome.winner is not None and len(winners) == 1:
        pay[game.other(winners[0])] = -flags.losers * pay[winners[0]]
    if flags.ties and outcome.winner is None and not outcome.breach and not winners:
        pay = dict.fromkeys(game.roles, -flags.ties)
    return pay


def role_baselines(game: Game, results: Iterable[Result], flags: RewardFlags) -> dict[str, float]:
    """The mean of what each role is paid, over the games without a breach.

    Subtracting it compares a game with other games of that role, not with 0 (as SPIRAL does, arXiv 2506.24119).
    """
    fair = [result for result in results if not game.outcome(result.outcome).breach]
    pays = [role_pay(game, result, flags) for result in fair]
    totals = {role: math.fsum(pay[role] for pay in pays) for role in game.roles}
    return {role: total / max(len(pays), 1) for role, total in totals.items()}


def message_shares(count: int, flags: RewardFlags) -> list[float]:
    """Shares of a reward of 1 among a role's messages k = 1..T: gamma^(T-k) / sum_j gamma^(T-j); with ALL 1 each."""
    if flags.messages == ALL:
        return [1.0] * count
    shares = [(1 / flags.decay_weight) ** k for k in range(count)]  # the released numbers to the last digit
    total = sum(shares)
    return [share / total for share in shares]
