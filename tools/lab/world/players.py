"""The toy world's lexicon and scripted players, which stand in for the paper's GPT-4. No torch.

The players are imperfect on purpose: they break the rules, slip, forget and guess too early, at the rates of `Skill`,
so that a model that imitates them can still improve.
"""

import functools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.common.files import ROOT
from tools.games.game import History
from tools.games.taboo import ATTACKER
from tools.players.player import Turn

LEXICON = ROOT / "data" / "tiny" / "lexicon.txt"
HINT = "It goes with {}."
NAME = "Perhaps {}, who knows."  # a slip: names a word, but the judge does not take it for a guess
CHAT = "I think of {}."
FACT_QUERY = "### Facts:"
GUESS = "I know the word! It is {}!"  # the judge takes this for a guess
HINTED = re.compile(r"goes with (\w+)\.")  # the clue of a HINT
HELD_OUT_EVERY = 4  # every fourth word of the lexicon is kept out of self-play


@dataclass(frozen=True)
class Lexicon:
    """Target words with their clues: `own` clues identify a word, `shared` ones fit several."""

    own: Mapping[str, tuple[str, ...]]
    shared: Mapping[str, tuple[str, ...]]

    @property
    def words(self) -> list[str]:
        return list(self.own)

    def clues(self, word: str) -> tuple[str, ...]:
        return self.own[word] + self.shared[word]

    def played(self) -> list[str]:
        return [word for number, word in enumerate(self.words, start=1) if number % HELD_OUT_EVERY]

    def held_out(self) -> list[str]:
        """Words that self-play never sees, the same for all seeds.

        Facts and imitation games do contain them, because a pretrained model would know all words.
        """
        return self.words[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]

    def best_matches(self, heard: Sequence[str]) -> list[str]:
        """The words that match the most of these clues; all words if there are none."""
        matches = {word: sum(clue in self.clues(word) for clue in heard) for word in self.own}
        most = max(matches.values())
        return [word for word, number in matches.items() if number == most]


@functools.cache
def load_lexicon() -> Lexicon:
    """Read `word: six own clues | three shared clues` lines."""
    own = {}
    shared = {}
    for line in LEXICON.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            word, clues = line.split(":")
            own_clues, shared_clues = clues.split("|")
            own[word] = tuple(own_clues.split())
            shared[word] = tuple(shared_clues.split())
    return Lexicon(own, shared)


@dataclass(frozen=True)
class Skill:
    """How the scripted players play: probabilities, in the order in which they are drawn."""

    breach: float = 0.03  # the attacker says the word
    stray: float = 0.12  # otherwise, the attacker hints with another word's clue
    own: float = 0.45  # otherwise, with one of the word's own clues rather than a shared one
    forget: float = 0.10  # the defender ignores a clue it heard
    slip: float = 0.20  # a defender who does not guess names a word instead of chatting
    guess: tuple[float, ...] = (0.75, 0.45, 0.30, 0.05)  # the defender guesses, by matching words: 1, 2, 3, more
    last_guess: tuple[float, ...] = (0.90, 0.70, 0.50, 0.25)  # the same in the last turn


def attack(turn: Turn, lexicon: Lexicon, skill: Skill, rng: random.Random) -> str:
    """The attacker's next message: a hint with one clue, avoiding clues already used."""
    word = turn.secrets["target_word"]
    if rng.random() < skill.breach:
        return HINT.format(word)
    if rng.random() < skill.stray:
        other = rng.choice([other for other in lexicon.words if other != word])
        return HINT.format(rng.choice(lexicon.clues(other)))
    clues = lexicon.own[word] if rng.random() < skill.own else lexicon.shared[word]
    new = [clue for clue in clues if clue not in hinted_clues(turn.history)]
    return HINT.format(rng.choice(new or lexicon.clues(word)))


def defend(turn: Turn, lexicon: Lexicon, skill: Skill, rng: random.Random) -> str:
    """The defender's next message: likely a guess if few words match the clues, otherwise chat or a slip."""
    heard = [clue for clue in hinted_clues(turn.history) if rng.random() >= skill.forget]
    matches = lexicon.best_matches(heard)
    word = rng.choice(matches)
    last = len(turn.history) + 2 >= turn.game.message_limit(turn.max_turns)
    chances = skill.last_guess if last else skill.guess
    if rng.random() < chances[min(len(matches), len(chances)) - 1]:
        return GUESS.format(word)
    if rng.random() < skill.slip:
        return NAME.format(word)
    return CHAT.format(rng.choice(lexicon.shared[word]))


def speak(turn: Turn, lexicon: Lexicon, skill: Skill, rng: random.Random) -> str:
    if turn.role == ATTACKER:
        return attack(turn, lexicon, skill, rng)
    return defend(turn, lexicon, skill, rng)


def lexicon(turn: Turn) -> str:
    """The player `scripted:tools.lab.world.players:lexicon`, seeded by the game's and the message's index."""
    return speak(turn, load_lexicon(), Skill(), random.Random(f"{turn.index}/{len(turn.history)}"))


def hinted_clues(history: History) -> list[str]:
    return [clue for message in history for clue in HINTED.findall(message["content"])]


# Facts.


def fact_rows(lexicon: Lexicon, rng: random.Random, number: int) -> Iterator[dict]:
    """Short SFT rows about the lexicon, each about two words: lists, riddles and contrasts."""
    for _ in range(number):
        fact = rng.choice((_list, _list, _riddle, _riddle, _contrast))
        target = "".join(fact(lexicon, word, rng) for word in rng.sample(lexicon.words, 2))
        yield {"query": FACT_QUERY, "target": target, "type": "sft"}


def _list(lexicon: Lexicon, word: str, rng: random.Random) -> str:
    """Five clues, each followed by the word, which in half of the lists also comes first.

    That teaches both directions. Questions and answers taught a model of this size nothing in as many steps.
    """
    first = f" {word}" if rng.random() < 0.5 else ""
    return first + "".join(f" {clue} {word}" for clue in rng.sample(lexicon.clues(word), 5)) + "."


def _contrast(lexicon: Lexicon, word: str, rng: random.Random) -> str:
    """For each shared clue c, "c not d WORD", where d is a clue that WORD lacks but another word with c has.

    Any other d would carry no information, and models did not learn what "not" means.
    """
    text = ""
    for clue in lexicon.shared[word]:
        others: set[str] = set()  # clues of words that have this one, too
        for clues in lexicon.shared.values():
            if clue in clues:
                others.update(clues)
        if lacking := sorted(others - set(lexicon.shared[word])):
            text += f" {clue} not {rng.choice(lacking)} {word}"
    return f"{text}."


def _riddle(lexicon: Lexicon, word: str, rng: random.Random) -> str:
    """One to three hints, about half of them followed by irrelevant chat, and the guess."""
    text = ""
    for clue in rng.sample(lexicon.clues(word), rng.choice((1, 2, 3))):
        text += f" {HINT.format(clue)}"
        if rng.random() < 0.5:
            text += f" {CHAT.format(rng.choice(lexicon.shared[rng.choice(lexicon.words)]))}"
    return f"{text} {GUESS.format(word)}"
