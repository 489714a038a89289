"""The tables of the embedded world: points against imitation, differences, self-play, reasoning outside the game.

No torch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.games.game import DEFAULT_GAME, load_game
from tools.games.guess_my_city import FOUND
from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, DEFENDER_WINS, TIED, Taboo
from tools.matches.stats import ALL, BOTH, Counts, Match, count_matches, estimate, mean_difference, result_rows
from tools.matches.text import with_interval
from tools.tiny.questions import BASE, CHOICES, IMITATION, KINDS, METRIC, REASONING, TASK, TASKS, ceiling, tasks_digest
from utils import iter_records, read_json, read_json_or_jsonl, replacing, write_json

RELEASED, SFT_ONLY = "released", "sft"
FIRST_GAMES = f"{RELEASED}/epoch1/episodes"  # of the imitation model, shared by all arms of a seed
POINTS = ["learning", "epoch", "points", "of each seed", "as attacker", "as defender", "played words"]
POINTS += ["held-out words", "clean games", "own breaches as attacker", "ties"]
EMPTY = "empty replies"
# Shares in the tables of self-play: of Taboo, and of the games that both win.
SELF_PLAY = {"attacker wins": ATTACKER_WINS, "defender wins": DEFENDER_WINS, "breaches": ATTACKER_BREAKS, "ties": TIED}
SELF_PLAY |= {EMPTY: EMPTY}
OWN_GAME = {"both win": FOUND}
PLAYED, HELD_OUT = "played words", "held-out words"
COLUMNS = (*KINDS, ALL, PLAYED, HELD_OUT)  # of the table of reasoning: which questions count
Lines = Iterator[list[str]]
Words = dict[str, Counter]  # by target word, how many "games" or questions, and their "points"


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
    counts = count_matches(read_matches(worlds, arms), Taboo())
    rows = [row for row in result_rows(counts) if row["opponent"] == IMITATION]
    differences = list(arm_differences(counts, pairs, epochs))
    listed = list(arms.values())
    tables = [
        [POINTS, imitation_line(worlds), *match_lines(rows, listed, epochs)],
        [["points after the last epoch", "minus", "difference"], *difference_lines(differences, arms)],
        list(self_play_lines(worlds, [arm for arm in listed if arm.every_epoch], epochs, SELF_PLAY)),
    ]
    if partners := [arm for arm in listed if arm.game != DEFAULT_GAME]:
        tables.append(list(self_play_lines(worlds, partners, epochs, OWN_GAME)))
    if reasons:
        tables.append(list(reasoning_lines(worlds, listed, epochs)))
    text = "\n".join(map(markdown, tables))
    write_json(output_dir / "table.json", {"results": rows, "differences": differences})
    with replacing(output_dir / "table.md") as file:
        file.write(text)
    return text


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table with its head."""
    head, *body = (f"| {' | '.join(line)} |\n" for line in lines)
    return head + "|---" * len(lines[0]) + "|\n" + "".join(body)


def read_matches(worlds: Iterable[Path], arms: Iterable[str]) -> Iterator[dict]:
    """The games of all matches; the model of an epoch is called by its arm and number, as released1."""
    for folder in (world / arm for world in worlds for arm in arms):
        for path in sorted(folder.glob("**/eval/games_results.json")):
            for _, episode in iter_records(path):
                yield episode | {role: episode[role].replace("epoch", folder.name) for role in Taboo.roles}


def match_lines(rows: Iterable[dict], arms: Iterable[Arm], epochs: int) -> Lines:
    """A line for each evaluated model: points pooled over seeds, by seed, role and word list, and clean games."""
    chosen = {(row["player"], row["words"], row["role"], row["seed"]): row for row in rows}
    for arm, epoch in ((arm, epoch) for arm in arms for epoch in range(1, epochs + 1)):
        player = f"{arm.name}{epoch}"
        if (whole := chosen.get((player, ALL, BOTH, None))) is None:
            continue
        roles = [chosen[player, ALL, role, None] for role in Taboo.roles]
        lists = [chosen[player, words, BOTH, None] for words in ("played", "held_out")]
        seeds = [row for key, row in chosen.items() if key[:3] == (player, ALL, BOTH) and row is not whole]
        yield [
            arm.title,
            str(epoch),
            points_cell(whole),
            ", ".join(f"{row['points']:.3f}" for row in seeds),
            *map(points_cell, (*roles, *lists, whole["clean"])),
            f"{roles[0]['rates']['breach']['share']:.3f}",
            f"{whole['rates']['tie']['share']:.3f}",
        ]


def points_cell(row: Mapping) -> str:
    """Points and their 95% interval."""
    return with_interval(row["points"], row["points_interval"])


def arm_differences(counts: Mapping[Match, Counts], pairs: Iterable[tuple[str, str]], epochs: int) -> Iterator[dict]:
    """What an arm has over another after the last epoch, on the same words, seeds and roles."""
    for name, other in pairs:
        mean, interval = word_difference(*(words_of(counts, f"{arm}{epochs}") for arm in (name, other)))
        yield {"arm": name, "minus": other, "difference": mean, "interval": interval}


def words_of(counts: Mapping[Match, Counts], player: str) -> Words:
    """A player's games and points over all lists, seeds and both roles."""
    words: Words = {}
    for match, counted in counts.items():
        for name, of_role in zip((match.first, match.second), counted.values(), strict=True):
            for word, sums in of_role.items() if name == player else ():
                words.setdefault(word, Counter()).update(sums)
    return words


def word_difference(ours: Words, theirs: Words) -> tuple[float, list[float]]:
    """By how much the mean of ours is above that of theirs, on the same words, and the interval."""
    totals = [sums["points"] - theirs[word]["points"] for word, sums in ours.items()]
    return mean_difference([sums["games"] for sums in ours.values()], totals)


