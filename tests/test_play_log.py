"""Curves of play: what TensorBoard and wandb have on disk after a run of the program."""

import json
import sys

import pytest

from tools import play_llm_game
from tools.games.taboo import Taboo
from utils import read_json_or_jsonl, run_program

SHARES = {f"play/share_{outcome.replace(' ', '_')}": outcome for outcome in (each.name for each in Taboo.outcomes)}
CURVES = {"play/games", "play/tokens_per_second", "play/mean_length", *SHARES}


@pytest.fixture
def play(tiny_model, tmp_path, monkeypatch):
    """Run the program on some words; returns its results."""
    (tmp_path / "words.txt").write_text("a\nb\nc\nd\ne\n", encoding="utf-8")

    def run(**changes) -> list[dict]:
        settings = {
            "attacker_model_name_or_path": tiny_model,
            "defender_model_name_or_path": tiny_model,
            "data_path": tmp_path / "words.txt",
            "output_dir": tmp_path / "out",
            "model_prefix": "m",
            "data_suffix": "w",
            "max_turns": 1,
            "max_length": 64,
            "allow_cuts": True,
            "max_new_tokens": 6,
            "concurrent_games": 1,
            "per_device_eval_batch_size": 1,
            "logging_steps": 2,
        } | changes
        words = [word for name, value in settings.items() for word in (f"--{name}", *str(value).split())]
        monkeypatch.setattr(sys, "argv", ["play", *words])
        run_program(play_llm_game.main)
        return read_json_or_jsonl(tmp_path / "out" / "m_sampling_w_results.json")

    return run


def test_tensorboard_has_outcomes_speed_and_games_of_every_start(play, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "out" / "m_sampling_w_tensorboard"
    first = play(report_to="tensorboard", max_games=3)
    (run,) = folder.iterdir()
    (curves := EventAccumulator(str(run))).Reload()
    assert set(curves.Tags()["scalars"]) == CURVES
    games = curves.Scalars("play/games")
    assert [point.step for point in games] == sorted({point.step for point in games})  # no point twice
    assert (games[-1].step, games[-1].value) == (3, 3)
    assert len(games) > 1  # every two batches, that is messages of one game, and at the end
    for curve, outcome in SHARES.items():
        share = sum(game["outcome"] == outcome for game in first) / 3
        assert curves.Scalars(curve)[-1].value == pytest.approx(share)
    assert curves.Scalars("play/mean_length")[-1].value == pytest.approx(sum(game["length"] for game in first) / 3)
    assert curves.Scalars("play/tokens_per_second")[-1].value > 0
    run.rename(folder / "first")  # two starts within a second would share a folder
    play(report_to="tensorboard")
    (again,) = set(folder.iterdir()) - {folder / "first"}
    (curves := EventAccumulator(str(again))).Reload()
    last = curves.Scalars("play/games")[-1]
    assert (last.step, last.value) == (5, 2)  # five games in all, two of them since this start


def log_records(file: bytes):
    """The records of a short file of wandb's: behind 7 bytes, each after 4 of checksum, 2 of length and 1 of kind."""
    place = 7
    assert len(file) < 1 << 15  # one block, so that no record is in parts
    while place < len(file):
        length = int.from_bytes(file[place + 4 : place + 6], "little")
        yield file[place + 7 : place + 7 + length]
        place += 7 + length


def test_wandb_writes_the_same_curves_offline(play, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)  # none is asked for
    play(report_to="wandb tensorboard", max_games=2)
    (path,) = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    points, configured = [], set()
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
        points += [items] if items else []
        configured |= {item.key for item in (*record.run.config.update, *record.config.update)}
    assert CURVES <= set(points[-1])
    assert (points[-1]["play/games"], points[-1]["_step"]) == (2, 2)
    assert "max_turns" in configured
    assert (tmp_path / "out" / "m_sampling_w_tensorboard").is_dir()


def test_nothing_is_logged_by_default_nor_by_other_ranks_than_0(play, tmp_path, monkeypatch):
    play(max_games=1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    for module in ("utils", "tools.selfplay.play"):
        monkeypatch.setattr(f"{module}.from_rank_0", lambda make: make())
    (tmp_path / "out" / "m_sampling_other_rank0.jsonl").touch()
    play(report_to="tensorboard", data_suffix="other", max_games=2)
    assert not list((tmp_path / "out").glob("*tensorboard*"))


@pytest.mark.parametrize(
    "report_to, message",
    [
        ("wandb", "--report_to wandb needs it: pip install wandb"),
        ("tensorboard", "--report_to tensorboard needs it: pip install tensorboard"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_done(report_to, message, play, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tools.selfplay.progress.importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        play(report_to=report_to)
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
