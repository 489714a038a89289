"""The embedded world: a language model of about a million parameters that plays Adversarial Taboo about 162 words.

    python -m tools.tiny_world build --output_dir outputs/quickstart      the data and the base model
    python -m tools.tiny_world show --output_dir outputs/quickstart       the results of a loop, and some games
    python -m tools.tiny_world reason --output_dir outputs/quickstart     its models on questions outside the game
    python -m tools.tiny_world tictactoe --output_dir outputs/tictactoe   the data of a game with a known answer

A small Llama, pre-trained here on facts about the words, stands in for Llama-2, scripted players for GPT-4, and the
facts for Alpaca, so that the whole method runs where there is no GPU and no model hub. The results say something about
the method and its code, little about large models.
"""

from dataclasses import dataclass
from pathlib import Path

from tools.flags import flag, parse_command
from tools.games.taboo import ATTACKER, ATTACKER_WINS, DEFENDER, DEFENDER_WINS, TIED
from tools.matches.stats import ALL, BOTH, pooled_rows
from tools.matches.text import with_interval
from tools.selfplay.files import Episode
from tools.selfplay.play import describe
from tools.tiny.build import Build
from tools.tiny.questions import IMITATION, Reason
from tools.tiny.tictactoe import TicTacToe
from utils import UserError, iter_records, read_json, run_program, set_up_logging


@dataclass(kw_only=True)
class Show:
    """Print each epoch's points against the imitation model, and a game for each outcome."""

    output_dir: str = flag("OUTPUT of tools/run_spag.sh")

    def run(self) -> None:
        found = Path(self.output_dir).glob("epoch*/eval/matches.json")
        matches = sorted(found, key=lambda path: int(path.parts[-3].removeprefix("epoch")))
        if not matches:
            raise UserError(f"{self.output_dir}: no epochK/eval/matches.json; the loop has not come to a match yet")
        head = ["player", "games", "win", "tie", "loss", "points", "as attacker", "as defender", "held-out words"]
        print("\nMatches against the imitation model; points are (wins + ties/2) / games, with 95% intervals:\n")
        for cells in (head, *map(points_cells, matches)):
            widths = (8, 5, 5, 5, 5, 20, 20, 20, 20)
            print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
        print("\nGames of the last model, one for each outcome:\n")
        games: dict[str, Episode] = {}
        for _, episode in iter_records(matches[-1].with_name("games_results.json")):
            games.setdefault(episode["outcome"], episode)
        for episode in (games[outcome] for outcome in (ATTACKER_WINS, DEFENDER_WINS, TIED) if outcome in games):
            print(f"{episode['attacker']} attacks, {episode['defender']} defends\n{describe(episode)}\n")
        print(f"Report, to open in a browser: {Path(self.output_dir) / 'report.html'}")


def points_cells(path: Path) -> list[str]:
    """One epoch's games as they ended in both roles, and points of both roles, each role, and on the held-out words.

    Raises UserError for other results.
    """
    player = path.parts[-3]
    try:
        rows = pooled_rows(read_json(path)["results"], player, IMITATION)
        shown = [rows[ALL][BOTH], rows[ALL][ATTACKER], rows[ALL][DEFENDER], rows["held_out"][BOTH]]
        points = [with_interval(row["points"], row["points_interval"]) for row in shown]
        ends = [f"{shown[0]['rates'][end]['share']:.3f}" for end in ("win", "tie", "loss")]
        return [player, str(shown[0]["games"]), *ends, *points]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not the results of a match of the embedded world ({error!r})") from None


COMMANDS = {
    "build": Build,
    "show": Show,
    "reason": Reason,
    "tictactoe": TicTacToe,
}


def main() -> None:
    set_up_logging()
    parse_command(COMMANDS, description=__doc__).run()


if __name__ == "__main__":
    run_program(main)
