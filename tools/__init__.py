"""The game side: words to episodes, episodes to rows, and everything measured about them. README.md has a map."""

import utils  # noqa: F401  first: it says in one line what to do where packages are missing
