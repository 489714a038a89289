"""The report of tests/gpu/check.sh. CPU=1 bash tests/gpu/check.sh OUT runs all its parts, for seven minutes."""

import json

from gpu import check


def test_the_report_names_the_card_and_its_share_by_model_flops(tmp_path, capsys):
    (tmp_path / "card").write_text("NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06\n")
    folder = tmp_path / "training_speed/7b_OfflinePO_16_rows_checkpointing_True"
    folder.mkdir(parents=True)
    log = [{"loss": 2.0, "tokens_per_second": speed} for speed in (10, 20, 7000, 8000, 9000)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [*log, {"train_loss": 2.0}]}))
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines/speed.log").write_text("| engine | ...\n| slots | 155 | 170.0 | 1700.0 |\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/model_7b.log").write_text("")
    steps = [["training_speed", folder.name, "0", "60", "19000"], ["engines", "speed", "124", "240", ""]]
    (tmp_path / "steps.tsv").write_text("".join("\t".join(step) + "\n" for step in steps))
    check.report(str(tmp_path))
    printed = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06" in printed
    # Llama-2's 6.74B parameters; 4 FLOPs a parameter and token under LoRA, 2 in play; 989 TFLOP/s.
    assert check.parameters("7b") / 1e9 == 6.738149376
    assert "8000 tokens/s, loss 2.000 to 2.000, 5 steps | 21.8% | 19000 | ok | 60 |" in printed
    assert "slots 1700.0 new tokens/s | 2.3% |  | ended by the clock | 240 |" in printed


def test_greedy_replies_are_compared_up_to_a_game_s_first_difference(tmp_path, capsys):
    for name, games in {"one": ["ab", "cd"], "other": ["ab", "cx"], "last": ["xb", "cd"]}.items():
        history = [{"history": [{"content": text} for text in game]} for game in games]
        (tmp_path / f"{name}.json").write_text(json.dumps(history))
    for other, expected in (("one", "4 of 4"), ("other", "3 of 4"), ("last", "2 of 3")):
        check.compare(tmp_path / "one.json", tmp_path / f"{other}.json")
        assert capsys.readouterr().out.startswith(expected)
