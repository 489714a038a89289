"""The tables of the embedded world's learning runs: points against imitation, differences, and self-play.

No torch.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.games.game import DEFAULT_GAME, Game, load_game
from tools.games.guess_my_city import FOUND
from tools.games.taboo import ATTACKER, ATTACKER_BREAKS, ATTACKER_WINS, TIED, Taboo
from tools.matches.stats import (
    ALL,
    BOTH,
    Match,
    MatchCounts,
    count_matches,
    mean_difference,
    result_rows,
)
from tools.matches.text import with_interval
from tools.tiny.reasoning_table import REASONING, Reasoning
from utils import iter_records, replacing, write_json

BASE, IMITATION, RELEASED, SFT_ONLY = "base", "imitation", "released", "sft"
FIRST_GAMES = f"{RELEASED}/epoch1/episodes"  # of the imitation model, shared by all arms of a seed
POINTS = ["learning", "epoch", "points", "of each seed", "as attacker", "as defender", "played words"]
POINTS += ["held-out words", "clean games", "own breaches as attacker", "ties"]
OWN_GAME = ["learning", "model", "both win", "messages"]
SELF_PLAY = ["learning", "model", "attacker wins", "defender wins", "breaches", "ties", "empty replies", "messages"]


@dataclass(frozen=True)
class Arm:
    """One way of learning from self-play."""

    name: str
    title: str
    settings: Mapping[str, object] = field(default_factory=dict)  # of tools/run_spag.sh
    every_epoch: bool = False  # whether the models of all epochs have matches, not only the last
    game: str = DEFAULT_GAME  # of its self-play; matches are at Taboo
    after_released: bool = False  # it has as many rows as RELEASED had

    @property
    def plays_on(self) -> bool:
        """Whether the last model's games against itself are wanted too."""
        return self.every_epoch or self.game != DEFAULT_GAME


def write_table(
    output_dir: Path,
    worlds: Sequence[Path],
    arms: Mapping[str, Arm],
    pairs: Sequence[tuple[str, str]],
    epochs: int,
    *,
    reasons: bool,
) -> str:
    """Write table.json and table.md, the latter with differences between these pairs of arms; returns the text."""
    counts = count_matches(read_matches(worlds, arms.values()), Taboo())
    rows = [row for row in result_rows(counts) if row["opponent"] == IMITATION]
    differences = list(arm_differences(counts, pairs, epochs))
    titles = {name: arm.title for name, arm in arms.items()}
    tables = [
        [POINTS, imitation_line(worlds), *match_lines(rows, arms.values(), epochs)],
        [["points after the last epoch", "minus", "difference"], *difference_lines(differences, titles)],
        [SELF_PLAY, *self_play_lines(worlds, arms.values(), epochs)],
    ]
    if own := list(own_game_lines(worlds, arms.values(), epochs)):
        tables.append([OWN_GAME, *own])
    if reasons:
        tables.append(reasoning_lines(Reasoning([world / REASONING for world in worlds]), arms.values(), epochs))
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
            for path in sorted((world / arm.name).glob("**/eval/games_results.json")):
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


def arm_differences(
    counts: Mapping[Match, MatchCounts], pairs: Iterable[tuple[str, str]], epochs: int
) -> Iterator[dict]:
    """What an arm has over another after the last epoch, on the same words, seeds and roles."""
    for name, other in pairs:
        ours, theirs = (words_of(counts, f"{arm}{epochs}") for arm in (name, other))
        sizes = [sums["games"] for sums in ours.values()]
        totals = [sums["points"] - theirs[word]["points"] for word, sums in ours.items()]
        mean, interval = mean_difference(sizes, totals)
        yield {"arm": name, "minus": other, "difference": mean, "interval": interval}


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
        yield [titles[row["arm"]], titles[row["minus"]], with_interval(row["difference"], row["interval"], "+.3f")]


# --- self-play -----------------------------------------------------------------------------------------------------


def self_play(folders: Iterable[Path], game: type[Game] = Taboo) -> dict[str, float]:
    """How a model's games against itself ended, over all folders: shares by outcome, of empty replies; messages."""
    total = Counter()
    for folder in folders:
        summary = json.loads(next(folder.glob("*_summary.json")).read_text(encoding="utf-8"))
        total.update(summary["outcomes"])
        total.update({name: summary[name] for name in ("games", "empty_replies", "messages")})
        total["length"] += summary["mean_length"] * summary["games"]
    shares = {outcome.name: total[outcome.name] / total["games"] for outcome in game.outcomes}
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


def own_game_lines(worlds: Sequence[Path], arms: Iterable[Arm], epochs: int) -> Iterator[list[str]]:
    """A line for the model of each epoch of self-play at another game than Taboo: how often both win."""
    for arm in (arm for arm in arms if arm.game != DEFAULT_GAME):
        for epoch in range(epochs + 1):
            folders = (world / arm.name / f"epoch{epoch + 1}" / "episodes" for world in worlds)
            shares = self_play(folders, type(load_game(arm.game)))
            model = f"epoch {epoch}" if epoch else IMITATION
            yield [arm.title, model, f"{shares[FOUND]:.3f}", f"{shares['length']:.2f}"]


# --- reasoning -----------------------------------------------------------------------------------------------------


def reasoning_lines(scores: Reasoning, arms: Iterable[Arm], epochs: int) -> list[list[str]]:
    """Accuracies of base, imitation, and each arm's model of each epoch, beside imitation and SFT rows only."""
    others = (IMITATION, "SFT rows only")
    lines = [scores.head(others), *scores.yardsticks(len(others))]
    lines += [scores.line(name, name, (None, None)) for name in (BASE, IMITATION)]
    for arm in arms:
        for epoch in range(1, epochs + 1):
            control = None if arm.name == SFT_ONLY else f"{SFT_ONLY}{epoch}"
            lines.append(scores.line(f"{arm.title}, epoch {epoch}", f"{arm.name}{epoch}", (IMITATION, control)))
    return lines
