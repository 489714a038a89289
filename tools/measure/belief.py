"""Belief: how likely the guesser is to name the secret, after each hint of a stored game. No game is played.

For the right guess and for the same sentence with each other candidate in the place of the secret, the log-probability
is measured under the guesser's own prompt after hint k; k = 0 is the empty history. All numbers are in nats:

    belief     log p(right guess). It also rises when a model only becomes readier to guess.
    log_share  log p(right guess) - log sum over candidates of p(their guess): a proper score. 0 is certainty, -log N a
               uniform guess among N candidates. What all guesses have in common, such as the readiness to guess,
               cancels.
    rank       of the right guess among all; 1: no other is likelier
"""

import copy
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tools.games.game import Game
from tools.games.prompts import Templates, answer
from tools.players.player import Turn
from tools.selfplay.rewards import game_result
from utils import whole_characters

if TYPE_CHECKING:
    from tools.engine.local import LocalModel
    from tools.games.chat import ChatTemplate

# The argument of transformers 5.24, and of older versions; that goes when requirements.txt asks for 5.24.
CACHE_NAMES = ("cache", "past_key_values")
AT_ONCE = 256  # sentences


def draw_candidates(game: Game, words: Iterable[str], number: int, seed: int) -> list[str]:
    """At most `number` of the words, in an order drawn by the seed, of which no two are forms of each other."""
    drawn = list(dict.fromkeys(words))
    random.Random(seed).shuffle(drawn)
    candidates: list[str] = []
    for word in drawn:
        if len(candidates) < number and not any(_are_forms(game, word, other) for other in candidates):
            candidates.append(word)
    return candidates


def with_secret(game: Game, secret: str, candidates: Sequence[str], number: int | None = None) -> list[str]:
    """The secret, then candidates that are no forms of it; in all at most `number`, or as many as candidates."""
    others = [word for word in candidates if not _are_forms(game, secret, word)]
    return [secret, *others][: number or len(candidates)]


def fewest_candidates(game: Game, secrets: Iterable[str], candidates: Sequence[str]) -> int:
    """The number of candidates that every secret has: one that is a form of several leaves fewer."""
    return min(len(with_secret(game, secret, candidates)) for secret in secrets)


def _are_forms(game: Game, one: str, other: str) -> bool:
    """Whether the game takes the right guess of one secret for a right guess of the other."""

    def end(task: str, guessed: str) -> str | None:
        role, guess = game.answer(guessed)
        return game.decide(task, [{"role": role, "content": guess}])

    return end(one, other) == end(one, one) or end(other, one) == end(other, other)


def log_share(logprobs: Sequence[float]) -> float:
    """log p of the first guess less the log of the sum of all p, in nats."""
    return float(logprobs[0] - np.logaddexp.reduce(logprobs))


def rank(logprobs: Sequence[float]) -> int:
    """The rank of the first of these log-probabilities: 1 if no other is above it. NaN counts as above."""
    right, *others = logprobs
    return 1 + sum(not other <= right for other in others)


def guesser_prompts(
    game: Game, episode: Mapping, templates: Templates, chat: "ChatTemplate | None" = None
) -> list[str]:
    """The guesser's prompt of play before the first hint, and after each hint, a message of the role that hides.

    A message that breaks the rules may name the secret, so it is no hint.
    """
    history, task = episode["history"], episode["target_word"]
    guesser, _ = game.answer(task)
    result = game_result(game, episode)
    length = result.length - game.outcome(result.outcome).breach
    hints = [end for end, message in enumerate(history[:length], start=1) if message["role"] != guesser]
    prompts = []
    for end in (0, *hints):
        secrets = game.secrets(guesser, task, history[:end])
        turn = Turn(game, guesser, history[:end], episode["max_turns"], 0, secrets, templates)
        prompts.append(turn.prompt(chat))
    return prompts


