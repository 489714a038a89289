"""One self-contained page about a run of the loop, finished or not: charts, settings and games to read.

    python -m tools.report OUTPUT                                              writes OUTPUT/report.html
    python -m tools.report --episodes GAMES.json ... --output report.html      the same about files of episodes

Every game is counted and a bounded sample kept to be read, in constant memory. The page's look and its script, which
draws the charts from the numbers put into it here, are tools/pages/template.html. The page needs no network.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tools.games import taboo
from tools.pages import charts
from tools.pages.games import GameTally
from utils import checkpoints, iter_records, log_skipped, replacing, run_program, set_up_logging

TEMPLATE = Path(__file__).with_name("pages") / "template.html"
SLOT = "{{data}}"
IMITATION = "imitation"
SELF_PLAY, EVALUATION = "self-play", "evaluation"
RANK_FILE = re.compile(r"_rank\d+\.jsonl$")  # of play that may still be going on
EPOCH, FILE = "epoch", "file"  # what the games of a report are grouped by


@dataclass
class Report:
    """What is put into the page, as the template's script reads it."""

    name: str
    made: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M"))
    group: str = EPOCH
    headlines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    tables: list[dict] = field(default_factory=list)
    charts: list[dict] = field(default_factory=list)
    settings: list[dict] = field(default_factory=list)  # title and rows
    sources: list[dict] = field(default_factory=list)  # sets of games: group, kind, games, sampled
    games: list[dict] = field(default_factory=list)  # "source" is the place of theirs

    def add_charts(self, drawn: Iterable[dict]) -> None:
        """Add the charts that have anything to show."""
        self.charts += [chart for chart in drawn if chart["series"]]

    def add_games(self, group: str, kind: str, tally: GameTally) -> None:
        """Add the sampled games of a set."""
        games = tally.sampled()
        self.games += [game | {"source": len(self.sources)} for game in games]
        self.sources.append({"group": group, "kind": kind, "games": tally.games, "sampled": len(games)})

    def add_settings(self, title: str, settings: Mapping | None) -> None:
        """Add a table of settings, nested ones under names with a dot; None: there are none."""
        if settings:
            rows = [[name, as_text(value)] for name, value in flat(settings)]
            self.settings.append({"title": title, "rows": rows})

    def read_json(self, path: Path) -> dict | None:
        """The object in a file; None if there is none, and a note if it is damaged or being written."""
        if not path.is_file():
            return None
        try:
            value = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None)
        except ValueError as error:
            self.missing.append(f"{path}: not readable ({error})")
            return None
        return value if isinstance(value, dict) else None


# --- a run of the loop ---------------------------------------------------------------------------------------------


def report_of_run(folder: Path, new_tally: partial) -> Report:
    """The report of a loop's OUTPUT, of what is there. Raises ValueError if nothing of a loop is."""
    epochs = epoch_folders(folder)
    if not epochs and not (folder / IMITATION).is_dir():
        raise ValueError(f"{folder}: neither {IMITATION}/ nor epoch1/ is there; give the OUTPUT of tools/run_spag.sh")
    report = Report(folder.resolve().name)
    settings = report.read_json(folder / "settings.json")
    if settings is None:
        report.missing.append("The loop's settings.json is not there.")
    report.add_settings("The loop", settings)
    tallies = read_self_play(report, epochs, new_tally)
    learning = read_learning(report, folder, epochs)
    matches = read_matches(report, folder, epochs, new_tally)
    for number in range(max(epochs, default=0) + 1, planned_epochs(settings) + 1):
        report.missing.append(f"Epoch {number} has not begun.")
    if tallies:
        report.tables.append(charts.play_table(tallies, EPOCH))
        report.add_charts(charts.play_charts(tallies, "epoch (played by the model of the epoch before)"))
    if matches:
        report.headlines.append(charts.match_headline(*matches[-1]))
        report.tables.append(charts.match_table(matches, EPOCH))
        report.add_charts(charts.match_charts(matches, EPOCH))
    report.add_charts(charts.learning_charts("imitation", learning[:1], charts.IMITATION_METRICS))
    report.add_charts(charts.learning_charts("learning", learning[1:]))
    return report


