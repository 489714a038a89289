"""Files of episodes to a file of rows in constant memory, and the flags of how messages become rows. No torch."""

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tools.flags import flag
from tools.games import prompts
from tools.games.flags import GameFlags
from tools.games.game import Game
from tools.selfplay.rewards import JudgedGames, PromptFn, check_pay, message_row, paid_rows
from utils import (
    BadRecordError,
    RunSettings,
    UserError,
    alpaca_to_row,
    files_setting,
    iter_records,
    open_text,
    put_records,
    replacing,
    row_texts,
)

if TYPE_CHECKING:
    from tools.games.chat import ChatTemplate

WINNER, ALL = "winner", "all"  # values of --messages
RANDOM, PLAY = "random", "play"  # values of --training_prompt
SFT = "sft"  # the type of SFT rows, and their name in counts
RESULTS = ("games", "rows", "weights")  # entries of the settings file beside the settings
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RowFlags(GameFlags):
    """How messages become rows."""

    decay_weight: float = flag("reward decay gamma, applied backwards from the last message", default=0.8)
    losers: float = flag("make rows of the loser too: -SHARE times the winner's reward", default=0.0, metavar="SHARE")
    ties: float = flag("make rows of both players of tied games: reward -COST", default=0.0, metavar="COST")
    seed: int = flag("seed of the draws of training prompts", default=0)
    training_prompt: str = flag(
        "prompts of rows: drawn at random, or as in play", default=RANDOM, choices=(RANDOM, PLAY)
    )
    chat_template: bool = flag("True: write rows in the chat template of --tokenizer", default=False)
    tokenizer: str | None = flag("folder or hub name of the model to be trained", default=None, metavar="MODEL")
    messages: str = flag("make rows of the winner's messages, or of all", default=WINNER, choices=(WINNER, ALL))
    min_game_rows: int = flag("stop with an error if the games give fewer rows than this", default=1)
    drop_empty_targets: bool = flag("True: leave out rows whose target text is empty", default=False)
    skip_bad: bool = flag("True: skip invalid episodes instead of stopping", default=False)

    def settings(self, game: Game, templates: prompts.Templates, chat: "ChatTemplate | None") -> dict:
        """The settings that rows depend on, besides the input files, as `RunSettings` compares them."""
        elsewhere = {"min_game_rows", "match", "game_options"}  # the latter two are in the game's setting
        own = {field.name: getattr(self, field.name) for field in fields(RowFlags) if field.name not in elsewhere}
        tokenizer = {"path": self.tokenizer, "sha256": chat.sha256} if chat else None
        return own | self.game_settings(game, templates) | {"tokenizer": tokenizer}

    def load_chat_template(self) -> "ChatTemplate | None":
        """The chat template of --tokenizer, if the flags ask for it."""
        if self.chat_template != (self.tokenizer is not None):
            raise UserError("--chat_template True and --tokenizer MODEL go together: give both or neither")
        if not self.chat_template:
            return None
        from tools.games.chat import load_chat_template  # imports transformers, which other rows do not need

        return load_chat_template(self.tokenizer)

    def prompt_fn(self, game: Game, templates: prompts.Templates, chat: "ChatTemplate | None") -> PromptFn:
        """Return the function that makes queries: prompts of play, or training prompts drawn at random."""
        rng = random.Random(self.seed) if self.training_prompt == RANDOM else None
        if chat:
            return partial(chat.play_prompt, game, templates=templates, rng=rng)
        if rng:
            return partial(prompts.training_prompt, game, rng=rng, templates=templates)
        return partial(prompts.play_prompt, game, templates=templates)

    def game_rows(self, games: JudgedGames, prompt_fn: PromptFn) -> Iterator[dict]:
        """Rows of the messages with a reward; with --messages all, a row of reward and weight 1 for every message."""
        if self.messages == WINNER:
            pay = {"decay_weight": self.decay_weight, "losers": self.losers, "ties": self.ties}
            return paid_rows(games, prompt_fn=prompt_fn, **pay)
        return (
            message_row(episode, index, prompt_fn, reward=1.0, weight=1.0)
            for episode, verdict in games.judged()
            for index in range(verdict.length)
        )


def read_files(paths: Iterable[str], *, on_skip: Callable[[str], None] | None) -> Iterator[tuple[str, dict]]:
    """Yield ("file:line", record) of several files, as `iter_records` does."""
    for path in paths:
        yield from iter_records(path, on_skip=on_skip)


