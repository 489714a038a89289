"""What hints tell a model: how likely it is to guess the secret before and after each hint of stored games.

    python -m tools.evaluate_belief --models base=MODEL epoch3=MODEL --games data/imitation_games.jsonl \\
        --split held_out --output_dir outputs/belief

Writes DIR/belief.json (every number, an entry a message) and DIR/belief.txt (a table). tools/measure/belief.py
defines share, rank and belief. Shares among different numbers of candidates do not compare.
"""

import gc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from tools.engine.flags import EngineFlags, ModelFlags
from tools.flags import NAMED_MODELS, GameFlags, NamedPath, flag, parse_flags
from tools.games.game import Game
from tools.games.prompts import Templates
from tools.measure.estimates import estimate, markdown, mean_difference, with_interval
from tools.selfplay.rewards import check_episodes
from utils import (
    UserError,
    files_setting,
    model_folder,
    model_setting,
    read_json_or_jsonl,
    read_words,
    run_program,
    stage,
    write_json,
    write_text,
)

NUMBERS, TABLE = "belief.json", "belief.txt"
MEASURES = ("share", "rank_1", "tempered", "belief", "share_difference", "tempered_difference")


@dataclass(kw_only=True)
class Flags(GameFlags, ModelFlags):
    models: list[NamedPath] = flag("models to compare, the first with the others", **NAMED_MODELS)
    games: str = flag("file of episodes")
    split: str | None = flag("take only games whose 'split' is this; unset: all", default=None)
    output_dir: str = flag("folder of the results")
    candidates: str | None = flag("file of candidates, one a line; unset: the secrets of all games", default=None)
    most_candidates: int = flag("draw so many candidates of a longer list", default=200)
    seed: int = flag("seed of the draw", default=0)
    chat_template: bool = flag("True: prompts in the chat templates of the tokenizers", default=False)
    max_length: int = flag("tokens of a prompt; longer ones lose their beginning", default=2048)

    def settings(self, game: Game) -> dict:
        names = ("split", "most_candidates", "seed", "chat_template", "max_length", "dtype")
        return {
            "games": files_setting(self.games),
            "models": [name for name, _ in self.models],
            **{f"model {name}": model_setting(path) for name, path in self.models},
            "candidates": self.candidates and files_setting(self.candidates),
            **{name: getattr(self, name) for name in names},
            **self.game_settings(game),
        }


def read_games(flags: Flags, game: Game) -> tuple[list[dict], list[str]]:
    """The games of the split, and the candidates."""
    from tools.measure.belief import draw_candidates, fewest_candidates  # brings torch

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
    if fewest_candidates(game, [episode["target_word"] for episode in episodes], candidates) < 2:
        raise UserError(f"{flags.candidates or flags.games}: one word alone; a share needs other candidates")
    return episodes, candidates


def measure(flags: Flags, path: str, game: Game, templates: Templates, episodes: list[dict], candidates: list[str]):
    """The entries of a model: one before the first hint and after each hint of all games, from `measure_game`."""
    from tools.engine.local import load_local_model  # these bring torch
    from tools.measure.belief import fewest_candidates, measure_game

    gc.collect()  # frees the model before
    engine_flags = EngineFlags(
        chat_template=flags.chat_template,
        dtype=flags.dtype,
        trust_remote_code=flags.trust_remote_code,
        max_length=flags.max_length + 1,  # the whole max_length is the prompt's
        max_new_tokens=1,
    )
    local = load_local_model(model_folder(path), engine_flags)
    # The same for all messages: shares among different numbers of candidates do not compare.
    among = fewest_candidates(game, [episode["target_word"] for episode in episodes], candidates)
    messages = []
    for number, episode in enumerate(tqdm(episodes, desc=path, unit="game", mininterval=5)):
        numbers = measure_game(local, game, episode, candidates=candidates, templates=templates, number=among)
        messages += [{"game": number} | message for message in numbers]
    return messages


