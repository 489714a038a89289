"""What the report says of a set of games: counts over all of them, and a bounded sample to be read.

Memory does not grow with the number of games. No torch, no files.
"""

import math
import random
from collections.abc import Mapping
from itertools import zip_longest
from statistics import NormalDist

from tools.games.game import GUESS, SECRET, Game, Verdict
from tools.matches.stats import CONFIDENCE, Match, wilson
from tools.players.player import LENGTH
from tools.selfplay.counts import GameCounts

QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
MOST_CHARACTERS = 4000  # of a message that are shown
Estimate = tuple[float, float | None, float | None]  # and its 95% interval, if it has one


# --- counting ------------------------------------------------------------------------------------------------------


class GameSample(GameCounts):
    """Games as they come: counts of all, and of each outcome a uniform sample of at most `size` games."""

    def __init__(self, game: Game, size: int, *, seed: int = 0):
        super().__init__(game)
        self.size, self.rng = size, random.Random(seed)
        self.kept: dict[str, list[tuple[int, Mapping, Verdict]]] = {outcome.name: [] for outcome in game.outcomes}

    def add(self, episode: Mapping) -> None:
        """Count one game. Raises ValueError for an episode that is none, or of another game."""
        verdict = stored_or_judged(self.game, episode)
        self._keep(episode, verdict)
        super().add(episode, verdict)

    def share(self, outcome: str) -> Estimate | None:
        """The share of the games that ended so."""
        return share_estimate(self.outcomes[outcome], self.games)

    def length(self, outcome: str | None = None) -> Estimate | None:
        """Mean number of messages up to the decisive one, of the games that ended so or of all."""
        counts = (self.outcomes, self.lengths, self.squared_lengths)
        return mean_estimate(*(of[outcome] if outcome else of.total() for of in counts))

    def sampled(self) -> list[dict]:
        """At most `size` games in the order of the file, as the page shows them; all outcomes as far as they go."""
        for games in self.kept.values():
            self.rng.shuffle(games)  # the first places of a reservoir favour early games
        in_turn = [game for turn in zip_longest(*self.kept.values()) for game in turn if game]
        chosen = sorted(in_turn[: self.size], key=lambda kept: kept[0])
        return [shown_game(self.game, *kept) for kept in chosen]

    def _keep(self, episode: Mapping, verdict: Verdict) -> None:
        """Reservoir sampling: each of the n games of an outcome stays with probability size / n."""
        kept, seen = self.kept[verdict.outcome], self.outcomes[verdict.outcome]
        place = seen if seen < self.size else self.rng.randrange(seen + 1)
        if place < self.size:
            kept[place : place + 1] = [(self.games, episode, verdict)]


def stored_or_judged(game: Game, episode: Mapping) -> Verdict:
    """How a game ended: as the episode says or, where it does not, by the rules. ValueError: it is no game."""
    game.check_episode(episode)
    history, outcome, length = episode["history"], episode.get("outcome"), episode.get("length")
    known = any(outcome == one.name for one in game.outcomes)
    if known and type(length) is int and 0 <= length <= len(history):
        return Verdict(outcome, length)
    return game.judge(history, episode["target_word"], episode["max_turns"])


def share_estimate(count: int, total: int) -> Estimate | None:
    """A share with Wilson's interval, as if observations were independent."""
    return (count / total, *wilson(count / total, total, QUANTILE)) if total else None


def mean_estimate(count: int, total: float, squares: float) -> Estimate | None:
    """A mean with its normal interval (from two observations on), from their sum and the sum of their squares."""
    if not count:
        return None
    mean = total / count
    if count == 1:
        return mean, None, None
    variance = max(0.0, squares - count * mean**2) / (count - 1)
    half = QUANTILE * math.sqrt(variance / count)
    return mean, mean - half, mean + half


# --- games to read -------------------------------------------------------------------------------------------------


def shown_game(game: Game, number: int, episode: Mapping, verdict: Verdict) -> dict:
    """A game as the page takes it; `number` is its place in the file, from 0."""
    word, history, replies = episode["target_word"], episode["history"], episode.get("replies") or ()
    messages = [
        {
            "role": message["role"],
            "parts": marked(game, word, message["content"][:MOST_CHARACTERS]),
            "cut_off": reply.get("finish_reason") == LENGTH,
            "hidden": max(0, len(message["content"]) - MOST_CHARACTERS),
        }
        for message, reply in zip_longest(history, replies[: len(history)], fillvalue={})
    ]
    return {
        "number": number,
        "word": word,
        "outcome": verdict.outcome,
        "length": verdict.length,
        "max_turns": episode["max_turns"],
        "messages": messages,
        "labels": {label: str(episode[label]) for label in Match.keys(game) if label in episode},
    }


def marked(game: Game, task: str, text: str) -> list[list[str]]:
    """The text in (kinds, text) pieces by the game's marks: "", SECRET, GUESS, or both with a blank between."""
    marks = game.marks(task, text)
    edges = sorted({0, len(text), *(edge for _, *span in marks for edge in span)})
    return [
        [" ".join(kind for kind in (SECRET, GUESS) if kind in _kinds(marks, start)), text[start:end]]
        for start, end in zip(edges, edges[1:], strict=False)
    ]


def _kinds(marks: list[tuple[str, int, int]], place: int) -> set[str]:
    return {kind for kind, start, end in marks if start <= place < end}
