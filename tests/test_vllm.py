"""`--engine vllm`: servers that play starts and ends, and the token ids that they are asked for.

Against a stand-in that speaks vLLM's protocol. `VLLM=/path/to/vllm bash tools/test.sh -k vllm` runs some tests against
the real one too.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, build_llama, build_tokenizer
from helpers import ENVIRONMENT, TORCHRUN, call, finish, flags_of, play_flags, start, users_of, write_place

from tools import evaluate_games, play_llm_game
from tools.engine import vllm
from tools.engine.model import load_tokens
from tools.games.chat import load_chat_template
from tools.games.prompts import load_templates
from tools.games.taboo import Taboo
from tools.players.player import Sampling, Turn, draw_seed
from utils import UserError, read_json_or_jsonl

pytest.importorskip("openai", reason="players behind a server need the package openai")

GAME = Taboo()
STEM = "v_sampling_words"
WORDS = [f"word{number}" for number in range(100, 140)]
REAL = os.environ.get("VLLM")
needs_vllm = pytest.mark.skipif(not REAL, reason="the variable VLLM names no executable")
QUICK = "--vllm_args=--enforce-eager"  # the real one starts in half the time
SECONDS = 120  # for anything here that is waited for


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with words, short prompts, and the stand-in as an executable."""
    folder = tmp_path_factory.mktemp("vllm")
    write_place(folder, WORDS)
    (folder / "vllm").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/stand_in_vllm.py "$@"\n')
    (folder / "vllm").chmod(0o700)
    return folder


