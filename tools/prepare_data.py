"""Make word lists.

    python -m tools.prepare_data tasks --game GAME --number 1000 --output data/tasks.txt
    python -m tools.prepare_data split --input data/words.txt --output data/played.txt --held_out data/held_out.txt

`tasks` writes the list of a game that can make its own tasks. `split` takes words out of a list, so that models can be
evaluated on words that self-play never sees.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from tools.flags import flag, parse_command
from tools.games.flags import GameChoice
from tools.selfplay.rows import refuse_overwriting
from utils import UserError, read_words, replacing, run_program, set_up_logging, too_small


@dataclass(kw_only=True)
class Split:
    """Draw words to hold out. Both parts are written in the order of the list, each word once."""

    input: str = flag("word list, one word a line")
    output: str = flag("file to write for the remaining words")
    held_out: str = flag("file to write for the held-out words")
    number: int = flag("number of held-out words", default=500)
    seed: int = flag("seed of the draw", default=0)

    def run(self) -> None:
        refuse_overwriting([self.input], [self.output, self.held_out])
        words = list(dict.fromkeys(read_words(self.input)))
        if not 0 < self.number < len(words):
            raise UserError(f"--number {self.number}: must be between 1 and {len(words) - 1}, for {len(words)} words")
        drawn = set(random.Random(self.seed).sample(words, self.number))
        write_words(self.held_out, [word for word in words if word in drawn])
        write_words(self.output, [word for word in words if word not in drawn])


@dataclass(kw_only=True)
class Tasks(GameChoice):
    """Write the word list of a game that makes its own tasks."""

    output: str = flag("file to write")
    number: int = flag("largest number of tasks", default=1000)
    seed: int = flag("seed of the draws", default=0)

    def run(self) -> None:
        if problems := too_small(self, number=1):
            raise UserError(problems[0])
        write_words(self.output, self.load_game().tasks(self.number, random.Random(self.seed)))


def write_words(path: str, words: Iterable[str]) -> None:
    with replacing(path) as file:
        file.writelines(f"{word}\n" for word in words)


def main() -> None:
    command = parse_command({"tasks": Tasks, "split": Split}, description=__doc__)
    set_up_logging()
    command.run()


if __name__ == "__main__":
    run_program(main)
