"""`--engine vllm`: what vLLM is given, and which models it holds at once. Most tests use a stand-in for vLLM."""

import importlib.util
import os
import random
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import build_llama, build_tokenizer
from helpers import ENVIRONMENT, TORCHRUN, call, finish, flags_of, play_flags, start, write_place

from tools import evaluate_games, play_llm_game
from tools.common.errors import UserError
from tools.common.files import read_json_or_jsonl
from tools.engine import vllm
from tools.engine.local import Codec
from tools.games.prompts import load_templates
from tools.games.taboo import Taboo
from tools.players.player import Sampling, Turn, draw_seed
from tools.selfplay import make

GAME = Taboo()
WORDS = [f"word{number}" for number in range(100, 140)]
LETTERS = range(69, 95)  # ids of the tests' byte tokenizer
ARGS = "--enforce-eager --no-enable-chunked-prefill"  # the first halves the time in which the real one starts


class StandIn:
    """An LLMEngine that answers three requests a step. A reply depends on prompt and seed only."""

    made: list["StandIn"] = []

    def __init__(self, words):
        names = ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES", vllm.IN_PROCESS)
        self.words, self.environment = words, {name: os.environ.get(name) for name in names}
        self.open, self.asked, self.ended = {}, {}, False
        self.engine_core = SimpleNamespace(shutdown=self.shutdown)
        self.beside = sum(not engine.ended for engine in self.made)  # others that are there when this one starts
        self.made.append(self)

    def add_request(self, request_id, prompt, params):
        ids = prompt["prompt_token_ids"]
        self.asked[params.get("seed")] = ids, params
        rng = random.Random(f"{ids}/{params.get('seed')}")
        length = max(params["min_tokens"], min(params["max_tokens"], 1 + int(rng.expovariate(0.2))))
        reply = [rng.choice(LETTERS) for _ in range(length)]
        stops = length < params["max_tokens"]
        self.open[request_id] = [*reply[:-1], params["stop_token_ids"][0]] if stops else reply

    def step(self):
        first = list(self.open)[:3]
        done = [SimpleNamespace(request_id=name, finished=False) for name in self.open if name not in first]
        for name in first:
            completion = SimpleNamespace(token_ids=self.open.pop(name))
            done.append(SimpleNamespace(request_id=name, finished=True, outputs=[completion]))
        return done

    def shutdown(self):
        self.ended = True


