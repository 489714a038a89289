"""One mode of the benchmark of play: what is played with, and playing it in this process."""

import asyncio
import dataclasses
import gc
import time
from pathlib import Path

import torch
from transformers import ContinuousBatchingConfig, PreTrainedTokenizerFast

import utils
from tools.bench.common import LlamaFlags, bandwidth, device_name, matmul_rate
from tools.engine.generate import generation_config
from tools.engine.model import Counts, LocalModel, own_device
from tools.games import load_game
from tools.games.prompts import default_templates, play_prompt
from tools.players.player import Reply
from tools.selfplay import lineup
from tools.selfplay.options import PlayFlags
from tools.selfplay.play import play_games, seed_draws
from tools.tiny.models import train_tokenizer
from trainers import peak_memory_gib

CONTINUOUS = "continuous"
CONTINUOUS_BLOCKS, CONTINUOUS_TOKENS = 256, 512  # on a CPU, where transformers' own choice takes many GiB
CALIBRATION_TOKENS = 64  # of each of the replies by which the weight of the end token is found
ROOT = Path(__file__).resolve().parents[2]
GAME = load_game()


# --- what is played with -------------------------------------------------------------------------------------------


def make_inputs(folder: Path, settings: LlamaFlags, words: int, mean_tokens: int, *, bf16: bool = False) -> None:
    """Write model/, a random Llama with a tokenizer of this project's texts, and words.txt with so many words.

    The model ends a reply with the same probability at every token, 1 / `mean_tokens`, through one component of its
    hidden states that is constant; its other tokens are those that the tokenizer knows.
    """
    tokenizer = make_tokenizer(settings.vocab_size)
    tokenizer.save_pretrained(folder / "model")
    model = settings.llama(max_position_embeddings=4096).eval()
    model.to(own_device(), torch.bfloat16 if bf16 else torch.float32)
    end_with_probability(model, tokenizer, 1 / mean_tokens)
    model.save_pretrained(folder / "model")
    del model
    torch.cuda.empty_cache()  # the processes that play need the memory
    letters = "abcdefghijklmnopqrstuvwxyz"  # words that no reply holds by chance
    names = ["zq" + "".join(letters[number // 26**place % 26] for place in range(3)) for number in range(words)]
    (folder / "words.txt").write_text("\n".join(names), encoding="utf-8")


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most so many tokens, of the rules of the game and the word list."""
    rules = default_templates(GAME)["rules"]
    return train_tokenizer(utils.read_words(ROOT / "data/target_words.txt") + 20 * rules, vocab_size)


@torch.no_grad()
def end_with_probability(model, tokenizer, probability: float) -> None:
    """Set weights so that each next token is the end token with this probability at temperature 1.2 and top-k 50."""
    temperature, top_k = 1.2, 50
    output = model.lm_head.weight
    never = [0, 1, 2, 3, *range(len(tokenizer), len(output))]  # special and unknown tokens; the end token for now
    model.model.embed_tokens.weight[:, 0] = 1
    output *= 8  # or the likeliest tokens would be about equally likely, and the end token not among them
    output[:, 0] = 0
    output[never] = 0
    output[never, 0] = -1000
    # Hidden states of replies to a game's prompts, as in play: those of random tokens differ.
    history, states = [], []
    for _ in range(6):
        prompt = [1, *tokenizer(play_prompt(GAME, history, GAME.example_task, GAME.max_turns))["input_ids"]]
        ids = torch.tensor([prompt] * 16, device=model.device)
        replies = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=temperature,
            top_k=top_k,
            max_new_tokens=CALIBRATION_TOKENS,
        )
        states.append(model.model(replies).last_hidden_state[:, len(prompt) :].flatten(0, 1))
        text = tokenizer.decode(replies[0, len(prompt) :])
        history.append({"role": GAME.next_role(history), "content": text})
    states = torch.cat(states)
    rest = (model.lm_head(states).float() / temperature).topk(top_k - 1).values.logsumexp(-1)
    low, high = 0.0, 1000.0
    for _ in range(50):  # bisection: the more weight, the likelier
        weight = (low + high) / 2
        mean = (weight * states[:, 0].float() / temperature - rest).sigmoid().mean()
        low, high = (weight, high) if mean < probability else (low, weight)
    output[2, 0] = weight


# --- playing -------------------------------------------------------------------------------------------------------


class ContinuousEngine:
    """transformers' own continuous batching with its paged cache and prefix sharing, for comparison."""

    def __init__(self, local: LocalModel, batch_size: int):
        settings = ContinuousBatchingConfig(max_requests_per_batch=batch_size)
        if local.model.device.type == "cpu":
            settings.num_blocks, settings.max_batch_tokens = CONTINUOUS_BLOCKS, CONTINUOUS_TOKENS
        self.local, self.batch_size, self.counts = local, batch_size, Counts()
        if local.sampling.min_new_tokens == local.sampling.max_new_tokens:  # it knows no least number of tokens
            local.stop_ids = []
        self.manager = local.model.init_continuous_batching(generation_config(local), settings)
        self.manager.start()

    def start(self, request: int, prompt: str, *, game: int) -> None:
        """Hand a request over."""
        ids, _ = self.local.encode(prompt)
        self.counts.prompts += 1
        self.counts.prompt_tokens += len(ids)
        self.manager.add_request(ids, request_id=str(request))

    def run(self) -> list[tuple[int, Reply]]:
        """Wait for one reply; RuntimeError when it is not whole, or none comes any more."""
        output = self.manager.get_result(timeout=600)
        if output is None or output.error:
            raise RuntimeError(f"transformers' continuous batching stopped ({output and output.error})")
        ids = output.generated_tokens
        if ids[-1] not in self.local.stop_ids and len(ids) < self.local.sampling.max_new_tokens:
            raise RuntimeError("transformers' continuous batching gave a reply that is not whole")
        self.counts.new_tokens += len(ids)
        return [(int(output.request_id), self.local.decode(ids, prompt_cut=False))]


def measure(folder: str, flags: PlayFlags, games: int, seed: int, continuous: bool) -> dict:
    """Play this rank's share of the first `games` words as tools/play_llm_game.py does; what it took."""
    if continuous:
        lineup.ENGINES[CONTINUOUS], flags.engine = ContinuousEngine, CONTINUOUS
    words = list(enumerate(utils.read_words(f"{folder}/words.txt")[:games]))[utils.rank() :: utils.world_size()]
    game = flags.load_game()
    players, at_once = lineup.Lineup(flags, game).build_players([f"{folder}/model"] * 2, on_batch=lambda: None)
    episodes: list[dict] = []
    seed_draws(seed, games_left=len(words))
    start = time.monotonic()
    asyncio.run(
        play_games(
            game,
            words,
            players,
            max_turns=flags.turns(game),
            concurrent_games=at_once,
            on_episode=episodes.append,
        )
    )
    seconds = time.monotonic() - start
    engine = players[game.roles[0]].engine
    model = engine.local.model
    device, dtype = model.device, model.dtype
    noted = {
        "engine": type(engine).__name__,
        "batch_size": engine.batch_size,
        **dataclasses.asdict(engine.counts),
        "seconds": seconds,
        "reply_tokens": [reply["tokens"] for episode in episodes for reply in episode["replies"]],
        "peak_gib": peak_memory_gib(device),
        "device": device_name(device),
        "weight_bytes": sum(weights.numel() * weights.element_size() for weights in model.parameters()),
    }
    if continuous:
        engine.manager.stop(block=True)
    del model, engine, players
    if device.type == "cuda":  # room to measure with
        gc.collect()
        torch.cuda.empty_cache()
    return noted | {"matmul_rate": matmul_rate(device, dtype), "bandwidth": bandwidth(device)}
