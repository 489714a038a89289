"""Reads what a report shows: the output of the loop, or one of its folders. No torch.

All games are counted, and a random sample of bounded size is kept to be read. Counting takes about 0.1 KiB a game.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from tools.games.game import GUESS, SECRET, Game, Verdict
from tools.players.player import LENGTH
from tools.selfplay.counts import GameCounts
from utils import UserError, iter_records, read_json

IMITATION = "imitation"
GAME_FILES, MATCHES, TRAINING = "*_results.json", "matches.json", "trainer_state.json"
SAMPLE = 200  # games to be read from each file of games


class GameSample(GameCounts):
    """Counts of all games, and a random sample of about SAMPLE: equally many of each outcome, if there are enough."""

    def __init__(self, game: Game):
        super().__init__(game)
        self.most = math.ceil(SAMPLE / len(game.outcomes))  # games kept of each outcome
        self.rng = random.Random(0)
        self.points: Counter[str] = Counter()  # sums by role, as in a match
        self.kept: dict[str, list[dict]] = {outcome.name: [] for outcome in game.outcomes}

    def add(self, episode: Mapping, verdict: Verdict | None = None) -> None:
        """Count one game. Without `verdict` it must store its outcome and length."""
        verdict = verdict or Verdict(episode["outcome"], episode["length"])
        # Reservoir sampling: after n games of an outcome, each of them is kept with probability `most` / n.
        kept, seen = self.kept[verdict.outcome], self.outcomes[verdict.outcome]
        place = seen if seen < self.most else self.rng.randrange(seen + 1)
        if place < self.most:
            kept[place : place + 1] = [shown_game(self.game, self.games, episode, verdict)]
        super().add(episode, verdict)
        played = episode["history"][: verdict.length]
        points = self.game.checked_points(episode["target_word"], played, verdict.outcome)
        self.points.update(dict(zip(self.game.roles, points, strict=True)))

    def sampled(self) -> list[dict]:
        """The kept games in the order of the file."""
        return sorted((game for games in self.kept.values() for game in games), key=lambda game: game["number"])


def shown_game(game: Game, number: int, episode: Mapping, verdict: Verdict) -> dict:
    """One game as the page's script reads it. `number` is its place in the file, from 0."""
    word, replies, messages = episode["target_word"], episode.get("replies", ()), []
    for place, (message, reply) in enumerate(zip_longest(episode["history"], replies, fillvalue={}), start=1):
        role = message["role"]
        kinds = ["first" if role == game.roles[0] else "second"]
        player = f"{role}, {episode[role]}" if role in episode else role  # a match stores its players
        notes = [player, f"message {place}"]
        if place == verdict.length and verdict.outcome != game.outcomes[-1].name:
            kinds.append("decisive")
            notes.append(f"decides: {verdict.outcome}")
        if place > verdict.length:
            kinds.append("late")
            notes.append("after the end of the game, not counted")
        if reply.get("finish_reason") == LENGTH:
            notes.append("cut off at the token limit")
        parts = marked(game, word, message["content"])
        messages.append({"kinds": " ".join(kinds), "notes": " · ".join(notes), "parts": parts})
    return {"number": number, "word": word, **verdict._asdict(), "messages": messages}


def marked(game: Game, task: str, text: str) -> list[list[str]]:
    """Split a text into [kinds, piece] by the game's marks; kinds are "", SECRET, GUESS, or both with a blank."""
    marks = game.marks(task, text)
    edges = sorted({0, len(text), *(edge for _, *span in marks for edge in span)})
    pieces = []
    for start, end in zip(edges, edges[1:], strict=False):
        kinds = {kind for kind, first, last in marks if first <= start < last}
        pieces.append([" ".join(kind for kind in (SECRET, GUESS) if kind in kinds), text[start:end]])
    return pieces


