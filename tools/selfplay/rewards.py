"""What a game pays: its outcome, the rewards of its roles, the share and the row of each message. No torch."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, SupportsFloat

from tools.flags import check_values, flag
from tools.games import load_game, prompts
from tools.games.game import EPISODE_KEYS, Game, History
from utils import UserError, load_tokenizer, read_json_or_jsonl, row_messages, row_texts, told

if TYPE_CHECKING:
    from tools.games.chat import ChatTemplate  # brings transformers

WINNER, ALL = "winner", "all"  # values of --messages
PAPER, NONE, ROLE = "paper", "none", "role"  # values of --role_weights and --baseline
PromptFn = Callable[[History, str, float], str]  # (history before the message, task, max_turns) -> query
Shape = Callable[[dict, Mapping, str], float]  # (row, episode, outcome) -> the row's final reward


@dataclass(kw_only=True)
class RewardFlags:
    decay_weight: float = flag(
        "reward decay gamma, applied backwards from the last message", default=0.8, above=0, at_most=1
    )
    losers: float = flag(
        "make rows of the loser too: -SHARE times the winner's reward", default=0.0, metavar="SHARE", at_least=0
    )
    ties: float = flag(
        "make rows of both players of tied games: reward -COST", default=0.0, metavar="COST", at_least=0
    )
    baseline: str = flag(
        "role: subtract from a role's reward the mean reward of that role", default=NONE, choices=(NONE, ROLE)
    )
    role_weights: str = flag(
        "weights of rows: 'paper' gives both roles the same total, 'none' gives every row 1",
        default=PAPER,
        choices=(PAPER, NONE),
    )
    messages: str = flag("make rows of the winner's messages, or of all", default=WINNER, choices=(WINNER, ALL))
    roles: str | None = flag("make rows of this role alone, with weight 1", default=None, metavar="ROLE")

    def __post_init__(self):
        check_values(self)
        if self.messages == ALL and (self.losers or self.ties or self.baseline == ROLE):
            raise UserError("--messages all pays every message 1; leave out --losers, --ties and --baseline")

    def check_rewards(self, game: Game) -> None:
        if self.roles not in (None, *game.roles):
            raise UserError(f"--roles {self.roles}: {game.title} has the roles {' and '.join(game.roles)}")


@dataclass(kw_only=True)
class ChatFlags:
    chat_template: bool = flag("True: write rows in the chat template of --tokenizer", default=False)
    tokenizer: str | None = flag("folder or hub name of the model to be trained", default=None, metavar="MODEL")
    thinking: bool = flag("True: rows for play with --thinking True, with the thoughts of its replies", default=False)

    def load_chat_template(self) -> "ChatTemplate | None":
        if self.chat_template != (self.tokenizer is not None):
            raise UserError("--chat_template True and --tokenizer MODEL go together: give both or neither")
        if not self.chat_template:
            return None
        from tools.games.chat import ChatTemplate  # imports transformers, which other rows do not need

        return ChatTemplate(load_tokenizer(self.tokenizer), self.tokenizer, self.thinking)


# Games.


class Result(NamedTuple):
    outcome: str
    length: int  # number of messages up to the decisive one, which is included
    rewards: tuple[float, float]  # of the game's first and second role


def check_episodes(game: Game, episodes: Sequence[Mapping], place: str, first: int) -> None:
    """Raise UserError that names the first invalid episode by `place` and its number, which counts from `first`."""
    for number, episode in enumerate(episodes, start=first):
        with told(f"{place} {number}", ValueError, UserError):
            game.check_episode(episode)


def game_result(game: Game, episode: Mapping) -> Result:
    """Judge a valid episode. Raises ValueError for rewards that a game may not pay."""
    outcome, length = game.judge(*(episode[key] for key in EPISODE_KEYS))
    rewards = game.rewards(episode["target_word"], episode["history"][:length], outcome)
    for role, reward in rewards.items():
        if role not in game.roles or not 0 <= reward < math.inf:
            raise ValueError(f"{game.title} pays {reward!r} to {role!r}; rewards are finite, at least 0, to its roles")
    first, second = (rewards.get(role, 0.0) for role in game.roles)
    return Result(outcome, length, (first, second))


def permute_rewards(results: Sequence[Result], rng: random.Random) -> list[Result]:
    """Permute the rewards of games that pay, among games with equally many messages.

    How many games of each length a role wins stays the same, so brevity is rewarded as much as in self-play.
    """
    same_length = defaultdict(list)
    for place, result in enumerate(results):
        if any(result.rewards):
            same_length[result.length].append(place)
    permuted = list(results)
    for _, places in sorted(same_length.items()):
        shuffled = [results[place].rewards for place in places]
        rng.shuffle(shuffled)
        for place, rewards in zip(places, shuffled, strict=True):
            permuted[place] = results[place]._replace(rewards=rewards)
    return permuted


# Rewards and weights.


class RoleNumbers(NamedTuple):
    """Row weights and reward baselines of each role, computed over all games."""

    weights: dict[str, float]
    baselines: dict[str, float]


def role_weights(game: Game, results: Iterable[Result], kind: str = PAPER) -> dict[str, float]:
    """The weight of the rows of each role: N / (2 N_role), so that both roles count alike (arXiv 2404.10642).

    N_role games pay the role, and N is the sum of both. A role that no game pays has weight 0. With `kind` NONE all
    weights are 1.
    """
    if kind == NONE:
        return dict.fromkeys(game.roles, 1.0)
    paid = [0, 0]
    for result in results:
        for place, reward in enumerate(result.rewards):
            paid[place] += reward > 0
    weights = (sum(paid) / (2 * number) if number else 0.0 for number in paid)
    return dict(zip(game.roles, weights, strict=True))


def role_pay(game: Game, result: Result, flags: RewardFlags) -> dict[str, float]:
    """What this game pays each role, before baseline and decay.

    With `losers` above 0, the loser gets -losers times the winner's reward. With `ties` above 0, both roles of a tied
    game that pays nobody get -ties. A breach costs nobody anything.
    """
    outcome = game.outcome(result.outcome)
    pay = dict(zip(game.roles, result.rewards, strict=True))
    winners = [role for role in game.roles if pay[role]]
    if flags.losers and outcome.winner is not None and len(winners) == 1:
        (loser,) = set(game.roles) - set(winners)
        pay[loser] = -flags.losers * pay[winners[0]]
    if flags.ties and outcome.winner is None and not outcome.breach and not winners:
        pay = dict.fromkeys(game.roles, -flags.ties)
    return pay


def role_baselines(game: Game, results: Iterable[Result], flags: RewardFlags) -> dict[str, float]:
    """The mean of what each role is paid, over the games without a breach; 0 unless `baseline` is ROLE.

    Subtracting it compares a game with other games of that role, not with 0 (as SPIRAL does, arXiv 2506.24119).
    """
    pays = [role_pay(game, result, flags) for result in results if not game.outcome(result.outcome).breach]
    if flags.baseline == NONE or not pays:
        return dict.fromkeys(game.roles, 0.0)
    return {role: math.fsum(pay[role] for pay in pays) / len(pays) for role in game.roles}


def role_rewards(
    game: Game, result: Result, numbers: RoleNumbers, flags: RewardFlags
) -> dict[str, tuple[float, float]]:
    """The reward and the weight of each role whose messages become rows: those whose reward is not 0.

    With a baseline both roles of a game get rows, unless it ended in a breach.
    """
    pay, breach = role_pay(game, result, flags), game.outcome(result.outcome).breach
    winners = [role for role in game.roles if pay[role] > 0]
    rewards = {}
    for role in game.roles:
        reward = pay[role] if breach else pay[role] - numbers.baselines[role]
        reward = 1.0 if flags.messages == ALL else reward
        if reward and flags.roles in (None, role):
            rewards[role] = reward, row_weight(role, winners, numbers, flags)
    return rewards


def row_weight(role: str, winners: Sequence[str], numbers: RoleNumbers, flags: RewardFlags) -> float:
    """The weight of a role's rows: its own if it won or if there is a baseline, else the winner's; 1 in a tie."""
    if flags.roles or flags.messages == ALL:
        return 1.0
    if role in winners or flags.baseline == ROLE:
        return numbers.weights[role]
    return numbers.weights[winners[0]] if winners else 1.0


def message_shares(count: int, decay_weight: float) -> list[float]:
    """Shares of a reward of 1 among a role's messages k = 1..T: gamma^(T-k) / sum_j gamma^(T-j)."""
    shares = [(1 / decay_weight) ** k for k in range(count)]  # the released numbers to the last digit
    total = sum(shares)
    return [share / total for share in shares]


