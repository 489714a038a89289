"""Recipes: what people add to this project, each as short as it can be, and run.

The first lines of each recipe are the change, as it would stand in a file of your own or as the one entry here; the
lines under "Run it" are what the test does with it.
"""

import json
import random
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch
from helpers import ROOT, Fork, call, finish, flags_of, play_flags, words_of, write_place, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from dataloaders import IGNORE_INDEX, encode_example
from tools import assign_rewards, controls, play_llm_game, run_spag, spag
from tools.common.files import read_json, read_json_or_jsonl, write_json, write_records
from tools.common.flags import NAMED_MODELS, NamedPath, flag
from tools.controls import Control
from tools.loop.settings import TABLES, parser_of
from tools.loop.settings import flags_of as stage_flags_of
from tools.measure.matches import BOTH, pooled_rows, read_matches
from tools.players.player import Player
from tools.selfplay import make
from tools.selfplay.play import Planned
from tools.selfplay.rows import is_sft
from trainers import TRAIN_METHODS, OfflinePOTrainer, over_rows, row_means

CHAIN = '''
from pathlib import Path

from tools.games.game import Game, Outcome


class Chain(Game):
    """Each word begins with the last letter of the word before. Who says another word loses."""

    name, title, max_turns = "chain", "Word Chain", 3
    prompt_file = Path(__file__).with_suffix(".json")
    roles = ("opener", "follower")
    outcomes = (Outcome("opener wins", winner="opener"), Outcome("follower wins", winner="follower"), Outcome("tie"))
    example_task = "apple"

    def secrets(self, role, task, history):
        return {"word": task}

    def decide(self, task, history):
        *_, before, word = [task, *(message["content"].strip().lower() for message in history)]
        return None if word[:1] == before[-1] else f"{self.other(history[-1]['role'])} wins"
'''
CHAIN_PROMPTS = {
    "rules": ["Say a word that begins with the last letter of the word before, {max_turns} times.\n"],
    "opener_instruction": "You begin. The first word was {word}.",
    "follower_instruction": "You are second. The first word was {word}.",
}
SPEAKERS = """
def knows_all(turn):
    before = turn.history[-1]["content"] if turn.history else turn.secrets["word"]
    return before[-1] + "ock"


def knows_one(turn):
    return "keel"
"""


def test_a_game_is_a_file_with_two_methods_and_a_prompt_file(tmp_path):
    """Every program takes it as --game FILE.py:Class; nothing is registered."""
    (tmp_path / "chain.py").write_text(CHAIN, encoding="utf-8")
    (tmp_path / "chain.json").write_text(json.dumps(CHAIN_PROMPTS), encoding="utf-8")

    # Run it: two functions play, and the winner's messages become rows.
    (tmp_path / "speakers.py").write_text(SPEAKERS, encoding="utf-8")
    (tmp_path / "words.txt").write_text("apple\n", encoding="utf-8")
    flags = {"game": f"{tmp_path}/chain.py:Chain", "data_path": tmp_path / "words.txt", "data_suffix": "words"}
    flags |= {"attacker_model_name_or_path": f"scripted:{tmp_path}/speakers.py:knows_one"}
    flags |= {"defender_model_name_or_path": f"scripted:{tmp_path}/speakers.py:knows_all"}
    call(play_llm_game.main, *flags_of(flags | {"model_prefix": "me", "output_dir": tmp_path}))
    results = tmp_path / "me_sampling_words_results.json"
    (episode,) = read_json(results)
    assert ([message["content"] for message in episode["history"]], episode["outcome"]) == (["keel"], "follower wins")
    files = {"input_data_path": results, "output_data_path": tmp_path / "rows.json"}
    call(assign_rewards.main, *flags_of({"game": flags["game"], "losers": 0.5} | files))
    assert [(row["role"], row["reward"]) for row in read_json(files["output_data_path"])] == [("opener", -0.5)]


class Pool(Player):
    """pool:NAME,NAME,...: another of these players in each game, scripted ones or servers."""

    form = "pool:NAME,NAME,..."

    def __init__(self, players):
        self.players = players

    @classmethod
    def named(cls, name, game, flags, seed):
        kinds = [make.player_kind(each) for each in name.split(",")]
        return cls([kind.named(rest, game, flags, seed) for kind, rest in kinds])

    @classmethod
    def setting(cls, name, flags):  # all that games depend on: another pool is another run
        return [make.player_setting(each, flags) for each in name.split(",")]

    async def reply(self, turn):
        return await self.players[turn.index % len(self.players)].reply(turn)


