"""What the page says: the verdict on top, and sections with charts and tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tools.games.game import Game
from tools.matches.stats import BOTH
from tools.matches.text import HEAD, as_role, cells, how_counted, shown_rows, with_interval
from tools.pages.charts import ALL_GAMES, PERCENT, at_places, chart, curve, outcome_colours, share_range
from tools.pages.contents import IMITATION, Report
from tools.pages.games import QUANTILE, Estimate, GameSample, share_estimate

METRICS = {  # of a training log, as the README's glossary names them
    "loss": "whole loss of a step",
    "policy_loss": "loss of the game rows",
    "sft_loss": "loss of the SFT rows, or of imitation without its KL",
    "log_ratio": "mean of l - l_ref, the estimate of the KL to the reference",
    "kl": "imitation's penalty exp(l) (l - l_ref), before its coefficient",
    "ratio": "mean importance ratio",
    "clip_fraction": "share of game rows whose ratio the clip holds back",
    "learning_rate": "learning rate of the step",
    "grad_norm": "norm of the gradient, before it is clipped",
}
OF_GAMES = "policy_loss"  # logged by self-play training only
NOT_SUPERVISED = ("ratio", "reward")  # what tells nothing of supervised training


@dataclass
class Section:
    """A part of the page; tables are (title, head, rows)."""

    id: str
    title: str
    intro: str
    charts: list[dict] = field(default_factory=list)
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = field(default_factory=list)


def sections(report: Report) -> list[Section]:
    """All parts for which there is something."""
    supervised = [(name, log) for name, log in report.logs if not any(OF_GAMES in entry for entry in log)]
    by_games = [pair for pair in report.logs if pair not in supervised]
    roles = {f"reward_{role}": f"mean reward of the {role}'s rows" for role in report.game.roles}
    kept = {name: note for name, note in METRICS.items() if not name.startswith(NOT_SUPERVISED)}
    intro = "As logged by train.py. Each epoch starts from the model of the one before, which is its reference."
    found = [
        match_section(report) if report.matches else None,
        play_section(report.plays) if report.plays else None,
        reasoning_section(report.reasoning) if report.reasoning else None,
        training_section("learning", "Training on games", intro, by_games, METRICS | roles),
        training_section("supervised", "Supervised training", "As logged by train.py.", supervised, kept),
    ]
    return [section for section in found if section and (section.charts or section.tables)]


# --- the verdict ---------------------------------------------------------------------------------------------------


def verdict(report: Report) -> list[str]:
    """What came of it, in two sentences."""
    if report.matches and (rows := last_pair(shown_rows(report.matches))):
        return match_verdict(report, rows)
    sentences = []
    if report.plays:
        name, games = report.plays[-1]
        shares = [(outcome.name, games.share(outcome.name)) for outcome in report.game.outcomes]
        ended = ", ".join(f"{share[0]:.1%} “{outcome}”" for outcome, share in shares if share)
        sentences.append(f"{name}: {games.games:,} games ended {ended}." if ended else f"{name}: no games.")
    if report.logs:
        name, log = report.logs[-1]
        if losses := [entry["loss"] for entry in log if isinstance(entry.get("loss"), (int, float))]:
            sentences.append(f"{name}: the loss went from {losses[0]:.3g} to {losses[-1]:.3g}.")
    return [*sentences[:1], "No match was played, so nothing here says whether a model plays better than another."]


def last_pair(rows: Sequence[Mapping]) -> list[Mapping]:
    """The rows of the last player against the first opponent, over all words."""
    pair = [row for row in rows if row["opponent"] == rows[0]["opponent"]][-1:]
    return [
        row
        for row in rows
        if all(row[key] == pair[0][key] for key in ("player", "opponent")) and row["words"] == rows[0]["words"]
    ]


def match_verdict(report: Report, rows: Sequence[Mapping]) -> list[str]:
    """Whether the last player is better than its opponent, and in which role."""
    whole, opponent = rows[0], rows[0]["opponent"]
    _, heights = reference(report)
    parts = []
    for row in rows:
        if row["role"] != BOTH:
            alone = f" ({opponent} against itself {heights[row['role']]:.1%})" if heights else ""
            parts.append(f"{as_role(row['role'])} {points_of(row)}{alone}")
    by_role = f"It scores {', '.join(parts)}."
    if whole["role"] != BOTH:
        return [f"{whole['player']} played itself only: {whole['games']:,} games.", by_role]
    equal, (low, high) = heights.get(BOTH, 0.5), whole["points_interval"]
    better = "plays better than" if low > equal else "plays worse than" if high < equal else "cannot be told from"
    return [
        f"{whole['player']} {better} {opponent}: {points_of(whole)} of the points in both roles, where equals score "
        f"{equal:.1%}, in {whole['games']:,} games.",
        by_role,
    ]


def points_of(row: Mapping) -> str:
    """A row's points with their interval."""
    return with_interval(row["points"], row["points_interval"], PERCENT)


