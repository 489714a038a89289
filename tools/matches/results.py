"""The files that an evaluation by match leaves: statistics of its games as JSON and as text."""

from pathlib import Path

from tools.games.game import Game
from tools.matches.stats import count_matches, result_rows
from tools.matches.text import matches_text
from utils import iter_records, replacing, write_json

RESULTS = MATCHES, TEXT = "matches.json", "matches.txt"


def write_results(folder: Path, games_path: Path, settings: dict, game: Game) -> str:
    """Write the statistics of all games into the folder; return the text."""
    counts = count_matches((episode for _, episode in iter_records(games_path)), game)
    results = {"settings": settings, "results": list(result_rows(counts)), "games_path": games_path.name}
    text = matches_text(results, game)
    with replacing(folder / TEXT) as file:
        file.write(text)
    write_json(folder / MATCHES, results)
    return text