@dataclass
class Report:
    """What a page shows."""

    name: str
    game: Game
    missing: list[str] = field(default_factory=list)
    plays: list[tuple[str, GameSample]] = field(default_factory=list)  # self-play by name, such as "epoch1"
    logs: list[tuple[str, list[Mapping]]] = field(default_factory=list)  # log histories of trainings by name
    matches: dict = field(default_factory=lambda: {"settings": {"players": [], "against": None}, "results": []})
    match_game: str = ""  # the name of another game, if the matches are of another one
    reasoning: list[Mapping] = field(default_factory=list)  # the rows of the reasoning table
    sources: list[dict] = field(default_factory=list)  # files of games to read: name, games, sampled
    games: list[dict] = field(default_factory=list)  # "source" is the place in `sources`

    def read(self, name: str, folder: Path) -> None:
        """Add what a folder holds: a training, or matches and games of self-play."""
        if (path := folder / TRAINING).is_file():
            self.logs.append((name, read_json(path)["log_history"]))
            return
        games = sorted(folder.glob(GAME_FILES))
        if (path := folder / MATCHES).is_file():
            of_match = folder / self.read_match(read_json(path))
            games = [path for path in games if path != of_match]
            if of_match.is_file() and not self.match_game:
                self.count(f"{name}, match", of_match)
        for path in games:
            label = name if len(games) == 1 else path.stem
            self.plays.append((label, self.count(f"{label}, self-play", path)))

    def read_match(self, found: Mapping) -> str:
        """Add the results of matches to those that were read before; return the name of their file of games."""
        settings = found["settings"]
        played = settings.get("game", {}).get("path", self.game.name)
        self.match_game = "" if played == self.game.name else played
        players = dict.fromkeys([*self.matches["settings"]["players"], *settings["players"]])
        settings = {"players": list(players), "against": settings["against"]}
        self.matches = {"settings": settings, "results": self.matches["results"] + found["results"]}
        return Path(found["games_path"]).name

    def count(self, name: str, path: Path) -> GameSample:
        """Count the games of a file and keep a sample; games without an outcome are judged."""
        counted = GameSample(self.game)
        for where, episode in iter_records(path):
            try:
                self.game.check_episode(episode)
                history, word, turns = episode["history"], episode["target_word"], episode["max_turns"]
                counted.add(episode, None if "outcome" in episode else self.game.judge(history, word, turns))
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise UserError(f"{where}: cannot be shown: {error}") from None
        games = counted.sampled()
        self.games += [game | {"source": len(self.sources)} for game in games]
        self.sources.append({"name": name, "games": counted.games, "sampled": len(games)})
        return counted


def read_folder(folder: Path, game: Game) -> Report:
    """What is in a loop's OUTPUT, or in a folder of games, a training, matches or scores; UserError for others."""
    report = Report(folder.absolute().name, game)
    epochs = [path for path in folder.glob("epoch*") if re.fullmatch("epoch[0-9]+", path.name)]
    epochs.sort(key=lambda path: int(path.name.removeprefix("epoch")))
    for stage in (folder, folder / IMITATION, *epochs):
        for place in (stage, stage / "episodes", stage / "model", stage / "eval"):
            report.read(stage.absolute().name, place)
    for place in (folder, folder / "reasoning"):
        if (path := place / "results.json").is_file():  # of tools/evaluate_reasoning.py
            report.reasoning += read_json(path)["results"]
    if not (report.sources or report.logs or report.reasoning or report.matches["results"]):
        raise UserError(f"{folder}: no games, training, matches or scores; give OUTPUT of tools/run_spag.sh or a part")
    if (settings := folder / "settings.json").is_file():  # the record of the loop, if it has EPOCHS
        planned = int(read_json(settings).get("settings", {}).get("EPOCHS", 0))
        for stage, found in (("self-play", dict(report.plays)), ("training", dict(report.logs))):
            names = (f"epoch{number}" for number in range(1, planned + 1))
            if missing := [name for name in names if name not in found]:
                report.missing.append(f"{stage} of {', '.join(missing)}: not finished")
    return report
