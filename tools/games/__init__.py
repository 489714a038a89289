"""The games: each is a file with a subclass of `Game`, and a prompt file."""

from tools.games.game import Game, Outcome, Verdict, load_game

__all__ = ["Game", "Outcome", "Verdict", "load_game"]
