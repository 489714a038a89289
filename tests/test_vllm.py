"""`--engine vllm`: servers that play starts and ends, and the token ids that they are asked for.

Against a stand-in that speaks vLLM's protocol. `VLLM=/path/to/vllm bash tools/test.sh -k vllm` runs the tests that
have both against the real one too.
"""

import contextlib
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
from forks import KILL, python
from test_server_player import run_here

from tools import evaluate_games
from tools.engine import vllm
from tools.engine.model import load_tokens
from tools.games.chat import load_chat_template
from tools.games.prompts import load_templates, play_prompt
from tools.games.taboo import Taboo
from tools.players.player import Sampling, Turn, draw_seed
from utils import read_json_or_jsonl, write_json

pytest.importorskip("openai", reason="players behind a server need the package openai")

GAME = Taboo()
STEM = "v_sampling_words"
WORDS = [f"word{number}" for number in range(100, 140)]
REAL = os.environ.get("VLLM")
needs_vllm = pytest.mark.skipif(not REAL, reason="the variable VLLM names no executable")
BOTH = ["stand-in", pytest.param("real", marks=needs_vllm)]
QUICK = "--enforce-eager"  # the real one starts in half the time


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with words, short prompts, and the stand-in as an executable: of canned replies, and of a model's."""
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    rules = [f"Rule {number}: {{max_turns}} turns.\n" for number in range(8)]
    prompts = {"rules": rules, "attacker_instruction": "Hide `{target_word}`.", "defender_instruction": "Guess."}
    write_json(folder / "prompts.json", prompts)
    for name, interpreter in (("canned", f"{sys.executable} -IS"), ("sampling", python())):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {interpreter} {ROOT}/tests/stand_in_vllm.py "$@"\n')
        path.chmod(0o700)
    return folder


