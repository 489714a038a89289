"""Turn episodes into training rows: every message of a winner, with its share of the game's reward.

    python -m tools.assign_rewards --input_data_path data/episodes.json --output_data_path data/train_self_play.json \\
        --sft_data_path data/alpaca_train.json --decay_weight 0.8

Formats of all files: data/README.md. Episodes are read twice, since the weights need the counts, and neither they nor
the rows are kept in memory. The settings and counts of a run stand beside its output, in OUTPUT_rewards_settings.json.
"""

import argparse
import json
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tools.games import taboo
from utils import (
    BadRecordError,
    alpaca_to_row,
    iter_records,
    log_skipped,
    open_text,
    parse_bool,
    run_program,
    set_up_logging,
    write_json,
    write_records,
)

if TYPE_CHECKING:
    from tools.games.chat import ChatTemplate

PromptFn = Callable[[taboo.History, str, float], str]  # history before the message, target word, max_turns -> query
WINNER, ALL = "winner", "all"  # whose messages become rows
EPISODE_KEYS = ("history", "target_word", "max_turns")


# --- episodes to rows ----------------------------------------------------------------------------------------------


class Games:
    """The verdicts of many games in five bytes each, in the order of the episodes."""

    def __init__(self, verdicts: Iterable[taboo.Verdict]):
        self._outcomes, self._lengths = bytearray(), array("I")
        for outcome, length in verdicts:
            self._outcomes.append(taboo.OUTCOMES.index(outcome))
            self._lengths.append(length)

    def __len__(self) -> int:
        return len(self._outcomes)

    def __iter__(self) -> Iterator[taboo.Verdict]:
        for outcome, length in zip(self._outcomes, self._lengths, strict=True):
            yield taboo.Verdict(taboo.OUTCOMES[outcome], length)

    def counts(self) -> dict[str, int]:
        """How many games had each outcome."""
        return {outcome: self._outcomes.count(code) for code, outcome in enumerate(taboo.OUTCOMES)}


def assign_rewards(
    episodes: Iterable[dict],
    *,
    decay_weight: float = 0.8,
    rng: random.Random,
    templates: taboo.Templates | None = None,
    match: str = taboo.SUBSTRING,
    prompt_fn: PromptFn | None = None,
) -> list[dict]:
    """The rows of all decided games, in the order of episodes and messages; `iter_rows` on a list."""
    episodes = list(episodes)
    rows = iter_rows(
        lambda: iter(episodes),
        decay_weight=decay_weight,
        rng=rng,
        templates=templates,
        match=match,
        prompt_fn=prompt_fn,
    )
    return list(rows)


def iter_rows(
    open_episodes: Callable[[], Iterator[dict]],
    *,
    decay_weight: float = 0.8,
    rng: random.Random,
    templates: taboo.Templates | None = None,
    match: str = taboo.SUBSTRING,
    prompt_fn: PromptFn | None = None,
) -> Iterator[dict]:
    """Judge every game at once, then yield the rows of the decided ones: query, target, reward, role, weight.

    `open_episodes()` must give a fresh iterator over the same episodes each time: the first pass judges and counts,
    the second one writes. `prompt_fn(history, target_word, max_turns)` makes the queries; without one they are
    training prompts drawn from `rng` in `templates`. The episodes are not modified.
    Raises ValueError for a decay_weight outside (0, 1] and for an episode that is no game, naming its index.
    """
    check_decay(decay_weight)
    games = judge_games(open_episodes(), match=match)
    prompt_fn = prompt_fn or partial(taboo.training_prompt, rng=rng, templates=templates)
    return game_rows(open_episodes(), games, decay_weight=decay_weight, prompt_fn=prompt_fn)


def judge_games(episodes: Iterable[dict], *, match: str = taboo.SUBSTRING) -> Games:
    """The verdicts of all episodes. Raises ValueError naming the index of an episode that is no game."""
    return Games(_judge_episode(index, episode, match) for index, episode in enumerate(episodes))


