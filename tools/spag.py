"""The pieces of SPAG as functions: play, judge, rows, batch, loss, and a game step by step.

A complete epoch of self-play, runnable as is:

    import torch
    from tools import spag
    from tools.engine.random_model import SHAPE, random_llama, train_tokenizer

    # Play. A player is a function, a model folder, or openai:MODEL.
    episodes = spag.play(["cat", "violin"], lambda turn: "It purrs.", lambda turn: "I know the word! It is cat!")
    outcomes = [spag.judge(episode).outcome for episode in episodes]  # ['defender wins', 'attacker wins']
    rows = spag.rows(episodes)  # one per message of a winner, with its reward and weight
    # Train. The reference is the model that played; here both are the same random one with 1M parameters.
    tokenizer = train_tokenizer((row["query"] + row["target"] for row in rows), vocab_size=1000)
    policy = random_llama(len(tokenizer), 0, **SHAPE)
    reference = random_llama(len(tokenizer), 0, **SHAPE)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    loss, metrics = spag.loss(policy, reference, spag.batch(rows, tokenizer, max_length=256))
    loss.backward()
    optimizer.step()

Play and rows need no torch, unless a model plays in this process. Batches and the loss need torch, transformers,
datasets and accelerate.
"""

import asyncio
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tools.common.errors import UserError
from tools.common.models import special_texts as special_texts  # one of the pieces
from tools.games.game import EPISODE_KEYS, Game, History, Verdict, load_game
from tools.games.prompts import ASSISTANT, USER, Templates, chat_messages, play_prompt
from tools.players.human import HUMAN
from tools.players.player import Choose, Turn
from tools.selfplay.flags import PlayFlags
from tools.selfplay.make import make_players
from tools.selfplay.play import as_message, play_games
from tools.selfplay.rows import Row, assign_rewards

# A model (folder or hub name), openai:MODEL, or a function.
Speaker = str | Path | Choose


class Step(NamedTuple):
    """A game after one more message."""

    history: list[dict[str, str]]  # including the message as the players read it
    role: str | None  # who speaks next; None: the game is over
    outcome: str | None = None  # once the game is over
    points: Mapping[str, float] = {}  # by role, in [0, 1], once the game is over


def step(
    game: str | Game,
    task: str,
    history: History,
    message: str,
    *,
    max_turns: float | None = None,
    special: str | Collection[str] = (),
) -> Step:
    """Add a message by the role whose turn it is. A game starts with an empty history.

    `special` are the special tokens' texts (`special_texts(tokenizer)`) of the models that play. They are removed from
    the message before it is judged, because a player could use them to end its turn in the other's chat and go on as
    somebody else. ValueError for a message that is not a string, and for a game that is over.
    """
    game = load(game)
    max_turns = max_turns or game.max_turns
    if not isinstance(message, str):
        raise ValueError(f"a message must be a string, not {message!r:.60}")
    if game.is_over(history, task, max_turns):
        raise ValueError(f"the game about {task!r} is over after {len(history)} messages")
    history = [*history, as_message(game.next_role(task, history), message, texts_of(special))]
    if not game.is_over(history, task, max_turns):
        return Step(history, game.next_role(task, history))
    outcome, _ = game.judge(history, task, max_turns)
    points = game.points(task, history, outcome)
    return Step(history, None, outcome, dict(zip(game.roles, points, strict=True)))


def texts_of(special: str | Collection[str]) -> frozenset[str]:
    return frozenset([special] if isinstance(special, str) else special)


def chat(
    game: str | Game,
    task: str,
    history: History,
    *,
    max_turns: float | None = None,
    templates: Templates | None = None,
) -> list[dict[str, str]]:
    """The game as chat messages for the role whose turn it is; rules and instruction form the system message.

    From one turn of a role to its next the chat only grows (unless the game changes the role's secrets), so that a
    model can be trained on a whole game as one sequence with the other role's messages masked.
    """
    game = load(game)
    return play_prompt(game, history, task, max_turns or game.max_turns, templates, join=chat_messages)


