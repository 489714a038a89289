"""The games. Each is a file with a subclass of `Game`, and a prompt file; `load_game` finds it by its name."""

from tools.games.game import Game, Outcome, Verdict, load_game

__all__ = ["Game", "Outcome", "Verdict", "load_game"]
