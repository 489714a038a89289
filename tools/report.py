"""One self-contained page about a run of the loop, finished or not, or one of its folders: charts and games to read.

    python -m tools.report FOLDER                                              writes FOLDER/report.html
    python -m tools.report --episodes GAMES.json ... --output report.html      the same about files of episodes

The page needs no network. It holds Plotly, which draws its charts, and is therefore about 5 MiB large.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from tools.flags import add_flags, flag
from tools.games.flags import GameChoice
from tools.pages.contents import report_of_episodes, report_of_folder
from tools.pages.page import page_html, verdict
from utils import replacing, run_program, set_up_logging, shown


@dataclass(kw_only=True)
class Flags(GameChoice):
    """The flags of this program."""

    episodes: list[Path] | None = flag("any files of episodes instead of a folder", default=None, metavar="FILE")
    output: Path | None = flag("file to write; unset: FOLDER/report.html (needed with --episodes)", default=None)
    games: int = flag("games to be read, of each epoch's self-play and of each match", default=200)


def parse_args() -> tuple[Path | None, Flags]:
    """The folder, if one is given, and the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    line = "OUTPUT of the loop, finished or not, or a folder of play, a training, matches or reasoning"
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help=line)
    add_flags(parser, Flags)
    values = vars(parser.parse_args())
    folder, flags = values.pop("folder"), Flags(**values)
    if (folder is None) == (flags.episodes is None):
        parser.error("give either FOLDER or --episodes FILE ...")
    if flags.episodes and not flags.output:
        parser.error("--episodes needs --output FILE, the page to write")
    return folder, flags


def main() -> None:
    folder, flags = parse_args()
    set_up_logging()
    game = flags.load_game()
    make, source = (report_of_folder, folder) if folder else (report_of_episodes, flags.episodes)
    report = make(source, game, flags.games)
    output = flags.output or folder / "report.html"
    with replacing(output) as file:
        file.write(page_html(report))
    for line in (*verdict(report), *(f"not in the report: {line}" for line in report.missing)):
        print(shown(line))
    print(shown(str(output)) + f": {output.stat().st_size / 2**20:.1f} MiB, {len(report.games):,} games to read")


if __name__ == "__main__":
    run_program(main)
