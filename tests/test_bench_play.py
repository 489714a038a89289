"""bench_play as its user sees it: the table, the JSON beside it, what its modes run, bad flags."""

import json
import os
import subprocess
from collections import Counter

import pytest
import torch
from conftest import ROOT
from forks import python
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import play_llm_game
from tools.bench import play as bench_play
from tools.bench import play_mode as bench_play_mode
from tools.games import taboo
from tools.selfplay import options as play_flags

SHAPE = {"hidden_size": 32, "layers": 2, "heads": 2, "intermediate_size": 64, "vocab_size": 400}
TINY = ["--preset", "tiny", "--vocab_size", "400", "--turns", "2"]
TINY += ["--games", "6", "--slow_games", "5", "--release_games", "2"]
TINY += ["--forced_tokens", "4", "--mean_tokens", "6", "--most_tokens", "20"]


def bench(*flags: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python(), *launcher, "-m", "tools.bench.play", *TINY, *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[str, dict]:
    """What one run of forced lengths printed, and what it wrote."""
    path = tmp_path_factory.mktemp("bench") / "report.json"
    modes = ("release", "batched", "continuous", "default")
    finished = bench("--lengths", "forced", "--modes", *modes, "--output", str(path))
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout, json.loads(path.read_text())


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
    settings = bench_play.parse(TINY)
    given = set(bench_play.flags(settings, "FOLDER", "default", "drawn")[::2])
    parser = bench_play.argparse.ArgumentParser()
    play_flags.add_machine_flags(parser)
    of_speed = {option for action in parser._actions for option in action.option_strings} - {"--logging_steps"}
    assert not given & of_speed
    args = play_llm_game.parse_args(bench_play.flags(settings, "FOLDER", "default", "drawn"))
    assert (args.engine, args.per_device_eval_batch_size, args.concurrent_games) == ("auto", None, None)


def test_two_processes_share_the_games(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    flags = ("--modes", "default", "--lengths", "forced", "--output", str(tmp_path / "report.json"))
    finished = bench(*flags, launcher=launcher)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.rstrip().splitlines()[-1].startswith("2 x CPU")
    (line,) = json.loads((tmp_path / "report.json").read_text())["lines"]
    assert [rank["prompts"] for rank in line["ranks"]] == [12, 12]  # 3 games of 4 messages each
    assert line["peak GiB"] == pytest.approx(sum(rank["peak_gib"] for rank in line["ranks"]))


def test_the_limit_is_that_of_operations_and_bytes():
    """By hand: 2 layers of hidden size 4 and intermediate size 6, 10 tokens, in bf16; two processes."""
    shape = ["--hidden_size", "4", "--layers", "2", "--heads", "1", "--intermediate_size", "6", "--vocab_size", "300"]
    settings = bench_play.parse([*shape, "--bf16", "True"])
    rank = {"weight_bytes": 1000, "prefix": 20, "matmul_rate": 500.0, "bandwidth": 50.0}
    total = {"prompt": 90, "prompts": 3, "prefill": 40}
    seconds = bench_play.limit_seconds(settings, [rank, rank], [2, 4, 4], total, at_once=2)
    layer_weights = 2 * (4 * 4 * 4 + 3 * 4 * 6)  # 272
    seen = 10 * 30 + (4 + 16 + 16) / 2  # 318: prompts of 30 tokens on average, and replies so far
    operations = 2 * layer_weights * (40 + 10) + 2 * 4 * 300 * 10 + 4 * 2 * 4 * seen
    cache = 2 * 2 * 4 * 2  # bytes of a token: keys and values, layers, size, bf16
    read = 5 * (1000 + 20 * cache) + (318 - 10 * 20) * cache
    assert seconds == {"operations": pytest.approx(operations / 1000), "bytes": pytest.approx(read / 100)}


def test_drawn_replies_end_at_every_token_with_the_same_probability(tmp_path):
    """Draws as play's, from the model that the benchmark writes: the share of end tokens among them."""
    torch.manual_seed(0)
    bench_play_mode.make_inputs(tmp_path, SHAPE, words=3, mean_tokens=10, seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = torch.tensor([tokenizer(taboo.play_prompt([], "sun", 5))["input_ids"]] * 1000)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=True, temperature=1.2, top_k=50
    )
    new = output[:, ids.shape[1] :]
    drawn = Counter()
    for row in new.tolist():
        end = row.index(2) if 2 in row else len(row)
        drawn["others"] += end
        drawn["ends"] += 2 in row
        assert all(4 <= token < len(tokenizer) for token in row[:end])
    assert drawn["ends"] / drawn.total() == pytest.approx(1 / 10, abs=0.012)


def test_bad_flags_are_told_all_at_once():
    with pytest.raises(ValueError) as caught:
        bench_play.parse([*TINY, "--games", "0", "--mean_tokens", "1", "--vocab_size", "100"])
    assert [line.split()[0] for line in str(caught.value).split("\n")] == ["--games", "--mean_tokens", "--vocab_size"]
