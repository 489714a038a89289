"""What all players share: the seed of a turn, and functions as players. Models are in test_local.py."""

import asyncio

import pytest
from scripted import messages

from tools.common.errors import UserError
from tools.common.flags import parse_flags
from tools.games.game import load_member
from tools.games.taboo import Taboo
from tools.lab.world.players import load_lexicon
from tools.players.human import HumanPlayer
from tools.players.player import ModelPlayer, ScriptedPlayer, Turn, draw_seed
from tools.players.server import ServerPlayer
from tools.selfplay.flags import PlayFlags
from tools.selfplay.make import player_kind
from tools.selfplay.play import play_game

GAME = Taboo()
FIRST = Turn(GAME, "attacker", (), 3, 7, {"target_word": "art"})
SECOND = Turn(GAME, "defender", messages(GAME, "Hm."), 3, 7, {})


def test_in_all_programs_a_boolean_flag_may_stand_alone():
    assert parse_flags(PlayFlags, ["--bf16", "--chat_template", "False"], description="").dtype == "bfloat16"
    read = parse_flags(PlayFlags, ["--thinking", "--tf32", "true"], description="")
    assert (read.thinking, read.tf32) == (True, True)
    with pytest.raises(UserError, match="yes"):
        parse_flags(PlayFlags, ["--thinking", "yes"], description="")


def test_a_name_is_a_model_unless_it_is_that_of_a_kind_or_begins_with_its_prefix():
    assert player_kind("human") == (HumanPlayer, "") and player_kind("scripted:a.py:b") == (ScriptedPlayer, "a.py:b")
    assert player_kind("openai:org/model:free") == (ServerPlayer, "org/model:free")
    for name in ("human/model", "human:x", "scripted", "openai/gpt2", "models:7b"):
        assert player_kind(name) == (ModelPlayer, name)


def test_a_seed_belongs_to_a_game_and_a_message():
    later = Turn(GAME, "attacker", (), 3, 8, {"target_word": "art"})
    seeds = {draw_seed(seed, turn) for seed in (5, "5/1") for turn in (FIRST, SECOND, later)}
    assert len(seeds) == 6 and all(0 <= seed < 2**63 for seed in seeds)
    assert draw_seed(5, FIRST) == draw_seed(5, Turn(GAME, "defender", (), 5, 7, {}))


def test_the_players_of_the_embedded_world_play_taboo_the_same_game_for_the_same_index():
    words = load_lexicon().words
    players = dict.fromkeys(GAME.roles, ScriptedPlayer(load_member("tools.lab.world.players:lexicon")))

    def play(index: int) -> dict:
        return asyncio.run(play_game(GAME, words[index % len(words)], players, max_turns=3, index=index))

    games = [play(index) for index in range(400)]
    assert len({episode["outcome"] for episode in games}) == 4
    assert games[7] == play(7)
