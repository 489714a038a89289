"""The engine of play: the replies of plain `generate`, with each token computed once and no waiting."""

import itertools
import math
import random
import re

import pytest
import torch
from accelerate import dispatch_model
from conftest import build_llama, build_tokenizer
from transformers import AutoModelForCausalLM, DiffLlamaConfig, GPT2Config, MistralConfig, Qwen2Config, Qwen3Config

from tools.engine import linear
from tools.engine import slots as engine_module
from tools.engine.attention import BLOCK, BlockManager, LayerCache
from tools.engine.generate import BatchEngine, generation_config
from tools.engine.linear import pack_weights
from tools.engine.model import LocalModel, Sampling
from tools.engine.slots import SlotEngine, can_hold, draw

RULES = "The rules, which all prompts begin with. "
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def sampling(**changes) -> Sampling:
    return Sampling(**({"max_length": 400, "max_new_tokens": 10, "do_sample": False} | changes))


def llama(settings: Sampling, **changes) -> LocalModel:
    tokenizer = build_tokenizer()
    return LocalModel(build_llama(0, len(tokenizer), num_attention_heads=4, **changes).eval(), tokenizer, settings)


def answer(engine, prompts: list[tuple[int, str]]) -> list:
    """The replies to (game, prompt) pairs, asked at once."""
    for number, (game, prompt) in enumerate(prompts):
        engine.start(number, prompt, game=game)
    replies = {}
    while len(replies) < len(prompts):
        replies |= dict(engine.run())
    return [replies[number] for number in range(len(prompts))]


def generate(local: LocalModel, prompts: list[str]) -> list:
    """The replies of plain `generate`."""
    return BatchEngine(local, len(prompts)).generate(prompts)


def conversation(games: int, turns: int, seed: int = 0) -> list[list[tuple[int, str]]]:
    """For each turn, (game, prompt) pairs: the history of each game, which grows, and an instruction."""
    rng = random.Random(seed)
    history = [RULES] * games
    asked = []
    for turn in range(turns):
        history = [text + "".join(rng.choices("abcdef ", k=rng.randint(1, 25))) for text in history]
        asked.append([(game, f"{text} Now, number {turn % 2}:") for game, text in enumerate(history)])
    return asked


class TestGreedyReplies:
    @pytest.mark.parametrize("kv_heads", [4, 2, 1])
    @pytest.mark.parametrize("slots", [1, 3, 8])
    def test_they_are_those_of_plain_generate_token_by_token(self, kv_heads, slots):
        plain, engine = (llama(sampling(), num_key_value_heads=kv_heads) for _ in range(2))
        engine = SlotEngine(engine, slots)
        for prompts in conversation(games=6, turns=4):
            assert answer(engine, prompts) == generate(plain, [prompt for _, prompt in prompts])

    @pytest.mark.parametrize(
        "config",
        [
            Qwen2Config(**SHAPE, num_key_value_heads=2, vocab_size=260),
            Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16, vocab_size=260),
            MistralConfig(**SHAPE, num_key_value_heads=2, vocab_size=260, sliding_window=None),
        ],
        ids=lambda config: config.model_type,
    )
    def test_of_other_models_too(self, config):
        config.initializer_range = 0.1
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        local = LocalModel(model, build_tokenizer(), sampling())
        assert can_hold(model, 400)
        rounds = conversation(games=5, turns=3)
        expected = [generate(local, [prompt for _, prompt in prompts]) for prompts in rounds]
        engine = SlotEngine(local, 4)
        assert [answer(engine, prompts) for prompts in rounds] == expected

    def test_of_prompts_that_share_nothing_are_empty_or_lost_their_beginning(self):
        settings = sampling(max_length=60)
        prompts = list(enumerate(["", "x" * 200, "a different one", "x" * 190 + "end", "y"]))
        plain, engine = llama(settings), SlotEngine(llama(settings), 3)
        expected = generate(plain, [prompt for _, prompt in prompts])
        assert answer(engine, prompts) == expected == answer(engine, prompts)
        assert [reply.prompt_cut for reply in expected] == [False, True, False, True, False]

    def test_of_a_tokenizer_without_bos_whose_prompts_have_no_common_beginning(self):
        locals_ = [llama(sampling()) for _ in range(2)]
        for local in locals_:
            local.bos_id = None
        prompts = list(enumerate(["abc", "xyz"]))
        engine = SlotEngine(locals_[1], 2)
        assert answer(engine, prompts) == generate(locals_[0], ["abc", "xyz"])
        assert engine.prefix == []

    def test_many_new_prompts_are_taken_in_over_several_steps(self, monkeypatch):
        monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 20)
        plain, engine = llama(sampling()), SlotEngine(llama(sampling()), 6)
        (prompts,) = conversation(games=6, turns=1)
        assert answer(engine, prompts) == generate(plain, [prompt for _, prompt in prompts])

    def test_a_game_whose_slot_was_given_away_is_computed_anew(self):
        plain, engine = llama(sampling()), SlotEngine(llama(sampling()), 2)
        for prompts in conversation(games=4, turns=3):
            for pair in (prompts[:2], prompts[2:]):
                assert answer(engine, pair) == generate(plain, [prompt for _, prompt in pair])


class TestHalfPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_logits_are_as_near_to_those_of_float32_as_a_plain_pass_has_them(self, dtype):
        local, half, full = llama(sampling()), llama(sampling()).model.to(dtype), llama(sampling()).model
        local.model = local.model.to(dtype)
        engine, errors = SlotEngine(local, 3), {"engine": [], "plain": []}
        engine_sample = engine._sample

        @torch.no_grad()
        def watched(slots, logits):
            for slot, row in zip(slots, logits, strict=True):
                request = slot.request
                ids = torch.tensor([local.encode(request.prompt)[0] + request.reply])
                expected, plain = (model(ids).logits[0, -1].float() for model in (full, half))
                errors["engine"].append((row - expected).square().mean())
                errors["plain"].append((plain - expected).square().mean())
            return engine_sample(slots, logits)

        engine._sample = watched
        for prompts in conversation(games=5, turns=3):
            answer(engine, prompts)
        by_engine, by_plain = (torch.stack(squares).mean().sqrt() for squares in errors.values())
        assert 0.5 * by_plain < by_engine < 1.5 * by_plain


class TestWhatIsComputed:
    def test_a_token_of_rules_and_history_is_computed_once_for_all_turns_sides_and_games(self):
        engine = SlotEngine(llama(sampling(max_new_tokens=2)), 3)
        rounds = conversation(games=3, turns=4)
        for prompts in rounds:
            answer(engine, prompts)
        encoded = [[engine.local.encode(prompt)[0] for _, prompt in prompts] for prompts in rounds]
        instruction = len(" Now, number 0:")
        # The rules once; of each game its last history, and of each prompt its instruction. A history may go on as the
        # instruction begins.
        common = len(engine.prefix)
        expected = common + sum(len(ids) - common for ids in encoded[-1]) + 3 * 3 * instruction
        assert expected - 3 * 3 <= engine.counts.prefill_tokens <= expected

    def test_prompts_and_tokens_are_counted(self):
        prompts = [(0, RULES), (1, f"{RULES}And more."), (2, f"{RULES}And")]
        slots, batch = (kind(llama(sampling(min_new_tokens=10)), 2) for kind in (SlotEngine, BatchEngine))
        lengths = [len(slots.local.encode(prompt)[0]) for _, prompt in prompts]
        for engine in (slots, batch):
            assert [reply.tokens for reply in answer(engine, prompts)] == [10] * 3
            assert (engine.counts.prompts, engine.counts.new_tokens) == (3, 30)
            assert engine.counts.prompt_tokens == sum(lengths)
        common = lengths[0] - 1  # the longest prefix that leaves the shortest prompt a token to compute
        assert slots.counts.prefix_tokens == common
        assert common + 1 + 10 + 4 >= slots.counts.prefill_tokens >= common + 1 + 10 + 1  # the third takes a used slot
        assert (slots.counts.steps, slots.counts.prefill_seconds) == (20, None)
        assert batch.counts.prefill_tokens == 2 * lengths[1] + lengths[2]  # padded
        assert batch.counts.steps == 20
        assert batch.counts.prefill_seconds > 0 < batch.counts.decode_seconds

    def test_with_more_games_than_slots_those_begun_keep_theirs(self):
        """Each game asks for its next reply when it has the one before, as in play: nothing is computed twice."""
        engine = SlotEngine(llama(sampling(max_new_tokens=2)), 2)
        rounds = conversation(games=6, turns=4)
        asked = [0] * 6

        def ask(game):
            engine.start(game, rounds[asked[game]][game][1], game=game)
            asked[game] += 1

        for game in range(6):
            ask(game)
        ended = 0
        while ended < 6 * 4:
            for game, _ in engine.run():
                ended += 1
                if asked[game] < 4:
                    ask(game)
        encoded = [[engine.local.encode(prompt)[0] for _, prompt in prompts] for prompts in rounds]
        common, instruction = len(engine.prefix), len(" Now, number 0:")
        of_games = sum(len(ids) - common for ids in encoded[-1])
        assert engine.counts.prefill_tokens <= common + of_games + 6 * 3 * instruction

    def test_a_short_reply_makes_room_while_a_long_one_goes_on(self):
        """Two slots, of which one answers five short requests in the time of one long reply."""
        engine = SlotEngine(llama(sampling(min_new_tokens=30, max_new_tokens=30)), 2)
        for game, limit in enumerate([30] + [5] * 5):
            engine.start(game, f"{RULES}{game}", game=game, limit=limit)
        replies = {}
        while len(replies) < 6:
            replies |= dict(engine.run())
        assert [replies[game].tokens for game in range(6)] == [30] + [5] * 5
        assert engine.counts.steps <= 31

    def test_a_model_that_is_spread_over_devices_answers_the_same(self):
        """accelerate's hooks, which move inputs from device to device, here all on the CPU."""
        plain, local = llama(sampling()), llama(sampling())
        places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
        places |= {f"model.layers.{number}": "cpu" for number in range(2)}
        local.model = dispatch_model(local.model, places, main_device="cpu", force_hooks=True)
        engine = SlotEngine(local, 3)
        for prompts in conversation(games=4, turns=2):
            assert answer(engine, prompts) == generate(plain, [prompt for _, prompt in prompts])

    @pytest.mark.parametrize("beginnings", [(RULES, RULES), ("a", "b")], ids=["common prefix", "none"])
    def test_a_model_that_attends_twice_in_a_layer_is_told(self, beginnings):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(DiffLlamaConfig(**SHAPE, num_key_value_heads=4, vocab_size=260))
        tokenizer = build_tokenizer()
        tokenizer.bos_token = None
        engine = SlotEngine(LocalModel(model.eval(), tokenizer, sampling()), 2)
        with pytest.raises(RuntimeError, match="attends twice .* --engine generate"):
            answer(engine, [(game, f"{text} and more") for game, text in enumerate(beginnings)])

    def test_logits_that_are_no_numbers_are_told(self):
        local = llama(sampling(do_sample=True))
        local.model.lm_head.weight.data.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="logits are no numbers"):
            answer(SlotEngine(local, 2), [(0, RULES)])


