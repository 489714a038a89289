"""Turn episodes into training rows: every message of a winner, with its share of the game's reward.

    python -m tools.assign_rewards --input_data_path data/episodes.json --output_data_path data/train_self_play.json \\
        --sft_data_path data/alpaca_train.json --decay_weight 0.8

Without --sft_data_path it makes the rows of imitation from a stronger model's games. --losers SHARE and --ties COST
also make rows with rewards below 0, of losers' messages and of tied games. Train on those with --detach_kl True:
without it, the loss lowers their probability without end, and replies degenerate. --control makes the rows of a
control instead (tools/selfplay/controls.py). Settings and counts are written beside the output, to
OUTPUT_rewards_settings.json. data/README.md has the formats of all files.
"""

import gc
import json
from dataclasses import dataclass

from tools.flags import flag, parse_flags
from tools.selfplay.row_flags import RowFlags
from tools.selfplay.rows import assign_rewards, make_rows
from utils import run_program, set_up_logging

__all__ = ["assign_rewards"]


@dataclass(kw_only=True)
class Flags(RowFlags):
    input_data_path: list[str] | None = flag(
        "files of episodes, JSON or JSONL, read in this order; the controls sft and silent read none", default=None
    )
    output_data_path: str = flag("file of rows to write: JSONL if it ends in .jsonl, else JSON")
    sft_data_path: str | None = flag("file of SFT examples; their rows are appended", default=None)


def main() -> None:
    flags = parse_flags(Flags, description="Turn episodes into training rows.")
    set_up_logging()
    gc.disable()  # there are no reference cycles, and the search for them takes a tenth of the time
    counts = make_rows(flags, flags.input_data_path or [], flags.output_data_path, sft=flags.sft_data_path)
    print(json.dumps(counts))


if __name__ == "__main__":
    run_program(main)
