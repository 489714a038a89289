"""Belief: how likely the guesser is to name the secret, after each hint of a stored game. No game is played.

Belief k is the log-probability, in nats, of the message that names the secret, under the guesser's own prompt after
hint k; k = 0 is the empty history. Its zero line is the mean belief in other secrets under the same prompt. Knowledge
is belief minus zero line: belief alone also rises when a model only becomes readier to guess.
"""

import inspect
import random
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from tools.games.game import Game
from tools.games.prompts import Templates, answer
from tools.players.player import Turn
from tools.selfplay.rewards import game_result, hint_ends
from utils import UserError, whole_characters

if TYPE_CHECKING:
    from tools.engine.local import LocalModel
    from tools.games.chat import ChatTemplate

OTHERS = 5  # secrets behind the zero line
CACHE, OLD_CACHE = "cache", "past_key_values"  # the argument of transformers 5.24, and of older versions


def other_secrets(game: Game, secret: str, secrets: Sequence[str], seed: int) -> list[str]:
    """The secrets of the zero line: OTHERS of `secrets`, none of them a form of `secret`. UserError for fewer.

    The draw depends on the seed and the secret alone, so it is the same for all models and all hints.
    """
    drawn = random.Random(f"{seed}/{secret}").sample(secrets, len(secrets))
    others = list(islice((other for other in drawn if not _are_forms(game, secret, other)), OTHERS))
    if len(others) < OTHERS:
        raise UserError(f"the games have fewer than {OTHERS} other secrets to compare {secret!r} with")
    return others


def _are_forms(game: Game, one: str, other: str) -> bool:
    """Whether the game takes the right guess of one secret for a right guess of the other."""

    def end(task: str, guessed: str) -> str | None:
        role, guess = game.answer(guessed)
        return game.decide(task, [{"role": role, "content": guess}])

    return end(one, other) == end(one, one) or end(other, one) == end(other, other)


def guesser_prompts(
    game: Game, episode: Mapping, templates: Templates, chat: "ChatTemplate | None" = None
) -> list[str]:
    """The guesser's prompt of play before the first hint, and after each hint."""
    history, task = episode["history"], episode["target_word"]
    guesser, _ = game.answer(task)
    prompts = []
    for end in (0, *hint_ends(game, episode, game_result(game, episode), guesser)):
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

    The prompt is computed once, and all sentences continue from its keys and values.
    """
    width = max(map(len, sentences))
    padded = [[*sentence, *[0] * (width - len(sentence))] for sentence in sentences]  # no token attends to the padding
    targets = torch.tensor(padded, device=model.device)  # (sentences, width)
    cache = DynamicCache(config=model.config)
    name = CACHE if CACHE in inspect.signature(model.forward).parameters else OLD_CACHE
    keep = {name: cache, "use_cache": True}
    first = model(input_ids=torch.tensor([prompt], device=model.device), logits_to_keep=1, **keep).logits
    cache.batch_repeat_interleave(len(sentences))
    rest = model(input_ids=targets, **keep).logits[:, :-1]
    logits = torch.cat([first.expand(len(sentences), -1, -1), rest], dim=1).float()
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]  # (sentences, width)
    return [float(row[: len(sentence)].sum()) for row, sentence in zip(logprobs, sentences, strict=True)]


def measure_game(
    local: "LocalModel", game: Game, episode: Mapping, *, secrets: Sequence[str], seed: int, templates: Templates
) -> list[dict]:
    """The numbers of a model before the first hint of a game and after each hint, in nats.

    The secrets of the zero line come from `secrets`. Changes are those by the hint: from the row before.
    """
    secret = episode["target_word"]
    others = other_secrets(game, secret, secrets, seed)
    guesses = [answer(game, each, templates)[1] for each in (secret, *others)]
    sentences = [encode_sentence(local.tokenizer, guess, local.chat) for guess in guesses]
    head = {"target_word": secret, "outcome": game_result(game, episode).outcome}
    prompts = guesser_prompts(game, episode, templates, local.chat)
    messages: list[dict] = []
    for hints, prompt in enumerate(prompts):
        ids, prompt_cut = local.encode(prompt)
        belief, *beliefs = sentence_logprobs(local.model, ids, sentences)
        zero_line = sum(beliefs) / len(beliefs)
        message = {"hints": hints, "last_hint": 0 < hints == len(prompts) - 1, "prompt_cut": prompt_cut}
        message |= {"others": dict(zip(others, beliefs, strict=True))}
        message |= {"belief": belief, "zero_line": zero_line, "knowledge": belief - zero_line}
        if messages:
            message |= {f"{name}_change": message[name] - messages[-1][name] for name in ("belief", "knowledge")}
        messages.append(head | message)
    return messages