def game_rows(episodes: Iterable[dict], games: Games, *, decay_weight: float, prompt_fn: PromptFn) -> Iterator[dict]:
    """The rows of decided games: one per message of the winner, up to the decisive message of the game."""
    weights = role_weights(games)
    for episode, (outcome, length) in zip(episodes, games, strict=True):
        if outcome not in taboo.WINNERS:
            continue
        winner = taboo.WINNERS[outcome]
        history = episode["history"]
        won = [index for index in range(length) if history[index]["role"] == winner]
        for index, reward in zip(won, message_rewards(len(won), decay_weight), strict=True):
            yield {
                "query": prompt_fn(history[:index], episode["target_word"], episode["max_turns"]),
                "target": history[index]["content"].strip(),
                "reward": reward,
                "role": winner,
                "weight": weights[winner],
            }


def every_message_rows(episodes: Iterable[dict], games: Games, *, prompt_fn: PromptFn) -> Iterator[dict]:
    """A row of reward and weight 1 per message of either player, up to the end of each game, whatever its outcome.

    For imitation of players whose lost games are worth learning from too; not the paper's, whose rows are `game_rows`.
    """
    for episode, (_, length) in zip(episodes, games, strict=True):
        history = episode["history"]
        for index, message in enumerate(history[:length]):
            yield {
                "query": prompt_fn(history[:index], episode["target_word"], episode["max_turns"]),
                "target": message["content"].strip(),
                "reward": 1.0,
                "role": message["role"],
                "weight": 1.0,
            }


def message_rewards(count: int, decay_weight: float) -> list[float]:
    """Shares of one reward of 1 among a winner's messages k = 1..T: gamma^(T-k) / sum_j gamma^(T-j).

    Both sides of the fraction are divided by gamma^(T-1), which gives the released numbers to the last digit.
    """
    try:
        shares = [(1 / decay_weight) ** k for k in range(count)]
        total = sum(shares)
    except OverflowError:
        total = math.inf
    if not math.isfinite(total):
        raise ValueError(f"decay_weight {decay_weight} is too small for a game with {count} messages of the winner")
    return [share / total for share in shares]


def role_weights(games: Games) -> dict[str, float]:
    """What rows of each role weigh, so that both count the same in sum: N / (2 N_role) over decided games."""
    counts = games.counts()
    won = {winner: counts[outcome] for outcome, winner in taboo.WINNERS.items()}
    decided = sum(won.values())
    return {role: decided / (2 * number) if number else 0.0 for role, number in won.items()}


def check_decay(decay_weight: float) -> None:
    """Raise ValueError unless 0 < decay_weight <= 1."""
    if not 0 < decay_weight <= 1:
        raise ValueError(f"decay_weight is {decay_weight}; it must be above 0 and at most 1")


def _judge_episode(index: int, episode: dict, match: str) -> taboo.Verdict:
    try:
        _check_keys(episode)
        return taboo.judge(*(episode[key] for key in EPISODE_KEYS), match=match)
    except ValueError as error:
        raise ValueError(f"episode {index}: {error}") from None


def _check_keys(episode: dict) -> None:
    for key in EPISODE_KEYS:
        if key not in episode:
            raise ValueError(f"'{key}' is missing; an episode has {', '.join(EPISODE_KEYS)}")


# --- files ---------------------------------------------------------------------------------------------------------


def read_episodes(
    paths: Iterable[str], *, skip_bad: bool = False, on_skip: Callable[[str], None] = log_skipped
) -> Iterator[dict]:
    """Yield the episodes of several files, checked; errors name the file, the line and the index in the file.

    `skip_bad` passes over what is no episode, telling `on_skip`.
    """
    for path in paths:
        for index, (where, episode) in enumerate(iter_records(path, skip_bad=skip_bad, on_skip=on_skip)):
            try:
                _check_keys(episode)
                taboo.check_game(*(episode[key] for key in EPISODE_KEYS))
            except ValueError as error:
                message = f"{where}: episode {index} of the file, counted from 0: {error}"
                if not skip_bad:
                    raise BadRecordError(message) from None
                on_skip(message)
            else:
                yield episode


