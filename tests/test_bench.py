"""The benchmark plays with both engines on a tiny Llama."""

from helpers import call

from tools import bench


def test_both_engines_play_replies_of_one_length(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "VOCABULARY", 400)
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    monkeypatch.setattr(bench, "SHAPE", tiny)
    bench.write_model(str(tmp_path))
    for engine in ("slots", "generate"):
        _, tokens = bench.measure(str(tmp_path), engine, games=3)
        assert tokens == 3 * 2 * bench.TURNS * bench.REPLY_TOKENS
    lines = call(bench.main, "play", "--games", 2).output.splitlines()
    assert [line.split(" | ")[:2] for line in lines[-2:]] == [["| slots", "2"], ["| generate", "1"]]


def test_a_model_of_ones_own_is_measured_and_an_engine_that_fails_says_why(tiny_model, monkeypatch):
    monkeypatch.setattr(bench, "has_vllm", lambda: True)  # which is not installed here
    slots, generate, vllm = call(bench.main, "play", "--games", 12, "--model", tiny_model).output.splitlines()[-3:]
    assert slots.startswith("| slots | 12 | ") and generate.startswith("| generate | 2 | ")
    assert "vllm==" in vllm


def test_a_model_that_is_not_there_is_status_2():
    errors = call(bench.main, "play", "--model", "no/such-model", status=2).errors
    assert "no/such-model: no such folder" in errors and "Traceback" not in errors
