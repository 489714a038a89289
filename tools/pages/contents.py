"""What there is to report: a run of the loop, any one of its folders, or files of episodes.

Every game is counted and a bounded sample kept to be read, so that memory does not grow with their number. No torch.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from tools.games.game import GUESS, SECRET, Game, Verdict
from tools.matches.stats import BOTH, Match
from tools.matches.text import cells, shown_rows
from tools.players.player import LENGTH
from tools.selfplay.counts import GameCounts
from utils import iter_records, log_skipped

IMITATION = "imitation"
RESULTS, RANK_FILES = "*_*_*_results.json", "*_*_*_rank*.jsonl"  # of play: finished, still going on
LARGEST_NUMBER = 1e300  # sums stay finite
NO_MATCHES = {"settings": {"players": [], "against": None}, "results": []}
MOST_CHARACTERS = 4000  # of a message that are shown
# Control characters, marks that turn the direction of writing around, and halves of characters.
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
T = TypeVar("T")


class GameSample(GameCounts):
    """Games as they come: counts of all, and of each outcome a uniform sample of at most `size` games."""

    def __init__(self, game: Game, size: int):
        super().__init__(game)
        self.size, self.rng = size, random.Random(0)
        self.points: Counter[str] = Counter()  # by role, as in a match
        self.kept: dict[str, list[tuple[int, Mapping, Verdict]]] = {outcome.name: [] for outcome in game.outcomes}

    def add(self, episode: Mapping) -> None:
        """Count one game. Raises ValueError for an episode that is none, or of another game."""
        verdict = stored_or_judged(self.game, episode)
        # Reservoir sampling: each of the n games of an outcome stays with probability size / n.
        kept, seen = self.kept[verdict.outcome], self.outcomes[verdict.outcome]
        place = seen if seen < self.size else self.rng.randrange(seen + 1)
        if place < self.size:
            kept[place : place + 1] = [(self.games, episode, verdict)]
        super().add(episode, verdict)
        played = episode["history"][: verdict.length]
        points = self.game.checked_points(episode["target_word"], played, verdict.outcome)
        self.points.update(dict(zip(self.game.roles, points, strict=True)))

    def sampled(self) -> list[dict]:
        """At most `size` games in the order of the file, as the page shows them; all outcomes as far as they go."""
        for games in self.kept.values():
            self.rng.shuffle(games)  # the first places of a reservoir favour early games
        in_turn = [game for turn in zip_longest(*self.kept.values()) for game in turn if game]
        chosen = sorted(in_turn[: self.size], key=lambda kept: kept[0])
        return [shown_game(self.game, *kept) for kept in chosen]


def stored_or_judged(game: Game, episode: Mapping) -> Verdict:
    """How a game ended: as the episode says or, where it does not, by the rules. ValueError: it is no game."""
    game.check_episode(episode)
    history, outcome, length = episode["history"], episode.get("outcome"), episode.get("length")
    known = any(outcome == one.name for one in game.outcomes)
    if known and type(length) is int and 0 <= length <= len(history):
        return Verdict(outcome, length)
    return game.judge(history, episode["target_word"], episode["max_turns"])


def shown_game(game: Game, number: int, episode: Mapping, verdict: Verdict) -> dict:
    """A game as the page takes it; `number` is its place in the file, from 0."""
    word, history, replies = episode["target_word"], episode["history"], episode.get("replies") or ()
    labels = {key: visible(str(episode[key])) for key in Match.keys(game) if isinstance(episode.get(key), (str, int))}
    messages = []
    for place, (message, reply) in enumerate(zip_longest(history, replies[: len(history)], fillvalue={}), start=1):
        decides = place == verdict.length and verdict.outcome != game.outcomes[-1].name
        late = place > verdict.length
        notes = [
            f"{message['role']}, {labels[message['role']]}" if message["role"] in labels else message["role"],
            f"message {place}",
            *[f"decides: {verdict.outcome}"] * decides,
            *["not counted: after the end of the game"] * late,
            *["cut off at the token limit"] * (reply.get("finish_reason") == LENGTH),
        ]
        kinds = ["first" if message["role"] == game.roles[0] else "second", *["decisive"] * decides, *["late"] * late]
        text = marked(game, word, message["content"])
        messages.append({"kinds": " ".join(kinds), "notes": " · ".join(notes), "parts": text})
    return {
        "number": number,
        "word": visible(word),
        "outcome": verdict.outcome,
        "length": verdict.length,
        "labels": "".join(f" · {key}: {labels[key]}" for key in ("words", "seed") if key in labels),
        "messages": messages,
    }


def marked(game: Game, task: str, text: str) -> list[list[str]]:
    """The text in (kinds, text) pieces by the game's marks: "", SECRET, GUESS, or both with a blank between."""
    shown, marks = text[:MOST_CHARACTERS], game.marks(task, text[:MOST_CHARACTERS])
    edges = sorted({0, len(shown), *(edge for _, *span in marks for edge in span)})
    pieces = []
    for start, end in zip(edges, edges[1:], strict=False):
        kinds = {kind for kind, first, last in marks if first <= start < last}
        pieces.append([" ".join(kind for kind in (SECRET, GUESS) if kind in kinds), visible(shown[start:end])])
    if len(text) > len(shown):
        pieces.append(["", f" … and {len(text) - len(shown):,} more characters"])
    return pieces


def visible(text: str) -> str:
    """The text with all that a browser would not show, or would let change what it shows, written as escapes."""
    return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@dataclass
