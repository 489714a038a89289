"""The benchmark of play as its user sees it: the table, the JSON beside it, what its modes run, bad flags."""

import contextlib
import io
import json
import os
from collections import Counter

import pytest
import torch

from tools.bench import common, play_mode
from tools.bench import play as bench_play
from tools.engine.model import Sampling, load_local_model
from tools.engine.slots import SlotEngine
from tools.games import load_game
from tools.games.prompts import play_prompt
from tools.selfplay.options import PlayFlags

SETTINGS = {"preset": "tiny", "vocab_size": 400, "turns": 2, "games": 6, "slow_games": 5, "release_games": 2}
SETTINGS |= {"forced_tokens": 4, "mean_tokens": 6, "most_tokens": 20, "lengths": ["forced"]}


def bench(flags: dict) -> tuple[str, dict]:
    """What the program printed and wrote; only the modes run in processes of their own."""
    words = []
    for name, value in flags.items():
        words += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr("sys.argv", ["play", *words])
        patch.setattr(play_mode, "CALIBRATION_TOKENS", 2)  # replies are forced
        patch.setenv("OMP_NUM_THREADS", "1")
        bench_play.main()
    with open(flags["output"]) as file:
        return printed.getvalue(), json.load(file)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[str, dict]:
    """What one run of forced lengths printed, and what it wrote."""
    output = str(tmp_path_factory.mktemp("bench") / "report.json")
    return bench(SETTINGS | {"modes": ["release", "batched", "continuous", "default"], "output": output})


def test_every_mode_plays_all_its_games_to_the_forced_length(report):
    lines = {line["mode"]: line for line in report[1]["lines"]}
    assert {mode: (line["games"], line["new tokens"]) for mode, line in lines.items()} == {
        "release": (2, 2 * 4 * 4),  # games x messages x tokens
        "batched": (5, 5 * 4 * 4),
        "continuous": (5, 5 * 4 * 4),
        "default": (6, 6 * 4 * 4),
    }
    engines = {mode: line["ranks"][0]["engine"] for mode, line in lines.items()}
    assert engines == {
        "release": "BatchEngine",
        "batched": "BatchEngine",
        "continuous": "ContinuousEngine",
        "default": "SlotEngine",
    }
    assert lines["release"]["at once"] == 1


def test_release_computes_every_prompt_and_the_default_a_part_of_them(report):
    lines = {line["mode"]: line for line in report[1]["lines"]}
    assert lines["release"]["prefill"] == 1
    assert lines["default"]["prefill"] < 0.4
    assert lines["batched"]["prefill"] >= 1  # and padding
    shares = lines["release"]["in prefill"], lines["release"]["in decode"]
    assert min(shares) > 0.05 and sum(shares) < 1


def test_ratio_and_limit_follow_from_the_figures(report):
    lines = {line["mode"]: line for line in report[1]["lines"]}
    for line in lines.values():
        assert line["ratio"] == pytest.approx(line["new tokens/s"] / lines["release"]["new tokens/s"])
    default = lines["default"]
    seconds = 60 * default["games"] / default["games/min"]
    assert default["limit"] == pytest.approx(max(default["limit seconds"].values()) / seconds)
    assert default["limit"] < 1


def test_the_table_shows_what_was_written(report):
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in report[0].splitlines() if "|" in line]
    assert rows[0] == list(bench_play.COLUMNS)
    assert [row[:2] for row in rows[2:]] == [[line["lengths"], line["mode"]] for line in report[1]["lines"]]
    assert [row[4] for row in rows[2:]] == [f"{line['games/min']:.1f}" for line in report[1]["lines"]]


def test_the_default_mode_sets_no_flag_of_speed():
    """What stands in the table as default is what a user gets who says nothing of speed."""
    measured, default = bench_play.Settings(**SETTINGS).play_flags("default", "drawn"), PlayFlags()
    set_here = {name for name, value in vars(measured).items() if value != vars(default)[name]}
    assert set_here <= {"max_turns", "max_new_tokens", "min_new_tokens", "bf16"}


