"""Rows for those arms of the study that do not learn from SPAG's rows.

    python -m tools.tiny.controls --control coin --input_data_path GAMES.json --output_data_path ROWS.json ...

stands in for tools/assign_rewards.py (the setting REWARDS of tools/run_spag.sh) and takes its flags. The program and
the settings of training are SPAG's; only the rows differ. Made of the games:

coin       the winner of each decided game is drawn
cloning    the winner's messages as SFT rows: -reward * weight * l, without ratio, clip and KL; all messages of both
           roles with --messages all
as_many    SPAG's rows, left out or repeated at random, so that there are as many game rows as in the loop --like

Made of the rows of another loop (--like) in the same epoch:

sft        its SFT rows alone, repeated to as many rows
silent     its rows with weight 0 for game rows: the same facts, as often, in as many steps
forms      its SFT rows, and in place of game rows answered questions about played words
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.flags import flag, parse_flags
from tools.games.game import Game
from tools.games.taboo import Taboo
from tools.selfplay.rows import RowFlags, make_rows
from utils import UserError, read_json_or_jsonl, run_program, set_up_logging, write_records

SFT_COEFF = 0.5  # of OfflinePO
COIN, CLONING, AS_MANY, SFT, SILENT, FORMS = CONTROLS = ("coin", "cloning", "as_many", "sft", "silent", "forms")
OF_GAMES = (COIN, CLONING, AS_MANY)


class Coin(Taboo):
    """Taboo whose decided games are won by whom a coin says: rows may be the loser's."""

    def rewards(self, task, history, outcome):
        paid = super().rewards(task, history, outcome)
        return {random.Random(json.dumps([task, history])).choice(self.roles): 1.0} if paid else {}


@dataclass(kw_only=True)
class Flags(RowFlags):
    """The flags of this program."""

    control: str = flag("how the rows are made", choices=CONTROLS)
    like: str | None = flag("OUTPUT of the other loop", default=None)
    input_data_path: list[str] = flag("files of episodes, JSON or JSONL")
    output_data_path: str = flag("file of rows to write, in epochK/rows/")
    sft_data_path: str = flag("file of SFT examples whose rows are appended")

    def __post_init__(self):
        if self.control not in (COIN, CLONING) and not self.like:
            raise UserError(f"--control {self.control} needs --like, the OUTPUT of a loop")

    def load_game(self) -> Game:
        game = super().load_game()
        return Coin(match=game.match) if self.control == COIN else game


def cloning_rows(rows: Sequence[dict], sft_rows: Sequence[dict]) -> Iterator[dict]:
    """Game rows as SFT rows, the others after them.

    OfflinePO averages game rows and SFT rows apart and multiplies the latter by alpha. Here all are SFT rows in one
    average; the weights give each kind the share in the loss that it has there.
    """
    total = len(rows) + len(sft_rows)
    for row in rows:
        weight = row["reward"] * row["weight"] / SFT_COEFF * total / len(rows)
        yield {"query": row["query"], "target": row["target"], "type": "sft", "weight": weight}
    for row in sft_rows:
        yield row | {"weight": total / len(sft_rows)}


def practice_rows() -> list[dict]:
    """Questions about played words with their answers, as SFT rows; none holds a held-out word."""
    from tools.tiny.questions import make_questions  # imports torch, which the other controls do not need

    asked = (question for question in make_questions() if not question.held_out)
    return [{"query": each.context, "target": each.choices[0], "type": "sft", "weight": 1.0} for each in asked]


def repeated(rows: Sequence[dict], number: int, rng: random.Random) -> list[dict]:
    """So many rows: each as often as the others, but for a rest that is drawn."""
    times, rest = divmod(number, len(rows))
    return [*rows] * times + rng.sample(rows, rest)


def split_rows(path: Path) -> tuple[list[dict], list[dict]]:
    """The game rows of a file, and its SFT rows."""
    rows = read_json_or_jsonl(path)
    return tuple([row for row in rows if (row.get("type") == "sft") == is_sft] for is_sft in (False, True))


def control_rows(flags: Flags) -> list[dict]:
    """The rows that the flags ask for."""
    rng, output = random.Random(flags.seed), Path(flags.output_data_path)
    other_rows, other_sft = split_rows(Path(flags.like, *output.parts[-3:])) if flags.like else ([], [])
    if flags.control in OF_GAMES:
        of_games = output.with_name(f"{output.stem}_of_games.json")
        make_rows(flags, flags.input_data_path, str(of_games), sft=flags.sft_data_path)
        rows, sft_rows = split_rows(of_games)
        if flags.control == CLONING:
            return list(cloning_rows(rows, sft_rows))
        return (repeated(rows, len(other_rows), rng) if flags.control == AS_MANY else rows) + sft_rows
    if flags.control == SILENT:
        return [row | {"weight": 0.0} for row in other_rows] + other_sft
    if flags.control == FORMS:
        return repeated(practice_rows(), len(other_rows), rng) + other_sft
    return repeated(other_sft, len(other_rows) + len(other_sft), rng)


def main() -> None:
    flags = parse_flags(Flags, description="Rows for an arm of the study.")
    set_up_logging()
    write_records(flags.output_data_path, control_rows(flags))


if __name__ == "__main__":
    run_program(main)
