"""The tables of the embedded world's learning runs: points against imitation, differences, and self-play.

No torch.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.games.taboo import ATTACKER, ATTACKER_BREAKS, ATTACKER_WINS, TIED, Taboo
from tools.matches.stats import (
    ALL,
    BOTH,
    Match,
    MatchCounts,
    clustered_standard_error,
    count_matches,
    result_rows,
    t_quantile,
)
from tools.matches.text import with_interval
from utils import iter_records, replacing, write_json

IMITATION, RELEASED, SFT_ONLY = "imitation", "released", "sft"
FIRST_GAMES = f"{RELEASED}/epoch1/episodes"  # of the imitation model, shared by all arms of a seed
MAIN_ARMS, CONTROL_ARMS = (RELEASED, "detached"), ("coin", SFT_ONLY)
POINTS = ["learning", "epoch", "points", "of each seed", "as attacker", "as defender", "played words"]
POINTS += ["held-out words", "clean games", "own breaches as attacker", "ties"]
SELF_PLAY = ["learning", "model", "attacker wins", "defender wins", "breaches", "ties", "empty replies", "messages"]


@dataclass(frozen=True)
class Arm:
    """One way of learning from self-play."""

    name: str
    title: str
    settings: Mapping[str, object] = field(default_factory=dict)  # of tools/run_spag.sh
    every_epoch: bool = False  # whether the models of all epochs are evaluated, not only the last


def write_table(output_dir: Path, arms: Sequence[Arm], seeds: int, epochs: int) -> str:
    """Write table.json and table.md; returns the text."""
    worlds = [output_dir / f"seed{seed}" for seed in range(seeds)]
    counts = count_matches(read_matches(worlds, arms), Taboo())
    rows = [row for row in result_rows(counts) if row["opponent"] == IMITATION]
    differences = list(control_differences(counts, epochs))
    titles = {arm.name: arm.title for arm in arms}
    tables = [
        [POINTS, imitation_line(worlds), *match_lines(rows, arms, epochs)],
        [["points after the last epoch", "minus", "difference"], *difference_lines(differences, titles)],
        [SELF_PLAY, *self_play_lines(worlds, arms, epochs)],
    ]
    text = "\n".join(map(markdown, tables))
    write_json(output_dir / "table.json", {"results": rows, "differences": differences})
    with replacing(output_dir / "table.md") as file:
        file.write(text)
    return text


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table with its head."""
    head, *body = (f"| {' | '.join(line)} |\n" for line in lines)
    return head + "|---" * len(lines[0]) + "|\n" + "".join(body)


# --- points --------------------------------------------------------------------------------------------------------


def read_matches(worlds: Iterable[Path], arms: Sequence[Arm]) -> Iterator[dict]:
    """The games of all matches; the model of an epoch is called by its arm and number, as released1."""
    for world in worlds:
        for arm in arms:
            for path in sorted((world / arm.name).glob("epoch*/eval/games_results.json")):
                for _, episode in iter_records(path):
                    yield episode | {role: episode[role].replace("epoch", arm.name) for role in Taboo.roles}


def match_lines(rows: Iterable[dict], arms: Iterable[Arm], epochs: int) -> Iterator[list[str]]:
    """A line for each evaluated model: points pooled over seeds, by seed, role and word list, and clean games."""
    chosen = {(row["player"], row["words"], row["role"], row["seed"]): row for row in rows}
    for arm, epoch in ((arm, epoch) for arm in arms for epoch in range(1, epochs + 1)):
        player = f"{arm.name}{epoch}"
        if (whole := chosen.get((player, ALL, BOTH, None))) is None:
            continue
        attacking = chosen[player, ALL, ATTACKER, None]
        seeds = [row for key, row in chosen.items() if key[:3] == (player, ALL, BOTH) and key[3] is not None]
        yield [
            arm.title,
            str(epoch),
            points_cell(whole),
            ", ".join(f"{row['points']:.3f}" for row in seeds),
            *(points_cell(chosen[player, ALL, role, None]) for role in Taboo.roles),
            *(points_cell(chosen[player, words, BOTH, None]) for words in ("played", "held_out")),
            points_cell(whole["clean"]),
            f"{attacking['rates']['breach']['share']:.3f}",
            f"{whole['rates']['tie']['share']:.3f}",
        ]


