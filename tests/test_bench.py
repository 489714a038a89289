"""The benchmark plays with both engines on a tiny Llama."""

from helpers import call

from tools import bench


def test_both_engines_play_their_games_to_the_same_lengths(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "VOCABULARY", 400)
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    monkeypatch.setattr(bench, "SHAPE", tiny)
    bench.write_model(str(tmp_path))
    messages = [(game, message) for game in range(3) for message in range(2 * bench.TURNS)]
    for engine in ("slots", "generate"):
        _, tokens = bench.measure(str(tmp_path), engine, games=3)
        assert sorted(tokens) == sorted(bench.reply_tokens(*each) for each in messages)
    lines = call(bench.main, "play", "--games", 2).output.splitlines()
    assert [line.split(" | ")[:2] for line in lines[-2:]] == [["| slots", "2"], ["| generate", "1"]]


def test_a_model_of_ones_own_ends_its_replies_by_itself(tiny_model, monkeypatch):
    monkeypatch.setattr(bench, "has_vllm", lambda: True)  # which fails here, as one that does not know the model
    slots, generate, vllm = call(bench.main, "play", "--games", 12, "--model", tiny_model).output.splitlines()[-3:]
    for line, engine, games in ((slots, "slots", 12), (generate, "generate", 2)):
        _, name, played, _, _, tokens, _ = map(str.strip, line.split("|"))
        assert (name, int(played)) == (engine, games) and 1 <= float(tokens) < bench.MEAN_TOKENS
    assert "vllm==" in vllm