def read_sft_rows(path: str, from_alpaca: Callable[[dict], dict] = alpaca_to_row) -> Iterator[dict]:
    """Yield the SFT rows of a file with query and target, prompt and answer, or raw Alpaca records."""
    for where, record in iter_records(path):
        try:
            query, target = _sft_texts(record, from_alpaca)
        except ValueError as error:
            raise BadRecordError(f"{where}: {error}") from None
        yield {"query": query, "target": target, "type": "sft", "weight": 1.0}


def _sft_texts(record: dict, from_alpaca: Callable[[dict], dict]) -> tuple[str, str]:
    if "instruction" in record and not record.keys() & {"query", "target", "prompt", "answer"}:
        record = from_alpaca(record)
    query = record.get("query", record.get("prompt"))
    target = record.get("target", record.get("answer"))
    if not isinstance(query, str) or not isinstance(target, str):
        raise ValueError("an SFT record needs texts 'query' and 'target', 'prompt' and 'answer', or those of Alpaca")
    return query, target


# --- the program ---------------------------------------------------------------------------------------------------


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Turn episodes into training rows.", allow_abbrev=False)
    add = parser.add_argument
    add("--input_data_path", required=True, nargs="+", help="files of episodes, JSON or JSONL, read in this order")
    add("--output_data_path", required=True, help="file of rows to write: JSONL if it ends in .jsonl, else JSON")
    add("--sft_data_path", help="file of SFT examples whose rows are appended")
    add("--decay_weight", type=float, default=0.8, help="what a message gets of the next one's reward (default: 0.8)")
    add_row_flags(parser)
    add("--outcomes", help="file to write every episode's outcome and length to, JSON or JSONL")
    return parser.parse_args(arguments)


