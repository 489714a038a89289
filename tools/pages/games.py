"""What the report says of a set of games: counts over all of them, and a bounded sample to be read.

Memory does not grow with the number of games. No torch, no files.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import zip_longest
from statistics import NormalDist

from tools.games import taboo
from tools.matches.stats import CONFIDENCE, Match, wilson
from tools.players.player import LENGTH

QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
EMPTY, CUT_OFF = "empty", "cut off"
MOST_CHARACTERS = 4000  # of a message that are shown
PLAIN, WORD, GUESS, WORD_IN_GUESS = "", "word", "guess", "word guess"  # kinds of text; the classes of the page
GUESS_SENTENCE = re.compile(taboo.GUESS.pattern + r"[^\n]*?(?:[.!?](?=\s|$)|$)", re.IGNORECASE | re.MULTILINE)
Estimate = tuple[float, float | None, float | None]  # and its 95% interval, if it has one


# --- counting ------------------------------------------------------------------------------------------------------


class GameTally:
    """Games as they come: counts of all, and of each outcome a uniform sample of at most `sample` games.

    Raises ValueError for an episode that is no game. `match` is how episodes without a stored outcome are judged.
    """

    def __init__(self, sample: int, *, match: str = taboo.SUBSTRING, seed: int = 0):
        self.sample, self.match, self.rng = sample, match, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.lengths: Counter[str] = Counter()  # by outcome, sums of messages up to the decisive one
        self.squared_lengths: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()  # by role
        self.faults: Counter[tuple[str, str]] = Counter()  # by role, replies that are empty or cut off
        self.tells_cut_off = False  # whether the games say how replies ended
        self.kept: dict[str, list[tuple[int, Mapping, taboo.Verdict]]] = {outcome: [] for outcome in taboo.OUTCOMES}

    @property
    def games(self) -> int:
        return self.outcomes.total()

    def add(self, episode: Mapping) -> None:
        """Count one game."""
        outcome, length = verdict = stored_or_judged(episode, self.match)
        self._keep(episode, verdict)
        self.outcomes[outcome] += 1
        self.lengths[outcome] += length
        self.squared_lengths[outcome] += length**2
        self.tells_cut_off |= bool(episode.get("replies"))
        for message, cut_off in messages_of(episode):
            role = message["role"]
            self.messages[role] += 1
            self.faults[role, EMPTY] += not message["content"].strip()
            self.faults[role, CUT_OFF] += cut_off

    def share(self, outcome: str) -> Estimate | None:
        """The share of the games that ended so."""
        return share_estimate(self.outcomes[outcome], self.games)

    def fault_share(self, role: str, fault: str) -> Estimate | None:
        """The share of a role's messages that are empty, or cut off."""
        return share_estimate(self.faults[role, fault], self.messages[role])

    def mean_length(self, outcome: str | None = None) -> Estimate | None:
        """Messages up to the decisive one, of the games that ended so or of all."""
        of = (outcome,) if outcome else taboo.OUTCOMES
        games, total, squares = (
            sum(counts[name] for name in of) for counts in (self.outcomes, self.lengths, self.squared_lengths)
        )
        return mean_estimate(games, total, squares)

    def sampled(self) -> list[dict]:
        """At most `sample` games in the order of the file, as the page shows them; all outcomes as far as they go."""
        for games in self.kept.values():
            self.rng.shuffle(games)  # the first places of a reservoir favour early games
        in_turn = [game for turn in zip_longest(*self.kept.values()) for game in turn if game]
        chosen = sorted(in_turn[: self.sample], key=lambda game: game[0])
        return [shown_game(number, episode, verdict) for number, episode, verdict in chosen]

    def _keep(self, episode: Mapping, verdict: taboo.Verdict) -> None:
        """Reservoir sampling: each of the n games of an outcome stays with probability sample / n."""
        kept, seen = self.kept[verdict.outcome], self.outcomes[verdict.outcome]
        place = seen if seen < self.sample else self.rng.randrange(seen + 1)
        if place < self.sample:
            kept[place : place + 1] = [(self.games, episode, verdict)]


def stored_or_judged(episode: Mapping, match: str) -> taboo.Verdict:
    """How a game ended: as the episode says or, where it does not, by the rules. ValueError: it is no game."""
    history, outcome, length = episode.get("history"), episode.get("outcome"), episode.get("length")
    taboo.check_game(history, episode.get("target_word"), episode.get("max_turns"))
    if outcome in taboo.OUTCOMES and type(length) is int and 0 <= length <= len(history):
        return taboo.Verdict(outcome, length)
    return taboo.judge(history, episode["target_word"], episode["max_turns"], match=match)


def messages_of(episode: Mapping) -> Iterator[tuple[Mapping, bool]]:
    """Each message, and whether it is known to have been cut off at the limit of tokens."""
    replies = episode.get("replies") or ()
    for message, reply in zip_longest(episode["history"], replies[: len(episode["history"])], fillvalue={}):
        yield message, reply.get("finish_reason") == LENGTH


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


def shown_game(number: int, episode: Mapping, verdict: taboo.Verdict) -> dict:
    """A game as the page takes it; `number` is its place in the file, from 0."""
    messages = [
        {
            "role": message["role"],
            "parts": marked(message["content"][:MOST_CHARACTERS], episode["target_word"]),
            "cut_off": cut_off,
            "hidden": max(0, len(message["content"]) - MOST_CHARACTERS),
        }
        for message, cut_off in messages_of(episode)
    ]
    return {
        "number": number,
        "word": episode["target_word"],
        "outcome": verdict.outcome,
        "length": verdict.length,
        "max_turns": episode["max_turns"],
        "messages": messages,
        "labels": {label: str(episode[label]) for label in Match._fields if label in episode},
    }


def marked(text: str, word: str) -> list[list[str]]:
    """The text in (kind, text) pieces: the target word in any form, sentences of a guess, and the rest."""
    words = _spans(_forms(word), text)
    guesses = _spans(GUESS_SENTENCE, text)
    edges = sorted({0, len(text), *(edge for span in (*words, *guesses) for edge in span)})
    kinds = {(False, False): PLAIN, (True, False): WORD, (False, True): GUESS, (True, True): WORD_IN_GUESS}
    return [
        [kinds[_within(start, words), _within(start, guesses)], text[start:end]]
        for start, end in zip(edges, edges[1:], strict=False)
    ]


@lru_cache(maxsize=1 << 12)
def _forms(word: str) -> re.Pattern:
    """Any derivative of the word: the first four, since the others are these in quotes; the longest wins."""
    forms = sorted(taboo.derivatives(word)[:4], key=len, reverse=True)
    return re.compile("|".join(map(re.escape, forms)), re.IGNORECASE)


def _spans(pattern: re.Pattern, text: str) -> list[tuple[int, int]]:
    return [match.span() for match in pattern.finditer(text)]


def _within(place: int, spans: list[tuple[int, int]]) -> bool:
    return any(start <= place < end for start, end in spans)
