"""Rows of episodes: which prompt, which target, which reward; and the file that holds them. No torch."""

import glob
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tools.flags import flag
from tools.games import load_game, prompts
from tools.games.flags import GameFlags
from tools.games.game import Game, History
from tools.selfplay.controls import (
    CLONING,
    COIN,
    COIN_BY_LENGTH,
    SFT,
    SILENT,
    WITHOUT_GAMES,
    ControlFlags,
    cloning_rows,
    coin_game,
    control_rows,
    permute_rewards,
    split_rows,
)
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
from utils import (
    BadRecordError,
    UserError,
    alpaca_to_row,
    files_setting,
    iter_records,
    open_text,
    put_records,
    replacing,
    row_texts,
    stage,
)

if TYPE_CHECKING:
    from tools.games.chat import ChatTemplate

RANDOM, PLAY = "random", "play"  # values of --training_prompt
HIGH_WEIGHT = 5  # a role's weight above this calls for a warning
PromptFn = Callable[[History, str, float], str]  # (history before the message, task, max_turns) -> query
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RowFlags(GameFlags, ControlFlags):
    """How messages become rows."""

    seed: int = flag("seed of all that is drawn, such as training prompts", default=0)
    training_prompt: str = flag(
        "prompts of rows: drawn at random, or as in play", default=RANDOM, choices=(RANDOM, PLAY)
    )
    chat_template: bool = flag("True: write rows in the chat template of --tokenizer", default=False)
    tokenizer: str | None = flag("folder or hub name of the model to be trained", default=None, metavar="MODEL")
    retokenize: bool = flag("True: leave out the token ids that play has stored with the replies", default=False)
    min_game_rows: int = flag("stop with an error if the games give fewer rows than this", default=1)
    drop_empty_targets: bool = flag("True: leave out rows whose target text is empty", default=False)

    def check(self, game: Game, sft_data_path: str | None) -> None:
        """Raise UserError for flags that are out of bounds or exclude each other, before anything is read."""
        self.check_rewards()
        self.check_control(game, sft_data_path)

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
    spoken = [message["role"] for message in history[: judged.length]]
    for index, pay in enumerate(message_pay(game, spoken, judged, weights, flags)):
        if pay is None:
            continue
        reward, weight = pay
        row = {
            "query": prompt_fn(history[:index], episode["target_word"], episode["max_turns"]),
            "target": history[index]["content"].strip(),
            "reward": reward,
            "role": spoken[index],
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


def read_sft_rows(path: str, from_alpaca: Callable[[dict], dict] = alpaca_to_row) -> Iterator[dict]:
    """Yield SFT rows from a file of records with query and target, prompt and answer, or Alpaca's fields.

    Rows that an earlier call wrote in a chat template stay as they are.
    """
    for where, record in iter_records(path):
        try:
            query, target, _ = row_texts(record, from_alpaca)
        except ValueError as error:
            raise BadRecordError(f"{where}: {error}") from None
        layout = {"chat_template": True} if record.get("chat_template") is True else {}
        yield {"query": query, "target": target, "type": SFT, "weight": 1.0} | layout


def make_rows(flags: RowFlags, inputs: list[str], output: str, *, sft: str | None = None) -> dict:
    """Write the rows of episodes, then the SFT rows, to `output`, and OUTPUT_rewards_settings.json beside it.

    Returns the notes of this record: counts of games and rows, the weights of roles. If `output` is finished under the
    same settings and inputs, it is left as it is. Raises UserError for other settings, and for too few rows of games.
    """
    game, record = flags.load_game(), record_of(output)
    flags.check(game, sft)
    if not inputs and flags.control not in WITHOUT_GAMES:
        raise UserError("--input_data_path is missing: the files of episodes of which rows are made")
    templates, chat = flags.load_templates(game), flags.load_chat_template()
    inputs = [] if flags.control in WITHOUT_GAMES else inputs
    sft = None if flags.control == SILENT else sft
    files = {"input_data_path": inputs, "sft_data_path": [sft] if sft else [], **flags.files_of_controls()}
    refuse_overwriting([*chain(*files.values()), flags.prompt_templates or game.prompt_file], [output, record])
    settings = flags.settings(game, templates, chat)
    settings |= {name: files_setting(*paths) for name, paths in files.items() if paths}
    with stage(record, settings, results=[glob.escape(Path(output).name)]) as todo:
        if todo:
            game_rows, notes = rows_of_games(flags, game, inputs, flags.prompt_fn(game, templates, chat))
            sft_rows = read_sft_rows(sft, chat.alpaca_to_turn if chat else alpaca_to_row) if sft else ()
            with replacing(output) as file:
                put = partial(put_records, file, as_list=not output.endswith(".jsonl"))
                notes["rows"] = write_rows(flags, game, game_rows, sft_rows, chat, put)
                refuse_few_rows(flags, game, notes)
            todo.notes.update(notes)
    return {name: note for name, note in todo.notes.items() if name != "made_by"}


def rows_of_games(flags: RowFlags, game: Game, inputs: list[str], prompt_fn: PromptFn) -> tuple[Iterator[dict], dict]:
    """The rows of all games, and the notes of the record about these games.

    The games are read twice: now, to judge and count them, and again while the rows are made.
    """
    games, replies = judge_games(game, read_files(inputs), coin_game if flags.control == COIN else judge_game)
    notes: dict = {"games": outcome_counts(game, games)}
    if flags.control == COIN_BY_LENGTH:
        games, notes["winners_changed"] = permute_rewards(games, random.Random(flags.seed))
        logger.info("%s: %d games have changed their winner", COIN_BY_LENGTH, notes["winners_changed"])
    notes["weights"] = role_weights(game, games, flags.role_weights)
    if flags.messages != ALL:
        warn_of_high_weights(notes["weights"])
    if flags.control == SILENT and (tokenizer := (layout_of(flags.like_rows) or {}).get(TOKENIZER)):
        notes[TOKENIZER] = tokenizer  # of the ids in the rows that are taken over
    if replies["with_ids"]:
        logger.info("retokenized: {retokenized:,} of {with_ids:,}".format(**replies))
        notes["replies"] = dict(replies)
    if with_ids := bool(replies["with_ids"]) and flags.training_prompt == PLAY and not flags.retokenize:
        notes[TOKENIZER] = tokenizer_of(inputs)
    read = zip(read_files(inputs), games, strict=True)
    rows = (
        episode_rows(
            game, episode, judged, weights=notes["weights"], flags=flags, prompt_fn=prompt_fn, with_ids=with_ids
        )
        for (_, episode), judged in read
    )
    return chain.from_iterable(rows), notes


def warn_of_high_weights(weights: Mapping[str, float]) -> None:
    """Warn of a role whose few games decide what is learned."""
    for role, weight in weights.items():
        if weight > HIGH_WEIGHT:
            logger.warning(
                "rows of the %s weigh %.1f, since few games pay it: a few lucky early guesses dominate the loss, and "
                "instant guesses are rewarded; --role_weights none gives every row the weight 1",
                role,
                weight,
            )


def write_rows(
    flags: RowFlags,
    game: Game,
    game_rows: Iterable[dict],
    sft_rows: Iterable[dict],
    chat: "ChatTemplate | None",
    put: Callable[[Iterable[dict]], None],
) -> dict[str, int]:
    """Write the rows with `put`, changed as a control asks for.

    Returns how many rows there are of each role and of SFT examples, how many of these have a reward below 0 or an
    empty target, and how many with an empty target were dropped. Cloned rows count for their role.
    """
    counts = Counter(dict.fromkeys((*game.roles, SFT, "negative", "empty", "dropped"), 0))

    def kept(rows: Iterable[dict]) -> Iterator[dict]:
        for row in rows:
            if flags.drop_empty_targets and not row["target"].strip():
                counts["dropped"] += 1
            else:
                yield row

    def counted(rows: Iterable[dict]) -> Iterator[dict]:
        for row in rows:
            counts["empty"] += not row["target"].strip()
            counts["negative"] += row.get("reward", 0.0) < 0
            counts[row.get("role", SFT)] += 1
            yield row

    rows = counted(control_rows(flags, kept(game_rows), kept(sft_rows), random.Random(flags.seed)))
    if chat and flags.control != SILENT:  # the other run's rows are in its template already
        rows = chat.rows(rows)
    if flags.control == CLONING:
        rows = cloning_rows(*split_rows(rows), flags.sft_coeff, flags.rows_at_once)
    put(rows)
    return dict(counts)


def refuse_few_rows(flags: RowFlags, game: Game, notes: Mapping) -> None:
    """Raise UserError if the games have given fewer rows than --min_game_rows."""
    number = sum(notes["rows"][role] for role in game.roles)
    if number < flags.min_game_rows and flags.control not in WITHOUT_GAMES:
        raise UserError(
            f"{number} rows of games, fewer than --min_game_rows {flags.min_game_rows} ({notes['games']})."
            " Likely causes: a --max_length of play that cuts the rules, a model that has not learned the rules by"
            " imitation, one that never ends a reply. --min_game_rows 0 allows any number"
        )


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
