"""What all players share: a turn, its seed, and how a player in this process is asked. Models are in test_local.py."""

import asyncio
import sys

import pytest
from helpers import finish, start
from scripted import messages

from tools.games import prompts
from tools.games.taboo import Taboo
from tools.players.player import STOP, Reply, Turn, draw_seed
from utils import UserError, model_folder

GAME = Taboo()
FIRST = Turn(GAME, "attacker", (), 3, 7, {"target_word": "art"})
SECOND = Turn(GAME, "defender", messages(GAME, "Hm."), 3, 7, {})


def test_a_turn_knows_the_prompt_of_play_and_no_more_than_its_role_may():
    assert FIRST.prompt() == prompts.play_prompt(GAME, [], "art", 3)
    assert SECOND.prompt() == prompts.play_prompt(GAME, SECOND.history, "art", 3)
    assert not hasattr(SECOND, "task") and "art" not in SECOND.secrets.values()


def test_a_seed_belongs_to_a_game_and_a_message():
    later = Turn(GAME, "attacker", (), 3, 8, {"target_word": "art"})
    seeds = {draw_seed(seed, turn) for seed in (5, "5/1") for turn in (FIRST, SECOND, later)}
    assert len(seeds) == 6 and all(0 <= seed < 2**63 for seed in seeds)
    assert draw_seed(5, FIRST) == draw_seed(5, Turn(GAME, "defender", (), 5, 7, {}))


def test_a_local_player_is_asked_by_game_with_its_prompt_and_seed():
    from tools.engine.local import LocalPlayer

    asked = []

    class Batcher:
        async def submit(self, engine, prompt, **settings):
            asked.append((engine, prompt, settings))
            return Reply(prompt[-3:], STOP, 1)

    player = LocalPlayer("engine", Batcher(), seed=5)
    for turn in (FIRST, SECOND):
        assert asyncio.run(player.reply(turn)).text == turn.prompt()[-3:]
    expected = [{"game": 7, "seed": draw_seed(5, turn)} for turn in (FIRST, SECOND)]
    assert asked == [("engine", turn.prompt(), each) for turn, each in zip((FIRST, SECOND), expected, strict=True)]


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        model_folder(str(tmp_path / "missing"))
    with pytest.raises(UserError, match="no config.json"):
        model_folder(str(tmp_path))


def test_help_needs_no_torch():
    for program in ("play_llm_game", "evaluate_games"):
        code = f"import sys; sys.argv = ['x', '--help']; from tools import {program} as p\ntry: p.main()\nfinally: "
        code += "assert not {'torch', 'transformers', 'scipy', 'openai'} & set(sys.modules)"
        assert "--max_turns" in finish(start([sys.executable, "-c", code]))
