"""A program is started twice: one start works, the other is refused, and the results are complete."""

import random
import shutil
import subprocess
import sys
import time

import pytest
from helpers import TIMEOUT, start
from programs import programs

MODULES = {"assign_rewards": "tools.assign_rewards", "play": "tools.play_llm_game"}
MODULES |= {"matches": "tools.evaluate_games", "train": "train"}
HOLDER = "import sys, utils; [utils.lock(path) for path in sys.argv[1:]]; print('locked', flush=True); input()"


@pytest.mark.parametrize("name", MODULES)
def test_a_start_beside_a_run_is_refused_and_writes_nothing(name, inputs, tmp_path):
    """Another process holds the locks that the program left in an earlier run."""
    assert programs(inputs, tmp_path / "earlier")[name].run().status == 0
    locks = [path.relative_to(tmp_path / "earlier") for path in (tmp_path / "earlier").rglob(".*.lock")]
    assert locks
    output = tmp_path / "out"
    holder = start([sys.executable, "-c", HOLDER, *(output / path for path in locks)], stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "locked\n"
    refused = programs(inputs, output)[name].run()
    assert refused.status == 2 and "another process is writing to this run" in refused.errors
    assert sorted(path.relative_to(output) for path in output.rglob("*") if path.is_file()) == sorted(locks)
    holder.communicate("")
    assert programs(inputs, output)[name].run().status == 0


@pytest.mark.parametrize("name", MODULES)
def test_two_starts_at_once(name, inputs, tmp_path, trials):
    output = tmp_path / "out"
    program = programs(inputs, output)[name]
    command = [sys.executable, "-m", MODULES[name], *program.words()]
    results: list[bytes] = []

    def trial(rng: random.Random) -> None:
        if not results:
            assert program.run().status == 0
            results.append((output / program.result).read_bytes())
        shutil.rmtree(output)
        first = start(command)
        time.sleep(rng.choice([0, rng.uniform(0, 8)]))
        processes = [first, start(command)]
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
        statuses = [process.returncode for process in processes]
        assert 0 in statuses and set(statuses) <= {0, 2} and "Traceback" not in "".join(printed), printed
        for status, text in zip(statuses, printed, strict=True):
            assert status == 0 or "another process is writing to this run" in text, text
        assert (output / program.result).read_bytes() == results[0]

    trials.run("two starts at once", trial, short=1 if name == "assign_rewards" else 0)
