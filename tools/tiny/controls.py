"""Rows for the control runs of the embedded world: what self-play learning is compared with. No torch.

Each control is trained by the same program with the same settings as SPAG; only its rows differ from those that
tools/assign_rewards.py makes of the same kind of games.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from tools.assign_rewards import Games, game_rows, judge_games
from tools.games import taboo

DECAY = 0.8
SFT_COEFF = 0.5  # of OfflinePO


def spag_rows(episodes: Sequence[dict], games: Games, templates: taboo.Templates) -> Iterator[dict]:
    """The rows of self-play learning itself, with the prompts of play."""
    prompt_fn = partial(taboo.play_prompt, templates=templates)
    return game_rows(episodes, games, decay_weight=DECAY, prompt_fn=prompt_fn)


def coin_rows(
    episodes: Sequence[dict], sft_rows: Sequence[dict], templates: taboo.Templates, rng: random.Random
) -> Iterator[dict]:
    """As if a coin had told who won each decided game: the rows may be the loser's."""
    outcomes = tuple(taboo.WINNERS)
    games = Games(
        taboo.Verdict(rng.choice(outcomes) if outcome in outcomes else outcome, length)
        for outcome, length in judge_games(episodes)
    )
    yield from spag_rows(episodes, games, templates)
    yield from sft_rows


def shuffled_rows(
    episodes: Sequence[dict], sft_rows: Sequence[dict], templates: taboo.Templates, rng: random.Random
) -> Iterator[dict]:
    """The rewards of a game dealt out at random among the winner's messages."""
    games = judge_games(episodes)
    rows = spag_rows(episodes, games, templates)
    for episode, (outcome, length) in zip(episodes, games, strict=True):
        if outcome in taboo.WINNERS:
            winner = taboo.WINNERS[outcome]
            won = list(islice(rows, sum(message["role"] == winner for message in episode["history"][:length])))
            rewards = rng.sample([row["reward"] for row in won], len(won))
            yield from (row | {"reward": reward} for row, reward in zip(won, rewards, strict=True))
    yield from sft_rows


def cloning_rows(
    episodes: Sequence[dict], sft_rows: Sequence[dict], templates: taboo.Templates, rng: random.Random
) -> Iterator[dict]:
    """Filtered behaviour cloning, -reward * weight * l, as SFT rows: no ratio, no clip, no KL. Draws nothing.

    OfflinePO averages game rows and SFT rows apart and multiplies the latter by alpha. Here all are SFT rows in one
    average; the weights give each kind the share in the loss that it has there.
    """
    rows = list(spag_rows(episodes, judge_games(episodes), templates))
    total = len(rows) + len(sft_rows)
    for row in rows:
        weight = row["reward"] * row["weight"] / SFT_COEFF * total / len(rows)
        yield {"query": row["query"], "target": row["target"], "type": "sft", "weight": weight}
    for row in sft_rows:
        yield row | {"weight": total / len(sft_rows)}


CONTROLS = {"coin": coin_rows, "shuffled": shuffled_rows, "cloning": cloning_rows}
