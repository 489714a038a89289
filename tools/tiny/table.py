"""The tables of the embedded world's learning runs: points against imitation, differences, and self-play.

No torch.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.games import taboo
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
OUTCOMES = [outcome.name for outcome in taboo.Taboo.outcomes]


@dataclass(frozen=True)
class Arm:
    """One way of learning from self-play."""

    name: str
    title: str
    settings: Mapping[str, object] = field(default_factory=dict)  # of tools/run_spag.sh
    every_epoch: bool = False  # whether the models of all epochs are evaluated, not only the last


def read_matches(output_dir: Path, arms: Sequence[Arm], seeds: int) -> Iterator[dict]:
    """The games of all matches; the model of an epoch is called by its arm and number, as released1."""
    for seed in range(seeds):
        for arm in arms:
            for path in sorted((output_dir / f"seed{seed}" / arm.name).glob("epoch*/eval/games_results.json")):
                for _, episode in iter_records(path):
                    players = {role: episode[role].replace("epoch", arm.name) for role in taboo.Taboo.roles}
                    yield episode | players


def write_table(output_dir: Path, arms: Sequence[Arm], seeds: int, epochs: int) -> str:
    """Write table.json and table.md; returns the text."""
    counts = count_matches(read_matches(output_dir, arms, seeds), taboo.Taboo())
    rows = [row for row in result_rows(counts) if row["opponent"] == IMITATION]
    differences = list(control_differences(counts, epochs))
    lines = [
        *match_table(rows, imitation_points(output_dir, seeds), arms, epochs),
        "",
        *difference_table(differences, {arm.name: arm.title for arm in arms}),
        "",
        *self_play_table(output_dir, arms, seeds, epochs),
    ]
    text = "\n".join(lines) + "\n"
    write_json(output_dir / "table.json", {"results": rows, "differences": differences})
    with replacing(output_dir / "table.md") as file:
        file.write(text)
    return text


# --- points --------------------------------------------------------------------------------------------------------


def match_table(rows: Sequence[dict], alone: dict, arms: Sequence[Arm], epochs: int) -> Iterator[str]:
    """A line for each evaluated model: points pooled over seeds, by seed, role and word list, and clean games."""
    yield (
        "| learning | epoch | points | of each seed | as attacker | as defender | played words | held-out words "
        "| clean games | own breaches as attacker | ties |"
    )
    yield "|---" * 11 + "|"
    roles = " | ".join(f"{alone[role]:.3f}" for role in taboo.Taboo.roles)
    yield f"| imitation against itself | - | 0.500 | | {roles} | | | | {alone['breaches']:.3f} | {alone['ties']:.3f} |"
    chosen = {(row["player"], row["words"], row["role"], row["seed"]): row for row in rows}
    for arm in arms:
        for epoch in range(1, epochs + 1):
            if (f"{arm.name}{epoch}", ALL, BOTH, None) in chosen:
                yield match_line(chosen, arm, epoch)


def match_line(chosen: Mapping[tuple, dict], arm: Arm, epoch: int) -> str:
    """The line of one model; `chosen` has the rows by player, words, role and seed."""
    player = f"{arm.name}{epoch}"
    whole, attacking = chosen[player, ALL, BOTH, None], chosen[player, ALL, taboo.ATTACKER, None]
    by_seed = [row for key, row in chosen.items() if key[:3] == (player, ALL, BOTH) and key[3] is not None]
    cells = [
        arm.title,
        str(epoch),
        points_cell(whole),
        ", ".join(f"{row['points']:.3f}" for row in by_seed),
        *(points_cell(chosen[player, ALL, role, None]) for role in taboo.Taboo.roles),
        *(points_cell(chosen[player, words, BOTH, None]) for words in ("played", "held_out")),
        points_cell(whole["clean"]),
        f"{attacking['rates']['breach']['share']:.3f}",
        f"{whole['rates']['tie']['share']:.3f}",
    ]
    return "| " + " | ".join(cells) + " |"


def points_cell(row: Mapping) -> str:
    """Points and their 95% interval."""
    return with_interval(row["points"], row["points_interval"])


def imitation_points(output_dir: Path, seeds: int) -> dict[str, float]:
    """What either role gets when the imitation model plays itself, with its shares of breaches and ties."""
    summaries = [read_summary(output_dir / f"seed{seed}" / FIRST_GAMES) for seed in range(seeds)]
    games = sum(summary["games"] for summary in summaries)
    shares = {key: sum(summary["outcomes"][key] for summary in summaries) / games for key in OUTCOMES}
    attacker = shares[taboo.ATTACKER_WINS] + shares[taboo.TIED] / 2
    points = {taboo.ATTACKER: attacker, taboo.DEFENDER: 1 - attacker}
    return points | {"breaches": shares[taboo.ATTACKER_BREAKS], "ties": shares[taboo.TIED]}


# --- differences ---------------------------------------------------------------------------------------------------


def control_differences(counts: Mapping[Match, MatchCounts], epochs: int) -> Iterator[dict]:
    """What self-play learning has over each control after the last epoch, on the same words, seeds and roles."""
    for name in MAIN_ARMS:
        for control in CONTROL_ARMS:
            ours, theirs = (points_by_word(counts, f"{arm}{epochs}") for arm in (name, control))
            sizes = [games for _, games in ours.values()]
            totals = [points - theirs[word][0] for word, (points, _) in ours.items()]
            mean = sum(totals) / sum(sizes)
            half = t_quantile(len(sizes) - 1) * clustered_standard_error(sizes, totals)
            yield {"arm": name, "control": control, "difference": mean, "interval": [mean - half, mean + half]}


def points_by_word(counts: Mapping[Match, MatchCounts], player: str) -> dict[str, tuple[float, int]]:
    """By target word, a player's points and games over all lists, seeds and both roles."""
    points, games = defaultdict(float), defaultdict(int)
    for match, counted in counts.items():
        for name, role in zip((match.first, match.second), counted.game.roles, strict=True):
            if name == player:
                for word, sums in counted.words[role].items():
                    points[word] += sums["points"]
                    games[word] += sums["games"]
    return {word: (points[word], games[word]) for word in points}


