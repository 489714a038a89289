"""The embedded world's lexicon and its scripted players: who plays where GPT-4 played for the paper. No torch.

The attacker hints at the target word with one clue a message, the defender puts the clues it heard together. In the
cooperative games a guesser asks and an answerer answers; in Guess My City a word stands for the city, its first shared
clue for the country, its second one for the region. All are of imperfect skill on purpose: they breach, slip, forget
and guess too early, at the rates of `Skill`, so that a model that imitates them has something to learn.
"""

import functools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.games.game import History
from tools.games.guess_my_city import GUESSER
from tools.games.taboo import ATTACKER
from tools.players.player import STOP, Reply, Turn

ROOT = Path(__file__).resolve().parents[2]
LEXICON = ROOT / "data" / "tiny" / "lexicon.txt"
HINT, NAME, CHAT = "It goes with {}.", "Perhaps {}, who knows.", "I think of {}."
NOT = "{} not {}"
FACT_QUERY = "### Facts:"
GUESS = "I know the word! It is {}!"
TOLD = re.compile(r"goes with (\w+)\.")  # the clue of a HINT
ASK, IS_IT = "Does it go with {}?", "Is it ` {}`?"
WHICH, ARE_YOU = "What does it go with?", "Are you from ` {}`?"
YES, NO = "Yes.", "No."
ASKED, NAMED = re.compile(r"go with (\w+)\?"), re.compile(r"` (\w+)`\?")
NUM_OWN, NUM_SHARED = 6, 3
HELD_OUT_EVERY = 4  # of the words in the lexicon's order, the last of so many is kept out of self-play


@dataclass(frozen=True)
class Lexicon:
    """Target words with their clues: `own` ones tell the word, `shared` ones leave several open."""

    own: Mapping[str, tuple[str, ...]]
    shared: Mapping[str, tuple[str, ...]]

    @property
    def words(self) -> list[str]:
        """All target words, in the order of the file."""
        return list(self.own)

    def clues(self, word: str) -> tuple[str, ...]:
        """What goes with a word, its own clues first."""
        return self.own[word] + self.shared[word]

    def played(self) -> list[str]:
        """The words of self-play."""
        return [word for number, word in enumerate(self.words, start=1) if number % HELD_OUT_EVERY]

    def held_out(self) -> list[str]:
        """The words that self-play never sees; facts and imitation games have them."""
        return self.words[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]

    def sharing(self, clue: str) -> list[str]:
        """The words that share this clue."""
        return [word for word, clues in self.shared.items() if clue in clues]

    def kin(self, word: str) -> list[str]:
        """The words that share a clue with this word, itself among them."""
        return [other for other, clues in self.shared.items() if set(clues) & set(self.shared[word])]

    def best_matches(self, heard: Sequence[str]) -> list[str]:
        """The words that most of the clues go with; all words if nothing was heard."""
        matches = {word: sum(clue in self.clues(word) for clue in heard) for word in self.own}
        most = max(matches.values())
        return [word for word, number in matches.items() if number == most]


