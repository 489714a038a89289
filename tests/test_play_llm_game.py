"""Self-play: one game by the rules, many at once, and runs of the program that are killed, resumed and merged."""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from forks import python
from scripted import ScriptedPlayer

import utils
from tools import play_llm_game
from tools.engine.generate import BatchEngine
from tools.engine.model import Sampling, load_local_model
from tools.flags import parse_flags
from tools.games import prompts, taboo
from tools.players.player import Reply
from tools.selfplay import play
from tools.selfplay.files import EpisodeFiles
from tools.selfplay.lineup import Lineup
from tools.selfplay.play import play_game, play_games
from tools.selfplay.progress import describe
from utils import read_json_or_jsonl, read_words, run_program, write_json

GAME = taboo.Taboo()
GUESS = "I know the word! It is `{}`!"
WORDS = [f"word{number}" for number in range(35)] + ["word3", "café"]  # one of them twice, one not ASCII
STEM = "im_llama2_sampling_all_words"


# --- one game ------------------------------------------------------------------------------------------------------


def scripted_game(word, attacker_lines, defender_lines, max_turns=3, game=GAME):
    """The episode, and the turns that the players were asked for, in their order."""
    players = {"attacker": ScriptedPlayer([attacker_lines]), "defender": ScriptedPlayer([defender_lines])}
    episode = asyncio.run(play_game(game, word, players, max_turns=max_turns))
    asked = sorted((turn for player in players.values() for turn in player.asked), key=lambda turn: len(turn.history))
    return episode, asked


@pytest.mark.parametrize(
    "attacker_lines, defender_lines, outcome, length",
    [
        (["Hello!"], [GUESS.format("art")], taboo.DEFENDER_WINS, 2),
        (["Hello!", "Well?"], ["Hi.", GUESS.format("music")], taboo.ATTACKER_WINS, 4),
        (["Hello!", "Well?", "So?"], ["Hi.", "Hm.", "That is art."], taboo.ATTACKER_WINS, 6),
        (["Hello!", "I like art."], ["Hi."], taboo.ATTACKER_BREAKS, 3),
        (["Hello!", GUESS.format("music")], ["Hi."], taboo.ATTACKER_BREAKS, 3),
        (["Hello!", "Well?", "So?"], ["Hi.", "Hm.", "No idea."], taboo.TIED, 6),
        # The defender begins the sentence of a guess and gets it wrong: play stops, nothing is decided.
        (["Hello!"], ["I know the word, I think."], taboo.TIED, 2),
    ],
)
def test_a_game_ends_with_its_decisive_message(attacker_lines, defender_lines, outcome, length):
    episode, asked = scripted_game("art", attacker_lines, defender_lines)
    assert (episode["outcome"], episode["length"], len(episode["history"])) == (outcome, length, length)
    assert [turn.role for turn in asked] == [GAME.roles[place % 2] for place in range(length)]
    assert [message["role"] for message in episode["history"]] == [turn.role for turn in asked]


def test_each_player_is_shown_its_prompt_and_only_the_attacker_the_word():
    episode, asked = scripted_game("art", ["Hello!", "Well?", "So?"], ["Hi.", "Hm.", "No idea."])
    history = episode["history"]
    for place, turn in enumerate(asked):
        assert turn.prompt() == prompts.play_prompt(GAME, history[:place], "art", 3)
        assert turn.history == tuple(history[:place])
        assert turn.secrets == ({"target_word": "art"} if turn.role == "attacker" else {})
        assert (turn.max_turns, turn.index) == (3, 0)
        assert ("`art`" in turn.prompt()) == (turn.role == "attacker")


def test_an_episode_says_how_each_message_came_about():
    class Player:
        def __init__(self, *replies):
            self.replies = iter(replies)

        async def reply(self, turn):
            return next(self.replies)

    attacker = Player(Reply(" Hello! \n", "stop", 3), Reply("", "length", 9, prompt_cut=True))
    defender = Player(Reply("Hi.", "stop", 2), Reply("Hm.", "stop", 4))
    episode = asyncio.run(play_game(GAME, "art", {"attacker": attacker, "defender": defender}, max_turns=2, index=7))
    assert episode == {
        "index": 7,
        "target_word": "art",
        "max_turns": 2,
        "history": [
            {"role": "attacker", "content": "Hello!"},  # stripped, once, whoever the player
            {"role": "defender", "content": "Hi."},
            {"role": "attacker", "content": ""},  # an empty reply stays an empty message
            {"role": "defender", "content": "Hm."},
        ],
        "outcome": "tied game",
        "length": 4,
        "replies": [
            {"finish_reason": "stop", "tokens": 3, "prompt_cut": False},
            {"finish_reason": "stop", "tokens": 2, "prompt_cut": False},
            {"finish_reason": "length", "tokens": 9, "prompt_cut": True},
            {"finish_reason": "stop", "tokens": 4, "prompt_cut": False},
        ],
    }


