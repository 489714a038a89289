"""Rows for those arms of the study that only the embedded world has.

    python -m tools.tiny.controls --control silent --like OTHER --output_data_path OUTPUT/epochK/rows/rows.json ...

stands in for tools/assign_rewards.py (the setting REWARDS of tools/run_spag.sh) and takes its flags. The program and
the settings of training are SPAG's; only the rows differ. They are made like those of another loop (--like) in the
same epoch:

as_many    the rows of this loop's games, left out or repeated at random, so that there are as many game rows
silent     the other loop's rows with weight 0 for game rows: the same facts, as often, in as many steps
forms      its SFT rows, and in place of game rows answered questions about played words
"""

import random
from dataclasses import dataclass
from pathlib import Path

from tools.flags import flag, parse_flags
from tools.selfplay.controls import repeated, rows_like, split_rows
from tools.selfplay.rows import RowFlags, make_rows
from utils import run_program, set_up_logging, write_records

AS_MANY, SILENT, FORMS = CONTROLS = ("as_many", "silent", "forms")


@dataclass(kw_only=True)
class Flags(RowFlags):
    """The flags of this program."""

    control: str = flag("how the rows are made", choices=CONTROLS)
    like: str = flag("OUTPUT of the other loop")
    input_data_path: list[str] = flag("files of episodes, JSON or JSONL")
    output_data_path: str = flag("file of rows to write, in epochK/rows/")
    sft_data_path: str = flag("file of SFT examples whose rows are appended")


def practice_rows() -> list[dict]:
    """Questions about played words with their answers, as SFT rows; none holds a held-out word."""
    from tools.tiny.questions import make_questions  # imports torch, which the other controls do not need

    asked = (question for question in make_questions() if not question.held_out)
    return [{"query": each.context, "target": each.choices[0], "type": "sft", "weight": 1.0} for each in asked]


def control_rows(flags: Flags) -> list[dict]:
    """The rows that the flags ask for."""
    rng, output = random.Random(flags.seed), Path(flags.output_data_path)
    other_rows, other_sft = rows_like(flags.like, flags.output_data_path)
    if flags.control == SILENT:
        return [row | {"weight": 0.0} for row in other_rows] + other_sft
    if flags.control == FORMS:
        return repeated(practice_rows(), len(other_rows), rng) + other_sft
    of_games = output.with_name(f"{output.stem}_of_games.json")
    make_rows(flags, flags.input_data_path, str(of_games), sft=flags.sft_data_path)
    rows, sft_rows = split_rows(of_games)
    return repeated(rows, len(other_rows), rng) + sft_rows


def main() -> None:
    flags = parse_flags(Flags, description="Rows for an arm of the study.")
    set_up_logging()
    write_records(flags.output_data_path, control_rows(flags))


if __name__ == "__main__":
    run_program(main)