class Report:
    """What a page is made of."""

    name: str
    game: Game
    sample: int  # games to be read, of each set
    missing: list[str] = field(default_factory=list)
    plays: list[tuple[str, GameSample]] = field(default_factory=list)  # sets of self-play games, by name
    logs: list[tuple[str, list[Mapping]]] = field(default_factory=list)  # log histories of trainings, by name
    matches: dict = field(default_factory=lambda: NO_MATCHES)  # as matches.json; those of a loop together
    reasoning: list[Mapping] = field(default_factory=list)  # the rows of the reasoning table
    settings: list[tuple[str, str]] = field(default_factory=list)  # files of settings, by path
    sources: list[dict] = field(default_factory=list)  # sets of games to read: name, games, sampled
    games: list[dict] = field(default_factory=list)  # "source" is the place of theirs

    def count(self, name: str, paths: Iterable[Path], *, unfinished: bool = False) -> GameSample:
        """Count the games of files and keep a sample; of `unfinished` ones a line being written is passed over."""
        counted = GameSample(self.game, self.sample)
        for path in paths:
            if unfinished and path.is_file() and not path.stat().st_size:
                continue
            for where, episode in iter_records(path, on_skip=log_skipped if unfinished else None):
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
            return parse(json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_number))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            self.missing.append(f"{path}: not readable ({error!r:.200})")
            return None

    def read_play(self, name: str, folder: Path) -> None:
        """The games of self-play, finished or still being played."""
        results = sorted(folder.glob(RESULTS))
        if paths := results or sorted(folder.glob(RANK_FILES)):
            games = self.count(f"{name}, self-play", paths, unfinished=not results)
            self.plays += [(name, games)] if games.games else []
            if not results:
                self.missing.append(f"{name}: games are still being played; {games.games:,} are there.")

    def read_training(self, name: str, folder: Path) -> None:
        """The log of a training; while it runs, the numbers stand in its last checkpoint."""
        saved = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime, reverse=True)
        places = (place / "trainer_state.json" for place in (folder, *saved))
        if entries := next(filter(None, (self.read(place, log_entries) for place in places)), None):
            self.logs.append((name, entries))
            if not (folder / "train_results.json").is_file():
                step = entries[-1]["step"]
                self.missing.append(f"{name}: training has not ended; its curves go to step {step}.")

    def read_match(self, name: str, folder: Path) -> None:
        """A folder of matches, added to those that are there."""
        results = self.read(folder / "matches.json", lambda results: match_results(results, self.game))
        if results is None:
            return
        players = [*self.matches["settings"]["players"], *results["settings"]["players"]]
        settings = {"players": list(dict.fromkeys(players)), "against": results["settings"]["against"]}
        self.matches = {"settings": settings, "results": self.matches["results"] + results["results"]}
        games = folder / Path(results["games_path"]).name
        if games.is_file():
            self.count(f"{name}, match", [games])
        else:
            self.missing.append(f"{games}: the games of the match are not there.")

    def read_reasoning(self, name: str, folder: Path) -> None:
        """The scores of tools/evaluate_reasoning.py."""
        self.reasoning += self.read(folder / "results.json", reasoning_rows) or []


def report_of_folder(folder: Path, game: Game, sample: int) -> Report:
    """The report of all that is in a folder: a loop's OUTPUT, or a folder of play, a training, matches or scores."""
    report = Report(folder.absolute().name, game, sample)
    found = (re.fullmatch(r"epoch(\d{1,9})", path.name) for path in folder.glob("epoch*"))
    epochs = sorted(int(match[1]) for match in found if match)
    for stage in (folder, folder / IMITATION, *(folder / f"epoch{number}" for number in epochs)):
        name = stage.absolute().name
        for place in (stage, stage / "episodes", stage / "model", stage / "eval", stage / "reasoning"):
            for read in (report.read_play, report.read_training, report.read_match, report.read_reasoning):
                read(name, place)
    planned = report.read(folder / "settings.json", lambda settings: int(settings.get("EPOCHS", 0))) or 0
    if planned > (last := max(epochs, default=0)):
        report.missing.append(f"epochs {last + 1} to {planned}: not begun.")
    if not (report.sources or report.logs or report.reasoning or report.matches["results"]):
        nothing = f"{folder}: no games, training, matches or scores; give OUTPUT of tools/run_spag.sh or a part of it"
        raise ValueError("; ".join(report.missing) or nothing)
    for path in sorted(folder.rglob("*settings.json"), key=lambda path: (len(path.parts), path)):
        if path.is_file():
            report.settings.append((str(path.relative_to(folder)), path.read_text("utf-8", errors="replace")))
    return report


def report_of_episodes(paths: Sequence[Path], game: Game, sample: int) -> Report:
    """The report of files of episodes, one set each; several go by numbers, which the settings explain."""
    report = Report(paths[0].name if len(paths) == 1 else f"{len(paths)} files of games", game, sample)
    names = [f"file {number}" for number in range(1, len(paths) + 1)] if len(paths) > 1 else ["games"]
    for name, path in zip(names, paths, strict=True):
        report.plays.append((name, report.count(name, [path], unfinished=path.match("*_rank*.jsonl"))))
    files = "\n".join(f"{name}: {path}" for name, path in zip(names, paths, strict=True))
    report.settings.append(("Files", files))
    return report


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


def _number(text: str) -> float | None:
    """A number of JSON; None for one that no chart can show."""
    if not abs(float(text)) < LARGEST_NUMBER:
        return None
    return int(text) if text.lstrip("-").isdigit() else float(text)
