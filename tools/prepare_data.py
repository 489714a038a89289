"""Prepare a run's inputs: word lists, the authors' prompts, and games to imitate.

python -m tools.prepare_data prompts --release data/released_utils.py --output data/released_prompts.json
python -m tools.prepare_data split --input data/words.txt --output data/played.txt --held_out data/held_out.txt
python -m tools.prepare_data imitation --output_dir data/own
python -m tools.prepare_data english --model HuggingFaceTB/SmolLM2-135M-Instruct --output_dir outputs/english/data
"""

import ast
import random
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from tools.common.errors import UserError
from tools.common.files import ROOT, read_json_or_jsonl, read_text, read_words, write_json, write_records, write_words
from tools.common.flags import FlagGroup, flag, parse_command
from tools.common.programs import run_program, run_python
from tools.games import load_game
from tools.games.prompts import RULES, load_templates

GAMES = ROOT / "data" / "imitation_games.jsonl"
ENGLISH = ROOT / "data" / "english"


@dataclass(kw_only=True)
class Prompts(FlagGroup):
    """Write the authors' prompts, which their imitation rows contain, as a prompt file.

    Their file is downloaded code and may import packages that are not installed, so it is parsed, never run.
    """

    release: str = flag("the authors' utils.py, which defines their prompts")
    output: str = flag("prompt file to write")

    def run(self) -> None:
        statements = ast.parse(read_text(self.release), self.release).body
        assignments = [statement for statement in statements if isinstance(statement, ast.Assign)]
        values = {ast.unparse(assignment.targets[0]): assignment.value for assignment in assignments}
        rules = ast.literal_eval(values["GAME_RULE_PROMPTS"])
        instructions = ast.literal_eval(values["PLAYER_INSTRUCT_PROMPTS"])
        of_roles = {f"{role}_instruction": text for role, text in instructions.items()}
        write_json(self.output, {RULES: rules} | of_roles)
        load_templates(self.output, load_game())  # UserError for texts that are not prompts of this game


@dataclass(kw_only=True)
class Split(FlagGroup):
    """Hold out randomly drawn words. Both lists keep the input's order, without duplicates (ignoring case).

    So no word is in both lists, but only the spelling is compared: "apples" may be played and "apple" held out. The
    order is kept because data/target_words.txt lists the most frequent words first.
    """

    input: str = flag("word list, one word per line")
    output: str = flag("file for the remaining words")
    held_out: str = flag("file for the held-out words")
    # Points per word lie in [0, 1], so with 500 words their mean has a standard error below 0.023.
    number: int = flag("number of held-out words", default=500, at_least=1)
    seed: int = flag("seed of the draw", default=0)

    def run(self) -> None:
        words: dict[str, str] = {}
        for word in read_words(self.input):
            words.setdefault(" ".join(unicodedata.normalize("NFKC", word).casefold().split()), word)
        if self.number >= len(words):
            raise UserError(f"number is {self.number}; {self.input} has {len(words)} words, and some must remain")
        drawn = set(random.Random(self.seed).sample(list(words.values()), self.number))
        write_words(self.held_out, [word for word in words.values() if word in drawn])
        write_words(self.output, [word for word in words.values() if word not in drawn])


@dataclass(kw_only=True)
class Imitation(FlagGroup):
    """Divide games by their `split`: played, tuning or held_out. Writes each split's words and the games to imitate.

    The default is the games that come with this project. In games of your own, a word that data/imitation_games.jsonl
    also has must have the same split as there; otherwise it appears in two lists.
    """

    output_dir: str = flag("folder to write to")
    games: str = flag("games to imitate, each with a field `split`", default=str(GAMES))

    def run(self) -> None:
        folder = Path(self.output_dir)
        games = read_json_or_jsonl(self.games)
        # The lists always include the words of our games, because data/english has too few held-out words.
        listed = games + read_json_or_jsonl(GAMES)
        for split in ("played", "tuning", "held_out"):
            words = dict.fromkeys(game["target_word"] for game in listed if game["split"] == split)
            write_words(folder / f"{split}.txt", words)
        # Games of the other splits never become rows, so that matches and belief can be measured on their words.
        write_records(folder / "games.jsonl", [game for game in games if game["split"] == "played"])


@dataclass(kw_only=True)
class English(FlagGroup):
    """Make the word lists, imitation rows and SFT rows for configs/english.toml from the plain games.

    The SFT rows are imitation rows, not Alpaca's. To use another model, name it here and in configs/english.toml.
    """

    model: str = flag("model whose chat template the rows use")
    output_dir: str = flag("folder to write to")

    def run(self) -> None:
        Imitation(output_dir=self.output_dir, games=str(ENGLISH / "plain_games.jsonl")).run()
        folder = Path(self.output_dir)
        prompts = ROOT / "configs/prompts/english.json"
        rows = folder / "imitation.json"
        anchor = folder / "anchor.json"
        argv = ["--input_data_path", folder / "games.jsonl", "--messages", "all", "--output_data_path", rows]
        argv += ["--prompt_templates", prompts, "--training_prompt", "play"]
        run_python(ROOT / "tools/assign_rewards.py", *argv, "--chat_template", True, "--tokenizer", self.model)
        run_python(ROOT / "tools/controls.py", "draw", "--rows", rows, "--number", 300, "--output", anchor)


def main() -> None:
    parse_command(Prompts, Split, Imitation, English, description=__doc__).run()


if __name__ == "__main__":
    run_program(main)
