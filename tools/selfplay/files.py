"""The files of one run of self-play: writing finished games, resuming the run, merging its ranks' files.

The files have one stem and are in one folder:

    STEM_rank0.jsonl ...   finished games of each rank, appended one by one; a restart does not play them again
    STEM_settings.json     the settings that the games depend on; a restart with other settings is refused
    STEM_results.json      all games in the order of the word list, written when the last game has ended
    STEM_summary.json      outcomes and counts of the results
    .STEM_....lock         empty files that the launch and each rank lock while they work
"""

import glob
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, TypedDict

import utils
from tools.games.game import Game
from tools.selfplay.counts import GameCounts
from utils import UserError, rank, world_size, write_json, write_records

NAMED = 5  # how many missing words an error message names
logger = logging.getLogger(__name__)


class Episode(TypedDict):
    """One finished game; the format is described in data/README.md."""

    index: int  # in the word list, from 0
    target_word: str
    max_turns: int
    history: list[dict[str, str]]  # "role" and "content"
    outcome: str
    length: int  # messages up to the decisive one
    replies: list[dict]  # for each message: "finish_reason", "tokens", "prompt_cut", ...


class GamesMissing(Exception):
    """Other ranks have left so many games unfinished. The same command can play them."""


class GameIndex:
    """The place of each finished game in the rank files, and the counts of these games."""

    def __init__(self, game: Game, words: Sequence[str], paths: Sequence[Path]):
        self.game, self.words, self.paths = game, words, paths
        self.places: dict[int, tuple[Path, int]] = {}  # by index: the file, and the offset of the game's line in it
        self.counts = GameCounts(game)
        for path in paths:
            for where, offset, episode in _whole_lines(path):
                self._add(where, (path, offset), episode)

    def missing(self) -> list[int]:
        """The indices of words without a finished game."""
        return [index for index in range(len(self.words)) if index not in self.places]

    def __iter__(self) -> Iterator[Episode]:
        """The games in the order of the word list; none may be missing."""
        with ExitStack() as stack:
            files = {path: stack.enter_context(open(path, "rb")) for path in self.paths}
            for index in range(len(self.words)):
                path, offset = self.places[index]
                files[path].seek(offset)
                yield json.loads(files[path].readline())

    def _add(self, where: str, place: tuple[Path, int], episode: dict) -> None:
        try:
            self.game.check_episode(episode)
            self.game.outcome(episode["outcome"])
            index, word, replies = episode["index"], episode["target_word"], episode["replies"]
            numbers = [index, episode["length"], *(reply["tokens"] for reply in replies)]
            numbers += [reply.get("prompt_tokens", 0) for reply in replies]
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError(f"'index', 'length' and tokens of replies are {numbers}; expected whole numbers")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"{where}: not a finished game ({error}); delete the line to have it played again"
            ) from None
        if index >= len(self.words) or index in self.places:  # beyond --max_games, or played twice
            return
        if word != self.words[index]:
            raise UserError(f"{where}: word {index} is {word!r}, in the word list {self.words[index]!r}")
        self.places[index] = place
        self.counts.add(episode)


