"""Rows for those arms of the study that need the rows of another run of the loop in the same epoch.

    python -m tools.tiny.controls --control forms --like RUN --input_data_path GAMES.json --output_data_path ROWS.json

is a value of the setting REWARDS of tools/run_spag.sh. Made of the rows of the run --like in the same epoch:

as_many    SPAG's rows of the games, left out or repeated at random, as many as the other run's game rows
silent     the other run's rows, with weight 0 for its game rows: the same facts, as often, in as many steps
forms      the other run's SFT rows, and in place of its game rows answered questions about played words
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from tools.flags import flag, parse_flags
from tools.selfplay.controls import SILENT, repeated, split_rows
from tools.selfplay.rows import RowFlags, make_rows
from utils import read_json_or_jsonl, run_program, set_up_logging, write_records

AS_MANY, FORMS = "as_many", "forms"
CONTROLS = (AS_MANY, SILENT, FORMS)


@dataclass(kw_only=True)
class Flags(RowFlags):
    """The flags of assign_rewards, with the controls of the embedded world."""

    control: str = flag("how the rows are made", choices=CONTROLS)
    like: str = flag("OUTPUT of the other run")
    input_data_path: list[str] = flag("files of episodes")
    output_data_path: str = flag("file of rows to write; it ends in epochK/rows/NAME")
    sft_data_path: str | None = flag("file of SFT examples whose rows are appended", default=None)


def practice_rows() -> list[dict]:
    """Questions about played words with their answers, as SFT rows. None contains a held-out word."""
    from tools.tiny.questions import make_questions  # imports torch, which the other controls do not need

    asked = (question for question in make_questions() if not question.held_out)
    return [{"query": each.context, "target": each.choices[0], "type": "sft", "weight": 1.0} for each in asked]


def write_rows(flags: Flags) -> None:
    """Write the rows that the flags ask for."""
    like_rows = str(Path(flags.like, *Path(flags.output_data_path).parts[-3:]))
    changes = {"control": None, "repeat_to": like_rows}
    if flags.control == SILENT:
        changes = {"like_rows": like_rows}
    if flags.control != FORMS:
        make_rows(replace(flags, **changes), flags.input_data_path, flags.output_data_path, sft=flags.sft_data_path)
        return
    game_rows, sft_rows = split_rows(read_json_or_jsonl(like_rows))
    rows = repeated(practice_rows(), len(game_rows), random.Random(flags.seed)) + sft_rows
    write_records(flags.output_data_path, rows)


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    set_up_logging()
    write_rows(flags)


if __name__ == "__main__":
    run_program(main)
