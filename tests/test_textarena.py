"""TextArena's games, an example: whoever wins there wins here, and his messages become rows. It needs the package."""

import asyncio
import importlib.metadata
import random
import re
import sys

import pytest
from helpers import ROOT

from tools.assign_rewards import assign_rewards
from tools.common.errors import UserError
from tools.games import Game, load_game
from tools.games.prompts import play_prompt
from tools.players.player import STOP, Reply
from tools.selfplay.play import Episode, play_game

# A module of the package: without it, Python may find tools/examples/textarena.py under the package's name.
pytest.importorskip("textarena.core", reason="needs textarena 0.7.4")
import textarena  # noqa: E402

TEXTARENA_FILE = f"{ROOT}/tools/examples/textarena.py:TextArena"
WORDS = ["Well, well.", "[Accept]", "[Deny]", "[Offer: 1 Wheat -> 1 Wood]", "[Fact 1]", "[Fact 2]"]
MOVES = {  # what random players say in each environment; not all of it is legal
    "TicTacToe-v0": [f"[{cell}]" for cell in range(9)],
    "ConnectFour-v0": [f"[col {column}]" for column in range(7)],
    "Nim-v0": [f"[{pile} {number}]" for pile in range(3) for number in (1, 2)],
    "KuhnPoker-v0": ["[check]", "[bet]", "[call]", "[fold]"],
    "SimpleNegotiation-v0": WORDS,
    "TruthAndDeception-v0": WORDS,
}


class RandomPlayer:
    """Says a legal move if TextArena lists them, else anything from the list."""

    def __init__(self, moves: list[str], rng: random.Random):
        self.moves, self.rng = moves, rng

    async def reply(self, turn) -> Reply:
        _, marker, choices = turn.secrets["observations"].lower().rpartition("vailable")
        listed = re.findall(r"'(\[[^']+\])'", choices) if marker else []
        return Reply(self.rng.choice(listed or self.moves), STOP, 1)


def played(env: str, seed: int) -> tuple[Game, Episode]:
    """An environment, and a game of it between random players."""
    game = load_game(TEXTARENA_FILE, env=env)
    players = dict.fromkeys(game.roles, RandomPlayer(MOVES[env], random.Random(f"{env} {seed}")))
    return game, asyncio.run(play_game(game, str(seed), players, max_turns=game.max_turns, index=seed))


def winner_there(env: str, episode: dict) -> tuple[int | None, bool]:
    """Who wins by TextArena's own loop, 0, 1, or None for a draw, and whether the loser made an invalid move."""
    world = textarena.make(f"{env}-raw")
    world.reset(num_players=2, seed=int(episode["target_word"]))
    world.state.error_allowance = 0
    done = False
    for message in episode["history"]:
        number, _ = world.get_observation()
        assert message["role"] == ("player_zero", "player_one")[number] and not done
        done, _ = world.step(message["content"])
    assert done
    rewards, info = world.close()
    if rewards[0] == rewards[1]:
        return None, False
    winner = 0 if rewards[0] > rewards[1] else 1
    return winner, bool(info[1 - winner]["invalid_move"])


@pytest.mark.parametrize("env", MOVES)
def test_winners_are_those_of_textarena_itself(env):
    breaches = 0
    for seed in range(12):
        game, episode = played(env, seed)
        assert episode["game"] == f"textarena:{env}"
        outcome = game.outcome(episode["outcome"])
        winner, invalid = winner_there(env, episode)
        assert outcome.winner == (None if winner is None else game.roles[winner]) and outcome.breach == invalid
        verdict = game.judge(episode["history"], episode["target_word"], game.max_turns)
        assert verdict == (episode["outcome"], len(episode["history"]))
        breaches += invalid
    assert breaches < 12


NEW_PYTHON = pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 and newer can read its code")


@pytest.mark.parametrize(
    "env, error",
    [
        ("TicTacToe", "TicTacToe-raw not found"),  # without its version
        ("Taboo-v0", "at least 4 players"),
        pytest.param("Chess-v0", "cannot parse its code.*use Python 3.12 or newer", marks=NEW_PYTHON),
        ("Klondike-v0", "cannot parse its code .*another environment"),
        ("DontSayIt-v0", "python -m nltk.downloader words"),
        ("UsedCar-v0-balanced", "No module named 'textarena.envs.UsedCar'.*use another environment"),
        ("ScorableGames-v0", "Game configuration directory not found.*use another environment"),
    ],
)
def test_an_environment_that_cannot_be_played_is_one_line_that_says_what_helps(env, error, monkeypatch):
    monkeypatch.setattr("nltk.data.path", [])
    monkeypatch.setattr("nltk.download", lambda *args, **options: False)
    with pytest.raises(UserError, match=f"env={env}: .*{error}") as raised:
        load_game(TEXTARENA_FILE, env=env)
    assert len(str(raised.value).splitlines()) == 1


def test_a_player_sees_its_own_card_and_not_the_others():
    game = load_game(TEXTARENA_FILE, env="KuhnPoker-v0")
    opener = game.next_role("3", ())
    (other,) = set(game.roles) - {opener}
    observations = {role: game.secrets(role, "3", ())["observations"] for role in game.roles}
    cards = {role: re.search(r"Your card is: '.'", text)[0] for role, text in observations.items()}
    prompt = play_prompt(game, [], "3", 50)
    assert cards[opener] in prompt and cards[other] not in prompt


def test_the_winners_messages_become_rows():
    (game, won), (_, other_erred) = (played("Nim-v0", seed) for seed in (0, 1))
    assert (won["outcome"], other_erred["outcome"]) == ("player_one wins", "player_one errs")
    rows = assign_rewards([won, other_erred], game=game, rng=random.Random(0))
    said = [message["content"] for message in won["history"] if message["role"] == "player_one"]
    assert [row["target"] for row in rows] == said


def test_the_environment_must_be_named():
    with pytest.raises(UserError, match="missing a required argument: 'env'"):
        load_game(TEXTARENA_FILE)


def test_without_the_package_a_line_says_how_to_install_it(monkeypatch):
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", not_installed)
    with pytest.raises(UserError, match="pip install textarena==0.7.4"):
        load_game(TEXTARENA_FILE, env="Nim-v0")
