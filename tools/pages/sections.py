"""What the page says: the verdict on top, and sections with charts and tables."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tools.matches.stats import BOTH
from tools.matches.text import HEAD, as_role, cells, how_counted, shown_rows, with_interval
from tools.pages.charts import ALL_GAMES, PERCENT, at_places, chart, curve, outcome_colours
from tools.pages.contents import IMITATION, Report
from tools.pages.games import Estimate, GameSample, share_estimate

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
Logs = Sequence[tuple[str, Sequence[Mapping]]]  # log histories by name


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
        match_section(report) if shown_rows(report.matches) else None,
        play_section(report.plays) if report.plays else None,
        reasoning_section(report.reasoning) if report.reasoning else None,
        training_section("learning", "Training on games", intro, by_games, METRICS | roles),
        training_section("supervised", "Supervised training", "As logged by train.py.", supervised, kept),
    ]
    return [section for section in found if section and (section.charts or section.tables)]


# --- the verdict ---------------------------------------------------------------------------------------------------


def verdict(report: Report) -> list[str]:
    """What came of it, in two sentences."""
    if rows := shown_rows(report.matches):
        return match_verdict(report, rows)
    sentences = ["Nothing was played or trained."]
    if report.plays:
        name, games = report.plays[-1]
        ended = ", ".join(f"{count / games.games:.1%} “{outcome}”" for outcome, count in games.outcomes.most_common())
        sentences = [f"{name}: {games.games:,} games ended {ended}."]
    elif report.logs:
        name, log = report.logs[-1]
        losses = [entry["loss"] for entry in log if isinstance(entry.get("loss"), (int, float))] or [math.nan]
        sentences = [f"{name}: the loss went from {losses[0]:.3g} to {losses[-1]:.3g} in {log[-1]['step']} steps."]
    return [*sentences, "No match was played, so nothing here says whether a model plays better than another."]


def match_verdict(report: Report, shown: Sequence[Mapping]) -> list[str]:
    """Whether the last player is better than the first opponent, over all words, and in which role."""
    opponent = shown[0]["opponent"]
    player = [row["player"] for row in shown if row["opponent"] == opponent][-1]
    rows = {row["role"]: row for row in reversed(shown) if (row["player"], row["opponent"]) == (player, opponent)}
    _, heights = reference(report)
    parts = []
    for role in filter(rows.get, report.game.roles):
        alone = f" ({opponent} against itself {heights[role]:.1%})" if role in heights else ""
        parts.append(f"{as_role(role)} {points_of(rows[role])}{alone}")
    by_role = f"It scores {', '.join(parts)}."
    if BOTH not in rows:
        return [f"{player} played itself only.", by_role]
    equal, (low, high) = heights.get(BOTH, 0.5), rows[BOTH]["points_interval"]
    better = "plays better than" if low > equal else "plays worse than" if high < equal else "cannot be told from"
    return [
        f"{player} {better} {opponent}: {points_of(rows[BOTH])} of the points in both roles, where equals score "
        f"{equal:.1%}, in {rows[BOTH]['games']:,} games.",
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
    if not own and opponent == IMITATION and report.plays and report.plays[0][0] == "epoch1":
        games = report.plays[0][1]
        own = {role: games.mean_points(role) for role in report.game.roles}
        name += ", in self-play"
    return name, own and own | {BOTH: sum(own.values()) / len(own)}


def match_section(report: Report) -> Section:
    """Points by role and word list, and the table."""
    rows = shown_rows(report.matches)
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
        line = (name, heights[role]) if one and role in heights else ("equality", 0.5)
        title = f"Points {as_role(role)}{against}"
        charts.append(chart(title, lines, labels=labels, form=PERCENT, whole=True, joined=one, reference=line))
    table = ("All numbers of match play", HEAD, [cells(row) for row in rows])
    intro = f"{how_counted(report.game)} Bars are the same intervals."
    return Section("match", f"Matches{against}", intro, [one for one in charts if one["data"]], [table])


def _points(row: Mapping | None) -> Estimate | None:
    return (row["points"], *row["points_interval"]) if row else None


# --- self-play -----------------------------------------------------------------------------------------------------


def play_section(plays: Sequence[tuple[str, GameSample]]) -> Section:
    """How games ended, how long they were, and replies that are none."""
    labels, sets = [name for name, _ in plays], [games for _, games in plays]
    colours = outcome_colours(sets[0].game)
    epochs = labels[0] == "epoch1"
    shares = [at_places(name, colour, (games.share(name) for games in sets)) for name, colour in colours.items()]
    lengths = [
        at_places("all games", ALL_GAMES, ((games.mean_length, None, None) if games.games else None for games in sets))
    ]
    faults = [
        at_places("empty", 0, (share_estimate(games.empty_replies.total(), games.messages.total()) for games in sets)),
        at_places("cut off at the token limit", 1, (games.cut_off_share() for games in sets)),
    ]
    charts = [
        chart("How games ended", shares, y_label="share of games", form=PERCENT, labels=labels, joined=epochs),
        chart("Game length", lengths, y_label="messages up to the deciding one", labels=labels, joined=epochs),
        chart("Faulty replies", faults, y_label="share of messages", form=PERCENT, labels=labels, joined=epochs),
    ]
    points = (f"points, {role}" for role in sets[0].game.roles)
    head = ["games of", "games", *colours, *points, "messages", "empty replies"]
    table = ("Games", head, [_play_cells(name, games, colours) for name, games in plays])
    intro = "All games are counted. Bars are 95% intervals that take games, or messages, as independent: they are too "
    intro += "narrow where a word was played several times."
    return Section("play", "Games", intro, charts, [table])


def _play_cells(name: str, games: GameSample, outcomes: Iterable[str]) -> list[str]:
    shares = [games.share(outcome) or (None, None, None) for outcome in outcomes]
    return [
        name,
        f"{games.games:,}",
        *(with_interval(share, bounds, PERCENT) for share, *bounds in shares),
        *(with_interval(games.mean_points(role), None, PERCENT) for role in games.game.roles),
        with_interval(games.mean_length, None, ".2f"),
        f"{games.empty_replies.total():,} of {games.messages.total():,}",
    ]


# --- reasoning and training ----------------------------------------------------------------------------------------


def reasoning_section(rows: Sequence[Mapping]) -> Section:
    """The scores of models on benchmarks."""
    models, benchmarks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "benchmark"))
    scores = {
        (row["model"], row["benchmark"]): f"{row['value']:.1f}" + (f" ± {row['stderr']:.1f}" if row["stderr"] else "")
        for row in rows
    }
    table = [[model, *(scores.get((model, benchmark), "-") for benchmark in benchmarks)] for model in models]
    intro = "Percent, and standard errors that cover the choice of questions, not the randomness of training."
    return Section("reasoning", "Reasoning", intro, tables=[("Scores", ["model", *benchmarks], table)])


def training_section(id: str, title: str, intro: str, logs: Logs, metrics: Mapping[str, str]) -> Section:
    """A chart for each metric that was logged, with a curve per training."""
    drawn = [
        chart(
            f"{metric}: {note}",
            [curve(name, number, log, metric) for number, (name, log) in enumerate(logs)],
            x_label="optimizer step",
            y_label=metric,
        )
        for metric, note in metrics.items()
    ]
    return Section(id, title, intro, [one for one in drawn if one["data"]])
