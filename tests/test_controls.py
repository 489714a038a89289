"""Controls: SFT rows alone, silent rows, cloning; and drawn rows."""

import json
from collections import Counter

import pytest
from conftest import build_tokenizer
from helpers import call, flags_of

from tools import controls
from tools.common.files import read_json, read_json_or_jsonl, write_json, write_records
from tools.controls import cloned
from tools.games.chat import ChatTemplate

SFT_ROWS = [{"query": f"q{number}", "target": f"t{number}", "type": "sft", "weight": 1.0} for number in range(3)]
ROWS = [
    {"query": "Q", "target": f"T{number}", "reward": 0.25 * (1 + number % 4), "role": role, "weight": weight}
    for number in range(45)
    for role, weight in (("attacker", 0.75), ("defender", 1.5))
]


@pytest.fixture
def run(tmp_path):
    """Make the rows of a control from ROWS and SFT_ROWS; gives its rows, or its error message."""
    write_records(tmp_path / "rows.json", ROWS + SFT_ROWS)
    write_records(tmp_path / "facts.json", [{"query": row["query"], "target": row["target"]} for row in SFT_ROWS])

    def make(control: str, status: int = 0, **changes):
        flags = {"rows": tmp_path / "rows.json", "output": tmp_path / f"{control}.json"} | changes
        ended = call(controls.main, control, *flags_of(flags), status=status)
        return ended.errors if status else read_json_or_jsonl(flags["output"])

    return make


@pytest.mark.parametrize("sft_coeff", [0.5, 0.25])
def test_cloning_weighs_each_kind_of_row_as_self_play_does(run, sft_coeff):
    rows = run("cloning", sft_coeff=sft_coeff)
    assert [row["target"] for row in rows] == [row["target"] for row in ROWS + SFT_ROWS]
    assert {row["type"] for row in rows} == {"sft"}
    # With l = -1 in every row: OfflinePO at ratio 1 and KL 0 has mean(reward * weight) + alpha * mean over SFT rows.
    expected = sum(row["reward"] * row["weight"] for row in ROWS) / len(ROWS) + sft_coeff * 1.0
    assert sft_coeff * sum(row["weight"] for row in rows) / len(rows) == pytest.approx(expected)


def test_cloning_weighs_each_kind_as_micro_batches_do():
    """Of 2 rows, 8 of 9 pairs have one of the 6 game rows, and 5 of 9 one of the 3 SFT rows."""
    games, sft = [{**ROWS[0], "reward": 1.0, "weight": 1.0}] * 6, [SFT_ROWS[0]] * 3
    weights = [row["weight"] for row in cloned(games + sft, 0.5, 2)]
    assert weights == pytest.approx([8 / 9 * 9 / 6 / 0.5] * 6 + [5 / 9 * 9 / 3] * 3)


def test_sft_rows_are_repeated_to_as_many_rows_as_the_other_run_has(run, tmp_path):
    rows = run("sft", sft_data_path=tmp_path / "facts.json")
    assert Counter(map(json.dumps, rows)) == dict.fromkeys(map(json.dumps, SFT_ROWS), 31)  # 93 rows
    write_records(tmp_path / "fewer.json", ROWS[:5])
    flags = {"sft_data_path": tmp_path / "facts.json", "rows": tmp_path / "fewer.json"}
    of_seeds = [run("sft", seed=seed, output=tmp_path / f"seed{seed}.json", **flags) for seed in range(9)]
    for fewer in of_seeds:
        assert sorted(Counter(row["target"] for row in fewer).values()) == [1, 2, 2]
    assert any(fewer != of_seeds[0] for fewer in of_seeds)


def test_silent_rows_are_those_of_the_other_run_with_weight_0_for_games(run):
    assert run("silent") == [row | {"weight": 0.0} for row in ROWS] + SFT_ROWS


CONVERSATION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
PLAIN = {"query": "Q", "target": "T"}
ALPACA = {"instruction": "Say it.", "output": "It."}