# Rows.


def game_rows(
    game: Game,
    episodes: Iterable[Mapping],
    results: Sequence[Result],
    flags: RewardFlags,
    prompt: PromptFn,
    shape: Shape | None = None,
    *,
    thinking: bool = False,
) -> tuple[list[dict], RoleNumbers]:
    """The rows of games and their results, in the order of episodes and messages, and the numbers of their roles.

    A message up to the decisive one gets its share of its role's reward by decay; with `messages` ALL, the whole of
    it. Then `shape` is called; UserError unless it returns a finite number. With `thinking`, targets begin with the
    thoughts of their replies.
    """
    numbers = RoleNumbers(role_weights(game, results, flags.role_weights), role_baselines(game, results, flags))
    rows = []
    for episode, result in zip(episodes, results, strict=True):
        history, task = episode["history"][: result.length], episode["target_word"]
        rewards = role_rewards(game, result, numbers, flags)
        spoken = Counter(message["role"] for message in history)
        shares = {role: iter(message_shares(spoken[role], flags.decay_weight)) for role in rewards}
        for index, message in enumerate(history):
            if (role := message["role"]) not in rewards:
                continue
            (reward, weight), share = rewards[role], next(shares[role])
            row = {"query": prompt(history[:index], task, episode["max_turns"]), "target": message["content"].strip()}
            row |= {"reward": reward if flags.messages == ALL else reward * share, "role": role, "weight": weight}
            row |= thoughtful_target(episode, index) if thinking else {}
            if shape:
                reward = shape(row, episode, result.outcome)
                if not (isinstance(reward, SupportsFloat) and math.isfinite(reward)):
                    raise UserError(f"{shape} returned {reward!r}; a row's reward must be a finite number")
                row |= {"reward": float(reward)}
            rows.append(row)
    return rows, numbers


