"""Scripted partners of the embedded world: who plays the cooperative games about the words of the lexicon. No torch.

The guesser asks, the answerer answers, as imperfectly as the players of Taboo. In Guess My City a word stands for the
city, its first shared clue for the country, its second one for the region.
"""

import random
import re
from collections.abc import Sequence

from tools.games.game import History
from tools.games.guess_my_city import GUESSER
from tools.players.player import Reply, Turn
from tools.tiny.players import HINT, Lexicon, Skill, say

ASK, IS_IT = "Does it go with {}?", "Is it ` {}`?"
WHICH, ARE_YOU = "What does it go with?", "Are you from ` {}`?"
YES, NO = "Yes.", "No."
ASKED, NAMED, TOLD = (re.compile(text) for text in (r"go with (\w+)\?", r"` (\w+)`\?", r"goes with (\w+)\."))


def city_task(lexicon: Lexicon, word: str) -> str:
    """The task of Guess My City for a word."""
    return ", ".join((word, *lexicon.shared[word][:2]))


class _Partner:
    def __init__(self, lexicon: Lexicon, skill: Skill, rng: random.Random):
        self.lexicon, self.skill, self.rng = lexicon, skill, rng

    def _guesses(self, matches: Sequence[str], turn: Turn) -> bool:
        """Whether a guesser names one of so many words now; more readily with the last question."""
        last = len(turn.history) + 2 >= turn.game.message_limit(turn.max_turns)
        chances = self.skill.last_guess if last else self.skill.guess
        return self.rng.random() < chances[min(len(matches), len(chances)) - 1]

    def _hint(self, word: str, history: History, never: str = "") -> str:
        """A clue of the word, mostly none twice, now and then another word's, or the word itself."""
        rng, skill = self.rng, self.skill
        if rng.random() < skill.breach:
            return HINT.format(word)
        if rng.random() < skill.stray:
            word = rng.choice([other for other in self.lexicon.words if other != word])
        clues = self.lexicon.own[word] if rng.random() < skill.own else self.lexicon.shared[word]
        told = {never, *_found(TOLD, history)}
        fresh = [clue for clue in clues if clue not in told] or [c for c in self.lexicon.clues(word) if c != never]
        return HINT.format(rng.choice(fresh))


class LexiconGuesser(_Partner):
    """20 Questions: asks for clues that part the words still possible, and names one of them when few are left."""

    async def reply(self, turn: Turn) -> Reply:
        """A clue to ask for, or a word."""
        words, named, told = self.lexicon.words, _named(turn.history), self._told(turn.history)
        fitting = {word: sum((clue in self.lexicon.clues(word)) == yes for clue, yes in told) for word in words}
        open_words = [word for word in words if word not in named] or words
        most = max(fitting[word] for word in open_words)
        matches = [word for word in open_words if fitting[word] == most]
        if self._guesses(matches, turn):
            return say(IS_IT.format(self.rng.choice(matches)))
        asked = set(_found(ASKED, turn.history))
        clues = [clue for word in matches for clue in self.lexicon.shared[word] if clue not in asked]
        return say(ASK.format(self.rng.choice(clues or self.lexicon.shared[self.rng.choice(matches)])))

    def _told(self, history: History) -> list[tuple[str, bool]]:
        """The clues asked for and their answers, as far as they are remembered."""
        pairs = zip(history[::2], history[1::2], strict=False)
        told = [(clue, True) for clue in _found(TOLD, history)]
        for question, answer in pairs:
            told += [(clue, answer["content"].startswith(YES)) for clue in ASKED.findall(question["content"])]
        return [each for each in told if self.rng.random() >= self.skill.forget]


class LexiconAnswerer(_Partner):
    """20 Questions: answers by the lexicon, now and then wrongly, often with a clue, or says the word."""

    async def reply(self, turn: Turn) -> Reply:
        """Yes or no, and perhaps a remark."""
        word = turn.secrets["target_word"]
        asked = ASKED.findall(turn.history[-1]["content"])
        true = any(clue in self.lexicon.clues(word) for clue in asked)
        answer = YES if true != (self.rng.random() < self.skill.wrong) else NO
        return say(f"{answer} {self._hint(word, turn.history)}" if self.rng.random() < self.skill.remark else answer)


class CityGuesser(_Partner):
    """Guess My City: asks what it goes with, and names a word that most answers go with."""

    async def reply(self, turn: Turn) -> Reply:
        """A question, or a word."""
        heard = [clue for clue in _found(TOLD, turn.history) if self.rng.random() >= self.skill.forget]
        named = _named(turn.history)
        matches = [word for word in self.lexicon.best_matches(heard) if word not in named] or self.lexicon.words
        return say(ARE_YOU.format(self.rng.choice(matches)) if self._guesses(matches, turn) else WHICH)


class CityAnswerer(_Partner):
    """Guess My City: tells a clue, but never the country."""

    async def reply(self, turn: Turn) -> Reply:
        """A clue."""
        return say(self._hint(turn.secrets["city"], turn.history, never=turn.secrets["country"]))


def _found(form: re.Pattern, history: History) -> list[str]:
    return [found for message in history for found in form.findall(message["content"])]


def _named(history: History) -> set[str]:
    """The words that the guesser has named in vain."""
    return {found for each in history if each["role"] == GUESSER for found in NAMED.findall(each["content"])}
