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
GAME_FILES = "*_*_*_results.json"  # of finished self-play
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
    reasoning: list[Mapping] = field(default_factory=list)  # the rows of the reasoning table
    sources: list[dict] = field(default_factory=list)  # files of games to read: name, games, sampled
    games: list[dict] = field(default_factory=list)  # "source" is the place in `sources`

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

    def read_play(self, name: str, folder: Path) -> None:
        """The games of finished self-play."""
        paths = sorted(folder.glob(GAME_FILES))
        for path in paths:
            label = name if len(paths) == 1 else path.stem
            self.plays.append((label, self.count(f"{label}, self-play", path)))

    def read_training(self, name: str, folder: Path) -> None:
        """The log of a finished training."""
        if (path := folder / "trainer_state.json").is_file():
            self.logs.append((name, read_json(path)["log_history"]))

    def read_match(self, name: str, folder: Path) -> None:
        """A folder of matches, added to those that were read before."""
        if not (path := folder / "matches.json").is_file():
            return
        found = read_json(path)
        games = folder / Path(found["games_path"]).name
        if games.is_file():
            self.count(f"{name}, match", games)
        players = [*self.matches["settings"]["players"], *found["settings"]["players"]]
        settings = {"players": list(dict.fromkeys(players)), "against": found["settings"]["against"]}
        self.matches = {"settings": settings, "results": self.matches["results"] + found["results"]}

    def read_reasoning(self, folder: Path) -> None:
        """The scores of tools/evaluate_reasoning.py."""
        if (path := folder / "results.json").is_file():
            self.reasoning += read_json(path)["results"]


def read_folder(folder: Path, game: Game) -> Report:
    """What is in a loop's OUTPUT, or in a folder of games, a training, matches or scores; UserError for others."""
    report = Report(folder.absolute().name, game)
    epochs = [path for path in folder.glob("epoch*") if re.fullmatch("epoch[0-9]+", path.name)]
    epochs.sort(key=lambda path: int(path.name.removeprefix("epoch")))
    for stage in (folder, folder / IMITATION, *epochs):
        name = stage.absolute().name
        for place in (stage, stage / "episodes", stage / "model", stage / "eval"):
            report.read_play(name, place)
            report.read_training(name, place)
            report.read_match(name, place)
    report.read_reasoning(folder)
    report.read_reasoning(folder / "reasoning")
    if not (report.sources or report.logs or report.reasoning or report.matches["results"]):
        raise UserError(f"{folder}: no games, training, matches or scores; give OUTPUT of tools/run_spag.sh or a part")
    if (settings := folder / "settings.json").is_file():
        planned = [f"epoch{number}" for number in range(1, int(read_json(settings).get("EPOCHS", 0)) + 1)]
        for stage, found in (("self-play", dict(report.plays)), ("training", dict(report.logs))):
            if missing := [name for name in planned if name not in found]:
                report.missing.append(f"{stage} of {', '.join(missing)}: not finished")
    return report
