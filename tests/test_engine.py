"""The engines: the slot engine gives the replies of plain `generate`, in however little memory."""

import copy
import random
from dataclasses import fields

import pytest
import torch
from conftest import build_llama, build_tokenizer
from pretend_gpu import DEVICE, PretendGPU, to_cpu
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DogeConfig,
    MistralConfig,
    NemotronConfig,
    Qwen2Config,
    Qwen3Config,
)

from tools.common.errors import UserError
from tools.engine import memory, scheduler
from tools.engine.generate import BatchEngine, generation_config
from tools.engine.local import LocalModel, Prompt
from tools.engine.scheduler import BLOCK
from tools.engine.slots import AutoEngine, SlotEngine, can_hold, draw
from tools.players.player import SAMPLING, TESTING, Sampling
from tools.selfplay.flags import PlayFlags

RULES = "The rules, which all prompts begin with. "
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 260}


def sampling(**changes) -> Sampling:
    return Sampling(**({"max_length": 400, "max_new_tokens": 10, "task_type": TESTING} | changes))


def llama(settings: Sampling, **changes) -> LocalModel:
    tokenizer = build_tokenizer()
    return LocalModel(build_llama(0, len(tokenizer), num_attention_heads=4, **changes).eval(), tokenizer, settings)


def answer(engine, prompts: list[tuple[int, str]]) -> list:
    """The replies to (game, prompt) pairs, asked at once."""
    for number, (game, prompt) in enumerate(prompts):
        engine.start(number, Prompt(prompt, game))
    replies = {}
    while len(replies) < len(prompts):
        replies |= dict(engine.run())
    return [replies[number] for number in range(len(prompts))]


def generate(local: LocalModel, prompts: list[tuple[int, str]]) -> list:
    """The replies of plain `generate`."""
    return answer(BatchEngine(local, len(prompts)), prompts)


def conversation(games: int, turns: int) -> list[list[tuple[int, str]]]:
    """For each turn, (game, prompt) pairs: the history of each game, which grows, and an instruction."""
    rng, history, asked = random.Random(0), [RULES] * games, []
    for turn in range(turns):
        history = [text + "".join(rng.choices("abcdef ", k=rng.randint(1, 25))) for text in history]
        asked.append([(game, f"{text} Now, number {turn % 2}:") for game, text in enumerate(history)])
    return asked


def watch(engine: SlotEngine) -> list[list[int]]:
    """The numbers of new tokens of the slots in each forward pass from now on."""
    passes, forward = [], engine.forward

    def watched(slots, **options):
        passes.append([slot.num_new_tokens for slot in slots])
        return forward(slots, **options)

    engine.forward = watched
    return passes


def assert_same_replies(engine: SlotEngine, plain: LocalModel, games: int, turns: int) -> None:
    for prompts in conversation(games, turns):
        assert answer(engine, prompts) == generate(plain, prompts)


# Greedy replies.


@pytest.mark.parametrize("kv_heads, slots", [(4, 1), (4, 8), (2, 3), (1, 3), (1, 8)])
def test_greedy_replies_are_those_of_plain_generate(kv_heads, slots):
    plain, local = (llama(sampling(), num_key_value_heads=kv_heads) for _ in range(2))
    assert_same_replies(SlotEngine(local, slots), plain, games=6, turns=4)


@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config, MistralConfig])
def test_replies_of_other_models_are_those_of_plain_generate(config):
    torch.manual_seed(0)
    changes = {"sliding_window": None} if config is MistralConfig else {}
    model = AutoModelForCausalLM.from_config(config(**SHAPE, head_dim=8, initializer_range=0.1, **changes)).eval()
    local = LocalModel(model, build_tokenizer(), sampling())
    assert can_hold(model, 400)
    rounds = conversation(games=5, turns=3)
    expected = [generate(local, prompts) for prompts in rounds]
    engine = SlotEngine(local, 4)
    assert [answer(engine, prompts) for prompts in rounds] == expected


