"""What there is to report: read from a run of the loop, any one of its folders, or files of episodes."""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tools.games.game import Game
from tools.matches.stats import BOTH
from tools.matches.text import cells, shown_rows
from tools.pages.games import GameSample
from utils import checkpoints, iter_records, log_skipped

IMITATION = "imitation"
RANK_FILE = re.compile(r"_rank\d+\.jsonl$")  # of play that may still be going on
LONGEST_NUMBER, LARGEST_NUMBER = 300, 1e300  # digits, and what they come to: sums stay finite
NO_MATCHES = {"settings": {"players": [], "against": None}, "results": []}
T = TypeVar("T")


@dataclass
class Report:
    """What a page is made of."""

    name: str
    game: Game
    sample: int  # games to be read, of each set
    made: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M"))
    missing: list[str] = field(default_factory=list)
    plays: list[tuple[str, GameSample]] = field(default_factory=list)  # sets of self-play games, by name
    logs: list[tuple[str, list[Mapping]]] = field(default_factory=list)  # log histories of trainings, by name
    matches: dict = field(default_factory=lambda: NO_MATCHES)  # as matches.json; those of a loop together
    reasoning: list[Mapping] = field(default_factory=list)  # the rows of the reasoning table
    settings: list[tuple[str, list[list[str]]]] = field(default_factory=list)  # names and values, by file
    sources: list[dict] = field(default_factory=list)  # sets of games to read: name, games, sampled
    games: list[dict] = field(default_factory=list)  # "source" is the place of theirs

    def count(self, name: str, paths: Iterable[Path], *, unfinished: bool = False) -> GameSample:
        """Count the games of files and keep a sample; of `unfinished` ones a line being written is passed over."""
        counted = GameSample(self.game, self.sample)
        for path in paths:
            if unfinished and path.is_file() and not path.stat().st_size:
                continue
            for where, episode in iter_records(path, skip_bad=unfinished, on_skip=log_skipped):
                try:
                    counted.add(episode)
                except (ValueError, TypeError, AttributeError, LookupError) as error:  # a game may get odd messages
                    raise ValueError(f"{where}: {error}") from None
        games = counted.sampled()
        self.games += [game | {"source": len(self.sources)} for game in games]
        self.sources.append({"name": name, "games": counted.games, "sampled": len(games)})
        return counted

    def read(self, path: Path, parse: Callable[[Any], T]) -> T | None:
        """What `parse` makes of the JSON in a file; None if there is none, and a note if it is odd or half written."""
        if not path.is_file():
            return None
        try:
            text = path.read_text(encoding="utf-8")
            return parse(json.loads(text, parse_float=_finite, parse_int=_whole, parse_constant=lambda name: None))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            self.missing.append(f"{path}: not readable ({error!r:.200})")
            return None

    # --- the folder of one stage; whether there is anything -------------------------------------------------------

    def read_play(self, name: str, folder: Path) -> bool:
        """The games of self-play, finished or still being played."""
        results = sorted(folder.glob("*_results.json"))
        paths = results or sorted(path for path in folder.glob("*.jsonl") if RANK_FILE.search(path.name))
        if paths and (games := self.count(f"{name}, self-play", paths, unfinished=not results)).games:
            self.plays.append((name, games))
            if not results:
                self.missing.append(f"{name}: games are still being played; {games.games:,} are there.")
        return bool(paths)

    def read_training(self, name: str, folder: Path) -> bool:
        """The log of a training; while it runs, the numbers stand in its last checkpoint."""
        places = (place / "trainer_state.json" for place in (folder, *reversed(checkpoints(folder))))
        entries = next(filter(None, (self.read(place, log_entries) for place in places)), [])
        if entries:
            self.logs.append((name, entries))
            if not (folder / "train_results.json").is_file():
                step = entries[-1]["step"]
                self.missing.append(f"{name}: training has not ended; its curves go to step {step}.")
        return bool(entries)

    def read_match(self, name: str, folder: Path) -> bool:
        """A folder of matches, added to those that are there."""
        results = self.read(folder / "matches.json", lambda results: match_results(results, self.game))
        if results is None:
            return False
        players = [*self.matches["settings"]["players"], *results["settings"]["players"]]
        settings = {"players": list(dict.fromkeys(players)), "against": results["settings"]["against"]}
        self.matches = {"settings": settings, "results": self.matches["results"] + results["results"]}
        games = folder / Path(results["games_path"]).name
        if games.is_file():
            self.count(f"{name}, match", [games])
        else:
            self.missing.append(f"{games}: the games of the match are not there.")
        return True

    def read_reasoning(self, name: str, folder: Path) -> bool:
        """The scores of tools/evaluate_reasoning.py."""
        self.reasoning = self.read(folder / "results.json", reasoning_rows) or []
        return bool(self.reasoning)

    def read_loop(self, folder: Path, epochs: Iterable[int]) -> None:
        """All of a loop's OUTPUT, and notes of what is not there."""
        for name in (IMITATION, *(f"epoch{number}" for number in epochs)):
            path = folder / name
            found = {
                "games": self.read_play(name, path / "episodes") or name == IMITATION,
                "training": self.read_training(name, path / "model"),
                f"match against {IMITATION}": self.read_match(name, path / "eval") or name == IMITATION,
            }
            self.missing += [f"{name}: no {kind}." for kind, there in found.items() if not there]
        self.read_reasoning(self.name, folder / "reasoning")
        planned = self.read(folder / "settings.json", lambda settings: int(settings["EPOCHS"])) or 0
        if planned > (last := max(epochs, default=0)):
            self.missing.append(f"epochs {last + 1} to {planned}: not begun.")


