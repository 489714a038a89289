"""Rows of episodes: which prompt, which target, which reward; and the file that holds them. No torch."""

import glob
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tools.games import load_game, prompts
from tools.games.game import Game
from tools.selfplay import controls
from tools.selfplay.controls import CLONING, COIN, COIN_BY_LENGTH, SILENT, WITHOUT_GAMES
from tools.selfplay.layout import TOKENIZER, layout_of, record_of, tokenizer_of
from tools.selfplay.rewards import (
    ALL,
    Judged,
    RewardFlags,
    judge_game,
    judge_games,
    message_pay,
    outcome_counts,
    role_weights,
    stored_replies,
)
from tools.selfplay.row_flags import PLAY, PromptFn, RowFlags
from utils import (
    BadRecordError,
    UserError,
    alpaca_to_row,
    files_setting,
    iter_records,
    refuse_overwriting,
    row_texts,
    stage,
    writing_records,
)

if TYPE_CHECKING:
    from tools.games.chat import ChatTemplate

HIGH_WEIGHT = 5  # a role's weight above this calls for a warning
logger = logging.getLogger(__name__)


def episode_rows(
    game: Game,
    episode: dict,
    judged: Judged,
    *,
    weights: Mapping[str, float],
    flags: RewardFlags,
    prompt_fn: PromptFn,
    with_ids: bool = False,
) -> list[dict]:
    """The rows of one game: one for each message, up to the decisive one, of the roles that are paid.

    With `with_ids`, a row also has the token ids of its target, if play has stored them.
    """
    history, rows = episode["history"], []
    replies = stored_replies(episode) if with_ids else []
    for index, pay in enumerate(message_pay(game, history[: judged.length], judged, weights, flags)):
        if pay is None:
            continue
        reward, weight = pay
        row = {
            "query": prompt_fn(history[:index], episode["target_word"], episode["max_turns"]),
            "target": history[index]["content"].strip(),
            "reward": reward,
            "role": history[index]["role"],
            "weight": weight,
        }
        if index < len(replies) and "token_ids" in replies[index]:
            row["target_ids"] = replies[index]["token_ids"]
        rows.append(row)
    return rows


def assign_rewards(
    episodes: Iterable[dict],
    *,
    game: Game | None = None,
    decay_weight: float = 0.8,
    rng: random.Random,
    templates: prompts.Templates | None = None,
    losers: float = 0.0,
    ties: float = 0.0,
) -> list[dict]:
    """Return rows with query, target, reward, role and weight, in the order of episodes and messages.

    `game` None is Taboo. Queries are training prompts, drawn with `rng` from `templates`. `losers` and `ties` are as
    in `rewards.role_pay`. The episodes are not modified. Raises UserError for a coefficient outside its bounds, and
    for an invalid episode, naming its index.
    """
    flags = RewardFlags(decay_weight=decay_weight, losers=losers, ties=ties)
    flags.check_rewards()
    game, episodes = game or load_game(), list(episodes)
    judged = judge_games(game, ((f"episode {index}", episode) for index, episode in enumerate(episodes))).games
    weights = role_weights(game, judged)
    prompt_fn = partial(prompts.training_prompt, game, rng=rng, templates=templates)
    rows = []
    for episode, ended in zip(episodes, judged, strict=True):
        rows += episode_rows(game, episode, ended, weights=weights, flags=flags, prompt_fn=prompt_fn)
    return rows


def read_files(paths: Iterable[str]) -> Iterator[tuple[str, dict]]:
    """Yield ("file:line", record) of several files, as `iter_records` does."""
    for path in paths:
        yield from iter_records(path)


def read_sft_rows(paths: Iterable[str], from_alpaca: Callable[[dict], dict] = alpaca_to_row) -> Iterator[dict]:
    """Yield SFT rows from files of records with query and target, prompt and answer, or Alpaca's fields.

    Rows that an earlier call wrote in a chat template stay as they are.
    """
    for where, record in read_files(paths):
        try:
            query, target, _ = row_texts(record, from_alpaca)
        except ValueError as error:
            raise BadRecordError(f"{where}: {error}") from None
        layout = {"chat_template": True} if record.get("chat_template") is True else {}
        yield {"query": query, "target": target, "type": controls.SFT, "weight": 1.0} | layout


def make_rows(flags: RowFlags, inputs: list[str], output: str, *, sft: str | None = None) -> dict:
    """Write the rows of episodes, then the SFT rows, to `output`, and OUTPUT_rewards_settings.json beside it.

    Returns the notes of this record: counts of games and rows, the weights of roles. If `output` is finished under the
    same settings and inputs, it is left as it is. Raises UserError for other settings, and for too few rows of games.
    """
    game, record = flags.load_game(), record_of(output)
    flags.check(game, sft)
    files, templates, chat = flags.files(inputs, sft), flags.load_templates(game), flags.load_chat_template()
    refuse_overwriting([*chain(*files.values()), flags.prompt_templates or game.prompt_file], [output, record])
    settings = flags.settings(game, templates, chat)
    settings |= {name: files_setting(*paths) for name, paths in files.items() if paths}
    with stage(record, settings, results=[glob.escape(Path(output).name)]) as todo:
        if todo:
            inputs = files["input_data_path"]
            games, notes = judge_files(flags, game, inputs)
            rows_of = partial(
                episode_rows,
                game,
                weights=notes["weights"],
                flags=flags,
                prompt_fn=flags.prompt_fn(game, templates, chat),
                with_ids=TOKENIZER in notes,
            )
            read = zip(read_files(inputs), games, strict=True)  # again, now to make the rows
            rows = chain.from_iterable(rows_of(episode, judged) for (_, episode), judged in read)
            with writing_records(output) as write:
                notes["rows"] = write_rows(flags, game, rows, files["sft_data_path"], chat, write)
                refuse_few_rows(flags, game, notes)
            todo.notes.update(notes)
    return {name: note for name, note in todo.notes.items() if name != "made_by"}


