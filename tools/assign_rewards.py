"""Turn episodes into training rows: every message of a winner, with its share of the game's reward.

    python -m tools.assign_rewards --input_data_path data/episodes.json --output_data_path data/train_self_play.json \\
        --sft_data_path data/alpaca_train.json --decay_weight 0.8

Without --sft_data_path it makes the rows of imitation from a stronger model's games. Settings and counts go to
OUTPUT_rewards_settings.json. data/README.md has the formats of all files.
"""

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

from tools.flags import GameFlags, flag, parse_flags
from tools.games.game import Game, load_member, member_setting
from tools.games.prompts import Templates
from tools.selfplay import rewards, rows
from tools.selfplay.rows import PLAY, RANDOM, assign_rewards
from utils import UserError, files_setting, read_json_or_jsonl, run_program, special_texts

__all__ = ["assign_rewards"]
ELSEWHERE = ("output_data_path", "game_options", "tokenizer")  # flags that are no setting, or part of another one


@dataclass(kw_only=True)
class Flags(GameFlags, rows.ChatFlags, rewards.RewardFlags):
    input_data_path: list[str] = flag("files of episodes, JSON or JSONL, read in this order")
    output_data_path: str = flag("file of rows to write: JSONL if it ends in .jsonl, else JSON")
    sft_data_path: str | None = flag("file of SFT examples; their rows are appended", default=None)
    permute_outcomes: bool = flag(
        "True: permute rewards among games of equal length, a control of self-play", default=False
    )
    shape: str | None = flag(
        "function (row, episode, outcome) -> reward that gives each row of a game its final reward",
        default=None,
        metavar="FILE.py:FUNCTION",
    )
    seed: int = flag("seed of all that is drawn, such as training prompts", default=0)
    training_prompt: str = flag(
        "prompts of rows: drawn at random, or as in play", default=RANDOM, choices=(RANDOM, PLAY)
    )

    def check(self, game: Game) -> None:
        self.check_rewards(game)
        if self.thinking and self.training_prompt != PLAY:
            raise UserError("--thinking True needs --training_prompt play, the prompts that the thoughts answer")

    def settings(self, game: Game, chat) -> dict:
        """All that the rows depend on: the flags, files by their content, the chat template by its text."""
        flags = {name: value for name, value in vars(self).items() if name not in ELSEWHERE}
        files = {"input_data_path": files_setting(*self.input_data_path)}
        if self.sft_data_path:
            files["sft_data_path"] = files_setting(self.sft_data_path)
        if self.shape:
            files["shape"] = member_setting(self.shape)
        return flags | {"chat_template": chat and chat.sha256} | self.game_settings(game) | files


def make_rows(flags: Flags, game: Game, templates: Templates, chat) -> rows.RowsAndNotes:
    """All rows, and the counts of games that stand in the record."""
    episodes, results = [], []
    for path in flags.input_data_path:
        records = read_json_or_jsonl(path)
        place = f"{path}: episode"
        if chat:  # a text of a special token would become that token in the rows
            rewards.check_episodes(game, records, place, 1)
            records = [rows.episode_without(special_texts(chat.tokenizer), episode) for episode in records]
        results += rewards.judge_episodes(game, records, place, 1)
        episodes += records
    outcomes = Counter(result.outcome for result in results)
    games = {"episodes": len(results)}
    games |= {outcome.name: outcomes[outcome.name] for outcome in game.outcomes}
    if flags.permute_outcomes:
        results = rewards.permute_rewards(results, random.Random(flags.seed))
    rng = random.Random(flags.seed)
    prompt = rows.prompt_fn(game, flags.training_prompt, rng=rng, templates=templates, chat=chat)
    shape = load_member(flags.shape) if flags.shape else None  # data never names it, only the user
    made, numbers = rows.game_rows(game, episodes, results, flags, prompt, shape, thinking=flags.thinking)
    if not made:
        raise UserError(
            f"the games give no rows ({games}). Likely causes: a --max_length of play that cuts the rules, "
            "a model that has not learned the rules by imitation, one that never ends a reply"
        )
    if chat:
        made = [chat.row(row) for row in made]
    if flags.sft_data_path:
        made += rows.read_sft_rows(flags.sft_data_path, chat)
    return made, {"games": games} | numbers


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    game = flags.load_game()
    flags.check(game)
    templates, chat = flags.load_templates(game), flags.load_chat_template()
    settings = flags.settings(game, chat)
    rows.write_rows(flags.output_data_path, settings, partial(make_rows, flags, game, templates, chat))


if __name__ == "__main__":
    run_program(main)