# --- matches -------------------------------------------------------------------------------------------------------


def reference(report: Report) -> tuple[str, dict[str, float]]:
    """What the opponent of all scores against itself in each role, and the name of that: its own match, or the games
    that the imitation model played with itself. Nothing where neither is there."""
    rows = shown_rows(report.matches)
    opponent, words = rows[0]["opponent"], rows[0]["words"]
    own = {
        row["role"]: row["points"]
        for row in report.matches["results"]
        if (row["player"], row["opponent"], row["words"], row["seed"]) == (opponent, opponent, words, None)
    }
    name = f"{opponent} against itself"
    if not own and opponent == IMITATION and report.plays and report.plays[0][0] == "epoch 1":
        games = report.plays[0][1]
        own = {role: games.points[role] / games.games for role in report.game.roles}
        name += ", in self-play"
    return name, own and own | {BOTH: sum(own.values()) / len(own)}


def match_section(report: Report) -> Section | None:
    """Points by role and word list, and the table."""
    rows = shown_rows(report.matches)
    if not rows:
        return None
    drawn = [row for row in rows if row["player"] != row["opponent"]] or rows
    pairs = list(dict.fromkeys((row["player"], row["opponent"]) for row in drawn))
    one = len({opponent for _, opponent in pairs}) == 1
    against = f" against {pairs[0][1]}" if one else ""
    labels = [player if one else f"{player} – {opponent}" for player, opponent in pairs]
    found = {(row["player"], row["opponent"], row["words"], row["role"]): row for row in drawn}
    name, heights = reference(report)
    charts = []
    for role in (BOTH, *report.game.roles):
        lines = [
            at_places(f"words: {words}", number, (_points(found.get((*pair, words, role))) for pair in pairs))
            for number, words in enumerate(dict.fromkeys(row["words"] for row in drawn))
        ]
        line = (name, heights[role]) if one and heights else ("equality", 0.5)
        title = f"Points {as_role(role)}{against}"
        charts.append(chart(title, lines, labels=labels, form=PERCENT, y_label="points", joined=one, reference=line))
    charts = [chart for chart in charts if chart["data"]]
    share_range(charts)
    table = ("All numbers of match play", HEAD, [cells(row) for row in rows])
    intro = f"{how_counted(report.game)} Bars are the same intervals."
    return Section("match", f"Matches{against}", intro, charts, [table])


def _points(row: Mapping | None) -> Estimate | None:
    return row and (row["points"], *row["points_interval"])


# --- self-play -----------------------------------------------------------------------------------------------------