def test_a_kind_of_player_is_a_class_and_its_prefix(tmp_path, monkeypatch):
    monkeypatch.setitem(make.KINDS, "pool:", Pool)  # the line in tools/selfplay/make.py

    # Run it: of two opponents one names the word.
    speakers = "def hints(turn): return 'It purrs.'\ndef cat(turn): return 'I know the word! It is `cat`!'\n"
    (tmp_path / "speakers.py").write_text(speakers + "def silent(turn): return ''\n", encoding="utf-8")
    names = [f"scripted:{tmp_path}/speakers.py:{name}" for name in ("hints", "cat", "silent")]
    episodes = spag.play(["cat"] * 4, names[0], f"pool:{names[1]},{names[2]}")
    assert [episode["outcome"] for episode in episodes] == ["defender wins", "tied game"] * 2


@dataclass(kw_only=True)
class WithPool(play_llm_game.Flags):
    """Each game's defender is drawn from models of earlier epochs, of which one at a time is in memory."""

    defender_pool: list[NamedPath] = flag("players, of which one is drawn for each game", default=[], **NAMED_MODELS)

    def plan(self, words):
        if not self.defender_pool:  # as in epoch 1
            return super().plan(words)
        drawn = random.Random(self.seed).choices(self.defender_pool, k=len(words))
        attacker = self.attacker_model_name_or_path
        labels = {"learner": "attacker"}  # rows are made of its messages alone; the defender's would be off-policy
        return [Planned(attacker, path, f"{self.seed}/{name}", labels | {"defender": name}) for name, path in drawn]

    def settings(self, game):  # by content, as those of the other players
        return super().settings(game) | {
            "defender_pool": [name for name, _ in self.defender_pool],
            **{f"player {name}": make.player_setting(path, self) for name, path in self.defender_pool},
        }


def with_pool(loop):
    """The steps of the loop, in which the newest model plays as attacker against those of all epochs before."""
    pool = []
    for step in run_spag.steps(loop):
        if step.stage == "play" and pool:
            step = replace(step, argv=[*step.argv, "--defender_pool", *pool])
        yield step
        if step.what == "train":  # starts from the model that played, also if `first_episodes` had been played before
            pool.append(f"before{step.epoch}={step.argv[step.argv.index('--model_name_or_path') + 1]}")


def test_a_pool_of_opponents_is_a_flag_of_play_and_its_plan(tiny_model, other_model, tmp_path, monkeypatch, request):
    monkeypatch.setattr(play_llm_game, "Flags", WithPool)  # in tools/play_llm_game.py: the flag, `plan`, a setting
    monkeypatch.setitem(TABLES, "play", replace(TABLES["play"], flags=WithPool))  # made of it at the import
    for cached in (parser_of, stage_flags_of):  # an earlier test may have made them of Flags
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)

    # Run it: another model says another thing, and rows are made of the attacker, who is trained next.
    place = write_place(tmp_path, ["art"] * 8)
    how = {"defender_pool": [f"epoch1={other_model}", f"epoch2={tiny_model}"], "task_type": "testing"}
    how |= {"model_prefix": "epoch3", "max_new_tokens": 4, "max_turns": 1}
    call(play_llm_game.main, *play_flags(place, tiny_model, tmp_path / "out", **how))
    games = read_json(tmp_path / "out/epoch3_testing_words_results.json")
    replies = {game["defender"]: game["history"][1]["content"] for game in games}
    assert len(set(replies.values())) == len(replies) == 2
    assert all(game["history"][1]["content"] == replies[game["defender"]] for game in games)
    rows = spag.rows(games, ties=1)  # a message of each role, -1 for each role of a tied game
    assert [(row["role"], row["reward"]) for row in rows] == [("attacker", -1)] * 8

    # In the loop, by a script that calls `run_spag.main(with_pool)`.
    settings = {"model": tiny_model, "words": place / "words.txt", "output": "o", "rewards.sft_data_path": ""}
    settings |= {"processes": 1, "deepspeed": "none", "epochs": 3, "check": "true"}
    printed = call(partial(run_spag.main, with_pool), *words_of(settings)).output
    (third,) = (line for line in printed.splitlines() if line.startswith("epoch3_play: "))
    assert third.endswith(f" --defender_pool before1={tiny_model} before2=o/epoch1/model")


