"""The flags of rows: how messages become rows, and which rows a control has instead. No torch."""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING

from tools.flags import flag
from tools.games import prompts
from tools.games.flags import GameFlags
from tools.games.game import Game, History
from tools.selfplay import controls
from tools.selfplay.controls import CLONING, COIN, COIN_BY_LENGTH, SILENT, WITHOUT_GAMES
from tools.selfplay.rewards import RewardFlags
from utils import UserError

if TYPE_CHECKING:
    from tools.games.chat import ChatTemplate

RANDOM, PLAY = "random", "play"  # values of --training_prompt
PromptFn = Callable[[History, str, float], str]  # (history before the message, task, max_turns) -> query


@dataclass(kw_only=True)
class RowFlags(GameFlags, RewardFlags):
    """How messages become rows, and which rows a control has instead."""

    seed: int = flag("seed of all that is drawn, such as training prompts", default=0)
    training_prompt: str = flag(
        "prompts of rows: drawn at random, or as in play", default=RANDOM, choices=(RANDOM, PLAY)
    )
    chat_template: bool = flag("True: write rows in the chat template of --tokenizer", default=False)
    tokenizer: str | None = flag("folder or hub name of the model to be trained", default=None, metavar="MODEL")
    retokenize: bool = flag("True: leave out the token ids that play has stored with the replies", default=False)
    min_game_rows: int = flag("stop with an error if the games give fewer rows than this", default=1)
    drop_empty_targets: bool = flag("True: leave out rows whose target text is empty", default=False)

    control: str | None = flag("make the rows of a control; unset: SPAG's", default=None, choices=controls.CONTROLS)
    like_rows: str | None = flag(
        "rows file of the other run in this epoch; sft and silent read it", default=None, metavar="FILE"
    )
    sft_coeff: float = flag("cloning: the weight of SFT rows in training (--lm_sft_coeff)", default=0.5)
    rows_at_once: int | None = flag("cloning: rows over which training averages a loss; unset: all", default=None)
    repeat_to: str | None = flag(
        "repeat or leave out rows of games until there are N, or as many as in a rows file",
        default=None,
        metavar="N|FILE",
    )

    def check(self, game: Game, sft_data_path: str | None) -> None:
        """Raise UserError for flags that are out of bounds or exclude each other, before anything is read."""
        self.check_rewards()
        if self.control in (COIN, COIN_BY_LENGTH):
            controls.check_winner(game, self.control)
        if self.control in WITHOUT_GAMES and not self.like_rows:
            raise UserError(f"--control {self.control} needs --like_rows, the rows file of the other run")
        if self.control in WITHOUT_GAMES and self.repeat_to:
            raise UserError(f"--control {self.control} makes no rows of games; leave out --repeat_to")
        if self.control == controls.SFT and not sft_data_path:
            raise UserError(f"--control {self.control} needs --sft_data_path")
        if self.control == CLONING and not (self.sft_coeff > 0 and self.losers == self.ties == 0):
            raise UserError(f"--control {CLONING} needs a --sft_coeff above 0, and neither --losers nor --ties")

    def files(self, inputs: list[str], sft: str | None) -> dict[str, list[str]]:
        """The files of episodes and rows that are read, by flag."""
        games = self.control not in WITHOUT_GAMES
        if games and not inputs:
            raise UserError("--input_data_path is missing: the files of episodes of which rows are made")
        return {
            "input_data_path": inputs if games else [],
            "sft_data_path": [sft] if sft and self.control != SILENT else [],
            "like_rows": [] if games else [self.like_rows],
            "repeat_to": [self.repeat_to] if self.repeat_to and not self.repeat_to.isdecimal() else [],
        }

    def settings(self, game: Game, templates: prompts.Templates, chat: "ChatTemplate | None") -> dict:
        """All settings that the rows depend on, besides the content of files of rows and episodes."""
        elsewhere = {"min_game_rows", "match", "game_options", "like_rows"}  # no setting, or part of others
        if self.control != CLONING:
            elsewhere |= {"sft_coeff", "rows_at_once"}
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
