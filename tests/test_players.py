"""Players: what the model is shown, what is taken of its output, and which prompts share a batch."""

import asyncio
import itertools
import json
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import build_llama, build_tokenizer
from helpers import call, finish, play_flags, start, write_place
from transformers import AutoConfig

from tools import play_llm_game
from tools.engine import memory
from tools.engine.generate import BatchEngine
from tools.engine.local_player import Batcher, LocalPlayer
from tools.engine.model import LocalModel, Sampling, load_local_model
from tools.engine.vllm import VLLMFlags
from tools.games.taboo import Taboo
from tools.players.human import HumanPlayer
from tools.players.player import LENGTH, STOP, Player, Reply, ScriptedPlayer
from tools.players.server import ServerPlayer
from tools.selfplay.flags import KINDS, kind_of
from utils import UserError, model_folder, read_json, read_json_or_jsonl

GREEDY = Sampling(max_length=64, max_new_tokens=8, do_sample=False)
DRAWN = Sampling(max_length=64, max_new_tokens=8)
GAME = Taboo()


def load(folder, sampling=GREEDY, **how) -> LocalModel:
    return load_local_model(Path(folder), sampling, **how)


def tiny(sampling=GREEDY, **special_tokens) -> LocalModel:
    """A model whose tokenizer has the special tokens given."""
    tokenizer = build_tokenizer()
    for name, token in special_tokens.items():
        setattr(tokenizer, name, token)
    return LocalModel(build_llama(0, len(tokenizer)).eval(), tokenizer, sampling)


def generate(local, prompts) -> list[Reply]:
    """Replies to these prompts as one batch."""
    return BatchEngine(local, len(prompts)).generate(prompts)


class TestLocalModel:
    def test_a_prompt_begins_with_bos_and_a_long_one_keeps_its_end(self, tiny_model, tokenizer):
        model = load(tiny_model)
        assert model.encode("ab") == ([1, *tokenizer("ab")["input_ids"]], False)
        ids, cut = model.encode("x" * 55)
        assert (len(ids), ids[0], cut) == (64 - 8, 1, False)  # just fits beside the reply
        ids, cut = model.encode("x" * 100 + "end")
        assert (len(ids), tokenizer.decode(ids), cut) == (64 - 8, "x" * 53 + "end", True)

    def test_only_new_tokens_are_decoded(self, tiny_model, tokenizer):
        model = load(tiny_model)
        (reply,) = generate(model, ["hello"])
        ids = torch.tensor([model.encode("hello")[0]])
        expected = []
        for _ in range(8):  # the likeliest token each time, without any of generate's machinery
            so_far = torch.cat([ids, torch.tensor([expected])], 1).long()
            expected.append(model.model(so_far).logits[0, -1].argmax().item())
        end = expected.index(2) if 2 in expected else len(expected)
        assert reply.text == tokenizer.decode(expected[:end], skip_special_tokens=True)

    def test_a_reply_ends_at_any_end_token_which_counts_but_is_not_shown(self):
        model = build_llama(0, 260)
        model.generation_config.eos_token_id = [2, 77]  # 77 is no special token
        local = LocalModel(model, build_tokenizer(), GREEDY)
        letters = local.tokenizer("hi")["input_ids"]
        assert local.stop_ids == [2, 77]
        assert local.decode([*letters, 2, 3, 3], prompt_cut=False) == Reply("hi", STOP, 3, token_ids=letters)
        assert local.decode([*letters, 77, 3], prompt_cut=False) == Reply("hi", STOP, 3, token_ids=letters)
        assert local.decode(letters, prompt_cut=True) == Reply("hi", LENGTH, 2, prompt_cut=True, token_ids=letters)
        assert local.decode([2, 3], prompt_cut=False) == Reply("", STOP, 1, token_ids=[])

    @pytest.mark.parametrize("text, retokenized", [("hi", None), (" hi\n", True), ("\ufffd", None)])
    def test_a_reply_whose_message_has_other_tokens_than_were_sampled_is_marked(self, text, retokenized):
        """A message is the stripped text, which is what training reads."""
        local = tiny()
        ids = local.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert local.decode(ids, prompt_cut=False).retokenized is retokenized
        assert local.decode(ids[:-1] + [3], prompt_cut=False).retokenized  # half a character, or a special token

    @pytest.mark.parametrize("missing", [[], ["bos_token"], ["pad_token"], ["eos_token", "pad_token"]])
    def test_a_tokenizer_may_lack_special_tokens_and_replies_do_not_depend_on_their_batch(self, missing):
        model = tiny(**dict.fromkeys(missing))
        prompts = ["a", "a much longer prompt, so that the others are padded", "x" * 100]
        assert [generate(model, [prompt])[0] for prompt in prompts] == generate(model, prompts)
        assert (model.encode("a")[0][0] == 1) == ("bos_token" not in missing)

    def test_generation_settings_of_the_model_folder_are_ignored(self, tiny_model, tmp_path):
        folder = shutil.copytree(tiny_model, tmp_path / "model")
        settings = json.loads((folder / "generation_config.json").read_text())
        settings |= {"repetition_penalty": 1.3, "top_k": 5, "do_sample": True, "min_p": 0.5, "no_repeat_ngram_size": 1}
        (folder / "generation_config.json").write_text(json.dumps(settings))
        assert generate(load(folder), ["abc", "d"]) == generate(load(tiny_model), ["abc", "d"])
        drawn = []
        for place in (tiny_model, folder):
            torch.manual_seed(1)
            drawn.append(generate(load(place, DRAWN), ["abc"] * 40))
        assert drawn[0] == drawn[1]
        assert len({reply.text[0] for reply in drawn[0] if reply.text}) > 5

    @pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
    def test_the_type_is_that_of_the_config_unless_a_flag_says_otherwise(self, stored, tmp_path):
        tokenizer = build_tokenizer()
        build_llama(0, len(tokenizer)).to(getattr(torch, stored)).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        assert load(tmp_path).model.dtype == getattr(torch, stored)
        assert load(tmp_path, dtype=torch.bfloat16).model.dtype == torch.bfloat16


