"""The files of a run of play (data/README.md): finished games are stored one by one and merged at the end."""

import glob
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypedDict

from tools.common.errors import UserError
from tools.common.files import write_json, write_records
from tools.common.ranks import barrier, on_rank_0, rank, world_size
from tools.games.game import Game
from tools.players.player import LENGTH, thought_is_open

UNFINISHED = 3  # exit status if games are missing, which the same command plays
FILE_OF_GAMES = re.compile(r"(.+)_(results\.json|rank\d+\.jsonl)")
logger = logging.getLogger(__name__)


def run_of(path: str | Path) -> Path | None:
    """FOLDER/STEM of the run of play that a file of games belongs to, by its name; None for other names."""
    named = FILE_OF_GAMES.fullmatch(Path(path).name)
    return Path(path).resolve().with_name(named[1]) if named else None


class Episode(TypedDict):
    """One finished game (format: data/README.md). Readers ignore further fields.

    Prompts and token ids are not stored, because rows recreate prompts and training tokenizes texts.
    """

    index: int  # in the word list, from 0
    target_word: str
    max_turns: int
    history: list[dict[str, str]]  # "role" and "content"
    outcome: str
    length: int  # messages up to the decisive one, or all messages of an undecided game
    replies: list[dict]  # for each message the known fields of its Reply; "text" only with a thought


class EpisodeFiles:
    """The files of a run, for one rank. `words` are the tasks of all games, in order.

    A game is identified by its index in `words`, so a repeated word is played as often as it occurs.
    """

    def __init__(self, folder: str | Path, stem: str, words: Sequence[str], game: Game):
        self.folder = Path(folder)
        self.words = words
        self.game = game
        self.record_path = self.folder / f"{stem}_settings.json"
        self.results_path = self.folder / f"{stem}_results.json"
        self.summary_path = self.folder / f"{stem}_summary.json"
        self.rank_path = self.folder / f"{stem}_rank{rank()}.jsonl"
        # Not rank[0-9]*, which for the run "words" would also match files of the run "words_rank1000".
        self.rank_patterns = [f"{glob.escape(stem)}_rank{'[0-9]' * digits}.jsonl" for digits in range(1, 7)]
        self.rank_file: BinaryIO | None = None

    @property
    def patterns(self) -> list[str]:
        """Patterns of the run's files, the first of which exists once it is finished."""
        return [glob.escape(self.results_path.name), *self.rank_patterns, glob.escape(self.summary_path.name)]

    def finished(self) -> dict[int, Episode]:
        """The finished games of all ranks by index, including starts with other numbers of processes.

        Of games with the same index the first counts, because a rank that outlived its launcher may repeat one.
        UserError if a game's word differs from the list's at its index.
        """
        episodes: dict[int, Episode] = {}
        for path in sorted(path for pattern in self.rank_patterns for path in self.folder.glob(pattern)):
            # After the last newline there is nothing or half a line. Not splitlines: replies may contain U+2028.
            lines = path.read_bytes().split(b"\n")[:-1]
            for number, line in enumerate(lines, start=1):
                try:
                    episode = json.loads(line)
                except ValueError:  # two processes wrote to it at the same time
                    logger.warning("%s:%d: not JSON; its game is played again", path, number)
                    continue
                self._check_word(episode, f"{path}:{number}")
                episodes.setdefault(episode["index"], episode)
        return episodes

    def _check_word(self, episode: Episode, where: str) -> None:
        index = episode["index"]
        word = self.words[index] if index < len(self.words) else None
        if episode["target_word"] != word:
            wrong = f"its game {index} is about {episode['target_word']!r}, but the word list has {word!r} there"
            raise UserError(f"{where}: {wrong}; use the list that was played, or another output folder")

    def missing(self) -> list[tuple[int, str]]:
        """This rank's share of the unfinished games: (index, word) pairs.

        Shares are fixed, because ranks do not communicate while they play.
        """
        finished = self.finished()
        if rank() == 0 and finished:
            logger.info("continuing: %d of %d games are finished", len(finished), len(self.words))
        indices = range(rank(), len(self.words), world_size())
        return [(index, self.words[index]) for index in indices if index not in finished]

    def append(self, episode: Mapping) -> None:
        """Store a finished game, which is on disk when this returns."""
        if self.rank_file is None:
            self.rank_file = _open_to_append(self.rank_path)
        line = json.dumps(episode, ensure_ascii=False)
        # Unpaired surrogates, which UTF-8 cannot encode, become escapes that JSON can read.
        self.rank_file.write(line.encode(errors="backslashreplace") + b"\n")
        self.rank_file.flush()  # survives this process
        os.fsync(self.rank_file.fileno())  # survives a crash of the machine

    def merge(self) -> int:
        """Write results and summary, unless games are missing; return how many are. For rank 0, after a barrier.

        The rank files stay, so that after a kill before the record says `finished`, the next start merges them again
        instead of playing all games again.
        """
        finished = self.finished()
        if missing := len(self.words) - len(finished):
            return missing
        episodes = [finished[index] for index in sorted(finished)]
        write_json(self.summary_path, summary(self.game, episodes))
        write_records(self.results_path, episodes)  # last, because this file marks the run as finished (`patterns`)
        return 0

    def finish(self) -> None:
        """Wait for all ranks and merge. If games are missing, end the program with status UNFINISHED.

        Games are missing if a player gave no reply. No results are written without them, because whether a game fails
        may depend on how it went, so the others could be a biased sample.
        """
        if self.rank_file is not None:
            self.rank_file.close()
        barrier()  # all ranks have stored their games
        missing = on_rank_0(self.merge)
        if missing:
            if rank() == 0:
                program = Path(sys.argv[0]).name
                sys.stderr.write(f"{program}: {missing} games are missing; rerun the same command to play them\n")
            sys.exit(UNFINISHED)


