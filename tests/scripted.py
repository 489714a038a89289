"""A player for tests, whose messages are given."""

from collections.abc import Mapping, Sequence

from tools.players.player import STOP, Reply, Turn


class ScriptedPlayer:
    """Says `lines[index][k]` as its k-th message in game `index`, and keeps the turns that it saw."""

    def __init__(self, lines: Mapping[int, Sequence[str]] | Sequence[Sequence[str]]):
        self.lines = lines
        self.asked: list[Turn] = []

    async def reply(self, turn: Turn) -> Reply:
        """The next line of the script."""
        self.asked.append(turn)
        spoken = sum(message["role"] == turn.role for message in turn.history)
        text = self.lines[turn.index][spoken]
        return Reply(text, STOP, len(text.split()))
