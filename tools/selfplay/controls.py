"""Rows for controls of self-play: runs that train as SPAG does, on other rows.

    python -m tools.selfplay.controls --control coin --input_data_path GAMES.json --output_data_path ROWS.json ...

takes the place of tools/assign_rewards.py, whose flags it has too; tools/run_spag.sh runs it if CONTROL is set. The
training program and its settings stay the same. The rows:

coin       in each game that pays, a coin decides which role gets the winner's reward
cloning    the winner's messages as SFT rows: -reward * weight * l, without ratio, clip and KL; with --messages all,
           all messages of both roles
sft        the SFT examples alone, repeated until they are as many as the rows of the run --like in the same epoch
"""

import copy
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.flags import flag, parse_flags
from tools.games.game import Game
from tools.selfplay.rows import SFT, RowFlags, make_rows, rows_settings
from utils import (
    UserError,
    files_setting,
    read_json_or_jsonl,
    run_program,
    set_up_logging,
    write_records,
)

COIN, CLONING = "coin", "cloning"
CONTROLS = (COIN, CLONING, SFT)


class Coin:
    """Goes before a game's class: a coin draws the role that gets the winner's reward, the same for the same game."""

    def rewards(self, task, history, outcome):
        paid = super().rewards(task, history, outcome)
        if not paid:
            return {}
        lower, higher = sorted(paid.get(role, 0.0) for role in self.roles)
        drawn = random.Random(json.dumps([task, history])).choice(self.roles)
        return {role: higher if role == drawn else lower for role in self.roles}


def with_coin(game: Game) -> Game:
    """The game with drawn rewards. Raises UserError for a game that always pays both roles alike."""
    paying = (outcome for outcome in game.outcomes if not outcome.breach)
    if all(outcome.winner is None and outcome.points and len(set(outcome.points)) == 1 for outcome in paying):
        raise UserError(f"{COIN}: there is no winner to draw, {game.title} pays both roles alike")
    drawn = copy.copy(game)
    drawn.__class__ = type(type(game).__name__, (Coin, type(game)), {})
    return drawn


@dataclass(kw_only=True)
class ControlFlags(RowFlags):
    """The flags of assign_rewards, and which control."""

    control: str = flag("how the rows are made", choices=CONTROLS)
    like: str | None = flag("OUTPUT of another run of tools/run_spag.sh", default=None)
    sft_coeff: float = flag("weight of SFT rows in training, by which cloning scales its rows", default=0.5)
    rows_at_once: int | None = flag("rows over which training averages a loss; unset: all", default=None)
    input_data_path: list[str] = flag("files of episodes, JSON or JSONL; sft reads none")
    output_data_path: str = flag("file of rows to write; with --like it ends in epochK/rows/NAME")
    sft_data_path: str | None = flag("file of SFT examples whose rows are appended", default=None)

    def __post_init__(self):
        if self.control == SFT and not (self.like and self.sft_data_path):
            raise UserError(f"--control {SFT} needs --like, the OUTPUT of a run, and --sft_data_path")
        if self.control == CLONING and not (self.sft_coeff > 0 and self.losers == self.ties == 0):
            raise UserError(f"--control {CLONING} needs a --sft_coeff above 0, and neither --losers nor --ties")

    def load_game(self) -> Game:
        game = super().load_game()
        return with_coin(game) if self.control == COIN else game


def cloning_rows(
    rows: Sequence[dict], sft_rows: Sequence[dict], sft_coeff: float, rows_at_once: float = math.inf
) -> Iterator[dict]:
    """Game rows as SFT rows, the SFT rows after them.

    OfflinePO averages game rows and SFT rows separately, over the `rows_at_once` rows of a micro-batch or of a step,
    and multiplies the latter by `sft_coeff`. Here all rows are SFT rows in one average, and the weights give each kind
    the share in the loss that it has there on average: a batch of B rows has a kind of share p with 1 - (1 - p)^B.
    """
    total = len(rows) + len(sft_rows)

    def scale(number: int) -> float:
        return (1 - (1 - number / total) ** rows_at_once) * total / number

    for row in rows:
        weight = row["reward"] * row["weight"] / sft_coeff * scale(len(rows))
        text = {key: value for key, value in row.items() if key not in ("reward", "role", "weight")}
        yield text | {"type": SFT, "weight": weight}
    for row in sft_rows:
        yield row | {"weight": scale(len(sft_rows))}


def repeated(rows: Sequence[dict], number: int, rng: random.Random) -> list[dict]:
    """`number` rows: all of them equally often, and a drawn part of them once more."""
    times, rest = divmod(number, len(rows))
    return [*rows] * times + rng.sample(rows, rest)


def split_rows(path: Path) -> tuple[list[dict], list[dict]]:
    """The game rows of a file, and its SFT rows."""
    rows = read_json_or_jsonl(path)
    return tuple([row for row in rows if (row.get("type") == SFT) == is_sft] for is_sft in (False, True))


def path_like(flags: ControlFlags) -> Path:
    """The other run's file of rows of this epoch."""
    return Path(flags.like, *Path(flags.output_data_path).parts[-3:])


def usual_rows(flags: ControlFlags, inputs: list[str]) -> tuple[list[dict], list[dict]]:
    """The game rows and SFT rows that assign_rewards would make; they are kept beside the output."""
    output = Path(flags.output_data_path)
    made = output.with_name(f"{output.stem}_of_games.json")
    make_rows(flags, inputs, str(made), sft=flags.sft_data_path)
    return split_rows(made)


def control_rows(flags: ControlFlags) -> list[dict]:
    """The rows of `cloning` and `sft`."""
    if flags.control == CLONING:
        rows, sft_rows = usual_rows(flags, flags.input_data_path)
        return list(cloning_rows(rows, sft_rows, flags.sft_coeff, flags.rows_at_once or math.inf))
    number = len(read_json_or_jsonl(path_like(flags)))
    _, sft_rows = usual_rows(replace(flags, min_game_rows=0), [])
    return repeated(sft_rows, number, random.Random(flags.seed))


def make_control_rows(flags: ControlFlags) -> None:
    """Write the rows that the flags ask for, and their settings. UserError for an output made with other settings."""
    output = flags.output_data_path
    if flags.control == COIN:
        make_rows(flags, flags.input_data_path, output, sft=flags.sft_data_path)
        return
    settings = {"control": flags.control, "sft_coeff": flags.sft_coeff, "rows_at_once": flags.rows_at_once}
    if flags.control == SFT:
        settings = {"control": SFT, "like": files_setting(path_like(flags))}
    made_with = rows_settings(output)
    with made_with.claimed(settings):
        rows = control_rows(flags)
        made_with.write(settings)
        write_records(output, rows)


def main() -> None:
    flags = parse_flags(ControlFlags, description=__doc__)
    set_up_logging()
    make_control_rows(flags)


if __name__ == "__main__":
    run_program(main)