def summary(game: Game, episodes: Iterable[Mapping]) -> dict:
    """Counts of finished games. Tokens and truncated replies are known only if episodes have `replies`.

    `mean_length` is over all games; a tie counts with all its messages. The share of decided games excludes games
    ended by a breach, which by default pay nobody; it is None if no game was decided.
    """
    outcomes = Counter[str]()
    counts = Counter[str]()
    for episode in episodes:
        replies = episode.get("replies") or ()
        outcomes[episode["outcome"]] += 1
        counts.update(
            length=episode["length"],
            messages=len(episode["history"]),
            empty_replies=sum(not message["content"].strip() for message in episode["history"]),
            cut_off_replies=sum(reply.get("finish_reason") == LENGTH for reply in replies),
            cut_prompts=sum(bool(reply.get("prompt_cut")) for reply in replies),
            new_tokens=new_tokens(episode),
            thoughts=sum("thought" in reply for reply in replies),
            cut_thoughts=sum(thought_is_open(reply) and reply["finish_reason"] == LENGTH for reply in replies),
        )
    won = Counter[str | None]()  # games won by a role without a breach
    for outcome in game.outcomes:
        if not outcome.breach:
            won[outcome.winner] += outcomes[outcome.name]
    second_role = game.roles[1]
    decided = sum(won[role] for role in game.roles)
    names = ["messages", "empty_replies", "cut_off_replies", "cut_prompts", "new_tokens"]
    if counts["thoughts"]:
        names += ["thoughts", "cut_thoughts"]
    return {
        "games": outcomes.total(),
        "outcomes": {outcome.name: outcomes[outcome.name] for outcome in game.outcomes},
        f"{second_role}_share_of_decided": won[second_role] / decided if decided else None,
        "mean_length": counts["length"] / outcomes.total() if outcomes else None,
        **{name: counts[name] for name in names},
    }


def summary_line(counts: Mapping) -> str:
    parts = [f"{counts['games']:,} games: {listed(counts['outcomes'])}"]
    if counts["games"]:
        parts.append(f"mean length {counts['mean_length']:.1f} messages")
    parts.append(
        f"{counts['messages']:,} messages, of which {counts['empty_replies']:,} are empty and "
        f"{counts['cut_off_replies']:,} cut off at the token limit; {counts['cut_prompts']:,} prompts were cut"
    )
    if "thoughts" in counts:
        parts.append(f"{counts['thoughts']:,} thoughts, of which {counts['cut_thoughts']:,} were cut off")
    return "; ".join(parts)


def listed(counts: Mapping[str, int]) -> str:
    """Counts by name: attacker wins 1,530, tied game 61."""
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def new_tokens(episode: Mapping) -> int:
    """The tokens of a game's replies, as far as they are known; a server may not count them."""
    return sum(reply.get("tokens") or 0 for reply in episode.get("replies") or ())


def _open_to_append(path: Path) -> BinaryIO:
    """Open a file after deleting an incomplete last line, which a kill may have left."""
    file = open(path, "a+b")
    file.seek(0)
    file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
    return file
