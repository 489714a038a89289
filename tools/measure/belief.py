"""Belief: how likely the guesser is to name the secret, after each hint of a stored game. No game is played.

For the right guess, and for the same sentence with each other candidate instead of the secret, the log-probability
is measured under the guesser's own prompt after hint k; k = 0 is the empty history. Numbers are in nats:

    belief     log p(right guess). It also rises if a model merely becomes readier to guess.
    log_share  log p(right guess) - log sum over candidates of p(their guess), a proper score: 0 is certainty, -log N a
               uniform guess among N candidates. What all guesses have in common, such as the readiness to guess,
               cancels.
    rank       of the right guess among all; 1: no other is more likely
"""

import copy
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
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

# The model's cache argument in transformers 5.24, and in older versions.
CACHE_NAMES = ("cache", "past_key_values")
SENTENCES_IN_A_TREE = 256  # the mask grows with the square of their tokens

Prefix = tuple[int, ...]  # token ids that a sentence begins with


def draw_candidates(game: Game, words: Iterable[str], number: int, seed: int) -> list[str]:
    """At most `number` randomly drawn words, no two of which are forms of each other.

    Naming a form of the secret may be a right guess, so as a wrong candidate it would lower the log_share.
    """
    drawn = list(dict.fromkeys(words))
    random.Random(seed).shuffle(drawn)
    candidates: list[str] = []
    for word in drawn:
        if len(candidates) < number and not any(_are_forms(game, word, other) for other in candidates):
            candidates.append(word)
    return candidates


def with_secret(game: Game, secret: str, candidates: Sequence[str], number: int | None = None) -> list[str]:
    """The secret and the candidates that are not forms of it; at most `number`, or as many as candidates."""
    others = [word for word in candidates if not _are_forms(game, secret, word)]
    return [secret, *others][: number or len(candidates)]


def fewest_candidates(game: Game, secrets: Iterable[str], candidates: Sequence[str]) -> int:
    """The number of candidates available for every secret.

    All games use this number, because log_share is comparable only among equal numbers: a uniform guess among N has
    -log N. It can be smaller than the number of words, because forms of candidates and secrets are left out.
    """
    return min(len(with_secret(game, secret, candidates)) for secret in secrets)


def _are_forms(game: Game, one: str, other: str) -> bool:
    """Whether the game accepts the right guess of one secret for the other."""

    def end(task: str, guessed: str) -> str | None:
        role, guess = game.answer(guessed)
        return game.decide(task, [{"role": role, "content": guess}])

    return end(one, other) == end(one, one) or end(other, one) == end(other, other)


def log_share(logprobs: Sequence[float]) -> float:
    """log p of the first guess minus the log of the sum of all p, in nats."""
    return float(logprobs[0] - np.logaddexp.reduce(logprobs))


def rank(logprobs: Sequence[float]) -> int:
    """The rank of the first log-probability: 1 if no other is larger.

    NaN counts as larger, so that a model with NaN logits never ranks the secret first.
    """
    right, *others = logprobs
    above = [other for other in others if not other <= right]
    return 1 + len(above)


