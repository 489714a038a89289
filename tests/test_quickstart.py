"""The quick start and the tests' script in a copy of the project, with a stand-in for Python that notes its calls."""

import os
import shutil
import subprocess

import pytest
from helpers import ROOT

from tools import play_llm_game
from tools.flags import parse_flags

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
COPIED = ("requirements.txt", "tests/requirements.txt", "tools/loop/common.sh", "tools/loop/environment.sh")
COPIED += ("tools/quickstart.sh", "tools/test.sh")
NEEDED = "bash sh env mkdir cp cat grep tail date sleep dirname wc tr sed sort".split()
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
    loop = '#!/bin/bash\necho "loop $PYTHON $*" >>"$CALLS"\n'
    for path, text in ({f"bin/{name}": text for name, text in STANDINS.items()} | {"tools/run_spag.sh": loop}).items():
        (tmp_path / path).write_text(text)
        os.chmod(tmp_path / path, 0o755)
    for folder in ("eval", "model"):
        (tmp_path / "out/epoch1" / folder).mkdir(parents=True)
    (tmp_path / "out/epoch1/eval/matches.txt").write_text("a table\nepoch1 against imitation: points 60%\n")
    (tmp_path / "out/report.html").touch()
    return tmp_path


@pytest.fixture
def run(project):
    def run(*words: str, script: str = "quickstart.sh", status: int = 0, **environment: str):
        """Run a script to its end with this status: what it printed, its calls, and what pip was asked for."""
        (project / "calls").write_text("")
        environment |= {"PATH": str(project / "bin"), "CALLS": str(project / "calls"), "OUTPUT": "out"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 60}
        done = subprocess.run(["bash", project / "tools" / script, *words], env=environment, **pipes)
        assert done.returncode == status, done.stdout
        calls = (project / "calls").read_text().splitlines()
        return done.stdout, calls, [call.split("--progress-bar off ")[1] for call in calls if "pip install" in call]

    return run


@pytest.mark.parametrize("quick", ["0", "1"])
def test_it_makes_the_environment_builds_the_world_runs_the_loop_and_shows_the_result(project, run, quick):
    printed, calls, installed = run("SEED=3", QUICK=quick)
    *_, report, to_play = printed.splitlines()
    assert "\nepoch1 against imitation: points 60%\n" in printed and "out/report.html" in report
    flags = parse_flags(play_llm_game.Flags, to_play.partition("play_llm_game ")[2].split(), description="")
    assert flags.attacker_model_name_or_path == "out/epoch1/model" and flags.data_path == "out/data/words.txt"
    assert installed == [FROM_CPU_INDEX, "-r .venv/requirements.txt"]
    requirements = (project / ".venv/requirements.txt").read_text()
    assert "transformers" in requirements and "deepspeed" not in requirements
    build, loop, questions = [call for call in calls if call.startswith(("loop", "-m tools"))]
    assert build.startswith("-m tools.tiny.build --output_dir out") and ("--facts" in build) == (quick == "1")
    models = "base=out/base imitation=out/imitation/model epoch1=out/epoch1/model"
    assert questions == f"-m tools.tiny.questions --models {models} --output_dir out"
    assert loop.startswith(
        f"loop {project}/.venv/bin/python configs/tiny.sh MODEL=out/base OUTPUT=out "
        "IMITATION_DATA=out/data/imitation.json SFT_DATA=out/data/facts.json WORDS=out/data/words.txt "
        "EVAL_WORDS=played=out/data/words.txt held_out=out/data/held_out.txt"
    )
    assert loop.endswith("SEED=3") and ("EPOCHS=1" in loop) == (quick == "1")
    (project / "my out").symlink_to("out")
    assert r" IMITATION_DATA=my\ out/data/imitation.json SFT_DATA=my out/data/" in " ".join(run("OUTPUT=my out")[1])


def test_without_match_and_report_it_still_says_how_to_play(project, run):
    for name in ("epoch1/eval/matches.txt", "report.html"):
        (project / "out" / name).unlink()
    printed = run("UNTIL=epoch1_train")[0]
    assert "report" not in printed and "play against it: " in printed.splitlines()[-1]


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
    assert "python3 is not Python 3.11 to 3.14; PYTHON=" in run(status=2, TOO_OLD="1")[0]
    printed = run(status=2, FAILING="pip install")[0]
    assert "ERROR: ResolutionImpossible" in printed and ".venv/quickstart.log" in printed.splitlines()[-1]
    _, calls, installed = run("-k", "collator", script="test.sh")  # the environment counts as unfinished
    assert installed == [FROM_CPU_INDEX, "-r tests/requirements.txt"]
    assert calls[-1].startswith("-m pytest ") and calls[-1].endswith(" -k collator")