class TestBlocks:
    def test_a_slot_has_just_the_blocks_it_needs_and_takes_free_ones_first(self):
        manager, one, other = BlockManager(), [], []
        manager.resize(one, 2 * BLOCK)
        manager.resize(other, 2 * BLOCK + 1)
        assert (one, other, manager.num_blocks) == ([0, 1], [2, 3, 4], 5)
        manager.resize(one, 0)
        manager.resize(other, 4 * BLOCK)
        assert (one, other, manager.num_blocks, manager.used) == ([], [2, 3, 4, 0], 5, 4)

    def test_busy_slots_get_the_first_blocks_and_each_block_keeps_its_content(self):
        rng = random.Random(0)
        manager, slots = BlockManager(), [[] for _ in range(8)]
        stored: dict[int, str] = {}
        for _ in range(50):
            for number, blocks in enumerate(slots):
                if rng.random() < 0.5:
                    manager.resize(blocks, rng.randrange(5 * BLOCK))
                    stored |= {block: f"{number}.{place}" for place, block in enumerate(blocks)}
            busy = [blocks for blocks in slots if rng.random() < 0.5]
            idle = [blocks for blocks in slots if not any(blocks is one for one in busy)]
            to, by = manager.compact(busy, idle)
            stored |= dict(zip(to, [stored.get(block) for block in by], strict=True))
            numbers = [block for blocks in busy for block in blocks]
            assert sorted(numbers) == list(range(len(numbers)))
            assert sorted(itertools.chain(numbers, *idle, manager.free)) == list(range(manager.num_blocks))
            held = [[stored[block] for block in blocks] for blocks in slots]
            assert held == [
                [f"{number}.{place}" for place in range(len(blocks))] for number, blocks in enumerate(slots)
            ]


