"""What the report says of a set of games: counts over all of them, and a bounded sample to be read.

Memory does not grow with the number of games. No torch, no files.
"""

import random
import re
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from statistics import NormalDist

from tools.games.game import GUESS, SECRET, Game, Verdict
from tools.matches.stats import CONFIDENCE, Match, wilson
from tools.players.player import LENGTH
from tools.selfplay.counts import GameCounts

QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
MOST_CHARACTERS = 4000  # of a message that are shown
# Control characters, marks that turn the direction of writing around, and halves of characters.
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
Estimate = tuple[float, float | None, float | None]  # and its 95% interval, if it has one


def visible(text: str) -> str:
    """The text with all that a browser would not show, or would let change what it shows, written as escapes."""
    return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class GameSample(GameCounts):
    """Games as they come: counts of all, and of each outcome a uniform sample of at most `size` games."""

    def __init__(self, game: Game, size: int, *, seed: int = 0):
        super().__init__(game)
        self.size, self.rng = size, random.Random(seed)
        self.points: Counter[str] = Counter()  # by role, as in a match
        self.kept: dict[str, list[tuple[int, Mapping, Verdict]]] = {outcome.name: [] for outcome in game.outcomes}

    def add(self, episode: Mapping) -> None:
        """Count one game. Raises ValueError for an episode that is none, or of another game."""
        verdict = stored_or_judged(self.game, episode)
        self._keep(episode, verdict)
        super().add(episode, verdict)
        played = episode["history"][: verdict.length]
        points = self.game.checked_points(episode["target_word"], played, verdict.outcome)
        self.points.update(dict(zip(self.game.roles, points, strict=True)))

    def share(self, outcome: str) -> Estimate | None:
        """The share of the games that ended so."""
        return share_estimate(self.outcomes[outcome], self.games)

    def mean_points(self, role: str) -> float | None:
        """What the role gained in a game; None without games."""
        return self.points[role] / self.games if self.games else None

    def cut_off_share(self) -> Estimate | None:
        """The share of messages that ended at the token limit; None where the games do not tell."""
        return share_estimate(self.cut_off_replies.total(), self.messages.total()) if self.tells_replies else None

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
    if not total:
        return None
    low, high = wilson(count / total, total, QUANTILE)
    return count / total, low, high


def shown_game(game: Game, number: int, episode: Mapping, verdict: Verdict) -> dict:
    """A game as the page takes it; `number` is its place in the file, from 0."""
    word, history, replies = episode["target_word"], episode["history"], episode.get("replies") or ()
    messages = [
        {
            "role": message["role"],
            "parts": marked(game, word, message["content"]),
            "cut_off": reply.get("finish_reason") == LENGTH,
        }
        for message, reply in zip_longest(history, replies[: len(history)], fillvalue={})
    ]
    return {
        "number": number,
        "word": visible(word),
        "outcome": verdict.outcome,
        "length": verdict.length,
        "messages": messages,
        "labels": {
            label: visible(str(episode[label]))
            for label in Match.keys(game)
            if isinstance(episode.get(label), (str, int))
        },
    }


def marked(game: Game, task: str, text: str) -> list[list[str]]:
    """The text in (kinds, text) pieces by the game's marks: "", SECRET, GUESS, or both with a blank between."""
    shown, marks = text[:MOST_CHARACTERS], game.marks(task, text[:MOST_CHARACTERS])
    edges = sorted({0, len(shown), *(edge for _, *span in marks for edge in span)})
    pieces = []
    for start, end in zip(edges, edges[1:], strict=False):
        kinds = {kind for kind, first, last in marks if first <= start < last}
        pieces.append([" ".join(kind for kind in (SECRET, GUESS) if kind in kinds), visible(shown[start:end])])
    if len(text) > len(shown):
        pieces.append(["", f" … and {len(text) - len(shown):,} more characters"])
    return pieces
