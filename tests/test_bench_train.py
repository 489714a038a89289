"""The benchmark of training: the figures of its table, and bad flags."""

import multiprocessing

import pytest
from forks import python

from tools.bench import train as bench_train

TINY = {"preset": "tiny", "steps": 3, "warmup_steps": 1}


def compare(**changes) -> list[dict]:
    """The lines of the table; only the modes run in processes of their own."""
    multiprocessing.set_executable(python())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return bench_train.compare(bench_train.Settings(**(TINY | changes)))


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    """Of a run on rows of the method's lengths."""
    return compare(accumulation=8, steps=2)


def test_the_figures_of_a_line_agree_with_each_other(lines):
    for line in lines:
        (rank,) = line["ranks"]
        assert line["s/step"] * 2 * line["tokens/s"] == pytest.approx(rank["tokens"])
        assert line["MFU"] == pytest.approx(rank["operations"] / rank["seconds"] / line["machine"][0]["matmul_rate"])
        assert 0 < line["padding"] < 0.5  # lengths differ
    default, _, plain = lines
    assert default["with reference"] < default["tokens/s"]  # its reference pass takes time
    assert plain["with reference"] == plain["tokens/s"]  # it has none
    ratios = [default[name] / plain[name] for name in ("tokens/s", "with reference", "peak GiB")]
    assert default["x plain"] == ", ".join(f"{ratio:.2f}" for ratio in ratios)


def test_useful_operations_are_those_counted_by_hand():
    hidden, layers, inner, vocabulary = 32, 2, 64, 300
    per_layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden  # attention, MLP, two norms
    products = (layers * per_layer + hidden) * 1000 + hidden * vocabulary * 50
    shape = bench_train.Settings(preset="tiny").shape
    assert bench_train.useful_operations(shape, 1000, 50, 90_000) == 6 * (products + layers * hidden * 90_000)


def test_all_modes_compute_the_same_losses(lines):
    default, rebalanced, plain = (line["ranks"][0]["losses"] for line in lines)
    assert len(set(default)) == len(default) == 3  # the rows of the steps differ
    assert default == pytest.approx(plain, rel=1e-5)
    assert default == pytest.approx(rebalanced, rel=1e-5)


def test_two_processes_give_one_line_a_mode_with_sums():
    lines = compare(processes=2, row_tokens=70)
    assert [line["mode"] for line in lines] == ["default", "rebalanced", "plain"]
    for line in lines:
        assert [rank["tokens"] for rank in line["ranks"]] == [2 * 3 * 70] * 2  # batch x steps
        assert line["padding"] == 0
    assert lines[0]["ranks"][0]["losses"] == pytest.approx(lines[2]["ranks"][0]["losses"], rel=1e-5)


def test_dealing_rows_out_by_length_takes_most_of_the_padding_away(lines):
    default, rebalanced, plain = lines
    assert default["padding"] == plain["padding"] > 0.15
    assert rebalanced["padding"] < default["padding"] / 3


def test_rows_are_dealt_out_only_where_a_step_has_several_micro_batches():
    assert bench_train.Settings(accumulation=1).modes == ["default", "plain"]
    assert bench_train.Settings(accumulation=1, processes=2).modes == ["default", "rebalanced", "plain"]