@pytest.mark.parametrize("bos", [True, False])
def test_prompts_that_share_nothing_are_empty_or_lost_their_beginning(bos):
    settings = sampling(max_length=60)
    prompts = list(enumerate(["" if bos else "z", "x" * 200, "a different one", "x" * 190 + "end", "y"]))
    plain, local = llama(settings), llama(settings)
    if not bos:
        plain.codec.bos_id = local.codec.bos_id = None
    engine, expected = SlotEngine(local, 3), generate(plain, prompts)
    assert answer(engine, prompts) == expected == answer(engine, prompts)
    assert [reply.prompt_cut for reply in expected] == [False, True, False, True, False]


def test_many_new_prompts_are_computed_over_several_steps(monkeypatch):
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", 20)
    assert_same_replies(SlotEngine(llama(sampling()), 6), llama(sampling()), games=6, turns=1)


def test_in_half_precision_logits_are_as_exact_as_those_of_a_plain_pass():
    local, half, full = llama(sampling()), llama(sampling()).model.bfloat16(), llama(sampling()).model
    local.model = local.model.bfloat16()
    engine, errors = SlotEngine(local, 3), {"engine": [], "plain": []}
    engine_sample = engine.sample

    @torch.no_grad()
    def watched(slots, logits):
        for slot, row in zip(slots, logits, strict=True):
            ids = torch.tensor([slot.request.prompt_ids + slot.request.reply])
            expected, plain = (model(ids).logits[0, -1].float() for model in (full, half))
            errors["engine"].append((row - expected).square().mean())
            errors["plain"].append((plain - expected).square().mean())
        return engine_sample(slots, logits)

    engine.sample = watched
    for prompts in conversation(games=5, turns=3):
        answer(engine, prompts)
    by_engine, by_plain = (torch.stack(squares).mean().sqrt() for squares in errors.values())
    assert 0.5 * by_plain < by_engine < 1.5 * by_plain


@pytest.mark.parametrize("task_type, blocks", [(TESTING, 999), (SAMPLING, 8)])
def test_on_a_pretend_gpu_replies_and_logits_are_those_of_the_cpu(task_type, blocks):
    class WatchedEngine(SlotEngine):
        def sample(self, slots, logits):
            logged.append(to_cpu(logits).clone())
            return super().sample(slots, logits)

    gpu, found = PretendGPU(), []
    for on_gpu in (False, True):
        local, logged = llama(sampling(task_type=task_type)), []
        if on_gpu:
            local.model = gpu.move(local.model)
        engine = WatchedEngine(local, 4, blocks * BLOCK)
        torch.manual_seed(1)
        with gpu:  # computes what is on its device
            found.append(([answer(engine, prompts) for prompts in conversation(games=5, turns=3)], logged))
    assert found[0][0] == found[1][0] and len(found[0][1]) > 20
    torch.testing.assert_close(found[1][1], found[0][1])
    assert engine.caches[0].blocks.device == DEVICE


# What is computed.


@pytest.mark.parametrize("slots, games", [(3, 3), (2, 6)])
def test_a_token_of_rules_and_history_is_computed_once_for_all_turns_roles_and_games(slots, games):
    """Each game asks for its next reply when it has the one before, as in play."""
    engine = SlotEngine(llama(sampling(max_new_tokens=2)), slots)
    passes, rounds, asked, replies = watch(engine), conversation(games, turns=4), [0] * games, []

    def ask(game):
        if asked[game] < 4:
            engine.start(game, Prompt(rounds[asked[game]][game][1], game))
            asked[game] += 1

    for game in range(games):
        ask(game)
    while len(replies) < games * 4:
        for game, reply in engine.run():
            replies.append(reply)
            ask(game)
    encoded = [engine.codec.encode(prompt)[0] for _, prompt in rounds[-1]]
    prefix, instruction = len(engine.scheduler.prefix), len(" Now, number 0:")
    # The rules once, the last history of each game, and the instruction of each prompt. A history may go on as the
    # instruction begins.
    expected = prefix + sum(len(ids) - prefix for ids in encoded) + games * 3 * instruction
    expected += sum(reply.tokens - 1 for reply in replies)  # the last token of a reply is not computed
    assert expected - games * 3 <= sum(map(sum, passes)) <= expected