def play_section(plays: Sequence[tuple[str, GameSample]]) -> Section:
    """How games ended, how long they were, and replies that are none."""
    labels, sets = [name for name, _ in plays], [games for _, games in plays]
    game = sets[0].game
    colours = outcome_colours(game)
    epochs = labels[0] == "epoch 1"
    shares = [at_places(name, colour, (games.share(name) for games in sets)) for name, colour in colours.items()]
    lengths = [at_places("all games", ALL_GAMES, (games.length() for games in sets))]
    lengths += [at_places(name, colour, (games.length(name) for games in sets)) for name, colour in colours.items()]
    faults, title = list(_fault_lines(game, sets)), "Empty replies, and replies cut off at the token limit"
    charts = [
        chart("How games ended", shares, y_label="share of games", form=PERCENT, labels=labels, joined=epochs),
        chart("Game length", lengths, y_label="messages up to the deciding one", labels=labels, joined=epochs),
        chart(title, faults, y_label="share of the role's messages", form=PERCENT, labels=labels, joined=epochs),
    ]
    head = ["games of", "games", *colours, "messages", "empty replies"]
    table = ("Games", head, [_play_cells(name, games, colours) for name, games in plays])
    intro = "All games are counted. Bars are 95% intervals that take games, or messages, as independent: they are too "
    intro += "narrow where a word was played several times."
    return Section("play", "Games", intro, charts, [table])


def _fault_lines(game: Game, sets: Sequence[GameSample]) -> Iterable[tuple]:
    faults = {"empty": [games.empty_replies for games in sets]}
    if any(games.tells_replies for games in sets):
        faults["cut off"] = [games.cut_off_replies for games in sets]
    for fault, counts in faults.items():
        for role in game.roles:
            number = len(game.roles) * list(faults).index(fault) + game.roles.index(role)
            pairs = zip(counts, sets, strict=True)
            estimates = (share_estimate(found[role], games.messages[role]) for found, games in pairs)
            yield at_places(f"{fault}, {role}", number, estimates)


def _play_cells(name: str, games: GameSample, outcomes: Iterable[str]) -> list[str]:
    shares = [games.share(outcome) or (None, None, None) for outcome in outcomes]
    return [
        name,
        f"{games.games:,}",
        *(with_interval(share, bounds, PERCENT) for share, *bounds in shares),
        with_interval(games.mean_length, None, ".2f"),
        f"{games.empty_replies.total():,} of {games.messages.total():,}",
    ]


# --- reasoning and training ----------------------------------------------------------------------------------------


def reasoning_section(rows: Sequence[Mapping]) -> Section:
    """The scores of models on benchmarks, in percent."""
    models, benchmarks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "benchmark"))
    scores = {(row["model"], row["benchmark"]): row for row in rows}

    def score(model: str, benchmark: str):
        row = scores.get((model, benchmark))
        if row is None or row["stderr"] is None:
            return row and (row["value"] / 100, None, None)
        half = QUANTILE * row["stderr"]
        return tuple(
            share / 100 for share in (row["value"], max(0, row["value"] - half), min(100, row["value"] + half))
        )

    lines = [
        at_places(model, number, (score(model, benchmark) for benchmark in benchmarks))
        for number, model in enumerate(models)
    ]
    drawn = chart("Scores", lines, labels=benchmarks, form=PERCENT, joined=False, y_label="score")
    found = [[score(model, benchmark) or (None, None, None) for benchmark in benchmarks] for model in models]
    table = [
        [model, *(with_interval(value, None if bounds[0] is None else bounds, PERCENT) for value, *bounds in line)]
        for model, line in zip(models, found, strict=True)
    ]
    intro = (
        "By tools/evaluate_reasoning.py. 95% intervals cover the choice of questions, not the randomness of training."
    )
    return Section("reasoning", "Reasoning", intro, [drawn], [("Scores", ["model", *benchmarks], table)])


def training_section(
    id: str, title: str, intro: str, logs: Sequence[tuple[str, Sequence[Mapping]]], metrics: Mapping[str, str]
) -> Section:
    """A chart for each metric that was logged, with a curve per training."""
    drawn = [
        chart(
            metric,
            [curve(name, number, log, metric) for number, (name, log) in enumerate(logs)],
            note=note,
            x_label="optimizer step",
            y_label=metric,
        )
        for metric, note in metrics.items()
    ]
    return Section(id, title, intro, [one for one in drawn if one["data"]])
