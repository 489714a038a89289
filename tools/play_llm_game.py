"""Self-play: one game for each word of a list, many at once, on any number of processes.

    torchrun --nproc_per_node=8 --master_port=6000 -m tools.play_llm_game \\
        --attacker_model_name_or_path MODEL --defender_model_name_or_path MODEL --model_prefix im_llama2 \\
        --data_path data/all_target_words.txt --data_suffix all_words --output_dir data/self_play_results \\
        --task_type sampling --max_length 2048 --max_new_tokens 256 --bf16 True --tf32 True

Writes OUTPUT_DIR/im_llama2_sampling_all_words_results.json. Games are stored as they finish, so after a kill the same
command plays the missing ones. Without a launcher (python -m tools.play_llm_game ...) it runs as a single process. To
play a word several times, repeat it in the list; in the loop, set games_per_word.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tools.common.files import read_json, read_words
from tools.common.flags import defaults, file_name, flag, parse_flags
from tools.common.programs import run_program
from tools.common.ranks import rank
from tools.common.records import stage
from tools.selfplay.episodes import EpisodeFiles, new_tokens, summary_line
from tools.selfplay.flags import PlayFlags, words_setting
from tools.selfplay.make import FORMS, engine_notes, player_setting
from tools.selfplay.play import Planned, play_missing


@dataclass(kw_only=True)
class Flags(PlayFlags):
    """This program's flags. "Attacker" and "defender" are the first and the second role of any game."""

    attacker_model_name_or_path: str = flag(f"player of the first role: {FORMS}")
    defender_model_name_or_path: str = flag("player of the other role; if it is the same model, it is loaded once")
    data_path: str = flag("file of target words, one per line; one game is played for each")
    output_dir: str = flag("folder for the results, shared by all processes", compared=False)
    model_prefix: str = flag("first part of result file names", type=file_name, compared=False)
    data_suffix: str = flag("last part of result file names", type=file_name, compared=False)
    max_games: int | None = flag(
        "play only this many words, from the top of the list",
        default=None,
        at_least=1,
        compared=False,  # the words are compared by content
    )
    seed: int = flag("seed of sampling", default=42)

    def plan(self, words: Sequence[str]) -> list[Planned]:
        """The players and seed of each word's game."""
        return [Planned(self.attacker_model_name_or_path, self.defender_model_name_or_path, self.seed) for _ in words]


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    game = flags.load_game()
    templates = flags.load_templates(game)
    words = read_words(flags.data_path, game.check_task)[: flags.max_games]
    files = EpisodeFiles(flags.output_dir, f"{flags.model_prefix}_{flags.task_type}_{flags.data_suffix}", words, game)
    settings = flags.settings(game) | {
        "attacker_model_name_or_path": player_setting(flags.attacker_model_name_or_path, flags),
        "defender_model_name_or_path": player_setting(flags.defender_model_name_or_path, flags),
        "data_path": words_setting(flags.data_path, words),
    }
    with stage(files.record_path, settings, results=files.patterns, defaults=defaults(Flags)) as work:
        tokens_before = 0
        seconds = waited = 0.0
        if work.todo:
            tokens_before = sum(map(new_tokens, files.finished().values()))
            notes = engine_notes(work)
            seconds = play_missing(game, flags.plan(words), flags, files, templates=templates, note_engines=notes)
            ended = time.monotonic()
            files.finish()
            waited = time.monotonic() - ended  # for processes that were still playing
    if rank() == 0:
        counts = read_json(files.summary_path)
        # Over all processes of this start, by rank 0's clock, without the time to load models.
        speed = (counts["new_tokens"] - tokens_before) / (seconds + waited) if seconds else None
        print(summary_line(counts) + (f"; {speed:,.1f} new tokens per second" if speed else ""))


if __name__ == "__main__":
    run_program(main, ranks=True, kept="finished games are kept; rerun the same command to play the others")