def batched(messages: Callable[[list[Turn]], list[str]]) -> Choose:
    """A player from a function that answers many turns at once, such as a batched model of yours.

    The first game to ask waits for 10 ms; the function gets the turns of all games that have asked by then.
    """
    waiting: list[tuple[Turn, asyncio.Future[str]]] = []

    async def reply(turn: Turn) -> str:
        answer = asyncio.get_running_loop().create_future()
        waiting.append((turn, answer))
        if len(waiting) == 1:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:  # the play has failed
                waiting.clear()
                raise
            turns, answers = zip(*waiting, strict=True)
            waiting.clear()
            for each, text in zip(answers, messages(list(turns)), strict=True):
                each.set_result(text)
        return await answer

    return reply


class Transcript:
    """A game as one token sequence for a trainer: what the model read and wrote in one role.

    `prompt_ids` end where the model's first message begins. `completion_ids` are the messages of both roles from there
    on, and `mask` is 1 for tokens that the model wrote, 0 for those it read. `template` are options of the tokenizer's
    chat template, such as enable_thinking=False.
    """

    def __init__(self, tokenizer, **template):
        self.tokenizer = tokenizer
        self.template = template
        self.prompt_ids: list[int] = []
        self.completion_ids: list[int] = []
        self.mask: list[int] = []

    def read(self, chat: list[dict[str, str]]) -> list[int]:
        """Add what is new in the chat of the model's next turn. Returns all tokens, for the model to continue."""
        from tools.games.chat import end_of_reply  # imports jinja2 and transformers

        if not self.completion_ids:
            self.prompt_ids = self._encode(self._render(chat))
        else:
            # What the template writes after a reply: its end token, the other's message, the start of the next reply.
            mark = "@@@"
            between = [{"role": USER, "content": ""}, {"role": ASSISTANT, "content": mark}, chat[-1]]
            ids = self._encode(self._render(between).partition(mark)[2])
            end = end_of_reply(self.tokenizer, ids) or 0
            last = self.completion_ids[-1]  # the end token, unless the reply was cut off
            written = ids.index(last) + 1 if last in ids[: end + 1] else 0
            self._add(ids[written:], wrote=0)
        return self.prompt_ids + self.completion_ids

    def write(self, ids: list[int]) -> None:
        """Add a reply of the model, including its end token if it has one."""
        self._add(ids, wrote=1)

    def _add(self, ids: list[int], wrote: int) -> None:
        self.completion_ids += ids
        self.mask += [wrote] * len(ids)

    def _render(self, chat: list[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **self.template)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


async def play_async(
    tasks: Sequence[str],
    first: Speaker,
    second: Speaker,
    *,
    game: str | Game = "taboo",
    templates: Templates | None = None,
    seed: int = 0,
    special: str | Collection[str] = (),
    **flags,
) -> list[dict]:
    """`play` in the running event loop, for async players that use resources of that loop."""
    options = PlayFlags(game=game if isinstance(game, str) else game.name, **flags)
    game = options.load_game() if isinstance(game, str) else game
    templates = options.load_templates(game) if options.prompt_templates else templates
    speakers = [str(player) if isinstance(player, Path) else player for player in (first, second)]
    if HUMAN in speakers:
        raise UserError(f"{HUMAN} needs python -m tools.play_llm_game; here, pass a function that asks you")
    players, at_once = make_players(speakers, game, options, seed=seed, games_left=len(tasks))
    for player in players.values():
        player.special_texts |= texts_of(special)
    episodes: list[dict] = []
    await play_games(
        game,
        enumerate(tasks),
        players,
        max_turns=options.turns(game),
        templates=templates,
        concurrent_games=at_once,
        on_episode=episodes.append,
    )
    return sorted(episodes, key=lambda episode: episode["index"])


def play(tasks: Sequence[str], first: Speaker, second: Speaker, **options) -> list[dict]:
    """Play one game per task, many at once, and return the episodes in the order of the tasks.

    `first` and `second` play the game's first and second role (Taboo: attacker, defender). A function, sync or async,
    gets a Turn, whose `prompt()` is play's prompt, and returns a message. `options` are those of `play_async`: `game`,
    `templates`, `seed`, and the flags of play_llm_game. vLLM takes 90% of a GPU and is used only with engine="vllm".
    `special` are special tokens (as in `step`) of a model behind a function; other models' are known. The same seed
    gives the same draws, so change it each round. Games that a server failed to answer are left out with a warning.

    Nothing is stored, so a kill loses all games; tools/play_llm_game.py stores each game as it ends. Models in this
    process stay loaded for the next call with the same models and flags; `tools.selfplay.make.drop_models` frees their
    memory, for example before training.
    """
    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread already runs an event loop
        return thread.submit(asyncio.run, play_async(tasks, first, second, **options)).result()


def judge(episode: Mapping, *, game: str | Game = "taboo") -> Verdict:
    """How a game ended, and its number of messages up to and including the decisive one."""
    game = load(game)
    game.check_episode(episode)
    return game.judge(*(episode[key] for key in EPISODE_KEYS))


def rows(
    episodes: Sequence[Mapping],
    *,
    game: str | Game = "taboo",
    prompt: str = "play",
    templates: Templates | None = None,
    seed: int = 0,
    **flags,
) -> list[Row]:
    """Training rows: query, target, reward, role and weight of each message with a reward.

    `prompt` is "play" for the prompts that the messages were sampled from, which log-probabilities recorded in play
    belong to, or "random" for the paper's prompts, drawn by `seed`. `flags` are RewardFlags. Only assign_rewards makes
    rows in a chat template. Weights are over all episodes of the call.
    """
    options = {"training_prompt": prompt, "templates": templates} | flags
    return assign_rewards(episodes, game=load(game), rng=random.Random(seed), **options)


def batch(
    rows: Sequence[Mapping],
    tokenizer,
    *,
    max_length: int = 2048,
    device: str = "cpu",
    vocab_size: float = math.inf,
) -> dict:
    """Padded tensors: input_ids, attention_mask, labels (rows, tokens); rewards, weights, a mask per kind (rows,).

    Drop scored_positions (scored tokens,) if you slice rows. Sets the tokenizer's maximum length and truncation side.
    `vocab_size` is the model's, needed if the id of the padding token may exceed it.
    """
    from dataloaders import SPAGCollator, encode_example

    tokenizer.model_max_length = max_length
    tokenizer.truncation_side = "left"
    tensors = SPAGCollator(tokenizer, vocab_size)([encode_example(row, tokenizer) for row in rows])
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def loss(policy, reference, batch: Mapping, **coefficients):
    """(loss, metrics) of OfflinePO for two causal language models of transformers; the reference gets no gradient.

    `coefficients` are those of `offline_po_loss`, with train.py's defaults. Rows with negative rewards need
    `detach_kl`, or their log-ratio runs away. Game rows and SFT rows are each averaged over this batch; to average
    over several batches, pass the totals as `num_game_rows` and `num_sft_rows` with each, and sum the losses.
    """
    import torch

    from trainers import OfflinePOTrainer, label_logprob, offline_po_loss

    with torch.no_grad():
        ref_logprob = label_logprob(reference, reference, batch)
    module = getattr(policy, "module", policy)  # unwrap DistributedDataParallel
    return offline_po_loss(
        label_logprob(policy, module, batch),
        ref_logprob,
        batch["rewards"],
        batch["weights"],
        batch["sft_mask"],
        **OfflinePOTrainer.coefficients() | coefficients,
    )


def load(game: str | Game) -> Game:
    return load_game(game) if isinstance(game, str) else game
