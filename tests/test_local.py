"""Models in this process: loading, token ids, which prompts share a batch, and from names to players."""

import asyncio
import gc
import json
import random
import re
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import build_llama, build_sentencepiece, build_tokenizer
from helpers import call, copy_model, flags_of, write_rows
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, MistralConfig

import train
from tools import evaluate_games
from tools.common.errors import UserError
from tools.common.files import ROOT, read_json, write_json
from tools.common.flags import parse_flags
from tools.common.models import load_model, load_tokenizer, model_setting, token_ids
from tools.common.records import files_setting
from tools.engine.flags import EngineFlags
from tools.engine.generate import BatchEngine
from tools.engine.local import Batcher, LocalModel, Prompt, load_local_model, own_device
from tools.engine.slots import SlotEngine
from tools.engine.state import TorchState
from tools.games.taboo import Taboo
from tools.players.human import HumanPlayer
from tools.players.player import LENGTH, STOP, Reply, ScriptedPlayer
from tools.players.server import ServerPlayer
from tools.selfplay import make
from tools.selfplay.flags import PlayFlags, words_setting

GREEDY = EngineFlags(max_length=64, max_new_tokens=8, task_type="testing")
DRAWN = EngineFlags(max_length=64, max_new_tokens=8)
GAME = Taboo()
SCRIPT = "scripted:tools.lab.world.players:lexicon"


def pretend_gpus(monkeypatch, number: int) -> None:
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


def refused_training(model, folder, **changes) -> str:
    flags = {"train_method": "SFT", "model_name_or_path": model, "train_data_path": "rows.json"}
    return call(train.main, *flags_of(flags | {"output_dir": folder / "out"} | changes), status=2).errors


@pytest.mark.parametrize("rank, processes", [("0", "8"), ("1", None)])
def test_more_processes_than_gpus_are_one_line_with_both_numbers(tiny_model, tmp_path, monkeypatch, rank, processes):
    pretend_gpus(monkeypatch, 1)
    assert own_device() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", rank)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    both = rf"{processes or 2} processes .* it has 1"
    with pytest.raises(UserError, match=both):
        load(tiny_model)
    assert re.search(both, refused_training(tiny_model, tmp_path)) and not (tmp_path / "out").exists()


def test_a_training_on_the_cpu_needs_no_gpu(tiny_model, tmp_path, monkeypatch):
    pretend_gpus(monkeypatch, 0)
    assert "it has 0" in refused_training(tiny_model, tmp_path)
    assert "rows.json" in refused_training(tiny_model, tmp_path, use_cpu=True)


def load(folder, flags=GREEDY) -> LocalModel:
    return load_local_model(Path(folder), flags)


def generate(local, prompts) -> list[Reply]:
    """Replies to these prompts as one batch."""
    engine = BatchEngine(local, len(prompts))
    for number, prompt in enumerate(prompts):
        engine.start(number, Prompt(prompt, number))
    return [reply for _, reply in engine.run()]


def test_a_prompt_begins_with_bos_and_a_long_one_keeps_its_end(tiny_model, tokenizer):
    model = load(tiny_model)
    assert model.codec.encode("ab") == ([1, *tokenizer("ab")["input_ids"]], False)
    ids, cut = model.codec.encode("x" * 55)
    assert (len(ids), ids[0], cut) == (64 - 8, 1, False)  # just fits beside the reply
    ids, cut = model.codec.encode("x" * 100 + "end")
    assert (len(ids), tokenizer.decode(ids), cut) == (64 - 8, "x" * 53 + "end", True)


def test_a_reply_ends_at_any_end_token_which_counts_but_is_not_shown():
    model = build_llama(0, 260)
    model.generation_config.eos_token_id = [2, 77]  # 77 is no special token
    local = LocalModel(model, build_tokenizer(), GREEDY)
    letters = local.codec.tokenizer("hi")["input_ids"]
    for end in (2, 77):
        assert local.codec.decode([*letters, end, 3, 3], prompt_cut=False) == Reply("hi", STOP, 3)
    assert local.codec.decode(letters, prompt_cut=True) == Reply("hi", LENGTH, 2, prompt_cut=True)
    assert local.codec.decode([2, 3], prompt_cut=False) == Reply("", STOP, 1)


