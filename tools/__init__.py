"""The game side: words to episodes, episodes to rows, and everything measured about them."""
