"""The files of a run of play: storing finished games, going on after a kill, putting all ranks' games together.

The files have one stem and are in one folder:

    STEM_rank0.jsonl ...   finished games of each rank, appended one by one; a restart does not play them again
    STEM_settings.json     the record of the run: the settings that the games depend on, and whether all is there
    STEM_results.json      all games in the order of the word list, written when the last game has ended
    STEM_summary.json      outcomes and counts of the results
    .STEM_....lock         empty files that the launch and each rank lock while they work
"""

import glob
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, TypedDict

import utils
from tools.games.game import Game
from tools.selfplay.counts import GameCounts
from utils import UserError, rank, world_size, write_json, write_records


class Episode(TypedDict):
    """One finished game; the format is described in data/README.md."""

    index: int  # in the word list, from 0
    target_word: str
    max_turns: int
    history: list[dict[str, str]]  # "role" and "content"
    outcome: str
    length: int  # messages up to the decisive one
    replies: list[dict]  # for each message: "finish_reason", "tokens", "prompt_cut", ...


class FinishedGames:
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
    """The files of a run, as one rank of a launch uses them. `words` are the tasks of all games, in their order."""

    def __init__(self, output_dir: str | Path, stem: str, words: Sequence[str], game: Game):
        self.folder, self.stem, self.words, self.game = Path(output_dir), stem, words, game
        self.record_path, self.results_path, self.summary_path = (
            self.folder / f"{stem}_{name}.json" for name in ("settings", "results", "summary")
        )
        self.own_path = self._rank_path(rank())
        self.own_file: BinaryIO | None = None
        self.locks_are_seen = True  # whether rank 0 sees the locks of all other ranks

    def settings_then(self) -> dict:
        """The settings of the games that are there; empty without any, or if the record cannot be read."""
        try:
            settings = utils.read_json(self.record_path)["settings"] if self._rank_paths() else {}
        except (OSError, UserError, KeyError, TypeError):
            settings = None
        return settings if isinstance(settings, dict) else {}  # `stage` says what is wrong

    @contextmanager
    def stage(self, settings: Mapping, *, made_of_games: Sequence[str] = ()) -> Iterator[utils.Todo]:
        """`utils.stage` for these games and for the files that are made of them, whose names are given.

        While it runs, each rank holds the lock of the file that it writes, and rank 0 that of the record.
        """
        stem = glob.escape(self.stem)
        results = [f"{stem}_results.json", f"{stem}_rank[0-9]*.jsonl", f"{stem}_summary.json", *made_of_games]

        utils.from_rank_0(self._refuse_living_ranks)
        settings = {**settings, "games": len(self.words)}
        with utils.stage(self.record_path, settings, results=results, may_change=["games"]) as todo:
            try:
                if todo:
                    utils.refuse_odd_file(self.own_path)
                    utils.lock(self._lock_path(rank()))
                    utils.from_rank_0(lambda: None)  # all ranks have their locks before rank 0 can reach the end
                    self.locks_are_seen = utils.from_rank_0(self._sees_locks)
                yield todo
            finally:
                utils.unlock(self._lock_path(rank()))

    def finished(self) -> FinishedGames:
        """The finished games of all ranks, including those of launches with other numbers of processes."""
        return FinishedGames(self.game, self.words, self._rank_paths())

    def append(self, episode: Mapping) -> None:
        """Store a finished game; it is on the disk when this returns."""
        with utils.naming_full_disk(self.own_path):
            if self.own_file is None:
                self.own_file = _open_to_append(self.own_path)
            self.own_file.write(json.dumps(episode, ensure_ascii=False).encode() + b"\n")
            self.own_file.flush()
            os.fsync(self.own_file.fileno())

    def meet(self) -> None:
        """Wait until all ranks of this launch have ended their games or died.

        Without this, torchrun would end a launch on several machines 300 s after the first machine has finished. Each
        rank has held its lock from the start, and the lock of a dead rank is free. Where rank 0 does not see the locks
        of other machines, or files have no locks, the ranks meet at their launcher's store.
        """
        if self.own_file is not None:
            self.own_file.close()
        utils.unlock(self._lock_path(rank()))
        while any(utils.is_locked(self._lock_path(number)) for number in range(world_size())):
            time.sleep(0.5)
        if not self.locks_are_seen:
            utils.from_rank_0(lambda: None)

    def merge(self, *, seconds: float, tokens_before: int) -> int:
        """Write results and summary, unless games are missing; return how many are. For rank 0, when all have met.

        Play took `seconds` in this start. The games of earlier starts have `tokens_before` new tokens. Raises
        UserError if games are missing because their ranks have worked in another folder.
        """
        games = self.finished()
        if missing := games.missing():
            self._refuse_other_disks(missing)
            return len(missing)
        tokens = games.counts.tokens["new_tokens"] - tokens_before
        write_records(self.results_path, games)
        speed = tokens / seconds if tokens and seconds else None
        write_json(self.summary_path, games.counts.as_dict() | {"tokens_per_second": speed})
        return 0

    def _refuse_living_ranks(self) -> None:
        """Raise UserError if a rank of an earlier launch has outlived its rank 0 and still plays."""
        for path in filter(utils.is_locked, self.folder.glob(f".{glob.escape(self.stem)}_rank[0-9]*.lock")):
            raise UserError(utils.LOCKED.format(path))

    def _sees_locks(self) -> bool:
        return all(utils.is_locked(self._lock_path(number)) for number in range(1, world_size()))

    def _refuse_other_disks(self, missing: Sequence[int]) -> None:
        """Raise UserError if a rank whose games are missing has no lock in this folder."""
        elsewhere = [number for number in range(world_size()) if not self._lock_path(number).is_file()]
        lost = [index for index in missing if index % world_size() in elsewhere]
        if lost:
            named = ", ".join(self.words[index] for index in lost[: utils.NAMED]) + ", ..." * (len(lost) > utils.NAMED)
            raise UserError(
                f"{self.folder}: {len(lost)} games are missing, of ranks {elsewhere} ({named}), which have this "
                "folder on another disk. Bring all rank files into one folder, then run the same command again"
            )

    def _rank_path(self, number: int) -> Path:
        return self.folder / f"{self.stem}_rank{number}.jsonl"

    def _lock_path(self, number: int) -> Path:
        return self.folder / f".{self.stem}_rank{number}.lock"

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
    """Open a rank file, and delete the unfinished line that a kill may have left."""
    file = open(path, "a+b")
    file.seek(0)
    file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
    return file
