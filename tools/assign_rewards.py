"""Turn episodes into training rows: every message of a winner, with its share of the game's reward.

    python -m tools.assign_rewards --input_data_path data/episodes.json --output_data_path data/train_self_play.json \\
        --sft_data_path data/alpaca_train.json --decay_weight 0.8

Without --sft_data_path it makes imitation rows from a stronger model's games. Settings and counts are written to
OUTPUT_rewards_settings.json. data/README.md describes the formats of all files.
"""

import logging
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.common.errors import UserError
from tools.common.files import read_json, read_json_or_jsonl, write_records
from tools.common.flags import defaults, flag, parse_flags
from tools.common.models import special_texts, without
from tools.common.programs import run_program
from tools.common.records import files_setting, rows_setting, rows_stage
from tools.games.flags import GameFlags
from tools.games.game import Game
from tools.games.prompts import Templates, check_special_texts
from tools.players.server import CHAT
from tools.selfplay import rewards, rows
from tools.selfplay.episodes import run_of
from tools.selfplay.rows import PLAY, RANDOM, assign_rewards

__all__ = ["assign_rewards"]
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Flags(GameFlags, rows.ChatFlags, rewards.RewardFlags):
    input_data_path: list[str] = flag("files of episodes, JSON or JSONL, read in this order")
    output_data_path: str = flag("file of rows to write: .json, .jsonl, .json.gz or .jsonl.gz", compared=False)
    sft_data_path: str | None = flag(
        "SFT examples to append: a file (also Parquet or .jsonl.gz), or OWNER/NAME on the hub",
        default=None,
    )
    seed: int = flag("random seed, such as of training prompts", default=0)
    training_prompt: str = flag(
        "prompts of rows: drawn at random, or as in play", default=RANDOM, choices=(RANDOM, PLAY)
    )

    def __post_init__(self):
        super().__post_init__()
        if self.thinking and self.training_prompt != PLAY:
            raise UserError("--thinking True needs --training_prompt play, because thoughts belong to play's prompts")

    def row_settings(self, game: Game, chat) -> dict:
        """Everything that the rows depend on: flags, the content of files, the text of the chat template."""
        files = {"input_data_path": files_setting(*self.input_data_path)}
        if self.sft_data_path:
            files["sft_data_path"] = rows_setting(self.sft_data_path)
        return self.settings(game) | {"chat_template": chat and chat.sha256} | files


def warn_of_other_play(flags: Flags, settings: Mapping) -> None:
    """Warn if games were played with other rules or prompts than those of the rows."""
    phrases = []
    for path in flags.input_data_path:
        if different := differences_from_play(flags, settings, play_settings(path)):
            phrases.append(f"{path}: {', '.join(different)}")
    if phrases:
        logger.warning(
            "rows differ from how their games were played: right for imitating other people's games, but wrong for "
            "self-play. %s",
            "; ".join(phrases),
        )


def play_settings(path: str) -> dict:
    """The settings that a file's games were played with; {} without play's record beside it."""
    run = run_of(path)
    record = run.with_name(f"{run.name}_settings.json") if run else None
    stored = read_json(record) if record and record.is_file() else None
    settings = stored.get("settings") if isinstance(stored, dict) else None
    return settings if isinstance(settings, dict) else {}


def differences_from_play(flags: Flags, settings: Mapping, play: Mapping) -> list[str]:
    """A phrase for each difference from play in game options, prompt file, chat template and thinking."""
    phrases = []
    if "game" in play and play["game"]["options"] != settings["game"]["options"]:
        now, then = (options_text(each["game"]["options"]) for each in (settings, play))
        phrases.append(f"--game_options {now} (played with {then})")
    then = play.get("prompt_templates")
    now = settings["prompt_templates"]
    if then and then["sha256"] != now["sha256"]:
        phrases.append(f"--prompt_templates {now['path']} (played with {then['path']})")
    if play and bool(play.get("thinking")) != flags.thinking:
        phrases.append(f"--thinking {flags.thinking} (played with {not flags.thinking})")
    players = [play[name] for name in play if name.startswith("player ") or name.endswith("_model_name_or_path")]
    players = [player for player in players if isinstance(player, dict)]
    had_template = bool(play.get("chat_template"))
    if any(player.get("api") == CHAT for player in players):
        layout = "the plain prompt as one user message, a layout that no row has"
        phrases.append(f"played with --openai_api {CHAT} ({layout})")
    elif play and had_template != flags.chat_template:
        phrases.append(f"--chat_template {flags.chat_template} (played with {had_template})")
    elif had_template:
        # Models from the hub, which have a commit, are in its cache since play.
        models = {player["path"] for player in players if "commit" in player or Path(player["path"]).is_dir()}
        for model in sorted(models - {flags.tokenizer}):
            if flags.template_of(model, bool(play.get("thinking"))).sha256 != settings["chat_template"]:
                phrases.append(f"the chat template of --tokenizer {flags.tokenizer} (played with that of {model})")
    return phrases


