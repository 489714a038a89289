"""Reads what a report shows: a run of the loop, one of its folders, or files of episodes. No torch.

All games are counted, and a random sample of bounded size is kept to be read. Counting takes about 0.1 KiB a game.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from tools.games.game import GUESS, SECRET, Game, Verdict
from tools.matches.stats import BOTH
from tools.players.player import LENGTH
from tools.selfplay.counts import GameCounts
from utils import UserError, iter_records, log_skipped, read_json

IMITATION = "imitation"
RESULTS, RANK_FILES = "*_*_*_results.json", "*_*_*_rank*.jsonl"  # of finished and of unfinished play
# Control characters, characters that change the direction of writing, and halves of characters.
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class GameSample(GameCounts):
    """Counts of all games, and a random sample of about `size` of them: as many of each outcome as there are."""

    def __init__(self, game: Game, size: int):
        super().__init__(game)
        self.share = math.ceil(size / len(game.outcomes))  # games kept of each outcome
        self.rng = random.Random(0)
        self.points: Counter[str] = Counter()  # sums by role, as in a match
        self.kept: dict[str, list[dict]] = {outcome.name: [] for outcome in game.outcomes}

    def check(self, episode: Mapping) -> None:
        """Raise ValueError for an invalid episode, or one of another game."""
        self.game.check_episode(episode)
        replies = episode.get("replies", [])
        if not isinstance(replies, list) or not all(isinstance(reply, dict) for reply in replies):
            raise ValueError("'replies' must be a list of objects")

    def add(self, episode: Mapping, verdict: Verdict | None = None) -> None:
        """Count one episode, which `check` has accepted."""
        verdict = verdict or stored_or_judged(self.game, episode)
        # Reservoir sampling: after n games of an outcome, each of them is kept with probability share / n.
        kept, seen = self.kept[verdict.outcome], self.outcomes[verdict.outcome]
        place = seen if seen < self.share else self.rng.randrange(seen + 1)
        if place < self.share:
            kept[place : place + 1] = [shown_game(self.game, self.games, episode, verdict)]
        super().add(episode, verdict)
        played = episode["history"][: verdict.length]
        points = self.game.checked_points(episode["target_word"], played, verdict.outcome)
        self.points.update(dict(zip(self.game.roles, points, strict=True)))

    def sampled(self) -> list[dict]:
        """The kept games as the page shows them, in the order of the file."""
        return sorted((game for games in self.kept.values() for game in games), key=lambda game: game["number"])


def stored_or_judged(game: Game, episode: Mapping) -> Verdict:
    """The outcome and length that an episode stores, or, without them, those by the rules."""
    history, outcome, length = episode["history"], episode.get("outcome"), episode.get("length")
    known = any(outcome == each.name for each in game.outcomes)
    if known and type(length) is int and 0 <= length <= len(history):
        return Verdict(outcome, length)
    return game.judge(history, episode["target_word"], episode["max_turns"])


def shown_game(game: Game, number: int, episode: Mapping, verdict: Verdict) -> dict:
    """One game as the page's script reads it; `number` is its place in the file, from 0."""
    word, history, replies = episode["target_word"], episode["history"], episode.get("replies", ())
    players = {role: visible(str(episode[role])) for role in game.roles if role in episode}  # in a match
    messages = []
    for place, (message, reply) in enumerate(zip_longest(history, replies[: len(history)], fillvalue={}), start=1):
        role = message["role"]
        decides = place == verdict.length and verdict.outcome != game.outcomes[-1].name
        late = place > verdict.length
        notes = [f"{role}, {players[role]}" if role in players else role, f"message {place}"]
        notes += [f"decides: {verdict.outcome}"] * decides + ["not counted: after the end of the game"] * late
        notes += ["cut off at the token limit"] * (reply.get("finish_reason") == LENGTH)
        kinds = ["first" if role == game.roles[0] else "second"] + ["decisive"] * decides + ["late"] * late
        text = marked(game, word, message["content"])
        messages.append({"kinds": " ".join(kinds), "notes": " · ".join(notes), "parts": text})
    return {
        "number": number,
        "word": visible(word),
        "outcome": verdict.outcome,
        "length": verdict.length,
        "messages": messages,
    }


def marked(game: Game, task: str, text: str) -> list[list[str]]:
    """Split a text into [kinds, piece] by the game's marks; kinds are "", SECRET, GUESS, or both with a blank."""
    marks = game.marks(task, text)
    edges = sorted({0, len(text), *(edge for _, *span in marks for edge in span)})
    pieces = []
    for start, end in zip(edges, edges[1:], strict=False):
        kinds = {kind for kind, first, last in marks if first <= start < last}
        pieces.append([" ".join(kind for kind in (SECRET, GUESS) if kind in kinds), visible(text[start:end])])
    return pieces


def visible(text: str) -> str:
    """The text with escapes for the characters that a browser hides or that change what it shows."""
    return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@dataclass
