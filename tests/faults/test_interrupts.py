"""Ctrl-C ends a program with one line that says what is kept, and with status 130."""

import os
import re
import signal

import pytest
from helpers import ROOT, TORCHRUN, Fork, finish, flags_of, start, wait_for
from programs import program_flags, write_inputs

GAMES = "rerun the same command to play the others"
# Program, its file, what tells that it is at work (in its output folder), what the line must say, and whether torchrun
# starts it.
PROGRAMS = [
    ("play", "tools/play_llm_game.py", "*_rank0.jsonl", GAMES, False),
    ("matches", "tools/evaluate_games.py", "*_rank0.jsonl", GAMES, False),
    ("training", "train.py", "checkpoint-*/complete", "rerun the same command to continue", False),
    ("training", "train.py", "checkpoint-*/complete", "rerun the same command to continue", True),
]
LONGER = {"play": {}, "matches": {"games_per_word": 2}, "training": {"num_train_epochs": 50}}


@pytest.mark.parametrize("name, file, at_work, kept, by_torchrun", PROGRAMS)
def test_ctrl_c_is_one_line_and_no_traceback(
    tmp_path, tiny_model, other_model, name, file, at_work, kept, by_torchrun
):
    folder = write_inputs(tmp_path, games=1)
    (folder / "words.txt").write_text("\n".join(f"word{number}" for number in range(2000)))
    flags = program_flags(folder, tiny_model, other_model)[name] | {"output_dir": folder / "out"} | LONGER[name]
    words = [file, *flags_of(flags)]
    process = start([*TORCHRUN, "--nproc_per_node=2", *words]) if by_torchrun else Fork(words)
    assert wait_for(lambda: any((folder / "out").glob(at_work)), process)
    os.killpg(process.pid, signal.SIGINT)
    printed = finish(process, status=None if by_torchrun else 130)
    assert process.returncode  # torchrun's status is its own: 1, or SIGABRT where its threads outlive its main one
    ours = [line for line in printed.splitlines() if ": stopped; " in line]
    assert len(ours) == 1 and kept in ours[0]
    assert by_torchrun or "Traceback" not in printed  # torchrun writes one of its own
    assert not re.search(rf'File "{re.escape(str(ROOT))}/(?!\.venv)', printed)


def test_ctrl_c_ends_a_program_that_begins_again(tmp_path, tiny_model, other_model):
    flags = program_flags(write_inputs(tmp_path, games=100_000), tiny_model, other_model)["rewards"]
    flags |= {"output_data_path": tmp_path / "r.json"}
    process = Fork(["tools/assign_rewards.py", *flags_of(flags)])
    assert wait_for((tmp_path / "r.json_rewards_settings.json").is_file, process)
    os.killpg(process.pid, signal.SIGINT)
    printed = finish(process, status=130)
    assert printed.splitlines()[-1].endswith("stopped; nothing is half done; rerun the same command")
    assert "Traceback" not in printed and not (tmp_path / "r.json").exists()
