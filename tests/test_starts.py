"""How programs are started: by path from any folder, with -m, without their environment, with errors on all ranks."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, TORCHRUN

PROGRAMS = sorted(
    path.relative_to(ROOT).with_suffix("")
    for path in (ROOT / "train.py", *ROOT.glob("tools/*.py"))
    if path.stem not in ("__init__", "tools")
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}


def start(*words, cwd=ROOT, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT | environment, capture_output=True, text=True)


NEEDS_NONE = ("assign_rewards", "check_loop", "prepare_data", "report")  # for their help


@pytest.mark.parametrize("program", [path for path in PROGRAMS if path.name not in NEEDS_NONE], ids=str)
def test_without_its_environment_a_program_says_in_one_line_what_to_do(program, tmp_path):
    by_path = start("-S", ROOT / f"{program}.py", "--help", cwd=tmp_path)  # -S: without what pip has installed
    as_module = start("-S", "-m", str(program).replace("/", "."), "--help")
    for done in (by_path, as_module):
        (line,) = done.stderr.splitlines() or [""]
        assert done.returncode == 2 and line.startswith(f"{program.name}.py: error: No module named '"), done.stderr
        assert line.endswith(f" for {sys.executable}; activate the environment: source .venv/bin/activate")


def test_a_package_that_is_needed_later_is_told_as_shortly(tmp_path):
    (tmp_path / "a.json").write_text(
        '[{"history": [{"role": "attacker", "content": "Hello."}], "target_word": "art", "max_turns": 5}]'
    )
    words = ("--input_data_path", "a.json", "--output_data_path", "rows.json")
    done = start("-S", ROOT / "tools/assign_rewards.py", *words, cwd=tmp_path)
    assert done.returncode == 2 and "source .venv/bin/activate" in done.stderr and "Traceback" not in done.stderr


def test_a_program_runs_by_its_path_from_any_folder(tmp_path):
    program, words = ROOT / "tools/assign_rewards.py", ("--input_data_path", "none.json", "--output_data_path", "x")
    for environment in ({}, {"PYTHONPATH": "."}, {"PYTHONPATH": str(ROOT)}):
        done = start(program, *words, cwd=tmp_path, **environment)
        assert (done.returncode, done.stderr) == (2, "assign_rewards.py: error: none.json: no such file\n")
    done = start("tools/assign_rewards.py", "--output_data_pth", "x", PYTHONPATH=".")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_an_error_of_all_ranks_is_told_once_before_the_launchers_report(tmp_path):
    words = ("--input_data_path", tmp_path / "none.json", "--output_data_path", tmp_path / "x")
    launcher = (*TORCHRUN[1:], "--nproc_per_node=3")
    done = start(*launcher, ROOT / "tools/assign_rewards.py", *words, cwd=tmp_path)
    ours = [number for number, line in enumerate(done.stderr.splitlines()) if "no such file" in line]
    assert len(ours) == 1 and done.returncode == 1
    reports = [number for number, line in enumerate(done.stderr.splitlines()) if "ChildFailedError" in line]
    assert reports and ours[0] < reports[0]
    wrong_flag = start(*launcher, "-m", "tools.assign_rewards", "--outputs", "x")
    assert wrong_flag.stderr.count("unknown flag --outputs") <= 1 and wrong_flag.stderr.count(": error: ") == 1


def test_a_rank_that_alone_fails_is_heard():
    code = "import utils; utils.RANK_0_FIRST = 0.1; utils.run_program(lambda: open('none'))"
    done = start("-c", code, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 2 and "No such file or directory: 'none'" in done.stderr


def test_data_that_is_put_there_is_no_part_of_the_project(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    theirs = ["data/all_target_words.txt", "data/train_imitation_gpt4.json", "data/played.txt", "outputs/x"]
    ours = [f"data/{name}" for name in ("README.md", "report.png", "target_words.txt", "tiny/lexicon.txt")]
    assert all((ROOT / name).is_file() for name in ours)
    done = subprocess.run(["git", "check-ignore", *theirs, *ours], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == theirs