@pytest.fixture
def told(place, tmp_path, monkeypatch):
    """Tells the stand-in how to behave; what it noted is in `notes`. No process of it may be left at the end."""

    def tell(**how):
        monkeypatch.setenv("STAND_IN", json.dumps({"note": str(tmp_path / "notes")} | how))

    monkeypatch.setenv("VLLM", str(place / "vllm"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(vllm.tempfile, "tempdir", str(tmp_path))
    tell()
    yield tell
    all_ended(tmp_path)


def notes(folder, kind):
    """What the stand-in noted of this kind, in order."""
    path = folder / "notes"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if kind in line]


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert met


def all_ended(folder):
    pids = [number for line in notes(folder, "started") for number in line["pids"]]
    wait_for(lambda: not any(map(psutil.pid_exists, pids)))


def flags(place, model, output, **changes):
    """A command with short games; None leaves a flag out."""
    return play_flags(place, model, output, **{"engine": "vllm", "model_prefix": "v", "max_new_tokens": 8} | changes)


def play(place, model, output, *words, status=0, **changes):
    """Play in this process: what it said, and the games."""
    called = call(play_llm_game.main, *flags(place, model, output, **changes), *words, status=status)
    return called.errors if status else games_of(output)


def games_of(folder, stem=STEM):
    return read_json_or_jsonl(folder / f"{stem}_results.json")


def turn_at(place, game, end):
    """The turn of message `end` of a game."""
    role = GAME.roles[end % 2]
    templates = load_templates(place / "prompts.json", GAME)
    history = tuple(game["history"][:end])
    return Turn(GAME, role, history, 2, game["index"], GAME.secrets(role, game["target_word"], history), templates)


def build_served_model(folder, bos="written by us", **changes):
    """A tiny model that ends replies often, with a tokenizer that has BOS, adds it by itself, or has none."""
    import torch
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer()
    if bos == "added by the tokenizer":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    if bos == "none":
        tokenizer.bos_token = None
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    model = build_llama(0, len(tokenizer), num_hidden_layers=1, hidden_size=128)  # vLLM knows no heads of 16
    with torch.no_grad():  # the end token about as likely as the likeliest others, wherever a reply stands
        states = model.model(torch.arange(4, 260)[None]).last_hidden_state[0]
        mean = states.mean(0)
        model.lm_head.weight[2] = mean / mean.pow(2).sum() * (states @ model.lm_head.weight.T).topk(20).values.mean()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# What is started and asked.


def test_a_server_is_started_with_the_settings_of_local_play(told, place, tiny_model, tmp_path, monkeypatch, capfd):
    hidden = ("RANK", "TORCHELASTIC_USE_AGENT_STORE", "PYTHONPATH", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in hidden:
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    games = play(place, tiny_model, tmp_path, QUICK, max_games=6)
    (started,) = notes(tmp_path, "started")
    words = started["started"]
    assert words[:2] == ["serve", os.path.realpath(tiny_model)] and words[-1] == "--enforce-eager"
    assert words[-4:-1] == ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"]
    given = dict(zip(words[2:-4:2], words[3:-4:2], strict=True))
    expected = {"host": "127.0.0.1", "generation-config": "vllm", "max-model-len": "256", "dtype": "float32"}
    expected |= {"max-num-seqs": "256", "uvicorn-log-level": "warning"}
    assert {name: given[f"--{name}"] for name in expected} == expected
    assert not {*hidden, "CUDA_VISIBLE_DEVICES"} & started["environment"].keys()
    assert "loading the model" not in "".join(capfd.readouterr())
    assert all("prompt_tokens" not in reply for game in games for reply in game["replies"])  # nothing is paid
    assert not list(tmp_path.glob("vllm-*.log"))


@pytest.mark.parametrize("bos", ["written by us", "added by the tokenizer", "none"])
def test_the_ids_of_local_play_go_out_and_come_back(bos, told, place, tmp_path):
    folder = build_served_model(tmp_path / "model", bos)
    games = play(place, folder, tmp_path, max_games=8, max_length=110, min_new_tokens=2, top_k=0)
    tokens = load_tokens(folder, Sampling(max_length=110, max_new_tokens=8))
    asked = {line["asked"]["seed"]: line["asked"] for line in notes(tmp_path, "asked")}
    how = {"temperature": 1.2, "top_p": 1.0, "top_k": -1, "min_tokens": 2, "max_tokens": 8}
    how |= {"stop_token_ids": tokens.stop_ids, "return_token_ids": True}
    for game in games:
        for end, (message, reply) in enumerate(zip(game["history"], game["replies"], strict=True)):
            turn = turn_at(place, game, end)
            body, (ids, cut) = asked[draw_seed(42, turn)], tokens.encode_turn(turn)
            assert body["prompt"] == ids and reply["prompt_cut"] == cut
            assert ids.count(1) == (bos != "none" and not cut)
            assert body | how == body
            assert reply["tokens"] == len(message["content"]) + (reply["finish_reason"] == "stop")
    replies = [reply for game in games for reply in game["replies"]]
    assert len(replies) == len(asked) == 8 * 4
    assert any(reply["prompt_cut"] for reply in replies) and not all(reply["prompt_cut"] for reply in replies)


def test_prompts_of_a_chat_template_are_complete(told, place, tmp_path):
    template = "<s>{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"
    folder = build_served_model(tmp_path / "chat", chat_template=template)
    games = play(place, folder, tmp_path, chat_template=True, max_games=2, max_length=1024)
    chat, asked = load_chat_template(folder), [line["asked"] for line in notes(tmp_path, "asked")]
    for game in games:
        text = turn_at(place, game, 2).prompt(chat)
        assert text.startswith("<s>[system] Rule 0")
        ids = build_tokenizer()(text, add_special_tokens=False)["input_ids"]
        assert [body["stop_token_ids"] for body in asked if body["prompt"] == ids] == [[2]]


@pytest.mark.parametrize("executable", ["stand-in", pytest.param("real", marks=needs_vllm)])
def test_greedy_games_are_those_of_slots(executable, told, place, tmp_path, monkeypatch):
    folder = build_served_model(tmp_path / "model", "added by the tokenizer")
    told(model=True)
    monkeypatch.setenv("VLLM", str(place / "vllm") if executable == "stand-in" else REAL)
    games = {}
    for engine, words in {"vllm": [QUICK], "slots": []}.items():
        changes = {"engine": engine, "task_type": "testing", "max_new_tokens": 12}
        call(play_llm_game.main, *flags(place, folder, tmp_path / engine, **changes), *words)
        games[engine] = [game["history"] for game in games_of(tmp_path / engine, "v_testing_words")]
    equal = sum(one == other for one, other in zip(games["vllm"], games["slots"], strict=True))
    assert equal >= 0.9 * len(WORDS)  # rounding may turn a close decision
    assert executable == "real" or equal == len(WORDS)


# Which servers.


def test_equal_models_share_a_server_and_different_ones_the_gpu(
    told, place, tiny_model, other_model, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    both = {"defender_model_name_or_path": other_model}
    for name, changes, share in (("one", {}, "0.900"), ("two", both, "0.450")):
        play(place, tiny_model, tmp_path / name, max_games=2, **changes)
        lines = notes(tmp_path, "started")
        assert {line["environment"]["CUDA_VISIBLE_DEVICES"] for line in lines} == {"4"}
        words = lines[-1]["started"]
        assert words[words.index("--gpu-memory-utilization") + 1] == share
    assert [line["started"][1] for line in lines] == [tiny_model, *sorted([tiny_model, other_model])]


def test_in_matches_the_server_of_against_stays_up(told, place, tiny_model, other_model, tmp_path):
    (copy := tmp_path / "copy").mkdir()
    for file in os.listdir(other_model):
        (copy / file).symlink_to(f"{other_model}/{file}")
    players = [f"a={tiny_model}", f"b={other_model}", f"c={copy}"]
    values = {"players": players, "against": "a", "words": place / "words.txt", "max_words": 3, "engine": "vllm"}
    values |= {"games_per_word": 1, "task_type": "sampling", "output_dir": tmp_path / "out", "max_turns": 2}
    values |= {"max_length": 256, "max_new_tokens": 8, "prompt_templates": place / "prompts.json"}
    call(evaluate_games.main, *flags_of(values))
    folders = [line["started"][1] for line in notes(tmp_path, "started")]
    assert folders.count(tiny_model) == 1 and len(folders) == 3


def test_each_process_has_its_own_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,GPU-7,3")
    for rank, one, two in ((0, ["0"], ["0", "2"]), (1, ["2"], ["GPU-7", "3"])):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert (vllm.own_gpus(1), vllm.own_gpus(2)) == (one, two)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="process 2 of this machine has no 2 GPUs of its own; there are 4"):
        vllm.own_gpus(2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(vllm.torch.cuda, "device_count", lambda: 3)
    assert vllm.own_gpus(1) == ["2"]


def test_another_program_on_its_port_is_not_taken_for_it(told, place, tiny_model):
    with vllm.VLLMFlags().vllm_server(Path(tiny_model), max_length=64) as server:
        other = vllm.VLLMServer(place, "vllm", [])
        other.port = server.port
        assert server._answers() and not other._answers()


# The choice of the engine.


def test_auto_is_vllm_where_there_are_a_gpu_and_a_vllm_and_a_run_keeps_it(
    told, place, tiny_model, tmp_path, monkeypatch
):
    how = {"engine": None, "place": place, "model": tiny_model, "output": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr(vllm.torch.cuda, "is_available", lambda: True)
        play(**how, max_games=2)
    play(**how, max_games=4)  # without a GPU
    assert len(notes(tmp_path, "started")) == 2
    monkeypatch.setenv("VLLM", "no-such-vllm")
    assert "there is no 'no-such-vllm' to run" in play(**how, max_games=6, status=2)


def test_auto_is_our_own_engine_without_a_gpu_and_a_run_keeps_it(told, place, tiny_model, tmp_path, monkeypatch):
    play(place, tiny_model, tmp_path, engine=None, max_games=2)
    monkeypatch.setattr(vllm.VLLMFlags, "choose_engine", lambda *_: "vllm")
    play(place, tiny_model, tmp_path, engine=None, max_games=3)
    assert notes(tmp_path, "started") == []


# Faults.


def test_a_model_that_vllm_refuses_ends_the_run_with_its_last_lines(told, place, tiny_model, tmp_path):
    told(fail="ValueError: no such architecture")
    *said, last = play(place, tiny_model, tmp_path, status=2).splitlines()
    assert "    ValueError: no such architecture" in said
    folder, log = re.search(r"error: (.*): its vLLM .* status 1 \(its output: (.*)\)", last).groups()
    assert folder == os.path.realpath(tiny_model)
    assert Path(log).read_text() == "loading the model\nValueError: no such architecture\n"


def test_a_server_that_dies_ends_the_run_and_the_same_command_goes_on(told, place, tiny_model, tmp_path):
    told(die_after=50)
    said = play(place, tiny_model, tmp_path, concurrent_games=4, status=2)
    assert re.search("a fault of the engine[?\ufffd].31m", said)  # no control characters
    assert "status 7" in said.splitlines()[-1]
    safe = (tmp_path / f"{STEM}_rank0.jsonl").read_bytes()
    assert 8 <= safe.count(b"\n") <= 12
    told()
    games = play(place, tiny_model, tmp_path, concurrent_games=4)
    assert (tmp_path / f"{STEM}_rank0.jsonl").read_bytes().startswith(safe)
    assert games == play(place, tiny_model, tmp_path / "undisturbed")


@pytest.mark.kills
@pytest.mark.parametrize(
    "victim, number, when",
    [
        ("play", signal.SIGKILL, "started"),
        ("play", signal.SIGKILL, "asked"),
        ("play", signal.SIGINT, "asked"),
        ("supervisor", signal.SIGKILL, "asked"),
        ("server", signal.SIGKILL, "asked"),
        ("rank", signal.SIGKILL, "asked"),
    ],
)
def test_nothing_outlives_a_kill_and_no_game_is_lost(victim, number, when, told, place, tiny_model, tmp_path):
    """`rank` is one of two under torchrun."""
    told(slow=300 if when == "started" else 0, pace=0.02)
    ranks = 2 if victim == "rank" else 1
    launcher = [*TORCHRUN, "--nproc_per_node=2"] if ranks == 2 else [sys.executable]
    words = flags(place, tiny_model, tmp_path / "out", concurrent_games=1)
    process = start([*launcher, "-m", "tools.play_llm_game", *words], env=ENVIRONMENT | vllm_variables())
    wait_for(lambda: len(notes(tmp_path, "started")) == ranks and len(notes(tmp_path, when)) >= ranks)
    server = psutil.Process(notes(tmp_path, "started")[0]["pids"][0])
    supervisor = server.parent()
    victims = {"play": psutil.Process(process.pid), "server": server, "supervisor": supervisor}
    (victims.get(victim) or supervisor.parent()).send_signal(number)
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert ("its vLLM has ended" in printed) == (victim in ("server", "supervisor"))
    all_ended(tmp_path)
    files = {path: path.read_bytes() for path in (tmp_path / "out").glob(f"{STEM}_rank*.jsonl")}
    told()
    if ranks == 1:
        games = play(place, tiny_model, tmp_path / "out", concurrent_games=1)
        assert games == play(place, tiny_model, tmp_path / "undisturbed")
        for path, content in files.items():
            assert path.read_bytes().startswith(content[: content.rfind(b"\n") + 1])


def vllm_variables():
    return {name: os.environ[name] for name in ("VLLM", "STAND_IN")}


def test_a_child_that_ignores_the_signal_is_killed():
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
    command = [sys.executable, "-IS", vllm.supervise.__file__, sys.executable, "-c", f"{stubborn}; time.sleep(99)"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n"
    (child,) = psutil.Process(process.pid).children()
    process.stdin.close()
    assert process.wait(20) == 128 + signal.SIGKILL
    assert not child.is_running()
    process.stdout.close()


# The real vLLM.


@needs_vllm
def test_lengths_of_drawn_replies_are_those_of_slots(place, tmp_path):
    folder = build_served_model(tmp_path / "model")
    lengths = {}
    for engine, words in {"vllm": [QUICK], "slots": []}.items():
        games = play(place, folder, tmp_path / engine, *words, engine=engine, max_turns=1, max_new_tokens=16)
        lengths[engine] = [game["replies"][0]["tokens"] for game in games]
    error = (sum(statistics.variance(each) for each in lengths.values()) / len(WORDS)) ** 0.5
    assert abs(statistics.mean(lengths["vllm"]) - statistics.mean(lengths["slots"])) < 4 * error


@needs_vllm
def test_the_real_vllm_says_why_it_refuses_a_model_and_ends_with_a_killed_parent(place, tmp_path):
    folder = build_served_model(tmp_path / "model")
    said = play(place, folder, tmp_path / "out", status=2, max_length=100_000)  # of 2048 positions
    assert re.search("max_model_len|max_position_embeddings", said)
    words = flags(place, folder, tmp_path / "killed", concurrent_games=1)
    process = start([sys.executable, "-m", "tools.play_llm_game", *words, QUICK])
    wait_for(lambda: len(users_of(folder)) > 2)
    process.kill()
    finish(process, status=-9)
    wait_for(lambda: not users_of(folder))
