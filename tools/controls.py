"""Turn rows into those of a control, a run like SPAG's on other rows, or draw rows at random.

    python -m tools.controls sft --rows R --sft_data_path S --output O     SFT examples only, as many rows as R has
    python -m tools.controls silent --rows R --output O                    R, with weight 0 for rows of games
    python -m tools.controls cloning --rows R --output O                   R, with rows of games as SFT rows
    python -m tools.controls draw --rows R --number N --output O           N rows of R, of games or SFT

The record is O_rewards_settings.json.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tools.common.errors import UserError
from tools.common.files import read_json_or_jsonl, write_records
from tools.common.flags import FlagGroup, compared_values, defaults, flag, parse_command
from tools.common.programs import run_program
from tools.common.records import rows_setting, rows_stage
from tools.selfplay.rows import ChatFlags, count_rows, counts_line, is_sft, read_sft_rows


def drawn(rows: Sequence[dict], number: int, rng: random.Random) -> list[dict]:
    """`number` rows: each equally often, and a random subset once more."""
    times, rest = divmod(number, len(rows))
    return [*rows] * times + rng.sample(rows, rest)


def cloned(rows: Sequence[dict], sft_coeff: float, rows_at_once: float | None = None) -> list[dict]:
    """Turn rows of games into SFT rows with loss -reward * weight * l: no ratio, clip or KL.

    OfflinePO adds a mean over game rows and one over SFT rows of a batch of `rows_at_once` rows (None: all), and a
    batch without a kind lacks its term. Here all rows are in one mean, so the rows of a kind get its `batch_factor`.
    OfflinePO multiplies the mean over SFT rows by `sft_coeff`, so the weights of former game rows are divided by it.
    """
    batch_size = rows_at_once or math.inf
    sft_rows = sum(map(is_sft, rows))
    sft_factor = batch_factor(sft_rows, len(rows), batch_size)
    game_factor = batch_factor(len(rows) - sft_rows, len(rows), batch_size)
    clones = []
    for row in rows:
        if is_sft(row):
            clones.append(row | {"weight": sft_factor})
            continue
        weight = row["reward"] * row.get("weight", 1.0) / sft_coeff * game_factor
        text = {key: value for key, value in row.items() if key not in ("reward", "role", "weight")}
        clones.append(text | {"type": "sft", "weight": weight})
    return clones


def batch_factor(number: int, total: int, batch_size: float) -> float:
    """The probability that a batch has a row of a kind, divided by the kind's share p = number / total.

    A batch of B rows has at least one of them with probability 1 - (1 - p)^B.
    """
    if not number:
        return 0.0
    probability = 1 - (1 - number / total) ** batch_size
    return probability * total / number


@dataclass(kw_only=True)
class Control(FlagGroup):
    """A transformation of rows. Those in CONTROLS are also values of the loop's setting `control`.

    Training has the same settings as without a control, so that only rows differ.
    """

    # In the loop: True if the run plays games and `rows` are its winners'; False if they are those of the run `like`.
    plays_games: ClassVar[bool] = True
    makes_game_rows: ClassVar[bool] = True  # False: training needs --allow_no_game_rows

    rows: str = flag("file of rows, such as assign_rewards writes")
    output: str = flag("file of rows to write: .json, .jsonl, .json.gz or .jsonl.gz", compared=False)


@dataclass(kw_only=True)
class Sft(ChatFlags, Control):
    """SFT examples only, repeated to as many rows as the file of rows has, so that training takes as many steps."""

    plays_games = False
    makes_game_rows = False

    sft_data_path: str = flag("file of SFT examples")
    seed: int = flag("seed of the draw", default=0)

    def make(self, rows: list[dict]) -> list[dict]:
        examples = read_sft_rows(self.sft_data_path, self.load_chat_template())
        return drawn(examples, len(rows), random.Random(self.seed))


@dataclass(kw_only=True)
class Silent(Control):
    """The same rows with weight 0 for rows of games, so that batches, steps and learning rates stay the same."""

    plays_games = False

    def make(self, rows: list[dict]) -> list[dict]:
        # The weight multiplies a row's whole loss, including the KL, so rows of games give no gradient. SFT rows are
        # averaged by themselves, as without a control.
        return [row if is_sft(row) else row | {"weight": 0.0} for row in rows]


@dataclass(kw_only=True)
class Cloning(Control):
    """The same rows with rows of games as SFT rows, whose weight is reward * weight."""

    makes_game_rows = False

    sft_coeff: float = flag("--lm_sft_coeff of training", default=0.5, above=0)
    rows_at_once: int | None = flag("rows over which training averages a loss; unset: all", default=None, at_least=1)

    def make(self, rows: list[dict]) -> list[dict]:
        for number, row in enumerate(rows, start=1):
            if row.get("reward") is None and not is_sft(row):
                raise UserError(f"{self.rows}: row {number}: no 'reward', which rows of games need")
        # Nothing clips the loss of an SFT row, so its target would become less likely without limit.
        if any(row.get("reward", 0.0) < 0 for row in rows):
            raise UserError(f"{self.rows} has negative rewards, of losers or ties; cloning imitates winners only")
        return cloned(rows, self.sft_coeff, self.rows_at_once)


@dataclass(kw_only=True)
class Draw(Control):
    """A number of rows of the file, of any kind: a random subset, or all of them repeated."""

    number: int = flag("number of rows", at_least=0)
    seed: int = flag("seed of the draw", default=0)

    def make(self, rows: list[dict]) -> list[dict]:
        return drawn(rows, self.number, random.Random(self.seed))


CONTROLS: dict[str, type[Control]] = {"cloning": Cloning, "sft": Sft, "silent": Silent}


def main() -> None:
    control = parse_command(*CONTROLS.values(), Draw, description=__doc__)
    settings = compared_values(control)
    if isinstance(control, Sft) and (chat := control.load_chat_template()):
        settings["chat_template"] = chat.sha256
    settings |= {name: rows_setting(settings[name]) for name in ("rows", "sft_data_path") if name in settings}
    settings["control"] = type(control).__name__.lower()
    with rows_stage(control.output, settings, defaults(type(control))) as work:
        if work.todo:
            made = control.make(read_json_or_jsonl(control.rows))
            work.notes["rows"] = count_rows(made)
            write_records(control.output, made)
    print(counts_line(work.notes))


if __name__ == "__main__":
    run_program(main)
