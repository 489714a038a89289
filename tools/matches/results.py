"""The files that an evaluation by match leaves: statistics of its games as JSON, text and a plot."""

import logging
from pathlib import Path

from tools.games.game import Game
from tools.matches.plot import write_plot
from tools.matches.stats import count_matches, result_rows
from tools.matches.text import matches_text
from utils import iter_records, replacing, write_json

RESULTS = MATCHES, TEXT, PLOT = "matches.json", "matches.txt", "matches.svg"
logger = logging.getLogger(__name__)


def write_results(folder: Path, games_path: Path, settings: dict, game: Game) -> str:
    """Write the statistics of all games into the folder; returns the text. The plot, which may fail, comes last."""
    counts = count_matches((episode for _, episode in iter_records(games_path)), game)
    results = {"settings": settings, "results": list(result_rows(counts)), "games_path": games_path.name}
    text = matches_text(results, game)
    with replacing(folder / TEXT) as file:
        file.write(text)
    write_json(folder / MATCHES, results)
    try:
        write_plot(folder / PLOT, results, game)
    except ImportError:
        logger.warning("%s is not drawn: that needs pip install matplotlib", folder / PLOT)
    except Exception as error:  # whatever a drawing library makes of odd names
        logger.warning("%s is not drawn: %r", folder / PLOT, error)
    return text
