"""Episodes to rows: each message's share of the game's reward, and the weights of rows by role. No torch, no files."""

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from tools.games import load_game, prompts
from tools.games.game import EPISODE_KEYS, Game, History, Verdict
from utils import BadRecordError, UserError, log_skipped

PromptFn = Callable[[History, str, float], str]  # (history before the message, task, max_turns) -> query
# Called with on_skip=, as `iter_records` takes it; yields (the record's place in its file, record).
Reader = Callable[..., Iterable[tuple[str, dict]]]
logger = logging.getLogger(__name__)


class JudgedGames:
    """Episodes, read twice: first to judge them and count the games that paid each role, then to make rows.

    An invalid episode raises BadRecordError or, with `skip_bad`, is skipped. An error in the game's own rules
    (`decide`, `rewards`) is raised as it is, after a log message that names the episode.
    """

    def __init__(self, game: Game, read: Reader, *, skip_bad: bool = False):
        self.game, self.skipped, self._read, self._skip_bad = game, 0, read, skip_bad
        self.paid = Counter(dict.fromkeys(game.roles, 0))  # games in which the role's reward is above 0
        self._verdicts: list[Verdict | None] = []  # None: skipped
        for where, record in read(on_skip=self._skip if skip_bad else None):
            try:
                game.check_episode(record)
            except ValueError as error:
                if not skip_bad:
                    raise BadRecordError(f"{where}: {error}") from None
                self._skip(f"{where}: {error}")
                self._verdicts.append(None)
                continue
            try:
                verdict = game.judge(*(record[key] for key in EPISODE_KEYS))
                self.paid.update(rewards_of(game, record, verdict).keys())
            except Exception:
                logger.error("%s: the rules of %s raised an error", where, game.title)
                raise
            self._verdicts.append(verdict)

    def _skip(self, message: str) -> None:
        log_skipped(message)
        self.skipped += 1

    def judged(self) -> Iterator[tuple[dict, Verdict]]:
        """The episodes, read once more, with their verdicts."""
        records = self._read(on_skip=(lambda message: None) if self._skip_bad else None)
        for (_, record), verdict in zip(records, self._verdicts, strict=True):
            if verdict:
                yield record, verdict

    def counts(self) -> dict[str, int]:
        """The number of episodes, of episodes with each outcome, and of skipped records."""
        found = Counter(verdict.outcome for verdict in self._verdicts if verdict)
        outcomes = {outcome.name: found[outcome.name] for outcome in self.game.outcomes}
        return {"episodes": found.total(), **outcomes, "skipped": self.skipped}

    def role_weights(self) -> dict[str, float]:
        """The weight of rows of each role: N / (2 N_role), so that both roles count alike.

        N_role games pay the role, and N is the sum of both. A role that no game pays has weight 0.
        """
        total = self.paid.total()
        return {role: total / (2 * number) if number else 0.0 for role, number in self.paid.items()}


def rewards_of(game: Game, episode: dict, verdict: Verdict) -> dict[str, float]:
    """The rewards above 0 that a game pays, by role. Raises ValueError for invalid rewards."""
    played = episode["history"][: verdict.length]
    rewards = game.rewards(episode["target_word"], played, verdict.outcome)
    for role, reward in rewards.items():
        if role not in game.roles or not (math.isfinite(reward) and reward >= 0):
            raise ValueError(f"{game.title} pays {reward!r} to {role!r}; rewards are finite, at least 0, to its roles")
    return {role: reward for role, reward in rewards.items() if reward > 0}


def assign_rewards(
    episodes: Iterable[dict],
    *,
    game: Game | None = None,
    decay_weight: float = 0.8,
    rng: random.Random,
    templates: prompts.Templates | None = None,
    losers: float = 0.0,
    ties: float = 0.0,
) -> list[dict]:
    """Return rows with query, target, reward, role and weight, in the order of episodes and messages.

    `game` None is Taboo. Queries are training prompts, drawn with `rng` from `templates`. `losers` and `ties` are as
    in `pay_of`. The episodes are not modified. Raises UserError for a coefficient outside its bounds, and for an
    invalid episode, naming its index.
    """
    check_pay(decay_weight, losers, ties)
    game = game or load_game()
    games = JudgedGames(game, in_memory(episodes))
    prompt_fn = partial(prompts.training_prompt, game, rng=rng, templates=templates)
    return list(paid_rows(games, decay_weight=decay_weight, prompt_fn=prompt_fn, losers=losers, ties=ties))