@pytest.fixture
def told(place, tmp_path, monkeypatch):
    """Tells the stand-in how to behave; what it noted is in `notes`."""

    def tell(**how):
        monkeypatch.setenv("STAND_IN", json.dumps({"note": str(tmp_path / "notes")} | how))

    monkeypatch.setenv("VLLM", str(place / "canned"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(vllm.tempfile, "tempdir", str(tmp_path))
    tell()
    yield tell
    for number in pids(tmp_path):
        assert wait_for(lambda number=number: not psutil.pid_exists(number), 5), "a process of vLLM is left"


def notes(folder, kind):
    """What the stand-in noted of this kind, in order."""
    path = folder / "notes"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if kind in line]


def pids(folder):
    return [number for line in notes(folder, "started") for number in line["pids"]]


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def flags(place, model, output, **changes):
    """A command with short games; None leaves a flag out."""
    values = {
        "attacker_model_name_or_path": model,
        "defender_model_name_or_path": model,
        "engine": "vllm",
        "model_prefix": "v",
        "data_suffix": "words",
        "data_path": place / "words.txt",
        "output_dir": output,
        "max_turns": 2,
        "max_length": 256,
        "max_new_tokens": 8,
        "prompt_templates": place / "prompts.json",
    } | changes
    return words_of(values)


def words_of(values):
    lists = {
        name: value if isinstance(value, list) else [value] for name, value in values.items() if value is not None
    }
    return [str(text) for name, value in lists.items() for text in (f"--{name}", *value)]


def start(arguments, *launcher):
    """The program in a process of its own."""
    command = [python(), *(launcher or ["-m", "tools.play_llm_game"]), *arguments]
    environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def games_of(folder):
    return read_json_or_jsonl(folder / f"{STEM}_results.json")


def turn_at(place, game, end):
    """The turn of message `end` of a game."""
    role = GAME.roles[end % 2]
    templates = load_templates(place / "prompts.json", GAME)
    history = tuple(game["history"][:end])
    return Turn(GAME, role, history, 2, game["index"], GAME.secrets(role, game["target_word"], history), templates)


# --- what is started and asked -------------------------------------------------------------------------------------


class TestRequests:
    def test_a_server_is_started_with_the_settings_of_local_play(
        self, told, place, tiny_model, tmp_path, monkeypatch, capfd
    ):
        for name in ("RANK", "TORCHELASTIC_USE_AGENT_STORE"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("PYTHONPATH", ".")
        arguments = flags(place, tiny_model, tmp_path, max_games=6)
        assert run_here([*arguments, "--vllm_args=--enforce-eager"], monkeypatch) == 0
        (started,) = notes(tmp_path, "started")
        words = started["started"]
        assert words[:2] == ["serve", os.path.realpath(tiny_model)] and words[-1] == "--enforce-eager"
        assert words[-4:-1] == ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"]
        given = dict(zip(words[2:-4:2], words[3:-4:2], strict=True))
        expected = {"host": "127.0.0.1", "generation-config": "vllm", "max-model-len": "256", "dtype": "float32"}
        expected |= {"max-num-seqs": "256", "uvicorn-log-level": "warning"}
        assert {name: given[f"--{name}"] for name in expected} == expected
        assert started["hidden"] == [] and started["gpus"] is None
        out, err = capfd.readouterr()
        assert "vLLM answers after" in err and "loading the model" not in out + err
        assert "games to play" not in err and "servers answered" not in err  # nothing is paid
        assert all("prompt_tokens" not in reply for game in games_of(tmp_path) for reply in game["replies"])

    def test_the_ids_of_local_play_go_out_and_come_back(self, told, place, tiny_model, tmp_path, monkeypatch):
        changes = {"max_games": 8, "max_length": 110, "min_new_tokens": 2, "top_k": 0}
        assert run_here(flags(place, tiny_model, tmp_path, **changes), monkeypatch) == 0
        tokens = load_tokens(tiny_model, Sampling(max_length=110, max_new_tokens=8))
        asked = {body["seed"]: body for line in notes(tmp_path, "asked") for body in [line["asked"]]}
        messages = 0
        for game in games_of(tmp_path):
            for end, (message, reply) in enumerate(zip(game["history"], game["replies"], strict=True)):
                turn = turn_at(place, game, end)
                body, (ids, cut) = asked[draw_seed(42, turn)], tokens.encode_turn(turn)
                assert body["prompt"] == ids and reply["prompt_cut"] == cut
                how = {"temperature": 1.2, "top_p": 1.0, "top_k": -1, "min_tokens": 2, "max_tokens": 8}
                how |= {"stop_token_ids": tokens.stop_ids, "return_token_ids": True}
                assert {name: body[name] for name in how} == how
                assert reply["tokens"] == len(message["content"]) + (reply["finish_reason"] == "stop")
                messages += 1
        assert messages == len(asked) == 8 * 4
        assert any(reply["prompt_cut"] for game in games_of(tmp_path) for reply in game["replies"])

    def test_prompts_of_a_chat_template_are_complete(self, told, place, tiny_model, tmp_path, monkeypatch):
        tokenizer = build_tokenizer()
        tokenizer.chat_template = "<s>{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"
        folder = tmp_path / "chat"
        build_llama(0, len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        changes = {"chat_template": True, "max_games": 2, "max_length": 1024}
        assert run_here(flags(place, folder, tmp_path, **changes), monkeypatch) == 0
        chat, asked = load_chat_template(str(folder)), [line["asked"] for line in notes(tmp_path, "asked")]
        for game in games_of(tmp_path):
            text = turn_at(place, game, 2).prompt(chat)
            assert text.startswith("<s>[system] Rule 0")
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert [body["stop_token_ids"] for body in asked if body["prompt"] == ids] == [[2]]

    def test_the_same_draws_whatever_the_order(self, told, place, tiny_model, tmp_path, monkeypatch):
        histories = []
        for name, changes in {"all": {}, "one": {"concurrent_games": 1}, "seed": {"seed": 1}}.items():
            assert run_here(flags(place, tiny_model, tmp_path / name, max_games=9, **changes), monkeypatch) == 0
            histories.append([game["history"] for game in games_of(tmp_path / name)])
        assert histories[0] == histories[1] != histories[2]

    def test_a_server_that_keeps_ids_to_itself_gives_texts(self, told, place, tiny_model, tmp_path, monkeypatch):
        told(texts_only=True)
        assert run_here(flags(place, tiny_model, tmp_path, max_games=2), monkeypatch) == 0
        assert all(set(message["content"]) == {"x"} for game in games_of(tmp_path) for message in game["history"])

    def test_greedy_play_sends_no_sampling(self, told, place, tiny_model, tmp_path, monkeypatch):
        assert run_here(flags(place, tiny_model, tmp_path, max_games=2, task_type="testing"), monkeypatch) == 0
        for line in notes(tmp_path, "asked"):
            assert line["asked"]["temperature"] == 0 and not {"top_k", "top_p"} & line["asked"].keys()


class TestLineup:
    def test_equal_models_share_a_server_and_different_ones_the_gpu(
        self, told, place, tiny_model, other_model, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
        both = {"defender_model_name_or_path": other_model}
        for name, changes, share in (("one", {}, "0.900"), ("two", both, "0.450")):
            assert run_here(flags(place, tiny_model, tmp_path / name, max_games=2, **changes), monkeypatch) == 0
            lines = notes(tmp_path, "started")
            assert [line["gpus"] for line in lines] == ["4"] * len(lines)
            assert lines[-1]["started"][lines[-1]["started"].index("--gpu-memory-utilization") + 1] == share
        folders = [line["started"][1] for line in lines]
        assert folders == [tiny_model, *sorted([tiny_model, other_model])]

    def test_in_matches_the_server_of_against_stays_up(
        self, told, place, tiny_model, other_model, tmp_path, monkeypatch
    ):
        third = tmp_path / "third"
        third.symlink_to(other_model)
        (copy := tmp_path / "copy").mkdir()
        for file in os.listdir(other_model):
            (copy / file).symlink_to(f"{other_model}/{file}")
        players = [f"a={tiny_model}", f"b={other_model}", f"c={copy}"]
        values = {"players": players, "against": "a", "words": place / "words.txt", "max_words": 3, "engine": "vllm"}
        values |= {"games_per_word": 1, "task_type": "sampling", "output_dir": tmp_path / "out", "max_turns": 2}
        values |= {"max_length": 256, "max_new_tokens": 8, "prompt_templates": place / "prompts.json"}
        assert run_here(words_of(values), monkeypatch, evaluate_games) == 0
        folders = [line["started"][1] for line in notes(tmp_path, "started")]
        assert folders.count(tiny_model) == 1 and len(folders) == 3

    def test_each_process_has_its_own_gpus(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,GPU-7,3")
        for rank, one, two in ((0, ["0"], ["0", "2"]), (1, ["2"], ["GPU-7", "3"])):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            assert (vllm.own_gpus(1), vllm.own_gpus(2)) == (one, two)
        monkeypatch.setenv("LOCAL_RANK", "2")
        with pytest.raises(ValueError, match="process 2 of this machine has no 2 GPUs of its own; there are 4"):
            vllm.own_gpus(2)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        monkeypatch.setattr(vllm.torch.cuda, "device_count", lambda: 3)
        assert vllm.own_gpus(1) == ["2"]


# --- the choice of the engine --------------------------------------------------------------------------------------


class TestAuto:
    def test_it_is_vllm_where_there_are_a_gpu_and_a_vllm_and_stays_so(
        self, told, place, tiny_model, tmp_path, monkeypatch, capsys
    ):
        arguments = flags(place, tiny_model, tmp_path, engine=None, max_games=2)
        with monkeypatch.context() as patch:
            patch.setattr(vllm.torch.cuda, "is_available", lambda: True)
            assert run_here(arguments, patch) == 0
        assert f"--engine auto: vllm ({place / 'canned'})" in capsys.readouterr().err
        arguments = flags(place, tiny_model, tmp_path, engine=None, max_games=4)
        assert run_here(arguments, monkeypatch) == 0  # without a GPU
        assert len(notes(tmp_path, "started")) == 2
        monkeypatch.setenv("VLLM", "no-such-vllm")
        assert run_here(flags(place, tiny_model, tmp_path, engine=None, max_games=6), monkeypatch) == 2
        assert "--engine vllm: there is no 'no-such-vllm' to run" in capsys.readouterr().err

    def test_without_them_it_is_our_own_engine_and_a_run_keeps_that(
        self, told, place, tiny_model, tmp_path, monkeypatch, capsys
    ):
        assert run_here(flags(place, tiny_model, tmp_path, engine=None, max_games=2), monkeypatch) == 0
        assert "--engine auto: this project's own engine, without vLLM (there is no GPU)" in capsys.readouterr().err
        monkeypatch.setattr(vllm.VLLMFlags, "choose_engine", lambda *_: "vllm")
        assert run_here(flags(place, tiny_model, tmp_path, engine=None, max_games=3), monkeypatch) == 0
        assert notes(tmp_path, "started") == []

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"vllm": "no-such-vllm"}, "--engine vllm: there is no 'no-such-vllm' to run; name it by --vllm PATH"),
            ({"engine": "slots", "tensor_parallel_size": 2, "vllm": "x"}, "--vllm, --tensor_parallel_size: only for"),
            ({"tensor_parallel_size": 0, "vllm_memory": 0}, "--tensor_parallel_size is 0; .*; --vllm_memory is 0.0"),
            ({"vllm_args": "a 'b"}, '--vllm_args "a \'b" cannot be split into words'),
            ({"vllm_args": "--x --port=1"}, "--vllm_args: --port=1 is set by this program"),
        ],
    )
    def test_bad_flags_end_with_one_line(
        self, changes, message, told, place, tiny_model, tmp_path, monkeypatch, capsys
    ):
        assert run_here(flags(place, tiny_model, tmp_path / "out", **changes), monkeypatch) == 2
        assert re.search(message, capsys.readouterr().err.splitlines()[-1])
        assert not (tmp_path / "out").exists()


# --- faults --------------------------------------------------------------------------------------------------------


class TestFaults:
    def test_a_model_that_vllm_refuses_ends_the_run_with_its_last_lines(
        self, told, place, tiny_model, tmp_path, monkeypatch, capsys
    ):
        told(fail="ValueError: no such architecture")
        assert run_here(flags(place, tiny_model, tmp_path), monkeypatch) == 2
        err = capsys.readouterr().err
        assert "the last lines of its vLLM:\n    loading the model\n    ValueError: no such architecture\n" in err
        last = r"error: (.*): its vLLM has ended with status 1 \(its output: (.*)\); --engine slots plays without"
        folder, log = re.search(last, err.splitlines()[-1]).groups()
        assert folder == os.path.realpath(tiny_model)
        assert Path(log).read_text() == "loading the model\nValueError: no such architecture\n"

    def test_the_wait_shows_progress(self, told, place, tiny_model, tmp_path, monkeypatch, capsys):
        told(slow=2)
        monkeypatch.setattr(vllm, "TELL_EVERY", 0.5)
        assert run_here(flags(place, tiny_model, tmp_path, max_games=1), monkeypatch) == 0
        assert re.search("vLLM is starting, [12] s: loading the model\n", capsys.readouterr().err)

    def test_a_port_that_another_program_took_is_left_to_it(self, told, place, tiny_model, tmp_path, monkeypatch):
        told(take_port=str(tmp_path / "taken"))
        assert run_here(flags(place, tiny_model, tmp_path, max_games=1), monkeypatch) == 0
        assert len(notes(tmp_path, "started")) == 2

    def test_another_program_on_its_port_is_not_taken_for_it(self, told, place, tiny_model):
        with vllm.VLLMFlags().vllm_server(place, max_length=64, dtype="float32") as server:
            other = vllm.VLLMServer(place, "vllm", [])
            other.port = server.port
            assert server._answers() and not other._answers()

    def test_a_server_that_dies_ends_the_run_and_the_same_command_goes_on(
        self, told, place, tiny_model, tmp_path, monkeypatch, capsys
    ):
        told(die_after=50)
        arguments = flags(place, tiny_model, tmp_path, concurrent_games=4)
        assert run_here(arguments, monkeypatch) == 2
        err = capsys.readouterr().err
        assert re.search("a fault of the engine[?\ufffd].31m", err)  # no control characters
        assert re.search(r"has ended with status 7 \(.*\); the games played so far are safe$", err.splitlines()[-1])
        safe = (tmp_path / f"{STEM}_rank0.jsonl").read_bytes()
        assert 8 <= safe.count(b"\n") <= 12
        told()
        assert run_here(arguments, monkeypatch) == 0
        assert (tmp_path / f"{STEM}_rank0.jsonl").read_bytes().startswith(safe)
        assert run_here(flags(place, tiny_model, tmp_path / "quiet"), monkeypatch) == 0
        assert games_of(tmp_path) == games_of(tmp_path / "quiet")

    @pytest.mark.parametrize("number", [KILL, signal.SIGTERM, signal.SIGINT], ids=["KILL", "TERM", "INT"])
    @pytest.mark.parametrize("phase", ["starting", "playing"])
    def test_nothing_outlives_a_killed_parent(self, number, phase, told, place, tiny_model, tmp_path):
        told(slow=300 if phase == "starting" else 0)
        process = start(flags(place, tiny_model, tmp_path, concurrent_games=1, max_turns=50, max_length=4096))
        kind = {"starting": "started", "playing": "asked"}[phase]
        assert wait_for(lambda: notes(tmp_path, kind))
        process.send_signal(number)
        assert process.wait(20) != 0
        process.stderr.close()
        assert wait_for(lambda: not any(map(psutil.pid_exists, pids(tmp_path))), 10)

    def test_a_killed_rank_takes_all_servers_with_it(self, told, place, tiny_model, tmp_path):
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--monitor_interval=0.1"]
        arguments = flags(place, tiny_model, tmp_path, concurrent_games=1, max_turns=50, max_length=4096)
        process = start(arguments, *launcher, "-m", "tools.play_llm_game")
        assert wait_for(lambda: len(notes(tmp_path, "started")) == 2 and len(notes(tmp_path, "asked")) > 10)
        server, _ = notes(tmp_path, "started")[0]["pids"]
        psutil.Process(server).parent().parent().kill()  # server, supervisor, rank
        assert process.wait(60) != 0
        process.stderr.close()
        assert wait_for(lambda: not any(map(psutil.pid_exists, pids(tmp_path))), 10)

    def test_nothing_outlives_a_killed_supervisor(self, told, place, tiny_model, tmp_path):
        process = start(flags(place, tiny_model, tmp_path, concurrent_games=1, max_turns=50, max_length=4096))
        assert wait_for(lambda: notes(tmp_path, "asked"))
        server, _ = notes(tmp_path, "started")[0]["pids"]
        psutil.Process(server).parent().kill()
        _, printed = process.communicate(timeout=20)
        assert process.returncode == 2 and "its vLLM has ended by SIGKILL" in printed
        assert wait_for(lambda: not any(map(psutil.pid_exists, pids(tmp_path))), 10)

    def test_a_child_that_ignores_the_signal_is_killed(self, tmp_path, monkeypatch):
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
        command = [sys.executable, "-IS", vllm.supervise.__file__, sys.executable, "-c", f"{stubborn}; time.sleep(99)"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"1\n"
        (child,) = psutil.Process(process.pid).children()
        process.stdin.close()
        assert process.wait(20) == 128 + signal.SIGKILL
        assert not child.is_running()
        process.stdout.close()


# --- the same tokens everywhere ------------------------------------------------------------------------------------


def build_served_model(folder, kind):
    """A tiny model that ends replies often, with a tokenizer that adds BOS by itself, has one, or has none."""
    import torch
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer()
    if kind == "adds":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    if kind == "none":
        tokenizer.bos_token = None
    model = build_llama(0, len(tokenizer), num_hidden_layers=1, hidden_size=128)  # vLLM knows no heads of 16
    with torch.no_grad():  # the end token about as likely as the likeliest others, wherever a reply stands
        states = model.model(torch.arange(4, 260)[None]).last_hidden_state[0]
        mean = states.mean(0)
        model.lm_head.weight[2] = mean / mean.pow(2).sum() * (states @ model.lm_head.weight.T).topk(20).values.mean()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class TestTokens:
    """Prompt tokens and lengths of first replies, by every engine and behind a server."""

    GAMES = 30

    @pytest.mark.parametrize("executable", BOTH)
    @pytest.mark.parametrize("kind", ["adds", "has", "none"])
    def test_all_engines_play_the_same_game(self, kind, executable, told, place, tmp_path, monkeypatch, capsys):
        folder = build_served_model(tmp_path / "model", kind)
        told(model=True)
        monkeypatch.setenv("VLLM", str(place / "sampling") if executable == "stand-in" else REAL)
        words = tmp_path / "words.txt"
        words.write_text("\n".join(f"word{number}" for number in range(self.GAMES)))
        how = {"max_turns": 1, "max_new_tokens": 16, "data_path": words}
        runs = {name: how | {"engine": name} for name in ("slots", "generate", "vllm")}
        with vllm.VLLMFlags(vllm_args=QUICK).vllm_server(tmp_path / "model", max_length=256) as server:
            monkeypatch.setenv("OPENAI_API_KEY", server.key)
            model = f"openai:{server.model}"
            asked = how | {"engine": None, "openai_base_url": server.url}
            asked |= {f"{side}_model_name_or_path": model for side in GAME.roles}
            runs |= {"text": asked | {"openai_extra_sampling": True}, "ids": asked | {"openai_tokenizer": folder}}
            for name, changes in runs.items():
                quick = [f"--vllm_args={QUICK}"] if name == "vllm" else []
                assert run_here([*flags(place, folder, tmp_path / name, **changes), *quick], monkeypatch) == 0
        games = {name: games_of(tmp_path / name) for name in runs}
        lengths = {name: [game["replies"][0]["tokens"] for game in games[name]] for name in runs}
        means = {name: (statistics.mean(each), statistics.variance(each)) for name, each in lengths.items()}
        for name, (mean, variance) in means.items():
            if name != "text" or kind != "has":  # that is another game
                error = ((variance + means["slots"][1]) / self.GAMES) ** 0.5
                assert abs(mean - means["slots"][0]) < 4 * error, means
        tokens = load_tokens(folder, Sampling(max_length=256, max_new_tokens=16))
        for name, without in (("ids", 0), ("text", kind == "has")):
            for game in games[name]:
                turn = turn_at(place, game, 0)
                ids = tokens.encode(play_prompt(GAME, (), game["target_word"], 1, turn.templates))[0]
                assert game["replies"][0]["prompt_tokens"] == len(ids) - without
        said = [line for line in capsys.readouterr().err.splitlines() if "--openai_tokenizer MODEL" in line]
        assert len(said) == 1 and f"puts {1 if kind == 'adds' else 'no'} special token" in said[0]


class TestGreedyGames:
    @pytest.mark.parametrize("executable", BOTH)
    def test_they_are_those_of_slots(self, executable, told, place, tmp_path, monkeypatch):
        folder = build_served_model(tmp_path / "model", "has")
        told(model=True)
        monkeypatch.setenv("VLLM", str(place / "sampling") if executable == "stand-in" else REAL)
        games = {}
        for engine in ("vllm", "slots"):
            how = {"engine": engine, "task_type": "testing", "model_prefix": "v", "max_new_tokens": 12}
            quick = [f"--vllm_args={QUICK}"] if engine == "vllm" else []
            assert run_here([*flags(place, folder, tmp_path / engine, **how), *quick], monkeypatch) == 0
            path = tmp_path / engine / "v_testing_words_results.json"
            games[engine] = [game["history"] for game in read_json_or_jsonl(path)]
        equal = sum(one == other for one, other in zip(games["vllm"], games["slots"], strict=True))
        assert equal >= 0.9 * len(WORDS)  # rounding may turn a close decision
        assert executable == "real" or equal == len(WORDS)


@needs_vllm
class TestRealVLLM:
    def test_a_model_that_it_refuses_and_a_killed_parent(self, place, tmp_path, monkeypatch, capfd):
        folder = build_served_model(tmp_path / "model", "has")
        changes = {"max_length": 100_000}  # of 2048 positions
        assert run_here(flags(place, folder, tmp_path / "out", **changes), monkeypatch) == 2
        assert re.search("max_model_len|max_position_embeddings", capfd.readouterr().err)
        arguments = flags(place, folder, tmp_path / "killed", concurrent_games=1)
        process = start([*arguments, f"--vllm_args={QUICK}"])
        server = f"{folder}"
        assert wait_for(lambda: len(processes_with(server)) > 1, 120)
        process.send_signal(KILL)
        process.wait(20)
        process.stderr.close()
        assert wait_for(lambda: not processes_with(server), 15)


def processes_with(text):
    """Processes that were started with this in their arguments, but for this program's."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(text == word for word in process.cmdline()) and "serve" in process.cmdline():
                found.append(process.pid)
    return found
