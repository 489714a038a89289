"""Controls of self-play learning: rows that stand in for SPAG's, so that only one thing differs from a run of SPAG.

sft        the SFT rows alone, repeated to as many rows as the other run has in this epoch: the same steps, no games
coin       the winner of each decided game is drawn: the same kind of rows, but the outcome teaches nothing
cloning    the winners' messages as SFT rows: -reward * weight * l, without ratio, clip and KL
"""

import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path

from tools.games.game import Game
from tools.selfplay.rows import RowFlags, make_rows
from utils import UserError, read_json_or_jsonl, write_records

COIN, CLONING, SFT = CONTROLS = ("coin", "cloning", "sft")


def make_control_rows(
    flags: RowFlags,
    control: str,
    *,
    inputs: list[str],
    output: str,
    sft: str | None,
    like: str | None,
    sft_coeff: float,
) -> dict:
    """Write the rows of a control, and return the counts of the games that they are made of (none for SFT).

    Arguments are those of `make_rows`; `like` is the OUTPUT of another loop, `sft_coeff` the coefficient of SFT rows
    in training. With COIN, `flags.load_game` gives a game that `by_coin` made.
    """
    if control == SFT:
        if not like:
            raise UserError(f"--control {SFT} needs --like, the OUTPUT of another loop")
        game_rows, sft_rows = rows_like(like, output)
        if not sft_rows:
            raise UserError(f"--control {SFT} --like {like}: that loop has no SFT rows")
        write_records(output, repeated(sft_rows, len(game_rows) + len(sft_rows), random.Random(flags.seed)))
        return {}
    of_games = Path(output).with_name(f"{Path(output).stem}_{control}_games.json")
    counts = make_rows(flags, inputs, str(of_games), sft=sft)
    game_rows, sft_rows = split_rows(of_games)
    cloned = control == CLONING
    rows = cloning_rows(game_rows, sft_rows, sft_coeff=sft_coeff) if cloned else game_rows + sft_rows
    write_records(output, rows)
    return counts


def by_coin(game: Game) -> Game:
    """The game with rewards by chance: a drawn role gets the larger reward of a game, the other role the smaller."""
    drawn_game = copy.copy(game)

    def rewards(task, history, outcome) -> dict[str, float]:
        paid = sorted(game.rewards(task, history, outcome).values(), reverse=True)
        lucky = random.Random(json.dumps([task, history])).choice(game.roles)
        roles = [lucky, *(role for role in game.roles if role != lucky)]
        return dict(zip(roles, paid, strict=False))

    drawn_game.rewards = rewards
    return drawn_game


def cloning_rows(rows: Sequence[dict], sft_rows: Sequence[dict], *, sft_coeff: float) -> list[dict]:
    """Game rows as SFT rows, the others after them.

    OfflinePO averages game rows and SFT rows apart and multiplies the latter by `sft_coeff`. Here all are SFT rows in
    one average; the weights give each kind the share in the loss that it has there.
    """
    total = len(rows) + len(sft_rows)
    cloned = [
        {
            "query": row["query"],
            "target": row["target"],
            "type": "sft",
            "weight": row["reward"] * row["weight"] / sft_coeff * total / len(rows),
        }
        for row in rows
    ]
    return cloned + [row | {"weight": row["weight"] * total / len(sft_rows)} for row in sft_rows]


def repeated(rows: Sequence[dict], number: int, rng: random.Random) -> list[dict]:
    """So many rows: each as often as the others, but for a rest that is drawn."""
    times, rest = divmod(number, len(rows))
    return [*rows] * times + rng.sample(rows, rest)


def split_rows(path: Path) -> tuple[list[dict], list[dict]]:
    """The game rows of a file, and its SFT rows."""
    rows = read_json_or_jsonl(path)
    return tuple([row for row in rows if (row.get("type") == "sft") == is_sft] for is_sft in (False, True))


def rows_like(like: str, output: str) -> tuple[list[dict], list[dict]]:
    """The game rows and SFT rows of another loop in the epoch of `output`, which is OUTPUT/epochK/rows/rows.json."""
    return split_rows(Path(like, *Path(output).parts[-3:]))