@pytest.mark.parametrize("build", [build_tokenizer, lambda: build_sentencepiece(["a"], 2)])
def test_a_reply_that_is_cut_inside_a_character_ends_before_it_and_a_real_replacement_character_stays(build):
    codec = LocalModel(build_llama(0, 600), build(), GREEDY).codec
    for text in ("Think of 日本😀", "Think of \ufffd", "Think of \ufffd日", "日"):
        written = text.encode()
        ids = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
        for dropped in range(min(9, len(written))):
            reply = codec.decode(ids[: len(ids) - dropped])
            assert reply.text == written[: len(written) - dropped].decode(errors="ignore")
            assert reply.finish_reason == LENGTH and reply.tokens == len(ids) - dropped
    assert codec.decode([*ids[:-1], codec.tokenizer.eos_token_id]).finish_reason == STOP


@pytest.mark.parametrize("absent", [[], ["bos_token"], ["eos_token", "pad_token"]])
def test_a_tokenizer_may_lack_special_tokens_and_replies_do_not_depend_on_their_batch(absent):
    tokenizer = build_tokenizer()
    for name in absent:
        setattr(tokenizer, name, None)
    model = LocalModel(build_llama(0, len(tokenizer)).eval(), tokenizer, GREEDY)
    prompts = ["a", "a much longer prompt, so that the others are padded", "x" * 100]
    assert [generate(model, [prompt])[0] for prompt in prompts] == generate(model, prompts)
    assert (model.codec.encode("a")[0][0] == 1) == ("bos_token" not in absent)


def test_generation_settings_of_the_model_folder_are_ignored(tiny_model, tmp_path):
    folder = copy_model(tiny_model, tmp_path / "model")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"repetition_penalty": 1.3, "top_k": 5, "do_sample": True, "min_p": 0.5, "no_repeat_ngram_size": 1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    drawn = []
    for place in (tiny_model, folder):
        torch.manual_seed(1)
        drawn.append(generate(load(place, DRAWN), ["abc"] * 40))
    assert drawn[0] == drawn[1]


def test_the_type_is_that_of_the_config_unless_a_flag_says_otherwise(tmp_path):
    tokenizer = build_tokenizer()
    for part in (build_llama(0, len(tokenizer)).bfloat16(), tokenizer):
        part.save_pretrained(tmp_path)
    assert load(tmp_path).model.dtype == torch.bfloat16
    for flags, dtype in (({"fp16": True}, torch.float16), ({"dtype": "float32"}, torch.float32)):
        assert load(tmp_path, EngineFlags(**flags)).model.dtype == dtype


def test_flags_that_ask_for_different_types_are_refused_and_names_of_one_type_agree():
    for other in ({"fp16": True}, {"dtype": "float32"}):
        with pytest.raises(UserError, match="--bf16.* ask for different dtypes"):
            EngineFlags(bf16=True, **other)
    with pytest.raises(UserError, match="dtype is 'int8'"):
        EngineFlags(dtype="int8")
    assert EngineFlags(bf16=True, dtype="bfloat16").dtype == EngineFlags(bf16=True).dtype == "bfloat16"
    assert PlayFlags(bf16=True).settings(GAME) == PlayFlags(dtype="bfloat16").settings(GAME)


def test_weights_that_the_files_lack_are_refused(tiny_model, tmp_path):
    folder = copy_model(tiny_model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"weights are missing \(model.layers.1.mlp.up_proj.weight\)"):
        load(folder)


