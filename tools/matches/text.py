"""Results of match play as text. `results` is what matches.json holds."""

from collections.abc import Sequence

from tools.games.game import Game
from tools.matches.stats import ALL, BOTH


def shown_pairs(results: dict) -> list[tuple[str, str]]:
    """(player, opponent) of each two players once: the later one against the earlier, or against `against`."""
    settings = results["settings"]
    players, against = settings["players"], settings["against"]
    place = {player: number if player != against else -1 for number, player in enumerate(players)}
    played = {(row["player"], row["opponent"]): None for row in results["results"]}
    ordered = sorted(played, key=lambda pair: (place[pair[1]], place[pair[0]]))
    return [(player, opponent) for player, opponent in ordered if place[player] >= place[opponent]]


def pooled_rows(results: dict) -> dict[tuple[str, str, str, str], dict]:
    """The rows over all seeds, by word list, player, opponent and role."""
    return {
        (row["words"], row["player"], row["opponent"], row["role"]): row
        for row in results["results"]
        if row["seed"] is None
    }


def word_lists(results: dict) -> list[str]:
    """Names of the lists that have rows, the pooled one last."""
    lists = results["settings"]["words"]
    return [*lists, ALL] if len(lists) > 1 else lists


def as_role(role: str) -> str:
    """As it reads in a sentence."""
    return "both roles" if role == BOTH else f"as {role}"


def with_interval(value: float | None, interval: Sequence[float] | None, form: str = ".3f") -> str:
    """A number and its interval: 0.540 [0.512, 0.568]; by the form ".1%" 54.0% [51.2, 56.8]; "-" if there is none."""
    if value is None:
        return "-"
    low, high = (format(bound, form).removesuffix("%") for bound in interval)
    return f"{value:{form}} [{low}, {high}]"


def points_of(game: Game) -> str:
    """What points are in this game."""
    own = type(game).points is not Game.points or any(outcome.points for outcome in game.outcomes)
    return "mean points of a game, 0 to 1" if own else "(wins + ties / 2) / games"


def how_counted(game: Game) -> str:
    """What points, breaches and clean games are, in sentences."""
    breaches = [
        f"{outcome.name} (a win of the {outcome.winner})" if outcome.winner else outcome.name
        for outcome in game.outcomes
        if outcome.breach
    ]
    names = f"Breaches of the rules are games that ended so: {', '.join(breaches)}. " if breaches else ""
    return f"Points are {points_of(game)}. {names}Clean games are decided without breach, tie or empty reply."


# --- tables --------------------------------------------------------------------------------------------------------


def matches_text(results: dict, game: Game) -> str:
    """Tables to read: for each word list points of every pair, then points and rates by role."""
    settings = results["settings"]
    seeds = ", ".join(map(str, settings["seeds"]))
    parts = [
        f"{game.title} by match: --task_type {settings['task_type']}, seeds {seeds}, games per word "
        f"{settings['games_per_word']}, turns {settings['max_turns']}\n{how_counted(game)}\n"
        "All shares are in percent, with 95% intervals over target words. Empty: the player's empty replies."
    ]
    for words in word_lists(results):
        parts.append(f"== words: {words} ==")
        if len(settings["players"]) > 2 and settings["against"] is None:
            parts.append(
                "Points in both roles, of the player on the left against the one above:\n" + _matrix(results, words)
            )
        parts.append(_details(results, words, (BOTH, *game.roles)))
    return "\n\n".join(parts) + "\n"


def _matrix(results: dict, words: str) -> str:
    rows, players = pooled_rows(results), results["settings"]["players"]
    opponents = [name for name in players if any((words, player, name, BOTH) in rows for player in players)]
    lines = [["", *opponents]]
    for player in players:
        cells = [rows.get((words, player, opponent, BOTH)) for opponent in opponents]
        lines.append([player, *(_share(row["points"], row["points_interval"]) if row else "-" for row in cells)])
    return align(lines)


def _details(results: dict, words: str, roles: Sequence[str]) -> str:
    rows = pooled_rows(results)
    head = ["player", "opponent", "role", "games", "points", "win", "tie", "loss", "breach"]
    lines = [[*head, "clean", "clean points", "length", "empty"]]
    for player, opponent in shown_pairs(results):
        names = (player, opponent)
        for role in roles:
            if row := rows.get((words, player, opponent, role)):
                lines.append([*names, role, *_numbers(row)])
                names = ("", "")
    return align(lines)


def _numbers(row: dict) -> list[str]:
    """The cells of a row after its names."""
    rates = [row["rates"][name] for name in ("win", "tie", "loss", "breach")]
    clean = row["clean"]
    return [
        str(row["games"]),
        _share(row["points"], row["points_interval"]),
        *(_share(rate["share"], rate["interval"]) for rate in rates),
        str(clean["games"]),
        _share(clean["points"], clean["points_interval"]),
        f"{row['mean_length']:.2f}",
        f"{100 * row['empty_replies'] / row['messages']:.1f}" if row["messages"] else "-",
    ]


def _share(share: float | None, interval: list[float] | None) -> str:
    """In percent: 54.0 [51.2, 56.8]."""
    return with_interval(share, interval, ".1%").replace("%", "")


def align(lines: list[list[str]]) -> str:
    """Cells in columns, names on the left and numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    named = {number for number, title in enumerate(lines[0]) if title in ("", "player", "opponent", "role")}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number in named else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