@dataclass(kw_only=True)
class Equal(Control):
    """The same rows with one reward for all of a game's messages: does the decay matter?"""

    def make(self, rows):
        mean = fmean(row["reward"] for row in rows if not is_sft(row))
        return [row if is_sft(row) else row | {"reward": mean} for row in rows]


def test_a_control_is_a_class_that_makes_rows_from_rows_and_its_name(tmp_path, monkeypatch):
    monkeypatch.setitem(controls.CONTROLS, "equal", Equal)  # the line in tools/controls.py

    # Run it as a program; the loop's control=equal starts the same one.
    rows = [
        {"query": "q", "target": "t", "reward": reward, "role": "attacker", "weight": 1.0} for reward in (0.2, 0.8)
    ]
    write_records(tmp_path / "rows.json", rows)
    call(controls.main, "equal", *flags_of({"rows": tmp_path / "rows.json", "output": tmp_path / "equal.json"}))
    assert [row["reward"] for row in read_json_or_jsonl(tmp_path / "equal.json")] == pytest.approx([0.5, 0.5])


def for_short_games(episode, rows):
    """Twice the reward over the number of messages: who wins sooner gets more."""
    return [row | {"reward": row["reward"] * 2 / len(episode["history"])} for row in rows]


def test_a_reward_of_one_s_own_is_a_function_from_rows_to_rows(tiny_model):
    def defender(turn):
        return "I know the word! It is `cat`!" if turn.history[2:] else "Hm."

    episodes = spag.play(["cat", "dog"], lambda turn: "It purrs.", defender)
    rows = [row for episode in episodes for row in for_short_games(episode, spag.rows([episode]))]

    # Run it: both games have four messages, and the loss at ratio 1 is minus the mean of reward * weight.
    assert [len(episode["history"]) for episode in episodes] == [4, 4]
    assert sum(row["reward"] for row in rows) == pytest.approx(2 * 2 / 4)
    model, tokenizer = (kind.from_pretrained(tiny_model) for kind in (AutoModelForCausalLM, AutoTokenizer))
    loss, _ = spag.loss(model, model, spag.batch(rows, tokenizer))
    assert loss.item() == pytest.approx(-fmean(row["reward"] * row["weight"] for row in rows))


METHOD = '''
from typing import ClassVar

from tools.common.flags import flag
from trainers import TRAIN_METHODS, SPAGTrainer


class ReinforceTrainer(SPAGTrainer):
    """REINFORCE with a constant baseline, without a reference."""

    flags: ClassVar = {"baseline": flag("what is subtracted from each reward", default=0.5)}
    learns_from_games = True

    def method_loss(self, batch, denominators):
        advantages = batch["rewards"] - self.args.baseline
        loss = -(advantages * batch["logprobs"] * batch["weights"]).sum() / denominators["game_rows"]
        return loss, {"policy_loss": loss.detach()}


TRAIN_METHODS["Reinforce"] = ReinforceTrainer

import train  # once the method is there: the parser is made of all methods

train.main()
'''
GAME_ROWS = [
    {"query": "Hint: ", "target": target, "reward": reward, "role": "attacker", "weight": 1.0}
    for target, reward in (("it purrs", 1.0), ("a pet", 0.25))
]


