"""Belief: how likely the guesser is to name the secret, after each hint of a stored game. No game is played.

For the right guess and for the same sentence with each other candidate instead of the secret, the log-probability
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
from os.path import commonprefix
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tools.common.models import encode_pairs
from tools.games.game import Game
from tools.games.prompts import Templates, answer
from tools.players.player import Turn
from tools.selfplay.rewards import game_result

if TYPE_CHECKING:
    from tools.engine.local import LocalModel
    from tools.games.chat import ChatTemplate

# The model's argument in transformers 5.24, and in older versions.
CACHE_NAMES = ("cache", "past_key_values")
SENTENCES_AT_ONCE = 32  # each has a copy of the prompt's keys and values


def draw_candidates(game: Game, words: Iterable[str], number: int, seed: int) -> list[str]:
    """At most `number` of the words, in an order drawn by the seed, of which no two are forms of each other.

    A right guess of one form may be a right guess of the other. As a wrong candidate it would lower the log_share.
    """
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
    """The number of candidates that every secret has: one that is a form of several leaves fewer.

    All games are measured among so many, because values of log_share among different numbers do not compare: a
    uniform guess among N has -log N. The number can be smaller than that of the words, because forms of candidates and
    of the secret are left out, and it depends on the draw.
    """
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
    """The rank of the first of these log-probabilities: 1 if no other is above it.

    NaN counts as above, so a model whose logits are NaN never ranks the secret first.
    """
    right, *others = logprobs
    above = [other for other in others if not other <= right]
    return 1 + len(above)


def guesser_prompts(
    game: Game, episode: Mapping, templates: Templates, chat: "ChatTemplate | None" = None
) -> list[str]:
    """The guesser's prompt of play before the first hint, and after each hint, a message of the role that hides.

    A message that breaks the rules may name the secret, so it is no hint.
    """
    history, task = episode["history"], episode["target_word"]
    guesser, _ = game.answer(task)
    result = game_result(game, episode)
    length = result.length
    if game.outcome(result.outcome).breach:
        length -= 1  # the last message broke the rules
    hints = [end for end, message in enumerate(history[:length], start=1) if message["role"] != guesser]
    prompts = []
    for end in (0, *hints):
        secrets = game.secrets(guesser, task, history[:end])
        turn = Turn(game, guesser, history[:end], episode["max_turns"], 0, secrets, templates)
        prompts.append(turn.prompt(chat))
    return prompts


def encode_sentences(
    tokenizer, prompt: str, sentences: Sequence[str], chat: "ChatTemplate | None" = None
) -> list[list[int]]:
    """The token ids of each message as the target of a row behind this prompt, without the token that ends it.

    A message that goes on behind its guess names the secret too, so the end is not measured.
    """
    if chat is None:
        return [pair.target for pair in encode_pairs(tokenizer, [("", sentence, False) for sentence in sentences])]
    pairs = []
    for sentence in sentences:
        target = chat.row({"query": prompt, "target": sentence})["target"]  # may begin with a text of the template's
        pairs.append((prompt, target[: target.rindex(sentence) + len(sentence)], True))
    return [pair.target for pair in encode_pairs(tokenizer, pairs)]


@torch.inference_mode()
def sentence_logprobs(model, prompt: Sequence[int], sentences: Sequence[Sequence[int]]) -> list[float]:
    """The log-probability of each sentence behind a prompt, in nats, summed over its tokens.

    The prompt and what all sentences begin with ("I know the word! It is `") are computed once. Models whose cache is
    more than keys and values (Mamba and other recurrent ones) compute them again in each row.
    """
    head = commonprefix([list(sentence[:-1]) for sentence in sentences])
    tails = [list(sentence[len(head) :]) for sentence in sentences]
    *before, last = [*prompt, *head]  # the last token predicts the first one of a tail
    ids = torch.tensor([before], device=model.device)
    output = model(input_ids=ids, logits_to_keep=max(1, len(head)), use_cache=True)
    head_logprob = _logprob(output.logits[0, -len(head) :], head) if head else 0.0
    cache_name = next((name for name in CACHE_NAMES if _is_keys_and_values(getattr(output, name, None))), None)
    logprobs = []
    for start in range(0, len(tails), SENTENCES_AT_ONCE):
        some = tails[start : start + SENTENCES_AT_ONCE]
        if cache_name:
            cache = copy.deepcopy(output[cache_name])  # a pass adds its own keys and values to a cache
            cache.batch_repeat_interleave(len(some))
            logprobs += _row_logprobs(model, [last], some, {cache_name: cache})
        else:
            logprobs += _row_logprobs(model, [*before, last], some, {"use_cache": False})
    return [head_logprob + logprob for logprob in logprobs]


def _is_keys_and_values(cache) -> bool:
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return type(cache) is DynamicCache and all(
        type(layer) in kinds and layer.keys is not None for layer in cache.layers
    )


def _row_logprobs(model, before: list[int], tails: Sequence[list[int]], options: Mapping) -> list[float]:
    """The log-probability of each tail in a row of its own, behind the same tokens `before`."""
    # The last token of a tail predicts nothing. Padding behind a row changes no token before it.
    rows = [torch.tensor([*before, *tail[:-1]]) for tail in tails]
    input_ids = pad_sequence(rows, batch_first=True).to(model.device)
    longest = max(map(len, tails))
    logits = model(input_ids=input_ids, logits_to_keep=longest, **options).logits[:, -longest:]
    return list(map(_logprob, logits, tails))


def _logprob(logits: torch.Tensor, ids: list[int]) -> float:
    """The sum of the log-probabilities of tokens; `logits`: (as many tokens or more, vocabulary)."""
    logprobs = logits[: len(ids)].float().log_softmax(-1)
    return float(logprobs[range(len(ids)), ids].sum())


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
    holds log p of each guess, the right one first; `prompt_cut` tells whether the prompt lost its beginning.
    """
    secret = episode["target_word"]
    words = with_secret(game, secret, candidates, number)
    guesses = [answer(game, word, templates)[1] for word in words]
    prompts = guesser_prompts(game, episode, templates, local.codec.chat)
    head = {"target_word": secret, "outcome": game_result(game, episode).outcome}
    messages: list[dict] = []
    for hints, prompt in enumerate(prompts):
        ids, prompt_cut = local.codec.encode(prompt)
        sentences = encode_sentences(local.codec.tokenizer, prompt, guesses, local.codec.chat)
        logprobs = sentence_logprobs(local.model, ids, sentences)
        # Only the stored list of all candidates is rounded, to keep the file small; the measures are computed before.
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