def guesser_prompts(
    game: Game, episode: Mapping, templates: Templates, chat: "ChatTemplate | None" = None
) -> list[str]:
    """The guesser's play prompts before the first hint and after each hint (a message of the other role).

    A rule violation may name the secret, so it does not count as a hint.
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
    """Token ids of each sentence as a row's target after this prompt, without the end token.

    A message that goes on after its guess also names the secret, so the end is not measured.
    """
    if chat is None:
        return [pair.target for pair in encode_pairs(tokenizer, [("", sentence, False) for sentence in sentences])]
    pairs = []
    for sentence in sentences:
        target = chat.row({"query": prompt, "target": sentence})["target"]  # the template may write text before it
        pairs.append((prompt, target[: target.rindex(sentence) + len(sentence)], True))
    return [pair.target for pair in encode_pairs(tokenizer, pairs)]


# All sentences follow the same prompt and begin alike ("I know the word! It is `"), which a row per sentence would
# compute again and again. Here the prompt is computed once, and so is each prefix that several sentences share:
# prefixes are the nodes of a tree, and the whole tree is one row after the prompt.


@torch.inference_mode()
def sentence_logprobs(model, prompt: Sequence[int], sentences: Sequence[Sequence[int]]) -> list[float]:
    """Log-probability of each sentence after a prompt, in nats, summed over its tokens.

    Sentences are computed one by one if the model's cache has more than keys and values (Mamba and other recurrent
    models), if its window is shorter than prompt and sentence, or if it does not accept our mask.
    """
    *before, last = prompt  # the last token predicts the first one of a sentence, so it belongs to the tree
    output = model(input_ids=torch.tensor([before], device=model.device), logits_to_keep=1, use_cache=True)
    cache_name = next((name for name in CACHE_NAMES if getattr(output, name, None) is not None), None)
    takes_masks = model._supports_attention_backend
    total = len(prompt) + max(map(len, sentences)) - 1  # the last token of a sentence predicts nothing
    if not (takes_masks and cache_name and _holds_all_keys(output[cache_name], len(before), total)):
        return [_logprob_alone(model, prompt, sentence) for sentence in sentences]
    logprobs = []
    for start in range(0, len(sentences), SENTENCES_IN_A_TREE):
        cache = copy.deepcopy(output[cache_name])  # a forward pass appends to its cache
        some = [tuple(sentence) for sentence in sentences[start : start + SENTENCES_IN_A_TREE]]
        logprobs += _tree_logprobs(model, {cache_name: cache}, len(before), last, some)
    return logprobs


def _holds_all_keys(cache, tokens: int, total: int) -> bool:
    """Whether a cache consists of the keys and values of `tokens` tokens only.

    A window must have room for `total` tokens, because nodes of the tree attend to all earlier ones.
    """
    if type(cache) is not DynamicCache:
        return False
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return False
        if layer.keys is None or layer.keys.shape[-2] != tokens:
            return False
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.sliding_window < total:
            return False
    return True


def _logprob_alone(model, prompt: Sequence[int], sentence: Sequence[int]) -> float:
    row = torch.tensor([[*prompt, *sentence[:-1]]], device=model.device)
    logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 :]  # (tokens of the sentence, vocabulary)
    logprobs = logits.float().log_softmax(-1)
    return float(logprobs[range(len(sentence)), list(sentence)].sum())


def _tree_logprobs(model, cache: Mapping, cached: int, last: int, sentences: Sequence[Prefix]) -> list[float]:
    """Log-probabilities of sentences after a prompt, all tokens of which except the `last` one are cached.

    `cache` is the model's argument by name, `cached` its number of tokens. All nodes of the tree form one row.
    """
    node_of = prefix_nodes(sentences)
    prefixes = list(node_of)
    # A node's token is the last one of its prefix or, for the empty prefix, of the prompt.
    tokens = [prefix[-1] if prefix else last for prefix in prefixes]
    positions = [cached + len(prefix) for prefix in prefixes]  # prefixes of equal length have the same position
    mask = tree_mask(node_of, cached, model.dtype)
    logits = model(
        input_ids=torch.tensor([tokens], device=model.device),
        position_ids=torch.tensor([positions], device=model.device),
        attention_mask=mask.to(model.device)[None, None],  # (batch, heads, nodes, cached tokens + nodes)
        use_cache=True,
        **cache,
    ).logits[0]
    logprobs = logits.float().log_softmax(-1)  # (nodes, vocabulary): of the token after each prefix
    sums = []
    for sentence in sentences:
        nodes = [node_of[sentence[:length]] for length in range(len(sentence))]
        token_logprobs = logprobs[nodes, list(sentence)]
        sums.append(token_logprobs.sum())
    return torch.stack(sums).tolist()


def prefix_nodes(sentences: Iterable[Prefix]) -> dict[Prefix, int]:
    """Number the distinct proper prefixes of sentences. The empty one is 0, and shorter ones precede longer ones."""
    node_of: dict[Prefix, int] = {}
    for sentence in sentences:
        for length in range(len(sentence)):
            node_of.setdefault(sentence[:length], len(node_of))
    return node_of


def tree_mask(node_of: Mapping[Prefix, int], cached: int, dtype: torch.dtype) -> torch.Tensor:
    """Attention mask of a tree after `cached` tokens, (nodes, cached tokens + nodes): 0, or the lowest number.

    A node attends to all cached tokens, its ancestors in the tree, and itself.
    """
    ancestors = torch.eye(len(node_of), dtype=torch.bool)  # (nodes, nodes), including the node itself
    for prefix, node in node_of.items():
        if prefix:
            parent = node_of[prefix[:-1]]
            ancestors[node] |= ancestors[parent]  # complete, because the parent has the smaller number
    prompt = ancestors.new_ones(len(node_of), cached)
    visible = torch.cat([prompt, ancestors], dim=1)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def measure_game(
    local: "LocalModel",
    game: Game,
    episode: Mapping,
    *,
    candidates: Sequence[str],
    templates: Templates,
    number: int | None = None,
) -> list[dict]:
    """A model's measures (see the module) before a game's first hint and after each hint.

    The secret replaces its forms among `candidates`, of which `number` are used (None: all). `logprobs` has log p of
    each guess, the right one first; `prompt_cut` tells whether the prompt was truncated.
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
        # Only the stored list is rounded, to keep the file small.
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
