"""What tests of studies share: folders as finished loops leave them, written by the programs' own writers."""

from pathlib import Path

from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, Taboo
from tools.matches.text import write_results as write_matches
from tools.reasoning import jobs
from tools.reasoning.jobs import BENCHMARKS
from tools.reasoning.table import write_results
from tools.selfplay.counts import GameCounts
from utils import write_json, write_records

TABOO = Taboo()
TWO = [each for each in BENCHMARKS if each.name in ("ARC-e", "PIQA")]
MATCH = {"against": "imitation", "task_type": "sampling", "seeds": [0], "games_per_word": 1, "max_turns": 5}


def make_loop(folder: Path, seed: int, wins: tuple[int, ...] = (50, 55, 60), *, imitation: bool = True, **settings):
    """A loop of two epochs. `wins` are the games of 100 that imitation and the models of the epochs win as attackers,
    and their right answers of 100."""
    known = {"MODEL": "tiny", "GAME": "taboo", "EPOCHS": "2", "SEED": str(seed), "CONTROL": "", "KL": "0.2"}
    known |= {"GAME_OPTIONS": "", "PROMPTS": "", "LORA_RANK": "", "IMITATION_DATA": "rows.json", "OUTPUT": str(folder)}
    record = {"settings": known | settings, "finished": True, "made_by": {"torch": "2.9", "spag": "abc123"}}
    write_json(folder / "settings.json", record)
    for epoch, won in enumerate(wins):
        stage = f"epoch{epoch}" if epoch else "imitation"
        if epoch or imitation:
            log = [{"rows": 1000, "step": 0}]
            write_json(folder / stage / "model/trainer_state.json", {"global_step": 16, "log_history": log})
            write_json(folder / stage / "model/train_results.json", {"train_runtime": 1800.0})
        if epoch:
            played = folder / stage / "episodes/x_sampling_words_summary.json"
            write_json(played, summary(wins[epoch - 1]))
            sides = [{"attacker": stage, "defender": "imitation"}, {"attacker": "imitation", "defender": stage}]
            games = [game_of(number, wins=won, **side) for side in sides for number in range(100)]
            write_match(folder / stage / "eval", games, [stage, "imitation"], "imitation")
    return folder


def summary(wins: int) -> dict:
    """The summary of 100 games of self-play."""
    counts = GameCounts(TABOO)
    for number in range(100):
        counts.add(game_of(number, wins=wins, attacker="x", defender="x"))
    return counts.as_dict() | {"new_tokens": 7200, "tokens_per_second": 1.0}


def write_match(folder: Path, games: list[dict], players: list[str], against: str) -> None:
    """The files of a match."""
    write_records(folder / "games_results.json", games)
    write_matches(folder, folder / "games_results.json", MATCH | {"players": players, "against": against}, TABOO)


def game_of(number: int, *, wins: int, **players) -> dict:
    """A game that the attacker wins if its number is below `wins`, and loses by breaking the rules otherwise."""
    outcome = ATTACKER_WINS if number < wins else ATTACKER_BREAKS
    word = f"word{number // 4}"
    history = [{"role": role, "content": word} for role in TABOO.roles]
    game = {"target_word": word, "history": history, "length": 2, "outcome": outcome, "words": "w", "seed": 0}
    return game | {"max_turns": 5} | players


def add_benchmarks(folder: Path, right: dict[str, int], commit: str = "abc123") -> None:
    """Results of two benchmarks of 100 questions, of which each model, by name, answers so many right."""
    found = []
    for name, number in right.items():
        for benchmark in TWO:
            path = jobs.result_path(folder / "reasoning", name, benchmark.task)
            found.append(jobs.Job(name, benchmark, {"model": {"path": name, "sha256": name}}, path))
            metrics = {"acc,none": {"value": number / 100, "stderr": 0.05}}
            scores = {"acc,none": {f"{benchmark.task}/{place}": float(place < number) for place in range(100)}}
            result = {"questions": 100, "shots": 0, "metrics": metrics, "scores": scores, "seconds": 450.0}
            write_json(path, result | {"harness": "0.4.13", "data_revisions": {"someone/data": commit}})
    write_results(folder / "reasoning", found, {}, "bfloat16", None)
