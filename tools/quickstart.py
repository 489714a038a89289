"""The quick start behind its environment: build the embedded world, run the loop on it, and say how to go on.

    QUICK=1 python -m tools.quickstart output=outputs/mine epochs=2

Arguments are settings of the loop (tools/run_spag.py), as in `bash tools/quickstart.sh`. The world always has the seed
0, and `seed` is that of the loop alone: so runs with other seeds have the same words and the same base model.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.common.errors import UserError
from tools.common.files import ROOT
from tools.common.programs import run_program
from tools.common.ranks import processes_of_cores
from tools.loop.settings import Loop, Settings, command_line, read_argument, read_loop
from tools.loop.stages import STOPPING, Stages, say

# The world and the loop of QUICK=1. Its model wins hardly a game, so it learns from all messages.
QUICK_WORLD = "--pretraining_facts 640 --imitation_rounds 1 --imitation_facts 100 --facts 50".split()
QUICK_LOOP = "epochs=1 max_words=40 games_per_word=1 global_batch=32".split()
QUICK_LOOP += "match.games_per_word=1 match.max_words=20 rewards.messages=all".split()

QUICK_NOTE = (
    "QUICK=1 shows only that every stage runs: its model has hardly learned to speak, so its points and warnings mean "
    "nothing. Without QUICK=1 the quick start trains one that plays."
)


def main() -> None:
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(__doc__.strip())
        return
    quick = os.environ.get("QUICK", "0") != "0"
    begin = time.monotonic()
    given: Settings = {"output": "outputs/quickstart_quick" if quick else "outputs/quickstart"}
    for argument in sys.argv[1:]:  # a wrong one is refused before the world is built
        given |= read_argument(argument)
    if not given["output"]:
        raise UserError("output= is empty; it names the folder of all results")
    output = str(given["output"])
    world = [sys.executable, "-m", "tools.lab.world.build", "--output_dir", output, *(QUICK_WORLD if quick else [])]
    Stages(output).run("world", world)
    words = [*settings(output), *(QUICK_LOOP if quick else []), *sys.argv[1:]]
    if status := run_loop(words):
        sys.exit(status)
    minutes, seconds = divmod(int(time.monotonic() - begin), 60)
    say(f"the quick start took {minutes} min {seconds} s; points against the imitation model after each epoch:")
    for line in last_lines(read_loop(words)):
        print(line)
    if quick:
        print(QUICK_NOTE)


def settings(output: str) -> list[str]:
    """The settings of the loop on the world in a folder."""
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


def run_loop(arguments: list[str]) -> int:
    """Run the loop, which is on the terminal and gets the signals that this program gets. Returns its exit status."""
    loop = subprocess.Popen([sys.executable, "-m", "tools.run_spag", *arguments])
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: loop.send_signal(number))
    return loop.wait()


def last_lines(loop: Loop) -> list[str]:
    """The points of each epoch, where the report is, and the command that plays against the newest model."""
    output = Path(loop.output)
    matches = sorted(output.glob("epoch*/eval/matches.txt"), key=lambda path: epoch_of(path.parents[1]))
    points = [path.read_text(encoding="utf-8").splitlines()[-1] for path in matches]
    report = output / "report.html"
    models = [output / "imitation" / "model"]
    models += sorted(output.glob("epoch*/model"), key=lambda path: epoch_of(path.parent))
    # The model hints at a word, the person has one guess.
    merged = models[-1] / "merged"  # where lora_rank is set, the folder itself has adapters alone
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
    shown = [f"report, to open in a browser: {report}"] if report.is_file() else []
    flags = shlex.join(command_line(play))
    return [*points, *shown, f"play against the newest model: .venv/bin/python -m tools.play_llm_game {flags}"]


def epoch_of(folder: Path) -> int:
    """The number in the name of an epoch's folder: as texts, epoch10 would come before epoch2."""
    return int(folder.name.removeprefix("epoch"))


if __name__ == "__main__":
    run_program(main)