def read_sft_rows(path: str, from_alpaca: Callable[[dict], dict] = alpaca_to_row) -> Iterator[dict]:
    """Yield SFT rows from a file of records with query and target, prompt and answer, or Alpaca's fields."""
    for where, record in iter_records(path):
        try:
            query, target, _ = row_texts(record, from_alpaca)
        except ValueError as error:
            raise BadRecordError(f"{where}: {error}") from None
        yield {"query": query, "target": target, "type": SFT, "weight": 1.0}


def make_rows(flags: RowFlags, inputs: list[str], output: str, *, sft: str | None = None) -> dict:
    """Write the rows of episodes, then the SFT rows, to `output`, and OUTPUT_rewards_settings.json beside it.

    Returns the counts of games and rows, and the weights of roles. If `output` exists and was made with the same
    settings and inputs, it is left as it is; if it was made with others, or if there are too few rows of games, this
    raises UserError.
    """
    check_pay(flags.decay_weight, flags.losers, flags.ties)
    if flags.messages == ALL and (flags.losers or flags.ties):
        raise UserError("--messages all pays every message 1; leave out --losers and --ties")
    game, made_with = flags.load_game(), rows_settings(output)
    template_file = flags.prompt_templates or game.prompt_file
    refuse_overwriting([*inputs, *([sft] if sft else []), template_file], [output, made_with.path])
    templates, chat = flags.load_templates(game), flags.load_chat_template()
    settings = flags.settings(game, templates, chat) | {
        "input_data_path": files_setting(*inputs),
        "sft_data_path": files_setting(sft) if sft else None,
    }
    with made_with.claimed(settings):
        if os.path.exists(output):
            logger.info("%s: all is there", output)
            return {name: made_with.read(name) for name in RESULTS}
        games = JudgedGames(game, partial(read_files, inputs), skip_bad=flags.skip_bad)
        game_rows = flags.game_rows(games, flags.prompt_fn(game, templates, chat))
        sft_rows = read_sft_rows(sft, chat.alpaca_to_turn if chat else alpaca_to_row) if sft else ()
        # Rows by role; rows with a reward below 0, and with an empty target, among them; rows left out.
        counts = Counter(dict.fromkeys((*game.roles, SFT, "negative", "empty", "dropped"), 0))
        rows = counted(chain(game_rows, sft_rows), counts, drop_empty=flags.drop_empty_targets)
        with replacing(output) as file:
            put_records(file, chat.rows(rows) if chat else rows, as_list=not output.endswith(".jsonl"))
            results = {"games": games.counts(), "rows": dict(counts), "weights": games.role_weights()}
            if (number := sum(counts[role] for role in game.roles)) < flags.min_game_rows:
                raise UserError(
                    f"{number} rows of games, fewer than --min_game_rows {flags.min_game_rows} ({results['games']})."
                    " Likely causes: a --max_length of play that cuts the rules, a model that has not learned the"
                    " rules by imitation, one that never ends a reply. --min_game_rows 0 allows any number"
                )
            made_with.write(settings, **results)  # before the rows are in place, so that these never have others
        return results


def rows_settings(output: str) -> RunSettings:
    """The settings that a file of rows was made with, in OUTPUT_rewards_settings.json beside it."""
    path = Path(output).with_name(f"{Path(output).stem}_rewards_settings.json")
    return RunSettings(
        path,
        results=lambda: Path(output) if os.path.exists(output) else None,
        remedy=f"choose another output, or delete {output} and {path} to make them again",
    )


def counted(rows: Iterable[dict], counts: Counter, *, drop_empty: bool) -> Iterator[dict]:
    """Yield the rows and count them by role. With `drop_empty`, rows with an empty target are left out."""
    for row in rows:
        empty = not row["target"].strip()
        if empty and drop_empty:
            counts["dropped"] += 1
            continue
        counts["empty"] += empty
        counts["negative"] += row.get("reward", 0.0) < 0
        counts[row.get("role", SFT)] += 1
        yield row


def refuse_overwriting(inputs: Iterable[str | Path], outputs: Iterable[str | Path]) -> None:
    """Raise FileNotFoundError for a missing input, UserError for an output that is also an input or another output."""
    taken = set()
    for path in inputs:
        open_text(path).close()
        taken.add(Path(path).resolve())
    for path in outputs:
        if Path(path).resolve() in taken:
            raise UserError(f"{path}: would be written over another file of this run; choose another name")
        taken.add(Path(path).resolve())
