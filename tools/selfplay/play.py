"""Playing: one game, many games at once, and the missing games of a run, each of which is stored as it ends."""

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
from tools.players.flags import PlayFlags
from tools.players.make import NoteEngines, choose_engine, make_players
from tools.players.player import STOP, Player, ReplyUnavailable, Turn, reply_without, thought_is_open
from tools.selfplay.episodes import UNFINISHED, Episode, EpisodeFiles, new_tokens

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

    `players` are by role; `index` is the task's index in the word list; `templates` default to the game's own. A reply
    loses the texts of the players' special tokens before it is judged, stored or shown. Otherwise a player could end
    its turn in the other's prompt, and go on in another name.
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
        # As in the release, an episode without this key is one of DEFAULT_GAME.
        **({} if game.name == DEFAULT_GAME else {"game": game.name}),
        "target_word": task,
        "max_turns": max_turns,
        "history": history,
        "outcome": outcome,
        "length": length,
        "replies": replies,
    }


def as_message(role: str, text: str, special: frozenset[str]) -> dict[str, str]:
    """What a role wrote, as it is judged, stored and shown to the other: without the texts of special tokens."""
    return {"role": role, "content": without(special, text).strip()}


def special_texts_of(players: Mapping[str, Player]) -> frozenset[str]:
    # A player needs no more than `reply`.
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

    Games are not played in batches: they differ in length, and a batch would wait for its longest game. A game that
    cannot go on because a reply is unavailable is left out, with a warning that names its task and the reason. Any
    other exception of a player ends all games. UserError for a task, or prompts, that hold the text of a special token
    of the players: messages lose such texts, so nobody could say it.
    """
    tasks = list(tasks)
    special = special_texts_of(players)
    prompts.check_special_texts(game, templates or prompts.default_templates(game), special)
    for _, task in tasks:
        if without(special, task) != task:
            raise UserError(f"the word {task!r} holds a special token of the players; take it out of the word list")
    to_play = iter(tasks)

    async def keep_playing() -> None:
        for index, task in to_play:  # all share this iterator, so the next task begins when a game has ended
            try:
                episode = await play_game(game, task, players, max_turns=max_turns, index=index, templates=templates)
            except ReplyUnavailable as error:
                logger.warning("%s: left unfinished: %s", task, error)
            else:
                on_episode(episode)

    workers = [asyncio.create_task(keep_playing()) for _ in range(concurrent_games)]
    try:
        await asyncio.gather(*workers)
    finally:  # the first exception ends the other games; those that they raise are dropped
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class Planned(NamedTuple):
    """A game to be played: by whom, with which draws, and what is stored with it."""

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
    note_engines: NoteEngines = lambda names: None,
) -> float:
    """Play this rank's missing games, and store each as it ends. Returns the seconds of play. For all ranks together.

    `plan` has a game for each of `files.words`. Games with the same players and seed are played at the same time, and
    one such group after the other, so that no more models are in memory than two players need. A game of which a reply
    is unavailable is not stored, so the next start plays it.
    """
    flags = choose_engine(flags, {name for planned in plan for name in planned[:2]})
    groups: dict[tuple[str, str, int | str], list[tuple[int, str]]] = defaultdict(list)
    for index, word in files.missing():
        groups[plan[index][:3]].append((index, word))

    def store(episode: Episode) -> None:
        files.append({**episode, **plan[episode["index"]].labels})

    seconds = 0.0
    for number, ((first, second, seed), tasks) in enumerate(groups.items(), start=1):
        title = f"games, part {number} of {len(groups)}" if len(groups) > 1 else "games"
        seconds += _play_group(
            game,
            tasks,
            (first, second),
            flags,
            store,
            templates=templates,
            seed=seed,
            note_engines=note_engines,
            title=title,
        )
    return seconds


def _play_group(
    game: Game,
    tasks: Sequence[tuple[int, str]],
    names: tuple[str, str],
    flags: PlayFlags,
    store: OnEpisode,
    *,
    templates: prompts.Templates,
    seed: int | str,
    note_engines: NoteEngines,
    title: str,
) -> float:
    """Play (index, word) pairs; `title` stands before the progress bar. Returns the seconds of play.

    The players end with this function: otherwise they would hold a group's models while those of the next are loaded.
    """
    players, games_at_once = make_players(
        names, game, flags, seed=seed, games_left=len(tasks), note_engines=note_engines
    )
    at_terminal = any(player.at_terminal for player in players.values())
    # A batch of --logging_steps is one message of each game at work.
    show, bar = _progress(len(tasks), flags.logging_steps * games_at_once, title, quiet=at_terminal)

    def on_episode(episode: Episode) -> None:
        store(episode)
        show(episode)
        for player in set(players.values()):  # one player may have both roles
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
    except (EOFError, KeyboardInterrupt) as left:  # by Ctrl-D, by Ctrl-C
        if not at_terminal:
            raise
        print("\nYou have left. The same command plays the games that are missing.")
        sys.exit(UNFINISHED if isinstance(left, EOFError) else INTERRUPTED)
    return time.monotonic() - started


def _progress(games: int, messages_between: int, title: str, *, quiet: bool) -> tuple[OnEpisode, tqdm]:
    """A function that shows a finished game, and the bar that it moves.

    Rank 0 shows outcomes and tokens per second of its games, and a whole game after `messages_between` messages (0:
    none). Each process warns once of a prompt that lost its beginning, and once of a thought without an end in a reply
    that was not cut off.
    """
    outcomes = Counter()
    counts = Counter()
    began = time.monotonic()
    shows = rank() == 0 and not quiet
    title = f"{title}, rank 0 of {world_size()}" if world_size() > 1 else title
    interval = 0.5 if sys.stderr.isatty() else 30  # seconds; a log file gets few lines
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
            warn_once("a prompt lost its beginning, where the rules stand; --max_length is too small for it")
        ended = [reply for reply in episode["replies"] if reply["finish_reason"] == STOP]
        if any(map(thought_is_open, ended)):
            warn_once("a reply has no </think>, so its message is empty; does this model write its thoughts?")
        if shows and messages_between and counts["messages"] >= messages_between:
            tqdm.write(episode_text(episode))
            counts["messages"] = 0

    return show, bar


def episode_text(episode: Mapping) -> str:
    """An episode as lines of text. What models wrote is indented, so that it cannot look like a verdict."""
    lines = [f"--- {printable(episode['target_word'])} ---"]
    for message in episode["history"]:
        content = printable(message["content"]).replace("\n", "\n    ")
        lines.append(f"{message['role']}: {content}")
    return "\n".join([*lines, f"--- {episode['outcome']} ---"])