def test_neither_pickled_weights_nor_code_of_a_model_folder_are_run(tiny_model, tmp_path):
    pickled = copy_model(tiny_model, tmp_path / "pickled")
    torch.save(load(pickled).model.state_dict(), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        load(pickled)
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    code = copy_model(tiny_model, tmp_path / "code", model_type="own", auto_map=own)
    with pytest.raises(UserError, match="code: comes with its own code; --trust_remote_code True"):
        load(code)


def test_an_adapter_beside_a_whole_model_is_refused_in_play_and_in_training(tiny_model, tmp_path):
    """Transformers would add it to weights that hold it already, where peft is installed."""
    folder = copy_model(tiny_model, tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter_config.json .* delete it .* merged/"):
        make_players(str(folder), "human")
    rows = write_rows(tmp_path / "rows.jsonl", [{"query": "q", "target": "t"}])
    assert "adapter_config.json" in refused_training(folder, tmp_path, train_data_path=rows)


FOREIGN = {"qwen9": {"model_type": "qwen9"}, "t5": {"model_type": "t5", "d_model": 32}}
FOREIGN["quantized"] = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_model_that_transformers_cannot_load_is_refused_in_its_words(tiny_model, tmp_path, kind):
    folder = copy_model(tiny_model, tmp_path / kind, **FOREIGN[kind])
    with pytest.raises(UserError, match=rf"^{folder}: "):
        load(folder)


TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"vocab_size": 260}


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_masked_language_model_is_refused_unless_it_is_made_a_decoder(is_decoder, tmp_path):
    config = BertConfig(**TINY, is_decoder=is_decoder)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with nullcontext() if is_decoder else pytest.raises(UserError, match="model: a masked language model .bert"):
        load_model(tmp_path / "model")


def test_a_token_that_the_model_lacks_ends_play(tiny_model):
    model = load(tiny_model)
    model.codec.tokenizer.add_tokens("<|x|>")
    assert generate(model, ["x"])
    with pytest.raises(UserError, match=r"token 260 \(<\|x\|>\) is outside the model's 260"):
        generate(model, ["x<|x|>"])


def test_a_maximum_length_beyond_the_positions_is_one_warning(caplog):
    model, tokenizer = build_llama(0, 260, max_position_embeddings=64).eval(), build_tokenizer()
    for max_length, warnings in ((64, 0), (65, 1)):
        LocalModel(model, tokenizer, EngineFlags(max_length=max_length, max_new_tokens=8, task_type="testing"))
        messages = [record.getMessage() for record in caplog.records if record.name == "tools.common.ranks"]
        assert len(messages) == warnings and all(re.search("65 .* 64 positions", message) for message in messages)


# What tokenizer_config.json says (class, legacy), and (normalizer, pre_tokenizer) of tokenizer.json.
NO_BLANK = normalizers.Replace(" ", "▁"), None
PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None
DIGITS = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
SETUPS = [
    *(("LlamaTokenizer", pipeline, legacy) for pipeline in (NO_BLANK, PREPEND) for legacy in (None, True, False)),
    *(("LlamaTokenizer", (None, pre_tokenizers.Metaspace("▁", scheme, False)), scheme == "always")
      for scheme in ("first", "always")),
    *((name, (None, pre_tokenizers.Sequence(DIGITS)), None)
      for name in ("GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast")),
]  # fmt: skip


@pytest.mark.parametrize("name, pipeline, legacy", SETUPS)
def test_a_tokenizer_splits_texts_as_its_file_does_and_so_does_a_saved_one(name, pipeline, legacy, tmp_path):
    texts = ["It goes.", " It  goes", "<s>Hi</s>It goes", "650841823 日本"]
    is_byte_level = pipeline[1] is not None and "Digits" in repr(pipeline[1])
    made = build_tokenizer() if is_byte_level else build_sentencepiece(texts, 400)
    made.backend_tokenizer.normalizer, made.backend_tokenizer.pre_tokenizer = pipeline
    made.save_pretrained(tmp_path / "base")
    config = read_json(tmp_path / "base" / "tokenizer_config.json") | {"tokenizer_class": name}
    if name == "LlamaTokenizer" and not is_byte_level:  # the class names them
        config = {key: value for key, value in config.items() if key not in ("bos_token", "eos_token")}
    write_json(tmp_path / "base" / "tokenizer_config.json", config | ({} if legacy is None else {"legacy": legacy}))
    file = Tokenizer.from_file(str(tmp_path / "base" / "tokenizer.json"))
    ids = [file.encode(text, add_special_tokens=False).ids for text in texts]
    for folder in (tmp_path / "base", tmp_path / "saved"):
        write_json(folder / "config.json", {"model_type": "llama"})
        tokenizer = load_tokenizer(str(folder))
        assert token_ids(tokenizer, texts) == ids
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
        tokenizer.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")  # by programs of others
    assert token_ids(saved, texts) == ids


class EchoEngine:
    """Answers with the prompts, and remembers its batches and their threads."""

    def __init__(self):
        self.waiting, self.runs, self.threads = [], [], set()

    def start(self, request, prompt):
        self.waiting.append((request, prompt.text))

    def run(self):
        batch, self.waiting = self.waiting, []
        self.runs.append([prompt for _, prompt in batch])
        self.threads.add(threading.get_ident())
        return [(request, Reply(prompt, STOP, 1)) for request, prompt in batch]


def ask(engine, *lengths):
    """Play "games" of so many messages at the same time."""

    async def game(batcher, number, length):
        for turn in range(length):
            prompt = f"{number}.{turn}"
            assert (await batcher.submit(engine, Prompt(prompt, number))).text == prompt

    async def games():
        batcher = Batcher(TorchState())
        await asyncio.gather(*(game(batcher, number, length) for number, length in enumerate(lengths)))

    asyncio.run(games())


def test_an_engine_runs_in_its_thread_when_every_live_game_waits():
    engine = EchoEngine()
    ask(engine, 2, 1, 3)
    assert engine.runs == [["0.0", "1.0", "2.0"], ["0.1", "2.1"], ["2.2"]]
    assert len(engine.threads) == 1 and threading.get_ident() not in engine.threads


def test_a_failing_engine_fails_the_games_that_wait(monkeypatch):
    monkeypatch.setattr(EchoEngine, "run", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ask(EchoEngine(), 1, 1)


def make_players(*names, **flags):
    return make.make_players(names, GAME, PlayFlags(max_length=300, **flags), seed="s", games_left=7)


def test_a_name_tells_the_kind_of_player_and_how_many_games_keep_it_busy(tiny_model, other_model, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    players, at_once = make_players(SCRIPT, "human", concurrent_games=5)
    assert [type(players[role]) for role in GAME.roles] == [ScriptedPlayer, HumanPlayer] and at_once == 1
    players, at_once = make_players(SCRIPT, "openai:gpt", openai_base_url="http://host/v1")
    assert type(players["defender"]) is ServerPlayer and at_once == 64
    for engine, size, games in (("slots", 9, 9), ("generate", 9, 18), ("generate", None, 64)):
        players, at_once = make_players(tiny_model, other_model, engine=engine, per_device_eval_batch_size=size)
        assert at_once == games and players["attacker"].batcher is players["defender"].batcher
    assert make_players(tiny_model, tiny_model, per_device_eval_batch_size=9, concurrent_games=4)[1] == 4


def test_a_model_is_loaded_once_and_stays_until_another_match(tiny_model, other_model):
    first, _ = make_players(tiny_model, tiny_model)
    second, _ = make_players(tiny_model, tiny_model)
    assert first["attacker"] is first["defender"]
    assert first["attacker"].engine is not second["attacker"].engine
    assert first["attacker"].engine.model is second["attacker"].engine.model
    model = weakref.ref(first["attacker"].engine.model)
    del first, second
    make_players(other_model, tiny_model)
    gc.collect()
    assert model() is None
    changed, _ = make_players(other_model, tiny_model, temperature=0.5)
    assert changed["attacker"].engine.codec.sampling.temperature == 0.5


def test_draws_depend_on_seed_rank_and_games_left_and_not_on_the_caller_s(tiny_model, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    players, _ = make_players(tiny_model, tiny_model)
    state = players["attacker"].batcher.state
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)  # by the caller
        with state.in_use():
            drawn.append(torch.rand(3))
    torch.manual_seed(random.Random("s/1/3/7").getrandbits(63))
    assert torch.equal(torch.cat(drawn), torch.rand(6))


def test_each_model_has_an_engine_that_can_run_it(tiny_model, tokenizer, tmp_path, caplog):
    caplog.set_level("INFO")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MistralConfig(**shape, num_key_value_heads=2, vocab_size=len(tokenizer), sliding_window=50)
    for part in (AutoModelForCausalLM.from_config(config), tokenizer):
        part.save_pretrained(tmp_path)
    players, _ = make_players(tiny_model, str(tmp_path))
    assert [type(players[role].engine) for role in GAME.roles] == [SlotEngine, BatchEngine]
    assert f"engine generate: slots does not support the attention of {tmp_path}" in caplog.messages
    with pytest.raises(UserError, match="--engine slots does not support this model's attention"):
        make_players(tiny_model, str(tmp_path), engine="slots")


def test_a_player_s_setting_is_all_that_its_games_depend_on(tiny_model):
    flags = PlayFlags(openai_base_url="http://host/v1", openai_api="chat")
    assert make.player_setting(tiny_model, flags) == model_setting(tiny_model)
    assert make.player_setting("human", flags) == "human"
    file = files_setting(ROOT / "tools/lab/world/players.py")
    assert make.player_setting(SCRIPT, flags) == file | {"sha256": f"lexicon {file['sha256']}"}
    assert make.player_setting("openai:gpt", flags) == {"path": "openai:gpt", "api": "chat"}
    assert words_setting("w", ["a", "b"])["sha256"] != words_setting("w", ["a", "c"])["sha256"]
    for change in ({"chat_template": True}, {"thinking": True}, {"top_p": 0.5}, {"game_options": ["match=word"]}):
        assert PlayFlags(**change).settings(GAME) != PlayFlags().settings(GAME)
    assert parse_flags(PlayFlags, ["--thinking", "False", "--chat_template", "true"], description="").thinking is False
    with pytest.raises(UserError, match="must be above --max_new_tokens"):
        PlayFlags(max_length=64, max_new_tokens=64)


def test_values_out_of_bounds_are_refused_before_a_model_is_loaded():
    games_per_word = dict(players=[], words=[], output_dir="")
    for name, value in (("max_new_tokens", 0), ("top_p", 1.5), ("temperature", float("nan"))):
        with pytest.raises(UserError, match=f"^{name} is {value}; it must be (at least|above|at most) "):
            evaluate_games.Flags(**games_per_word, **{name: value})
    with pytest.raises(UserError, match="--min_new_tokens at most that"):
        PlayFlags(min_new_tokens=9, max_new_tokens=8)


def test_auto_is_vllm_where_there_are_a_gpu_and_the_package(tiny_model, monkeypatch, caplog):
    caplog.set_level("INFO")

    def chosen(name=tiny_model, engine="auto"):
        caplog.clear()
        return make.choose_engine(PlayFlags(engine=engine), [name, "human"]).engine, caplog.messages

    monkeypatch.setattr(make, "has_vllm", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert chosen() == ("auto", [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert chosen() == ("vllm", [])
    assert chosen(engine="slots") == ("slots", [])
    assert chosen("openai:gpt") == ("auto", [])
    monkeypatch.setattr(make, "has_vllm", lambda: False)
    assert chosen() == ("auto", [f"engine slots: the package vllm is not installed ({make.INSTALL})"])