class Report:
    """What a page shows."""

    name: str
    game: Game
    sample: int  # games to be read, of each set
    missing: list[str] = field(default_factory=list)
    plays: list[tuple[str, GameSample]] = field(default_factory=list)  # sets of self-play games, by name
    logs: list[tuple[str, list[Mapping]]] = field(default_factory=list)  # log histories of trainings, by name
    matches: dict = field(default_factory=lambda: {"settings": {"players": [], "against": None}, "results": []})
    reasoning: list[Mapping] = field(default_factory=list)  # the rows of the reasoning table
    settings: list[tuple[str, str]] = field(default_factory=list)  # the text of settings files, by path
    sources: list[dict] = field(default_factory=list)  # sets of games to read: name, games, sampled
    games: list[dict] = field(default_factory=list)  # "source" is the place in `sources`

    def count(self, name: str, paths: Iterable[Path], *, unfinished: bool = False) -> GameSample:
        """Count the games of files and keep a sample; of `unfinished` play, skip a half-written line."""
        counted = GameSample(self.game, self.sample)
        for path in paths:
            if unfinished and path.is_file() and not path.stat().st_size:
                continue
            for where, episode in iter_records(path, on_skip=log_skipped if unfinished else None):
                try:
                    counted.check(episode)
                except ValueError as error:
                    raise UserError(f"{where}: {error}") from None
                counted.add(episode)
        games = counted.sampled()
        self.games += [game | {"source": len(self.sources)} for game in games]
        self.sources.append({"name": name, "games": counted.games, "sampled": len(games)})
        return counted

    def read(self, path: Path) -> dict:
        """The object in a JSON file; {} without the file, and with a note on the page for one that is half written."""
        if not path.is_file():
            return {}
        try:
            found = read_json(path)
        except UserError as error:
            self.missing.append(str(error))
            return {}
        return found if isinstance(found, dict) else {}

    def read_play(self, name: str, folder: Path) -> None:
        """The games of self-play, finished or under way."""
        results = sorted(folder.glob(RESULTS))
        if paths := results or sorted(folder.glob(RANK_FILES)):
            games = self.count(f"{name}, self-play", paths, unfinished=not results)
            self.plays += [(name, games)] if games.games else []
            if not results:
                self.missing.append(f"{name}: games are still being played; {games.games:,} are there.")

    def read_training(self, name: str, folder: Path) -> None:
        """The log of a training. While it runs, its last checkpoint has the log."""
        last = max(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime, default=None)
        state = self.read(folder / "trainer_state.json") or (self.read(last) if last else {})
        if entries := state.get("log_history"):
            self.logs.append((name, entries))
            if not (folder / "train_results.json").is_file():
                step = entries[-1]["step"]
                self.missing.append(f"{name}: training has not ended; its curves go to step {step}.")

    def read_match(self, name: str, folder: Path) -> None:
        """A folder of matches, added to those that were read before."""
        if not (results := self.read(folder / "matches.json")):
            return
        if not {row["role"] for row in results["results"]} <= {BOTH, *self.game.roles}:
            raise UserError(f"{folder}: matches of another game; --game names the one that was played")
        players = [*self.matches["settings"]["players"], *results["settings"]["players"]]
        settings = {"players": list(dict.fromkeys(players)), "against": results["settings"]["against"]}
        self.matches = {"settings": settings, "results": self.matches["results"] + results["results"]}
        games = folder / Path(str(results["games_path"])).name
        if games.is_file():
            self.count(f"{name}, match", [games])
        else:
            self.missing.append(f"{games}: the games of the match are not there.")

    def read_reasoning(self, name: str, folder: Path) -> None:
        """The scores of tools/evaluate_reasoning.py."""
        self.reasoning += self.read(folder / "results.json").get("results", [])


def report_of_folder(folder: Path, game: Game, sample: int) -> Report:
    """The report of a loop's OUTPUT, or of a folder of play, a training, matches or scores; UserError for others."""
    report = Report(folder.absolute().name, game, sample)
    found = (re.fullmatch(r"epoch(\d{1,9})", path.name) for path in folder.glob("epoch*"))
    epochs = sorted(int(match[1]) for match in found if match)
    for stage in (folder, folder / IMITATION, *(folder / f"epoch{number}" for number in epochs)):
        name = stage.absolute().name
        for place in (stage, stage / "episodes", stage / "model", stage / "eval", stage / "reasoning"):
            for read in (report.read_play, report.read_training, report.read_match, report.read_reasoning):
                read(name, place)
    planned = int(report.read(folder / "settings.json").get("EPOCHS", 0))
    if planned > (last := max(epochs, default=0)):
        report.missing.append(f"epochs {last + 1} to {planned}: not begun.")
    if not (report.sources or report.logs or report.reasoning or report.matches["results"]):
        nothing = f"{folder}: no games, training, matches or scores; give OUTPUT of tools/run_spag.sh or a part of it"
        raise UserError("; ".join(report.missing) or nothing)
    for path in sorted(folder.rglob("*settings.json"), key=lambda path: (len(path.parts), path)):
        if path.is_file():
            report.settings.append((str(path.relative_to(folder)), path.read_text("utf-8", errors="replace")))
    return report


def report_of_episodes(paths: Sequence[Path], game: Game, sample: int) -> Report:
    """The report of files of episodes."""
    report = Report(paths[0].name if len(paths) == 1 else f"{len(paths)} files of games", game, sample)
    for path in paths:
        report.plays.append((str(path), report.count(str(path), [path], unfinished=path.match("*_rank*.jsonl"))))
    return report
