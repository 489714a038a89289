"""The report's charts and tables as plain numbers and texts; tools/pages/page.js hands the charts to Plotly.

A chart is a dict: `section` of the page, `title`, `note`, `x_label`, `y_label`, `labels` (names of x = 0, 1, ...; None
where x is a number), `percent`, `reference` (a line at this y, or None) and `series`, each with `name`, `colour`
(number in the page's palette, other dashes from PALETTE on) and `points` [x, y, low, high]; low and high may be None.
"""

from collections.abc import Iterator, Mapping, Sequence

from tools.games.game import Game
from tools.matches.stats import ALL, BOTH, RATES
from tools.matches.text import as_role, points_of, with_interval
from tools.pages.games import Estimate, GameSample, share_estimate

PLAY, MATCH = "play", "match"  # sections of the page
PALETTE = 7  # colours
FIRST_WINS, SECOND_WINS, BREACH, DECIDED, UNDECIDED = 1, 0, 3, 4, 6
RATE_COLOURS = dict(zip(RATES, (2, 4, 6, 3), strict=True))
MOST_POINTS = 200  # of a curve
METRICS = {  # of a training log, as the README's glossary names them
    "loss": "whole loss of a step",
    "policy_loss": "loss of the game rows",
    "sft_loss": "loss of the SFT rows, or of imitation without its KL",
    "log_ratio": "mean of l - l_ref, the estimate of the KL to the reference",
    "kl": "imitation's penalty exp(l) (l - l_ref), before its coefficient",
    "ratio": "mean importance ratio",
    "clip_fraction": "share of game rows whose ratio the clip holds back",
}
IMITATION_METRICS = {name: METRICS[name] for name in ("loss", "sft_loss", "log_ratio", "kl")}  # others tell nothing
Matches = Sequence[tuple[str, Sequence[Mapping]]]  # pooled rows by epoch
Labelled = Sequence[tuple[str, GameSample]]


def chart(section: str, title: str, series: Sequence[dict], **more) -> dict:
    """A chart of those series that have points; `more` are its other fields where they differ from none."""
    fields = {"note": "", "x_label": "", "y_label": "", "labels": None, "percent": False, "reference": None}
    drawn = [one for one in series if one["points"]]
    return {"section": section, "title": title, "series": drawn} | fields | more


def line(name: str, colour: int, estimates: Sequence[Estimate | None]) -> dict:
    """A series over x = 0, 1, ..., without the places where there is nothing."""
    points = [[x, *estimate] for x, estimate in enumerate(estimates) if estimate is not None]
    return {"name": name, "colour": colour, "points": points}


def outcome_colours(game: Game) -> dict[str, int]:
    """By who won, breach or neither; those that would be alike differ in their dashes."""
    colours: dict[str, int] = {}
    for outcome in game.outcomes:
        neither = UNDECIDED if outcome is game.outcomes[-1] else DECIDED
        by_winner = {game.roles[0]: FIRST_WINS, game.roles[1]: SECOND_WINS}
        colour = BREACH if outcome.breach else by_winner.get(outcome.winner, neither)
        alike = sum(other % PALETTE == colour for other in colours.values())
        colours[outcome.name] = colour + PALETTE * alike
    return colours


# --- self-play -----------------------------------------------------------------------------------------------------


def play_charts(samples: Labelled, x_label: str) -> Iterator[dict]:
    """How games ended, how long they were, and replies that are none."""
    axis = {"labels": [label for label, _ in samples], "x_label": x_label}
    games = [sample for _, sample in samples]
    game = games[0].game
    colours = outcome_colours(game)
    shares = [line(name, colour, [sample.share(name) for sample in games]) for name, colour in colours.items()]
    yield chart(PLAY, "How games ended", shares, y_label="share of games", percent=True, **axis)
    lengths = [line("all games", 2, [sample.length() for sample in games])]
    lengths += [line(name, colour, [sample.length(name) for sample in games]) for name, colour in colours.items()]
    note = "up to and with the message that decided the game"
    yield chart(PLAY, "Game length", lengths, y_label="mean number of messages", note=note, **axis)
    faults = {"empty": [sample.empty_replies for sample in games]}
    if any(sample.tells_replies for sample in games):
        faults["cut off"] = [sample.cut_off_replies for sample in games]
    series = [
        line(f"{fault}, {role}", number, [_fault_share(*pair, role) for pair in zip(counts, games, strict=True)])
        for number, (fault, counts, role) in enumerate(
            (fault, counts, role) for fault, counts in faults.items() for role in reversed(game.roles)
        )
    ]
    title = "Empty replies and replies cut off at the token limit" if len(faults) > 1 else "Empty replies"
    yield chart(PLAY, title, series, y_label="share of the role's messages", percent=True, **axis)


def _fault_share(faults: Mapping[str, int], sample: GameSample, role: str) -> Estimate | None:
    return share_estimate(faults[role], sample.messages[role])