def epoch_folders(folder: Path) -> dict[int, Path]:
    """The folders epoch1, epoch2, ... by number."""
    found = {path: re.fullmatch(r"epoch(\d+)", path.name) for path in folder.glob("epoch*")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def planned_epochs(settings: Mapping | None) -> int:
    """How many epochs the loop is to have; 0 where its settings do not tell."""
    epochs = str((settings or {}).get("EPOCHS", ""))
    return int(epochs) if epochs.isdecimal() else 0


def read_self_play(report: Report, epochs: Mapping[int, Path], new_tally: partial) -> list[tuple[str, GameTally]]:
    """The games of each epoch, finished or still being played."""
    tallies = []
    for number, folder in epochs.items():
        results = sorted((folder / "episodes").glob("*_results.json"))
        unfinished = sorted((folder / "episodes").glob("*_rank*.jsonl"))
        tally = tally_games(results or unfinished, new_tally(), unfinished=not results)
        if not tally.games:
            report.missing.append(f"Epoch {number}: no games.")
            continue
        if not results:
            report.missing.append(f"Epoch {number}: games are still being played; {tally.games:,} are there.")
        tallies.append((str(number), tally))
        report.add_games(str(number), SELF_PLAY, tally)
        for path in sorted((folder / "episodes").glob("*_settings.json")):
            report.add_settings(f"Epoch {number}, play", (report.read_json(path) or {}).get("settings"))
        for path in sorted((folder / "rows").glob("*_rewards_settings.json")):
            report.add_settings(f"Epoch {number}, rewards", report.read_json(path))
    return tallies


def read_learning(report: Report, folder: Path, epochs: Mapping[int, Path]) -> list[tuple[str, Sequence[Mapping]]]:
    """The log histories of imitation and of each epoch."""
    logs = []
    for name, path in [("Imitation", folder / IMITATION), *((f"Epoch {k}", path) for k, path in epochs.items())]:
        model = path / "model"
        # While a training runs, the numbers stand in its last checkpoint.
        places = [model, *reversed(checkpoints(model))]
        found = (report.read_json(place / "trainer_state.json") for place in places)
        state = next(filter(None, found), None)
        entries = state.get("log_history", []) if state else []
        logs.append((name.lower(), entries))
        if not entries:
            report.missing.append(f"{name}: no training.")
        elif not (model / "train_results.json").is_file():
            report.missing.append(f"{name}: training has not ended; its curves go to step {entries[-1].get('step')}.")
        report.add_settings(f"{name}, training", report.read_json(model / "settings.json"))
    return logs


def read_matches(
    report: Report, folder: Path, epochs: Mapping[int, Path], new_tally: partial
) -> list[tuple[str, Sequence[Mapping]]]:
    """The rows of each epoch's model against imitation, over all seeds; epoch 0 is imitation against itself."""
    matches = []
    for number, path in [(0, folder / IMITATION), *epochs.items()]:
        results = report.read_json(path / "eval" / "matches.json")
        if results is None:
            if number:
                report.missing.append(f"Epoch {number}: no match against imitation.")
            continue
        of_all_seeds = (path.name, IMITATION, None)
        rows = [row for row in results["results"] if (row["player"], row["opponent"], row["seed"]) == of_all_seeds]
        if rows:
            matches.append((str(number), rows))
        else:
            report.missing.append(f"{path / 'eval'}: no match of {path.name} against {IMITATION}.")
        report.add_settings(f"Epoch {number}, match", results["settings"])
        games = path / "eval" / results["games_path"]
        if games.is_file():
            report.add_games(str(number), EVALUATION, tally_games([games], new_tally()))
        else:
            report.missing.append(f"{games}: the games of the match are not there.")
    return matches


# --- files of episodes ---------------------------------------------------------------------------------------------


def report_of_episodes(paths: Sequence[Path], new_tally: partial) -> Report:
    """The report of files of episodes, one group each."""
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        shared = os.path.commonpath([path.resolve().parent for path in paths])
        names = [os.path.relpath(path, shared) for path in paths]
    report = Report(names[0] if len(names) == 1 else f"{len(names)} files", group=FILE)
    tallies = [
        (name, tally_games([path], new_tally(), unfinished=bool(RANK_FILE.search(name))))
        for name, path in zip(names, paths, strict=True)
    ]
    for name, tally in tallies:
        report.add_games(name, SELF_PLAY, tally)
    report.tables.append(charts.play_table(tallies, FILE))
    report.add_charts(charts.play_charts(tallies, FILE))
    return report


def tally_games(paths: Iterable[Path], tally: GameTally, *, unfinished: bool = False) -> GameTally:
    """Count the games of files; of `unfinished` ones a line that is being written is passed over."""
    for path in paths:
        if unfinished and path.is_file() and not path.stat().st_size:
            continue
        for where, episode in iter_records(path, skip_bad=unfinished, on_skip=log_skipped):
            try:
                tally.add(episode)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
    return tally


# --- the page ------------------------------------------------------------------------------------------------------


def flat(settings: Mapping, prefix: str = "") -> Iterable[tuple[str, object]]:
    """Names and values, those of nested objects as outer.inner."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def as_text(value) -> str:
    """A setting as it is shown."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def page(report: Report) -> str:
    """The HTML page. Nothing in the data can end its script element: "<" is written as an escape."""
    data = json.dumps(asdict(report)).replace("<", "\\u003c")
    before, after = TEMPLATE.read_text(encoding="utf-8").split(SLOT)
    return before + data + after


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="One self-contained HTML page about a run of the loop, or about files of episodes.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, metavar="OUTPUT", help="folder of the loop; it need not be finished")
    add("--episodes", nargs="+", type=Path, metavar="FILE", help="any files of episodes instead of a folder")
    add("--output", type=Path, help="file to write; unset: OUTPUT/report.html (needed with --episodes)")
    add("--games", type=int, default=200, help="games to be read, of each epoch's self-play and of each match")
    add("--match", choices=taboo.MATCHES, default=taboo.SUBSTRING, help="how games without an outcome are judged")
    args = parser.parse_args(arguments)
    if (args.folder is None) == (args.episodes is None):
        parser.error("give either OUTPUT, the folder of a loop, or --episodes FILE ...")
    if args.episodes and not args.output:
        parser.error("--episodes needs --output FILE, the page to write")
    if args.games < 0:
        parser.error(f"--games is {args.games}; it must be at least 0")
    return args


def main() -> None:
    args = parse_args()
    set_up_logging()
    new_tally = partial(GameTally, args.games, match=args.match)
    report = report_of_run(args.folder, new_tally) if args.folder else report_of_episodes(args.episodes, new_tally)
    output = args.output or args.folder / "report.html"
    with replacing(output) as file:
        file.write(page(report))
    for line in report.missing:
        print(f"not in the report: {line}")
    print(f"{output}: {output.stat().st_size / 2**20:.1f} MiB, {len(report.games):,} games to read")


if __name__ == "__main__":
    run_program(main)
