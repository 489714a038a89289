"""TextArena's games: whoever wins there wins here, and every program takes them. Skipped without the package."""

import asyncio
import random
import re

import pytest
from helpers import call

from tools import assign_rewards, evaluate_games, prepare_data, report
from tools.games import load_game
from tools.games.prompts import play_prompt, training_prompt
from tools.players.player import STOP, Reply, Turn
from tools.selfplay.play import play_game
from utils import read_json, read_json_or_jsonl, write_records

textarena = pytest.importorskip("textarena", reason="needs textarena 0.7.4")

WORDS = ["Well, well.", "[Accept]", "[Deny]", "[Offer: 1 Wheat -> 1 Wood]", "[Fact 1]", "[Fact 2]"]
MOVES = {  # what random players say in each environment; not all of it is legal
    "TicTacToe-v0": [f"[{cell}]" for cell in range(9)],
    "ConnectFour-v0": [f"[col {column}]" for column in range(7)],
    "Nim-v0": [f"[{pile} {number}]" for pile in range(3) for number in (1, 2)],
    "KuhnPoker-v0": ["[check]", "[bet]", "[call]", "[fold]"],
    "SimpleNegotiation-v0": WORDS,
    "TruthAndDeception-v0": WORDS,
}
REFUSED = {
    "DontSayIt-v0": "network",  # downloads a word list
    "Debate-v0": "OpenRouter",  # a server judges
    "ColonelBlotto-v0": "hides",  # both choose without seeing the other's choice
    "IteratedPrisonersDilemma-v0": "hides",
    "Taboo-v0": "4 players",
    "LiarsDice-v0": "two players",
    "Sudoku-v0": "players",
    "Nowhere-v0": "no environment",
}


class RandomPlayer:
    """Says a legal move if TextArena lists them, else anything from the list."""

    def __init__(self, moves: list[str], rng: random.Random):
        self.moves, self.rng = moves, rng

    async def reply(self, turn) -> Reply:
        _, found, choices = turn.secrets["observations"].lower().rpartition("vailable")
        listed = re.findall(r"'(\[[^']+\])'", choices) if found else []
        return Reply(self.rng.choice(listed or self.moves), STOP, 1)


def played(env: str, seed: int) -> dict:
    """A random game of an environment, and the game itself."""
    game = load_game("textarena", env=env)
    player = RandomPlayer(MOVES[env], random.Random(f"{env} {seed}"))
    players = dict.fromkeys(game.roles, player)
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
        state = random.getstate()
        game, episode = played(env, seed)
        assert random.getstate() == state
        assert episode["game"] == f"textarena:{env}"
        outcome = game.outcome(episode["outcome"])
        winner, invalid = winner_there(env, episode)
        assert outcome.winner == (None if winner is None else game.roles[winner])
        assert outcome.breach == invalid
        breaches += invalid
        verdict = game.judge(episode["history"], episode["target_word"], game.max_turns)
        assert verdict == (episode["outcome"], len(episode["history"]))
    assert breaches < 12


@pytest.mark.parametrize("env, why", REFUSED.items())
def test_environments_that_cannot_be_played_are_refused_with_the_reason(env, why):
    with pytest.raises(ValueError, match=why):
        load_game("textarena", env=env)


def test_a_player_sees_its_own_card_and_not_the_others():
    game = load_game("textarena", env="KuhnPoker-v0")
    seen = {role: game.secrets(role, "3", ())["observations"] for role in game.roles}
    cards = [re.search(r"Your card is: '(.)'", text)[1] for text in seen.values()]
    assert cards[0] != cards[1]
    for own, (role, other) in zip(cards, [game.roles, game.roles[::-1]], strict=True):
        opens = game.next_role("3", ()) == role
        prompt = play_prompt(game, [], "3", 50) if opens else ""
        assert f"Your card is: '{own}'" in seen[role]
        assert not opens or (seen[role] in prompt and seen[other] not in prompt)


@pytest.mark.parametrize("env", MOVES)
def test_every_program_takes_the_games(env, tmp_path):
    episodes = [played(env, seed)[1] for seed in range(12)]
    game = ["--game", "textarena", "--game_options", f"env={env}"]
    write_records(tmp_path / "games.json", episodes)
    rows = ["--input_data_path", tmp_path / "games.json", "--output_data_path", tmp_path / "rows.json"]
    call(assign_rewards.main, *rows, *game, "--min_game_rows", 0)
    decided = [each for each in episodes if each["outcome"].endswith("wins")]
    written = read_json_or_jsonl(tmp_path / "rows.json")
    winners = [each["outcome"].removesuffix(" wins") for each in decided]
    expected = [
        message["content"].strip()
        for each, winner in zip(decided, winners, strict=True)
        for message in each["history"]
        if message["role"] == winner
    ]
    assert [row["target"] for row in written] == expected
    call(report.main, "--episodes", tmp_path / "games.json", "--output", tmp_path / "report.html", *game)
    assert (tmp_path / "report.html").stat().st_size > 0


def test_scripted_players_meet_and_minimax_never_loses(tmp_path):
    (tmp_path / "seeds.txt").write_text("".join(f"{seed}\n" for seed in range(8)))
    call(
        evaluate_games.main,
        *("--players", "a=scripted:random", "b=scripted:minimax", "--words", tmp_path / "seeds.txt"),
        *("--game", "textarena", "--game_options", "env=TicTacToe-v0", "--output_dir", tmp_path / "match"),
        *("--games_per_word", 1),
    )
    games = read_json(tmp_path / "match" / "games_results.json")
    assert len(games) == 16
    ends = [
        (each[role], each["outcome"].removeprefix(role)) for each in games for role in ("player_zero", "player_one")
    ]
    assert ("b", " errs") not in ends and ("a", " wins") not in ends and ends.count(("b", " wins")) > 8


def test_minimax_draws_with_itself():
    game = load_game("textarena", env="TicTacToe-v0")
    history = []
    while not game.is_over(history, "0", 5):
        role = game.next_role("0", history)
        turn = Turn(game, role, tuple(history), 5, 0, {})
        history.append({"role": role, "content": game.scripted("minimax")(turn)})
    assert game.decide("0", history) == "draw"
    with pytest.raises(ValueError, match="alphazero"):
        game.scripted("alphazero")


def test_tasks_are_seeds(tmp_path):
    flags = ["tasks", "--game", "textarena", "--game_options", "env=Nim-v0", "--number", 5]
    call(prepare_data.main, *flags, "--output", tmp_path / "seeds.txt")
    assert (tmp_path / "seeds.txt").read_text().split() == ["0", "1", "2", "3", "4"]
    game = load_game("textarena", env="Nim-v0")
    with pytest.raises(ValueError, match="seed"):
        game.check_task("seven")


def test_prompts_name_the_rules_and_the_board():
    game, episode = played("ConnectFour-v0", 0)
    for length in range(len(episode["history"])):
        history = episode["history"][:length]
        for prompt in (
            play_prompt(game, history, "0", 50),
            training_prompt(game, history, "0", 50, rng=random.Random(0)),
        ):
            assert "Connect Four" in prompt and prompt.count("0 1 2 3 4 5 6") == 1
