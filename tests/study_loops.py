"""What tests of studies share: folders as finished loops leave them, written by the programs' own writers."""

from pathlib import Path

from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, Taboo
from tools.matches.text import write_results
from tools.reasoning.harness import BENCHMARKS
from tools.reasoning.table import Score, result_rows
from tools.selfplay.episodes import summary
from utils import write_json, write_records

TABOO = Taboo()
TWO = [each for each in BENCHMARKS if each.name in ("ARC-e", "PIQA")]
MATCH = {"against": "imitation", "task_type": "sampling", "seeds": [0], "games_per_word": 1, "max_turns": 5}


def make_loop(folder: Path, seed: int, wins: tuple[int, ...] = (50, 55, 60), **settings) -> Path:
    """A loop of two epochs. `wins` are the games of 100 that imitation and the models of epochs win as attackers."""
    known = {"MODEL": "tiny", "SEED": str(seed), "LIKE": "", "KL": "0.2", "PRECISION": "fp32", "OUTPUT": str(folder)}
    write_json(folder / "settings.json", {"settings": known | settings, "made_by": {"torch": "2.9", "spag": "abc123"}})
    for epoch, won in enumerate(wins[1:], start=1):
        name = f"epoch{epoch}"
        write_json(folder / name / "model/trainer_state.json", {"global_step": 16})
        write_json(folder / name / "model/settings.json", {"rows": 1000})
        played = [game_of(number, wins=wins[epoch - 1]) for number in range(100)]
        write_json(folder / name / "episodes/x_sampling_words_summary.json", summary(TABOO, played))
        sides = [{"attacker": name, "defender": "imitation"}, {"attacker": "imitation", "defender": name}]
        games = [game_of(number, wins=won, **side) for side in sides for number in range(100)]
        write_records(folder / name / "eval/games_results.json", games)
        settings = MATCH | {"players": [name, "imitation"]}
        write_results(folder / name / "eval", folder / name / "eval/games_results.json", settings, TABOO)
    return folder


def game_of(number: int, *, wins: int, **players) -> dict:
    """A game that the attacker wins if its number is below `wins`, and loses by breaking the rules otherwise."""
    outcome = ATTACKER_WINS if number < wins else ATTACKER_BREAKS
    word = f"word{number // 4}"
    history = [{"role": role, "content": word} for role in TABOO.roles]
    game = {"target_word": word, "history": history, "length": 2, "outcome": outcome, "words": "w", "seed": 0}
    return game | {"max_turns": 5} | players


def add_benchmarks(folder: Path, right: dict[str, int], limit: int | None = None) -> None:
    """Results of two benchmarks of 100 questions, of which each model, by name, answers so many right."""
    scores = {model: {each.name: Score(float(number), 5.0, {}) for each in TWO} for model, number in right.items()}
    settings = {"harness": "0.4.13", "dtype": "bfloat16", "limit": limit, "models": right}
    settings |= {"benchmarks": [each._asdict() for each in TWO]}
    rows = result_rows(scores, next(iter(right)), [each.name for each in TWO])
    write_json(folder / "reasoning/results.json", {"settings": settings, "results": rows})


def add_belief(folder: Path, knowledge: dict[str, float]) -> None:
    """Results of tools/evaluate_belief.py: the knowledge of each model after one hint, which is the last one."""
    for model, value in knowledge.items():
        rows = [{"model": model, "outcome": "all", "hints": hints} for hints in (0, 1, "last")]
        rows = [row | {"belief": -9.0, "knowledge": value if row["hints"] else 0.0} for row in rows]
        rows += [row | {"outcome": ATTACKER_WINS, "knowledge": 99.0} for row in rows]
        write_json(folder / model / "belief/belief.json", {"table": rows})
