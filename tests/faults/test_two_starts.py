"""Every program started twice at once into one place: one works, the other is refused or finds all there."""

import random
import shutil
import time

import pytest
from forks import python
from programs import Inputs
from trials import TIMEOUT, flags_of, start

COMMANDS = {
    "assign_rewards": ["tools.assign_rewards", "rows.json"],
    "imitation": ["tools.prepare_data", "rows.json"],
    "report": ["tools.report", "report.html"],
    "play_llm_game": ["tools.play_llm_game", "m_sampling_w_results.json"],
    "evaluate_games": ["tools.evaluate_games", "games_results.json"],
    "train": ["train", "model.safetensors"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_two_starts_at_once(name, tmp_path, tiny_model, other_model, trials):
    (tmp_path / "in").mkdir()
    inputs = Inputs(tmp_path / "in", tiny_model, other_model)
    module, result = COMMANDS[name]
    output = tmp_path / "out"
    _, _, command, flags = inputs.programs(output)[name]
    if "top_k" not in flags and "max_turns" in flags:
        flags["top_k"] = 1
    command = [python(), "-m", module, *command, *flags_of(flags)]

    def outcome(*delays: float) -> bytes:
        shutil.rmtree(output, ignore_errors=True)
        processes = []
        for delay in delays:
            time.sleep(delay)
            processes.append(start(command))
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
        statuses = [process.returncode for process in processes]
        assert 0 in statuses and set(statuses) <= {0, 2} and "Traceback" not in "".join(printed), printed
        for status, text in zip(statuses, printed, strict=True):
            assert status == 0 or "another process is writing to this run" in text, text
        return (output / result).read_bytes()

    def trial(rng: random.Random) -> None:
        assert outcome(0, rng.choice([0, rng.uniform(0, 1)])) == alone()

    def alone() -> bytes:
        if not results:
            results.append(outcome(0))
        return results[0]

    results: list[bytes] = []
    trials.run("two starts at once", trial, short=1 if name in ("assign_rewards", "train") else 0)