def points_cell(row: Mapping) -> str:
    """Points and their 95% interval."""
    return with_interval(row["points"], row["points_interval"])


# --- differences ---------------------------------------------------------------------------------------------------


def control_differences(counts: Mapping[Match, MatchCounts], epochs: int) -> Iterator[dict]:
    """What self-play learning has over each control after the last epoch, on the same words, seeds and roles."""
    for name in MAIN_ARMS:
        for control in CONTROL_ARMS:
            ours, theirs = (words_of(counts, f"{arm}{epochs}") for arm in (name, control))
            sizes = [sums["games"] for sums in ours.values()]
            totals = [sums["points"] - theirs[word]["points"] for word, sums in ours.items()]
            mean = sum(totals) / sum(sizes)
            half = t_quantile(len(sizes) - 1) * clustered_standard_error(sizes, totals)
            yield {"arm": name, "control": control, "difference": mean, "interval": [mean - half, mean + half]}


def words_of(counts: Mapping[Match, MatchCounts], player: str) -> dict[str, Counter]:
    """By target word, a player's points and games over all lists, seeds and both roles."""
    words: dict[str, Counter] = {}
    for match, counted in counts.items():
        for name, role in zip((match.first, match.second), counted.game.roles, strict=True):
            for word, sums in counted.words[role].items() if name == player else ():
                words.setdefault(word, Counter()).update(sums)
    return words


def difference_lines(differences: Iterable[dict], titles: Mapping[str, str]) -> Iterator[list[str]]:
    """A line for each difference."""
    for row in differences:
        yield [titles[row["arm"]], titles[row["control"]], with_interval(row["difference"], row["interval"], "+.3f")]


# --- self-play -----------------------------------------------------------------------------------------------------


def self_play(folders: Iterable[Path]) -> dict[str, float]:
    """How a model's games against itself ended, over all folders: shares by outcome, of empty replies; messages."""
    total = Counter()
    for folder in folders:
        summary = json.loads(next(folder.glob("*_summary.json")).read_text(encoding="utf-8"))
        total.update(summary["outcomes"])
        total.update({name: summary[name] for name in ("games", "empty_replies", "messages")})
        total["length"] += summary["mean_length"] * summary["games"]
    shares = {outcome.name: total[outcome.name] / total["games"] for outcome in Taboo.outcomes}
    return shares | {"empty": total["empty_replies"] / total["messages"], "length": total["length"] / total["games"]}


def imitation_line(worlds: Iterable[Path]) -> list[str]:
    """What either role gets when the imitation model plays itself, with its shares of breaches and ties."""
    shares = self_play(world / FIRST_GAMES for world in worlds)
    attacker = shares[ATTACKER_WINS] + shares[TIED] / 2
    cells = ["imitation against itself", "-", "0.500", "", f"{attacker:.3f}", f"{1 - attacker:.3f}", "", "", ""]
    return [*cells, f"{shares[ATTACKER_BREAKS]:.3f}", f"{shares[TIED]:.3f}"]


def self_play_lines(worlds: Sequence[Path], arms: Iterable[Arm], epochs: int) -> Iterator[list[str]]:
    """A line for the model of each epoch, the imitation model first."""
    for arm in (arm for arm in arms if arm.every_epoch):
        for epoch in range(epochs + 1):
            place = f"{arm.name}/epoch{epoch + 1}/episodes" if epoch else FIRST_GAMES
            *shares, length = self_play(world / place for world in worlds).values()
            model = f"epoch {epoch}" if epoch else IMITATION
            yield [arm.title, model, *(f"{share:.3f}" for share in shares), f"{length:.2f}"]
