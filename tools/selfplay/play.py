"""Playing: one game, many games at once, and the missing games of a run, each stored as it ends."""

import asyncio
import functools
import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

from tqdm import tqdm

from tools.common.errors import UserError, printable
from tools.common.models import without
from tools.common.programs import INTERRUPTED
from tools.common.ranks import rank, world_size
from tools.games import prompts
from tools.games.game import DEFAULT_GAME, Game
from tools.players.player import STOP, Player, ReplyUnavailable, Turn, reply_without, thought_is_open
from tools.selfplay.episodes import UNFINISHED, Episode, EpisodeFiles, new_tokens
from tools.selfplay.flags import PlayFlags
from tools.selfplay.make import NoteEngines, choose_engine, make_players

logger = logging.getLogger(__name__)
OnEpisode = Callable[[Episode], None]  # called with each game that has ended


async def play_game(
    game: Game,
    task: str,
    players: Mapping[str, Player],
    *,
    max_turns: int,
    index: int = 0,
    templates: prompts.Templates | None = None,
) -> Episode:
    """Play one game to its end (arXiv 2404.10642, algorithm 1) and judge it.

    `players` are by role; `index` is the task's index in the word list; `templates` default to the game's own. Special
    tokens of the players' tokenizers are removed from a reply before it is judged, stored or shown, because a player
    could use them to end its turn in the other's prompt and go on as somebody else.
    """
    special = special_texts_of(players)
    history: list[dict[str, str]] = []
    replies: list[dict] = []
    while not game.is_over(history, task, max_turns):
        role = game.next_role(task, history)
        secrets = game.secrets(role, task, history)
        turn = Turn(game, role, tuple(history), max_turns, index, secrets, templates)
        reply = await players[role].reply(turn)
        history.append(as_message(role, reply.text, special))
        replies.append(reply_without(special, reply.stored()))
    outcome, length = game.judge(history, task, max_turns)
    return {
        "index": index,
        # As in the release, an episode without this key is of DEFAULT_GAME.
        **({} if game.name == DEFAULT_GAME else {"game": game.name}),
        "target_word": task,
        "max_turns": max_turns,
        "history": history,
        "outcome": outcome,
        "length": length,
        "replies": replies,
    }


def as_message(role: str, text: str, special: frozenset[str]) -> dict[str, str]:
    """What a role wrote as the message that is judged, stored and shown: without special tokens."""
    return {"role": role, "content": without(special, text).strip()}


def special_texts_of(players: Mapping[str, Player]) -> frozenset[str]:
    # A player may have only `reply`.
    return frozenset().union(*(getattr(player, "special_texts", ()) for player in players.values()))


async def play_games(
    game: Game,
    tasks: Iterable[tuple[int, str]],
    players: Mapping[str, Player],
    *,
    max_turns: int,
    templates: prompts.Templates | None = None,
    concurrent_games: int,
    on_episode: OnEpisode,
) -> None:
    """Play (index, task) pairs, `concurrent_games` at a time. An exception in `on_episode` ends all games.

    Games are not played in batches, because a batch would wait for its longest game. A game with an unavailable reply
    is dropped with a warning that names its task and the reason; any other exception of a player ends all games.
    UserError if a task or the prompts contain a special token of the players, because messages lose these.
    """
    tasks = list(tasks)
    special = special_texts_of(players)
    prompts.check_special_texts(game, templates or prompts.default_templates(game), special)
    for _, task in tasks:
        if without(special, task) != task:
            raise UserError(f"the word {task!r} contains a special token of a player; remove it from the word list")
    to_play = iter(tasks)

    async def keep_playing() -> None:
        for index, task in to_play:  # shared by all workers, so that the next game starts when one has ended
            try:
                episode = await play_game(game, task, players, max_turns=max_turns, index=index, templates=templates)
            except ReplyUnavailable as error:
                logger.warning("%s: left unfinished: %s", task, error)
            else:
                on_episode(episode)

    workers = [asyncio.create_task(keep_playing()) for _ in range(concurrent_games)]
    try:
        await asyncio.gather(*workers)
    finally:  # the first exception ends the other games, whose own exceptions are dropped
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class Planned(NamedTuple):
    """A game to play: its players, its seed, and what to store with it."""

    first: str  # the player of roles[0], as on the command line
    second: str
    seed: int | str
    labels: Mapping[str, object] = {}  # further fields of the episode