def thoughtful_target(episode: Mapping, index: int) -> dict:
    """The target of a message whose reply has a thought, exactly as the model wrote both; {} without a thought."""
    reply = episode["replies"][index] if episode.get("replies") else {}
    return {"target": reply["thought"] + reply["text"], "thought": True} if "thought" in reply else {}


def assign_rewards(
    episodes: Iterable[Mapping],
    *,
    game: Game | None = None,
    decay_weight: float = 0.8,
    rng: random.Random,
    templates: prompts.Templates | None = None,
    **flags,
) -> list[dict]:
    """Return rows with query, target, reward, role and weight, in the order of episodes and messages.

    `game` None is Taboo. Queries are training prompts, drawn with `rng` from `templates`. `flags` are further ones of
    RewardFlags. UserError for one outside its bounds, and for an invalid episode, by its index.
    """
    game = game or load_game()
    prompt = partial(prompts.training_prompt, game, rng=rng, templates=templates)
    return checked_rows(game, list(episodes), RewardFlags(decay_weight=decay_weight, **flags), prompt)


def checked_rows(
    game: Game, episodes: Sequence[Mapping], flags: RewardFlags, prompt: PromptFn, shape: Shape | None = None
) -> list[dict]:
    """`game_rows` of episodes that nobody has checked. UserError as in `assign_rewards`."""
    flags.check_rewards(game)
    check_episodes(game, episodes, "episode", 0)
    results = [game_result(game, episode) for episode in episodes]
    return game_rows(game, episodes, results, flags, prompt, shape)[0]


def record_path(rows: str | Path) -> Path:
    """The record of how a file of rows was made: X_rewards_settings.json beside X.json."""
    return Path(rows).with_name(f"{Path(rows).stem}_rewards_settings.json")


def count_rows(rows: Iterable[Mapping]) -> dict[str, int]:
    """How many rows there are of each role and of SFT, and how many have a reward below 0."""
    counts = Counter(row.get("role", "sft") for row in rows)
    return dict(counts) | {"negative": sum(row.get("reward", 0.0) < 0 for row in rows)}


def read_sft_rows(path: str, chat: "ChatTemplate | None" = None) -> list[dict]:
    """The SFT rows of a file of records with query and target, prompt and answer, Alpaca's fields, or messages.

    With a chat template the queries are what a user would send; rows that are in it already stay as they are, and so
    do messages, which training writes in the template of its model.
    """
    return read_json_or_jsonl(path, partial(sft_row, chat=chat))


def sft_row(record: Mapping, chat: "ChatTemplate | None") -> dict:
    if row_messages(record):
        return {"messages": record["messages"], "type": "sft", "weight": 1.0}
    if chat and {"instruction", "output"} <= record.keys() and not {"query", "prompt"} & record.keys():
        record = chat.alpaca_to_turn(record)
    query, target, record = row_texts(record)
    row = {"query": query, "target": target, "type": "sft", "weight": 1.0}
    row |= {"chat_template": True} if record.get("chat_template") else {}
    return chat.row(row) if chat else row