@pytest.fixture
def stand_in(monkeypatch):
    """The engines that were started."""

    class Parser:
        def __init__(self, **how):
            self.parse_args = list

    def module(name, **names):
        made = ModuleType(name)
        vars(made).update(names, __spec__=importlib.util.spec_from_loader(name, None))
        monkeypatch.setitem(sys.modules, name, made)

    arguments = SimpleNamespace(add_cli_args=lambda parser: parser, from_cli_args=lambda words: words)
    engine = SimpleNamespace(from_engine_args=StandIn)
    module("vllm", EngineArgs=arguments, LLMEngine=engine, SamplingParams=dict)
    module("vllm.utils.argparse_utils", FlexibleArgumentParser=Parser)
    module("vllm.sampling_params", RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    vllm.claim_gpus.cache_clear()
    yield StandIn.made
    make.drop_models()
    assert all(engine.ended and not engine.open for engine in StandIn.made)
    vllm.claim_gpus.cache_clear()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with words and short prompts."""
    return write_place(tmp_path_factory.mktemp("vllm"), WORDS)


def flags(place, model, output, **changes):
    """A command with short games; None leaves a flag out."""
    return play_flags(place, model, output, **{"engine": "vllm", "model_prefix": "v", "max_new_tokens": 8} | changes)


def test_vllm_gets_the_settings_token_ids_and_seeds_of_local_play(
    stand_in, place, tiny_model, tokenizer, tmp_path, monkeypatch
):
    launcher = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}
    for name, value in (launcher | {"CUDA_VISIBLE_DEVICES": "4,GPU-7"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("starts CUDA with all GPUs"))
    how = {"max_games": 8, "max_length": 110, "min_new_tokens": 2, "top_k": 0}
    call(play_llm_game.main, *flags(place, tiny_model, tmp_path, **how), f"--vllm_args={ARGS}")
    (engine,) = stand_in
    hidden = dict.fromkeys(("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"))
    assert engine.environment == hidden | {"CUDA_VISIBLE_DEVICES": "GPU-7", vllm.IN_PROCESS: "0"}
    assert os.environ["RANK"] == "0"
    expected = {"max-model-len": "110", "dtype": "float32", "max-num-seqs": "256", "gpu-memory-utilization": "0.900"}
    given = dict(zip(engine.words, engine.words[1:], strict=False))
    assert {name: given[f"--{name}"] for name in expected} == expected
    assert given["--load-format"] == "safetensors" and engine.words[-2:] == ARGS.split()

    tokens = Codec(tokenizer, Sampling(max_length=110, max_new_tokens=8))
    templates, cuts = load_templates(place / "prompts.json", GAME), []
    how = {"temperature": 1.2, "top_p": 1.0, "top_k": 0, "min_tokens": 2, "max_tokens": 8, "stop_token_ids": [2]}
    for game in read_json_or_jsonl(tmp_path / "v_sampling_words_results.json"):
        for end, (message, reply) in enumerate(zip(game["history"], game["replies"], strict=True)):
            role, history = GAME.roles[end % 2], tuple(game["history"][:end])
            secrets = GAME.secrets(role, game["target_word"], history)
            turn = Turn(GAME, role, history, 2, game["index"], secrets, templates)
            ids, params = engine.asked[draw_seed(42, turn)]
            assert (ids, reply["prompt_cut"]) == tokens.encode(turn.prompt())
            assert params | how == params
            assert reply["tokens"] == len(message["content"]) + (reply["finish_reason"] == "stop")
            cuts.append(reply["prompt_cut"])
    assert len(engine.asked) == 8 * 4 and any(cuts) and not all(cuts)


def test_two_models_share_the_memory_and_all_leave_before_others_come(
    stand_in, place, tiny_model, other_model, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    copy = shutil.copytree(other_model, tmp_path / "copy")
    values = {"players": [f"a={tiny_model}", f"b={other_model}", f"c={copy}"], "against": "a", "engine": "vllm"}
    values |= {"words": place / "words.txt", "max_words": 3, "games_per_word": 1, "task_type": "sampling"}
    values |= {"output_dir": tmp_path / "out", "max_turns": 2, "max_length": 256, "max_new_tokens": 8}
    call(evaluate_games.main, *flags_of(values | {"prompt_templates": place / "prompts.json"}))
    assert [engine.beside for engine in stand_in] == [0, 1, 0, 1]
    assert all({"0.450", "--enforce-eager"} <= set(engine.words) for engine in stand_in)


def test_each_process_has_its_own_gpus(stand_in, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    for visible, number, rank, own in ((None, 1, 4, "4"), (None, 2, 1, "2,3"), ("0,GPU-7,3", 1, 1, "GPU-7")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        vllm.claim_gpus.cache_clear()
        vllm.claim_gpus(number)
        vllm.claim_gpus(number)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-7,3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    vllm.claim_gpus.cache_clear()
    with pytest.raises(UserError, match="3 processes .* 6 GPUs, but it has 3"):
        vllm.claim_gpus(2)


def test_without_the_package_the_command_that_installs_it_is_named(place, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm, "has_vllm", lambda: False)
    assert vllm.INSTALL in call(play_llm_game.main, *flags(place, tiny_model, tmp_path), status=2).errors


@pytest.mark.parametrize("error", [RuntimeError("out of memory\n..."), ImportError("libcudart.so", name="vllm._C")])
def test_if_vllm_does_not_start_the_last_line_names_another_engine(
    stand_in, place, tiny_model, tmp_path, monkeypatch, error
):
    def fail(words):
        raise error

    monkeypatch.setattr(sys.modules["vllm"], "LLMEngine", SimpleNamespace(from_engine_args=fail))
    errors = call(play_llm_game.main, *flags(place, tiny_model, tmp_path), status=2).errors
    reason = str(error).splitlines()[0]
    assert "Traceback" in errors
    assert reason in errors.splitlines()[-1] and "--engine slots" in errors.splitlines()[-1]


@pytest.mark.skipif(not vllm.has_vllm(), reason=vllm.INSTALL)
@pytest.mark.parametrize("task, other", [("testing", "slots"), ("sampling", "vllm")])
def test_two_ranks_of_the_real_vllm_play_the_greedy_games_of_slots_and_the_drawn_games_of_one(
    task, other, place, tmp_path
):
    """Of a tiny model that ends replies often."""
    tokenizer, folder, games = build_tokenizer(), tmp_path / "model", {}
    model = build_llama(1, len(tokenizer), num_hidden_layers=1, hidden_size=128)  # vLLM knows no heads of 16
    with torch.no_grad():  # the end token about as likely as the likeliest others, wherever a reply stands
        states = model.model(torch.arange(4, 260)[None]).last_hidden_state[0]
        mean = states.mean(0)
        model.lm_head.weight[2] = mean / mean.pow(2).sum() * (states @ model.lm_head.weight.T).topk(20).values.mean()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    real = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}  # GiB of cache, and cores
    for processes, engine in ((2, "vllm"), (1, other)):
        output = tmp_path / str(processes)
        values = {"engine": engine, "task_type": task, "max_new_tokens": 12}
        command = [*TORCHRUN, f"--nproc_per_node={processes}", "-m", "tools.play_llm_game", f"--vllm_args={ARGS}"]
        finish(start([*command, *flags(place, folder, output, **values)], env=ENVIRONMENT | real))
        results = read_json_or_jsonl(output / f"v_{task}_words_results.json")
        games[processes] = [game["history"] for game in results]
    equal = sum(one == other for one, other in zip(games[1], games[2], strict=True))
    assert len(games[1]) == len(WORDS) and equal >= 0.9 * len(WORDS)  # rounding may turn a close decision