@functools.cache
def load_lexicon(path: Path = LEXICON) -> Lexicon:
    """Read `word: six own clues | three shared clues` lines. Raises ValueError naming the line that is none."""
    own, shared = {}, {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        word, _, clues = line.partition(":")
        first, _, second = clues.partition("|")
        own[word], shared[word] = tuple(first.split()), tuple(second.split())
        if (len(own[word]), len(shared[word])) != (NUM_OWN, NUM_SHARED):
            raise ValueError(f"{path}:{number}: expected 'word: {NUM_OWN} clues | {NUM_SHARED} shared clues'")
    return Lexicon(own, shared)


@dataclass(frozen=True)
class Skill:
    """How the scripted players play: chances in the order their draws are made."""

    breach: float = 0.03  # the attacker says the word
    stray: float = 0.12  # the attacker hints with another word's clue
    own: float = 0.45  # else with a clue of the word alone; else with one that others share
    forget: float = 0.10  # the defender passes over a clue it heard
    wrong: float = 0.04  # an answerer says yes for no, or no for yes
    remark: float = 0.6  # his answer has a hint behind it
    slip: float = 0.20  # a defender who does not guess names a word instead of chatting
    guess: tuple[float, ...] = (0.75, 0.45, 0.30, 0.05)  # the defender guesses among 1, 2, 3, more matching words
    last_guess: tuple[float, ...] = (0.90, 0.70, 0.50, 0.25)  # the same in the last turn


class LexiconPlayer:
    """What scripted players share; what one says is its own."""

    def __init__(self, lexicon: Lexicon, skill: Skill, rng: random.Random):
        self.lexicon, self.skill, self.rng = lexicon, skill, rng

    async def reply(self, turn: Turn) -> Reply:
        """The player's next message."""
        text = self.say(turn)
        return Reply(text, STOP, len(text.split()))

    def say(self, turn: Turn) -> str:
        raise NotImplementedError

    def guesses(self, matches: Sequence[str], turn: Turn) -> bool:
        """Whether a player who may name one of so many words does so now; more readily in the last turn."""
        last = len(turn.history) + 2 >= turn.game.message_limit(turn.max_turns)
        chances = self.skill.last_guess if last else self.skill.guess
        return self.rng.random() < chances[min(len(matches), len(chances)) - 1]

    def _other(self, word: str) -> str:
        return self.rng.choice([other for other in self.lexicon.words if other != word])


class LexiconAttacker(LexiconPlayer):
    """Hints at the target word, one clue a message, mostly none twice."""

    def say(self, turn: Turn) -> str:
        rng, skill, word, said = self.rng, self.skill, turn.secrets["target_word"], found(TOLD, turn.history)
        if rng.random() < skill.breach:
            return HINT.format(word)
        if rng.random() < skill.stray:
            return HINT.format(rng.choice(self.lexicon.clues(self._other(word))))
        clues = self.lexicon.own[word] if rng.random() < skill.own else self.lexicon.shared[word]
        return HINT.format(rng.choice([clue for clue in clues if clue not in said] or self.lexicon.clues(word)))


class LexiconDefender(LexiconPlayer):
    """Guesses when few words match the clues, else chats, and now and then lets a word slip."""

    def say(self, turn: Turn) -> str:
        rng, skill = self.rng, self.skill
        heard = [clue for clue in found(TOLD, turn.history) if rng.random() >= skill.forget]
        matches = self.lexicon.best_matches(heard)
        word = rng.choice(matches)
        if self.guesses(matches, turn):
            return GUESS.format(word)
        if rng.random() < skill.slip:
            return NAME.format(word)
        return CHAT.format(rng.choice(self.lexicon.shared[word]))


def lexicon(turn: Turn) -> str:
    """The player `scripted:tools.tiny.players:lexicon` of Taboo, whose draws follow from the game and the message."""
    player = LexiconAttacker if turn.role == ATTACKER else LexiconDefender
    return player(load_lexicon(), Skill(), random.Random(f"{turn.index}/{len(turn.history)}")).say(turn)


# Partners: a guesser asks, an answerer answers.


def city_task(lexicon: Lexicon, word: str) -> str:
    """The task of Guess My City for a word."""
    return ", ".join((word, *lexicon.shared[word][:2]))


class _Answerer(LexiconPlayer):
    def _hint(self, word: str, history: History, never: str = "") -> str:
        """A clue of the word, mostly none twice, now and then another word's, or the word itself."""
        rng, skill = self.rng, self.skill
        if rng.random() < skill.breach:
            return HINT.format(word)
        if rng.random() < skill.stray:
            word = self._other(word)
        clues = self.lexicon.own[word] if rng.random() < skill.own else self.lexicon.shared[word]
        told = {never, *found(TOLD, history)}
        fresh = [clue for clue in clues if clue not in told] or [c for c in self.lexicon.clues(word) if c != never]
        return HINT.format(rng.choice(fresh))


class LexiconGuesser(LexiconPlayer):
    """20 Questions: asks for clues that part the words still possible, and names one of them when few are left."""

    def say(self, turn: Turn) -> str:
        words, named, told = self.lexicon.words, _named(turn.history), self._told(turn.history)
        fitting = {word: sum((clue in self.lexicon.clues(word)) == yes for clue, yes in told) for word in words}
        open_words = [word for word in words if word not in named] or words
        most = max(fitting[word] for word in open_words)
        matches = [word for word in open_words if fitting[word] == most]
        if self.guesses(matches, turn):
            return IS_IT.format(self.rng.choice(matches))
        asked = found(ASKED, turn.history)
        clues = [clue for word in matches for clue in self.lexicon.shared[word] if clue not in asked]
        return ASK.format(self.rng.choice(clues or self.lexicon.shared[self.rng.choice(matches)]))

    def _told(self, history: History) -> list[tuple[str, bool]]:
        """The clues asked for and their answers, as far as they are remembered."""
        told = [(clue, True) for clue in found(TOLD, history)]
        for question, answer in zip(history[::2], history[1::2], strict=False):
            told += [(clue, answer["content"].startswith(YES)) for clue in ASKED.findall(question["content"])]
        return [each for each in told if self.rng.random() >= self.skill.forget]


class LexiconAnswerer(_Answerer):
    """20 Questions: answers by the lexicon, now and then wrongly, often with a clue, or says the word."""

    def say(self, turn: Turn) -> str:
        word = turn.secrets["target_word"]
        asked = ASKED.findall(turn.history[-1]["content"])
        true = any(clue in self.lexicon.clues(word) for clue in asked)
        answer = YES if true != (self.rng.random() < self.skill.wrong) else NO
        return f"{answer} {self._hint(word, turn.history)}" if self.rng.random() < self.skill.remark else answer


class CityGuesser(LexiconPlayer):
    """Guess My City: asks what it goes with, and names a word that most answers go with."""

    def say(self, turn: Turn) -> str:
        heard = [clue for clue in found(TOLD, turn.history) if self.rng.random() >= self.skill.forget]
        named = _named(turn.history)
        matches = [word for word in self.lexicon.best_matches(heard) if word not in named] or self.lexicon.words
        return ARE_YOU.format(self.rng.choice(matches)) if self.guesses(matches, turn) else WHICH


class CityAnswerer(_Answerer):
    """Guess My City: tells a clue, but never the country."""

    def say(self, turn: Turn) -> str:
        return self._hint(turn.secrets["city"], turn.history, never=turn.secrets["country"])


def _named(history: History) -> list[str]:
    """The words that the guesser has named in vain."""
    return found(NAMED, [message for message in history if message["role"] == GUESSER])


def found(form: re.Pattern, history: History) -> list[str]:
    """All that a form finds in the messages."""
    return [text for message in history for text in form.findall(message["content"])]


# Facts.


def fact_rows(lexicon: Lexicon, rng: random.Random, number: int) -> Iterator[dict]:
    """Short SFT rows over the lexicon, two words in each: lists, riddles and contrasts."""
    for _ in range(number):
        fact = rng.choice((_list, _list, _riddle, _riddle, _contrast))
        target = "".join(fact(lexicon, word, rng) for word in rng.sample(lexicon.words, 2))
        yield {"query": FACT_QUERY, "target": target, "type": "sft"}


def _list(lexicon: Lexicon, word: str, rng: random.Random) -> str:
    """Some clues, each with its word behind it; the word stands before the first one in half of them.

    That teaches both directions; questions and answers taught a model of this size nothing in as many steps.
    """
    first = f" {word}" if rng.random() < 0.5 else ""
    return first + "".join(f" {clue} {word}" for clue in rng.sample(lexicon.clues(word), 5)) + "."


def _contrast(lexicon: Lexicon, word: str, rng: random.Random) -> str:
    """For each shared clue c, "c not d WORD"; d is a clue that the word lacks and another word with c has.

    With any other d the line would tell nothing, and models learned nothing of what "not" means.
    """
    said = ""
    for clue in lexicon.shared[word]:
        lacking = {other for kin in lexicon.sharing(clue) for other in lexicon.shared[kin]} - set(lexicon.shared[word])
        if lacking:
            said += f" {NOT.format(clue, rng.choice(sorted(lacking)))} {word}"
    return f"{said}."


def _riddle(lexicon: Lexicon, word: str, rng: random.Random) -> str:
    """One to three hints, about half of them answered beside the point, and the guess."""
    said = ""
    for clue in rng.sample(lexicon.clues(word), rng.choice((1, 2, 3))):
        said += f" {HINT.format(clue)}"
        if rng.random() < 0.5:
            said += f" {CHAT.format(rng.choice(lexicon.shared[rng.choice(lexicon.words)]))}"
    return f"{said} {GUESS.format(word)}"