class TestModelFolder:
    def test_what_is_missing_is_named(self, tiny_model, tmp_path):
        with pytest.raises(UserError, match="no such folder"):
            model_folder(str(tmp_path / "missing"))
        with pytest.raises(UserError, match="no config.json"):
            model_folder(str(tmp_path))
        for pattern, message in (("tokenizer*", "no tokenizer"), ("*.safetensors", "weights cannot be loaded")):
            folder = shutil.copytree(tiny_model, tmp_path / message)
            for path in folder.glob(pattern):
                path.unlink()
            with pytest.raises(UserError, match=message):
                load(folder)

    def test_pickled_weights_are_not_loaded(self, tiny_model, tmp_path):
        folder = shutil.copytree(tiny_model, tmp_path / "model")
        torch.save(load(folder).model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        with pytest.raises(UserError, match="weights cannot be loaded"):
            load(folder)
        with pytest.raises(UserError, match="no weights in .safetensors form"):
            VLLMFlags().load_vllm(folder, tokens=None)

    def test_code_that_comes_with_a_model_does_not_run(self, tiny_model, tmp_path):
        folder = shutil.copytree(tiny_model, tmp_path / "model")
        (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnConfig: ...\nclass Own: ...\n")
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "own"}
        config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="trust_remote_code"):
            load(folder)
        assert not (tmp_path / "ran").exists()

    def test_the_size_of_batches_follows_the_free_memory(self, tiny_model, monkeypatch):
        model, sizes = load(tiny_model).model, []
        for free in (0, 10**6, 3 * 10**6, 10**12):
            monkeypatch.setattr(memory, "_free_memory", lambda model, free=free: free)
            sizes.append((memory.batch_size_for_memory(model, max_length=100), *memory.slots_for_memory(model)))
        assert sizes[0] == (1, 1, 0)
        assert sizes[-1][:2] == (memory.CPU_BATCH, memory.MOST_PROMPTS)
        for smaller, larger in itertools.pairwise(sizes):
            assert all(one < other for one, other in zip(smaller, larger, strict=True))

    @pytest.mark.parametrize("kind", ["gemma4", "gemma3n", "mamba", "blt"])
    def test_an_unusual_model_gets_small_batches_and_a_warning(self, kind, caplog):
        model = SimpleNamespace(config=AutoConfig.for_model(kind), dtype=torch.float32, device=torch.device("cpu"))
        assert memory.batch_size_for_memory(model, max_length=100) == memory.UNKNOWN_BATCH
        assert "--per_device_eval_batch_size" in caplog.text


class Parrot(Player):
    """A kind of player that somebody has added: it repeats the last message."""

    @classmethod
    def make(cls, name, lineup, seed):
        return cls()

    async def reply(self, turn):
        return Reply(turn.history[-1]["content"] if turn.history else "Hello!", STOP, 1)


def test_a_new_kind_of_player_is_a_class_and_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "parrot", Parrot)
    place = write_place(tmp_path, ["art", "music"])
    call(play_llm_game.main, *play_flags(place, "parrot", tmp_path / "out", model_prefix="p", max_new_tokens=8))
    games = read_json_or_jsonl(tmp_path / "out" / "p_sampling_words_results.json")
    assert [[message["content"] for message in game["history"]] for game in games] == [["Hello!"] * 4] * 2
    assert read_json(tmp_path / "out" / "p_sampling_words_settings.json")["tokenizer_sha256"] == {}


