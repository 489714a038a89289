"""bench_train as its user sees it: the table, the JSON beside it, bad flags."""

import json
import os
import re
import subprocess

import pytest
from conftest import ROOT
from forks import python

MODULE = ["-m", "tools.bench.train", "--preset", "tiny", "--use_cpu", "True"]
TINY = ["--query_tokens", "30", "--target_tokens", "6", "--length_spread", "0.5", "--learning_rate", "1e-3"]
STEPS = ["--steps", "3", "--warmup_steps", "1"]


def bench(*flags: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python(), *launcher, *MODULE, *TINY, *STEPS, *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def read_table(text: str) -> dict[str, dict[str, str]]:
    """The printed table, a dict per mode."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if "|" in line]
    header, _, *lines = rows
    return {line[0]: dict(zip(header, line, strict=True)) for line in lines}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[str, dict]:
    """What one run printed, and what it wrote."""
    path = tmp_path_factory.mktemp("bench") / "report.json"
    finished = bench("--output", str(path))
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout, json.loads(path.read_text())


def test_the_printed_ratios_are_those_of_the_printed_rows(report):
    table = read_table(report[0])
    assert list(table) == ["default", "plain"]
    (line,) = re.findall("default / plain, equal batch: (.*)", report[0])
    ratios = {name: float(value) for name, value in re.findall(r"([^,]+?) ([\d.]+)(?:, |$)", line)}
    for name in ("tokens/s", "with reference", "peak GiB"):
        default, plain = (float(table[mode][name]) for mode in ("default", "plain"))
        assert ratios[name] == pytest.approx(default / plain, rel=0.01)


def test_the_figures_of_a_row_agree_with_each_other(report):
    for line in report[1]["lines"]:
        assert line["s/step"] * 3 * line["useful_rate"] == pytest.approx(line["useful_operations"])
        assert line["s/step"] * 3 * line["tokens/s"] == pytest.approx(line["tokens"])
        assert line["MFU"] == pytest.approx(line["useful_rate"] / report[1]["matmul TFLOP/s"] / 1e12)
        assert line["before GiB"] <= line["peak GiB"]
        assert 0 < line["padding"] < 0.5  # lengths differ
    default, plain = report[1]["lines"]
    assert default["with reference"] < default["tokens/s"]  # its reference pass takes time
    assert plain["with reference"] == plain["tokens/s"]  # it has none


def test_useful_operations_are_those_counted_by_hand(report):
    hidden, layers, inner, vocabulary = 32, 2, 64, 300
    per_layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden  # attention, MLP, two norms
    for line in report[1]["lines"]:
        products = (layers * per_layer + hidden) * line["tokens"] + hidden * vocabulary * line["scored"]
        assert line["useful_operations"] == 6 * (products + layers * hidden * line["squares"])


def test_both_modes_compute_the_same_losses(report):
    default, plain = (line["losses"] for line in report[1]["lines"])
    assert len(default) == 4
    assert default == pytest.approx(plain, rel=1e-5)
    assert len(set(default)) == 4  # the rows of the steps differ


def test_two_processes_give_one_row_a_mode_with_sums(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    path = tmp_path / "report.json"
    finished = bench("--length_spread", "0", "--output", str(path), launcher=launcher)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert list(read_table(finished.stdout)) == ["default", "rebalanced", "plain"]
    default, rebalanced, plain = json.loads(path.read_text())["lines"]
    for line in (default, rebalanced, plain):
        assert line["tokens"] == 2 * 2 * 3 * (30 + 6 + 2)  # processes x batch x steps x (query, target, BOS, EOS)
        assert line["padding"] == 0
    assert default["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_dealing_rows_out_by_length_takes_most_of_the_padding_away(tmp_path):
    path = tmp_path / "report.json"
    flags = ["--method_rows", "True", "--target_tokens", "60", "--accumulation", "32", "--steps", "1"]
    finished = bench(*flags, "--output", str(path))
    assert finished.returncode == 0, finished.stderr[-3000:]
    default, rebalanced, plain = json.loads(path.read_text())["lines"]
    assert default["padding"] == plain["padding"] > 0.15
    assert rebalanced["padding"] < 0.05
    assert rebalanced["s/step"] * rebalanced["tokens/s"] == pytest.approx(rebalanced["tokens"])


def test_bad_flags_are_told_all_at_once():
    finished = bench("--warmup_steps", "0", "--length_spread", "1", "--largest_batch", "True")
    assert finished.returncode == 2
    for flag in ("--warmup_steps", "--length_spread", "--largest_batch"):
        assert flag in finished.stderr
