"""Self-play: one game by the rules, many at once, the files of a run, and the program.

faults/ kills the program, damages its files and refuses its flags.
"""

import asyncio
import contextlib
import json
import re
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import (
    ENVIRONMENT,
    TORCHRUN,
    call,
    descendants,
    finish,
    play_flags,
    start,
    wait_for,
    write_place,
)
from scripted import ScriptedPlayer

from tools import play_llm_game
from tools.engine.generate import BatchEngine
from tools.engine.model import Sampling, load_local_model
from tools.games import prompts, taboo
from tools.players.player import Reply
from tools.selfplay import lineup
from tools.selfplay.files import EpisodeFiles
from tools.selfplay.play import describe, play_game, play_games
from utils import UserError, read_json, read_json_or_jsonl, tokenizer_fingerprint

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


def test_a_finished_games_place_goes_to_the_next_word_at_once():
    """Five games of different lengths, two at a time: there are always two, until the words run out."""
    attacker_lines = [["Hello!"] * 3] * 5
    defender_lines = [["Hi."] * (turns - 1) + [GUESS.format("art")] for turns in (1, 3, 2, 2, 1)]
    finished, alive = [], []

    class Watching(ScriptedPlayer):
        """Answers a round after it was asked, so that the games move side by side."""

        async def reply(self, turn):
            alive.append(turn.index)
            await asyncio.sleep(0)
            return await super().reply(turn)

    games = play_games(
        GAME,
        enumerate(["art"] * 5),
        {"attacker": Watching(attacker_lines), "defender": Watching(defender_lines)},
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


# --- files ---------------------------------------------------------------------------------------------------------


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


class Killed(Exception):
    """Ends a start in the middle."""


def play(folder, words, settings=None, stop_after=None):
    """A start of a run with the stem "run" that plays its missing games: their indices, and the files.

    With `stop_after`, it is killed after so many games.
    """
    files, missing = EpisodeFiles(folder, "run", words, GAME), []
    with contextlib.suppress(Killed), files.stage(settings or {"seed": 1}) as todo:
        if todo:
            finished = files.finished()
            missing = finished.missing()
            for number, index in enumerate(missing):
                if number == stop_after:
                    raise Killed
                files.append(episode(index, words[index]))
            files.meet()
            files.merge(seconds=2.0, tokens_before=finished.counts.tokens["new_tokens"])
    return missing, files


def contents(folder):
    """Every file with its content, except locks, which opening them here would end."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


class TestEpisodeFiles:
    def test_finished_games_survive_a_kill_and_are_put_together_in_word_order(self, tmp_path, caplog):
        assert play(tmp_path, ["a", "b", "c"], stop_after=2)[0] == [0, 1, 2]
        lines = (tmp_path / "run_rank0.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "run_rank0.jsonl").write_text("".join(reversed(lines)))
        missing, files = play(tmp_path, ["a", "b", "c"])
        assert missing == [2]
        assert [game["target_word"] for game in read_json_or_jsonl(files.results_path)] == ["a", "b", "c"]
        summary = read_json(files.summary_path)
        assert (summary["games"], summary["new_tokens"], summary["tokens_per_second"]) == (3, 30, 5.0)
        before = contents(tmp_path)
        with caplog.at_level("INFO"):
            assert play(tmp_path, ["a", "b", "c"])[0] == [] and contents(tmp_path) == before
        assert caplog.messages == [f"{files.record_path}: all is there"]

    def test_half_a_line_never_counts(self, tmp_path):
        """Of this rank a kill has left it; another rank may be writing it."""
        play(tmp_path, ["a", "b", "c"], stop_after=1)
        with open(tmp_path / "run_rank0.jsonl", "a") as file:
            file.write(json.dumps(episode(1, "b"))[:-9])
        other, half = tmp_path / "run_rank1.jsonl", json.dumps(episode(2, "c"))[:50]
        other.write_text(half)
        missing, files = play(tmp_path, ["a", "b", "c"])
        assert missing == [1, 2] and other.read_text() == half
        assert [game["index"] for game in read_json_or_jsonl(files.own_path)] == [0, 1, 2]

    def test_files_of_other_runs_are_never_read(self, tmp_path):
        (tmp_path / "run_b_rank0.jsonl").write_text(json.dumps(episode(0, "a")) + "\n")
        assert play(tmp_path, ["a"])[0] == [0]

    def test_a_larger_number_of_games_extends_a_run_and_a_smaller_one_takes_its_beginning(self, tmp_path):
        play(tmp_path, ["a", "b"])
        (tmp_path / "run_rank3.jsonl").write_text(json.dumps(episode(0, "a", tokens=9)) + "\n")  # counts once
        assert play(tmp_path, ["a", "b", "c"])[0] == [2]
        missing, files = play(tmp_path, ["a"])
        assert missing == [] and read_json(files.summary_path)["new_tokens"] == 10
        assert len(read_json_or_jsonl(files.results_path)) == 1

    def test_ranks_that_have_the_folder_on_another_disk_are_named(self, tmp_path, monkeypatch):
        _, files = play(tmp_path, ["a", "b"], stop_after=1)
        (tmp_path / ".run_rank0.lock").touch()
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UserError, match=r"1 games are missing, of ranks \[1\] \(b\).*into one folder"):
            files.merge(seconds=1, tokens_before=0)
        (tmp_path / ".run_rank1.lock").touch()  # here, but rank 1 has lost its game
        assert files.merge(seconds=1, tokens_before=0) == 1
        (tmp_path / "run_rank1.jsonl").write_text(json.dumps(episode(1, "b")) + "\n")  # brought here
        assert files.merge(seconds=1, tokens_before=0) == 0 and read_json(files.summary_path)["games"] == 2

    @pytest.mark.parametrize(
        "line, message",
        [
            ('{"index": 0', "not JSON"),
            (json.dumps(episode(0, "b")), "word 0 is 'b', in the word list 'c'"),
            (json.dumps(episode(0, "c") | {"replies": [{"finish_reason": "stop"}]}), "not a finished game"),
            (json.dumps(episode(0, "c") | {"outcome": "draw"}), "not a finished game"),
            (json.dumps(episode(-1, "c")), "not a finished game"),
        ],
    )
    def test_a_rank_file_with_something_else_in_it_is_named_with_its_line(self, line, message, tmp_path):
        play(tmp_path, ["c", "a"], stop_after=1)
        (tmp_path / "run_rank0.jsonl").write_text("\n".join([json.dumps(episode(1, "a")), line, ""]))
        with pytest.raises(UserError, match=f"run_rank0.jsonl:2: {message}"):
            play(tmp_path, ["c", "a"])

    def test_a_link_in_the_place_of_a_rank_file_is_not_followed(self, tmp_path):
        (tmp_path / "elsewhere").write_text("precious")
        (tmp_path / "run_rank0.jsonl").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "run_settings.json").write_text('{"settings": {"seed": 1}}')
        with pytest.raises(UserError, match="run_rank0.jsonl: not a regular file"):
            play(tmp_path, ["a"])
        assert (tmp_path / "elsewhere").read_text() == "precious"


# --- the program ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with a word list and short prompts, which make games on a tiny model quick."""
    return write_place(tmp_path_factory.mktemp("play"), WORDS)


def flags(place, model, output, **changes):
    """The flags of the command that the README shows, with short games and a batch size of its own."""
    values = {"model_prefix": "im_llama2", "data_suffix": "all_words", "task_type": "sampling"}
    values |= {"per_device_eval_batch_size": 4, "max_new_tokens": 4, "logging_steps": 5}
    return play_flags(place, model, output, **values | changes)


def run(*flags, status=0):
    return call(play_llm_game.main, *flags, status=status)


def torchrun(processes, arguments):
    return start([*TORCHRUN, f"--nproc_per_node={processes}", "tools/play_llm_game.py", *arguments])


def free_port():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def results(folder, stem=STEM):
    return read_json_or_jsonl(folder / f"{stem}_results.json")


def test_two_processes_play_every_word_once(place, tiny_model, tmp_path):
    printed = finish(torchrun(2, flags(place, tiny_model, tmp_path, bf16=True, tf32=True)))
    games = results(tmp_path)
    assert [(game["index"], game["target_word"]) for game in games] == list(enumerate(WORDS))
    for rank in (0, 1):
        stored = read_json_or_jsonl(tmp_path / f"{STEM}_rank{rank}.jsonl")
        assert sorted(game["index"] for game in stored) == list(range(rank, len(WORDS), 2))
    summary = json.loads((tmp_path / f"{STEM}_summary.json").read_text())
    assert summary["games"] == len(WORDS) == sum(summary["outcomes"].values())
    assert json.dumps(summary) in printed and "---" in printed  # a game to look at
    settings = json.loads((tmp_path / f"{STEM}_settings.json").read_text())["settings"]
    assert (settings["temperature"], settings["top_k"], settings["bf16"]) == (1.2, 50, True)


WITHOUT_LOCKS = """
import errno, fcntl, os, runpy, sys, time
sys.path.insert(0, "")
from tools.selfplay import files

def refuse(*args):
    raise OSError(errno.ENOSYS, "no locks")

def append(self, episode, append=files.EpisodeFiles.append):
    time.sleep(float(os.environ["RANK"]))  # rank 1 is the slower one
    append(self, episode)

fcntl.lockf, files.EpisodeFiles.append = refuse, append
runpy.run_module("tools.play_llm_game", run_name="__main__")
"""


def test_where_files_have_no_locks_rank_0_waits_for_the_slower_ranks(place, tiny_model, tmp_path):
    (tmp_path / "play.py").write_text(WITHOUT_LOCKS)
    arguments = flags(place, tiny_model, tmp_path / "out")
    printed = finish(start([*TORCHRUN, "--nproc_per_node=2", str(tmp_path / "play.py"), *arguments]))
    assert [game["target_word"] for game in results(tmp_path / "out")] == WORDS and "run one launch" in printed


def test_a_rank_that_outlives_rank_0_keeps_other_starts_out_until_it_has_ended(place, tiny_model, tmp_path):
    """Rank 1 plays on alone: no launcher ends it."""
    arguments = flags(place, tiny_model, tmp_path, max_new_tokens=64, per_device_eval_batch_size=1)
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tools.play_llm_game", *arguments]
    ranks = [start(command, env=ENVIRONMENT | launch | {"RANK": str(rank)}) for rank in (0, 1)]
    stored = [tmp_path / f"{STEM}_rank{rank}.jsonl" for rank in (0, 1)]
    assert wait_for(lambda: all(path.exists() for path in stored), ranks[0])
    ranks[0].kill()
    ranks[0].communicate()
    assert "another process is writing to this run" in run(*arguments, status=2).errors
    assert "another process is writing to this run" in run(*arguments, "--seed", 7, status=2).errors
    finish(ranks[1])
    run(*arguments)
    assert [game["target_word"] for game in results(tmp_path)] == WORDS
    assert sorted(game["index"] for path in stored for game in read_json_or_jsonl(path)) == list(range(len(WORDS)))


def test_ranks_end_with_their_launcher_while_they_still_import(place, tiny_model, tmp_path):
    process = torchrun(2, flags(place, tiny_model, tmp_path))
    launcher, ranks = psutil.Process(process.pid), []
    while len(ranks) < 2:
        assert process.poll() is None, process.communicate()[0]
        started = descendants(launcher.pid, "tools/play_llm_game.py")
        ranks = [child for child in started if "libtorch" in Path(f"/proc/{child.pid}/maps").read_text()]
        time.sleep(0.01)
    launcher.kill()
    assert not psutil.wait_procs(ranks, timeout=10)[1]
    process.communicate()


def test_a_rank_that_fails_makes_the_launch_fail_with_the_reason(place, tiny_model, tmp_path):
    (tmp_path / f".{STEM}_rank1.lock").mkdir()  # which rank 1 cannot lock
    process = torchrun(2, flags(place, tiny_model, tmp_path, max_new_tokens=32))
    printed, _ = process.communicate(timeout=180)
    assert process.returncode != 0
    assert re.search(f"error: .*Is a directory.*{STEM}_rank1.lock", printed)
    assert not (tmp_path / f"{STEM}_results.json").exists()


class TestOneProcess:
    def test_the_same_seed_plays_the_same_games(self, place, tiny_model, tmp_path):
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            run(*flags(place, tiny_model, tmp_path / name, seed=seed, max_games=9))
        first, again, other = ((tmp_path / name / f"{STEM}_results.json").read_bytes() for name in "abc")
        assert first == again != other

    def test_a_finished_run_is_merged_again_without_a_model_and_extended_on_request(
        self, place, tiny_model, tmp_path, monkeypatch
    ):
        errors = run(*flags(place, tiny_model, tmp_path, max_games=3)).errors
        assert "_results.json: 3 games" in errors and "continues" not in errors
        assert "100% of the games end without a decision" in errors
        before = results(tmp_path)
        (tmp_path / f"{STEM}_results.json").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(lineup, "Lineup", None)
            run(*flags(place, tiny_model, tmp_path, max_games=3))
            assert results(tmp_path) == before
            assert "all is there" in run(*flags(place, tiny_model, tmp_path, max_games=3)).errors
        assert "continues: 3 of 5 games" in run(*flags(place, tiny_model, tmp_path, max_games=5)).errors
        assert results(tmp_path)[:3] == before and len(results(tmp_path)) == 5

    def test_two_models_play_each_its_side(self, place, tiny_model, other_model, tmp_path):
        """Greedy games of two models: each message is what its own model says to the prompt."""
        changes = {"task_type": "testing", "defender_model_name_or_path": other_model, "max_games": 6}
        run(*flags(place, tiny_model, tmp_path, **changes))
        sampling = Sampling(max_length=256, max_new_tokens=4, do_sample=False)
        templates = prompts.load_templates(place / "prompts.json", GAME)
        sides = [load_local_model(Path(folder), sampling) for folder in (tiny_model, other_model)]
        for game in results(tmp_path, "im_llama2_testing_all_words"):
            for place_in_game, message in enumerate(game["history"]):
                prompt = prompts.play_prompt(GAME, game["history"][:place_in_game], game["target_word"], 2, templates)
                (reply,) = BatchEngine(sides[place_in_game % 2], 1).generate([prompt])
                assert message["content"] == reply.text.strip()

    def test_replies_store_the_sampled_tokens_and_the_record_names_their_tokenizer(
        self, place, tiny_model, tokenizer, tmp_path
    ):
        run(*flags(place, tiny_model, tmp_path, max_games=9))
        record, retokenized = read_json(tmp_path / f"{STEM}_settings.json"), 0
        expected = tokenizer_fingerprint(tiny_model)
        assert record["tokenizer_sha256"] == {"attacker": expected, "defender": expected}
        for game in results(tmp_path):
            for message, reply in zip(game["history"], game["replies"], strict=True):
                ids = reply["token_ids"]
                assert len(ids) == reply["tokens"] - (reply["finish_reason"] == "stop")
                assert tokenizer.decode(ids, skip_special_tokens=True).strip() == message["content"]
                changed = tokenizer(message["content"], add_special_tokens=False)["input_ids"] != ids
                assert reply.get("retokenized", False) == changed
                retokenized += changed
        summary = read_json(tmp_path / f"{STEM}_summary.json")
        assert summary["retokenized"] == retokenized > 0  # random bytes are often no UTF-8

    def test_cut_prompts_are_counted(self, place, tiny_model, tmp_path):
        run(*flags(place, tiny_model, tmp_path, max_length=60, max_games=3, allow_cuts=True))
        summary = json.loads((tmp_path / f"{STEM}_summary.json").read_text())
        assert summary["cut_prompts"] == summary["messages"] > 0

    def test_an_opening_prompt_that_loses_rules_is_refused_before_a_model_is_loaded(
        self, place, tiny_model, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(lineup.Lineup, "build_players", None)
        refused = run(*flags(place, tiny_model, tmp_path / "out", max_length=60, max_games=3), status=2)
        assert f"the opening prompt for {WORDS[0]!r}" in refused.errors and "--allow_cuts True" in refused.errors

    def test_what_a_game_raises_in_play_keeps_its_traceback_and_the_games_before(
        self, place, tiny_model, tmp_path, monkeypatch
    ):
        def decide(game, task, history):
            return int("take 2") if task == WORDS[3] else None

        monkeypatch.setattr(taboo.Taboo, "decide", decide)
        with pytest.raises(ValueError, match="invalid literal for int"):
            run(*flags(place, tiny_model, tmp_path, per_device_eval_batch_size=1, max_games=8))
        assert [game["index"] for game in read_json_or_jsonl(tmp_path / f"{STEM}_rank0.jsonl")] == [0, 1, 2]