def difference_table(differences: Iterable[dict], titles: Mapping[str, str]) -> Iterator[str]:
    """A line for each difference."""
    yield "| points after the last epoch | minus | difference |"
    yield "|---" * 3 + "|"
    for row in differences:
        difference = with_interval(row["difference"], row["interval"], "+.3f")
        cells = (titles[row["arm"]], titles[row["control"]], difference)
        yield "| " + " | ".join(cells) + " |"


# --- self-play -----------------------------------------------------------------------------------------------------


def self_play_table(output_dir: Path, arms: Sequence[Arm], seeds: int, epochs: int) -> Iterator[str]:
    """How the games of the models against themselves ended, over all seeds: shares of games, of replies; length."""
    yield "| learning | model | attacker wins | defender wins | breaches | ties | empty replies | messages |"
    yield "|---" * 8 + "|"
    for arm in (arm for arm in arms if arm.every_epoch):
        for epoch in range(epochs + 1):
            place = f"{arm.name}/epoch{epoch + 1}/episodes" if epoch else FIRST_GAMES
            summaries = [read_summary(output_dir / f"seed{seed}" / place) for seed in range(seeds)]
            games = sum(summary["games"] for summary in summaries)
            shares = [sum(summary["outcomes"][key] for summary in summaries) / games for key in OUTCOMES]
            messages = sum(summary["messages"] for summary in summaries)
            shares.append(sum(summary["empty_replies"] for summary in summaries) / messages)
            length = sum(summary["mean_length"] * summary["games"] for summary in summaries) / games
            numbers = " | ".join(f"{share:.3f}" for share in shares)
            yield f"| {arm.title} | {f'epoch {epoch}' if epoch else IMITATION} | {numbers} | {length:.2f} |"


def read_summary(folder: Path) -> dict:
    """The summary of the games in a folder."""
    return json.loads(next(folder.glob("*_summary.json")).read_text(encoding="utf-8"))
