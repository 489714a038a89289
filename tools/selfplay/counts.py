"""What games came to, counted as they come: outcomes, lengths, messages, faults of replies, tokens.

Memory does not grow with the number of games. No torch.
"""

from collections import Counter
from collections.abc import Mapping

from tools.games.game import Game, Verdict
from tools.players.player import LENGTH

SERVER_COUNTS = ("server_prompt_tokens", "server_new_tokens")


class GameCounts:
    def __init__(self, game: Game):
        self.game = game
        self.outcomes: Counter[str] = Counter()
        self.length = 0  # of all games together, in messages up to the decisive one
        self.messages: Counter[str] = Counter()  # by role, as the next two
        self.empty_replies: Counter[str] = Counter()
        self.cut_off_replies: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()  # "cut_prompts", "new_tokens" and, of servers, SERVER_COUNTS
        self.tells_replies = False  # whether the games say how their messages came about

    @property
    def games(self) -> int:
        return self.outcomes.total()

    @property
    def mean_length(self) -> float | None:
        """Messages up to the decisive one; None without games."""
        return self.length / self.games if self.games else None

    def add(self, episode: Mapping, verdict: Verdict | None = None) -> None:
        """Count one game; `verdict` is how it ended, if the episode does not say so itself."""
        outcome, length = verdict or (episode["outcome"], episode["length"])
        self.outcomes[outcome] += 1
        self.length += length
        for message in episode["history"]:
            self.messages[message["role"]] += 1
            self.empty_replies[message["role"]] += not message["content"].strip()
        for message, reply in zip(episode["history"], episode.get("replies") or (), strict=False):
            self.tells_replies = True
            new_tokens = reply.get("tokens", 0)
            self.cut_off_replies[message["role"]] += reply.get("finish_reason") == LENGTH
            self.tokens["cut_prompts"] += bool(reply.get("prompt_cut"))
            self.tokens["new_tokens"] += new_tokens
            if "prompt_tokens" in reply:
                self.tokens["server_prompt_tokens"] += reply["prompt_tokens"]
                self.tokens["server_new_tokens"] += new_tokens

    def as_dict(self) -> dict:
        """What was counted; `mean_length` in messages up to the decisive one."""
        role = self.game.roles[1]
        decided = {outcome.name: outcome.winner for outcome in self.game.outcomes if not outcome.breach}
        won = {side: sum(self.outcomes[name] for name in decided if decided[name] == side) for side in self.game.roles}
        return {
            "games": self.games,
            "outcomes": {outcome.name: self.outcomes[outcome.name] for outcome in self.game.outcomes},
            f"{role}_share_of_decided": won[role] / sum(won.values()) if sum(won.values()) else None,
            "mean_length": self.mean_length,
            "messages": self.messages.total(),
            "empty_replies": self.empty_replies.total(),
            "cut_off_replies": self.cut_off_replies.total(),
            "cut_prompts": self.tokens["cut_prompts"],
            "new_tokens": self.tokens["new_tokens"],
            **{key: self.tokens[key] for key in SERVER_COUNTS if key in self.tokens},
        }


def result_line(summary: Mapping) -> str:
    """One line for people: games by outcome, and what is wrong with replies."""
    games, messages = summary["games"], summary["messages"]
    ended = ", ".join(f"{name} {number / games:.0%}" for name, number in summary["outcomes"].items() if number)
    faults = {"empty": "empty_replies", "cut off at --max_new_tokens": "cut_off_replies"}
    faults["to a prompt cut to --max_length"] = "cut_prompts"
    said = [f"{summary[key] / messages:.0%} {fault}" for fault, key in faults.items() if summary[key]]
    return f"{games:,} games: {ended or 'none'}; replies: {', '.join(said) or 'no faults'}"