def add_tempered(messages: Sequence[dict]) -> None:
    """Give each message its share after all log-probabilities of the model are divided by one number.

    The number is fitted on half of the words and used on the other half. So a model gains nothing by being sharper, or
    less sharp, than what it knows warrants.
    """
    from tools.measure.belief import share

    words = sorted({message["target_word"] for message in messages})
    for fitted, used in itertools.permutations([words[::2], words[1::2]]):
        last = [message for message in messages if message["last_hint"] and message["target_word"] in fitted]
        divisor = best_divisor([list(message["logprobs"].values()) for message in last])
        for message in messages:
            if message["target_word"] in used:
                message["tempered"] = share(list(message["logprobs"].values()), divisor)


def best_divisor(logprobs: Sequence[Sequence[float]]) -> float:
    """The divisor with which the mean share of the right guesses, the first of each row, is highest."""
    from scipy.optimize import minimize_scalar  # takes a second

    from tools.measure.belief import share

    if not logprobs:
        return 1.0

    def loss(log_divisor: float) -> float:
        return -sum(share(each, math.exp(log_divisor)) for each in logprobs)

    return math.exp(minimize_scalar(loss, bounds=(-4, 4), method="bounded").x)


def add_differences(measured: Mapping[str, list[dict]]) -> None:
    """Give each message of later models the difference of its shares from the first model's."""
    first, *others = measured.values()
    for messages in others:
        for message, message_of_first in zip(messages, first, strict=True):
            for name in ("share", "tempered"):
                message[f"{name}_difference"] = message[name] - message_of_first[name]


def table_rows(measured: Mapping[str, list[dict]]) -> Iterator[dict]:
    """Means for each model and number of hints, each with its 95% interval."""
    for model, messages in measured.items():
        frame = pd.DataFrame(messages)
        frame["rank_1"] = frame["rank"] == 1
        last = frame[frame.last_hint].assign(hints="last")  # in the place of a number
        for hints, group in (*frame.groupby("hints"), *last.groupby("hints")):
            row = {"model": model, "hints": hints, "games": len(group), "candidates": len(group.logprobs.iloc[0])}
            for name in MEASURES:
                if name in group:
                    row[name], row[f"{name} interval"] = mean_by_word(group, name)
            yield row


def mean_by_word(messages: pd.DataFrame, name: str) -> tuple[float, list[float] | None]:
    """The mean of a number, and its interval, for which all messages about a word count as one cluster."""
    by_word = messages.groupby("target_word")[name]
    sizes, totals = by_word.agg(["size", lambda values: sum(values)]).to_numpy().T  # pandas' "sum" leaves NaN out
    if name == "rank_1":
        return estimate(sizes, totals)
    return mean_difference(sizes, totals) if len(sizes) > 1 else (totals[0] / sizes[0], None)


def table_text(rows: Sequence[Mapping]) -> str:
    head = ("model", "hints", "games", "candidates")
    lines = [(*head, *(name.replace("_", " ") for name in MEASURES))]
    for row in rows:
        intervals = [row.get(f"{name} interval") for name in MEASURES]
        lines.append((*map(row.get, head), *map(with_interval, map(row.get, MEASURES), intervals)))
    return f"{markdown(lines)}\n"


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    game, folder = flags.load_game(), Path(flags.output_dir)
    if game.answer(game.example_task) is None:
        raise UserError(f"--game {flags.game}: {game.title} has no message that names a secret")
    templates, (episodes, candidates) = flags.load_templates(game), read_games(flags, game)
    settings = flags.settings(game)
    with stage(folder / "belief_settings.json", settings, results=[NUMBERS, TABLE], ranks=False) as work:
        if work.todo:
            measured = {}
            for name, path in flags.models:
                measured[name] = measure(flags, path, game, templates, episodes, candidates)
                add_tempered(measured[name])
            add_differences(measured)
            rows = list(table_rows(measured))
            write_json(folder / NUMBERS, {"table": rows, "messages": measured})
            write_text(folder / TABLE, table_text(rows))
    print((folder / TABLE).read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    run_program(main)