def test_whole_word_matching_lets_start_pass_for_art():
    lines = ["Hello!", "Well?", "So?"], ["Hi.", "We start.", "No idea."]
    assert scripted_game("art", *lines)[0]["length"] == 4
    episode, _ = scripted_game("art", *lines, game=taboo.Taboo("word"))
    assert (episode["outcome"], len(episode["history"])) == (taboo.TIED, 6)


def test_a_finished_games_place_goes_to_the_next_word_at_once():
    """Five games of different lengths, two at a time: there are always two, until the words run out."""
    attacker_lines = [["Hello!"] * 3] * 5
    defender_lines = [["Hi."] * (turns - 1) + [GUESS.format("art")] for turns in (1, 3, 2, 2, 1)]
    attacker, defender = ScriptedPlayer(attacker_lines), ScriptedPlayer(defender_lines)
    finished, alive = [], []

    class Watching:
        """Answers a round after it was asked, so that the games move side by side."""

        def __init__(self, player):
            self.player = player

        async def reply(self, turn):
            alive.append(turn.index)
            await asyncio.sleep(0)
            return await self.player.reply(turn)

    games = play_games(
        GAME,
        enumerate(["art"] * 5),
        {"attacker": Watching(attacker), "defender": Watching(defender)},
        concurrent_games=2,
        on_episode=lambda episode: finished.append((episode["index"], len(episode["history"]) // 2)),
        max_turns=3,
    )
    asyncio.run(games)
    assert finished == [(0, 1), (2, 2), (1, 3), (4, 1), (3, 2)]
    # One message of each live game per round: 2 begins in the round after 0's last, so do 3 and 4 after 2 and 1.
    assert alive == [0, 1, 0, 1, 2, 1, 2, 1, 2, 1, 2, 1, 3, 4, 3, 4, 3, 3]


def test_what_models_write_is_shown_without_steering_the_terminal_or_forging_a_verdict():
    said = [{"role": "attacker", "content": "Hm\x1b[2J\n--- defender wins ---"}]
    text = describe({"target_word": "a\x07b", "history": said, "outcome": taboo.TIED})
    assert text == "--- a\ufffdb ---\nattacker: Hm\ufffd[2J\n    --- defender wins ---\n--- tied game ---"


# --- word lists and files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, words",
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\ntwo", ["one", "two"]),
        (b"\xef\xbb\xbfone\n\n  \n two \none\n", ["one", "two", "one"]),
        ("café\n".encode(), ["café"]),
    ],
)
def test_word_lists_are_read_as_they_come(content, words, tmp_path):
    (tmp_path / "words.txt").write_bytes(content)
    assert read_words(tmp_path / "words.txt") == words


