"""The benchmark of play: its table, what its modes run, the lengths of replies, bad flags."""

import multiprocessing

import pytest
from conftest import ROOT
from forks import python

from tools.bench import play as bench_play
from tools.bench.common import Shape
from tools.selfplay.options import PlayFlags

SETTINGS = {"preset": "tiny", "vocab_size": 400, "turns": 2, "games": 6, "slow_games": 5, "release_games": 2}
SETTINGS |= {"forced_tokens": 4, "mean_tokens": 6, "most_tokens": 20}


def compare(**changes) -> dict[tuple[str, str], dict]:
    """The lines of the table, by lengths and mode; only the modes run in processes of their own."""
    multiprocessing.set_executable(python())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        lines = bench_play.compare(bench_play.Settings(**(SETTINGS | changes)))
    return {(line["lengths"], line["mode"]): line for line in lines}


@pytest.fixture(scope="module")
def lines() -> dict[tuple[str, str], dict]:
    return compare()


def test_every_mode_plays_all_its_games_to_the_forced_length(lines):
    told = {
        mode: (line["games"], line["ranks"][0]["engine"], line["ranks"][0]["reply_tokens"])
        for (lengths, mode), line in lines.items()
        if lengths == "forced"
    }
    assert told == {  # 4 messages of 4 tokens a game
        "release": (2, "BatchEngine", [4] * 4 * 2),
        "batched": (5, "BatchEngine", [4] * 4 * 5),
        "default": (6, "SlotEngine", [4] * 4 * 6),
    }
    assert lines["forced", "release"]["at once"] == 1


def test_drawn_lengths_are_the_same_in_every_mode(lines):
    settings = bench_play.Settings(**SETTINGS)
    for mode, games in (("release", 2), ("batched", 5), ("default", 6)):
        expected = [settings.reply_tokens("drawn", game, message) for game in range(games) for message in range(4)]
        assert sorted(lines["drawn", mode]["ranks"][0]["reply_tokens"]) == sorted(expected)
    assert len(set(expected)) > 5


def test_drawn_lengths_are_geometric_in_every_message():
    settings = bench_play.Settings(mean_tokens=60, most_tokens=10_000)
    for message in range(6):
        drawn = [settings.reply_tokens("drawn", game, message) for game in range(4000)]
        assert sum(drawn) / 4000 == pytest.approx(60, abs=3)  # three standard errors
        assert sum(length > 60 for length in drawn) / 4000 == pytest.approx((1 - 1 / 60) ** 60, abs=0.025)
        assert min(drawn) == 1
    assert max(settings.reply_tokens("forced", game, 0) for game in range(9)) == settings.forced_tokens


def test_release_computes_every_prompt_and_the_default_a_part_of_them(lines):
    release, batched, default = (lines["forced", mode] for mode in ("release", "batched", "default"))
    assert release["prefill"] == 1
    assert default["prefill"] < 0.4
    assert batched["prefill"] >= 1  # and padding
    shares = release["in prefill"], release["in decode"]
    assert min(shares) > 0.05 and sum(shares) < 1


def test_ratio_and_limit_are_shares(lines):
    for (lengths, _), line in lines.items():
        assert line["ratio"] == f"{line['new tokens/s'] / lines[lengths, 'release']['new tokens/s']:.2f}"
    assert 0 < lines["forced", "default"]["limit"] < 1


def test_of_several_rounds_the_middle_run_is_shown_with_its_ratios_within_a_round():
    runs = [{"new tokens/s": speed, "round": number} for number, speed in enumerate((30, 10, 20))]
    first = [{"new tokens/s": speed} for speed in (10, 10, 5)]
    assert bench_play.middle_run(runs, first) == {"new tokens/s": 20, "round": 2, "ratio": "3.00 (1.00 to 4.00)"}
    assert bench_play.middle_run(runs[:1], first[:1])["ratio"] == "3.00"