def test_a_short_reply_makes_room_while_a_long_one_goes_on():
    """Two slots: one answers five short requests in the time of one long reply."""
    engine = SlotEngine(llama(sampling(max_new_tokens=30)), 2)
    passes = watch(engine)
    (end,), word = engine.codec.stop_ids, 65

    def sample(slots, logits):
        """Only game 0 goes on after its fifth token."""
        return [end if slot.request.game and len(slot.request.reply) == 4 else word for slot in slots]

    engine.sample = sample
    for game in range(6):
        engine.start(game, Prompt(f"{RULES}{game}", game))
    replies = {}
    while len(replies) < 6:
        replies |= dict(engine.run())
    assert [replies[game].tokens for game in range(6)] == [30] + [5] * 5
    assert len(passes) <= 32


# Memory.


@pytest.mark.parametrize("blocks", [1, 5, 9, 14, 20])
def test_replies_are_those_of_plain_generate_in_however_little_memory(blocks):
    plain, local = llama(sampling(max_new_tokens=40)), llama(sampling(max_new_tokens=40))
    engine = SlotEngine(local, 8, blocks * BLOCK)
    assert_same_replies(engine, plain, games=8, turns=3)
    assert engine.caches[0].blocks.shape[1] <= max(blocks, 6)  # a single game may take 6 blocks


def test_a_preempted_request_keeps_its_reply_and_what_is_known_of_it():
    """Three requests are preempted: two within their reply, one whose prompt has lost its beginning."""
    settings = sampling(max_new_tokens=40, max_length=140)
    plain, local = llama(settings), llama(settings)
    for each in (plain, local):
        each.codec.stop_ids = list(range(100, 160))  # replies of 2 to 40 tokens
    engine, sampled = SlotEngine(local, 8, cache_tokens=9 * BLOCK), []
    engine_sample = engine.sample

    def watched(slots, logits):
        sampled.extend(slots)
        return engine_sample(slots, logits)

    engine.sample = watched
    for prompts in conversation(games=8, turns=3):
        sampled.clear()
        replies = answer(engine, prompts)
        assert replies == generate(plain, prompts)
        assert len(sampled) == sum(reply.tokens for reply in replies)  # each token is drawn once


@pytest.mark.parametrize("free", [0, 3 * 10**6, 10**12])
def test_slots_and_cache_fit_in_the_free_memory(free, monkeypatch):
    model = llama(sampling()).model
    monkeypatch.setattr(memory, "_free_memory", lambda model: free)
    slots, tokens = memory.slots_for_memory(model)
    assert 1 <= slots <= memory.MOST_ON_CORES
    assert not free or 0 < slots * memory.logit_bytes(model) + tokens * memory.token_bytes(model) < 0.7 * free + 1


# Draws.


@pytest.mark.parametrize("blocks", [999, 9])
def test_the_same_seed_draws_the_same_replies_and_another_one_others(blocks):
    """With 9 blocks, two requests are preempted."""

    def drawn(seed: int, turns: int = 3) -> list[str]:
        local = llama(sampling(task_type=SAMPLING, max_new_tokens=60))
        engine = SlotEngine(local, 6, blocks * BLOCK)
        torch.manual_seed(seed)
        return [reply.text for prompts in conversation(games=8, turns=turns) for reply in answer(engine, prompts)]

    replies, others = drawn(1), drawn(2, turns=1)
    assert drawn(1) == replies and replies[: len(others)] != others
    assert len(set(replies)) > len(replies) / 2


NEUTRAL = {field.name: field.metadata["neutral"] for field in fields(Sampling) if field.name in sampling().drawing()}
EACH = [NEUTRAL | {name: 3 if isinstance(value, int) else 0.3} for name, value in NEUTRAL.items()]


