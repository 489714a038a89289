"""A player of tests."""

from collections.abc import Mapping, Sequence

from tools.players.player import STOP, Reply, Turn


class ScriptedPlayer:
    """Says what it was told to: `lines[index][k]` is its k-th message in a game. Remembers what it saw."""

    def __init__(self, lines: Mapping[int, Sequence[str]] | Sequence[Sequence[str]]):
        self.lines = lines
        self.asked: list[Turn] = []

    async def reply(self, turn: Turn) -> Reply:
        """The next line of the script."""
        self.asked.append(turn)
        spoken = sum(message["role"] == turn.role for message in turn.history)
        text = self.lines[turn.index][spoken]
        return Reply(text, STOP, len(text.split()))
