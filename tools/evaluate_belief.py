"""What hints tell a model: its belief in the secret before and after each hint of stored games.

    python -m tools.evaluate_belief --models base=MODEL epoch3=MODEL --games data/imitation_games.jsonl \\
        --split held_out --output_dir outputs/belief

Writes DIR/belief.json (every number) and DIR/belief.txt (the table). tools/selfplay/belief.py defines belief and
knowledge, in nats. A hint is a message of the role that hides the secret, up to the decisive message and without one
that breaks the rules. Other secrets are drawn from the games of the split.
"""

import gc
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from tools.flags import GameFlags, NamedPath, flag, named_path, parse_flags
from tools.games.game import Game
from tools.games.prompts import Templates
from tools.matches.stats import mean_difference
from tools.players.player import Sampling
from tools.selfplay.rewards import check_episodes
from utils import (
    UserError,
    files_setting,
    model_folder,
    model_setting,
    read_json_or_jsonl,
    replacing,
    run_program,
    set_up_logging,
    stage,
    write_json,
)

NUMBERS, TABLE = "belief.json", "belief.txt"
ALL, LAST = "all", "last"  # rows of the table: games of any outcome; after the last hint of each game
# Columns of the table by their title: a number of each message, and whether its interval is shown.
COLUMNS = {
    "belief": ("belief", False),
    "change": ("belief_change", False),
    "zero line": ("zero_line", False),
    "knowledge": ("knowledge", True),
    "change of knowledge": ("knowledge_change", False),
    "difference from the first": ("difference", True),
}
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Flags(GameFlags):
    """The flags of this program."""

    models: list[NamedPath] = flag(
        "models to compare, the first with the others", type=named_path, metavar="NAME=MODEL"
    )
    games: str = flag("file of episodes")
    split: str | None = flag("take only games whose 'split' is this; unset: all", default=None)
    output_dir: str = flag("folder of the results")
    seed: int = flag("seed of the other secrets", default=0)
    chat_template: bool = flag("True: prompts in the chat templates of the tokenizers", default=False)
    max_length: int = flag("tokens of a prompt; longer ones lose their beginning", default=2048)
    bf16: bool = flag("True: bfloat16 instead of the type in the model's config", default=False)
    trust_remote_code: bool = flag("True: run Python code that comes with a model", default=False)

    def settings(self, game: Game, templates: Templates) -> dict:
        names = ("split", "seed", "chat_template", "max_length", "bf16")
        models = {f"model {name}": model_setting(path) for name, path in self.models}
        settings = {"games": files_setting(self.games), "models": [name for name, _ in self.models]} | models
        return settings | {name: getattr(self, name) for name in names} | self.game_settings(game, templates)


def read_games(flags: Flags, game: Game) -> list[dict]:
    """The games of the split."""
    episodes = read_json_or_jsonl(flags.games)
    check_episodes(game, episodes, f"{flags.games}: episode", 1)
    episodes = [episode for episode in episodes if flags.split in (None, episode.get("split"))]
    if len({episode["target_word"] for episode in episodes}) < 2:
        raise UserError(f"{flags.games}: no games with two or more secrets (--split {flags.split})")
    return episodes


def measure(flags: Flags, path: str, game: Game, templates: Templates, episodes: list[dict]) -> list[dict]:
    """The numbers of a model before and after each hint of all games, as `measure_game` gives them."""
    from tools.engine.local import load_local_model  # these bring torch
    from tools.selfplay.belief import measure_game

    dtype, sampling = "bfloat16" if flags.bf16 else None, Sampling(max_length=flags.max_length, max_new_tokens=0)
    local = load_local_model(model_folder(path), sampling, dtype=dtype, trust_remote_code=flags.trust_remote_code)
    if flags.chat_template:
        local.use_chat_template(path)
    secrets = list({episode["target_word"].strip().lower(): episode["target_word"] for episode in episodes}.values())
    messages = []
    for number, episode in enumerate(tqdm(episodes, desc=path, unit="game", disable=None)):
        numbers = measure_game(local, game, episode, secrets=secrets, seed=flags.seed, templates=templates)
        messages += [{"game": number} | message for message in numbers]
    if cut := sum(message["prompt_cut"] for message in messages):
        logger.warning("%s: %d prompts lost their beginning; use a larger --max_length", path, cut)
    return messages


def add_differences(measured: Mapping[str, list[dict]]) -> None:
    """Give each message of later models the difference of its knowledge from the first model's."""
    first, *others = measured.values()
    for messages in others:
        for message, message_of_first in zip(messages, first, strict=True):
            message["difference"] = message["knowledge"] - message_of_first["knowledge"]


def table_rows(messages: Sequence[Mapping], game: Game) -> list[dict]:
    """Means of a model's numbers for each outcome and number of hints, each with its 95% interval."""
    groups = defaultdict(list)
    for message in messages:
        for outcome in (ALL, message["outcome"]):
            groups[outcome, message["hints"]].append(message)
            if message["last_hint"]:
                groups[outcome, LAST].append(message)
    outcomes = [ALL, *(outcome.name for outcome in game.outcomes)]
    rows = []
    for outcome, hints in sorted(groups, key=lambda key: (outcomes.index(key[0]), key[1] == LAST, key[1])):
        group = groups[outcome, hints]
        row = {"outcome": outcome, "hints": hints, "games": len(group)}
        for name, _ in COLUMNS.values():
            if name in group[0]:
                row[name], row[f"{name} interval"] = mean_by_word(group, name)
        rows.append(row)
    return rows


def mean_by_word(messages: Sequence[Mapping], name: str) -> tuple[float, list[float] | None]:
    """The mean of a number of any sign, and its interval, for which all messages about a word count as one cluster."""
    by_word = defaultdict(list)
    for message in messages:
        by_word[message["target_word"]].append(message[name])
    sizes, totals = list(map(len, by_word.values())), list(map(sum, by_word.values()))
    return mean_difference(sizes, totals) if len(sizes) > 1 else (totals[0] / sizes[0], None)


def table_text(rows: Sequence[Mapping]) -> str:
    """The table as people read it, in nats."""

    def cell(row: Mapping, name: str, with_interval: bool) -> str:
        if name not in row:
            return "-"
        interval = row[f"{name} interval"] if with_interval else None
        return f"{row[name]:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")

    head = ("model", "outcome", "hints", "games")
    lines = [(*head, *COLUMNS)]
    lines += [
        (*(str(row[name]) for name in head), *(cell(row, *column) for column in COLUMNS.values())) for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
    return "".join(f"{line.rstrip()}\n" for line in padded)


def main() -> None:
    flags = parse_flags(Flags, description="What hints tell a model: its belief in the secret, from stored games.")
    set_up_logging(ranks=False)
    game, folder = flags.load_game(), Path(flags.output_dir)
    if game.answer(game.example_task) is None:
        raise UserError(f"--game {flags.game}: {game.title} has no message that names a secret")
    templates, episodes = flags.load_templates(game), read_games(flags, game)
    settings = flags.settings(game, templates)
    with stage(folder / "belief_settings.json", settings, results=[NUMBERS, TABLE], ranks=False) as work:
        if work.todo:
            measured: dict[str, list[dict]] = {}
            for name, path in flags.models:
                measured[name] = measure(flags, path, game, templates, episodes)
                gc.collect()  # frees the model
            add_differences(measured)
            rows = [{"model": name} | row for name, messages in measured.items() for row in table_rows(messages, game)]
            write_json(folder / NUMBERS, {"table": rows, "messages": measured})
            with replacing(folder / TABLE) as file:
                file.write(table_text(rows))
    print((folder / TABLE).read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    run_program(main)
