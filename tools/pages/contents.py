"""What stands in a report: all that is there of a run of the loop, or files of episodes, as data for the page."""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.games.game import Game
from tools.matches.text import how_counted
from tools.pages import charts
from tools.pages.games import GameSample
from utils import checkpoints, iter_records, log_skipped

IMITATION = "imitation"
SELF_PLAY, EVALUATION = "self-play", "evaluation"
RANK_FILE = re.compile(r"_rank\d+\.jsonl$")  # of play that may still be going on
EPOCH, FILE = "epoch", "file"  # what the games of a report are grouped by


@dataclass
class Report:
    """What a page shows, as its script reads it by `data`."""

    name: str
    game: Game
    sample: int  # games to be read, of each set
    made: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M"))
    group: str = EPOCH
    headlines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    tables: list[dict] = field(default_factory=list)
    charts: list[dict] = field(default_factory=list)
    settings: list[dict] = field(default_factory=list)  # title and rows
    sources: list[dict] = field(default_factory=list)  # sets of games: group, kind, games, sampled
    games: list[dict] = field(default_factory=list)  # "source" is the place of theirs

    def data(self) -> dict:
        """All of it, as JSON can hold it."""
        game = {
            "title": self.game.title,
            "roles": self.game.roles,
            "outcomes": charts.outcome_colours(self.game),
            "undecided": self.game.outcomes[-1].name,
            "how_counted": how_counted(self.game),
        }
        return vars(self) | {"game": game}

    def add_charts(self, drawn: Iterable[dict]) -> None:
        """Add the charts that have anything to show."""
        self.charts += [chart for chart in drawn if chart["series"]]

    def count(self, paths: Iterable[Path], *, unfinished: bool = False) -> GameSample:
        """Count the games of files; of `unfinished` ones a line that is being written is passed over."""
        sample = GameSample(self.game, self.sample)
        for path in paths:
            if unfinished and path.is_file() and not path.stat().st_size:
                continue
            for where, episode in iter_records(path, skip_bad=unfinished, on_skip=log_skipped):
                try:
                    sample.add(episode)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
        return sample

    def add_games(self, group: str, kind: str, sample: GameSample) -> None:
        """Add the sampled games of a set."""
        games = sample.sampled()
        self.games += [game | {"source": len(self.sources)} for game in games]
        self.sources.append({"group": group, "kind": kind, "games": sample.games, "sampled": len(games)})

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


def report_of_run(folder: Path, game: Game, sample: int) -> Report:
    """The report of a loop's OUTPUT, of what is there. Raises ValueError if nothing of a loop is."""
    epochs = epoch_folders(folder)
    if not epochs and not (folder / IMITATION).is_dir():
        raise ValueError(f"{folder}: neither {IMITATION}/ nor epoch1/ is there; give the OUTPUT of tools/run_spag.sh")
    report = Report(folder.resolve().name, game, sample)
    settings = report.read_json(folder / "settings.json")
    if settings is None:
        report.missing.append("The loop's settings.json is not there.")
    report.add_settings("The loop", settings)
    samples = read_self_play(report, epochs)
    learning = read_learning(report, folder, epochs)
    matches = read_matches(report, folder, epochs)
    for number in range(max(epochs, default=0) + 1, planned_epochs(settings) + 1):
        report.missing.append(f"Epoch {number} has not begun.")
    if samples:
        report.tables.append(charts.play_table(samples, EPOCH))
        report.add_charts(charts.play_charts(samples, "epoch (played by the model of the epoch before)"))
    if matches:
        report.headlines.append(charts.match_headline(*matches[-1], game))
        report.tables.append(charts.match_table(matches, EPOCH, game))
        report.add_charts(charts.match_charts(matches, EPOCH, game))
    report.add_charts(charts.learning_charts("imitation", learning[:1], charts.IMITATION_METRICS))
    report.add_charts(charts.learning_charts("learning", learning[1:], charts.self_play_metrics(game)))
    return report


def epoch_folders(folder: Path) -> dict[int, Path]:
    """The folders epoch1, epoch2, ... by number."""
    found = {path: re.fullmatch(r"epoch(\d+)", path.name) for path in folder.glob("epoch*")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def planned_epochs(settings: Mapping | None) -> int:
    """How many epochs the loop is to have; 0 where its settings do not tell."""
    epochs = str((settings or {}).get("EPOCHS", ""))
    return int(epochs) if epochs.isdecimal() else 0


def read_self_play(report: Report, epochs: Mapping[int, Path]) -> list[tuple[str, GameSample]]:
    """The games of each epoch, finished or still being played."""
    samples = []
    for number, folder in epochs.items():
        results = sorted((folder / "episodes").glob("*_results.json"))
        unfinished = sorted((folder / "episodes").glob("*_rank*.jsonl"))
        sample = report.count(results or unfinished, unfinished=not results)
        if not sample.games:
            report.missing.append(f"Epoch {number}: no games.")
            continue
        if not results:
            report.missing.append(f"Epoch {number}: games are still being played; {sample.games:,} are there.")
        samples.append((str(number), sample))
        report.add_games(str(number), SELF_PLAY, sample)
        for path in sorted((folder / "episodes").glob("*_settings.json")):
            report.add_settings(f"Epoch {number}, play", (report.read_json(path) or {}).get("settings"))
        for path in sorted((folder / "rows").glob("*_rewards_settings.json")):
            report.add_settings(f"Epoch {number}, rewards", report.read_json(path))
    return samples


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


def read_matches(report: Report, folder: Path, epochs: Mapping[int, Path]) -> list[tuple[str, Sequence[Mapping]]]:
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
            report.add_games(str(number), EVALUATION, report.count([games]))
        else:
            report.missing.append(f"{games}: the games of the match are not there.")
    return matches


# --- files of episodes ---------------------------------------------------------------------------------------------


def report_of_episodes(paths: Sequence[Path], game: Game, sample: int) -> Report:
    """The report of files of episodes, one group each."""
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        shared = os.path.commonpath([path.resolve().parent for path in paths])
        names = [os.path.relpath(path, shared) for path in paths]
    report = Report(names[0] if len(names) == 1 else f"{len(names)} files", game, sample, group=FILE)
    samples = [
        (name, report.count([path], unfinished=bool(RANK_FILE.search(name))))
        for name, path in zip(names, paths, strict=True)
    ]
    for name, sample in samples:
        report.add_games(name, SELF_PLAY, sample)
    report.tables.append(charts.play_table(samples, FILE))
    report.add_charts(charts.play_charts(samples, FILE))
    return report


# --- settings ------------------------------------------------------------------------------------------------------


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
