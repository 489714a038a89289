"""The slot engine on the pretend GPU: the CPU's numbers, no mixing of devices, few waits, uploads and launches."""

import asyncio

import pytest
import torch
from conftest import build_llama, build_tokenizer
from pretend_gpu import DEVICE, PretendGPU, to_cpu
from torch.testing import assert_close

from tools.bench.epoch import LAUNCHES
from tools.engine.local_player import Batcher, LocalPlayer
from tools.engine.model import LocalModel, Sampling
from tools.engine.slots import SlotEngine
from tools.games import load_game
from tools.selfplay.play import play_games

WORDS = ["sun", "river", "chair", "music", "stone"]


class WatchedEngine(SlotEngine):
    """Runs on the pretend GPU, where one is given, and keeps all logits."""

    def __init__(self, settings: Sampling, slots: int, gpu: PretendGPU | None = None, layers: int = 2):
        tokenizer = build_tokenizer()
        model = build_llama(0, len(tokenizer), num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=layers)
        super().__init__(LocalModel(gpu.move(model.eval()) if gpu else model.eval(), tokenizer, settings), slots)
        self.gpu, self.logits = gpu, []

    def run(self):
        if self.gpu is None:
            return super().run()
        with self.gpu:  # of the thread that computes
            return super().run()

    def _sample(self, slots, logits):
        self.logits.append(to_cpu(logits).clone())
        return super()._sample(slots, logits)


def play(engine: SlotEngine) -> list[dict]:
    """Games of two turns between two players of this engine."""
    game, episodes = load_game(), []
    player = LocalPlayer(engine, Batcher(8))
    torch.manual_seed(1)
    asyncio.run(
        play_games(
            game,
            enumerate(WORDS),
            dict.fromkeys(game.roles, player),
            max_turns=2,
            concurrent_games=len(WORDS),
            on_episode=episodes.append,
        )
    )
    return sorted(episodes, key=lambda episode: episode["index"])


@pytest.mark.parametrize(
    "do_sample, blocks", [(False, None), (True, None), (True, 8)], ids=["greedy", "drawn", "drawn, little memory"]
)
def test_whole_games_are_those_of_the_cpu(do_sample, blocks):
    settings = Sampling(max_length=2048, max_new_tokens=6, min_new_tokens=3, do_sample=do_sample)
    gpu = PretendGPU()
    here, there = WatchedEngine(settings, 4), WatchedEngine(settings, 4, gpu)
    for engine in (here, there):
        engine.fitting = engine.most_blocks = blocks or engine.fitting
    assert play(there) == play(here)
    assert len(there.logits) == len(here.logits) > 20
    for ours, theirs in zip(there.logits, here.logits, strict=True):
        assert_close(ours, theirs)
    assert there.caches[0].blocks.device == DEVICE
    assert len(gpu.waits) == there.counts.steps  # the tokens that were drawn, and nothing else


def one_step(layers: int, prompts: int) -> PretendGPU:
    """What a step costs: one of decoding five replies beside so many new prompts."""
    gpu = PretendGPU()
    engine = WatchedEngine(Sampling(max_length=500, max_new_tokens=20), 8, gpu, layers)
    engine.local.stop_ids = []
    for number in range(5 + prompts):
        engine.start(number, f"The same rules for all. Game {number}: " + "x" * number, game=number)
    late = [engine.waiting.pop() for _ in range(prompts)]
    with torch.inference_mode(), gpu:
        for _ in range(3):
            engine._admit()
            engine._step()
        engine.waiting.extend(late)
        gpu.reset()
        engine._admit()
        engine._step()
    return gpu


def test_a_step_waits_once_and_uploads_once():
    for prompts in (0, 3):
        gpu = one_step(layers=2, prompts=prompts)
        assert (len(gpu.waits), len(gpu.uploads)) == (1, 1), (gpu.waits, gpu.uploads)


def test_launches_of_a_step_stay_few():
    """Ceilings: what the step takes today. A layer's are what the estimate of an epoch counts with."""
    two, three = (one_step(layers, prompts=0).launches.total() for layers in (2, 3))
    per_layer = three - two
    assert per_layer <= LAUNCHES
    assert two - 2 * per_layer <= 40
    two, three = (one_step(layers, prompts=1).launches.total() for layers in (2, 3))
    assert three - two - per_layer <= 20  # of each new prompt in each layer
