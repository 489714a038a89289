"""Training rows from episodes and SFT examples, and counts of rows. No torch."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypedDict, cast

from tools.common.errors import UserError
from tools.common.files import read_records
from tools.common.flags import FlagGroup, flag
from tools.common.models import load_tokenizer, without
from tools.common.rowformats import SFT, alpaca_texts, alpaca_to_row, read_row, row_kind
from tools.games import load_game, prompts
from tools.games.game import Game, History
from tools.players.player import reply_without
from tools.selfplay.episodes import listed
from tools.selfplay.rewards import (
    Result,
    RewardFlags,
    judge_episodes,
    message_rewards,
    role_payments,
    role_weights,
)

if TYPE_CHECKING:
    from tools.games.chat import ChatTemplate  # imports transformers

logger = logging.getLogger(__name__)
# Values of --training_prompt:
RANDOM = "random"
PLAY = "play"


class Row(TypedDict, total=False):
    """A training example (format: data/README.md). Training ignores further fields."""

    query: str
    target: str
    weight: float
    reward: float  # game rows only
    role: str  # game rows only
    type: str  # "sft" for SFT rows
    messages: list[dict]  # in SFT rows, instead of query and target
    chat_template: bool  # the texts are complete, in the template of the model to train
    thought: bool  # the target begins with a thought and is exactly what the model wrote


PromptFn = Callable[[History, str, float], str]  # (history before the message, task, max_turns) -> query


@dataclass(kw_only=True)
class ChatFlags(FlagGroup):
    chat_template: bool = flag("write rows in the chat template of --tokenizer", default=False, shared=True)
    tokenizer: str | None = flag(
        "model to train, whose chat template is used: a folder or a name on the hub",
        default=None,
        metavar="MODEL",
        compared=False,
    )
    thinking: bool = flag("include the thoughts of replies, for play with --thinking True", default=False, shared=True)
    trust_remote_code: bool = flag("run Python code that comes with a tokenizer", default=False, compared=False)

    def load_chat_template(self) -> "ChatTemplate | None":
        if self.chat_template != (self.tokenizer is not None):
            raise UserError("--chat_template True and --tokenizer MODEL go together: set both or neither")
        return self.template_of(self.tokenizer, self.thinking) if self.tokenizer else None

    def template_of(self, model: str, thinking: bool) -> "ChatTemplate":
        from tools.games.chat import ChatTemplate  # imports transformers, which other rows do not need

        tokenizer = load_tokenizer(model, trust_remote_code=self.trust_remote_code)
        return ChatTemplate(tokenizer, model, thinking)


# Rows of games.


def prompt_fn(
    game: Game,
    kind: str,
    *,
    rng: random.Random,
    templates: prompts.Templates | None = None,
    chat: "ChatTemplate | None" = None,
) -> PromptFn:
    """A function that makes queries: play's prompts (PLAY) or training prompts drawn with `rng` (RANDOM).

    RANDOM is the paper's choice, so that no layout is memorized; in a chat template it varies only the rule text. A
    RANDOM row's importance ratio is computed under another prompt than the one that the message was sampled from.
    """
    if kind not in (RANDOM, PLAY):
        raise UserError(f"training_prompt is {kind!r}; it must be {RANDOM!r} or {PLAY!r}")
    if kind == RANDOM and not chat:
        return partial(prompts.training_prompt, game, templates=templates, rng=rng)
    join = chat.join_play_prompt if chat else prompts.join_play_prompt
    rule_rng = rng if kind == RANDOM else None
    return partial(prompts.play_prompt, game, templates=templates, rng=rule_rng, join=join)


def game_rows(
    game: Game,
    episodes: Iterable[Mapping],
    results: Sequence[Result],
    flags: RewardFlags,
    prompt: PromptFn,
    *,
    thinking: bool = False,
) -> list[Row]:
    """The rows of games, in the order of episodes and messages.

    There is a row for each message up to the decisive one whose role gets a reward and is played by the model in
    training, as both are unless the episode names its `learner`. With `thinking`, targets begin with the replies'
    thoughts. A message cut off at the token limit becomes a row, too, whose target also gets an end token, so the
    model learns to end there.
    """
    weights = role_weights(game, results, flags)
    rows: list[Row] = []
    for episode, result in zip(episodes, results, strict=True):
        history = episode["history"][: result.length]
        task = episode["target_word"]
        payments = role_payments(game, result, flags, weights)
        speakers = [message["role"] for message in history]
        rewards = {}
        for role, payment in payments.items():
            rewards[role] = iter(message_rewards(payment.reward, speakers.count(role), flags))
        for index, (role, message) in enumerate(zip(speakers, history, strict=True)):
            if role not in payments:
                continue
            row: Row = {
                "query": prompt(history[:index], task, episode["max_turns"]),
                "target": message["content"].strip(),  # if empty, only the end token is learned
                "reward": next(rewards[role]),
                "role": role,
                "weight": payments[role].weight,
            }
            if thinking:
                row |= thoughtful_target(episode, index)
            rows.append(row)
    return rows


def warn_of_other_outcomes(episodes: Sequence[Mapping], results: Sequence[Result]) -> None:
    """Warn of games whose stored outcome differs from the verdict, which the rows follow."""
    pairs = ((episode.get("outcome"), result.outcome) for episode, result in zip(episodes, results, strict=True))
    changed = Counter((stored, judged) for stored, judged in pairs if stored not in (None, judged))
    if changed:
        logger.warning(
            "%s of %s games are judged differently from their stored outcome (%s); the rows follow the new verdict. "
            "Were they played with other --game_options or another judge?",
            f"{changed.total():,}",
            f"{len(results):,}",
            ", ".join(f"{stored} -> {judged}: {number:,}" for (stored, judged), number in changed.most_common()),
        )


def episode_without(special: frozenset[str], episode: Mapping) -> Mapping:
    """An episode with these strings removed from messages and thoughts, as `play_game` does."""
    history = [message | {"content": without(special, message["content"])} for message in episode["history"]]
    replies = [reply_without(special, reply) for reply in episode.get("replies") or ()]
    return {**episode, "history": history, "replies": replies}


def thoughtful_target(episode: Mapping, index: int) -> Row:
    """The target of a message whose reply has a thought, exactly as written; {} without a thought."""
    reply = episode["replies"][index] if episode.get("replies") else {}
    if "thought" not in reply:
        return {}
    return {"target": reply["thought"] + reply["text"], "thought": True}


def assign_rewards(
    episodes: Iterable[Mapping],
    *,
    game: Game | None = None,
    decay_weight: float = 0.8,
    rng: random.Random,
    templates: prompts.Templates | None = None,
    training_prompt: str = RANDOM,
    **flags,
) -> list[Row]:
    """Return rows with query, target, reward, role and weight, in the order of episodes and messages.

    `game` defaults to Taboo. Queries are training prompts drawn with `rng` or, with `training_prompt` PLAY, play's
    prompts. `flags` are further RewardFlags. UserError for a flag out of bounds, and for an invalid episode or a
    message out of turn, with the episode's index.
    """
    game = game or load_game()
    episodes = list(episodes)
    reward_flags = RewardFlags(decay_weight=decay_weight, **flags)
    results = judge_episodes(game, episodes, "episode", 0)
    warn_of_other_outcomes(episodes, results)
    prompt = prompt_fn(game, training_prompt, rng=rng, templates=templates)
    return game_rows(game, episodes, results, reward_flags, prompt)


# SFT rows.


def read_sft_rows(path: str, chat: "ChatTemplate | None" = None) -> list[Row]:
    """SFT rows from records with query and target, prompt and answer, Alpaca's fields, or messages.

    As released, their weight is 1, whatever a record says. A chat template is applied to plain queries, but not to
    rows that are already in it, nor to messages, which training renders in its model's template.
    """
    return read_records(path, partial(sft_row, chat=chat))


def sft_row(record: Mapping, chat: "ChatTemplate | None") -> Row:
    read = read_row(record, alpaca_to_turn if chat else alpaca_to_row)
    if "messages" in read:
        return {"messages": read["messages"], "type": "sft", "weight": 1.0}
    row: Row = {"query": read["query"], "target": read["target"], "type": "sft", "weight": 1.0}
    if read.get("chat_template"):
        row["chat_template"] = True
    return cast(Row, chat.row(dict(row))) if chat else row


def is_sft(row: Mapping) -> bool:
    return row_kind(read_row(row)) == SFT


def alpaca_to_turn(example: Mapping) -> dict:
    """Prompt and target of an Alpaca record, with the prompt as a user would send it."""
    instruction, given, output = alpaca_texts(example)
    return {"prompt": "\n\n".join(filter(None, (instruction, given))), "target": output}


# Counts.


def counts_line(notes: Mapping) -> str:
    """The games, weights and rows in a record's notes, as one line."""
    parts = []
    if "games" in notes:
        outcomes = dict(notes["games"])
        parts.append(f"{outcomes.pop('episodes'):,} games: {listed(outcomes)}")
    by_kind = dict(notes["rows"])
    negative = by_kind.pop("negative")
    parts.append(f"{sum(by_kind.values()):,} rows: {listed(by_kind)}")
    if negative:
        parts.append(f"{negative:,} rows have negative rewards")
    if "weights" in notes:
        weights = (f"{role} {weight:.2f}" for role, weight in notes["weights"].items())
        parts.append(f"weights of rows: {', '.join(weights)}")
    return "; ".join(parts)


def count_rows(rows: Iterable[Mapping]) -> dict[str, int]:
    """The number of SFT rows, of rows of each role, and of rows with negative rewards."""
    counts = Counter("sft" if is_sft(row) else row.get("role", "game") for row in rows)
    negative = sum(row.get("reward", 0.0) < 0 for row in rows)
    return dict(counts) | {"negative": negative}