def test_rows_without_type_weight_or_reward_are_what_training_takes_them_for(run, tmp_path):
    rows = [{"messages": CONVERSATION}, ALPACA, PLAIN | {"reward": 0.5}, PLAIN | {"type": "sft"}]
    write_records(tmp_path / "plain.json", rows)
    silent = run("silent", rows=tmp_path / "plain.json")
    assert [row.get("weight") for row in silent] == [None, None, 0.0, None]
    weights = [row["weight"] for row in run("cloning", rows=tmp_path / "plain.json")]
    assert weights == pytest.approx([4 / 3, 4 / 3, 0.5 / 0.5 * 4 / 1, 4 / 3])
    assert run("draw", number=4, rows=tmp_path / "plain.json") == rows
    assert read_json(tmp_path / "draw.json_rewards_settings.json")["rows"] == {"sft": 3, "game": 1, "negative": 0}
    write_records(tmp_path / "bare.json", [ALPACA, PLAIN])
    line = run("cloning", status=2, rows=tmp_path / "bare.json", output=tmp_path / "o.json")
    assert "bare.json: row 2: no 'reward'" in line


@pytest.mark.parametrize("number", [200, 30])
def test_rows_of_any_kind_are_drawn_or_repeated_until_there_are_so_many(run, tmp_path, number):
    rows, given = run("draw", number=number), ROWS + SFT_ROWS
    times, whole = Counter(map(json.dumps, rows)), number // len(given)
    assert len(rows) == number and set(times) <= set(map(json.dumps, given))
    # Each row stands there `whole` times, drawn ones once more.
    assert all(whole <= times[json.dumps(row)] <= whole + 1 for row in given)
    assert run("draw", number=number, seed=1, output=tmp_path / "other_seed.json") != rows


def test_the_record_has_settings_and_counts_and_refuses_other_rows(run, tmp_path):
    run("silent")
    record = read_json(tmp_path / "silent.json_rewards_settings.json")
    assert record["settings"]["control"] == "silent" and record["finished"]
    assert record["rows"] == {"attacker": 45, "defender": 45, "sft": 3, "negative": 0}
    write_records(tmp_path / "rows.json", ROWS)
    assert "rows: " in run("silent", status=2)


def test_each_file_of_rows_has_a_record_of_its_own_and_an_unknown_ending_is_refused_before_work(run, tmp_path):
    for name in ("drawn.json", "drawn.jsonl", "drawn.jsonl.gz"):
        assert len(run("draw", number=len(name), output=tmp_path / name)) == len(name)
        assert read_json(tmp_path / f"{name}_rewards_settings.json")["settings"]["number"] == len(name)
    before = set(tmp_path.iterdir())
    assert "unknown ending" in run("draw", status=2, number=4, output=tmp_path / "drawn.parquet")
    assert set(tmp_path.iterdir()) == before


def test_sft_examples_are_drawn_as_they_are(run, tmp_path):
    examples = [{"instruction": f"Say {number}.", "input": "", "output": "It."} for number in range(9)]
    write_records(tmp_path / "alpaca.json", examples)
    rows = run("draw", number=4, rows=tmp_path / "alpaca.json")
    assert len(rows) == len(set(map(json.dumps, rows))) == 4 and all(row in examples for row in rows)


def test_draw_refuses_numbers_below_0(run):
    assert "number is -1" in run("draw", status=2, number=-1)


def test_the_record_has_the_digest_of_the_chat_template(run, tmp_path):
    tokenizer = build_tokenizer(chat_template="{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    for name in "ab":
        tokenizer.save_pretrained(tmp_path / name)
        write_json(tmp_path / name / "config.json", {})
    flags = {"sft_data_path": tmp_path / "facts.json", "chat_template": True}
    rows = run("sft", tokenizer=tmp_path / "a", **flags)
    settings = read_json(tmp_path / "sft.json_rewards_settings.json")["settings"]
    assert settings["chat_template"] == ChatTemplate(tokenizer, "m").sha256 and "tokenizer" not in settings
    assert run("sft", tokenizer=tmp_path / "b", **flags) == rows  # all is there: the same template


def test_cloning_refuses_rewards_below_zero(run, tmp_path):
    write_records(tmp_path / "losers.json", [ROWS[0] | {"reward": -0.5}])
    assert "negative rewards" in run("cloning", status=2, rows=tmp_path / "losers.json")