def test_two_processes_share_the_games(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    printed, written = bench(SETTINGS | {"modes": ["default"], "output": str(tmp_path / "report.json")})
    assert printed.rstrip().splitlines()[-1].startswith("2 x CPU")
    (line,) = written["lines"]
    assert [rank["prompts"] for rank in line["ranks"]] == [12, 12]  # 3 games of 4 messages each
    assert line["peak GiB"] == pytest.approx(sum(rank["peak_gib"] for rank in line["ranks"]))


def test_only_the_first_process_measures(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("sys.argv", ["play"])
    monkeypatch.setattr(bench_play, "compare", None)
    bench_play.main()
    assert capsys.readouterr().out == ""


def leave_by_a_signal() -> None:
    os.kill(os.getpid(), 9)


def test_a_mode_that_is_killed_is_an_error():
    with pytest.raises(ValueError, match="SIGKILL in test_bench_play, most often for want of memory"):
        common.run_ranks(leave_by_a_signal)


def test_the_limit_is_that_of_operations_and_bytes():
    """By hand: 2 layers of hidden size 4 and intermediate size 6, 10 tokens, in bf16; two processes."""
    shape = {"hidden_size": 4, "layers": 2, "heads": 1, "intermediate_size": 6, "vocab_size": 300}
    settings = bench_play.Settings(**shape, bf16=True)
    rank = {"weight_bytes": 1000, "prefix_tokens": 20, "matmul_rate": 500.0, "bandwidth": 50.0}
    ranks = [
        rank | {"prompt_tokens": 60, "prompts": 2, "prefill_tokens": 30, "reply_tokens": [2, 4]},
        rank | {"prompt_tokens": 30, "prompts": 1, "prefill_tokens": 10, "reply_tokens": [4]},
    ]
    seconds = bench_play.limit_seconds(settings, ranks, at_once=2)
    layer_weights = 2 * (4 * 4 * 4 + 3 * 4 * 6)  # 272
    seen = 10 * 30 + (4 + 16 + 16) / 2  # 318: prompts of 30 tokens on average, and replies so far
    operations = 2 * layer_weights * (40 + 10) + 2 * 4 * 300 * 10 + 4 * 2 * 4 * seen
    cache = 2 * 2 * 4 * 2  # bytes of a token: keys and values, layers, size, bf16
    read = 5 * (1000 + 20 * cache) + (318 - 10 * 20) * cache
    assert seconds == {"operations": pytest.approx(operations / 1000), "bytes": pytest.approx(read / 100)}


def test_drawn_replies_end_at_every_token_with_the_same_probability(tmp_path):
    """Replies of play's engine by the model that the benchmark writes: the share of end tokens among theirs."""
    play_mode.make_inputs(tmp_path, bench_play.Settings(preset="tiny", vocab_size=400, seed=1), 3, mean_tokens=10)
    local = load_local_model(tmp_path / "model", Sampling(max_length=2048, max_new_tokens=30))
    drawn, decode = [], local.decode
    local.decode = lambda ids, cut: drawn.append(ids) or decode(ids, cut)
    engine = SlotEngine(local, 250)
    for number in range(1000):
        engine.start(number, play_prompt(load_game(), [], "sun", 5), game=number)
    torch.manual_seed(0)
    while engine.counts.prompts < 1000:
        engine.run()
    tokens = Counter(token for ids in drawn for token in ids)
    assert tokens[2] / tokens.total() == pytest.approx(1 / 10, abs=0.012)
    assert all(token == 2 or 4 <= token < len(local.tokenizer) for token in tokens)


def test_bad_flags_are_told_all_at_once():
    with pytest.raises(ValueError) as caught:
        bench_play.Settings(games=0, mean_tokens=1, vocab_size=100)
    assert [line.split()[0] for line in str(caught.value).split("\n")] == ["--vocab_size", "--games", "--mean_tokens"]
    with pytest.raises(ValueError, match="--hidden_size must be a multiple of twice --heads"):
        bench_play.Settings(hidden_size=10, heads=2)
