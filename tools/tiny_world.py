"""The embedded world: a language model of about a million parameters that plays Adversarial Taboo about 162 words.

    python -m tools.tiny_world build --output_dir outputs/quickstart      the data and the base model
    python -m tools.tiny_world show --output_dir outputs/quickstart       what a loop came to
    python -m tools.tiny_world reason --output_dir outputs/quickstart     its models on questions outside the game
    python -m tools.tiny_world reproduce --seeds 3                        the tables of tools/tiny/README.md
    python -m tools.tiny_world compare_losses --seeds 3                   the same of a larger world
    python -m tools.tiny_world questions --output_dir data/tiny/reasoning its questions outside the game

It stands in for Llama-2 (a small Llama, pre-trained here on facts about the words), for GPT-4's games (scripted
players) and for Alpaca (the facts), so that the whole method can be seen at work where there is no GPU and no model
hub. What it learns says something about the method and its code, little about large models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.flags import flag, parse_command
from tools.games.taboo import ATTACKER, ATTACKER_WINS, DEFENDER, DEFENDER_WINS, TIED
from tools.matches.stats import ALL, BOTH
from tools.matches.text import with_interval
from tools.selfplay.files import Episode
from tools.selfplay.progress import describe
from tools.tiny.build import Build
from tools.tiny.questions import IMITATION, KINDS, REASONING, RESULTS, Questions, Reason
from tools.tiny.reproduce import CompareLosses, Reproduce
from tools.tiny.table import Reasoning
from utils import iter_records, read_json, run_program


@dataclass(kw_only=True)
class Show:
    """Print each epoch's points against imitation, a game for each outcome, and where the report is."""

    output_dir: str = flag("OUTPUT of tools/run_spag.sh")

    def run(self) -> None:
        """Print it."""
        found = Path(self.output_dir).glob("epoch*/eval/matches.json")
        matches = sorted(found, key=lambda path: int(path.parts[-3].removeprefix("epoch")))
        if not matches:
            raise ValueError(f"{self.output_dir}: no epochK/eval/matches.json; the loop has not come to a match yet")
        head = ["player", "games", "both roles", "as attacker", "as defender", "held-out words"]
        print("\nMatch points against the imitation model, (wins + ties/2) / games, with 95% intervals:\n")
        for cells in (head, *map(points_cells, matches)):
            print("  ".join(cell.ljust(width) for cell, width in zip(cells, (8, 6, 20, 20, 20, 20), strict=True)))
        self.show_reasoning([path.parts[-3] for path in matches])
        print("\nGames of the last model, one for each outcome:\n")
        games: dict[str, Episode] = {}
        for _, episode in iter_records(matches[-1].with_name("games_results.json")):
            games.setdefault(episode["outcome"], episode)
        for episode in (games[outcome] for outcome in (ATTACKER_WINS, DEFENDER_WINS, TIED) if outcome in games):
            print(f"{episode['attacker']} attacks, {episode['defender']} defends\n{describe(episode)}\n")
        print(f"Report, to open in a browser: {Path(self.output_dir) / 'report.html'}")

    def show_reasoning(self, epochs: Sequence[str]) -> None:
        """Print the share of questions outside the game that each model answers right, if they were asked."""
        folder = Path(self.output_dir) / REASONING
        if not (folder / RESULTS).is_file():
            return
        models = [(name, name, [IMITATION]) for name in epochs if (folder / name).is_dir()]
        print("\nQuestions outside the game, share of right answers, with 95% intervals over words for all kinds:\n")
        for name, *shares, whole, _, _, minus in Reasoning([folder]).lines([IMITATION], models):
            cells = [name, *(share.partition(" ")[0] for share in shares), whole, minus]
            widths = (16, *[12] * len(KINDS), 21, 0)
            print("".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def points_cells(path: Path) -> list[str]:
    """One epoch's points, of both roles, each role, and on the held-out words; ValueError for other results."""
    player = path.parts[-3]
    try:
        rows = read_json(path)["results"]
        chosen = {(row["words"], row["role"]): row for row in rows if row["player"] == player and row["seed"] is None}
        shown = [chosen[key] for key in ((ALL, BOTH), (ALL, ATTACKER), (ALL, DEFENDER), ("held_out", BOTH))]
        points = [with_interval(row["points"], row["points_interval"]) for row in shown]
        return [player, str(shown[0]["games"]), *points]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the results of a match of the embedded world ({error!r})") from None


COMMANDS = {
    "build": Build,
    "show": Show,
    "reason": Reason,
    "reproduce": Reproduce,
    "compare_losses": CompareLosses,
    "questions": Questions,
}


def main() -> None:
    parse_command(COMMANDS, description=__doc__).run()


if __name__ == "__main__":
    run_program(main)
