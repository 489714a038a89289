"""Rows for those arms of the study that only the embedded world has; the others are in tools/selfplay/controls.py.

    python -m tools.tiny.controls --control silent --like RUN --input_data_path GAMES.json --output_data_path ROWS.json

is a value of the setting REWARDS of tools/run_spag.sh. Made of the rows of the run --like in the same epoch:

as_many    SPAG's rows of the games, left out or repeated at random, as many as the other run's game rows
silent     the other run's rows, with weight 0 for its game rows: the same facts, as often, in as many steps
forms      the other run's SFT rows, and in place of its game rows answered questions about played words
"""

import random
from dataclasses import dataclass

from tools.flags import flag, parse_flags
from tools.selfplay.controls import ControlFlags, path_like, repeated, split_rows, usual_rows
from utils import run_program, set_up_logging, write_records

AS_MANY, SILENT, FORMS = CONTROLS = ("as_many", "silent", "forms")


@dataclass(kw_only=True)
class Flags(ControlFlags):
    """The same flags, with the controls of the embedded world."""

    control: str = flag("how the rows are made", choices=CONTROLS)
    like: str = flag("OUTPUT of the other run")


def practice_rows() -> list[dict]:
    """Questions about played words with their answers, as SFT rows. None contains a held-out word."""
    from tools.tiny.questions import make_questions  # imports torch, which the other controls do not need

    asked = (question for question in make_questions() if not question.held_out)
    return [{"query": each.context, "target": each.choices[0], "type": "sft", "weight": 1.0} for each in asked]


def control_rows(flags: Flags) -> list[dict]:
    """The rows that the flags ask for."""
    rng, (other_rows, other_sft) = random.Random(flags.seed), split_rows(path_like(flags))
    if flags.control == AS_MANY:
        rows, sft_rows = usual_rows(flags, flags.input_data_path)
        return repeated(rows, len(other_rows), rng) + sft_rows
    if flags.control == SILENT:
        return [row | {"weight": 0.0} for row in other_rows] + other_sft
    return repeated(practice_rows(), len(other_rows), rng) + other_sft


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    set_up_logging()
    write_records(flags.output_data_path, control_rows(flags))


if __name__ == "__main__":
    run_program(main)
