"""What tests of games share: a player whose messages are given, and histories."""

from collections.abc import Mapping, Sequence

from tools.games import Game
from tools.players.player import STOP, Player, Reply, Turn


def messages(game: Game, *texts: str) -> list[dict[str, str]]:
    """A history in which the roles take turns; the first one opens."""
    return [{"role": game.roles[index % 2], "content": text} for index, text in enumerate(texts)]


class ScriptedPlayer(Player):
    """Says `lines[index][k]` as its k-th message in game `index`, and keeps the turns that it saw."""

    def __init__(self, lines: Mapping[int, Sequence[str]] | Sequence[Sequence[str]]):
        self.lines = lines
        self.asked: list[Turn] = []

    async def reply(self, turn: Turn) -> Reply:
        """The next line of the script."""
        self.asked.append(turn)
        text = self.lines[turn.index][sum(message["role"] == turn.role for message in turn.history)]
        return Reply(text, STOP, len(text.split()))