def options_text(options: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items()) or "unset"


def read_games(flags: Flags, game: Game, chat) -> tuple[list[Mapping], list[rewards.Result]]:
    """The episodes of all input files, and how they ended.

    Of games of the same run and index the first counts, because rank files repeat a game if a rank outlived its
    launcher.
    """
    episodes: list[Mapping] = []
    results: list[rewards.Result] = []
    seen = set()
    for path in flags.input_data_path:
        where = f"{path}: episode"
        records = read_json_or_jsonl(path)
        if chat:
            records = without_special_texts(flags, game, records, chat, where)
        run = run_of(path)
        for episode, result in zip(records, rewards.judge_episodes(game, records, where, 1), strict=True):
            key = run, episode.get("index")
            if None not in key and key in seen:
                logger.warning("%s: game %s occurs twice and is counted once", path, episode["index"])
                continue
            seen.add(key)
            episodes.append(episode)
            results.append(result)
    rows.warn_of_other_outcomes(episodes, results)
    return episodes, results


def without_special_texts(flags: Flags, game: Game, records: list[dict], chat, where: str) -> list[Mapping]:
    """Episodes with special tokens removed from their texts, which would become those tokens in the rows.

    Play has already removed them from games of our own. Without a chat template the tokenizer is unknown here.
    """
    rewards.check_episodes(game, records, where, 1)
    special = special_texts(chat.tokenizer)
    for number, episode in enumerate(records, start=1):
        if without(special, episode["target_word"]) != episode["target_word"]:
            raise UserError(f"{where} {number}: its word contains a special token of {flags.tokenizer}")
    return [rows.episode_without(special, episode) for episode in records]


def make_rows(flags: Flags, game: Game, templates: Templates, chat) -> tuple[list[rows.Row], dict]:
    """All rows, and notes for the record: how games ended, and the roles' weights."""
    if chat:
        check_special_texts(game, templates, special_texts(chat.tokenizer))
    episodes, results = read_games(flags, game, chat)
    outcomes = Counter(result.outcome for result in results)
    games = {"episodes": len(results)}
    games |= {outcome.name: outcomes[outcome.name] for outcome in game.outcomes}
    rng = random.Random(flags.seed)
    # Prompts are drawn row by row, as in the release, so additional rows (--losers) change the prompts of later rows.
    prompt = rows.prompt_fn(game, flags.training_prompt, rng=rng, templates=templates, chat=chat)
    made = rows.game_rows(game, episodes, results, flags, prompt, thinking=flags.thinking)
    if not made:  # with control=cloning, training would silently use only SFT rows
        raise UserError(
            f"the games give no rows ({games}). Likely causes: a --max_length of play that truncates the rules, "
            "a model that has not learned the rules by imitation, or one that never ends a reply"
        )
    if chat:
        made = [chat.row(row) for row in made]
    if flags.sft_data_path:
        made += rows.read_sft_rows(flags.sft_data_path, chat)
    return made, {"games": games, "weights": rewards.role_weights(game, results, flags).won}


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    game = flags.load_game()
    templates = flags.load_templates(game)
    chat = flags.load_chat_template()
    settings = flags.row_settings(game, chat)
    warn_of_other_play(flags, settings)
    output = flags.output_data_path
    with rows_stage(output, settings, defaults(Flags)) as work:
        if work.todo:
            made, notes = make_rows(flags, game, templates, chat)
            write_records(output, made)
            work.notes |= notes | {"rows": rows.count_rows(made)}
    print(rows.counts_line(work.notes))


if __name__ == "__main__":
    run_program(main)