def test_vllm_and_a_server_play_the_same_lengths(tmp_path, monkeypatch):
    """By the stand-in for vLLM, which samples from the model that is served."""
    executable = tmp_path / "vllm"
    executable.write_text(f'#!/bin/sh\nexec {python()} {ROOT}/tests/stand_in_vllm.py "$@"\n')
    executable.chmod(0o700)
    monkeypatch.setenv("VLLM", str(executable))
    monkeypatch.setenv("STAND_IN", '{"model": true}')
    lines = compare(modes=["vllm"], lengths=["drawn"], games=3)
    settings = bench_play.Settings(**SETTINGS)
    expected = [settings.reply_tokens("drawn", game, message) for game in range(3) for message in range(4)]
    assert sorted(lines["drawn", "vllm"]["ranks"][0]["reply_tokens"]) == sorted(expected)


def test_a_server_needs_its_address_and_the_model_that_it_serves():
    with pytest.raises(ValueError, match="--modes server needs --openai_base_url, and --folder"):
        bench_play.Settings(modes=["server"], folder="x")


def test_the_default_mode_sets_no_flag_of_speed():
    """What stands in the table as default is what a user gets who says nothing of speed."""
    measured, default = bench_play.Settings(**SETTINGS).play_flags("default", "M"), PlayFlags()
    assert {name for name, value in vars(measured).items() if value != vars(default)[name]} == {"max_turns"}


def test_two_processes_share_the_games():
    line = compare(modes=["default"], lengths=["forced"], processes=2)["forced", "default"]
    assert [rank["prompts"] for rank in line["ranks"]] == [12, 12]  # 3 games of 4 messages each
    assert line["peak GiB"] == pytest.approx(sum(rank["peak_gib"] for rank in line["ranks"]))


def test_the_program_prints_the_table(monkeypatch, capsys):
    machine = [{"matmul_rate": 2e11, "bandwidth": 4e10, "device": "CPU"}]
    line = {"lengths": "forced", "mode": "default", "new tokens/s": 123.45, "prefill": 0.216, "machine": machine}
    monkeypatch.setattr(bench_play, "compare", lambda settings: [line])
    monkeypatch.setattr("sys.argv", ["play"])
    bench_play.main()
    rows = capsys.readouterr().out.splitlines()
    table, machine = rows[:-1], rows[-1]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in table]
    assert cells[0] == list(bench_play.COLUMNS)
    assert cells[2][:7] == ["forced", "default", "", "", "", "123.5", "22%"]
    assert machine.startswith("1 x CPU; matrix product 0.200 TFLOP/s, memory 40 GB/s; torch ")


def test_the_limit_is_that_of_operations_and_bytes():
    """By hand: 2 layers of hidden size 4 and intermediate size 6, 10 tokens, in bf16; two processes."""
    shape = Shape(hidden_size=4, layers=2, heads=1, kv_heads=1, intermediate_size=6, vocab_size=300)
    machine = [{"matmul_rate": 500.0, "bandwidth": 50.0}] * 2
    rank = {"at_once": 2, "prefix_tokens": 20}
    ranks = [
        rank | {"prompt_tokens": 60, "prompts": 2, "prefill_tokens": 30, "reply_tokens": [2, 4]},
        rank | {"prompt_tokens": 30, "prompts": 1, "prefill_tokens": 10, "reply_tokens": [4]},
    ]
    seconds = bench_play.limit_seconds(shape, machine, ranks, number_bytes=2)
    layer_weights = 2 * (4 * 4 * 4 + 3 * 4 * 6)  # 272
    seen = 10 * 30 + (4 + 16 + 16) / 2  # 318: prompts of 30 tokens on average, and replies so far
    operations = 2 * layer_weights * (40 + 10) + 2 * 4 * 300 * 10 + 4 * 2 * 4 * seen
    cache = 2 * 2 * 4 * 2  # bytes of a token: keys and values, layers, size, bf16
    weights = 2 * (layer_weights + 2 * 4 * 300)
    read = 5 * (weights + 20 * cache) + (318 - 10 * 20) * cache
    assert seconds == {"operations": pytest.approx(operations / 1000), "bytes": pytest.approx(read / 100)}
