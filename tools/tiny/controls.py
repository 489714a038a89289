"""Rows for the control runs of the embedded world: what self-play learning is compared with. No torch.

    python -m tools.tiny.controls --control coin --input_data_path GAMES.json --output_data_path ROWS.json ...

stands in for tools/assign_rewards.py (the setting REWARDS of tools/run_spag.sh) and takes its flags. Each control is
trained by the same program with the same settings as SPAG; only its rows differ. They are made of the rows that
self-play learning would have, which are kept beside them in ROWS_of_games.json. `as_many` leaves out or repeats rows
of another game, so that its loop takes as many steps as that of Taboo.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tools.flags import flag, parse_flags
from tools.games.game import Game
from tools.games.taboo import Taboo
from tools.selfplay.rows import RowFlags, make_rows, settings_path
from tools.tiny.players import fact_rows, load_lexicon
from utils import files_setting, read_json_or_jsonl, run_program, set_up_logging, write_records

SFT_COEFF = 0.5  # of OfflinePO
COIN, SHUFFLED, CLONING, SFT, AS_MANY = CONTROLS = ("coin", "shuffled", "cloning", "sft", "as_many")


class Coin(Taboo):
    """Taboo as if a coin had told who won each decided game: its rows may be the loser's."""

    def rewards(self, task, history, outcome):
        paid = super().rewards(task, history, outcome)
        return {random.Random(json.dumps([task, history])).choice(self.roles): 1.0} if paid else {}


@dataclass(kw_only=True)
class Flags(RowFlags):
    """The flags of this program."""

    control: str = flag("how the rows are made", choices=CONTROLS)
    like: str | None = flag("OUTPUT of the loop that sft and as_many have as many rows as", default=None)
    input_data_path: list[str] = flag("files of episodes, JSON or JSONL")
    output_data_path: str = flag("file of rows to write, in epochK/rows/")
    sft_data_path: str = flag("file of SFT examples whose rows are appended")

    def __post_init__(self):
        if self.control in (SFT, AS_MANY) and not self.like:
            raise ValueError(f"--control {self.control} needs --like, the OUTPUT of a loop")
        if self.control == SFT:
            self.min_game_rows = 0  # its rows come from no games

    def load_game(self) -> Game:
        """That of the flags, or decided by a coin."""
        game = super().load_game()
        return Coin(match=game.match) if self.control == COIN else game

    @property
    def other_counts(self) -> Path:
        """The file with the counts of the other loop's rows of the same epoch."""
        return settings_path(str(Path(self.like, *Path(self.output_data_path).parts[-3:])))

    def other_rows(self) -> tuple[int, int]:
        """How many rows of games and SFT rows the other loop has in the same epoch."""
        counts = json.loads(self.other_counts.read_text(encoding="utf-8"))["rows"]
        return counts["attacker"] + counts["defender"], counts["sft"]

    def settings(self, *made_with) -> dict:
        """Those of the rows, and which control they are for."""
        like = files_setting(self.other_counts) if self.like else None
        return super().settings(*made_with) | {"control": self.control, "like": like}


def shuffled_rows(rows: Iterable[dict], rng: random.Random) -> Iterator[dict]:
    """The rewards of a game, which sum to 1, dealt out at random among the winner's messages."""
    game: list[dict] = []
    for row in rows:
        game.append(row)
        if sum(each["reward"] for each in game) > 1 - 1e-9:
            rewards = rng.sample([each["reward"] for each in game], len(game))
            yield from (each | {"reward": reward} for each, reward in zip(game, rewards, strict=True))
            game = []


def cloning_rows(rows: Sequence[dict], sft_rows: Sequence[dict]) -> Iterator[dict]:
    """Filtered behaviour cloning, -reward * weight * l, as SFT rows, the others after them: no ratio, no clip, no KL.

    OfflinePO averages game rows and SFT rows apart and multiplies the latter by alpha. Here all are SFT rows in one
    average; the weights give each kind the share in the loss that it has there.
    """
    total = len(rows) + len(sft_rows)
    for row in rows:
        weight = row["reward"] * row["weight"] / SFT_COEFF * total / len(rows)
        yield {"query": row["query"], "target": row["target"], "type": "sft", "weight": weight}
    for row in sft_rows:
        yield row | {"weight": total / len(sft_rows)}


def control_rows(flags: Flags, made: Sequence[dict]) -> Iterable[dict]:
    """The rows that the flags ask for, of those that self-play learning has."""
    rng = random.Random(flags.seed)
    rows, sft_rows = ([row for row in made if (row.get("type") == "sft") == sft] for sft in (False, True))
    if flags.control == SFT:
        return fact_rows(load_lexicon(), rng, sum(flags.other_rows()))
    if flags.control == CLONING:
        return cloning_rows(rows, sft_rows)
    if flags.control == AS_MANY:
        whole, rest = divmod(flags.other_rows()[0], len(rows))
        return chain(rows * whole, rng.sample(rows, rest), sft_rows)
    return chain(shuffled_rows(rows, rng), sft_rows) if flags.control == SHUFFLED else made


def main() -> None:
    flags = parse_flags(Flags, description="Rows of a control run.")
    set_up_logging()
    output = Path(flags.output_data_path)
    of_games = output.with_name(f"{output.stem}_of_games.json")
    make_rows(flags, flags.input_data_path, str(of_games), sft=flags.sft_data_path)
    write_records(output, control_rows(flags, read_json_or_jsonl(of_games)))


if __name__ == "__main__":
    run_program(main)