class EpisodeFiles:
    """The files of a run, as one rank of a launch uses them."""

    def __init__(self, output_dir: str | Path, stem: str, words: Sequence[str], game: Game):
        self.folder, self.stem, self.words, self.game = Path(output_dir), stem, words, game
        self.results_path, self.summary_path = (self.folder / f"{stem}_{name}.json" for name in ("results", "summary"))
        names = ("rank*.jsonl", "settings.json", "results.json", "summary.json")
        self.settings = utils.RunSettings(
            self.folder / f"{stem}_settings.json",
            results=self._existing_games,
            remedy=f"use another --output_dir, or delete this run in {self.folder}: "
            + ", ".join(f"{stem}_{name}" for name in names),
        )
        self.own_path = self._rank_path(rank())
        self.own_file: BinaryIO | None = None

    def start(self, settings: dict) -> GameIndex:
        """Lock the run for this launch, which all its ranks do together, and return the games so far.

        Raises UserError, before anything is written, if the games in the folder were made with other settings, or if
        another launch is running there.
        """

        def claim() -> dict:
            locks = f".{glob.escape(self.stem)}_rank*.lock"
            for path in filter(utils.is_locked, self.folder.glob(locks)):  # a rank may outlive its rank 0
                raise UserError(utils.LOCKED.format(path))
            self.settings.claim(settings)
            self.settings.write(settings)
            return settings

        claimed = utils.from_rank_0(claim)
        if different := utils.differences(claimed, settings):
            raise UserError(f"rank {rank()} was started with other settings than rank 0 ({'; '.join(different)})")
        utils.lock(_lock_of(self.own_path))
        utils.from_rank_0(lambda: None)  # all ranks have their locks before rank 0 can reach meet_at_end
        self.own_file = _open_to_append(self.own_path)
        return self.finished()

    def append(self, episode: Mapping) -> None:
        """Store a finished game; it is on the disk when this returns."""
        with utils.naming_full_disk(self.own_path):
            self.own_file.write(json.dumps(episode, ensure_ascii=False).encode() + b"\n")
            self.own_file.flush()
            os.fsync(self.own_file.fileno())

    def finished(self) -> GameIndex:
        """The finished games of all ranks, including those of launches with other numbers of processes."""
        return GameIndex(self.game, self.words, self._rank_paths())

    def meet(self) -> None:
        """Wait until all ranks of this launch have ended their games."""
        self.own_file.close()
        utils.meet_at_end([_lock_of(self._rank_path(number)) for number in range(world_size())])

    def merge(self, *, seconds: float, tokens_before: int) -> dict:
        """Write results and summary, and return the summary; rank 0 does this after all ranks have met.

        Play took `seconds` in this start. The games of earlier starts have `tokens_before` new tokens. If games are
        missing, raises GamesMissing, or UserError if files of ranks are missing too.
        """
        all_there = all(self._rank_path(number).is_file() for number in range(world_size()))
        games = self.finished()
        if missing := games.missing():
            if all_there:
                raise GamesMissing(len(missing))
            ranks = sorted({index % world_size() for index in missing})
            named = ", ".join(self.words[index] for index in missing[:NAMED]) + ", ..." * (len(missing) > NAMED)
            raise UserError(
                f"{self.folder}: {len(missing)} games are missing, of ranks {ranks} ({named}). If these ranks have "
                "this folder on another disk, bring all rank files into one folder. Then run the same command again"
            )
        tokens = games.counts.tokens["new_tokens"] - tokens_before
        if not tokens and self.results_path.is_file() and self.summary_path.is_file():
            summary = utils.read_json(self.summary_path)
            if summary["games"] == len(self.words):
                logger.info("%s: all is there", self.results_path)
                return summary
        write_records(self.results_path, games)
        summary = games.counts.as_dict() | {"tokens_per_second": tokens / seconds if seconds else None}
        write_json(self.summary_path, summary)
        return summary

    def _existing_games(self) -> Path | None:
        """A file with games, if there is one. A launch that failed before its first game leaves none."""
        files = (*self._rank_paths(), self.results_path)
        return next((path for path in files if path.is_file() and path.stat().st_size), None)

    def _rank_path(self, number: int) -> Path:
        return self.folder / f"{self.stem}_rank{number}.jsonl"

    def _rank_paths(self) -> list[Path]:
        pattern = re.compile(re.escape(self.stem) + r"_rank\d+\.jsonl")
        return sorted(path for path in self.folder.glob("*") if pattern.fullmatch(path.name) and path.is_file())


def _whole_lines(path: Path) -> Iterator[tuple[str, int, dict]]:
    """Yield ("file:line", offset in bytes, record) for each line, without an unfinished last line."""
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{path}:{number}: not JSON; delete the line to play its game again") from None
            yield f"{path}:{number}", offset, record
            offset += len(line)


def _open_to_append(path: Path) -> BinaryIO:
    """Open a rank file, and delete the unfinished line that a kill may have left. UserError for a link or a device."""
    if path.is_symlink() or path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file; games are stored in one")
    file = open(path, "a+b")
    file.seek(0)
    file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
    return file


def _lock_of(rank_path: Path) -> Path:
    return rank_path.with_name(f".{rank_path.stem}.lock")
