"""The report's charts and tables as plain numbers and texts; tools/pages/template.html draws them.

A chart is a dict: `section` of the page, `title`, `note`, `x_label`, `y_label`, `labels` (names of x = 0, 1, ...; None
where x is a number), `percent`, `reference` (a line at this y, or None) and `series`, each with `name`, `colour`
(number in the page's palette) and `points` [x, y, low, high]; low and high may be None.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tools.games import taboo
from tools.matches.stats import ALL, BOTH, RATES
from tools.pages.games import CUT_OFF, EMPTY, Estimate, GameTally

PLAY, MATCH = "play", "match"  # sections of the page
COLOURS = {taboo.DEFENDER_WINS: 0, taboo.ATTACKER_WINS: 1, taboo.ATTACKER_BREAKS: 3, taboo.TIED: 6}
ROLE_COLOURS = {taboo.DEFENDER: 0, taboo.ATTACKER: 1}
RATE_COLOURS = dict(zip(RATES, (2, 4, 6, 3), strict=True))
MATCH_ROLES = (BOTH, *taboo.ROLES)
MOST_POINTS = 200  # of a curve
METRICS = {  # of a training log, as the README's glossary names them
    "loss": "whole loss of a step",
    "policy_loss": "loss of the game rows",
    "sft_loss": "loss of the SFT rows, or of imitation without its KL",
    "log_ratio": "mean of l - l_ref, the estimate of the KL to the reference",
    "kl": "imitation's penalty exp(l) (l - l_ref), before its coefficient",
    "ratio": "mean importance ratio",
    "clip_fraction": "share of game rows whose ratio the clip holds back",
    "reward_attacker": "mean reward of the attacker's rows",
    "reward_defender": "mean reward of the defender's rows",
}
IMITATION_METRICS = ("loss", "sft_loss", "log_ratio", "kl")  # the others tell nothing there
Labelled = Sequence[tuple[str, GameTally]]


def chart(section: str, title: str, series: Sequence[dict], **more) -> dict:
    """A chart of those series that have points; `more` are its other fields where they differ from none."""
    fields = {"note": "", "x_label": "", "y_label": "", "labels": None, "percent": False, "reference": None}
    drawn = [one for one in series if one["points"]]
    return {"section": section, "title": title, "series": drawn} | fields | more


def line(name: str, colour: int, estimates: Sequence[Estimate | None]) -> dict:
    """A series over x = 0, 1, ..., without the places where there is nothing."""
    points = [[x, *estimate] for x, estimate in enumerate(estimates) if estimate is not None]
    return {"name": name, "colour": colour, "points": points}


# --- self-play -----------------------------------------------------------------------------------------------------


def play_charts(tallies: Labelled, x_label: str) -> Iterator[dict]:
    """How games ended, how long they were, and replies that are none."""
    axis = {"labels": [label for label, _ in tallies], "x_label": x_label}
    games = [tally for _, tally in tallies]
    yield chart(
        PLAY,
        "How games ended",
        [line(name, COLOURS[name], [tally.share(name) for tally in games]) for name in taboo.OUTCOMES],
        y_label="share of games",
        percent=True,
        **axis,
    )
    lengths = [line("all games", 2, [tally.mean_length() for tally in games])]
    lengths += [line(name, COLOURS[name], [tally.mean_length(name) for tally in games]) for name in taboo.OUTCOMES]
    note = "up to and with the message that decided the game"
    yield chart(PLAY, "Game length", lengths, y_label="mean number of messages", note=note, **axis)
    faults = (EMPTY, CUT_OFF) if any(tally.tells_cut_off for tally in games) else (EMPTY,)
    yield chart(
        PLAY,
        "Empty replies and replies cut off at the token limit" if len(faults) > 1 else "Empty replies",
        [
            line(f"{fault}, {role}", colour + 2 * number, [tally.fault_share(role, fault) for tally in games])
            for number, fault in enumerate(faults)
            for role, colour in ROLE_COLOURS.items()
        ],
        y_label="share of the role's messages",
        percent=True,
        **axis,
    )


def play_table(tallies: Labelled, x_label: str) -> dict:
    """The games counted, a row per set of games."""
    rows = []
    for label, tally in tallies:
        empty = sum(tally.faults[role, EMPTY] for role in taboo.ROLES)
        length = tally.mean_length()
        rows.append(
            [label, f"{tally.games:,}"]
            + [share_text(tally.share(outcome)) for outcome in taboo.OUTCOMES]
            + [f"{length[0]:.2f}" if length else "", f"{empty:,} of {tally.messages.total():,}"]
        )
    head = [x_label, "games", *taboo.OUTCOMES, "mean length", "empty replies"]
    return {"section": PLAY, "title": "Games", "head": head, "rows": rows}


# --- matches -------------------------------------------------------------------------------------------------------


def match_charts(matches: Sequence[tuple[str, Sequence[Mapping]]], x_label: str) -> Iterator[dict]:
    """Points by role and word list, and how the games ended by role; `matches` are pooled rows by epoch."""
    axis = {"labels": [label for label, _ in matches], "x_label": x_label}
    lists = word_lists(matches)
    for role in MATCH_ROLES:
        series = [
            line(f"words: {words}", number, [_points(find_row(rows, role, words)) for _, rows in matches])
            for number, words in enumerate(lists)
        ]
        title = f"Points against imitation, {_as_role(role)}"
        yield chart(MATCH, title, series, y_label="(wins + ties / 2) / games", reference=0.5, **axis)
    for role in MATCH_ROLES:
        found = [find_row(rows, role, lists[0]) for _, rows in matches]
        series = [line(rate, colour, [_rate(row, rate) for row in found]) for rate, colour in RATE_COLOURS.items()]
        title = f"How its games against imitation ended, {_as_role(role)}"
        yield chart(MATCH, title, series, y_label="share of games", percent=True, note=f"words: {lists[0]}", **axis)


def match_table(matches: Sequence[tuple[str, Sequence[Mapping]]], x_label: str) -> dict:
    """The rows of match play with all their numbers."""
    head = [x_label, "words", "role", "games", "points", "wins", "ties", "losses", "breaches"]
    head += ["clean games", "points in clean games", "mean length", "own empty replies"]
    rows = []
    for label, found in matches:
        for words in word_lists([(label, found)]):
            for row in filter(None, (find_row(found, role, words) for role in MATCH_ROLES)):
                clean = row["clean"]
                cells = [words, row["role"], row["games"], interval_text(row["points"], row["points_interval"])]
                cells += [row["wins"], row["ties"], row["losses"], row["breaches"], clean["games"]]
                cells.append(interval_text(clean["points"], clean["points_interval"]))
                length = "" if row["mean_length"] is None else f"{row['mean_length']:.2f}"
                cells += [length, f"{row['empty_replies']:,} of {row['messages']:,}"]
                rows.append([label, *(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells)])
    return {"section": MATCH, "title": "All numbers of match play", "head": head, "rows": rows}


def match_headline(label: str, rows: Sequence[Mapping]) -> str:
    """What the last match came to, in one sentence."""
    words = word_lists([(label, rows)])[0]
    found = [row for role in MATCH_ROLES if (row := find_row(rows, role, words)) and row["games"]]
    parts = [f"{interval_text(row['points'], row['points_interval'])} {_as_role(row['role'])}" for row in found]
    games = max((row["games"] for row in found), default=0)
    return f"Epoch {label} against imitation, words “{words}”, {games:,} games: points {', '.join(parts)}."


def word_lists(matches: Sequence[tuple[str, Sequence[Mapping]]]) -> list[str]:
    """The names of the word lists, the pooled one first."""
    names = dict.fromkeys(row["words"] for _, rows in matches for row in rows)
    return sorted(names, key=lambda name: name != ALL)


def find_row(rows: Sequence[Mapping], role: str, words: str) -> Mapping | None:
    """The row of a role and word list, if it was played."""
    return next((row for row in rows if row["role"] == role and row["words"] == words), None)


def _as_role(role: str) -> str:
    return "both roles" if role == BOTH else f"as {role}"


def _points(row: Mapping | None) -> Estimate | None:
    return (row["points"], *row["points_interval"]) if row and row["points"] is not None else None


def _rate(row: Mapping | None, rate: str) -> Estimate | None:
    found = row["rates"][rate] if row else {"share": None}
    return (found["share"], *found["interval"]) if found["share"] is not None else None


# --- training ------------------------------------------------------------------------------------------------------


def learning_charts(
    section: str, logs: Sequence[tuple[str, Sequence[Mapping]]], metrics: Iterable[str] = METRICS
) -> Iterator[dict]:
    """A chart per metric that was logged, with a curve per run; `logs` are log histories of runs by one method."""
    for metric in metrics:
        curves = [[(e["step"], e[metric]) for e in log if isinstance(e.get(metric), (int, float))] for _, log in logs]
        size = max(1, -(-max(map(len, curves), default=0) // MOST_POINTS))
        series = [
            {"name": name, "colour": number, "points": _thinned(values, size)}
            for number, ((name, _), values) in enumerate(zip(logs, curves, strict=True))
        ]
        x_label = "optimizer step" + (f" (means of {size} logged values)" if size > 1 else "")
        yield chart(section, metric, series, note=METRICS[metric], x_label=x_label, y_label=metric)


def _thinned(values: Sequence[tuple[float, float]], size: int) -> list[list[float | None]]:
    """The means of so many (step, value) pairs each, as points without intervals."""
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    return [[*(sum(numbers) / len(group) for numbers in zip(*group, strict=True)), None, None] for group in groups]


# --- texts ---------------------------------------------------------------------------------------------------------


def share_text(estimate: Estimate | None) -> str:
    """In percent: 54.0% [51.2, 56.8]."""
    return "{:.1f}% [{:.1f}, {:.1f}]".format(*(100 * number for number in estimate)) if estimate else ""


def interval_text(value: float | None, interval: Sequence[float] | None) -> str:
    """0.540 [0.512, 0.568]."""
    return "" if value is None else f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
