"""How a player behaves in games of the toy world: counts from stored messages, and measures derived from them.

All games are judged again with Taboo's default options, so that points are comparable between arms that played under
different ones. Messages after the decisive one do not count.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tools.games.taboo import ATTACKER, ATTACKER_WINS, DEFENDER, DEFENDER_WINS, GUESS_START, Taboo
from tools.lab.world.players import HINTED, Lexicon
from tools.selfplay.rewards import game_result

GAME = Taboo()
CLEAR = "clear hints"  # with a clue unique to the word
AMBIGUOUS = "ambiguous hints"  # with a clue that the word shares with others
FALSE = "false hints"  # with another word's clue, or with none
HINTS = (CLEAR, AMBIGUOUS, FALSE)
BY_GUESS = "wins by a wrong guess"  # of the attacker
BY_WORD = "wins by the word said"

Counts = dict[str, float]


def count_games(episodes: Iterable[Mapping], lexicon: Lexicon, player: str | None = None) -> Counts:
    """Count what a player does in a match or, without `player`, what both roles do in self-play.

    A rule violation does not count as a hint. A guess ends its game, so guesses and right guesses are counted by turn:
    "guesses in turn 1" and so on.
    """
    counts = Counter[str](dict.fromkeys(("games", "messages", *HINTS, BY_GUESS, BY_WORD), 0))
    for episode in episodes:
        roles = [role for role in GAME.roles if player is None or episode[role] == player]
        if not roles:
            continue
        result = game_result(GAME, episode)
        history = episode["history"][: result.length]
        counts.update(games=1, messages=result.length)
        for role, points in zip(GAME.roles, GAME.points(episode["target_word"], history, result.outcome), strict=True):
            if role in roles:
                counts.update({f"games as {role}": 1, f"points as {role}": points})
        last = history[-1]
        guessed = last["role"] == DEFENDER and GUESS_START.search(last["content"].lower()) is not None
        if ATTACKER in roles:
            hints = history[:-1] if GAME.outcome(result.outcome).breach else history
            counts.update(kinds_of_hints(hints, episode["target_word"], lexicon))
            if result.outcome == ATTACKER_WINS:
                counts[BY_GUESS if guessed else BY_WORD] += 1
        if DEFENDER in roles and guessed:
            turn = result.length // 2
            counts[f"guesses in turn {turn}"] += 1
            counts[f"right guesses in turn {turn}"] += result.outcome == DEFENDER_WINS
    return dict(counts)


def kinds_of_hints(history: Sequence[Mapping], word: str, lexicon: Lexicon) -> Iterable[str]:
    """The kind of each of the attacker's messages, by the clearest clue in it."""
    for message in history:
        if message["role"] == ATTACKER:
            clues = set(HINTED.findall(message["content"]))
            if clues.intersection(lexicon.own[word]):
                yield CLEAR
            else:
                yield AMBIGUOUS if clues.intersection(lexicon.shared[word]) else FALSE


def measures(counts: Mapping[str, float]) -> dict[str, float]:
    """Shares and means by name, except those whose denominator is 0."""
    by_turn = {int(name.rpartition(" ")[2]): n for name, n in counts.items() if name.startswith("guesses in turn")}
    guesses = sum(by_turn.values())
    right = sum(n for name, n in counts.items() if name.startswith("right guesses in turn"))
    hints = sum(counts[kind] for kind in HINTS)
    wins = counts[BY_GUESS] + counts[BY_WORD]
    sides = [counts.get(f"games as {role}", 0) for role in GAME.roles]
    points = [counts.get(f"points as {role}", 0) for role in GAME.roles]
    fractions = {
        "points": (sum(points), sum(sides)),
        **{f"points as {role}": pair for role, *pair in zip(GAME.roles, points, sides, strict=True)},
        **{kind: (counts[kind], hints) for kind in HINTS},
        **{end: (counts[end], wins) for end in (BY_GUESS, BY_WORD)},
        "games with a guess": (guesses, sides[1]),
        "turn of the guess": (sum(turn * n for turn, n in by_turn.items()), guesses),
        "right guesses": (right, guesses),
        "messages": (counts["messages"], counts["games"]),
    }
    return {name: total / number for name, (total, number) in fractions.items() if number}


def count_rows(rows: Iterable[Mapping]) -> Counts:
    """The number of game rows by role, and the sum of their weights."""
    counts = Counter[str]()
    for row in rows:
        if role := row.get("role"):
            counts.update({f"rows of the {role}": 1, f"weights of the {role}": row["weight"]})
    return dict(counts)


def row_measures(counts: Mapping[str, float]) -> dict[str, float]:
    """The number of rows of each role, and their mean weight; nothing for a training without game rows."""
    numbers: dict[str, float] = {}
    for role in GAME.roles if counts else ():
        rows = counts.get(f"rows of the {role}", 0)
        numbers[f"rows of the {role}"] = rows
        if rows:
            numbers[f"weight of a row of the {role}"] = counts[f"weights of the {role}"] / rows
    return numbers
