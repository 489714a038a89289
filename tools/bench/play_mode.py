"""One mode of bench_play: tools/play_llm_game.py itself, with its counts and times noted.

    python -m tools.bench.play_mode FOLDER     (called by bench_play, under torchrun for several processes)

FOLDER has mode.json, with the `mode` and the program's `flags`, and model/ and words.txt of `make_inputs`. Each
process writes stats_rankR.json.
"""

import gc
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import utils
from tools import play_llm_game
from tools.bench.train_mode import device_name, matmul_rate, now
from tools.engine.model import LocalModel, own_device
from tools.games import taboo
from tools.players.player import Reply
from tools.selfplay import lineup as seats
from trainers import peak_memory_gib

CONTINUOUS = "continuous"
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
BANDWIDTH_BYTES = {"cpu": 2**28, "mps": 2**30, "cuda": 2**32}
CONTINUOUS_BLOCKS, CONTINUOUS_TOKENS = 256, 512  # on a CPU, where transformers' own choice takes many GiB


# --- what is played with -------------------------------------------------------------------------------------------


def make_inputs(
    folder: Path, shape: dict[str, int], words: int, mean_tokens: int, seed: int, *, bf16: bool = False
) -> None:
    """Write a random Llama, a tokenizer trained on this project's own texts, and so many words.

    The model ends a reply with the same probability at every token, 1 / `mean_tokens`, by way of one component of its
    states that is constant; its tokens are those that the tokenizer knows.
    """
    tokenizer = make_tokenizer(shape["vocab_size"])
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape["hidden_size"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            intermediate_size=shape["intermediate_size"],
            vocab_size=shape["vocab_size"],
            max_position_embeddings=4096,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=3,
        )
    ).eval()
    model.to(own_device(), torch.bfloat16 if bf16 else torch.float32)
    end_with_probability(model, tokenizer, 1 / mean_tokens)
    model.save_pretrained(folder / "model")
    del model
    torch.cuda.empty_cache()  # those that play need the memory
    letters = "abcdefghijklmnopqrstuvwxyz"  # words that no reply holds by chance
    names = ["zq" + "".join(letters[number // 26**place % 26] for place in range(3)) for number in range(words)]
    (folder / "words.txt").write_text("\n".join(names), encoding="utf-8")


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most so many tokens."""
    root = Path(__file__).resolve().parents[2]
    texts = [path.read_text(encoding="utf-8") for path in (root / "README.md", root / "data/README.md")]
    texts += taboo.load_templates(taboo.DEFAULT_TEMPLATES)["rules"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@torch.no_grad()
def end_with_probability(model, tokenizer, probability: float) -> None:
    """Set weights so that each next token is the end token with this probability at temperature 1.2 and top-k 50."""
    temperature, top_k = 1.2, 50
    output = model.lm_head.weight
    never = [0, 1, 2, 3, *range(len(tokenizer), len(output))]  # no tokens of the tokenizer's; the end token for now
    model.model.embed_tokens.weight[:, 0] = 1
    output *= 8  # or the likeliest tokens would be about equally likely, and the end token not among them
    output[:, 0] = 0
    output[never] = 0
    output[never, 0] = -1000
    # What play draws from: replies to the prompts of a game, which look different from random tokens.
    how = {"do_sample": True, "temperature": temperature, "top_k": top_k, "max_new_tokens": 64}
    history, states = [], []
    for _ in range(6):
        prompt = [1, *tokenizer(taboo.play_prompt(history, "word", 5))["input_ids"]]
        ids = torch.tensor([prompt] * 16, device=model.device)
        replies = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        states.append(model.model(replies).last_hidden_state[:, len(prompt) :].flatten(0, 1))
        text = tokenizer.decode(replies[0, len(prompt) :])
        history.append({"role": taboo.next_player(history), "content": text})
    states = torch.cat(states)
    rest = (model.lm_head(states).float() / temperature).topk(top_k - 1).values.logsumexp(-1)
    low, high = 0.0, 1000.0
    for _ in range(50):  # bisection: the more weight, the likelier
        weight = (low + high) / 2
        mean = (weight * states[:, 0].float() / temperature - rest).sigmoid().mean()
        low, high = (weight, high) if mean < probability else (low, weight)
    output[2, 0] = weight


# --- what is noted -------------------------------------------------------------------------------------------------


class ContinuousEngine:
    """transformers' own continuous batching with its paged cache and prefix sharing, for comparison."""

    def __init__(self, local: LocalModel, batch_size: int):
        settings = ContinuousBatchingConfig(max_requests_per_batch=batch_size)
        if local.model.device.type == "cpu":
            settings.num_blocks, settings.max_batch_tokens = CONTINUOUS_BLOCKS, CONTINUOUS_TOKENS
        self.local = local
        if local.sampling.min_new_tokens == local.sampling.max_new_tokens:  # it knows no least number of tokens
            local.stop_ids, local.generation_config.eos_token_id = [], None
        self.manager = local.model.init_continuous_batching(local.generation_config, settings)
        self.manager.start()

    def start(self, request: int, prompt: str, *, game: int) -> None:
        """Hand a request over."""
        self.manager.add_request(self.local.encode(prompt)[0], request_id=str(request))

    def run(self) -> list[tuple[int, Reply]]:
        """Wait for one reply; RuntimeError when it is not whole, or none comes any more."""
        output = self.manager.get_result(timeout=600)
        if output is None or output.error:
            raise RuntimeError(f"transformers' continuous batching stopped ({output and output.error})")
        ids = output.generated_tokens
        if ids[-1] not in self.local.stop_ids and len(ids) < self.local.sampling.max_new_tokens:
            raise RuntimeError("transformers' continuous batching gave a reply that is not whole")
        return [(int(output.request_id), self.local.decode(ids, prompt_cut=False))]


class Watch:
    """Counts and times of the program, taken from outside by wrapping its parts."""

    def __init__(self, mode: str):
        self.counts, self.times, self.engine = Counter(), Counter(), None
        take, play, encode = seats.Seats.take, play_llm_game.play, LocalModel.encode

        def watched_take(table, *args):
            players = take(table, *args)
            self.engine, self.batch_size = players[0].engine, table.batch_size
            return players

        def watched_play(*args):
            progress = play(*args)
            self.times["play"] = progress.seconds
            return progress

        def watched_encode(local, prompt):
            ids, cut = encode(local, prompt)
            self.counts["prompt"] += len(ids)
            self.counts["prompts"] += 1
            return ids, cut

        seats.Seats.take, play_llm_game.play, LocalModel.encode = watched_take, watched_play, watched_encode
        if mode in ("release", "batched"):
            self.watch_forward()

    def watch_forward(self) -> None:
        """Tell `generate`'s passes over prompts from those over single tokens, which are all as long as the batch."""
        forward = LlamaForCausalLM.forward

        def watched(model, *args, **kwargs):
            start = now(model.device)  # in the engine's thread, whose current GPU may be another one
            output = forward(model, *args, **kwargs)
            name = "prefill" if kwargs["input_ids"].shape[1] > 1 else "decode"
            self.times[name] += now(model.device) - start
            self.counts[name] += kwargs["input_ids"].numel()
            return output

        LlamaForCausalLM.forward = watched

    def engine_size(self) -> int:
        """Games at a time, after any halving for want of memory."""
        if isinstance(self.engine, seats.SlotEngine):
            return len(self.engine.slots)
        return self.batch_size if isinstance(self.engine, ContinuousEngine) else self.engine.batch_size

    def result(self) -> dict:
        """What was noted, of this process; lets go of the engine, so that its memory is free to measure with."""
        model = self.engine.local.model
        device, dtype = model.device, model.dtype
        slots = isinstance(self.engine, seats.SlotEngine)
        noted = {
            "engine": type(self.engine).__name__,
            "batch_size": self.engine_size(),
            "prefix": len(self.engine.prefix) if slots else 0,
            "prompts": self.counts["prompts"],
            "prompt": self.counts["prompt"],
            "prefill": self.engine.counts["prefill"] if slots else self.counts["prefill"],
            "seconds": dict(self.times),
            "peak_gib": peak_memory_gib(device),
            "device": device_name(device),
            "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        }
        del model
        self.engine = None
        gc.collect()
        torch.cuda.empty_cache()
        return noted | {"matmul_rate": matmul_rate(device, dtype), "bandwidth": bandwidth(device)}


def bandwidth(device: torch.device) -> float:
    """Bytes per second at which a large tensor is read, the best of ten."""
    tensor = torch.ones(BANDWIDTH_BYTES[device.type] // 4, device=device)
    seconds = []
    for _ in range(10):
        start = now()
        tensor.sum()
        seconds.append(now() - start)
    return tensor.nbytes / min(seconds)


def main() -> None:
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "mode.json").read_text(encoding="utf-8"))
    if torch.cuda.is_available():
        torch.cuda.set_device(own_device())
    watch = Watch(settings["mode"])
    if settings["mode"] == CONTINUOUS:
        seats.ENGINES[seats.SLOTS] = ContinuousEngine
    sys.argv[1:] = settings["flags"]
    started = time.monotonic()
    play_llm_game.main()
    watch.times["program"] = time.monotonic() - started
    utils.write_json(folder / f"stats_rank{utils.rank()}.json", watch.result())
    if settings["mode"] == CONTINUOUS:
        sys.stdout.flush()
        os._exit(0)  # its thread does not end by itself


if __name__ == "__main__":
    utils.run_program(main)
