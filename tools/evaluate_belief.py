"""What hints tell a model: its belief in the secret before and after each hint of stored games.

    python -m tools.evaluate_belief --models base=MODEL epoch3=MODEL --games data/imitation_games.jsonl \\
        --split held_out --output_dir outputs/belief

Writes DIR/belief.json (every number) and DIR/belief.txt (a table). tools/selfplay/belief.py defines all measures, in
nats. Other secrets are drawn from the games of the split.
"""

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from tools.flags import GameFlags, NamedPath, flag, named_path, parse_flags
from tools.games.game import Game
from tools.games.prompts import Templates
from tools.matches.stats import mean_difference
from tools.matches.text import with_interval
from tools.players.player import Sampling
from tools.reasoning.table import markdown
from tools.selfplay.rewards import check_episodes
from utils import (
    UserError,
    files_setting,
    model_folder,
    model_setting,
    read_json_or_jsonl,
    run_program,
    stage,
    write_json,
    write_text,
)

NUMBERS, TABLE = "belief.json", "belief.txt"
ALL, LAST = "all", "last"  # games of any outcome; after the last hint of each game
MEASURES = ("belief", "belief_change", "zero_line", "knowledge", "knowledge_change", "difference")
WITH_INTERVAL = ("knowledge", "difference")  # in the table


@dataclass(kw_only=True)
class Flags(GameFlags):
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

    def settings(self, game: Game) -> dict:
        names = ("split", "seed", "chat_template", "max_length", "bf16")
        models = {f"model {name}": model_setting(path) for name, path in self.models}
        settings = {"games": files_setting(self.games), "models": [name for name, _ in self.models]} | models
        return settings | {name: getattr(self, name) for name in names} | self.game_settings(game)


def read_games(flags: Flags, game: Game) -> list[dict]:
    episodes = read_json_or_jsonl(flags.games)
    check_episodes(game, episodes, f"{flags.games}: episode", 1)
    episodes = [episode for episode in episodes if flags.split in (None, episode.get("split"))]
    if not episodes:
        raise UserError(f"{flags.games}: no games of --split {flags.split}")
    return episodes


def measure(flags: Flags, path: str, game: Game, templates: Templates, episodes: list[dict]) -> list[dict]:
    """The numbers of a model before and after each hint of all games, as `measure_game` gives them."""
    from tools.engine.local import load_local_model  # these bring torch
    from tools.selfplay.belief import measure_game

    gc.collect()  # frees the model before
    sampling = Sampling(max_length=flags.max_length, max_new_tokens=0)
    options = {"dtype": "bfloat16" if flags.bf16 else None, "trust_remote_code": flags.trust_remote_code}
    local = load_local_model(model_folder(path), sampling, **options)
    if flags.chat_template:
        local.use_chat_template(path)
    secrets = list({episode["target_word"].strip().lower(): episode["target_word"] for episode in episodes}.values())
    messages = []
    for number, episode in enumerate(tqdm(episodes, desc=path, unit="game", mininterval=5)):
        numbers = measure_game(local, game, episode, secrets=secrets, seed=flags.seed, templates=templates)
        messages += [{"game": number} | message for message in numbers]
    return messages


def add_differences(measured: Mapping[str, list[dict]]) -> None:
    """Give each message of later models the difference of its knowledge from the first model's."""
    first, *others = measured.values()
    for messages in others:
        for message, message_of_first in zip(messages, first, strict=True):
            message["difference"] = message["knowledge"] - message_of_first["knowledge"]


def table_rows(measured: Mapping[str, list[dict]], game: Game) -> Iterator[dict]:
    """Means for each model, outcome and number of hints, each with its 95% interval."""
    outcomes = [ALL, *(outcome.name for outcome in game.outcomes)]
    for model, messages in measured.items():
        groups = defaultdict(list)
        for message in messages:
            for outcome in (ALL, message["outcome"]):
                groups[outcome, message["hints"]].append(message)
                if message["last_hint"]:
                    groups[outcome, LAST].append(message)
        for outcome, hints in sorted(groups, key=lambda key: (outcomes.index(key[0]), key[1] == LAST, key[1])):
            group = groups[outcome, hints]
            row = {"model": model, "outcome": outcome, "hints": hints, "games": len(group)}
            for name in [name for name in MEASURES if name in group[0]]:
                row[name], row[f"{name} interval"] = mean_by_word(group, name)
            yield row


def mean_by_word(messages: Sequence[Mapping], name: str) -> tuple[float, list[float] | None]:
    """The mean of a number of any sign, and its interval, for which all messages about a word count as one cluster."""
    by_word = defaultdict(list)
    for message in messages:
        by_word[message["target_word"]].append(message[name])
    sizes, totals = list(map(len, by_word.values())), list(map(sum, by_word.values()))
    return mean_difference(sizes, totals) if len(sizes) > 1 else (totals[0] / sizes[0], None)


def table_text(rows: Sequence[Mapping]) -> str:
    head = ("model", "outcome", "hints", "games")
    lines = [(*head, *(name.replace("_", " ") for name in MEASURES))]
    for row in rows:
        intervals = [row.get(f"{name} interval") if name in WITH_INTERVAL else None for name in MEASURES]
        cells = map(with_interval, map(row.get, MEASURES), intervals, [".2f"] * len(MEASURES))
        lines.append((*(row[name] for name in head), *cells))
    return f"{markdown(lines)}\n"


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    game, folder = flags.load_game(), Path(flags.output_dir)
    if game.answer(game.example_task) is None:
        raise UserError(f"--game {flags.game}: {game.title} has no message that names a secret")
    templates, episodes = flags.load_templates(game), read_games(flags, game)
    settings = flags.settings(game)
    with stage(folder / "belief_settings.json", settings, results=[NUMBERS, TABLE], ranks=False) as work:
        if work.todo:
            measured = {name: measure(flags, path, game, templates, episodes) for name, path in flags.models}
            add_differences(measured)
            rows = list(table_rows(measured, game))
            write_json(folder / NUMBERS, {"table": rows, "messages": measured})
            write_text(folder / TABLE, table_text(rows))
    print((folder / TABLE).read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    run_program(main)
