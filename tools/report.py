"""Make a self-contained HTML report of the loop's output, finished or not, or of one of its folders.

python -m tools.report FOLDER      writes FOLDER/report.html, about 5 MiB, which needs no network
"""

import argparse
from pathlib import Path

from tools.common.errors import printable
from tools.common.files import write_text
from tools.common.flags import add_flags
from tools.common.programs import run_program
from tools.games.flags import GameChoice
from tools.measure.report_contents import read_folder
from tools.measure.report_page import page_html


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="the loop's OUTPUT, or a folder of games, training or results")
    add_flags(parser, GameChoice)
    flags = vars(parser.parse_args())
    folder = flags.pop("folder")
    report = read_folder(folder, GameChoice(**flags).load_game())
    output = folder / "report.html"
    write_text(output, page_html(report))
    print(printable(f"{output}: {len(report.games):,} games to read"))


if __name__ == "__main__":
    run_program(main)
