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
    return Result(outcome, length, {role: reward for role, reward in rewards.items() if reward})


# Rewards and weights.


class Payment(NamedTuple):
    """What a role gets for a game."""

    reward: float  # of all its messages together, before decay; may be negative
    weight: float  # of each of its rows


def role_weights(game: Game, results: Sequence[Result], flags: RewardFlags) -> dict[str, float]:
    """The weight of the rows of each role: N / (2 N_role), so that both roles count alike (arXiv 2404.10642).

    N_role games pay the role, and N is the sum of both, whoever is the learner. A role that no game pays has weight 0.
    Games are counted, not rows, because a winner's rows share the reward of the game, however many they are. If each
    game pays 1, weight times reward sums to N / 2 over the rows that a role has won. With `messages` ALL every weight
    is 1.
    """
    if flags.messages == ALL:
        return dict.fromkeys(game.roles, 1.0)
    games = Counter(role for result in results for role in result.rewards)
    return {role: games.total() / (2 * games[role]) if games[role] else 0.0 for role in game.roles}


def role_payments(game: Game, result: Result, flags: RewardFlags, weights: Mapping[str, float]) -> dict[str, Payment]:
    """What a game pays the roles whose messages become rows, with the `weights` of all games.

    With `messages` ALL every message of both roles gets 1, for imitating games whose losers also play well. Otherwise
    the game pays its winners. With `losers` above 0 the loser gets -losers times the winner's reward, at the winner's
    weight, so that losses of both roles count alike, as wins do: if each game pays 1, weight times reward sums to
    -losers * N / 2 over the rows that a role has lost. With `ties` above 0 both roles of a tied game that pays nobody
    get -ties, at weight 1, the mean weight of decided games if each role wins some. As released, a breach by default
    pays nobody, because the winner's messages did not win the game; so it costs the loser nothing either.
    """
    if flags.messages == ALL:
        return {role: Payment(1.0, weight) for role, weight in weights.items()}
    payments = {role: Payment(reward, weights[role]) for role, reward in result.rewards.items()}
    outcome = game.outcome(result.outcome)
    if flags.losers and outcome.winner is not None and len(payments) == 1:
        ((winner, won),) = payments.items()
        payments[game.other(winner)] = Payment(-flags.losers * won.reward, won.weight)
    if flags.ties and outcome.winner is None and not outcome.breach and not payments:
        payments = dict.fromkeys(game.roles, Payment(-flags.ties, 1.0))
    return payments


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