def in_memory(episodes: Iterable[dict]) -> Reader:
    """A reader of episodes in memory."""
    named = [(f"episode {index}", episode) for index, episode in enumerate(episodes)]
    return lambda on_skip=None: named


def paid_rows(
    games: JudgedGames, *, decay_weight: float, prompt_fn: PromptFn, losers: float = 0.0, ties: float = 0.0
) -> Iterator[dict]:
    """Yield a row for each message, up to the decisive one, of the roles that the game pays.

    A row's reward is the role's reward times the message's share.
    """
    weights = games.role_weights()
    for episode, verdict in games.judged():
        rewards = rewards_of(games.game, episode, verdict)
        pay = pay_of(games.game, verdict, rewards, weights, losers=losers, ties=ties)
        played = [message["role"] for message in episode["history"][: verdict.length]] if pay else []
        shares = {role: iter(message_shares(played.count(role), decay_weight)) for role in pay}
        for index, role in enumerate(played):
            if role in pay:
                reward, weight = pay[role]
                yield message_row(episode, index, prompt_fn, reward=reward * next(shares[role]), weight=weight)


def pay_of(
    game: Game,
    verdict: Verdict,
    rewards: Mapping[str, float],
    weights: Mapping[str, float],
    *,
    losers: float = 0.0,
    ties: float = 0.0,
) -> dict[str, tuple[float, float]]:
    """For each role whose messages become rows, its reward in this game and the weight of its rows.

    `rewards` come from `rewards_of`, `weights` from `role_weights`. With `losers` above 0, the loser is paid -losers
    times the winner's reward, at the winner's weight, so that both sides of a game weigh alike. With `ties` above 0,
    both roles of a tied game in which nobody is paid are paid -ties, at weight 1. A breach pays nobody.
    """
    outcome = game.outcome(verdict.outcome)
    pay = {role: (reward, weights[role]) for role, reward in rewards.items()}
    if losers and outcome.winner is not None and len(rewards) == 1:
        ((winner, reward),) = rewards.items()
        (loser,) = set(game.roles) - {winner}
        pay[loser] = (-losers * reward, weights[winner])
    if ties and outcome.winner is None and not outcome.breach and not rewards:
        pay = dict.fromkeys(game.roles, (-ties, 1.0))
    return pay


def message_row(episode: dict, index: int, prompt_fn: PromptFn, *, reward: float, weight: float) -> dict:
    message = episode["history"][index]
    return {
        "query": prompt_fn(episode["history"][:index], episode["target_word"], episode["max_turns"]),
        "target": message["content"].strip(),
        "reward": reward,
        "role": message["role"],
        "weight": weight,
    }


def message_shares(count: int, decay_weight: float) -> list[float]:
    """Shares of a reward of 1 among a role's messages k = 1..T: gamma^(T-k) / sum_j gamma^(T-j).

    Numerator and denominator are divided by gamma^(T-1), which gives the released numbers to the last digit.
    """
    shares = [(1 / decay_weight) ** k for k in range(count)]
    total = sum(shares)
    if not math.isfinite(total):
        raise UserError(f"decay_weight {decay_weight} is too small for a game with {count} messages of a role")
    return [share / total for share in shares]


def check_pay(decay_weight: float, losers: float, ties: float) -> None:
    """Raise UserError for a coefficient outside its bounds."""
    if not 0 < decay_weight <= 1:
        raise UserError(f"decay_weight is {decay_weight}; it must be above 0 and at most 1")
    for name, value in (("losers", losers), ("ties", ties)):
        if not 0 <= value < math.inf:
            raise UserError(f"{name} is {value}; it must be a finite number of at least 0")