def encode_sentence(tokenizer, sentence: str, chat: "ChatTemplate | None" = None) -> list[int]:
    """The token ids of a message as the target of a row, without the token that ends it."""
    if chat:  # a template may write something before a reply
        target = chat.row({"query": "", "target": sentence})["target"]
        sentence = target[: target.rindex(sentence) + len(sentence)]
    return tokenizer(whole_characters(sentence), add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def sentence_logprobs(model, prompt: Sequence[int], sentences: Sequence[Sequence[int]]) -> list[float]:
    """The log-probability of each sentence behind a prompt, in nats, summed over its tokens.

    The prompt is computed once, and the sentences continue from its keys and values. Models that keep another state
    (Mamba and other recurrent ones) or take no mask of ours compute each sentence by itself.
    """
    *before, last = prompt
    output = model(input_ids=torch.tensor([before], device=model.device), logits_to_keep=1, use_cache=True)
    name = next((name for name in CACHE_NAMES if getattr(output, name, None) is not None), None)
    if not (name and _holds_keys(output[name], len(before)) and model._supports_attention_backend):
        return [_logprob_alone(model, prompt, sentence) for sentence in sentences]
    logprobs = []
    for start in range(0, len(sentences), AT_ONCE):
        keys = {name: copy.deepcopy(output[name])}  # a pass adds its own to them
        logprobs += _logprobs_as_tree(model, last, sentences[start : start + AT_ONCE], len(before), keys)
    return logprobs


def _holds_keys(cache, tokens: int) -> bool:
    """Whether a cache holds the keys and values of so many tokens, and no state of another kind."""
    if type(cache) is not DynamicCache:
        return False
    kinds = {type(layer) for layer in cache.layers}
    return kinds <= {DynamicLayer, DynamicSlidingWindowLayer} and all(
        layer.keys is not None and layer.keys.shape[-2] == tokens for layer in cache.layers
    )


def _logprob_alone(model, prompt: Sequence[int], sentence: Sequence[int]) -> float:
    row = torch.tensor([[*prompt, *sentence[:-1]]], device=model.device)
    logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 :]
    return float(logits.float().log_softmax(-1)[range(len(sentence)), list(sentence)].sum())


def _logprobs_as_tree(model, last: int, sentences: Sequence[Sequence[int]], cached: int, keys: Mapping) -> list[float]:
    """The log-probabilities of sentences behind the token `last`, before which the keys of so many tokens are cached.

    The sentences are a tree, computed as one row: a node is a beginning, which several sentences may share. Its token
    sees the cached ones and, by a mask, the nodes on the way to it.
    """
    beginnings = dict.fromkeys(tuple(each[:length]) for each in sentences for length in range(len(each)))
    place = {beginning: number for number, beginning in enumerate(beginnings)}  # of the empty one: 0
    way = torch.eye(len(place), dtype=torch.bool)  # [node, node]
    for beginning, number in place.items():
        way[number] |= way[place[beginning[:-1]]]
    sees = torch.cat([way.new_ones(len(place), cached), way], dim=1)
    mask = torch.zeros(sees.shape, dtype=model.dtype).masked_fill(~sees, torch.finfo(model.dtype).min)
    row = {
        "input_ids": torch.tensor([[(last, *beginning)[-1] for beginning in place]]),
        "position_ids": torch.tensor([[cached + len(beginning) for beginning in place]]),
        "attention_mask": mask[None, None],
    }
    row = {name: tensor.to(model.device) for name, tensor in row.items()}
    logprobs = model(**row, **keys, use_cache=True).logits[0].float().log_softmax(-1)
    return [
        float(logprobs[[place[tuple(each[:length])] for length in range(len(each))], list(each)].sum())
        for each in sentences
    ]


def measure_game(
    local: "LocalModel",
    game: Game,
    episode: Mapping,
    *,
    candidates: Sequence[str],
    templates: Templates,
    number: int | None = None,
) -> list[dict]:
    """The numbers of a model before the first hint of a game and after each hint, as the module's docstring has them.

    The secret takes the place of its forms among `candidates`; `number` is how many count, unset: all. `logprobs`
    holds log p of each guess, the right one first.
    """
    secret = episode["target_word"]
    words = with_secret(game, secret, candidates, number)
    guesses = [answer(game, word, templates)[1] for word in words]
    sentences = [encode_sentence(local.codec.tokenizer, guess, local.codec.chat) for guess in guesses]
    prompts = guesser_prompts(game, episode, templates, local.codec.chat)
    head = {"target_word": secret, "outcome": game_result(game, episode).outcome}
    messages: list[dict] = []
    for hints, prompt in enumerate(prompts):
        ids, prompt_cut = local.codec.encode(prompt)
        logprobs = sentence_logprobs(local.model, ids, sentences)
        rounded = [round(logprob, 4) for logprob in logprobs]
        message = {
            "hints": hints,
            "last_hint": 0 < hints == len(prompts) - 1,
            "prompt_cut": prompt_cut,
            "belief": logprobs[0],
            "log_share": log_share(logprobs),
            "rank": rank(logprobs),
            "logprobs": dict(zip(words, rounded, strict=True)),
        }
        messages.append(head | message)
    return messages