def judge_files(flags: RowFlags, game: Game, inputs: list[str]) -> tuple[list[Judged], dict]:
    """How each game ended, and what the record says of all of them."""
    games, replies = judge_games(game, read_files(inputs), controls.coin_game if flags.control == COIN else judge_game)
    notes: dict = {"games": outcome_counts(game, games)}
    if flags.control == COIN_BY_LENGTH:
        games, notes["winners_changed"] = controls.permute_rewards(games, random.Random(flags.seed))
        logger.info("%s: %d games have changed their winner", COIN_BY_LENGTH, notes["winners_changed"])
    notes["weights"] = role_weights(game, games, flags.role_weights)
    if flags.messages != ALL:
        warn_of_high_weights(notes["weights"])
    if flags.control == SILENT and (tokenizer := (layout_of(flags.like_rows) or {}).get(TOKENIZER)):
        notes[TOKENIZER] = tokenizer  # of the ids in the rows that are taken over
    if replies["with_ids"]:
        logger.info("retokenized: {retokenized:,} of {with_ids:,}".format(**replies))
        notes["replies"] = dict(replies)
        if flags.training_prompt == PLAY and not flags.retokenize:
            notes[TOKENIZER] = tokenizer_of(inputs)
    return games, notes


def warn_of_high_weights(weights: Mapping[str, float]) -> None:
    """Warn of a role whose few games decide what is learned."""
    for role, weight in weights.items():
        if weight > HIGH_WEIGHT:
            logger.warning(
                "rows of the %s weigh %.1f, since few games pay it: a few early guesses may dominate the loss, and "
                "instant guesses are rewarded; --role_weights none gives every row the weight 1",
                role,
                weight,
            )


def write_rows(
    flags: RowFlags,
    game: Game,
    rows: Iterable[dict],
    sft_paths: list[str],
    chat: "ChatTemplate | None",
    write: Callable[[dict], object],
) -> dict[str, int]:
    """Write the rows of games, then those of SFT examples, or what a control has in their place, by `write`.

    Returns how many rows there are of each role and of SFT examples, how many of these have a reward below 0 or an
    empty target, and how many with an empty target were dropped. Cloned rows count for their role.
    """
    counts = Counter(dict.fromkeys((*game.roles, controls.SFT, "negative", "empty", "dropped"), 0))
    sft_rows = read_sft_rows(sft_paths, chat.alpaca_to_turn if chat else alpaca_to_row)
    if flags.drop_empty_targets:
        rows, sft_rows = without_empty(rows, counts), without_empty(sft_rows, counts)
    rng = random.Random(flags.seed)
    if flags.repeat_to:
        rows = controls.repeated(list(rows), controls.number_to_repeat_to(flags.repeat_to), rng)
    if flags.control == controls.SFT:
        sft_rows = controls.repeated(list(sft_rows), sum(1 for _ in iter_records(flags.like_rows)), rng)
    rows = chain(rows, sft_rows)
    if flags.control == SILENT:
        rows, chat = controls.silent_rows(flags.like_rows), None  # these are in their layout already
    if flags.control == CLONING:
        rows = list(rows)
        clone = controls.cloning(rows, flags.sft_coeff, flags.rows_at_once)
    for row in rows:
        counts[row.get("role", controls.SFT)] += 1
        counts["negative"] += row.get("reward", 0.0) < 0
        counts["empty"] += not row["target"].strip()
        row = chat.row(row) if chat else row
        write(clone(row) if flags.control == CLONING else row)
    return dict(counts)


def without_empty(rows: Iterable[dict], counts: Counter) -> Iterator[dict]:
    """The rows whose target is not empty. The others are counted as dropped."""
    for row in rows:
        if row["target"].strip():
            yield row
        else:
            counts["dropped"] += 1


def refuse_few_rows(flags: RowFlags, game: Game, notes: Mapping) -> None:
    """Raise UserError if the games have given fewer rows than --min_game_rows."""
    number = sum(notes["rows"][role] for role in game.roles)
    if number < flags.min_game_rows and flags.control not in WITHOUT_GAMES:
        raise UserError(
            f"{number} rows of games, fewer than --min_game_rows {flags.min_game_rows} ({notes['games']})."
            " Likely causes: a --max_length of play that cuts the rules, a model that has not learned the rules by"
            " imitation, one that never ends a reply. --min_game_rows 0 allows any number"
        )
