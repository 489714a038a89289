"""Counts of games: outcomes, lengths, messages, faulty replies, tokens, and how much messages depend on the word.

Memory grows by 16 bytes for each message.
"""

from array import array
from collections import Counter
from collections.abc import Mapping

from tools.games.game import Game, Verdict
from tools.players.player import LENGTH

SERVER_COUNTS = ("server_prompt_tokens", "server_new_tokens")


def word_dependence(words: array, texts: array) -> float | None:
    """1 - P(same text | different words) / P(same text | same word), over all pairs of messages.

    `words` and `texts` hold a hash of each message's target word and text. The result is 1 if no two words share a
    text, and 0 if texts do not depend on the word; it does not depend on the number of games for each word. Both
    messages of a pair may come from the same game. The result is None if all messages are about one word, or if no
    two messages about the same word are equal.
    """

    import numpy as np

    def equal_pairs(*keys: array) -> int:
        counts = np.unique(np.array(keys, dtype=np.int64), axis=1, return_counts=True)[1]
        return int((counts * (counts - 1) // 2).sum())

    same_word, same_text, same_both = equal_pairs(words), equal_pairs(texts), equal_pairs(words, texts)
    different_words = len(words) * (len(words) - 1) // 2 - same_word
    if not (different_words and same_both):
        return None
    return 1 - ((same_text - same_both) / different_words) / (same_both / same_word)


class GameCounts:
    """Counts of the games so far."""

    def __init__(self, game: Game):
        self.game = game
        self.outcomes: Counter[str] = Counter()
        self.length = 0  # sum over games of the messages up to the decisive one
        self.messages: Counter[str] = Counter()  # this and the next two are by role
        self.empty_replies: Counter[str] = Counter()
        self.cut_off_replies: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()  # "cut_prompts", "new_tokens" and, of servers, SERVER_COUNTS
        self.with_ids = self.retokenized = 0  # replies with known token ids, and those whose text has other ids
        self.facts: Counter[str] = Counter()  # games for which each fact of `Game.facts` is true
        self.words: set[int] = set()  # hashes of target words
        self.said = {role: (array("q"), array("q")) for role in game.roles}  # hashes of target word and text

    @property
    def games(self) -> int:
        return self.outcomes.total()

    @property
    def mean_length(self) -> float | None:
        """Mean number of messages up to the decisive one; None without games."""
        return self.length / self.games if self.games else None

    def add(self, episode: Mapping, verdict: Verdict | None = None) -> None:
        """Count one game; without `verdict`, its outcome and length are those that the episode stores."""
        outcome, length = verdict or (episode["outcome"], episode["length"])
        self.outcomes[outcome] += 1
        self.length += length
        self.words.add(hash(episode["target_word"]))
        self.facts.update(self.game.facts(episode["target_word"], episode["history"][:length], outcome))
        for message in episode["history"]:
            self.messages[message["role"]] += 1
            self.empty_replies[message["role"]] += not message["content"].strip()
        for message in episode["history"][:length]:
            words, texts = self.said[message["role"]]
            words.append(hash(episode["target_word"]))
            texts.append(hash(message["content"].strip()))
        for message, reply in zip(episode["history"], episode.get("replies") or (), strict=False):
            new_tokens = reply.get("tokens", 0)
            self.cut_off_replies[message["role"]] += reply.get("finish_reason") == LENGTH
            self.tokens["cut_prompts"] += bool(reply.get("prompt_cut"))
            self.tokens["new_tokens"] += new_tokens
            self.with_ids += "token_ids" in reply
            self.retokenized += bool(reply.get("retokenized"))
            if "prompt_tokens" in reply:
                self.tokens["server_prompt_tokens"] += reply["prompt_tokens"]
                self.tokens["server_new_tokens"] += new_tokens

    def word_dependence(self) -> dict[str, float | None]:
        """`word_dependence` of the messages of each role."""
        return {role: word_dependence(*said) for role, said in self.said.items()}

    def as_dict(self) -> dict:
        """The counts as the summary holds them."""
        role = self.game.roles[1]
        decided = {outcome.name: outcome.winner for outcome in self.game.outcomes if not outcome.breach}
        won = {side: sum(self.outcomes[name] for name in decided if decided[name] == side) for side in self.game.roles}
        dependence = self.word_dependence()
        return {
            "games": self.games,
            "outcomes": {outcome.name: self.outcomes[outcome.name] for outcome in self.game.outcomes},
            f"{role}_share_of_decided": won[role] / sum(won.values()) if sum(won.values()) else None,
            **{fact: number / self.games for fact, number in self.facts.items()},
            "mean_length": self.mean_length,
            "word_dependence": dependence,
            **({"no_word_dependence": self._why_unknown()} if None in dependence.values() else {}),
            "messages": self.messages.total(),
            "empty_replies": self.empty_replies.total(),
            "cut_off_replies": self.cut_off_replies.total(),
            **({"retokenized": self.retokenized} if self.with_ids else {}),
            "cut_prompts": self.tokens["cut_prompts"],
            "new_tokens": self.tokens["new_tokens"],
            **{key: self.tokens[key] for key in SERVER_COUNTS if key in self.tokens},
        }

    def _why_unknown(self) -> str:
        """Why a role has no `word_dependence`."""
        if len(self.words) == self.games:
            return "one game a word: there are no texts of other games about the same word to compare"
        if len(self.words) < 2:
            return "all games are about one word"
        return "no two texts about the same word are equal"
