"""The quick start inside its environment: build the toy world, run the loop on it, and print what to try next.

    QUICK=1 python -m tools.quickstart output=outputs/mine epochs=2

Arguments are settings of the loop. `seed` applies to the loop only; the world is always built with seed 0, so runs
with different seeds share the words and the base model.
"""

import json
import os
import shlex
import sys
import time
from pathlib import Path

from tools import run_spag
from tools.common.errors import UserError
from tools.common.files import ROOT
from tools.common.programs import run_program
from tools.common.ranks import processes_of_cores
from tools.loop.settings import Loop, Settings, command_line, read_argument, read_loop
from tools.loop.stages import Stages, say

# The world and the loop of QUICK=1. Its model hardly ever wins, so it learns from all messages, not only winners'.
QUICK_WORLD = "--pretraining_facts 640 --imitation_rounds 1 --imitation_facts 100 --facts 50".split()
QUICK_LOOP = "epochs=1 max_words=40 games_per_word=1 global_batch=32".split()
QUICK_LOOP += "match.games_per_word=1 match.max_words=20 rewards.messages=all".split()

QUICK_NOTE = (
    "QUICK=1 only shows that every stage runs. Its model has barely learned to speak, so its points and warnings mean "
    "nothing; without QUICK=1 the quick start trains a model that can play."
)


def main() -> None:
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(__doc__.strip())
        return
    quick = os.environ.get("QUICK", "0") != "0"
    begin = time.monotonic()
    given: Settings = {"output": "outputs/quickstart_quick" if quick else "outputs/quickstart"}
    for argument in sys.argv[1:]:  # refuse wrong ones before building the world
        given |= read_argument(argument)
    if not given["output"]:
        raise UserError("output= is empty; it must name the folder for all results")
    output = str(given["output"])
    world = [sys.executable, "-m", "tools.lab.world.build", "--output_dir", output, *(QUICK_WORLD if quick else [])]
    Stages(output).run("world", world)
    sys.argv[1:] = [*settings(output), *(QUICK_LOOP if quick else []), *sys.argv[1:]]
    run_spag.main()
    minutes, seconds = divmod(int(time.monotonic() - begin), 60)
    say(f"the quick start took {minutes} min {seconds} s; points against the imitation model, by epoch:")
    for line in last_lines(read_loop(sys.argv[1:])):
        print(line)
    if quick:
        print(QUICK_NOTE)


def settings(output: str) -> list[str]:
    """The loop's settings for the world in `output`."""
    data = f"{output}/data"
    lists = [f"played={data}/words.txt", f"held_out={data}/held_out.txt"]
    return [
        str(ROOT / "configs" / "tiny.toml"),
        f"processes={processes_of_cores()}",
        f"model={output}/base",
        f"output={output}",
        f"words={data}/words.txt",
        f"imitation.train_data_path={data}/imitation.json",
        f"rewards.sft_data_path={data}/facts.json",
        f"match.words={json.dumps(lists, ensure_ascii=False)}",
    ]


def last_lines(loop: Loop) -> list[str]:
    """Points by epoch, the report's path, and the command to play against the newest model."""
    output = Path(loop.output)
    matches = sorted(output.glob("epoch*/eval/matches.txt"), key=lambda path: epoch_of(path.parents[1]))
    points = [path.read_text(encoding="utf-8").splitlines()[-1] for path in matches]
    report = output / "report.html"
    models = [output / "imitation" / "model"]
    models += sorted(output.glob("epoch*/model"), key=lambda path: epoch_of(path.parent))
    # The model attacks; the person, as the defender, has one guess.
    merged = models[-1] / "merged"  # with LoRA the folder itself holds only the adapters
    names = ("prompt_templates", "max_turns", "max_length", "max_new_tokens", "temperature")
    play = {
        "attacker_model_name_or_path": merged if merged.is_dir() else models[-1],
        "defender_model_name_or_path": "human",
        "data_path": loop.words,
        **{name: loop.tables["play"][name] for name in names},
        "output_dir": output / "me",
        "model_prefix": "me",
        "data_suffix": "words",
    }
    shown = [f"report (open it in a browser): {report}"] if report.is_file() else []
    flags = shlex.join(command_line(play))
    return [*points, *shown, f"play against the newest model: .venv/bin/python -m tools.play_llm_game {flags}"]


def epoch_of(folder: Path) -> int:
    """The epoch in a folder's name, as a number, because "epoch10" sorts before "epoch2"."""
    return int(folder.name.removeprefix("epoch"))


if __name__ == "__main__":
    run_program(main)
