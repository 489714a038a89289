"""How a game ended, and the rewards and weights of its roles' messages. Pure functions; no torch."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tools.common.errors import UserError, user_errors
from tools.common.flags import FlagGroup, flag
from tools.games.game import EPISODE_KEYS, Game

# Values of --messages:
WINNER = "winner"
ALL = "all"


@dataclass(kw_only=True)
class RewardFlags(FlagGroup):
    # The defaults are the paper's: gamma 0.8, and rows of winners only.
    decay_weight: float = flag(
        "reward decay gamma, applied backwards from the last message", default=0.8, above=0, at_most=1
    )
    losers: float = flag(
        "also make rows of losers, with -SHARE times the winner's reward", default=0.0, metavar="SHARE", at_least=0
    )
    ties: float = flag(
        "also make rows of tied games, with reward -COST for both roles", default=0.0, metavar="COST", at_least=0
    )
    messages: str = flag("make rows of winners' messages, or of all messages", default=WINNER, choices=(WINNER, ALL))

    def __post_init__(self):
        super().__post_init__()
        if self.messages == ALL and (self.losers or self.ties):
            raise UserError("--messages all gives every message reward 1; omit --losers and --ties")


# Games.


class Result(NamedTuple):
    outcome: str
    length: int  # number of messages up to and including the decisive one
    rewards: dict[str, float]  # by role, above 0
    learners: Sequence[str]  # roles that the model in training played; only their messages become rows


def check_episodes(game: Game, episodes: Sequence[Mapping], where: str, first: int) -> None:
    """UserError that names the first invalid episode by `where` and its number, counted from `first`."""
    for number, episode in enumerate(episodes, start=first):
        with user_errors(f"{where} {number}", ValueError, UserError):
            game.check_episode(episode)


def judge_episodes(game: Game, episodes: Sequence[Mapping], where: str, first: int) -> list[Result]:
    """Judge the episodes from which rows are made. UserError for an invalid one, and for a message out of turn.

    A query is the prompt of the role whose turn it is, so a message out of turn would be taught to the wrong player.
    Messages after the decisive one need only be well-formed.
    """
    check_episodes(game, episodes, where, first)
    results = [game_result(game, episode) for episode in episodes]
    for number, (episode, result) in enumerate(zip(episodes, results, strict=True), start=first):
        history = episode["history"][: result.length]
        task = episode["target_word"]
        for index, message in enumerate(history):
            speaker = message["role"]
            expected = game.next_role(task, history[:index])
            if speaker != expected:
                wrong = f"it is by the {speaker}, but it is the {expected}'s turn"
                raise UserError(f"{where} {number}: message {index}: {wrong}; remove or fix this game")
    return results


def game_result(game: Game, episode: Mapping) -> Result:
    """Judge a valid episode.

    Stored outcomes are ignored, because other people's games have none and play may have had other --game_options.
    """
    outcome, length = game.verdict(*(episode[key] for key in EPISODE_KEYS))
    rewards = game.rewards(episode["target_word"], episode["history"][:length], outcome)
    learners = [episode["learner"]] if episode.get("learner") else game.roles
    return Result(outcome, length, {role: reward for role, reward in rewards.items() if reward}, learners)


def loser(game: Game, result: Result) -> str | None:
    """The role that lost a game which pays its winner alone."""
    if game.outcome(result.outcome).winner is None or len(result.rewards) != 1:
        return None
    (winner,) = result.rewards
    return game.other(winner)


# Rewards and weights.


class Payment(NamedTuple):
    """What a role gets for a game."""

    reward: float  # of all its messages together, before decay; may be negative
    weight: float  # of each of its rows


class Weights(NamedTuple):
    """The weight of each row of a role: in games that pay it, and in games that it loses."""

    won: dict[str, float]
    lost: dict[str, float]


def role_weights(game: Game, results: Sequence[Result], flags: RewardFlags) -> Weights:
    """Weights with which both roles count alike: N / (2 N_role) (arXiv 2404.10642).

    N_role games pay the role, and N is the sum of both. A role that no game pays has weight 0. Games are counted, not
    rows, because a winner's rows share the reward of the game, however many they are. If each game pays 1, weight
    times reward sums to N / 2 over the rows that a role has won. Lost games are weighted likewise, by how many each
    role lost. Only roles played by the learner count; if it plays one role in all games, the weight is 1. With
    `messages` ALL every weight is 1.
    """
    if flags.messages == ALL:
        equal = dict.fromkeys(game.roles, 1.0)
        return Weights(equal, equal)
    learners = {role for result in results for role in result.learners}
    won = Counter(role for result in results for role in result.rewards if role in result.learners)
    lost = Counter(role for result in results if (role := loser(game, result)) in result.learners)

    def balanced(games: Counter) -> dict[str, float]:
        return {role: games.total() / (len(learners) * games[role]) if games[role] else 0.0 for role in game.roles}

    return Weights(balanced(won), balanced(lost))


def role_payments(game: Game, result: Result, flags: RewardFlags, weights: Weights) -> dict[str, Payment]:
    """What a game pays the roles whose messages become rows, with the `weights` of all games.

    With `messages` ALL every message gets 1, for imitating games whose losers also play well. Otherwise the game pays
    its winners. With `losers` above 0 the loser gets -losers times the winner's reward: if each game pays 1, weight
    times reward sums to -losers * N / 2 over the rows that a role has lost. With `ties` above 0 both roles of a tied
    game that pays nobody get -ties, at weight 1, the mean weight of decided games if each role wins some. As released,
    a breach by default pays nobody, because the winner's messages did not win the game; so it costs the loser nothing
    either.
    """
    if flags.messages == ALL:
        return {role: Payment(1.0, 1.0) for role in result.learners}
    payments = {role: Payment(reward, weights.won[role]) for role, reward in result.rewards.items()}
    outcome = game.outcome(result.outcome)
    if flags.losers and (role := loser(game, result)):
        (won,) = result.rewards.values()
        payments[role] = Payment(-flags.losers * won, weights.lost[role])
    if flags.ties and outcome.winner is None and not outcome.breach and not payments:
        payments = dict.fromkeys(game.roles, Payment(-flags.ties, 1.0))
    return {role: payment for role, payment in payments.items() if role in result.learners}


def message_rewards(reward: float, count: int, flags: RewardFlags) -> list[float]:
    """The rewards of a role's messages: its reward split by decay or, with `messages` ALL, all of it for each."""
    if flags.messages == ALL:
        return [reward] * count
    return [reward * share for share in decay_shares(count, flags.decay_weight)]


def decay_shares(count: int, gamma: float) -> list[float]:
    """Shares of a reward among a role's messages k = 1..T: gamma^(T-k) / sum_j gamma^(T-j).

    They sum to 1, so a long game pays no more than a short one. With gamma below 1 later messages get more, because
    they are closer to what decided the game.
    """
    first = 1 - count if count * -math.log(gamma) > 700 else 0  # otherwise the last power would overflow
    # Not gamma ** -k: computed as released, to the last digit.
    powers = [(1 / gamma) ** k for k in range(first, first + count)]
    total = sum(powers)
    return [power / total for power in powers]
