"""Self-play: one game for each word of a list, many at once, on any number of processes.

    torchrun --nproc_per_node=8 --master_port=6000 -m tools.play_llm_game \\
        --attacker_model_name_or_path MODEL --defender_model_name_or_path MODEL --model_prefix im_llama2 \\
        --data_path data/all_target_words.txt --data_suffix all_words --output_dir data/self_play_results \\
        --task_type sampling --max_length 2048 --max_new_tokens 256 --bf16 True --tf32 True

Writes OUTPUT_DIR/im_llama2_sampling_all_words_results.json. Finished games are stored at once: after a kill, the same
command plays the missing ones. Without a launcher (python -m tools.play_llm_game ...) it runs as one process.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from tools.flags import flag, parse_flags
from tools.players.human import HUMAN
from tools.selfplay.files import EpisodeFiles
from tools.selfplay.flags import PlayFlags, words_setting
from tools.selfplay.play import Play, Run
from utils import UserError, rank, read_json, read_words, run_program, set_up_logging, too_small

MOST_TIED = 0.5  # share of undecided games above which there is a warning
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Flags(PlayFlags):
    """The flags of this program; attacker and defender stand for the first and the second role of any game."""

    attacker_model_name_or_path: str = flag(f"model folder, hub name, openai:MODEL, or {HUMAN} for you")
    defender_model_name_or_path: str = flag("the other role's player; the same model is loaded once")
    data_path: str = flag("file of target words, one a line; one game is played for each")
    output_dir: str = flag("folder of the results, shared by all processes")
    model_prefix: str = flag("first part of the names of the result files")
    data_suffix: str = flag("last part of the names of the result files")
    max_games: int | None = flag("play only the first so many words; a larger number extends a run", default=None)
    seed: int = flag("seed of sampling", default=42)

    @property
    def names(self) -> tuple[str, str]:
        """The players of roles[0] and roles[1]."""
        return self.attacker_model_name_or_path, self.defender_model_name_or_path

    @property
    def stem(self) -> str:
        """The first part of the names of all files."""
        return f"{self.model_prefix}_{self.task_type}_{self.data_suffix}"

    def check(self) -> None:
        problems = too_small(self, max_games=1) + self.problems(self.names)
        for name in ("model_prefix", "data_suffix"):
            value = getattr(self, name)
            if not value or Path(value).name != value:
                problems.append(f"--{name} {value!r} is no part of a file name")
        if problems:
            raise UserError("; ".join(problems))


def main() -> None:
    flags = parse_flags(Flags, description="Self-play: both roles by language models, servers, or you.")
    set_up_logging()
    flags.check()
    game = flags.load_game()
    templates = flags.load_templates(game)
    words = read_words(flags.data_path, game.check_task)
    files = EpisodeFiles(flags.output_dir, flags.stem, words[: flags.max_games], game)
    flags = flags.with_engine(flags.names, files.settings_then())
    settings = {
        "attacker_model_name_or_path": flags.player_setting(flags.names[0]),
        "defender_model_name_or_path": flags.player_setting(flags.names[1]),
        "data_path": words_setting(flags.data_path, words),
        **flags.settings(game, templates),
        "seed": flags.seed,
    }
    with files.stage(settings) as todo:
        if todo:
            players = dict(zip(game.roles, flags.names, strict=True))
            todo.notes["tokenizer_sha256"] = flags.tokenizer_fingerprints(players)
            Run(flags, game, templates, [Play(flags.names, flags.seed, files.words)], files).play_missing()
    if rank() == 0:
        show_summary(files, game)


def show_summary(files: EpisodeFiles, game) -> None:
    """Print the summary, with a warning if most games give no rows to learn from."""
    summary = read_json(files.summary_path)
    logger.info("%s: %d games", files.results_path, summary["games"])
    if (tied := summary["outcomes"][game.outcomes[-1].name] / summary["games"]) > MOST_TIED:
        logger.warning("%.0f%% of the games end without a decision, and give no rows to learn from", 100 * tied)
    print(json.dumps(summary))


if __name__ == "__main__":
    run_program(main)
