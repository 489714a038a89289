"""Evaluation by match: who meets whom, runs that are killed and resumed, what stays in memory, and the files."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT
from forks import python

from tools import evaluate_games
from tools.engine import model as models
from tools.engine.slots import SlotEngine
from tools.games import taboo
from tools.matches.stats import ALL, BOTH, Match, pairs
from tools.selfplay import play
from tools.selfplay.files import EpisodeFiles
from utils import read_json_or_jsonl, run_program, write_json

PLAYED, HELD_OUT = ["one", "two", "three", "four", "one"], ["café", "five", "six"]  # a word that stands there twice

GAME = taboo.Taboo()


# --- the program ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with two word lists and short prompts, which make games on a tiny model quick."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "played.txt").write_text("\n".join(PLAYED) + "\n", encoding="utf-8")
    (folder / "more.txt").write_text("\n".join(HELD_OUT) + "\n", encoding="utf-8")
    rules = [f"Rule {number}: {{max_turns}} turns.\n" for number in range(8)]
    write_json(
        folder / "prompts.json",
        {"rules": rules, "attacker_instruction": "Hide `{target_word}`.", "defender_instruction": "Guess."},
    )
    return folder


@pytest.fixture(scope="session")
def third_model(tmp_path_factory, other_model) -> str:
    """The folder of `other_model` elsewhere: a player of its own, of the same weights."""
    return str(shutil.copytree(other_model, tmp_path_factory.mktemp("third") / "model"))


def flags(place, named, output, **changes):
    """A command line with short games; a list is a flag of several values, None leaves a flag out."""
    values = {
        "players": [f"{name}={folder}" for name, folder in named.items()],
        "words": [place / "played.txt", f"held_out={place / 'more.txt'}"],
        "output_dir": output,
        "seeds": [0, 1],
        "games_per_word": 2,
        "max_turns": 2,
        "max_length": 256,
        "max_new_tokens": 4,
        "per_device_eval_batch_size": 8,
        "logging_steps": 0,
        "prompt_templates": place / "prompts.json",
    } | changes
    arguments = []
    for name, value in values.items():
        if value is not None:
            arguments += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return arguments


def run_here(arguments, monkeypatch):
    """The program in this process."""
    monkeypatch.setattr(sys, "argv", ["tools/evaluate_games.py", *arguments])
    run_program(evaluate_games.main)


def start(arguments, processes=1):
    """The program in processes of its own."""
    command = [python()]
    if processes > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
        command += ["--monitor_interval=0.1"]
    environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, "-m", "tools.evaluate_games", *arguments], cwd=ROOT, env=environment, **pipes)


def games_of(folder):
    return read_json_or_jsonl(folder / "games_results.json")


def matches_of(folder):
    return json.loads((folder / "matches.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def stored_lines(folder):
    """Whole lines of all rank files."""
    text = b"".join(path.read_bytes().rpartition(b"\n")[0] + b"\n" for path in folder.glob("games_rank*.jsonl"))
    return [line for line in text.split(b"\n") if line]


def expected_games(pairs, seeds=(0, 1), games_per_word=2):
    """How often each (attacker, defender, list, seed, word) is to be played."""
    lists = {"played": PLAYED, "held_out": HELD_OUT}
    return Counter(
        (*pair, name, seed, word)
        for pair in pairs
        for name, words in lists.items()
        for seed in seeds
        for word in words * games_per_word
    )


def assert_complete(folder, pairs):
    """Every game once, and in every row of the matches just its games."""
    games = games_of(folder)
    played = Counter((*(game[field] for field in Match.keys(GAME)), game["target_word"]) for game in games)
    assert played == expected_games(pairs)
    assert [game["index"] for game in games] == list(range(len(games)))
    for game in games:
        verdict = GAME.judge(game["history"], game["target_word"], game["max_turns"])
        assert (game["outcome"], game["length"]) == verdict
    for row in matches_of(folder)["results"]:
        sides = [(taboo.ATTACKER, "attacker", "defender"), (taboo.DEFENDER, "defender", "attacker")]
        own = [
            game
            for role, player, opponent in sides
            for game in games
            if row["role"] in (role, BOTH)
            and (game[player], game[opponent]) == (row["player"], row["opponent"])
            and row["words"] in (ALL, game["words"])
            and row["seed"] in (None, game["seed"])
        ]
        assert row["games"] == len(own) == row["wins"] + row["losses"] + row["ties"] > 0
        assert row["ties"] == sum(game["outcome"] == taboo.TIED for game in own)
        assert row["breaches"] == sum(game["outcome"] == taboo.ATTACKER_BREAKS for game in own)


def test_three_players_meet_and_the_files_agree(
    place, tiny_model, other_model, third_model, tmp_path, monkeypatch, capsys
):
    players = {"imitation": tiny_model, "epoch1": other_model, "epoch2": third_model}
    run_here(flags(place, players, tmp_path), monkeypatch)
    assert_complete(tmp_path, pairs(list(players)))
    results = matches_of(tmp_path)
    keys = {(row["words"], row["role"], row["seed"]) for row in results["results"]}
    assert keys == {
        (words, role, seed)
        for words in ("played", "held_out", ALL)
        for role in (*GAME.roles, BOTH)
        for seed in (None, 0, 1)
    }
    assert len(results["results"]) == 6 * len(keys)
    assert results["games_path"] == "games_results.json"
    assert results["settings"]["players"] == list(players)
    assert results["settings"]["player epoch2"]["sha256"] == results["settings"]["player epoch1"]["sha256"]
    text = (tmp_path / "matches.txt").read_text()
    assert capsys.readouterr().out.endswith(text)


def test_a_match_does_not_depend_on_those_before_it(
    place, tiny_model, other_model, third_model, tmp_path, monkeypatch
):
    players = {"a": tiny_model, "b": other_model, "c": third_model}
    run_here(flags(place, players, tmp_path / "all", games_per_word=1), monkeypatch)
    run_here(flags(place, players, tmp_path / "c", games_per_word=1, against="c"), monkeypatch)

    def of_c(folder):
        games = [game | {"index": None} for game in games_of(folder) if "c" in (game["attacker"], game["defender"])]
        return sorted(games, key=json.dumps)

    assert of_c(tmp_path / "all") == of_c(tmp_path / "c")
    assert len(of_c(tmp_path / "c")) == 4 * 2 * 8

    def said(attacker, seed):
        games = games_of(tmp_path / "all")
        return [game["history"] for game in games if (game["attacker"], game["seed"]) == (attacker, seed)]

    # Of the same model, against the same opponent: with equal draws, the games would be the same.
    assert said("b", 0)[:8] != said("c", 0)[:8]
    assert said("b", 0)[:8] != said("b", 1)[:8]


def test_only_the_two_models_of_a_match_are_in_memory(
    place, tiny_model, other_model, third_model, tmp_path, monkeypatch
):
    """When a model is loaded, only one that the next match needs too may still be there."""
    alive, loads = weakref.WeakSet(), []
    load = models.load_local_model

    def load_and_watch(folder, *args, **how):
        loads.append((Path(folder).name, len(alive)))
        model = load(folder, *args, **how)
        alive.add(model.model)
        return model

    monkeypatch.setattr(models, "load_local_model", load_and_watch)
    players = {"a": tiny_model, "b": other_model, "c": third_model}
    run_here(flags(place, players, tmp_path, seeds=[0], max_words=2, games_per_word=1), monkeypatch)
    assert [number for _, number in loads] == [0, 1, 1, 1]  # a and b; then c for b; then b for a
    gc.collect()
    assert not alive


def test_models_are_loaded_and_run_in_one_thread(place, tiny_model, other_model, tmp_path, monkeypatch):
    """Else OpenMP holds helper threads for two, more than a small machine has cores, and they sleep between tasks."""
    threads = set()

    def noting(function):
        return lambda *args, **how: threads.add(threading.get_ident()) or function(*args, **how)

    for name in ("use_own_gpu", "load_local_model"):
        monkeypatch.setattr(models, name, noting(getattr(models, name)))
    monkeypatch.setattr(SlotEngine, "__init__", noting(SlotEngine.__init__))
    monkeypatch.setattr(SlotEngine, "run", noting(SlotEngine.run))
    run_here(flags(place, {"a": tiny_model, "b": other_model}, tmp_path, max_words=1), monkeypatch)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_two_players_with_the_same_model_share_it(place, tiny_model, tmp_path, monkeypatch):
    loads = []
    load = models.load_local_model
    monkeypatch.setattr(models, "load_local_model", lambda *args, **how: loads.append(args) or load(*args, **how))
    run_here(flags(place, {"a": tiny_model, "b": os.path.relpath(tiny_model)}, tmp_path, max_words=1), monkeypatch)
    assert len(loads) == 1


@pytest.mark.kills
def test_a_killed_process_loses_only_games_in_flight_and_two_processes_end_what_it_began(
    place, tiny_model, other_model, tmp_path
):
    arguments = flags(place, {"a": tiny_model, "b": other_model}, tmp_path, max_new_tokens=16)
    process = start(arguments)
    while len(stored_lines(tmp_path)) < 20:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    process.kill()
    process.communicate()
    kept = stored_lines(tmp_path)
    assert not (tmp_path / "matches.json").exists()
    out, err = (process := start(arguments, processes=2)).communicate(timeout=120)
    assert process.returncode == 0, err
    assert set(kept) <= set(stored_lines(tmp_path))
    assert_complete(tmp_path, pairs(["a", "b"]))
    assert Counter(json.loads(line)["index"] for line in stored_lines(tmp_path)) == Counter(range(2 * 2 * 2 * 8))
    own = [game["index"] for game in read_json_or_jsonl(tmp_path / "games_rank1.jsonl")]
    assert own and all(index % 2 == 1 for index in own)
    assert (tmp_path / "matches.txt").read_text() in out


class TestOneProcess:
    def test_a_player_against_itself(self, place, tiny_model, tmp_path, monkeypatch):
        run_here(flags(place, {"a": tiny_model}, tmp_path, words=[place / "played.txt"], seeds=None), monkeypatch)
        assert len(games_of(tmp_path)) == 2 * len(PLAYED)
        rows = matches_of(tmp_path)["results"]
        assert {(row["role"], row["seed"]) for row in rows} == {(role, s) for role in GAME.roles for s in (None, 0)}
        assert all(row["words"] == "played" and row["games"] == 2 * len(PLAYED) for row in rows)

    def test_greedy_games_are_played_once(self, place, tiny_model, other_model, tmp_path, monkeypatch):
        changes = {"task_type": "testing", "seeds": None, "games_per_word": None}
        players = {"a": tiny_model, "b": other_model}
        for name in ("first", "again"):
            run_here(flags(place, players, tmp_path / name, **changes), monkeypatch)
        assert len(games_of(tmp_path / "first")) == 2 * (len(PLAYED) + len(HELD_OUT))
        assert games_of(tmp_path / "first") == games_of(tmp_path / "again")

    def test_a_finished_evaluation_is_put_together_again_without_a_model(
        self, place, tiny_model, tmp_path, monkeypatch
    ):
        arguments = flags(place, {"a": tiny_model}, tmp_path, max_words=2)
        run_here(arguments, monkeypatch)
        names = sorted(path.name for path in tmp_path.iterdir() if not re.search("rank|settings|summary", path.name))
        assert {"games_results.json", "matches.json", "matches.txt"} <= set(names)
        before = [(tmp_path / name).read_bytes() for name in names]
        for name in names:
            (tmp_path / name).unlink()
        with monkeypatch.context() as patch:
            patch.setattr(models, "load_local_model", None)
            run_here(arguments, patch)
        assert [(tmp_path / name).read_bytes() for name in names] == before

    def test_what_was_played_with_other_players_or_settings_is_refused(
        self, place, tiny_model, other_model, tmp_path, monkeypatch, capsys
    ):
        model = shutil.copytree(tiny_model, tmp_path / "model")
        run_here(flags(place, {"a": model}, tmp_path / "out", max_words=1), monkeypatch)
        shutil.copytree(other_model, model, dirs_exist_ok=True)
        for changes, message in (
            ({}, "player a: .* then, .* now"),
            ({"games_per_word": 3}, "games_per_word: 2 then, 3 now"),
            ({"words": [f"other={place / 'played.txt'}"]}, "words other: None then"),
        ):
            with pytest.raises(SystemExit):
                run_here(flags(place, {"a": model}, tmp_path / "out", max_words=1, **changes), monkeypatch)
            message += ".*use another --output_dir, or --overwrite True"
            assert re.search(message, capsys.readouterr().err.splitlines()[-1])

    def test_overwriting_takes_the_old_results_away_at_once(self, place, tiny_model, tmp_path, monkeypatch):
        """Who finds matches.json may take the evaluation for finished."""
        run_here(flags(place, {"a": tiny_model}, tmp_path, max_words=2), monkeypatch)
        stored = EpisodeFiles.append

        def append(files, game):
            if len(stored_lines(tmp_path)) == 3:
                raise OSError("disk full")
            stored(files, game)

        arguments = flags(place, {"b": tiny_model}, tmp_path, max_words=2, overwrite=True)
        with monkeypatch.context() as patch:
            patch.setattr(EpisodeFiles, "append", append)
            with pytest.raises(RuntimeError, match="the games played so far are safe"):
                run_here(arguments, patch)
        assert not list(tmp_path.glob("matches.*"))
        assert len(stored_lines(tmp_path)) == 3

    def test_without_matplotlib_there_is_all_but_the_plot(self, place, tiny_model, tmp_path, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        run_here(flags(place, {"a": tiny_model}, tmp_path, max_words=1), monkeypatch)
        assert capsys.readouterr().err.count("pip install matplotlib") == 1
        assert {path.name for path in tmp_path.glob("matches.*")} == {"matches.json", "matches.txt"}

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"players": ["a"]}, "expected NAME=MODEL, got 'a'"),
            ({"players": ["a=./missing"]}, "./missing: no such folder"),
            ({"players": ["a=x", "a=y"]}, "--players names a twice"),
            ({"words": ["missing.txt"]}, "missing.txt"),
            ({"words": ["all=words.txt"]}, "--words names a list 'all'"),
            ({"words": ["a.txt", "b/a.txt"]}, "--words names a twice"),
            ({"seeds": [1, 1], "games_per_word": 0}, "--games_per_word is 0; .*; --seeds names 1 twice"),
            ({"against": "b"}, "--against b is none of the --players a"),
            ({"task_type": "testing"}, "--task_type testing plays a word alike each time"),
            ({"players": ["a\udcff=x"]}, r"'a\\udcff' is no name of a player or word list"),
            ({"temperature": 0}, "--temperature is 0.0"),
            ({"seed": 1}, "unknown flag --seed; did you mean --seeds?"),
        ],
    )
    def test_bad_input_ends_with_one_line_before_a_model_is_loaded(
        self, changes, message, place, tiny_model, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr(play, "Lineup", None)
        with pytest.raises(SystemExit) as stop:
            run_here(flags(place, {"a": tiny_model}, tmp_path / "out", **changes), monkeypatch)
        assert stop.value.code == 2
        assert re.search(message, capsys.readouterr().err.splitlines()[-1])
        assert not (tmp_path / "out").exists()