@pytest.mark.parametrize(
    "name, kind",
    [
        ("human", HumanPlayer),
        ("human:x", LocalPlayer),
        ("human_model/x", LocalPlayer),
        ("scripted:careful", ScriptedPlayer),
        ("openai:some/model", ServerPlayer),
        ("meta-llama/Llama-2-7b-hf", LocalPlayer),
    ],
)
def test_the_beginning_of_a_name_tells_the_kind_of_player(name, kind):
    assert kind_of(name) is kind


def test_help_needs_no_torch():
    for program in ("play_llm_game", "evaluate_games"):
        code = f"import sys; sys.argv = ['x', '--help']; from tools import {program} as p\ntry: p.main()\nfinally: "
        code += "assert not {'torch', 'transformers', 'scipy', 'openai'} & set(sys.modules)"
        assert "--max_turns" in finish(start([sys.executable, "-c", code]))


class EchoEngine:
    """Answers so many requests at a time with their prompts, and remembers what it was given when."""

    def __init__(self, at_once=8):
        self.at_once = at_once
        self.waiting: list[tuple[int, str]] = []
        self.runs: list[list[str]] = []

    def start(self, request, prompt, *, game, limit, seed):
        self.waiting.append((request, prompt))

    def run(self):
        batch, self.waiting = self.waiting[: self.at_once], self.waiting[self.at_once :]
        self.runs.append([prompt for _, prompt in batch])
        return [(request, Reply(prompt, STOP, 1)) for request, prompt in batch]


def ask(batcher, engine, lengths):
    """Play "games" of so many messages at the same time; the replies of each."""

    async def game(number, length):
        return [(await batcher.submit(engine, f"{number}.{turn}", game=number)).text for turn in range(length)]

    async def games():
        return await asyncio.gather(*(game(number, length) for number, length in enumerate(lengths)))

    return asyncio.run(games())


class TestBatcher:
    @pytest.mark.parametrize(
        "at_once, lengths, runs",
        [
            (8, [2, 1, 3], [["0.0", "1.0", "2.0"], ["0.1", "2.1"], ["2.2"]]),
            (1, [2, 2, 1], [["0.0"], ["1.0"], ["2.0"], ["0.1"], ["1.1"]]),
        ],
    )
    def test_an_engine_runs_when_every_live_game_waits(self, at_once, lengths, runs):
        engine = EchoEngine(at_once)
        expected = [[f"{game}.{turn}" for turn in range(length)] for game, length in enumerate(lengths)]
        assert ask(Batcher(), engine, lengths) == expected
        assert engine.runs == runs

    def test_of_two_engines_the_one_with_more_open_requests_goes_first(self):
        one, two, order = EchoEngine(), EchoEngine(), []
        batcher = Batcher()

        async def game(engine, prompt):
            await batcher.submit(engine, prompt, game=0)
            order.append(prompt)

        async def games():
            await asyncio.gather(game(one, "a"), game(two, "b"), game(two, "c"))

        asyncio.run(games())
        assert (one.runs, two.runs, order) == ([["a"]], [["b", "c"]], ["b", "c", "a"])

    def test_a_game_that_takes_its_time_does_not_hold_up_the_others(self):
        """A person or a server thinks in wall-clock time; the games that wait for the model go on."""
        engine, batcher = EchoEngine(), Batcher()

        async def games():
            thinking = asyncio.Event()

            async def slow():
                await thinking.wait()
                await batcher.submit(engine, "slow", game=0)

            async def fast():
                await batcher.submit(engine, "fast", game=1)
                thinking.set()

            await asyncio.wait_for(asyncio.gather(slow(), fast()), timeout=10)

        asyncio.run(games())
        assert engine.runs == [["fast"], ["slow"]]

    def test_engines_run_in_one_thread_which_is_not_that_of_the_games(self):
        threads = []

        class WatchedEngine(EchoEngine):
            def run(self):
                threads.append(threading.get_ident())
                return super().run()

        for _ in range(2):
            ask(Batcher(), WatchedEngine(at_once=1), [50, 50])
        assert len(threads) == 200 and len(set(threads)) == 1
        assert threads[0] != threading.get_ident()

    def test_a_failing_engine_fails_the_games_that_asked_it(self):
        class FailingEngine(EchoEngine):
            def run(self):
                raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            ask(Batcher(), FailingEngine(), [1, 1])


class TestBatchEngine:
    def test_when_memory_runs_out_it_goes_on_with_half_the_batch_and_loses_nothing(self, tiny_model):
        local, most = load(tiny_model), 2
        engine, expected = BatchEngine(local, 8), generate(local, list("abcdefgh"))

        def limited(prompts, limits):
            if len(prompts) > most:
                raise torch.OutOfMemoryError
            return generate(local, prompts)

        engine.generate = limited
        for number, prompt in enumerate("abcdefgh"):
            engine.start(number, prompt, game=number)
        assert [pair for _ in range(4) for pair in engine.run()] == list(enumerate(expected))
        most = 0
        engine.start(8, "i", game=8)
        with pytest.raises(torch.OutOfMemoryError):  # not even one prompt fits
            engine.run()
