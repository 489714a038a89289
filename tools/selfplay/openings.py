"""Opening prompts that lose their rules to --max_length: found before anything is played."""

from collections.abc import Mapping, Sequence

from tools.games import prompts
from tools.games.game import Game
from tools.players.player import Tokens, Turn
from utils import warn_on_rank_0

MOST_CUT = 0.5  # of the opening prompts
LOOKED_AT = 200  # tasks at most, spread over the list


def check_openings(
    game: Game,
    tasks: Sequence[str],
    tokens: Mapping[str, Tokens],
    *,
    max_turns: int,
    templates: prompts.Templates,
    allow_cuts: bool,
) -> None:
    """Warn of opening prompts of these roles that do not fit; ValueError for most, unless `allow_cuts`.

    `tokens` are by role. The second role opens with an empty message before it, the shortest there is.
    """
    looked_at = [tasks[index] for index in range(0, len(tasks), -(-len(tasks) // LOOKED_AT))]
    cut = 0
    for role, own in tokens.items():
        history = () if role == game.roles[0] else ({"role": game.roles[0], "content": ""},)
        for task in looked_at:
            turn = Turn(game, role, history, max_turns, 0, game.secrets(role, task), templates)
            cut += own.encode_turn(turn)[1]
    if not cut:
        return
    share = cut / (len(looked_at) * len(tokens))
    message = f"{share:.0%} of the opening prompts lose the beginning of the rules to --max_length"
    if share > MOST_CUT and not allow_cuts:
        raise ValueError(f"{message}; use a larger one, or --allow_cuts True")
    warn_on_rank_0("%s", message)
