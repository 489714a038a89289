"""One self-contained page about the output of the loop, finished or not, or one of its folders.

    python -m tools.report FOLDER      writes FOLDER/report.html

The page needs no network. It holds Plotly, which draws its charts, and is therefore about 5 MiB large.
"""

import argparse
from pathlib import Path

from tools.flags import add_flags
from tools.games.flags import GameChoice
from tools.pages.contents import read_folder
from tools.pages.page import page_html, verdict
from utils import replacing, run_program, set_up_logging, shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "folder", type=Path, help="OUTPUT of the loop, or a folder of played games, a training, matches or reasoning"
    )
    parser.add_argument("--output", type=Path, help="file to write (default: FOLDER/report.html)")
    add_flags(parser, GameChoice)
    flags = vars(parser.parse_args())
    folder, output = flags.pop("folder"), flags.pop("output")
    set_up_logging()
    report = read_folder(folder, GameChoice(**flags).load_game())
    output = output or folder / "report.html"
    with replacing(output) as file:
        file.write(page_html(report))
    for line in (*verdict(report), *(f"not in the report: {line}" for line in report.missing)):
        print(shown(line))
    print(shown(str(output)) + f": {output.stat().st_size / 2**20:.1f} MiB, {len(report.games):,} games to read")


if __name__ == "__main__":
    run_program(main)
