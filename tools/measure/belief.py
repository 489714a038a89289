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

# The model's argument in transformers 5.24, and in older versions.
CACHE_NAMES = ("cache", "past_key_values")
SENTENCES_IN_A_TREE = 256  # the mask grows with the square of their tokens

Prefix = tuple[int, ...]  # token ids: the beginning of a sentence


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


# The sentences of a game follow the same prompt and begin alike ("I know the word! It is `"). A row for each prompt
# and sentence would compute both again and again. Here the prompt is computed once, and so is each beginning that
# several sentences share: these prefixes are the nodes of a tree, and the whole tree is one row behind the prompt.


@torch.inference_mode()
def sentence_logprobs(model, prompt: Sequence[int], sentences: Sequence[Sequence[int]]) -> list[float]:
    """The log-probability of each sentence behind a prompt, in nats, summed over its tokens.

    Models whose cache is more than keys and values (Mamba and other recurrent ones), whose window is shorter than
    prompt and sentence, or that take no mask of ours, compute each sentence by itself.
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
        cache = copy.deepcopy(output[cache_name])  # a pass adds its own keys and values to a cache
        some = [tuple(sentence) for sentence in sentences[start : start + SENTENCES_IN_A_TREE]]
        logprobs += _tree_logprobs(model, {cache_name: cache}, len(before), last, some)
    return logprobs


def _holds_all_keys(cache, tokens: int, total: int) -> bool:
    """Whether a cache holds the keys and values of so many tokens, and no state of another kind.

    A window must have room for `total` tokens: a node of the tree sees all that come before it.
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
    """The log-probability of one sentence behind a prompt, by a pass of its own."""
    row = torch.tensor([[*prompt, *sentence[:-1]]], device=model.device)
    logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 :]  # (tokens of the sentence, vocabulary)
    logprobs = logits.float().log_softmax(-1)
    return float(logprobs[range(len(sentence)), list(sentence)].sum())


def _tree_logprobs(model, cache: Mapping, cached: int, last: int, sentences: Sequence[Prefix]) -> list[float]:
    """The log-probabilities of sentences behind a prompt, of which all tokens but the `last` one are in the cache.

    `cache` is the model's argument by name, `cached` its number of tokens. All nodes of the tree are one row.
    """
    node_of = prefix_nodes(sentences)
    prefixes = list(node_of)
    # A node is computed from the last token of its prefix; that of the empty prefix is the last token of the prompt.
    tokens = [prefix[-1] if prefix else last for prefix in prefixes]
    positions = [cached + len(prefix) for prefix in prefixes]  # nodes of equally long prefixes have the same position
    mask = tree_mask(node_of, cached, model.dtype)
    logits = model(
        input_ids=torch.tensor([tokens], device=model.device),
        position_ids=torch.tensor([positions], device=model.device),
        attention_mask=mask.to(model.device)[None, None],  # (batch, heads, nodes, cached tokens + nodes)
        use_cache=True,
        **cache,
    ).logits[0]
    logprobs = logits.float().log_softmax(-1)  # (nodes, vocabulary): of the token behind each prefix
    sums = []
    for sentence in sentences:
        nodes = [node_of[sentence[:length]] for length in range(len(sentence))]
        token_logprobs = logprobs[nodes, list(sentence)]
        sums.append(token_logprobs.sum())
    return torch.stack(sums).tolist()


def prefix_nodes(sentences: Iterable[Prefix]) -> dict[Prefix, int]:
    """Number the prefixes of sentences, each once: the empty one is 0, and a prefix comes after its shorter ones.

    A whole sentence is no prefix of itself: what follows it is not asked for.
    """
    node_of: dict[Prefix, int] = {}
    for sentence in sentences:
        for length in range(len(sentence)):
            node_of.setdefault(sentence[:length], len(node_of))
    return node_of


def tree_mask(node_of: Mapping[Prefix, int], cached: int, dtype: torch.dtype) -> torch.Tensor:
    """The attention mask of a tree behind `cached` tokens: 0 if a node sees a position, else the smallest number.

    A node sees all cached tokens, its ancestors in the tree and itself: (nodes, cached tokens + nodes).
    """
    ancestors = torch.eye(len(node_of), dtype=torch.bool)  # (nodes, nodes); each node counts as one of its own
    for prefix, node in node_of.items():
        if prefix:
            parent = node_of[prefix[:-1]]
            ancestors[node] |= ancestors[parent]  # the parent has the smaller number, so its row is complete
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
