"""Rows for the control runs of the embedded world: what self-play learning is compared with. No torch.

    python -m tools.tiny.controls --control coin --input_data_path GAMES.json --output_data_path ROWS.json ...

stands in for tools/assign_rewards.py (the setting REWARDS of tools/run_spag.sh) and takes its flags. Each control is
trained by the same program with the same settings as SPAG; only its rows differ.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tools.games.game import Game
from tools.games.prompts import Templates
from tools.selfplay.rewards import Games, PromptFn, message_row, message_shares
from tools.selfplay.rows import RowFlags, choose_prompt_fn, counted, read_sft_rows, settings_path
from tools.tiny.players import fact_rows, load_lexicon
from utils import RunSettings, files_setting, flag, parse_flags, read_json_or_jsonl, run_program, write_records

SFT_COEFF = 0.5  # of OfflinePO
COIN, SHUFFLED, CLONING, SFT = CONTROLS = ("coin", "shuffled", "cloning", "sft")


@dataclass(kw_only=True)
class Flags(RowFlags):
    """The flags of this program."""

    control: str = flag("how the rows are made", choices=CONTROLS)
    like: str | None = flag("OUTPUT of the loop that sft has as many rows as, epoch by epoch", default=None)
    input_data_path: list[str] = flag("files of episodes, JSON or JSONL")
    output_data_path: str = flag("file of rows to write, in epochK/rows/")
    sft_data_path: str = flag("file of SFT examples whose rows are appended")


@dataclass
class Played:
    """Games with what happened in them and how their prompts are made."""

    game: Game
    episodes: Sequence[dict]
    prompt_fn: PromptFn
    decay_weight: float = 0.8

    def winners(self) -> list[str | None]:
        """Who was paid for each game, if anybody."""
        outcomes = [self.game.outcome(verdict.outcome) for _, verdict in self.judged()]
        return [None if outcome.breach else outcome.winner for outcome in outcomes]

    def judged(self) -> Iterator[tuple[dict, object]]:
        """The episodes with their verdicts."""
        games = Games(self.game)
        for episode in self.episodes:
            games.add(episode)
        return games.verdicts(self.episodes)

    def rows(self, winners: Sequence[str | None]) -> Iterator[list[dict]]:
        """The rows of each game, those of the method if the winners are the games' own."""
        won = Counter(filter(None, winners))
        for winner, (episode, verdict) in zip(winners, self.judged(), strict=True):
            messages = enumerate(episode["history"][: verdict.length])
            spoken = [index for index, message in messages if message["role"] == winner]
            weight = won.total() / (2 * won[winner]) if winner else 0.0
            yield [
                message_row(episode, index, self.prompt_fn, reward=share, weight=weight)
                for index, share in zip(spoken, message_shares(len(spoken), self.decay_weight), strict=True)
            ]


def coin_rows(played: Played, rng: random.Random) -> Iterator[dict]:
    """As if a coin had told who won each decided game: the rows may be the loser's."""
    for rows in played.rows([winner and rng.choice(played.game.roles) for winner in played.winners()]):
        yield from rows


def shuffled_rows(played: Played, rng: random.Random) -> Iterator[dict]:
    """The rewards of a game dealt out at random among the winner's messages."""
    for rows in played.rows(played.winners()):
        rewards = rng.sample([row["reward"] for row in rows], len(rows))
        yield from (row | {"reward": reward} for row, reward in zip(rows, rewards, strict=True))


def cloning_rows(played: Played, sft_rows: Sequence[dict]) -> Iterator[dict]:
    """Filtered behaviour cloning, -reward * weight * l, as SFT rows, the others after them: no ratio, no clip, no KL.

    OfflinePO averages game rows and SFT rows apart and multiplies the latter by alpha. Here all are SFT rows in one
    average; the weights give each kind the share in the loss that it has there.
    """
    rows = [row for of_game in played.rows(played.winners()) for row in of_game]
    total = len(rows) + len(sft_rows)
    for row in rows:
        weight = row["reward"] * row["weight"] / SFT_COEFF * total / len(rows)
        yield {"query": row["query"], "target": row["target"], "type": "sft", "weight": weight}
    for row in sft_rows:
        yield row | {"weight": total / len(sft_rows)}


def other_rows_path(flags: Flags) -> Path:
    """The counts of the other loop's rows of the same epoch."""
    if not flags.like:
        raise ValueError(f"--control {SFT} needs --like, the OUTPUT of the loop that it has as many rows as")
    return settings_path(str(Path(flags.like, *Path(flags.output_data_path).parts[-3:])))


def control_rows(flags: Flags, game: Game, templates: Templates) -> Iterator[dict]:
    """The rows that the flags ask for."""
    rng = random.Random(flags.seed)
    if flags.control == SFT:
        counts = json.loads(other_rows_path(flags).read_text(encoding="utf-8"))["rows"]
        return fact_rows(load_lexicon(), rng, counts["attacker"] + counts["defender"] + counts["sft"])
    episodes = [episode for path in flags.input_data_path for episode in read_json_or_jsonl(path)]
    played = Played(game, episodes, choose_prompt_fn(flags, game, templates, None), flags.decay_weight)
    sft_rows = list(read_sft_rows(flags.sft_data_path))
    if flags.control == CLONING:
        return cloning_rows(played, sft_rows)
    make = {COIN: coin_rows, SHUFFLED: shuffled_rows}[flags.control]
    return chain(make(played, rng), sft_rows)


def main() -> None:
    flags = parse_flags(Flags, description="Rows of a control run.")
    game, output = flags.load_game(), Path(flags.output_data_path)
    templates = flags.load_templates(game)
    settings = flags.settings(game, templates, None) | {
        "control": flags.control,
        "input_data_path": files_setting(*flags.input_data_path),
        "sft_data_path": files_setting(flags.sft_data_path),
        "like": files_setting(other_rows_path(flags)) if flags.control == SFT else None,
    }
    made_with = RunSettings(
        settings_path(flags.output_data_path),
        results=lambda: output if output.is_file() else None,
        remedy="choose another output, or --overwrite True to make it anew",
    )
    with made_with.claimed(settings, overwrite=flags.overwrite):
        if output.is_file() and not flags.overwrite:
            print(f"{output}: all is there")
            return
        counts = Counter({"empty": 0})
        rows = list(counted(control_rows(flags, game, templates), counts, drop_empty=False))
        output.unlink(missing_ok=True)  # earlier rows never lie beside these settings
        made_with.write(settings, rows=counts)
        write_records(output, rows)  # last: where rows are, their settings are


if __name__ == "__main__":
    run_program(main)
