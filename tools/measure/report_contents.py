"""Reads the contents of a report: the loop's output, finished or not, or one of its folders. No torch."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.common.errors import UserError
from tools.common.files import read_json, read_json_or_jsonl
from tools.games.game import Game
from tools.measure.matches import read_matches
from tools.selfplay.episodes import summary
from tools.selfplay.rewards import check_episodes

SAMPLE = 200  # games per file to include in the page


@dataclass
class Report:
    name: str
    game: Game
    plays: dict[str, dict] = field(default_factory=dict)  # summaries of self-play, by name such as "epoch1"
    logs: dict[str, list[Mapping]] = field(default_factory=dict)  # log histories of trainings, by name
    matches: list[Mapping] = field(default_factory=list)  # contents of matches.json
    reasoning: list[Mapping] = field(default_factory=list)  # rows of reasoning/results.json
    belief: list[Mapping] = field(default_factory=list)  # rows of belief.json
    sources: list[str] = field(default_factory=list)  # names of files of games
    games: list[dict] = field(default_factory=list)  # sampled; "source" is an index into `sources`

    def read(self, name: str, folder: Path) -> None:
        if (path := folder / "trainer_state.json").is_file():
            self.logs[name] = read_json(path)["log_history"]
            return  # train_results.json beside it has no games
        matches = folder / "matches.json"
        if matches.is_file():
            self.matches.append(read_matches(matches))
        for path in sorted(folder.glob("*_results.json")):
            episodes = read_episodes(path, self.game)
            if matches.is_file():
                self.sample(f"{name}, match", episodes)
            else:
                label = path.stem if name in self.plays else name
                self.plays[label] = summary(self.game, episodes)
                self.sample(f"{label}, self-play", episodes)

    def sample(self, name: str, episodes: Sequence[Mapping]) -> None:
        """Draw the games to include, with a fixed seed, so that a page shows the same games when it is remade."""
        numbers = sorted(random.Random(0).sample(range(len(episodes)), min(SAMPLE, len(episodes))))
        source = len(self.sources)
        self.games += [shown_game(self.game, number, episodes[number]) | {"source": source} for number in numbers]
        self.sources.append(name)


def read_episodes(path: Path, game: Game) -> list[dict]:
    """The games of a file. A game without an outcome or length, such as other people's, is judged.

    A stored outcome counts, even if the judge now has other options.
    """
    episodes = read_json_or_jsonl(path)
    check_episodes(game, episodes, f"{path}: game", 1)
    outcomes = [outcome.name for outcome in game.outcomes]
    for episode in episodes:
        if episode.get("outcome") not in outcomes or not isinstance(episode.get("length"), int):
            verdict = game.judge(episode["history"], episode["target_word"], episode["max_turns"])
            episode.update(verdict._asdict())
    return episodes


def shown_game(game: Game, number: int, episode: Mapping) -> dict:
    """One game for the page's script. `number` is its index in the file."""
    word = episode["target_word"]
    outcome = episode["outcome"]
    length = episode["length"]
    messages = []
    for number_of_message, message in enumerate(episode["history"], start=1):
        role = message["role"]
        player = f"{role}, {episode[role]}" if role in episode else role  # matches store their players
        kinds = ["first" if role == game.roles[0] else "second"]
        notes = [player, f"message {number_of_message}"]
        if number_of_message == length and outcome != game.outcomes[-1].name:
            kinds.append("decisive")
            notes.append(f"decides: {outcome}")
        if number_of_message > length:
            kinds.append("late")
            notes.append("after the end of the game, not counted")
        parts = split_at_marks(game, word, message["content"])
        messages.append({"kinds": " ".join(kinds), "notes": " · ".join(notes), "parts": parts})
    return {"number": number, "word": word, "outcome": outcome, "length": length, "messages": messages}


def split_at_marks(game: Game, task: str, text: str) -> list[list[str]]:
    """Split a text into [kinds, piece] by the game's marks; kinds are "", "guess", "secret" or "guess secret"."""
    marks = game.marks(task, text)
    edges = {0, len(text)}
    for _, first, last in marks:
        edges |= {first, last}
    pieces = []
    for start, end in itertools.pairwise(sorted(edges)):
        kinds = {kind for kind, first, last in marks if first <= start < last}
        pieces.append([" ".join(sorted(kinds)), text[start:end]])
    return pieces


def read_folder(folder: Path, game: Game) -> Report:
    """The contents of a loop's OUTPUT or one of its folders. UserError for other folders.

    Files are found by name. Running stages are not shown, because *_results.json, matches.json, and trainer_state.json
    beside a model are written at their end.
    """
    report = Report(folder.absolute().name, game)
    # In numerical order, up to epoch 99.
    epochs = [*sorted(folder.glob("epoch[0-9]")), *sorted(folder.glob("epoch[0-9][0-9]"))]
    for part in (folder, folder / "imitation", *epochs):
        for subfolder in (part, part / "episodes", part / "model", part / "eval"):
            report.read(part.absolute().name, subfolder)
        for path in (part / "belief.json", part / "belief" / "belief.json"):
            rows = read_json(path)["table"] if path.is_file() else ()
            report.belief += [row for row in rows if row["hints"] != "last"]
    for path in (folder / "results.json", folder / "reasoning" / "results.json"):
        report.reasoning += read_json(path)["results"] if path.is_file() else ()
    if not (report.sources or report.logs or report.reasoning or report.belief or report.matches):
        raise UserError(f"{folder}: no games, training, matches or scores; name the loop's output or a folder in it")
    return report