@pytest.mark.parametrize("changes", [{}, NEUTRAL, *EACH, {"top_k": 7, "temperature": 0.7, "top_p": 0.8}], ids=repr)
def test_every_parameter_of_drawing_has_the_effect_that_it_has_in_plain_generate(changes):
    local = llama(sampling(task_type=SAMPLING, **changes))
    config = generation_config(local.codec)
    processors = local.model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    logits = torch.randn(5, 260, generator=torch.Generator().manual_seed(0))
    expected = processors(torch.zeros(5, 1, dtype=torch.long), logits.clone())
    assert torch.equal(SlotEngine(local, 1).warp(None, logits.clone()), expected)
    assert torch.equal(expected, logits) == (changes == NEUTRAL)


def test_draws_have_their_probabilities():
    torch.manual_seed(0)
    row = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    shares = torch.bincount(draw(row.expand(40_000, -1)), minlength=6) / 40_000
    assert shares[row == 0].sum() == 0
    torch.testing.assert_close(shares, row, rtol=0, atol=0.01)  # four standard deviations


def test_min_new_tokens_holds_all_end_tokens_back():
    settings = sampling(min_new_tokens=6, max_new_tokens=8)
    plain, local = llama(settings), llama(settings)
    likeliest = plain.model(torch.tensor([plain.codec.encode(RULES)[0]])).logits[0, -1].argmax().item()
    plain.codec.stop_ids = [2, likeliest]
    local.codec.stop_ids = [2, likeliest, 999]  # one that the model cannot give
    (reply,) = answer(SlotEngine(local, 1), [(0, RULES)])
    assert [reply] == generate(plain, [(0, RULES)])
    assert reply.tokens > 6


# Models.


@pytest.mark.parametrize(
    "config, changes, held",
    [
        (MistralConfig, {"sliding_window": 100}, True),
        (MistralConfig, {"sliding_window": 99}, False),
        (Qwen2Config, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, False),
        (Qwen2Config, {"layer_types": ["full_attention", "sliding_attention"]}, False),
    ],
)
def test_models_that_do_not_attend_to_all_tokens_are_left_to_plain_batches(config, changes, held):
    settings = config(**SHAPE)
    for name, value in changes.items():
        setattr(settings, name, value)
    model = AutoModelForCausalLM.from_config(settings)
    assert can_hold(model, 100) == held
    model._supports_attention_backend = False
    assert not can_hold(model, 100)


@pytest.mark.parametrize("config", [DiffLlamaConfig, DogeConfig, NemotronConfig])
def test_a_model_whose_attention_is_another_one_is_left_to_plain_batches(config):
    """DiffLlama attends twice in a layer; Doge adds to its scores; Nemotron does not pass our arguments on."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SHAPE | {"num_key_value_heads": 4})).eval()
    plain = copy.deepcopy(model)
    local = LocalModel(model, build_tokenizer(), sampling())
    engine = AutoEngine.over(local, PlayFlags(max_length=400, max_new_tokens=10), models=1, limit=4)
    assert type(engine) is BatchEngine
    prompts = [(0, RULES), (1, RULES)]
    assert answer(engine, prompts) == generate(LocalModel(plain, build_tokenizer(), sampling()), prompts)


@pytest.mark.parametrize("task_type", [TESTING, SAMPLING])
@pytest.mark.parametrize("engine", [SlotEngine, BatchEngine])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_one_line_with_a_remedy(engine, task_type, value):
    engine = engine(llama(sampling(task_type=task_type, min_new_tokens=2)), 2)
    assert answer(engine, [(0, RULES)])  # with tokens that end a reply at -inf

    def spoil(module, args, logits):
        logits[..., 7] = value

    engine.model.get_output_embeddings().register_forward_hook(spoil)
    with pytest.raises(UserError, match="NaN or infinite.* --bf16 True"):
        answer(engine, [(0, RULES)])
