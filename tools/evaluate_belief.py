"""Measure what hints tell a model: how likely it is to guess the secret after each hint of stored games.

    python -m tools.evaluate_belief --models base=MODEL epoch3=MODEL --games data/imitation_games.jsonl \\
        --split held_out --output_dir outputs/belief

Writes DIR/belief_messages.jsonl (a line per model and message), DIR/belief.json (means by number of hints) and
DIR/belief.txt (the means as a table). Values of log_share are comparable only among equal numbers of candidates.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from tools.common.errors import UserError
from tools.common.files import finite_json, read_json_or_jsonl, read_words, write_json, write_records, write_text
from tools.common.flags import NAMED_MODELS, NamedPath, defaults, flag, parse_flags
from tools.common.models import model_folder, model_setting
from tools.common.programs import run_program
from tools.common.records import files_setting, stage
from tools.engine.flags import EngineFlags, ModelFlags
from tools.games.flags import GameFlags
from tools.games.game import Game
from tools.games.prompts import Templates
from tools.measure.estimates import markdown
from tools.selfplay.rewards import check_episodes

MESSAGES = "belief_messages.jsonl"
MEANS = "belief.json"
TABLE = "belief.txt"
LAST = "last"  # instead of a number of hints: after the last hint of each game


@dataclass(kw_only=True)
class Flags(GameFlags, ModelFlags):
    models: list[NamedPath] = flag("models to compare", **NAMED_MODELS)
    games: str = flag("file of episodes")
    split: str | None = flag("use only games with this 'split'; unset: all", default=None)
    output_dir: str = flag("folder for the results", compared=False)
    candidates: str | None = flag("file of candidates, one per line; unset: the secrets of all games", default=None)
    most_candidates: int = flag("draw this many candidates from a longer list", default=200, at_least=2)
    seed: int = flag("seed of the draw", default=0)
    chat_template: bool = flag("write prompts in the tokenizers' chat templates", default=False, shared=True)
    max_length: int = flag("maximum tokens of a prompt; longer ones lose their beginning", default=2048, at_least=1)

    def settings(self, game: Game) -> dict:
        return {
            **super().settings(game),
            "games": files_setting(self.games),
            "models": [name for name, _ in self.models],
            **{f"model {name}": model_setting(path) for name, path in self.models},
            "candidates": self.candidates and files_setting(self.candidates),
        }


def read_games(flags: Flags, game: Game) -> tuple[list[dict], list[str], int]:
    """The games of the split, the candidates, and how many of them every game has.

    Without --candidates they are drawn from the secrets of all games, so that all splits have the same candidates.
    """
    from tools.measure.belief import draw_candidates, fewest_candidates  # imports torch

    episodes = read_json_or_jsonl(flags.games)
    check_episodes(game, episodes, f"{flags.games}: episode", 1)
    if flags.candidates:
        words = read_words(flags.candidates, game.check_task)
    else:
        words = [episode["target_word"] for episode in episodes]
    episodes = [episode for episode in episodes if flags.split in (None, episode.get("split"))]
    if not episodes:
        raise UserError(f"{flags.games}: no games of --split {flags.split}")
    candidates = draw_candidates(game, words, flags.most_candidates, flags.seed)
    among = fewest_candidates(game, [episode["target_word"] for episode in episodes], candidates)
    if among < 2:
        raise UserError(f"{flags.candidates or flags.games}: only one word; log_share needs other candidates")
    return episodes, candidates, among


def measure(flags: Flags, path: str, game: Game, templates: Templates, games: tuple[list[dict], list[str], int]):
    """A model's entries of `measure_game` for all games.

    The model runs in transformers, because play's engines do not return probabilities of given sentences.
    """
    from tools.engine.local import load_local_model  # both import torch
    from tools.measure.belief import measure_game

    gc.collect()  # frees the previous model
    engine_flags = EngineFlags(
        chat_template=flags.chat_template,
        dtype=flags.dtype,
        trust_remote_code=flags.trust_remote_code,
        max_length=flags.max_length + 1,  # because max_new_tokens is subtracted for the prompt
        max_new_tokens=1,
    )
    local = load_local_model(model_folder(path), engine_flags)
    episodes, candidates, among = games
    messages = []
    for number, episode in enumerate(tqdm(episodes, desc=path, unit="game", mininterval=5)):
        numbers = measure_game(local, game, episode, candidates=candidates, templates=templates, number=among)
        messages += [{"game": number} | message for message in numbers]
    return messages


def mean_rows(model: str, messages: Sequence[Mapping]) -> list[dict]:
    """Means over a model's messages by number of hints, and over those after the last hint of each game."""
    groups: dict[int | str, list[Mapping]] = {}
    for message in sorted(messages, key=lambda message: message["hints"]):
        groups.setdefault(message["hints"], []).append(message)
    if last := [message for message in messages if message["last_hint"]]:
        groups[LAST] = last
    rows = []
    for hints, group in groups.items():
        right_is_likeliest = [message for message in group if message["rank"] == 1]
        row = {
            "model": model,
            "hints": hints,
            "games": len(group),
            "candidates": len(group[0]["logprobs"]),
            "log_share": fmean(message["log_share"] for message in group),
            "rank_1": len(right_is_likeliest) / len(group),
            "belief": fmean(message["belief"] for message in group),
        }
        rows.append(row)
    return rows


def table_text(rows: Sequence[Mapping]) -> str:
    """The means as a table; the last line has those after the last hint."""
    head, *_ = rows
    lines = [list(head)]
    for row in rows:
        lines.append([f"{value:.3f}" if isinstance(value, float) else value for value in row.values()])
    last = [
        f"{row['model']} after the last hint: log_share {row['log_share']:.3f}, rank_1 {row['rank_1']:.1%}, belief "
        f"{row['belief']:.3f} ({row['games']:,} games, {row['candidates']} candidates)"
        for row in rows
        if row["hints"] == LAST
    ]
    return f"{markdown(lines)}\n\n{'; '.join(last) or 'no game has a hint'}\n"


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    game, folder = flags.load_game(), Path(flags.output_dir)
    templates, games = flags.load_templates(game), read_games(flags, game)
    settings = flags.settings(game)
    record, results = folder / "belief_settings.json", [MESSAGES, MEANS, TABLE]
    with stage(record, settings, results=results, defaults=defaults(Flags), ranks=False) as work:
        if work.todo:
            lines = []
            rows = []
            for name, path in flags.models:
                messages = measure(flags, path, game, templates, games)
                lines += [finite_json({"model": name, **message}) for message in messages]
                rows += mean_rows(name, messages)
            write_json(folder / MEANS, {"table": rows})
            write_text(folder / TABLE, table_text(rows))
            write_records(folder / MESSAGES, lines)
    print((folder / TABLE).read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    run_program(main)