def training(tiny_model, tmp_path, **changes) -> list[str]:
    values = {"model_name_or_path": tiny_model, "train_data_path": write_rows(tmp_path / "rows.json", GAME_ROWS)}
    values |= {"output_dir": tmp_path / "out", "max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1}
    return flags_of(values | {"save_strategy": "no", "report_to": "none", "learning_rate": 1e-3} | changes)


def test_a_training_method_is_a_class_with_its_loss_and_its_flags(tiny_model, tmp_path):
    """A script beside the project. In the project it is a class and a line of TRAIN_METHODS in trainers.py."""
    (tmp_path / "reinforce.py").write_text(METHOD, encoding="utf-8")

    # Run it: all else, from --help to the record, follows from the class.
    words = training(tiny_model, tmp_path, train_method="Reinforce", baseline=0.75)
    finish(Fork([tmp_path / "reinforce.py", *words], cwd=tmp_path))
    assert read_json(tmp_path / "out/settings.json")["settings"]["baseline"] == 0.75
    first, second, *_ = read_json(tmp_path / "out/trainer_state.json")["log_history"]
    assert second["policy_loss"] < first["policy_loss"]


# The lines of a coefficient, each before the line named. --help, the record and spag.loss follow from the first; for a
# loss of other numbers than those of a row, such as tokens', `spag.loss` must pass them.
COEFFICIENT = [
    (
        '        "detach_kl": flag(',
        '        "reward_scale": flag("Factor of each reward.", default=1.0),\n',
    ),
    (
        "    num_game_rows: Tensor | float | None = None,\n",
        "    reward_scale: float = 1.0,\n",
    ),
    (
        "    sft_mask = sft_mask.to(logprob.dtype)\n",
        "    rewards = reward_scale * rewards\n",
    ),
]


def test_a_coefficient_is_a_flag_and_its_use_in_the_loss(tiny_model, tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "tools", project / "tools")
    for file in ROOT.glob("*.py"):
        shutil.copy(file, project)
    code = (project / "trainers.py").read_text(encoding="utf-8")
    for before, lines in COEFFICIENT:
        assert before in code
        code = code.replace(before, lines + before, 1)
    (project / "trainers.py").write_text(code, encoding="utf-8")

    # Run it: at ratio 1 the loss is minus the mean reward.
    changes = {"train_method": "OfflinePO", "ref_model_name_or_path": tiny_model, "reward_scale": 2}
    finish(Fork([project / "train.py", *training(tiny_model, tmp_path, **changes)], cwd=project))
    assert read_json(tmp_path / "out/settings.json")["settings"]["reward_scale"] == 2
    first, *_ = read_json(tmp_path / "out/trainer_state.json")["log_history"]
    assert first["policy_loss"] == pytest.approx(-2 * (1 + 0.25) / 2, rel=1e-4)


class WithReward(OfflinePOTrainer):
    """Logs the mean reward of rows of games."""

    def method_loss(self, batch, denominators):
        loss, metrics = super().method_loss(batch, denominators)
        return loss, metrics | {"reward": over_rows(batch["rewards"], batch["game_mask"])}


def test_a_metric_is_a_name_with_a_sum_and_a_count(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(TRAIN_METHODS, "OfflinePO", WithReward)  # in the project: a line of offline_po_loss

    # Run it: the log has it, added up over micro-batches and ranks.
    two_micro_batches = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    method = {"train_method": "OfflinePO", "ref_model_name_or_path": tiny_model} | two_micro_batches
    call(train.main, *training(tiny_model, tmp_path, **method))
    first, *_ = read_json(tmp_path / "out/trainer_state.json")["log_history"]
    assert first["reward"] == pytest.approx((1 + 0.25) / 2)


class WithEntropy(OfflinePOTrainer):
    """Logs the mean entropy of the policy at the targets of game rows, in nats per token."""

    def score(self, logits, batch):
        logprobs = logits.detach().float().log_softmax(-1)  # (scored tokens, vocabulary)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return super().score(logits, batch) | {"entropies": row_means(entropy, batch)}

    def method_loss(self, batch, denominators):
        loss, metrics = super().method_loss(batch, denominators)
        return loss, metrics | {"entropy": over_rows(batch["entropies"], batch["game_mask"])}


def test_a_number_of_each_row_is_a_name_in_its_score(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(TRAIN_METHODS, "OfflinePO", WithEntropy)  # in the project: a line of `score`, one of the loss

    # Run it: at the first step the policy is the model of the folder.
    method = {"train_method": "OfflinePO", "ref_model_name_or_path": tiny_model}
    call(train.main, *training(tiny_model, tmp_path, **method))
    first, *_ = read_json(tmp_path / "out/trainer_state.json")["log_history"]
    model, tokenizer = (kind.from_pretrained(tiny_model) for kind in (AutoModelForCausalLM, AutoTokenizer))
    entropies = []
    for row in GAME_ROWS:
        encoded = encode_example(row, tokenizer)
        with torch.no_grad():
            logits = model(torch.tensor([encoded["input_ids"]])).logits[0, :-1]
        scored = torch.tensor(encoded["labels"][1:]) != IGNORE_INDEX
        entropies.append(torch.distributions.Categorical(logits=logits[scored]).entropy().mean().item())
    assert first["entropy"] == pytest.approx(fmean(entropies), rel=1e-4)


# The lines of a flag of play, each before the line named. Parser, --help, bounds and records follow from the first;
# `generate`, vLLM and servers get a flag with a `neutral` value by its name. Our own engine needs the other two.
FLAG = [
    (
        "tools/players/player.py",
        "    chat_template: bool = flag(",
        '    min_p: float = flag("sample tokens with at least this part of the largest probability", default=0.0, '
        "at_least=0, at_most=1, neutral=0)\n",
    ),
    (
        "tools/engine/slots.py",
        "from transformers.generation import ",
        "from transformers.generation import MinPLogitsWarper\n",
    ),
    (
        "tools/engine/slots.py",
        "    return warpers\n",
        "    if sampling.min_p:\n        warpers.append(MinPLogitsWarper(sampling.min_p))\n",
    ),
]
USE = """
import sys
from tools import spag

def said(**flags):
    flags |= {"max_turns": 1, "max_length": 2000, "max_new_tokens": 8}
    return spag.play(["cat"], sys.argv[1], lambda turn: "Hm.", **flags)[0]["history"][0]["content"]

likeliest = said(task_type="testing")
for engine in ("slots", "generate"):
    assert said(engine=engine, seed=1, min_p=1.0) == likeliest != said(engine=engine, seed=1)
"""


def test_a_flag_of_play_is_a_line_that_declares_it_and_its_use(tiny_model, tmp_path):
    for name in ("tools", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for file, before, lines in FLAG:
        code = (tmp_path / file).read_text(encoding="utf-8")
        assert code.count(before) == 1
        (tmp_path / file).write_text(code.replace(before, lines + before), encoding="utf-8")

    # Run it: at 1 only the likeliest token is left.
    (tmp_path / "use.py").write_text(USE, encoding="utf-8")
    finish(Fork([tmp_path / "use.py", tiny_model], cwd=tmp_path))


def points(loop, epoch):
    """The points of an epoch's match, over all words and both roles, and their interval; None without a match."""
    path = Path(loop.output, f"epoch{epoch}", "eval", "matches.json")
    if not path.is_file():
        return None
    row = pooled_rows(read_matches(path))[-1]
    return row["points"], row["points_interval"]


def stops_early(loop):
    """The loop ends after a match whose points are below the interval of the match before."""
    for step in run_spag.steps(loop):
        matches = [match for epoch in range(1, step.epoch or 1) if (match := points(loop, epoch))]
        if len(matches) > 1:
            (_, (low, _)), (newest, _) = matches[-2:]
            if newest < low:
                return
        yield step


tracked = {}


def track(loop, step):
    """So W&B, or another tracker, gets the points of an epoch; after a restart, of all epochs again."""
    if step.what == "eval" and loop.machine == 0:
        tracked[step.epoch] = points(loop, step.epoch)[0]


def test_a_loop_that_stops_by_its_results_and_tracks_them_is_a_script_that_calls_the_loop(
    tmp_path, tiny_model, monkeypatch
):
    """`run_spag.main(stops_early, track)` is the script; it takes the arguments of tools/run_spag.py."""

    class Stages(run_spag.Stages):  # of which only matches leave something
        def run(self, name, command, **variables):
            if name.endswith("_eval"):
                player = name.removesuffix("_eval")
                points = {"epoch1": 0.6, "epoch2": 0.5}[player]
                row = {"player": player, "opponent": "imitation", "words": "all", "role": BOTH, "seed": None}
                row |= {"points": points, "points_interval": [points - 0.05, points + 0.05]}
                settings = {"players": ["imitation", player], "against": "imitation"}
                folder = Path(command[command.index("--output_dir") + 1])
                write_json(folder / "matches.json", {"settings": settings, "results": [row]})

    # Run it: the third epoch does not begin.
    monkeypatch.setattr(run_spag, "Stages", Stages)
    (tmp_path / "words.txt").write_text("apple\n", encoding="utf-8")
    words = {"model": tiny_model, "words": tmp_path / "words.txt", "output": tmp_path / "out", "report": "false"}
    words |= {"match.words": tmp_path / "words.txt", "rewards.sft_data_path": "", "processes": 1, "deepspeed": "none"}
    script = partial(run_spag.main, stops_early, track)
    call(script, *(f"{name}={value}" for name, value in words.items()))
    assert tracked == {1: 0.6, 2: 0.5}
