"""The embedded world: a language model of about a million parameters that plays Adversarial Taboo about 162 words.

    python -m tools.tiny_world build --output_dir outputs/quickstart

It stands in for Llama-2 (a small Llama, pre-trained here on facts about the words), for GPT-4's games (scripted
players) and for Alpaca (the facts), so that the whole method can be seen at work where there is no GPU and no model
hub. What it learns says something about the method and its code, nothing about reasoning.
"""

import argparse
import json
import os
from pathlib import Path

from tools.games.taboo import ATTACKER, ATTACKER_WINS, DEFENDER, DEFENDER_WINS, TIED
from tools.matches.stats import ALL, BOTH
from tools.matches.text import with_interval
from tools.selfplay.files import Episode
from tools.selfplay.progress import describe
from tools.tiny.build import WorldFlags, build
from tools.tiny.reproduce import reproduce
from utils import add_flags, iter_records, run_program


def show(args: argparse.Namespace) -> None:
    """Print the points of each epoch's model against imitation, a game for each outcome, and where the report is."""
    output = Path(args.output_dir)
    matches = sorted(
        output.glob("epoch*/eval/matches.json"), key=lambda path: int(path.parts[-3].removeprefix("epoch"))
    )
    if not matches:
        raise ValueError(f"{output}: no epochK/eval/matches.json; the loop has not come to a match yet")
    print("\nMatch points against the imitation model, (wins + ties/2) / games, with 95% intervals:\n")
    print(f"{'model':8} {'games':>6}   {'both roles':20} {'as attacker':20} {'as defender':20} {'held-out words':20}")
    for path in matches:
        print(points_line(path))
    print("\nGames of the last model, one for each outcome:\n")
    for episode in one_of_each(matches[-1].with_name("games_results.json")):
        print(f"{episode['attacker']} attacks, {episode['defender']} defends\n{describe(episode)}\n")
    print(f"Report, to open in a browser: {output / 'report.html'}")


def points_line(path: Path) -> str:
    """One epoch's points, of both roles, each role, and on the held-out words."""
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    player = path.parts[-3]
    chosen = {(row["words"], row["role"]): row for row in rows if row["player"] == player and row["seed"] is None}
    cells = []
    for key in ((ALL, BOTH), (ALL, ATTACKER), (ALL, DEFENDER), ("held_out", BOTH)):
        cells.append(with_interval(chosen[key]["points"], chosen[key]["points_interval"]))
    return f"{player:8} {chosen[ALL, BOTH]['games']:6}   " + " ".join(f"{cell:20}" for cell in cells)


def one_of_each(path: Path) -> list[Episode]:
    """The first game won by the attacker, won by the defender, and tied, as far as there are such."""
    found: dict[str, Episode] = {}
    for _, episode in iter_records(path):
        found.setdefault(episode["outcome"], episode)
    return [found[outcome] for outcome in (ATTACKER_WINS, DEFENDER_WINS, TIED) if outcome in found]


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The embedded world.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build", help="make the data and the base model", allow_abbrev=False)
    add_flags(command, WorldFlags)
    command.set_defaults(run=lambda args: build(WorldFlags(**{f: v for f, v in vars(args).items() if f != "run"})))
    command = commands.add_parser("show", help="print what a finished loop came to", allow_abbrev=False)
    command.add_argument("output_dir", help="OUTPUT of tools/run_spag.sh")
    command.set_defaults(run=show)
    command = commands.add_parser("reproduce", help="make the learning table of the README", allow_abbrev=False)
    add = command.add_argument
    add("--output_dir", default="outputs/tiny_world", help="folder to write to")
    add("--seeds", type=int, default=3, help="seeds 0 to N - 1, each a world of its own")
    add("--epochs", type=int, default=3, help="epochs of self-play")
    add("--workers", type=int, default=os.cpu_count(), help="programs that run at the same time, with a thread each")
    command.set_defaults(run=reproduce)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    args.run(args)


if __name__ == "__main__":
    run_program(main)
