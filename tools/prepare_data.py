"""Make the files that play and training start from.

    python -m tools.prepare_data words --output data/target_words.txt
    python -m tools.prepare_data tasks --game GAME --number 1000 --output tasks.txt
    python -m tools.prepare_data split --input WORDS.txt --output train_words.txt --held_out held_out_words.txt
    python -m tools.prepare_data alpaca --input alpaca_data.json --output data/alpaca_train.json
    python -m tools.prepare_data imitation --episodes games_results.json --output data/train_imitation.json
    python -m tools.prepare_data prompts --from_release SPAG/utils.py --output configs/release_prompts.json

`words` makes the list of target words, `tasks` that of another game; `split` holds some back, for evaluation on words
that self-play never sees; `alpaca` turns raw Alpaca records into SFT rows; `imitation` makes rows for SFTwithKL out of
a strong model's games; `prompts` takes the wording of all prompts out of a checkout of the released code, for models
that were trained on it. Beside its output X.EXT each writes X_source.json: what it was made of, with which settings,
counts, and the SHA-256 of inputs and output.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tools.games import prompts
from tools.games.flags import GameChoice
from tools.games.game import game_setting
from tools.games.release import release_templates
from tools.selfplay.rows import RowFlags, make_rows
from tools.selfplay.sidecar import OutputFile
from tools.selfplay.word_list import Split, Words, write_words
from utils import (
    BadRecordError,
    alpaca_to_row,
    end_with_launcher,
    flag,
    iter_records,
    parse_command,
    run_program,
    set_up_logging,
    too_small,
    write_json,
    write_records,
)


@dataclass(kw_only=True)
class Tasks(GameChoice, OutputFile):
    """The word list of a game that can make one itself."""

    number: int = flag("of tasks at most", default=1000)
    seed: int = flag("of what is drawn", default=0)

    def run(self) -> None:
        """Write the list."""
        if problems := too_small(self, number=1):
            raise ValueError("; ".join(problems))
        self.check()
        game = self.load_game()
        tasks = game.tasks(self.number, random.Random(self.seed))
        for task in tasks:
            game.check_task(task)
        write_words(self.output, tasks)
        settings = {"game": game_setting(game), "number": self.number, "seed": self.seed}
        self.write_source(f"tasks of {game.title}", settings=settings, counts={"tasks": len(tasks)})


@dataclass(kw_only=True)
class Alpaca(OutputFile):
    """SFT rows of raw Alpaca records (instruction, perhaps input, output)."""

    input: str = flag("raw Alpaca records, JSON or JSONL")

    def run(self) -> None:
        """Write the rows."""
        self.check(self.input)
        counts = Counter(dict.fromkeys(("rows", "with_input", "empty_targets"), 0))
        write_records(self.output, self.rows(counts))
        self.write_source("raw Alpaca records, through utils.alpaca_to_row", self.input, settings={}, counts=counts)

    def rows(self, counts: Counter) -> Iterator[dict]:
        """The rows, counted; BadRecordError names the file and line of what is no Alpaca record."""
        for where, record in iter_records(self.input):
            try:
                row = alpaca_to_row(record)
            except ValueError as error:
                raise BadRecordError(f"{where}: {error}") from None
            counts["rows"] += 1
            counts["with_input"] += bool(record.get("input"))
            counts["empty_targets"] += not row["target"].strip()
            yield row


@dataclass(kw_only=True)
class Imitation(RowFlags, OutputFile):
    """Rows for --train_method SFTwithKL out of a stronger model's games: those of tools.assign_rewards."""

    episodes: list[str] = flag("files of episodes, as play writes them or the released ones")

    def run(self) -> None:
        """Write the rows."""
        inputs = [*self.episodes, str(self.prompt_templates or self.load_game().prompt_file)]
        self.check(*inputs)
        counts = make_rows(self, self.episodes, self.output)
        settings = {name: value for name, value in asdict(self).items() if name not in ("episodes", "output")}
        self.write_source("episodes, through tools.assign_rewards", *inputs, settings=settings, counts=counts)


@dataclass(kw_only=True)
class Prompts(OutputFile):
    """The prompt file of the released code, which is read and never run."""

    from_release: str = flag("utils.py of the released code")

    def run(self) -> None:
        """Write the prompt file."""
        self.check(self.from_release)
        templates = release_templates(self.from_release)
        write_json(self.output, templates)
        settings = {"templates_sha256": prompts.templates_digest(templates)}
        counts = {"rules": len(templates["rules"]), "instructions": len(templates) - 1}
        self.write_source("utils.py of the released code", self.from_release, settings=settings, counts=counts)


COMMANDS = {
    "words": Words,
    "tasks": Tasks,
    "split": Split,
    "alpaca": Alpaca,
    "imitation": Imitation,
    "prompts": Prompts,
}


def main() -> None:
    end_with_launcher()
    command = parse_command(COMMANDS, description=__doc__)
    set_up_logging()
    command.run()


if __name__ == "__main__":
    run_program(main)