def play_table(samples: Labelled, x_label: str) -> dict:
    """The games counted, a row per set of games."""
    names = [outcome.name for outcome in samples[0][1].game.outcomes]
    rows = []
    for label, sample in samples:
        shares = [sample.share(name) for name in names]
        length = sample.mean_length
        rows.append(
            [label, f"{sample.games:,}"]
            + [with_interval(share[0], share[1:], ".1%") if share else "-" for share in shares]
            + ["-" if length is None else f"{length:.2f}"]
            + [f"{sample.empty_replies.total():,} of {sample.messages.total():,}"]
        )
    head = [x_label, "games", *names, "mean length", "empty replies"]
    return {"section": PLAY, "title": "Games", "head": head, "rows": rows}


# --- matches -------------------------------------------------------------------------------------------------------


def match_charts(matches: Matches, x_label: str, game: Game) -> Iterator[dict]:
    """Points by role and word list, and how the games ended by role."""
    axis = {"labels": [label for label, _ in matches], "x_label": x_label}
    lists = word_lists(matches)
    for role in (BOTH, *game.roles):
        series = [
            line(f"words: {words}", number, [_points(find_row(rows, role, words)) for _, rows in matches])
            for number, words in enumerate(lists)
        ]
        title = f"Points against imitation, {as_role(role)}"
        yield chart(MATCH, title, series, y_label=points_of(game), reference=0.5, **axis)
    for role in (BOTH, *game.roles):
        found = [find_row(rows, role, lists[0]) for _, rows in matches]
        series = [line(rate, colour, [_rate(row, rate) for row in found]) for rate, colour in RATE_COLOURS.items()]
        title = f"How its games against imitation ended, {as_role(role)}"
        yield chart(MATCH, title, series, y_label="share of games", percent=True, note=f"words: {lists[0]}", **axis)


def match_table(matches: Matches, x_label: str, game: Game) -> dict:
    """The rows of match play with all their numbers."""
    head = [x_label, "words", "role", "games", "points", "wins", "ties", "losses", "breaches"]
    head += ["clean games", "points in clean games", "mean length", "own empty replies"]
    rows = []
    for label, found in matches:
        for words in word_lists([(label, found)]):
            for row in filter(None, (find_row(found, role, words) for role in (BOTH, *game.roles))):
                clean = row["clean"]
                cells = [words, row["role"], row["games"], with_interval(row["points"], row["points_interval"])]
                cells += [row["wins"], row["ties"], row["losses"], row["breaches"], clean["games"]]
                cells.append(with_interval(clean["points"], clean["points_interval"]))
                length = "-" if row["mean_length"] is None else f"{row['mean_length']:.2f}"
                cells += [length, f"{row['empty_replies']:,} of {row['messages']:,}"]
                rows.append([label, *(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells)])
    return {"section": MATCH, "title": "All numbers of match play", "head": head, "rows": rows}


def match_headline(label: str, rows: Sequence[Mapping], game: Game) -> str:
    """What the last match came to, in one sentence."""
    words = word_lists([(label, rows)])[0]
    found = [row for role in (BOTH, *game.roles) if (row := find_row(rows, role, words)) and row["games"]]
    parts = [f"{with_interval(row['points'], row['points_interval'])} {as_role(row['role'])}" for row in found]
    games = max((row["games"] for row in found), default=0)
    return f"Epoch {label} against imitation, words “{words}”, {games:,} games: points {', '.join(parts)}."


def word_lists(matches: Matches) -> list[str]:
    """The names of the word lists, the pooled one first."""
    names = dict.fromkeys(row["words"] for _, rows in matches for row in rows)
    return sorted(names, key=lambda name: name != ALL)


def find_row(rows: Sequence[Mapping], role: str, words: str) -> Mapping | None:
    """The row of a role and word list, if it was played."""
    return next((row for row in rows if row["role"] == role and row["words"] == words), None)


def _points(row: Mapping | None) -> Estimate | None:
    return (row["points"], *row["points_interval"]) if row and row["points"] is not None else None


def _rate(row: Mapping | None, rate: str) -> Estimate | None:
    found = row["rates"][rate] if row else {"share": None}
    return (found["share"], *found["interval"]) if found["share"] is not None else None


# --- training ------------------------------------------------------------------------------------------------------


def learning_charts(
    section: str, logs: Sequence[tuple[str, Sequence[Mapping]]], metrics: Mapping[str, str]
) -> Iterator[dict]:
    """A chart per metric that was logged, with a curve per run; `logs` are log histories of runs by one method."""
    for metric, note in metrics.items():
        curves = [[(e["step"], e[metric]) for e in log if isinstance(e.get(metric), (int, float))] for _, log in logs]
        size = max(1, -(-max(map(len, curves), default=0) // MOST_POINTS))
        series = [
            {"name": name, "colour": number, "points": _thinned(values, size)}
            for number, ((name, _), values) in enumerate(zip(logs, curves, strict=True))
        ]
        x_label = "optimizer step" + (f" (means of {size} logged values)" if size > 1 else "")
        yield chart(section, metric, series, note=note, x_label=x_label, y_label=metric)


def self_play_metrics(game: Game) -> dict[str, str]:
    """The metrics of learning from self-play, with the rewards of each role."""
    return METRICS | {f"reward_{role}": f"mean reward of the {role}'s rows" for role in game.roles}


def _thinned(values: Sequence[tuple[float, float]], size: int) -> list[list[float | None]]:
    """The means of so many (step, value) pairs each, as points without intervals."""
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    return [[*(sum(numbers) / len(group) for numbers in zip(*group, strict=True)), None, None] for group in groups]
