"""The slot engine on the pretend GPU: the CPU's numbers, without mixing devices."""

import asyncio

import pytest
import torch
from conftest import build_llama, build_tokenizer
from pretend_gpu import DEVICE, PretendGPU, to_cpu
from torch.testing import assert_close

from tools.engine.local_player import Batcher, LocalPlayer
from tools.engine.model import LocalModel, Sampling
from tools.engine.slots import SlotEngine
from tools.games import load_game
from tools.selfplay.play import play_games

WORDS = ["sun", "river", "chair", "music", "stone"]


class WatchedEngine(SlotEngine):
    """Runs on the pretend GPU, where one is given, and keeps all logits."""

    def __init__(self, settings: Sampling, blocks: int | None, gpu: PretendGPU | None = None):
        tokenizer = build_tokenizer()
        model = build_llama(0, len(tokenizer), num_attention_heads=4, num_key_value_heads=2).eval()
        super().__init__(LocalModel(gpu.move(model) if gpu else model, tokenizer, settings), slots=4)
        self.block_limit = self.max_blocks = blocks or self.max_blocks
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
    players = dict.fromkeys(game.roles, LocalPlayer(engine, Batcher()))
    torch.manual_seed(1)
    how = {"max_turns": 2, "concurrent_games": len(WORDS), "on_episode": episodes.append}
    asyncio.run(play_games(game, enumerate(WORDS), players, **how))
    return sorted(episodes, key=lambda episode: episode["index"])


@pytest.mark.parametrize(
    "do_sample, blocks", [(False, None), (True, None), (True, 8)], ids=["greedy", "drawn", "drawn, little memory"]
)
def test_whole_games_are_those_of_the_cpu(do_sample, blocks):
    settings = Sampling(max_length=2048, max_new_tokens=6, min_new_tokens=3, do_sample=do_sample)
    here, there = WatchedEngine(settings, blocks), WatchedEngine(settings, blocks, PretendGPU())
    assert play(there) == play(here)
    assert len(there.logits) == len(here.logits) > 20
    for ours, theirs in zip(there.logits, here.logits, strict=True):
        assert_close(ours, theirs)
    assert there.caches[0].blocks.device == DEVICE