def add_row_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how messages become rows, which tools/prepare_data.py has too."""
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of the draws of training prompts (default: 0)")
    add("--match", choices=taboo.MATCHES, default=taboo.SUBSTRING, help="find the target word inside others, or not")
    add("--training_prompt", choices=("random", "play"), default="random", help="a random layout, or that of play")
    add("--chat_template", type=parse_bool, default=False, help="True: texts by the chat template of --tokenizer")
    add("--tokenizer", metavar="MODEL", help="folder or hub name of the model to be trained, for --chat_template True")
    add(
        "--prompt_templates",
        default=str(taboo.DEFAULT_TEMPLATES),
        help="file of prompts (default: configs/prompts.json)",
    )
    add("--messages", choices=(WINNER, ALL), default=WINNER, help="rows of the winner's messages, or of all players'")
    add("--drop_empty_targets", type=parse_bool, default=False, help="True: leave out rows without a target text")
    add("--skip_bad", type=parse_bool, default=False, help="True: pass over what is no episode instead of stopping")


def main() -> None:
    args = parse_args()
    set_up_logging()
    print(json.dumps(make_rows(args)))


def make_rows(args: argparse.Namespace) -> dict:
    """Write the rows and the settings beside them; returns the counts of games and rows, and the weights."""
    check_files(args)
    check_decay(args.decay_weight)
    templates = taboo.load_templates(args.prompt_templates)
    chat = open_chat_template(args)
    counts = Counter(dict.fromkeys((*taboo.ROLES, "sft", "empty", "dropped", "skipped"), 0))

    def count_skipped(message: str) -> None:
        log_skipped(message)
        counts["skipped"] += 1

    def open_episodes(on_skip: Callable[[str], None] = lambda message: None) -> Iterator[dict]:
        return read_episodes(args.input_data_path, skip_bad=args.skip_bad, on_skip=on_skip)

    games = judge_games(open_episodes(count_skipped), match=args.match)
    prompt_fn = choose_prompt_fn(args.training_prompt, args.seed, templates, chat or taboo)
    if args.messages == ALL:
        rows = every_message_rows(open_episodes(), games, prompt_fn=prompt_fn)
    else:
        rows = game_rows(open_episodes(), games, decay_weight=args.decay_weight, prompt_fn=prompt_fn)
    from_alpaca = chat.alpaca_to_turn if chat else alpaca_to_row
    sft_rows = read_sft_rows(args.sft_data_path, from_alpaca) if args.sft_data_path else ()
    all_rows = counted(chain(rows, sft_rows), counts, drop_empty=args.drop_empty_targets)
    write_records(args.output_data_path, chat.rows(all_rows) if chat else all_rows)
    if args.outcomes:
        write_records(args.outcomes, outcome_records(open_episodes(), games))
    results = {
        "games": {"episodes": len(games), **games.counts(), "skipped": counts.pop("skipped")},
        "rows": dict(counts),
        "weights": role_weights(games),
    }
    settings = vars(args) | {"templates_sha256": taboo.templates_digest(templates)}
    if chat:
        settings["chat_template_sha256"] = chat.sha256
    write_json(settings_path(args), {"settings": settings, **results})
    return results


def check_files(args: argparse.Namespace) -> None:
    """Raise, before any work is done, for an input that is not there and for files that would overwrite each other."""
    inputs = [*args.input_data_path, *([args.sft_data_path] if args.sft_data_path else []), args.prompt_templates]
    outputs = [args.output_data_path, settings_path(args), *([args.outcomes] if args.outcomes else [])]
    refuse_overwriting(inputs, outputs)


def refuse_overwriting(inputs: Iterable[str | Path], outputs: Iterable[str | Path]) -> None:
    """Raise FileNotFoundError for an input that is not there, ValueError for an output that is another file here."""
    inputs = list(inputs)
    taken = {Path(path).resolve() for path in inputs}
    for path in inputs:
        open_text(path).close()
    for path in outputs:
        if Path(path).resolve() in taken:
            raise ValueError(f"{path}: would be written over another file of this run; choose another name")
        taken.add(Path(path).resolve())


def settings_path(args: argparse.Namespace) -> Path:
    """Where the settings and counts of the run are written."""
    output = Path(args.output_data_path)
    return output.with_name(f"{output.stem}_rewards_settings.json")


def open_chat_template(args: argparse.Namespace) -> "ChatTemplate | None":
    """The chat template of --tokenizer, if the flags ask for it."""
    if args.chat_template != (args.tokenizer is not None):
        raise ValueError("--chat_template True and --tokenizer MODEL go together: give both or neither")
    if not args.chat_template:
        return None
    from tools.games.chat import load_chat_template  # brings transformers, which this program does without

    return load_chat_template(args.tokenizer)


def choose_prompt_fn(
    kind: str, seed: int, templates: taboo.Templates, prompts: "ModuleType | ChatTemplate" = taboo
) -> PromptFn:
    """How queries are made: the prompt of play, or a training prompt drawn at random; `prompts` has both."""
    if kind == "play":
        return partial(prompts.play_prompt, templates=templates)
    return partial(prompts.training_prompt, rng=random.Random(seed), templates=templates)


def counted(rows: Iterable[dict], counts: Counter, *, drop_empty: bool) -> Iterator[dict]:
    """Pass rows on, counting them by role (or "sft"), those with an empty target, and those dropped for it."""
    for row in rows:
        empty = not row["target"].strip()
        if empty and drop_empty:
            counts["dropped"] += 1
            continue
        counts["empty"] += empty
        counts[row.get("role", "sft")] += 1
        yield row


def outcome_records(episodes: Iterable[dict], games: Games) -> Iterator[dict]:
    """One record per episode: its target word, outcome and length in messages."""
    for episode, (outcome, length) in zip(episodes, games, strict=True):
        yield {"target_word": episode["target_word"], "outcome": outcome, "length": length}


if __name__ == "__main__":
    run_program(main)