def play_missing(
    game: Game,
    plan: Sequence[Planned],
    flags: PlayFlags,
    files: EpisodeFiles,
    *,
    templates: prompts.Templates,
    note_engines: NoteEngines = lambda names: 1,
) -> float:
    """Play this rank's missing games and store each as it ends. Returns the seconds of play. All ranks must call this.

    `plan` has a game for each of `files.words`. Games with the same players and seed form a group; groups are played
    one after another, so that at most two players' models are in memory. A game with an unavailable reply is not
    stored, so the next start plays it.
    """
    flags = choose_engine(flags, {name for planned in plan for name in planned[:2]})
    groups: dict[tuple[str, str, int | str], list[tuple[int, str]]] = defaultdict(list)
    for index, word in files.missing():
        groups[plan[index][:3]].append((index, word))

    def store(episode: Episode) -> None:
        files.append({**episode, **plan[episode["index"]].labels})

    seconds = 0.0
    for number, tasks in enumerate(groups.values(), start=1):
        title = f"games, part {number} of {len(groups)}" if len(groups) > 1 else "games"
        who = plan[tasks[0][0]]
        seconds += _play_group(game, tasks, who, flags, store, title, templates=templates, note_engines=note_engines)
    return seconds


def _play_group(
    game: Game,
    tasks: Sequence[tuple[int, str]],
    who: Planned,
    flags: PlayFlags,
    store: OnEpisode,
    title: str,
    *,
    templates: prompts.Templates,
    note_engines: NoteEngines,
) -> float:
    """Play (index, word) pairs with a progress bar called `title`. Returns the seconds of play.

    Players live only in this function; otherwise they would hold a group's models while the next ones are loaded.
    """
    start = note_engines([])
    names = (who.first, who.second)
    players, games_at_once = make_players(names, game, flags, seed=who.seed, games_left=len(tasks), start=start)
    note_engines(player.engine_name for player in players.values() if player.engine_name)
    at_terminal = any(player.at_terminal for player in players.values())
    # For --logging_steps, a batch is one message of each concurrent game.
    show, bar = _progress(len(tasks), flags.logging_steps * games_at_once, title, quiet=at_terminal)

    def on_episode(episode: Episode) -> None:
        store(episode)
        show(episode)
        for player in set(players.values()):  # a player may have both roles
            player.game_over(episode)

    games = play_games(
        game,
        tasks,
        players,
        max_turns=flags.turns(game),
        templates=templates,
        concurrent_games=games_at_once,
        on_episode=on_episode,
    )
    started = time.monotonic()
    try:
        with closing(bar):
            asyncio.run(games)
    except (EOFError, KeyboardInterrupt) as left:  # Ctrl-D, Ctrl-C
        if not at_terminal:
            raise
        print("\nYou left. Rerun the same command to play the remaining games.")
        sys.exit(UNFINISHED if isinstance(left, EOFError) else INTERRUPTED)
    return time.monotonic() - started


def _progress(games: int, messages_between: int, title: str, *, quiet: bool) -> tuple[OnEpisode, tqdm]:
    """A function that reports a finished game, and the progress bar that it updates.

    Rank 0 shows its games' outcomes and tokens per second, and a whole game after every `messages_between` messages
    (0: never). Each process warns once of a truncated prompt, and once of an unclosed thought in a reply that was not
    truncated.
    """
    outcomes = Counter()
    counts = Counter()
    began = time.monotonic()
    shows = rank() == 0 and not quiet
    title = f"{title}, rank 0 of {world_size()}" if world_size() > 1 else title
    interval = 0.5 if sys.stderr.isatty() else 30  # seconds; few lines in a log file
    warn_once = functools.cache(logger.warning)
    bar = tqdm(total=games, desc=title, unit="game", disable=not shows, mininterval=interval)

    def show(episode: Episode) -> None:
        outcomes[episode["outcome"]] += 1
        counts.update(tokens=new_tokens(episode), messages=len(episode["history"]))
        shares = {outcome: f"{number / outcomes.total():.0%}" for outcome, number in outcomes.items()}
        speed = counts["tokens"] / (time.monotonic() - began)
        bar.set_postfix({"tokens/s": f"{speed:.0f}", **shares}, refresh=False)
        bar.update()
        if any(reply.get("prompt_cut") for reply in episode["replies"]):
            warn_once("a prompt lost its beginning, with the rules; --max_length is too small for it")
        ended = [reply for reply in episode["replies"] if reply["finish_reason"] == STOP]
        if any(map(thought_is_open, ended)):
            warn_once("a reply has no </think>, so its message is empty; does this model think in such tags?")
        if shows and messages_between and counts["messages"] >= messages_between:
            tqdm.write(episode_text(episode))
            counts["messages"] = 0

    return show, bar


def episode_text(episode: Mapping) -> str:
    """An episode as text. Further lines of messages are indented, so that none can look like a verdict."""
    lines = [f"--- {printable(episode['target_word'])} ---"]
    for message in episode["history"]:
        content = printable(message["content"]).replace("\n", "\n    ")
        lines.append(f"{message['role']}: {content}")
    return "\n".join([*lines, f"--- {episode['outcome']} ---"])