def report_of_folder(folder: Path, game: Game, sample: int) -> Report:
    """The report of all that is in a folder: a loop's OUTPUT, or a folder of play, a training, matches or scores."""
    report = Report(folder.absolute().name, game, sample)
    found = (re.fullmatch(r"epoch(\d{1,9})", path.name) for path in folder.glob("epoch*"))
    epochs = sorted(int(match[1]) for match in found if match)
    if epochs or (folder / IMITATION).is_dir():
        report.read_loop(folder, epochs)
    else:
        kinds = (report.read_training, report.read_match, report.read_reasoning, report.read_play)
        if not any(read(report.name, folder) for read in kinds) and not report.missing:
            raise ValueError(
                f"{folder}: neither {IMITATION}/ nor epoch1/ is there, and no games, training, matches or scores; "
                "give the OUTPUT of tools/run_spag.sh or one of its folders"
            )
    for path in sorted(folder.rglob("*settings.json"), key=lambda path: (len(path.parts), path)):
        if rows := report.read(path, lambda settings: list(flat(settings))):
            report.settings.append((str(path.relative_to(folder)), rows))
    return report


def report_of_episodes(paths: Sequence[Path], game: Game, sample: int) -> Report:
    """The report of files of episodes, one set each; several go by numbers, which the settings explain."""
    report = Report(paths[0].name if len(paths) == 1 else f"{len(paths)} files of games", game, sample)
    names = [f"file {number}" for number in range(1, len(paths) + 1)] if len(paths) > 1 else ["games"]
    for name, path in zip(names, paths, strict=True):
        report.plays.append((name, report.count(name, [path], unfinished=bool(RANK_FILE.search(path.name)))))
    report.settings.append(("Files", [[name, str(path)] for name, path in zip(names, paths, strict=True)]))
    return report


# --- what stands in the files --------------------------------------------------------------------------------------


def log_entries(state: Mapping) -> list[Mapping]:
    """The entries of a trainer_state.json that have a step."""
    return [entry for entry in state["log_history"] if isinstance(entry["step"], (int, float))]


def match_results(results: dict, game: Game) -> dict:
    """A matches.json all of whose rows can be shown; ValueError if they are of another game."""
    for row in results["results"]:
        if row["role"] not in (BOTH, *game.roles):
            raise ValueError(f"matches of another game than {game.title}; --game names the one that was played")
        "".join(cells(row))
        row["points"] + sum(row["points_interval"])
    shown_rows(results), Path(results["games_path"])
    return results


def reasoning_rows(results: Mapping) -> list[Mapping]:
    """The rows of a reasoning table; all are named and have a value."""
    for row in results["results"]:
        "".join((row["model"], row["benchmark"], f"{row['value']:.1f} {row['stderr'] or 0:.1f}"))
    return results["results"]


def flat(settings: Mapping, prefix: str = "") -> Iterable[list[str]]:
    """Names and values, those of nested objects as outer.inner."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield [prefix + name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]


def _finite(text: str) -> float | None:
    return number if abs(number := float(text)) < LARGEST_NUMBER else None


def _whole(text: str) -> int | None:
    return int(text) if len(text) <= LONGEST_NUMBER else None
