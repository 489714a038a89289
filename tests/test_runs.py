"""How programs are started: by path from any folder, as modules, by a launcher. And what ranks tell each other."""

import json
import re
import subprocess
import sys

import pytest
from helpers import ENVIRONMENT, ROOT, TORCHRUN, Fork, finish, flags_of, run_ranks

PROGRAMS = sorted(
    path.relative_to(ROOT).with_suffix("")
    for path in (ROOT / "train.py", *ROOT.glob("tools/*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
PLAIN = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}


def run(*words, cwd=ROOT, status: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=PLAIN, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_prints_its_help_by_path_from_any_folder_and_as_a_module(program, tmp_path):
    by_path = run(ROOT / f"{program}.py", "--help", cwd=tmp_path).stdout
    as_a_module = finish(Fork(["-m", str(program).replace("/", "."), "--help"]))
    assert all(re.search("--|=", shown) for shown in (by_path, as_a_module))  # flags, or settings


def test_the_help_of_play_needs_no_torch():
    code = "import runpy, sys; sys.modules['torch'] = sys.modules['transformers'] = None; sys.argv[1:] = ['--help']; "
    printed = run("-c", code + "runpy.run_module('tools.play_llm_game', run_name='__main__')").stdout
    assert "--attacker_model_name_or_path" in printed


def test_a_missing_file_is_one_line_of_a_program_and_is_named_by_a_launch(tmp_path):
    flags = ("--input_data_path", "none.json", "--output_data_path", "rows.json")
    (line,) = run(ROOT / "tools/assign_rewards.py", *flags, cwd=tmp_path, status=2).stderr.splitlines()
    assert line.startswith("assign_rewards.py: error: ") and "none.json" in line
    values = {"attacker_model_name_or_path": "m", "defender_model_name_or_path": "m", "data_path": "none.txt"}
    flags = flags_of(values | {"output_dir": "out", "model_prefix": "m", "data_suffix": "w"})
    launcher = [*TORCHRUN[1:], "--nproc_per_node=2"]
    launched = run(*launcher, ROOT / "tools/play_llm_game.py", *flags, cwd=tmp_path, status=1)
    assert "error: [Errno 2] No such file or directory: 'none.txt'" in launched.stderr


RANK = """
import json, time, torch
from tools.common.errors import UserError
from tools.common.ranks import on_rank_0, rank
answers = []
for make in (lambda: rank(), lambda: open("nowhere"), lambda: time.sleep(1.5) or ["again"]):
    try:
        answers.append(on_rank_0(make))
    except UserError as error:
        answers.append(str(error))
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
print(json.dumps(answers))
torch.distributed.destroy_process_group()
"""


def test_all_ranks_get_the_answers_and_errors_of_rank_0_and_a_process_group_can_follow(tmp_path):
    (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
    printed = run_ranks([tmp_path / "rank.py"], cwd=tmp_path)
    answers = [json.loads(line) for line in printed.splitlines() if line.startswith("[0, ")]
    assert answers == [[0, "[Errno 2] No such file or directory: 'nowhere'", ["again"]]] * 2
