"""Self-play of Adversarial Taboo: one game per word of a list, many games at once, on any number of processes.

    torchrun --nproc_per_node=8 --master_port=6000 -m tools.play_llm_game \\
        --attacker_model_name_or_path MODEL --defender_model_name_or_path MODEL --model_prefix im_llama2 \\
        --data_path data/all_target_words.txt --data_suffix all_words --output_dir data/self_play_results \\
        --task_type sampling --max_length 2048 --max_new_tokens 256 --bf16 True --tf32 True

Writes OUTPUT_DIR/im_llama2_sampling_all_words_results.json. Finished games are stored at once: after a kill, the same
command plays those that are missing. Without a launcher (python -m tools.play_llm_game ...) it is one process.
"""

import argparse
import json
import logging
from pathlib import Path

from tools.games import taboo
from tools.players.budget import estimate
from tools.players.human import HUMAN, human_problems, may_leave
from tools.players.server_flags import add_server_flags, is_server, server_flag_problems
from tools.selfplay.curves import add_report_flag, report_problems
from tools.selfplay.files import EpisodeFiles, FinishedGames, read_words
from tools.selfplay.lineup import model_names, model_setting
from tools.selfplay.options import (
    add_game_flags,
    add_machine_flags,
    flag_problems,
    game_rules,
    set_precision,
    too_small,
    words_setting,
)
from tools.selfplay.play import play
from tools.selfplay.progress import end_unfinished
from utils import await_inputs, end_with_launcher, parse_bool, rank, run_program, set_up_logging, world_size

logger = logging.getLogger(__name__)


# --- the program ---------------------------------------------------------------------------------------------------


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Self-play of Adversarial Taboo.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--attacker_model_name_or_path", required=True, help=f"model folder, hub name, openai:MODEL, or {HUMAN}: you")
    add("--defender_model_name_or_path", required=True, help="the same for the defender; equal ones are loaded once")
    add("--data_path", required=True, help="file of target words, one a line; one game is played for each")
    add("--output_dir", required=True, help="folder of the results, shared by all processes")
    add("--model_prefix", required=True, help="first part of the names of the result files")
    add("--data_suffix", required=True, help="last part of the names of the result files")
    add("--max_games", type=int, help="play the first so many words only; a larger number extends a run")
    add("--seed", type=int, default=42, help="of sampling")
    add_game_flags(parser)
    add_machine_flags(parser)
    add_server_flags(parser)
    add_report_flag(parser)
    add("--overwrite", type=parse_bool, default=False, help="True: delete the games of an earlier run of this name")
    return parser.parse_args(arguments)


def check_args(args: argparse.Namespace) -> None:
    """Raise one ValueError for all that is wrong with the flags."""
    names = model_names(args)
    problems = too_small(args, max_games=1) + flag_problems(args) + server_flag_problems(args, names)
    problems += report_problems(args.report_to) + human_problems(args, names)
    for name in ("model_prefix", "data_suffix"):
        value = getattr(args, name)
        if not value or Path(value).name != value:
            problems.append(f"--{name} {value!r} is no part of a file name")
    if problems:
        raise ValueError("; ".join(problems))


def game_settings(args: argparse.Namespace, words: list[str], templates: taboo.Templates) -> dict:
    """All that the games depend on; of files and models, what is in them."""
    attacker, defender = (model_setting(name, args) for name in model_names(args))
    return {
        "attacker_model_name_or_path": attacker,
        "defender_model_name_or_path": defender,
        "data_path": words_setting(args.data_path, words),
        **game_rules(args, templates),
        "seed": args.seed,
    }


def missing_words(finished: FinishedGames) -> list[str]:
    """The words whose games are not there, of all ranks."""
    return [finished.words[index] for index in finished.missing(range(len(finished.words)))]


def cost_estimate(args: argparse.Namespace, words: list[str], templates: taboo.Templates) -> str:
    """What the games of these words will cost."""
    return estimate(args, [(model_names(args), words)], templates)


def main() -> None:
    end_with_launcher()
    args = parse_args()
    set_up_logging()
    check_args(args)
    await_inputs([args.data_path, *model_names(args)])
    words = read_words(args.data_path)
    templates = taboo.load_templates(args.prompt_templates)
    stem = f"{args.model_prefix}_{args.task_type}_{args.data_suffix}"
    files = EpisodeFiles(args.output_dir, stem, words[: args.max_games])
    if args.dry_run:
        print(cost_estimate(args, files.words if args.overwrite else missing_words(files.finished()), templates))
        return
    set_precision(args)
    finished = files.start(game_settings(args, words, templates), overwrite=args.overwrite)
    seconds, to_play = 0.0, finished.missing(range(rank(), len(files.words), world_size()))
    if to_play:
        if any(map(is_server, model_names(args))):
            logger.info("%s", cost_estimate(args, missing_words(finished), templates))
        with may_leave(model_names(args), files):
            progress = play(args, files, finished, to_play, templates)
        if progress.missing:
            end_unfinished(args, files, progress)
        seconds = progress.seconds
    summary = files.merge(seconds=seconds, tokens_before=finished.new_tokens)
    if summary:
        print(json.dumps(summary))


if __name__ == "__main__":
    run_program(main)