def difference_lines(differences: Iterable[dict], arms: Mapping[str, Arm]) -> Lines:
    """A line for each difference."""
    for row in differences:
        difference = with_interval(row["difference"], row["interval"], "+.3f")
        yield [arms[row["arm"]].title, arms[row["minus"]].title, difference]


def self_play(folders: Iterable[Path], game: str = DEFAULT_GAME) -> dict[str, float]:
    """How a model's games against itself ended, over all folders: shares by outcome, of empty replies; messages."""
    total = Counter()
    for folder in folders:
        summary = read_json(next(folder.glob("*_summary.json")))
        total.update(summary["outcomes"])
        total.update({name: summary[name] for name in ("games", "empty_replies", "messages")})
        total["length"] += summary["mean_length"] * summary["games"]
    shares = {outcome.name: total[outcome.name] / total["games"] for outcome in load_game(game).outcomes}
    return shares | {EMPTY: total["empty_replies"] / total["messages"], "length": total["length"] / total["games"]}


def imitation_line(worlds: Iterable[Path]) -> list[str]:
    """What either role gets when the imitation model plays itself, with its shares of breaches and ties."""
    shares = self_play(world / FIRST_GAMES for world in worlds)
    attacker = shares[ATTACKER_WINS] + shares[TIED] / 2
    cells = ["imitation against itself", "-", "0.500", "", f"{attacker:.3f}", f"{1 - attacker:.3f}", "", "", ""]
    return [*cells, f"{shares[ATTACKER_BREAKS]:.3f}", f"{shares[TIED]:.3f}"]


def self_play_lines(worlds: Sequence[Path], arms: Iterable[Arm], epochs: int, shown: Mapping[str, str]) -> Lines:
    """The names of the columns, and a line for the model of each epoch, the imitation model first."""
    yield ["learning", "model", *shown, "messages"]
    for arm, epoch in ((arm, epoch) for arm in arms for epoch in range(epochs + 1)):
        first = arm.game == DEFAULT_GAME and epoch == 0
        place = FIRST_GAMES if first else f"{arm.name}/epoch{epoch + 1}/episodes"
        shares = self_play([world / place for world in worlds], arm.game)
        model = f"epoch {epoch}" if epoch else IMITATION
        yield [arm.title, model, *(f"{shares[name]:.3f}" for name in shown.values()), f"{shares['length']:.2f}"]


class Reasoning:
    """The scores of models on the questions, over the worlds of several seeds."""

    def __init__(self, folders: Sequence[Path], questions: Path = TASKS):
        self.folders, self.digest = folders, tasks_digest(questions)
        self.asked = {kind: read_json_or_jsonl(questions / f"{kind}.jsonl") for kind in KINDS}

    def words(self, model: str, column: str = ALL) -> Words:
        """A column's questions and right answers; ValueError for answers to other questions."""
        words: Words = defaultdict(Counter)
        for folder in self.folders:
            for kind, asked in self.asked.items():
                path = folder / model / f"{TASK.format(kind)}.json"
                answers = read_json(path)
                if answers["settings"]["own_tasks"] != self.digest:
                    raise ValueError(f"{path}: answers to other questions; delete {folder}, and ask again")
                for each, score in zip(asked, answers["scores"][METRIC], strict=True):
                    if column in (kind, ALL, HELD_OUT if each["held_out"] else PLAYED):
                        words[each["word"]]["games"] += 1
                        words[each["word"]]["points"] += score
        return words

    def lines(self, others: Sequence[str], models: Iterable[tuple[str, str, Sequence[str | None]]]) -> Lines:
        """The names of the columns, the last of them differences from `others`, and a line for each model.

        First comes what drawing an answer gives, what a scripted player with all facts gets who forgets as in the
        games, base and imitation model; then `models`: title, name, and whom the last columns subtract.
        """
        ceilings = [[ceiling(each) for each in asked] for asked in self.asked.values()]
        ceilings.append([each for own in ceilings for each in own])  # of all kinds
        empty = [""] * (len(COLUMNS) - len(ceilings) + len(others))
        yield ["model", *COLUMNS, *(f"minus {other}" for other in others)]
        yield ["chance", *[f"{1 / CHOICES:.3f}"] * len(ceilings), *empty]
        yield ["scripted player", *(f"{sum(each) / len(each):.3f}" for each in ceilings), *empty]
        first = [(name, name, [None] * len(others)) for name in (BASE, IMITATION)]
        for title, model, minus in (*first, *models):
            shares = [self.accuracy(model, column) for column in COLUMNS]
            yield [title, *shares, *(self.difference(model, other) if other else "" for other in minus)]

    def accuracy(self, model: str, column: str) -> str:
        """The share of right answers."""
        words = self.words(model, column).values()
        return with_interval(*estimate([sums["games"] for sums in words], [sums["points"] for sums in words]))

    def difference(self, model: str, other: str) -> str:
        """By how much more of all questions a model answers right than another."""
        return with_interval(*word_difference(self.words(model), self.words(other)), "+.3f")


def reasoning_lines(worlds: Sequence[Path], arms: Iterable[Arm], epochs: int) -> Lines:
    """Accuracies of base, imitation, and each arm's model of each epoch, beside imitation and SFT rows only."""
    models = []
    for arm, epoch in ((arm, epoch) for arm in arms for epoch in range(1, epochs + 1)):
        control = None if arm.name == SFT_ONLY else f"{SFT_ONLY}{epoch}"
        models.append((f"{arm.title}, epoch {epoch}", f"{arm.name}{epoch}", (IMITATION, control)))
    return Reasoning([world / REASONING for world in worlds]).lines((IMITATION, "SFT rows only"), models)
