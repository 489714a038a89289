"""Make what runs start from: word lists, prompts, the games that come with this project.

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

from tools.common.files import ROOT, read_json_or_jsonl, read_text, read_words, write_json, write_records, write_words
from tools.common.flags import FlagGroup, flag, parse_command
from tools.common.programs import run_program, run_python
from tools.games import load_game
from tools.games.prompts import RULES, load_templates

GAMES = ROOT / "data" / "imitation_games.jsonl"
ENGLISH = ROOT / "data" / "english"


@dataclass(kw_only=True)
class Prompts(FlagGroup):
    """Write the authors' prompts, which their rows of imitation hold, as a prompt file. Their code is not run.

    The file is downloaded code, and may import what is not installed. So it is parsed, and only literals are taken.
    """

    release: str = flag("file of the authors' repository that defines their prompts: utils.py")
    output: str = flag("prompt file to write")

    def run(self) -> None:
        statements = ast.parse(read_text(self.release), self.release).body
        assignments = [statement for statement in statements if isinstance(statement, ast.Assign)]
        values = {ast.unparse(assignment.targets[0]): assignment.value for assignment in assignments}
        rules = ast.literal_eval(values["GAME_RULE_PROMPTS"])
        instructions = ast.literal_eval(values["PLAYER_INSTRUCT_PROMPTS"])
        of_roles = {f"{role}_instruction": text for role, text in instructions.items()}
        write_json(self.output, {RULES: rules} | of_roles)
        load_templates(self.output, load_game())  # UserError for texts that are no prompts of the game


@dataclass(kw_only=True)
class Split(FlagGroup):
    """Draw words to hold out. Both lists keep the order; a word that comes twice, in any case, is written once.

    So no word is in both lists, but only spelling is compared: "apples" may be played and "apple" held out. The order
    stays because in data/target_words.txt the most frequent words come first.
    """

    input: str = flag("word list, one word a line")
    output: str = flag("file to write for the remaining words")
    held_out: str = flag("file to write for the held-out words")
    # With 500 words the standard error of a match's points is below 0.023, because a word's points lie in [0, 1].
    number: int = flag("number of held-out words", default=500, at_least=1)
    seed: int = flag("seed of the draw", default=0)

    def run(self) -> None:
        words: dict[str, str] = {}
        for word in read_words(self.input):
            words.setdefault(" ".join(unicodedata.normalize("NFKC", word).casefold().split()), word)
        drawn = set(random.Random(self.seed).sample(list(words.values()), self.number))
        write_words(self.held_out, [word for word in words.values() if word in drawn])
        write_words(self.output, [word for word in words.values() if word not in drawn])


@dataclass(kw_only=True)
class Imitation(FlagGroup):
    """Divide the games that come with this project by their split: the words of each part, and games to imitate.

    Games of your own need the field `split`: played, tuning or held_out. Games with any other split are left out. A
    word that data/imitation_games.jsonl has too must have the same split as there, or it comes into two lists.
    """

    output_dir: str = flag("folder to write to")
    games: str = flag("file of games to imitate, each with its split", default=str(GAMES))

    def run(self) -> None:
        folder = Path(self.output_dir)
        games = read_json_or_jsonl(self.games)
        # The lists have the words of our games too, because the few games of data/english have few held-out words.
        listed = games + read_json_or_jsonl(GAMES)
        for split in ("played", "tuning", "held_out"):
            words = dict.fromkeys(game["target_word"] for game in listed if game["split"] == split)
            write_words(folder / f"{split}.txt", words)
        # Games about other words never become rows, so that matches and belief can be measured on these words.
        write_records(folder / "games.jsonl", [game for game in games if game["split"] == "played"])


@dataclass(kw_only=True)
class English(FlagGroup):
    """Make the word lists, rows of imitation and SFT rows of configs/english.toml, from the plain games.

    The SFT rows are rows of imitation, instead of Alpaca's. Another model must be named here and in
    configs/english.toml.
    """

    model: str = flag("the model, whose chat template the rows are in")
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
