"""Print what the loops of a seed show, as one JSON object (tools/study/loops.py has its format).

    python -m tools.study.keep --folder outputs/study/seed1 --arms configs/arms/tiny.txt > data/tiny/results/seed1.json

Ends with status 3 if the seed is left out of the tables, because its imitation model cannot play.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.flags import flag, parse_flags
from tools.study.arms import read_plan
from tools.study.loops import seed_results
from tools.study.seeds import refusal
from utils import UserError, run_program

LEFT_OUT = 3  # exit status


@dataclass(kw_only=True)
class Flags:
    """The flags of this program."""

    folder: str = flag("folder of a seed, seedN, which tools/study/run.sh has made")
    arms: str = flag("the study's file of arms", metavar="FILE")


def rounded(value):
    """The value with six digits behind the point in all its numbers, which keeps the file small."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(rounded, value))
    return round(value, 6) if isinstance(value, float) else value


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    folder, plan = Path(flags.folder), read_plan(flags.arms)
    number = folder.name.removeprefix("seed")
    if not (folder.is_dir() and number.isdecimal()):
        raise UserError(f"{folder}: not the folder of a seed, seedN")
    results = seed_results(folder, int(number), plan)
    print(json.dumps(rounded(results), indent=1, ensure_ascii=False))
    if text := refusal(results, plan):
        print(text, file=sys.stderr)
        sys.exit(LEFT_OUT)


if __name__ == "__main__":
    run_program(main)
