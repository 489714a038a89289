"""The quick start and the tests' script in a copy of the project, with a stand-in for Python that notes its calls."""

import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT

# Stands in for Python, also as .venv/bin/python: makes no real environment, installs nothing, runs no program.
PYTHON = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
  *version_info*) exit "$TOO_OLD" ;;
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"$FAILING"*) echo "$SAYING"; exit 1 ;;
esac
"""
LOOP = '#!/bin/bash\necho "loop $PYTHON $*" >>"$CALLS"\n'
COPIED = ("requirements.txt", "tests/requirements.txt", "tools/loop/common.sh")
COPIED += ("tools/quickstart.sh", "tools/test.sh", "tools/loop/environment.sh")
NEEDED = "bash sh env mkdir cp cat grep tail touch date sleep dirname rm kill wc tr sed sort tput".split()
TORCH = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch"))
FROM_CPU_INDEX = f"--no-deps --index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 1 {TORCH}"
THE_REST = "-r .venv/requirements.txt"


class Project:
    """A copy of the scripts, on a machine whose programs are stand-ins."""

    def __init__(self, folder: Path):
        self.folder, self.calls_path, self.bin = folder / "checkout", folder / "calls", folder / "bin"
        for name in COPIED:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        self.bin.mkdir()
        for name in NEEDED:
            (self.bin / name).symlink_to(shutil.which(name))
        self.program("python3", PYTHON)
        self.program("uname", "#!/bin/sh\necho Linux\n")
        self.program("ruff", "#!/bin/sh\n")
        self.program("../checkout/tools/run_spag.sh", LOOP)
        self.environment = {"PATH": str(self.bin), "CALLS": str(self.calls_path), "HOME": str(folder)}
        self.environment |= {"TOO_OLD": "0", "FAILING": "nothing", "SAYING": ""}

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *flags: str, status: int = 0, script: str = "quickstart.sh", **environment: str) -> str:
        """Run it to its end with this status; what it printed."""
        self.calls_path.write_text("")
        command = ["bash", str(self.folder / "tools" / script), *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 60}
        done = subprocess.run(command, env=self.environment | environment, **pipes)
        assert done.returncode == status, done.stdout
        return done.stdout

    def calls(self) -> list[str]:
        return self.calls_path.read_text().splitlines()

    def installed(self) -> list[str]:
        """What pip was asked for, without the flags of each call."""
        return [call.split("--progress-bar off ")[1] for call in self.calls() if "pip install" in call]


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize("quick", ["0", "1"])
def test_it_makes_the_environment_builds_the_world_runs_the_loop_and_shows_the_result(project, quick):
    out = "outputs/quickstart" + "_quick" * (quick == "1")
    matches = project.folder / out / "epoch1/eval/matches.txt"
    matches.parent.mkdir(parents=True)
    matches.write_text("a table\nepoch1 against imitation: points 60%\n")
    printed = project.run("SEED=3", QUICK=quick)
    assert "\nepoch1 against imitation: points 60%\n" in printed and f"{out}/report.html" in printed.splitlines()[-1]
    assert project.installed() == [FROM_CPU_INDEX, THE_REST]
    requirements = (project.folder / ".venv/requirements.txt").read_text()
    assert "transformers" in requirements and "deepspeed" not in requirements
    build, loop, questions = [call for call in project.calls() if call.startswith(("loop", "-m tools"))]
    assert build.startswith(f"-m tools.tiny.build --output_dir {out}") and ("--facts" in build) == (quick == "1")
    assert questions == f"-m tools.tiny.questions --output_dir {out}"
    assert loop.startswith(
        f"loop {project.folder}/.venv/bin/python configs/tiny.sh MODEL={out}/base OUTPUT={out} "
        f"IMITATION_DATA={out}/data/imitation.json SFT_DATA={out}/data/facts.json WORDS={out}/data/words.txt "
        f"EVAL_WORDS=played={out}/data/words.txt held_out={out}/data/held_out.txt"
    )
    assert loop.endswith("SEED=3") and ("EPOCHS=1" in loop) == (quick == "1")


def test_run_again_it_installs_nothing_until_the_requirements_change(project):
    project.run()
    assert ".venv is up to date" in project.run() and project.installed() == []
    with open(project.folder / "requirements.txt", "a") as file:
        file.write("# more\n")
    project.run(OUTPUT="elsewhere")
    assert project.installed() == [FROM_CPU_INDEX, THE_REST] and project.calls()[-1].endswith("elsewhere")


def test_a_mac_and_a_machine_with_a_gpu_get_the_usual_build(project):
    project.program("uname", "#!/bin/sh\necho Darwin\n")
    project.run()
    assert project.installed() == [TORCH, THE_REST]
    shutil.rmtree(project.folder / ".venv")
    project.program("uname", "#!/bin/sh\necho Linux\n")
    project.run()
    project.program("nvidia-smi", "#!/bin/sh\n")  # the build for CPUs is no use beside a GPU
    project.run()
    assert project.installed() == [TORCH, THE_REST] and "-m venv --clear .venv" in project.calls()
    assert "\ndeepspeed" in (project.folder / ".venv/requirements.txt").read_text()  # which the loop may choose there
    project.run()
    assert project.installed() == []


def test_an_old_python_is_named_and_a_failing_pip_shows_what_it_said(project):
    assert "python3 is not Python 3.10 or newer; PYTHON=" in project.run(status=2, TOO_OLD="1")
    printed = project.run(status=2, FAILING="pip install", SAYING="ERROR: ResolutionImpossible")
    assert "ERROR: ResolutionImpossible" in printed and ".venv/quickstart.log" in printed.splitlines()[-1]
    project.run("-k", "collator", script="test.sh")  # the environment counts as unfinished
    assert project.installed() == [FROM_CPU_INDEX, "-r tests/requirements.txt"]
    assert project.calls()[-1].startswith("-m pytest ") and project.calls()[-1].endswith(" -k collator")
