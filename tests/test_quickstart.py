"""The quick start with an interpreter that only notes what it is asked to do, in a copy of the scripts."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT

from tools.engine import model as models
from tools.reasoning.jobs import HARNESS_VERSION

# Stands in for Python, also as .venv/bin/python: makes no real environment, installs nothing, runs no program.
PYTHON = r"""#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
  *version_info\[*) echo "${VERSION#3.}" ;;
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"$FAILING"*) echo "$SAYING"; exit 1 ;;
esac
"""
LOOP = '#!/bin/bash\necho "loop $PYTHON $*" >>"$CALLS"\nsleep "$LOOP_SECONDS"\n'


COPIED = ("requirements.txt", "tests/requirements.txt", "tools/loop/run.sh")
COPIED += ("tools/quickstart.sh", "tools/test.sh", "tools/loop/environment.sh")


class Start:
    """tools/quickstart.sh in a folder of its own, with stubs for all that it runs."""

    def __init__(self, folder: Path):
        self.folder, self.calls_path = folder / "checkout", folder / "calls"
        (self.folder / "tools/loop").mkdir(parents=True)
        (self.folder / "tests").mkdir()
        for name in COPIED:
            shutil.copy(ROOT / name, self.folder / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.program("python3", PYTHON)
        self.program("uname", "#!/bin/sh\necho Linux\n")
        self.program("../checkout/tools/run_spag.sh", LOOP)
        for name in ("bash", "sh", "env", "mkdir", "cp", "cat", "grep", "tail", "tr", "cksum", "date", "sleep"):
            (self.bin / name).symlink_to(shutil.which(name))
        for name in ("dirname", "basename", "rm", "kill"):
            (self.bin / name).symlink_to(shutil.which(name))
        self.environment = {"PATH": str(self.bin), "CALLS": str(self.calls_path), "VERSION": "3.12"}
        self.environment |= {"LOOP_SECONDS": "0", "FAILING": "nothing", "HOME": str(folder)}

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *flags: str, script: str = "quickstart.sh", **environment: str) -> subprocess.Popen:
        self.calls_path.write_text("")
        return subprocess.Popen(
            ["bash", str(self.folder / "tools" / script), *flags],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *flags: str, **environment: str) -> tuple[int, str, str]:
        """(exit status, output, errors)."""
        process = self.start(*flags, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        return self.calls_path.read_text().splitlines()

    def installed(self) -> list[str]:
        """What pip was asked for, without the settings that are the same each time."""
        calls = [call for call in self.calls() if "pip install" in call]
        return [call.split("--progress-bar off ")[1] for call in calls]


@pytest.fixture
def start(tmp_path) -> Start:
    return Start(tmp_path)


TORCH = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch"))
FROM_CPU_INDEX = f"--no-deps --index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 1 {TORCH}"
SMALL = "--pretraining_facts 640 --imitation_rounds 1 --imitation_facts 100 --facts 50"
THE_REST = f"-r .venv/requirements.txt matplotlib>=3.10,<4 lm-eval=={HARNESS_VERSION}"


def test_it_makes_the_environment_builds_the_world_runs_the_loop_and_shows_the_result(start):
    status, out, err = start.run("--seed", "3")
    assert status == 0, err
    assert start.installed() == [FROM_CPU_INDEX, THE_REST]
    requirements = (start.folder / ".venv" / "requirements.txt").read_text()
    assert "transformers" in requirements and "deepspeed" not in requirements
    build, loop, reason, show = start.calls()[-4:]
    assert build == "-m tools.tiny_world build --output_dir outputs/quickstart"
    assert reason == "-m tools.tiny_world reason --output_dir outputs/quickstart"
    assert show == "-m tools.tiny_world show --output_dir outputs/quickstart"
    assert loop == (
        f"loop {start.folder}/.venv/bin/python --settings configs/tiny.sh --model outputs/quickstart/base "
        "--output outputs/quickstart --imitation_data outputs/quickstart/data/imitation.json "
        "--sft_data outputs/quickstart/data/facts.json --words outputs/quickstart/data/words.txt --eval_words "
        "played=outputs/quickstart/data/words.txt held_out=outputs/quickstart/data/held_out.txt --seed 3"
    )
    assert "all of it took 0 min " in out


def test_run_again_it_installs_nothing_until_the_requirements_change(start):
    assert start.run()[0] == 0
    status, out, _ = start.run()
    assert status == 0 and start.installed() == [] and ".venv is up to date" in out
    with open(start.folder / "requirements.txt", "a") as file:
        file.write("# more\n")
    assert start.run()[0] == 0 and start.installed() == [FROM_CPU_INDEX, THE_REST]


def test_quick_is_a_smaller_run_in_a_folder_of_its_own(start):
    assert start.run(QUICK="1")[0] == 0
    build, loop, _, show = start.calls()[-4:]
    assert build == "-m tools.tiny_world build --output_dir outputs/quickstart_quick " + SMALL
    assert "--epochs 1 " in loop and show == "-m tools.tiny_world show --output_dir outputs/quickstart_quick"
    assert start.run(OUTPUT="elsewhere")[0] == 0 and start.calls()[-1].endswith("show --output_dir elsewhere")


def test_the_tests_get_the_same_torch_and_their_own_requirements(start):
    for name in ("ruff", "mypy"):
        start.program(name, "#!/bin/sh\n")
    status, out, err = start.run("-k", "collator", script="test.sh")
    assert status == 0, err
    assert start.installed() == [FROM_CPU_INDEX, "-r tests/requirements.txt"]
    assert start.calls()[-1] == "-m pytest -n 2 --dist loadfile --no-loadscope-reorder -k collator"
    assert start.run(script="test.sh")[0] == 0 and start.installed() == []
    assert start.run()[0] == 0 and start.installed() == [FROM_CPU_INDEX, THE_REST]


def test_a_gpu_and_a_mac_get_the_usual_build(start):
    start.program("nvidia-smi", "#!/bin/sh\n")
    assert start.run()[0] == 0 and start.installed() == [TORCH, THE_REST]
    assert "\ndeepspeed" in (start.folder / ".venv/requirements.txt").read_text()  # which the loop may choose there
    (start.bin / "nvidia-smi").unlink()
    shutil.rmtree(start.folder / ".venv")
    start.program("uname", "#!/bin/sh\necho Darwin\n")
    assert start.run()[0] == 0 and start.installed() == [TORCH, THE_REST]


def test_an_environment_made_without_a_gpu_is_made_anew_beside_one(start):
    assert start.run()[0] == 0
    start.program("nvidia-smi", "#!/bin/sh\n")
    status, out, _ = start.run()
    assert status == 0 and "made where there was no GPU" in out and start.installed() == [TORCH, THE_REST]
    assert "-m venv --clear .venv" in start.calls()
    assert start.run()[0] == 0 and start.installed() == []


def test_without_the_cpu_index_the_usual_build_is_taken(start):
    status, out, _ = start.run(FAILING="download.pytorch.org")
    assert status == 0 and start.installed() == [FROM_CPU_INDEX, TORCH, THE_REST]
    assert "no CPU build of PyTorch from https://download.pytorch.org/whl/cpu" in out


def test_an_old_python_is_named(start):
    status, _, err = start.run(VERSION="3.9")
    assert status == 1 and not (start.folder / ".venv").exists()
    tried = "python3 python3.13 python3.12 python3.11 python3.10"
    message = "quickstart.sh: needs Python 3.10 or newer, which none of these is: {}. PYTHON=/path/to/python names "
    assert err == f"{message.format(tried)}another\n"
    status, _, err = start.run(PYTHON="/none/python")
    assert status == 1 and err == f"{message.format('/none/python')}another\n"


@pytest.mark.parametrize("version, taken", [("9", "python3.12"), ("15", "python3.12"), ("11", "python3")])
def test_a_python_that_torch_has_builds_for_is_preferred(start, version, taken):
    for name, number in (("python3", version), ("python3.12", "12")):
        text = PYTHON.replace('echo "${VERSION#3.}"', f"echo {number}")
        start.program(name, text.replace('  *"-m venv', f'  *"-m venv"*) echo {name} >.venv_by ;;&\n  *"-m venv'))
    status, _, err = start.run()
    assert status == 0, err
    assert (start.folder / ".venv_by").read_text() == f"{taken}\n"


def test_a_python_newer_than_those_is_taken_where_it_is_the_only_one_or_named(start):
    assert start.run(VERSION="3.15")[0] == 0
    shutil.rmtree(start.folder / ".venv")
    start.program("python3.12", "#!/bin/sh\nexit 1\n")
    (start.bin / "my pythons").mkdir()
    start.program("my pythons/python", PYTHON)
    status, _, err = start.run(VERSION="3.15", PYTHON=str(start.bin / "my pythons" / "python"))
    assert status == 0, err


def test_a_blank_in_the_output_folder_is_refused(start):
    status, _, err = start.run(OUTPUT="my results")
    assert (status, err) == (1, "quickstart.sh: OUTPUT 'my results' holds a blank; name a folder without\n")
    assert start.calls() == []


def test_an_environment_that_was_left_half_made_is_made_anew(start):
    broken = start.folder / ".venv" / "bin" / "python"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/bash\necho No module named pip >&2\nexit 1\n")  # without python3-venv, on Debian
    broken.chmod(0o755)
    status, _, err = start.run()
    assert status == 0, err
    assert "-m venv --clear .venv" in start.calls()
    assert start.run(VERSION="3.12")[0] == 0 and not any("-m venv" in call for call in start.calls())
    status, _, err = start.run(FAILING="-m venv")
    assert status == 0


@pytest.mark.parametrize("saying", ["NewConnectionError: Name or service not known", "ERROR: ResolutionImpossible"])
def test_a_failing_pip_shows_what_it_said_and_names_its_log(start, saying):
    status, _, err = start.run(FAILING="pip install", SAYING=saying)
    log = start.folder / ".venv/quickstart.log"
    assert status == 1 and saying in err
    assert err.splitlines()[-1] == f"quickstart.sh: pip could not install the requirements; its log: {log}"
    assert start.run()[0] == 0 and start.installed()  # the environment counts as unfinished


def test_a_failing_world_or_loop_ends_it(start):
    status, out, _ = start.run(FAILING="tiny_world build", SAYING="no lexicon")
    assert status == 1 and "no lexicon" in out and not start.calls()[-1].startswith("loop")
    start.program("../checkout/tools/run_spag.sh", "#!/bin/sh\nexit 3\n")
    assert start.run()[0] == 3 and "show" not in start.calls()[-1]


def living(group: int) -> list[str]:
    """Command lines of the processes of a group; those that have ended may wait as zombies for somebody to ask."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def test_a_signal_ends_the_loop_too(start):
    process = start.start(LOOP_SECONDS="60")
    deadline = time.monotonic() + 30
    while not start.calls() or not start.calls()[-1].startswith("loop"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143 and time.monotonic() - started < 20
    assert living(process.pid) == []  # nor is the stub's sleep left


def test_a_signal_while_the_world_is_built_ends_what_the_build_has_started(start):
    build = '*"tiny_world build"*) sleep 60 & echo $! >"$CALLS.started"; wait ;;\n  *"-m venv'
    start.program("python3", PYTHON.replace('*"-m venv', build))
    process = start.start()
    started_path = Path(f"{start.calls_path}.started")
    deadline = time.monotonic() + 30
    while not started_path.exists() or not started_path.read_text().strip():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143 and "quickstart.sh: stopped; the same command continues" in err
    assert living(process.pid) == []


def test_apples_gpu_plays_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert models.own_device() == torch.device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert models.own_device() == torch.device("cpu")