@pytest.mark.parametrize(
    "content, message", [(b"", "no words"), (b"\n \r\n", "no words"), (b"one\ncaf\xe9\n", ":2: not UTF-8")]
)
def test_an_unusable_word_list_is_refused(content, message, tmp_path):
    (tmp_path / "words.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_words(tmp_path / "words.txt")


def episode(index, word, tokens=5):
    return {
        "index": index,
        "target_word": word,
        "max_turns": 1,
        "history": [{"role": "attacker", "content": "Hello!"}, {"role": "defender", "content": ""}],
        "outcome": taboo.TIED,
        "length": 2,
        "replies": [{"finish_reason": reason, "tokens": tokens, "prompt_cut": False} for reason in ("stop", "length")],
    }


def start(folder, words, settings=None, **how):
    files = EpisodeFiles(folder, "run", words, GAME)
    finished = files.start(settings or {"seed": 1}, **how)
    return files, finished.missing()


def start_elsewhere(folder, settings, **how):
    """What another process is told that starts a run here: "" if it may."""
    program = f"""
from tools.games import load_game
from tools.selfplay.files import EpisodeFiles
try:
    EpisodeFiles({str(folder)!r}, "run", ["a", "b"], load_game()).start({settings!r}, **{how!r})
except ValueError as error:
    print(error)
"""
    return subprocess.run(
        [python(), "-c", program], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def contents(folder):
    """Every file and folder, with its content; locks, which opening them here would end, by name."""
    return {
        path: path.read_bytes() if path.is_file() and path.suffix != ".lock" else None for path in folder.rglob("*")
    }


def close(files):
    files.own_file.close()


class TestEpisodeFiles:
    def test_finished_games_survive_and_are_merged_in_word_order(self, tmp_path):
        files, missing = start(tmp_path, ["a", "b", "c"])
        assert missing == [0, 1, 2]
        for index in (2, 0):
            files.append(episode(index, "abc"[index]))
        close(files)
        files, missing = start(tmp_path, ["a", "b", "c"])
        assert missing == [1]
        files.append(episode(1, "b"))
        summary = files.merge(seconds=2.0, tokens_before=20)
        assert [game["target_word"] for game in read_json_or_jsonl(files.results_path)] == ["a", "b", "c"]
        assert summary == {
            "games": 3,
            "outcomes": {"attacker wins": 0, "defender wins": 0, "attacker breaks the rules": 0, "tied game": 3},
            "defender_share_of_decided": None,
            "mean_length": 2.0,
            "messages": 6,
            "empty_replies": 3,
            "cut_off_replies": 3,
            "cut_prompts": 0,
            "new_tokens": 30,
            "tokens_per_second": 5.0,
        }
        assert json.loads(files.summary_path.read_text()) == summary

    def test_a_line_that_a_kill_cut_off_is_played_again(self, tmp_path):
        files, _ = start(tmp_path, ["a", "b"])
        files.append(episode(0, "a"))
        files.own_file.write(json.dumps(episode(1, "b")).encode()[:-9])
        close(files)
        files, missing = start(tmp_path, ["a", "b"])
        assert missing == [1]
        files.append(episode(1, "b"))
        assert files.merge(seconds=1, tokens_before=0)["games"] == 2

    def test_a_line_that_another_rank_is_writing_is_left_alone(self, tmp_path):
        files, _ = start(tmp_path, ["a", "b"])
        half = json.dumps(episode(1, "b"))[:50]
        (tmp_path / "run_rank1.jsonl").write_text(json.dumps(episode(0, "a")) + "\n" + half)
        assert files.finished().missing() == [1]
        assert (tmp_path / "run_rank1.jsonl").read_text().endswith(half)

    def test_other_settings_are_refused_and_the_difference_named(self, tmp_path):
        model = {"path": "/models/a", "sha256": "0" * 64}
        files, _ = start(tmp_path, ["a"], {"seed": 1, "model": model})
        files.append(episode(0, "a"))
        close(files)
        close(start(tmp_path, ["a"], {"seed": 1, "model": model | {"path": "/elsewhere/a"}})[0])
        with pytest.raises(ValueError, match=r"seed: 1 then, 2 now\); use another --output_dir"):
            start(tmp_path, ["a"], {"seed": 2, "model": model})
        with pytest.raises(ValueError, match=r"model: /elsewhere/a \(sha256 0000\w*\) then, /models/a \(sha256 1111"):
            start(tmp_path, ["a"], {"seed": 1, "model": model | {"sha256": "1" * 64}})

    def test_a_launch_that_failed_before_its_first_game_binds_nobody(self, tmp_path):
        close(start(tmp_path, ["a"], {"seed": 1})[0])
        close(start(tmp_path, ["a"], {"seed": 2})[0])

    def test_settings_that_cannot_be_read_are_named(self, tmp_path):
        files, _ = start(tmp_path, ["a"])
        files.append(episode(0, "a"))
        close(files)
        files.settings.path.write_text("{}")
        with pytest.raises(ValueError, match="run_settings.json: not the settings of a run"):
            start(tmp_path, ["a"])

    def test_overwrite_leaves_a_run_that_is_playing_alone(self, tmp_path):
        files, _ = start(tmp_path, ["a", "b"])
        files.append(episode(0, "a"))
        assert "another process is writing to this run" in start_elsewhere(tmp_path, {"seed": 1}, overwrite=True)
        files.append(episode(1, "b"))
        assert files.merge(seconds=1, tokens_before=0)["games"] == 2

    @pytest.mark.parametrize("seed, overwrite", [(1, False), (2, False), (2, True)])
    def test_a_start_beside_a_run_that_loads_its_model_is_refused_and_has_written_nothing(
        self, tmp_path, seed, overwrite
    ):
        """No game is there yet that would bind anybody; the lock does."""
        start(tmp_path / "out", ["a"], {"seed": 1})
        before = contents(tmp_path)
        message = start_elsewhere(tmp_path / "out", {"seed": seed}, overwrite=overwrite)
        assert "another process is writing to this run; end that one first" in message
        assert contents(tmp_path) == before

    def test_a_start_with_other_settings_has_written_nothing(self, tmp_path):
        files, _ = start(tmp_path, ["a"])
        files.append(episode(0, "a"))
        close(files)
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=r"made with other settings \(seed: 1 then, 2 now\)"):
            start(tmp_path, ["a"], {"seed": 2})
        assert contents(tmp_path) == before

    def test_processes_that_no_launcher_started_are_refused(self, tmp_path, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        with pytest.raises(ValueError, match="several processes are started by torchrun"):
            start(tmp_path / "out", ["a", "b"])
        assert not (tmp_path / "out").exists()

    def test_a_lock_dies_with_its_owner_although_a_child_lives_on(self, tmp_path):
        owner = f"""
import os, subprocess, sys
from tools.games import load_game
from tools.selfplay.files import EpisodeFiles
EpisodeFiles({str(tmp_path)!r}, "run", ["a"], load_game()).start({{"seed": 1}})
if os.fork():
    os.kill(os.getpid(), 9)
print(os.getpid(), flush=True)
os.read(0, 1)  # until the test ends
"""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", owner], cwd=ROOT, env=environment(), **pipes) as process:
            assert psutil.pid_exists(int(process.stdout.readline()))
            assert start_elsewhere(tmp_path, {"seed": 1}) == ""

    def test_nothing_hidden_but_locks_is_left_and_the_summary_of_a_finished_run_stays(self, tmp_path, caplog):
        files, _ = start(tmp_path, ["a"])
        files.append(episode(0, "a"))
        summary = files.merge(seconds=2, tokens_before=0)
        with caplog.at_level("INFO"):
            assert files.merge(seconds=0, tokens_before=10) == summary
        assert caplog.messages == [f"{files.results_path}: all is there"]
        assert {path.suffix for path in tmp_path.glob(".*")} == {".lock"}

    def test_overwrite_deletes_the_earlier_run_and_nothing_else(self, tmp_path):
        files, _ = start(tmp_path, ["a"])
        files.append(episode(0, "a"))
        files.merge(seconds=1, tokens_before=0)
        close(files)
        (tmp_path / "run_rank5.jsonl").write_text(json.dumps(episode(0, "a")) + "\n")
        (tmp_path / "run_2_rank0.jsonl").write_text("of another run\n")
        _, missing = start(tmp_path, ["b"], {"seed": 2}, overwrite=True)
        assert missing == [0]
        assert {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"} == {
            "run_2_rank0.jsonl",
            "run_rank0.jsonl",
            "run_settings.json",
        }

    def test_a_rank_that_torchrun_starts_again_keeps_the_games(self, tmp_path, monkeypatch):
        files, _ = start(tmp_path, ["a"], overwrite=True)
        files.append(episode(0, "a"))
        close(files)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert start(tmp_path, ["a"], overwrite=True)[1] == []

    def test_files_of_other_runs_are_never_merged(self, tmp_path):
        (tmp_path / "run_b_rank0.jsonl").write_text(json.dumps(episode(0, "a")) + "\n")
        files, missing = start(tmp_path, ["a"])
        assert missing == [0]
        files.append(episode(0, "a"))
        close(files)
        (tmp_path / "run_settings.json").unlink()
        with pytest.raises(ValueError, match="run_rank0.jsonl: no run_settings.json beside it"):
            start(tmp_path, ["a"])

    def test_a_larger_number_of_games_extends_a_run_and_a_smaller_one_takes_its_beginning(self, tmp_path):
        files, _ = start(tmp_path, ["a", "b"])
        for index, word in enumerate("ab"):
            files.append(episode(index, word))
        close(files)
        files, missing = start(tmp_path, ["a", "b", "c"])
        assert missing == [2]
        close(files)
        files, missing = start(tmp_path, ["a"])
        assert (missing, files.merge(seconds=1, tokens_before=0)["games"]) == ([], 1)

    def test_a_game_found_twice_counts_once(self, tmp_path):
        files, _ = start(tmp_path, ["a"])
        files.append(episode(0, "a"))
        (tmp_path / "run_rank3.jsonl").write_text(json.dumps(episode(0, "a", tokens=9)) + "\n")
        assert files.merge(seconds=1, tokens_before=0)["new_tokens"] == 10

    @pytest.mark.parametrize(
        "line, message",
        [
            ("{}", "not a finished game"),
            ('{"index": 0', "not JSON"),
            (json.dumps(episode(0, "b")), "word 0 is 'b', in the word list 'c'"),
            (json.dumps(episode(0, "c") | {"replies": [{"finish_reason": "stop"}]}), "not a finished game"),
            (json.dumps(episode(0, "c") | {"history": [{"role": None, "content": ""}]}), "not a finished game"),
            (json.dumps(episode(0, "c") | {"history": [{"role": "attacker", "content": True}]}), "not a finished"),
            (json.dumps(episode(0, "c") | {"outcome": "draw"}), "not a finished game"),
            (json.dumps(episode(0, "c") | {"length": None}), "not a finished game"),
            (json.dumps(episode(-1, "c")), "not a finished game"),
            (json.dumps(episode(0.0, "c")), "not a finished game"),
            ("[" * 100_000, "not JSON"),
            ("[]", "not a finished game"),
        ],
    )
    def test_a_rank_file_with_something_else_in_it_is_named_with_its_line(self, line, message, tmp_path):
        close(start(tmp_path, ["c", "a"])[0])
        (tmp_path / "run_rank0.jsonl").write_text("\n".join([json.dumps(episode(1, "a")), line, ""]))
        with pytest.raises(ValueError, match=f"run_rank0.jsonl:2: {message}"):
            start(tmp_path, ["c", "a"])

    @pytest.mark.parametrize("kind", ["link", "pipe"])
    def test_only_regular_files_are_written_to(self, kind, tmp_path):
        (tmp_path / "elsewhere").write_text("precious")
        path = tmp_path / "run_rank0.jsonl"
        path.symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(path)
        with pytest.raises(ValueError, match="run_rank0.jsonl: "):
            start(tmp_path, ["a"])
        assert (tmp_path / "elsewhere").read_text() == "precious"

    def test_a_planted_lock_is_not_followed(self, tmp_path):
        (tmp_path / ".run_rank0.lock").symlink_to(tmp_path / "made")
        with pytest.raises(OSError, match="symbolic link"):
            start(tmp_path, ["a"])
        assert not (tmp_path / "made").exists()

    def test_temporary_files_of_killed_runs_are_deleted_at_the_next_start(self, tmp_path):
        left = tmp_path / ".run_settings.json.0123456789ab.tmp"
        left.write_text("half")
        os.utime(left, (0, 0))
        start(tmp_path, ["a"])
        assert not list(tmp_path.glob("*.tmp"))

    def test_two_processes_cannot_write_to_one_rank_file(self, tmp_path):
        files, _ = start(tmp_path, ["a"])
        assert "another process is writing to this run" in start_elsewhere(tmp_path, {"seed": 1})
        close(files)


# --- the program ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with a word list and short prompts, which make games on a tiny model quick."""
    folder = tmp_path_factory.mktemp("play")
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    rules = [f"Rule {number}: {{max_turns}} turns.\n" for number in range(8)]
    write_json(
        folder / "prompts.json",
        {"rules": rules, "attacker_instruction": "Hide `{target_word}`.", "defender_instruction": "Guess."},
    )
    return folder


def flags(place, model, output, **changes):
    """The flags of the command that the README shows, with short games and a batch size of its own."""
    values = {
        "max_turns": 2,
        "attacker_model_name_or_path": model,
        "defender_model_name_or_path": model,
        "model_prefix": "im_llama2",
        "data_path": place / "words.txt",
        "output_dir": output,
        "per_device_eval_batch_size": 4,
        "task_type": "sampling",
        "data_suffix": "all_words",
        "max_length": 256,
        "max_new_tokens": 4,
        "logging_steps": 5,
        "prompt_templates": place / "prompts.json",
    }
    return [item for name, value in {**values, **changes}.items() for item in (f"--{name}", str(value))]


def run_here(arguments, monkeypatch):
    """The program in this process."""
    monkeypatch.setattr(sys, "argv", ["tools/play_llm_game.py", *arguments])
    run_program(play_llm_game.main)


def environment():
    return os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def torchrun(processes, arguments, how=("tools/play_llm_game.py",), executable=None):
    """Start the program under torchrun."""
    command = [executable or python(), "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
    command += ["--monitor_interval=0.1", *how, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes)


def finish(process):
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    return out, err


def results(folder, stem=STEM):
    return read_json_or_jsonl(folder / f"{stem}_results.json")


def rank_lines(folder):
    """Whole lines of all rank files."""
    text = b"".join(path.read_bytes().rpartition(b"\n")[0] + b"\n" for path in folder.glob("*_rank*.jsonl"))
    return [line for line in text.split(b"\n") if line]


def assert_every_word_once(folder):
    games = results(folder)
    assert [game["target_word"] for game in games] == WORDS
    assert [game["index"] for game in games] == list(range(len(WORDS)))
    assert Counter(json.loads(line)["index"] for line in rank_lines(folder)) == Counter(range(len(WORDS)))
    for game in games:
        verdict = GAME.judge(game["history"], game["target_word"], game["max_turns"])
        assert (game["outcome"], game["length"]) == verdict


def test_two_processes_play_every_word_once(place, tiny_model, tmp_path):
    out, err = finish(torchrun(2, flags(place, tiny_model, tmp_path, bf16=True, tf32=True)))
    assert_every_word_once(tmp_path)
    for rank in (0, 1):
        games = read_json_or_jsonl(tmp_path / f"{STEM}_rank{rank}.jsonl")
        assert sorted(game["index"] for game in games) == list(range(rank, len(WORDS), 2))
    summary = json.loads((tmp_path / f"{STEM}_summary.json").read_text())
    assert summary["games"] == len(WORDS) == sum(summary["outcomes"].values())
    assert summary["tokens_per_second"] > 0
    assert json.dumps(summary) in out
    assert "---" in out  # a game to look at
    assert err.count("--tf32 True has no effect") == 1
    settings = json.loads((tmp_path / f"{STEM}_settings.json").read_text())["settings"]
    assert (settings["temperature"], settings["top_k"], settings["bf16"]) == (1.2, 50, True)


def kill_after(process, folder, lines, only_launcher):
    """SIGKILL a launch, or torchrun alone, as soon as so many games are stored; the games that are there then."""
    while len(rank_lines(folder)) < lines:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    launcher = psutil.Process(process.pid)
    named = [each for each in psutil.process_iter(["cmdline"]) if str(folder) in (each.info["cmdline"] or [])]
    ranks = [each for each in named if each != launcher]
    assert ranks
    for doomed in [launcher] if only_launcher else [launcher, *ranks]:
        doomed.kill()
    process.communicate()
    assert not psutil.wait_procs(ranks, timeout=30)[1]  # nobody plays on into the files
    return rank_lines(folder)


@pytest.mark.kills
def test_killed_launches_lose_only_games_in_flight_also_with_other_numbers_of_processes(place, tiny_model, tmp_path):
    arguments = flags(place, tiny_model, tmp_path, max_new_tokens=24)
    kept = []
    for processes, only_launcher in ((2, False), (1, True)):
        lines = len(kept) + random.randint(1, 12)
        started = torchrun(processes, arguments, executable=sys.executable if only_launcher else python())
        now = kill_after(started, tmp_path, lines, only_launcher)
        assert set(kept) <= set(now)
        kept = now
    assert not (tmp_path / f"{STEM}_results.json").exists()
    finish(torchrun(3, arguments, how=("-m", "tools.play_llm_game")))
    assert_every_word_once(tmp_path)
    assert set(kept) <= set(rank_lines(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_launch_that_is_told_to_leave_has_left_within_ten_seconds_and_goes_on(number, place, tiny_model, tmp_path):
    slow = {"max_new_tokens": 24, "min_new_tokens": 24, "max_length": 512, "max_turns": 4, "max_games": 8}
    slow["per_device_eval_batch_size"] = 1
    arguments = flags(place, tiny_model, tmp_path, **slow)
    process = torchrun(2, arguments, executable=python() if number == signal.SIGTERM else sys.executable)
    while len(rank_lines(tmp_path)) < 2:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(number)
    process.communicate(timeout=10)  # before psutil, which would take the exit status away
    assert not psutil.wait_procs(everyone, timeout=10)[1]
    assert process.returncode != 0
    kept = rank_lines(tmp_path)
    assert 2 <= len(kept) < 8
    run = subprocess.run([python(), "-m", "tools.play_llm_game", *arguments], cwd=ROOT, env=environment(), check=True)
    assert run.returncode == 0 and set(kept) <= set(rank_lines(tmp_path))
    assert [game["target_word"] for game in results(tmp_path)] == WORDS[:8]


def test_ranks_end_with_their_launcher_while_they_still_import(place, tiny_model, tmp_path):
    process = torchrun(2, flags(place, tiny_model, tmp_path), executable=sys.executable)
    launcher, ranks = psutil.Process(process.pid), []
    while len(ranks) < 2:
        assert process.poll() is None, process.communicate()[1]
        started = [child for child in launcher.children() if "tools/play_llm_game.py" in child.cmdline()]
        ranks = [child for child in started if "libtorch" in Path(f"/proc/{child.pid}/maps").read_text()]
        time.sleep(0.01)
    launcher.kill()
    assert not psutil.wait_procs(ranks, timeout=10)[1]
    process.communicate()


def test_a_rank_that_fails_makes_the_launch_fail_with_the_reason(place, tiny_model, tmp_path):
    (tmp_path / f"{STEM}_rank1.jsonl").mkdir()  # rank 1 cannot store its games
    process = torchrun(2, flags(place, tiny_model, tmp_path, max_new_tokens=32))
    _, err = process.communicate(timeout=180)
    assert process.returncode != 0
    assert "not a regular file" in err
    assert f"{STEM}_rank1.jsonl" in err
    assert not (tmp_path / f"{STEM}_results.json").exists()


def test_a_process_may_have_no_word_to_play(place, tiny_model, tmp_path):
    finish(torchrun(2, flags(place, tiny_model, tmp_path, max_games=1)))
    assert [game["target_word"] for game in results(tmp_path)] == WORDS[:1]


class TestOneProcess:
    def test_the_same_seed_plays_the_same_games(self, place, tiny_model, tmp_path, monkeypatch):
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            run_here(flags(place, tiny_model, tmp_path / name, seed=seed, max_games=9), monkeypatch)
        first, again, other = ((tmp_path / name / f"{STEM}_results.json").read_bytes() for name in "abc")
        assert first == again != other

    def test_a_finished_run_is_merged_again_without_a_model_and_extended_on_request(
        self, place, tiny_model, tmp_path, monkeypatch
    ):
        run_here(flags(place, tiny_model, tmp_path, max_games=3), monkeypatch)
        before = results(tmp_path)
        (tmp_path / f"{STEM}_results.json").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(play, "Lineup", None)
            run_here(flags(place, tiny_model, tmp_path, max_games=3), patch)
        assert results(tmp_path) == before
        run_here(flags(place, tiny_model, tmp_path, max_games=5), monkeypatch)
        assert results(tmp_path)[:3] == before
        assert len(results(tmp_path)) == 5

    def test_two_models_play_each_its_side(self, place, tiny_model, other_model, tmp_path, monkeypatch):
        """Greedy games of two models: each message is what its own model says to the prompt."""
        changes = {"task_type": "testing", "defender_model_name_or_path": other_model, "max_games": 6}
        run_here(flags(place, tiny_model, tmp_path, **changes), monkeypatch)
        sampling = Sampling(max_length=256, max_new_tokens=4, do_sample=False)
        templates = prompts.load_templates(place / "prompts.json", GAME)
        sides = [load_local_model(Path(folder), sampling) for folder in (tiny_model, other_model)]
        for game in results(tmp_path, "im_llama2_testing_all_words"):
            for place_in_game, message in enumerate(game["history"]):
                prompt = prompts.play_prompt(GAME, game["history"][:place_in_game], game["target_word"], 2, templates)
                (reply,) = BatchEngine(sides[place_in_game % 2], 1).generate([prompt])
                assert message["content"] == reply.text.strip()

    def test_the_same_model_is_loaded_once(self, place, tiny_model, tmp_path, monkeypatch):
        here = parse_flags(play_llm_game.Flags, list(map(str, flags(place, tiny_model, tmp_path))), description="")
        here.defender_model_name_or_path = os.path.relpath(tiny_model)
        players, games = Lineup(here, GAME).build_players(here.names, on_batch=lambda: None)
        assert players["attacker"] is players["defender"]
        assert games == 4

    def test_a_cut_prompt_and_a_cut_off_reply_are_counted(self, place, tiny_model, tmp_path, monkeypatch, capsys):
        run_here(flags(place, tiny_model, tmp_path, max_length=60, max_games=3, allow_cuts=True), monkeypatch)
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        games = results(tmp_path)
        replies = [reply for game in games for reply in game["replies"]]
        assert summary["cut_prompts"] == sum(reply["prompt_cut"] for reply in replies) > 0
        assert summary["cut_off_replies"] == sum(reply["finish_reason"] == "length" for reply in replies)
        assert summary["new_tokens"] == sum(reply["tokens"] for reply in replies)

    def test_opening_prompts_that_lose_rules_are_found_before_a_model_is_loaded(
        self, place, tiny_model, tmp_path, monkeypatch, capsys
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Lineup, "build_players", None)
            with pytest.raises(SystemExit):
                run_here(flags(place, tiny_model, tmp_path / "out", max_length=60, max_games=3), patch)
        message = capsys.readouterr().err.splitlines()[-1]
        assert "error: 100% of the opening prompts lose the beginning of the rules to --max_length" in message
        assert "--allow_cuts True" in message
        whole = len(prompts.play_prompt(GAME, [], "word", 2, prompts.load_templates(place / "prompts.json", GAME))) + 1
        (tmp_path / "words").write_text("word\nart\n" + "x" * 200 + "\n")  # only the attacker's of the last is cut
        changes = {"data_path": tmp_path / "words", "max_length": whole + 60 + 4, "max_games": 3}
        run_here(flags(place, tiny_model, tmp_path / "out", **changes), monkeypatch)
        assert "WARNING 17% of the opening prompts lose" in capsys.readouterr().err

    def test_the_log_says_what_came_of_it_and_where_a_run_continues(
        self, place, tiny_model, tmp_path, monkeypatch, capsys
    ):
        run_here(flags(place, tiny_model, tmp_path, max_games=3), monkeypatch)
        error = capsys.readouterr().err
        assert "_results.json: 3 games: tied game 100%; replies: " in error and "continues" not in error
        run_here(flags(place, tiny_model, tmp_path, max_games=5), monkeypatch)
        assert "continues: 3 of 5 games are there" in capsys.readouterr().err

    @pytest.mark.parametrize("steps, shown", [(0, 0), (1, 3), (1000, 0)])
    def test_a_game_is_shown_every_so_many_batches(
        self, steps, shown, place, tiny_model, tmp_path, monkeypatch, capsys
    ):
        changes = {"logging_steps": steps, "per_device_eval_batch_size": 1, "max_games": 3}
        run_here(flags(place, tiny_model, tmp_path, **changes), monkeypatch)
        out = capsys.readouterr().out
        assert out.count("\n---") + out.startswith("---") == 2 * shown
        assert all((f"--- {word} ---" in out) == bool(shown) for word in WORDS[:3])

    def test_a_model_that_changed_in_its_place_is_refused(
        self, place, tiny_model, other_model, tmp_path, monkeypatch, capsys
    ):
        model = shutil.copytree(tiny_model, tmp_path / "model")
        run_here(flags(place, model, tmp_path / "out", max_games=2), monkeypatch)
        shutil.copytree(other_model, model, dirs_exist_ok=True)
        with pytest.raises(SystemExit) as stop:
            run_here(flags(place, model, tmp_path / "out", max_games=2), monkeypatch)
        assert stop.value.code == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert "attacker_model_name_or_path" in message
        assert "--overwrite True" in message
        run_here(flags(place, model, tmp_path / "out", max_games=2, overwrite=True), monkeypatch)

    def test_a_fault_in_play_keeps_what_was_played_and_shows_where_it_arose(
        self, place, tiny_model, tmp_path, monkeypatch
    ):
        stored = EpisodeFiles.append

        def append(files, game):
            if len(rank_lines(tmp_path)) == 3:
                raise OSError("disk full")
            stored(files, game)

        with monkeypatch.context() as patch:
            patch.setattr(EpisodeFiles, "append", append)
            with pytest.raises(RuntimeError, match="OSError in play; the games played so far are safe"):
                run_here(flags(place, tiny_model, tmp_path, max_games=8), patch)
        assert len(rank_lines(tmp_path)) == 3

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"data_path": "missing.txt"}, "missing.txt"),
            ({"attacker_model_name_or_path": "./missing/model"}, "./missing/model: no such folder"),
            ({"defender_model_name_or_path": str(ROOT / "tools")}, "no config.json"),
            ({"prompt_templates": "missing.json"}, "missing.json: no such file"),
            ({"max_length": 4}, "--max_length 4 leaves no room for a prompt"),
            ({"temperature": 0, "top_p": 1.5}, "--temperature is 0.0; .*; --top_p is 1.5"),
            ({"min_new_tokens": 5}, "--min_new_tokens 5 is above --max_new_tokens 4"),
            ({"bf16": True, "fp16": True}, "--bf16 and --fp16 exclude each other"),
            ({"max_games": 0, "concurrent_games": 0}, "--max_games is 0; .*; --concurrent_games is 0"),
            ({"taboo_max_turns": 0}, "--max_turns is 0; it must be at least 1"),
            ({"model_prefix": "a/b"}, "--model_prefix 'a/b' is no part of a file name"),
            ({"match": "letters"}, "match is 'letters'; it must be one of substring, word"),
            ({"max_game": 3}, "unknown flag --max_game; did you mean --max_games?"),
            ({"bf16": "perhaps"}, "expected True or False, got 'perhaps'"),
        ],
    )
    def test_bad_input_ends_with_one_line_before_a_model_is_loaded(
        self, changes, message, place, tiny_model, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr(play, "Lineup", None)
        with pytest.raises(SystemExit) as stop:
            run_here(flags(place, tiny_model, tmp_path / "out", **changes), monkeypatch)
        assert stop.value.code == 2
        assert re.search(message, capsys.readouterr().err.splitlines()[-1])
        assert not (tmp_path / "out").exists()


def test_folders_that_are_not_shared_are_found_out(tmp_path, monkeypatch):
    """Two machines, each with a folder of its own: rank 1 does not see what rank 0 wrote."""

    class Store:
        def set(self, key, value):
            pass

        def check(self, keys):
            return True

        def get(self, key):
            return json.dumps({"value": {"seed": 1}}).encode()

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setattr(utils, "launch_store", Store)
    monkeypatch.setattr(utils, "SHARING_TIMEOUT", 0)
    files, _ = start(tmp_path, ["a", "b"])
    files.append(episode(1, "b"))
    with pytest.raises(ValueError, match=r"1 games are not there yet, of ranks \[0\] \(a\)"):
        files.merge(seconds=1, tokens_before=0)
    close(files)
    with pytest.raises(ValueError, match="not the folder of rank 0; --overwrite needs one that all share"):
        start(tmp_path, ["a", "b"], overwrite=True)
    (tmp_path / "run_rank0.jsonl").write_text(json.dumps(episode(0, "a")) + "\n")  # brought here
    assert start(tmp_path, ["a", "b"])[0].merge(seconds=1, tokens_before=0)["games"] == 2
