"""The benchmark of training as its user sees it: the table, the JSON beside it, bad flags."""

import contextlib
import io
import json
import re

import pytest

from tools.bench import train as bench_train

TINY = {"preset": "tiny", "use_cpu": True, "query_tokens": 30, "target_tokens": 6}
TINY |= {"learning_rate": 1e-3, "steps": 3, "warmup_steps": 1}


def bench(folder, **flags) -> tuple[str, dict]:
    """What the program printed and wrote; only the modes run in processes of their own."""
    flags = TINY | {"output": folder / "report.json"} | flags
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr("sys.argv", ["train", *words])
        patch.setenv("OMP_NUM_THREADS", "1")
        bench_train.main()
    return printed.getvalue(), json.loads((folder / "report.json").read_text())


def read_table(text: str) -> dict[str, dict[str, str]]:
    """The printed table, a dict per mode."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if "|" in line]
    header, _, *lines = rows
    return {line[0]: dict(zip(header, line, strict=True)) for line in lines}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[str, dict]:
    """What a run on rows of the method's lengths printed, and what it wrote."""
    flags = {"method_rows": True, "target_tokens": 60, "accumulation": 24, "steps": 2}
    return bench(tmp_path_factory.mktemp("bench"), **flags)


def test_the_printed_ratios_are_those_of_the_printed_rows(report):
    table = read_table(report[0])
    assert list(table) == ["default", "rebalanced", "plain"]
    (line,) = re.findall("default / plain: (.*)", report[0])
    ratios = {name: float(value) for name, value in re.findall(r"([^,]+?) ([\d.]+)(?:, |$)", line)}
    for name in ("tokens/s", "with reference", "peak GiB"):
        default, plain = (float(table[mode][name]) for mode in ("default", "plain"))
        assert ratios[name] == pytest.approx(default / plain, rel=0.01)


def test_the_figures_of_a_row_agree_with_each_other(report):
    for line in report[1]["lines"]:
        assert line["s/step"] * 2 * line["useful_rate"] == pytest.approx(line["useful_operations"])
        assert line["s/step"] * 2 * line["tokens/s"] == pytest.approx(line["tokens"])
        assert line["MFU"] == pytest.approx(line["useful_rate"] / report[1]["matmul TFLOP/s"] / 1e12)
        assert line["before GiB"] <= line["peak GiB"]
        assert 0 < line["padding"] < 0.5  # lengths differ
    default, _, plain = report[1]["lines"]
    assert default["with reference"] < default["tokens/s"]  # its reference pass takes time
    assert plain["with reference"] == plain["tokens/s"]  # it has none


def test_useful_operations_are_those_counted_by_hand(report):
    hidden, layers, inner, vocabulary = 32, 2, 64, 300
    per_layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden  # attention, MLP, two norms
    for line in report[1]["lines"]:
        products = (layers * per_layer + hidden) * line["tokens"] + hidden * vocabulary * line["scored"]
        assert line["useful_operations"] == 6 * (products + layers * hidden * line["squares"])


def test_all_modes_compute_the_same_losses(report):
    default, rebalanced, plain = (line["losses"] for line in report[1]["lines"])
    assert len(set(default)) == len(default) == 3  # the rows of the steps differ
    assert default == pytest.approx(plain, rel=1e-5)
    assert default == pytest.approx(rebalanced, rel=1e-5)


def test_two_processes_give_one_row_a_mode_with_sums(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    printed, written = bench(tmp_path)
    assert list(read_table(printed)) == ["default", "rebalanced", "plain"]
    default, rebalanced, plain = written["lines"]
    for line in (default, rebalanced, plain):
        assert line["tokens"] == 2 * 2 * 3 * (30 + 6 + 2)  # processes x batch x steps x (query, target, BOS, EOS)
        assert line["padding"] == 0
    assert default["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_dealing_rows_out_by_length_takes_most_of_the_padding_away(report):
    default, rebalanced, plain = report[1]["lines"]
    assert default["padding"] == plain["padding"] > 0.15
    assert rebalanced["padding"] < 0.05


def test_only_the_first_process_measures(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("sys.argv", ["train"])
    monkeypatch.setattr(bench_train, "compare", None)
    bench_train.main()
    assert capsys.readouterr().out == ""


def test_rows_are_dealt_out_only_where_a_step_has_several_micro_batches(monkeypatch):
    assert bench_train.modes_of(bench_train.Settings(accumulation=1)) == ["default", "plain"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench_train.modes_of(bench_train.Settings(accumulation=1)) == ["default", "rebalanced", "plain"]


def test_bad_flags_are_told_all_at_once():
    with pytest.raises(ValueError) as caught:
        bench_train.Settings(warmup_steps=0, repeats=0)
    assert [line.split()[0] for line in str(caught.value).split("\n")] == ["--warmup_steps", "--repeats"]
