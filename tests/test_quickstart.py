"""The quick start and the tests' script in a copy of the project, with a stand-in for Python that notes its calls."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, call

from tools import play_llm_game
from tools import quickstart as program
from tools.common.flags import parse_flags
from tools.loop.settings import read_loop

# Stands in for Python, also as .venv/bin/python: makes no real environment, installs nothing, runs no program.
PYTHON = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
  *version_info*) exit "${TOO_OLD:-0}" ;;
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"${FAILING:-nothing}"*) echo "ERROR: ResolutionImpossible"; exit 1 ;;
esac
"""
STANDINS = {"python3": PYTHON, "ruff": "#!/bin/sh\n", "uname": "#!/bin/sh\necho Linux\n"}
COPIED = ("requirements.txt", "tests/requirements.txt", "tools/environment.sh", "tools/quickstart.sh", "tools/test.sh")
NEEDED = "bash sh env mkdir cp cat grep tail date dirname sed".split()
TORCH = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch"))
FROM_CPU_INDEX = f"--no-deps --index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 1 {TORCH}"


@pytest.fixture
def project(tmp_path):
    """A copy of the scripts, on a machine whose programs are stand-ins."""
    for name in COPIED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name in NEEDED:
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    for name, text in STANDINS.items():
        (tmp_path / "bin" / name).write_text(text)
        os.chmod(tmp_path / "bin" / name, 0o755)
    return tmp_path


@pytest.fixture
def run(project):
    def run(*words: str, script: str = "quickstart.sh", status: int = 0, **environment: str):
        """Run a script to its end with this status: what it printed, its calls, and what pip was asked for."""
        (project / "calls").write_text("")
        environment |= {"PATH": str(project / "bin"), "CALLS": str(project / "calls")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 60}
        done = subprocess.run(["bash", project / "tools" / script, *words], env=environment, **pipes)
        assert done.returncode == status, done.stdout
        calls = (project / "calls").read_text().splitlines()
        return done.stdout, calls, [call.split("--progress-bar off ")[1] for call in calls if "pip install" in call]

    return run


def test_it_makes_the_environment_and_hands_over_to_python(project, run):
    _, calls, installed = run("seed=3", "output=my out")
    assert installed == [FROM_CPU_INDEX, "-r .venv/requirements.txt"]
    requirements = (project / ".venv/requirements.txt").read_text()
    assert "transformers" in requirements and "deepspeed" not in requirements
    assert calls[-1] == "-m tools.quickstart seed=3 output=my out"


@pytest.fixture
def quickstart(tmp_path, monkeypatch):
    """Run quickstart.py with stand-ins for the world and the loop: what it prints, and the words of both."""
    calls = []

    class Stages:
        def __init__(self, output: str):
            pass

        def run(self, name: str, command: list[str]) -> None:
            calls.append(command)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "Stages", Stages)
    monkeypatch.setattr(program.run_spag, "main", lambda: calls.append(sys.argv[1:]))
    return lambda *words: (call(program.main, *words).output, *calls)


@pytest.mark.parametrize("quick", ["0", "1"])
def test_it_builds_the_world_runs_the_loop_and_shows_the_result(quickstart, tmp_path, monkeypatch, quick):
    monkeypatch.setenv("QUICK", quick)
    output = tmp_path / "my out"
    (output / "epoch1/eval").mkdir(parents=True)
    (output / "epoch1/model").mkdir()
    (output / "epoch1/eval/matches.txt").write_text("a table\nepoch1 against imitation: points 60%\n")
    (output / "report.html").touch()
    printed, build, words = quickstart("output=my out", "seed=3")
    lines = printed.splitlines()
    assert ("QUICK=1 only shows" in lines[-1]) == (quick == "1")
    *_, points, report, to_play = lines[:-1] if quick == "1" else lines
    assert points == "epoch1 against imitation: points 60%" and "my out/report.html" in report
    command = shlex.split(to_play.partition("play_llm_game ")[2])
    flags = parse_flags(play_llm_game.Flags, command, description="")
    assert (flags.max_turns, flags.max_length, flags.temperature) == (3, 160, 1.0)  # as in configs/tiny.toml
    assert flags.attacker_model_name_or_path == "my out/epoch1/model" and flags.data_path == "my out/data/words.txt"
    assert build[1:5] == ["-m", "tools.lab.world.build", "--output_dir", "my out"]
    assert ("--facts" in build) == (quick == "1")
    loop = read_loop(words)
    assert (loop.model, loop.output, loop.seed) == ("my out/base", "my out", 3)
    assert loop.tables["imitation"]["train_data_path"] == "my out/data/imitation.json"
    assert loop.tables["match"]["words"] == ["played=my out/data/words.txt", "held_out=my out/data/held_out.txt"]
    assert loop.epochs == (1 if quick == "1" else 3)


def test_help_is_printed_and_nothing_is_built(quickstart):
    printed, *calls = quickstart("--help")
    assert "python -m tools.quickstart" in printed and not calls


def test_a_wrong_setting_is_refused_before_the_world_is_built(quickstart, capsys):
    with pytest.raises(AssertionError, match="ended with 2: .*did you mean epochs"):
        quickstart("epohcs=2")


def test_without_match_and_report_it_still_says_how_to_play(quickstart, tmp_path):
    (tmp_path / "outputs/quickstart/imitation/model").mkdir(parents=True)
    printed, *_ = quickstart("until=imitation")
    assert "report" not in printed and "outputs/quickstart/imitation/model " in printed.splitlines()[-1]
    (tmp_path / "outputs/quickstart/imitation/model/merged").mkdir()  # of adapters
    printed, *_ = quickstart("until=imitation", "lora_rank=4")
    assert "outputs/quickstart/imitation/model/merged " in printed.splitlines()[-1]


def test_run_again_it_installs_nothing_until_the_requirements_change(project, run):
    run()
    assert run()[2] == []
    with open(project / "requirements.txt", "a") as file:
        file.write("# more\n")
    assert run()[2] == [FROM_CPU_INDEX, "-r .venv/requirements.txt"]


@pytest.mark.parametrize("program, text", [("uname", "#!/bin/sh\necho Darwin\n"), ("nvidia-smi", "#!/bin/sh\n")])
def test_a_mac_and_a_machine_with_a_gpu_get_the_usual_build(project, run, program, text):
    (project / "bin" / program).write_text(text)
    os.chmod(project / "bin" / program, 0o755)
    assert run()[2] == ["-r .venv/requirements.txt"]
    assert ("\ndeepspeed" in (project / ".venv/requirements.txt").read_text()) == (program == "nvidia-smi")


def test_an_old_python_is_named_and_a_failing_pip_shows_what_it_said(run):
    assert "python3 is not Python 3.11 to 3.14; set PYTHON=" in run(status=2, TOO_OLD="1")[0]
    printed = run(status=2, FAILING="pip install")[0]
    assert "ERROR: ResolutionImpossible" in printed and ".venv/quickstart.log" in printed.splitlines()[-1]
    _, calls, installed = run("-k", "collator", script="test.sh")  # the environment counts as unfinished
    assert installed == [FROM_CPU_INDEX, "-r tests/requirements.txt"]
    assert calls[-1].startswith("-m pytest ") and calls[-1].endswith(" -k collator")