class TestMemory:
    def test_a_layer_keeps_nothing_of_the_blocks_that_its_prefix_was_computed_in(self):
        cache = LayerCache(torch.randn(1, 4, 0, 8), 3)
        cache.blocks.normal_()
        tokens = [cache.blocks[:, place // BLOCK, :, :, place % BLOCK] for place in range(BLOCK + 5)]  # (2, 4, 8) each
        expected = torch.stack(tokens, dim=2)
        cache.set_prefix(BLOCK + 5)
        assert torch.equal(cache.prefix, expected)
        assert cache.prefix.untyped_storage().nbytes() == 2 * 4 * (BLOCK + 5) * 8 * 4
        assert cache.blocks.untyped_storage().nbytes() == 0

    def test_a_layer_grows_to_no_more_than_may_be(self):
        cache = LayerCache(torch.randn(1, 4, 0, 8), 0)
        cache.grow(10, most=100)
        assert cache.blocks.shape[1] == 12
        cache.grow(90, most=100)
        assert cache.blocks.shape[1] == 100
        assert not cache.blocks.any()

    def run_out_of_memory(self, engine, monkeypatch, at, layer=None):
        """Let the device run out of memory once, in the step of this number: in its forward pass, or in a layer."""
        left = [1]

        def fail(*_):
            if engine.counts.steps >= at and left:
                left.clear()
                raise torch.OutOfMemoryError

        if layer is None:
            engine.model.register_forward_pre_hook(lambda *_: fail())
        else:
            grow = LayerCache.grow

            def limited(cache, *args):
                if cache is engine.caches.get(layer):
                    fail()
                grow(cache, *args)

            monkeypatch.setattr(LayerCache, "grow", limited)

    @pytest.mark.parametrize("layer", [None, 1], ids=["forward", "grow"])
    @pytest.mark.parametrize("at", [1, 4, 20, 40])
    def test_when_it_runs_out_a_few_games_wait_and_no_reply_is_lost(self, at, layer, monkeypatch, caplog):
        plain, engine = llama(sampling(max_new_tokens=30)), SlotEngine(llama(sampling(max_new_tokens=30)), 16)
        self.run_out_of_memory(engine, monkeypatch, at, layer)
        for prompts in conversation(games=16, turns=3):
            assert answer(engine, prompts) == generate(plain, [prompt for _, prompt in prompts])
        (waited,) = re.findall(r"out of memory with 16 replies at a time; (\d+) wait", caplog.text)
        assert 1 <= int(waited) <= 4

    def test_making_room_that_runs_out_of_memory_too_is_tried_again(self, monkeypatch):
        plain, engine = llama(sampling(max_new_tokens=30)), SlotEngine(llama(sampling(max_new_tokens=30)), 16)
        self.run_out_of_memory(engine, monkeypatch, at=20)
        shrink, left = LayerCache.shrink, [1]

        def limited(cache, size):
            if cache is engine.caches.get(1) and engine.counts.steps >= 20 and left:
                left.clear()
                raise torch.OutOfMemoryError
            shrink(cache, size)

        monkeypatch.setattr(LayerCache, "shrink", limited)
        for prompts in conversation(games=16, turns=3):
            assert answer(engine, prompts) == generate(plain, [prompt for _, prompt in prompts])
        assert not left

    def test_when_it_runs_out_caches_are_kept_and_all_games_come_back(self, monkeypatch):
        calm, engine = (SlotEngine(llama(sampling(max_new_tokens=30, min_new_tokens=30)), 16) for _ in range(2))
        monkeypatch.setattr(engine_module, "RECOVERY", 1.05)
        self.run_out_of_memory(engine, monkeypatch, at=40)
        for prompts in conversation(games=16, turns=6):
            assert answer(engine, prompts) == answer(calm, prompts)
        again = engine.counts.prefill_tokens - calm.counts.prefill_tokens
        assert 0 < again < calm.counts.prefill_tokens / 4
        engine.counts.at_once = 0
        answer(engine, prompts)
        assert engine.counts.at_once == 16

    @pytest.mark.parametrize("blocks", [1, 5, 9, 14, 20])
    def test_replies_are_those_of_plain_generate_in_however_little_memory(self, blocks):
        plain, local = llama(sampling(max_new_tokens=40)), llama(sampling(max_new_tokens=40))
        local.cache_tokens = blocks * BLOCK
        engine, held = SlotEngine(local, 8), []
        step = engine._step

        def watched():
            held.append((engine.block_manager.num_blocks, len(engine._busy())))
            return step()

        engine._step = watched
        for prompts in conversation(games=8, turns=3):
            assert answer(engine, prompts) == generate(plain, [prompt for _, prompt in prompts])
        assert all(used <= blocks or busy == 1 for used, busy in held[:-1])
        assert engine.caches[0].blocks.shape[1] <= max(blocks, 6)

    def test_as_many_games_run_as_fit_at_the_lengths_seen(self):
        """Replies may have 300 tokens but have 20: at first few games are let in, then as many as these need."""
        local = llama(sampling(max_new_tokens=300, max_length=1000, min_new_tokens=300))
        local.cache_tokens = 24 * BLOCK
        engine, running = SlotEngine(local, 50), []
        for game in range(50):
            engine.start(game, f"{RULES}{game}", game=game, limit=20)
        while engine.counts.prompts < 50:
            engine.counts.at_once = 0
            engine.run()
            running.append(engine.counts.at_once)
        assert running[0] == 2  # two of 10 blocks
        assert max(running) == 24  # of a block each
        assert engine.counts.prefill_tokens < len(engine.prefix) + 50 * 3  # none was computed twice

    def test_if_one_game_does_not_fit_the_error_is_raised(self, monkeypatch):
        engine = SlotEngine(llama(sampling()), 2)

        def full(*args, **kwargs):
            raise torch.OutOfMemoryError

        monkeypatch.setattr(engine.model, "forward", full)
        engine.start(0, "a", game=0)
        with pytest.raises(torch.OutOfMemoryError):
            engine.run()


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Of observed counts against expected ones, cells below 5 pooled; in standard deviations from its mean."""
    small = expected < 5
    counts, expected = (torch.cat([x[~small], x[small].sum()[None]]) for x in (counts.double(), expected.double()))
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    return (((counts - expected) ** 2 / expected).sum().item() - degrees) / math.sqrt(2 * degrees)


class TestDraws:
    @pytest.mark.parametrize(
        "changes", [{}, {"top_k": 0}, {"top_k": 7, "temperature": 0.7}, {"top_k": 0, "top_p": 0.8, "temperature": 1.0}]
    )
    def test_tokens_have_the_distribution_of_plain_generate(self, changes):
        """First two tokens of many replies against the probabilities that transformers' own processors give."""
        settings = sampling(do_sample=True, max_new_tokens=2, min_new_tokens=2, **changes)
        local, other = llama(settings), llama(settings)
        processors = other.model._get_logits_processor(generation_config(other), input_ids_seq_length=1, device="cpu")

        @torch.no_grad()
        def next_token(ids):
            logits = other.model(ids).logits[:, -1]
            logits[:, local.stop_ids] = -torch.inf
            return processors(ids, logits).softmax(-1)

        ids = torch.tensor([local.encode(RULES)[0]])
        first = next_token(ids)[0]
        second = first @ next_token(torch.cat([ids.expand(260, -1), torch.arange(260)[:, None]], 1))
        drawn = []
        local.decode = lambda ids, cut: drawn.append(ids)
        engine = SlotEngine(local, 64)
        torch.manual_seed(0)
        answer(engine, [(game, RULES) for game in range(3000)])
        for place, expected in enumerate((first, second)):
            counts = torch.bincount(torch.tensor([ids[place] for ids in drawn]), minlength=260)
            assert chi_square(counts, 3000 * expected) < 4

    def test_draw_follows_the_probabilities_and_never_takes_an_impossible_choice(self):
        torch.manual_seed(0)
        row = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
        drawn = draw(row.expand(20_000, -1))
        counts = torch.bincount(drawn, minlength=6)
        assert counts[[0, 2, 5]].sum() == 0
        assert chi_square(counts, 20_000 * row) < 4

    def test_the_same_seed_gives_the_same_replies(self):
        (prompts,) = conversation(games=6, turns=1)
        replies = []
        for seed in (1, 1, 2):
            engine = SlotEngine(llama(sampling(do_sample=True)), 4)
            torch.manual_seed(seed)
            replies.append(answer(engine, prompts))
        assert replies[0] == replies[1] != replies[2]

    def test_min_new_tokens_holds_all_end_tokens_back(self):
        settings = sampling(min_new_tokens=6, max_new_tokens=8)
        plain, local = llama(settings), llama(settings)
        likeliest = plain.model(torch.tensor([plain.encode(RULES)[0]])).logits[0, -1].argmax().item()
        for one in (plain, local):
            one.stop_ids = [2, likeliest]
        (reply,) = answer(SlotEngine(local, 1), [(0, RULES)])
        assert [reply] == generate(plain, [RULES])
        assert reply.tokens > 6


class TestWhichModels:
    def test_a_sliding_window_shorter_than_the_prompts_is_refused(self):
        config = MistralConfig(**SHAPE, num_key_value_heads=2, vocab_size=260, sliding_window=100)
        model = AutoModelForCausalLM.from_config(config)
        assert can_hold(model, 100)
        assert not can_hold(model, 101)

    def test_a_model_without_transformers_attention_interface_is_refused(self):
        model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=260))
        model._supports_attention_backend = False
        assert not can_hold(model, 100)

    def test_positions_that_depend_on_the_longest_prompt_are_refused(self):
        config = Qwen2Config(**SHAPE, num_key_value_heads=2, vocab_size=260)
        config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        assert not can_hold(AutoModelForCausalLM.from_config(config), 100)

    def test_layers_of_other_kinds_are_refused(self):
        config = Qwen2Config(**SHAPE, num_key_value_heads=2, vocab_size=260)
        config.layer_types = ["full_attention", "sliding_attention"]
        assert not can_hold(AutoModelForCausalLM.from_config(config), 100)


# --- products with the weights


@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_give_the_plain_products(bias):
    layer = torch.nn.Linear(48, 30, bias=bias)
    rows = torch.randn(1, 2 * linear.ROWS, 48)
    plain = [layer(rows[:, :count]).detach() for count in (1, linear.ROWS, 2 * linear.ROWS)]
    pack_weights(torch.nn.Sequential(layer))
    assert layer.forward.keywords["packed"].layout == torch._mkldnn
    with torch.inference_mode():
        for expected in plain:
            torch.testing.assert_close(layer(rows[:, : expected.shape[1]]), expected)


def test_weights_are_not_packed_in_half_precision_behind_hooks_or_without_memory(monkeypatch):
    half, moved, large = (torch.nn.Linear(8, 8) for _ in range(3))
    moved.forward = torch.nn.functional.relu
    pack_weights(torch.nn.Sequential(half.bfloat16(), moved))
    monkeypatch.setattr(linear, "MEMORY_SHARE", 0)
    pack_weights(torch.nn.Sequential(large))
    assert moved.forward is torch.nn.functional.relu
    assert not {"forward"} & (vars(half).keys() | vars(large).keys())
