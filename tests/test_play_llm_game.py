"""Self-play: one game by the rules, many at once, the files of a run, and the program.

faults/ kills the program and refuses its flags.
"""

import asyncio
import json
import re
import weakref
from pathlib import Path

import pytest
from helpers import call, copy_model, flags_of, play_flags, run_ranks, write_place
from scripted import ScriptedPlayer, messages

from dataloaders import load_rows
from tools import assign_rewards, play_llm_game
from tools.common.errors import UserError
from tools.common.files import read_json, read_json_or_jsonl
from tools.engine import local
from tools.engine.flags import EngineFlags
from tools.engine.generate import BatchEngine
from tools.engine.local import Prompt, load_local_model
from tools.games import load_game, prompts, taboo
from tools.players.player import Player, Reply, ReplyUnavailable
from tools.selfplay import play
from tools.selfplay.episodes import EpisodeFiles, summary, summary_line
from tools.selfplay.play import episode_text, play_game, play_games

GAME = taboo.Taboo()
GUESS = "I know the word! It is `{}`!"
WORDS = [f"word{number}" for number in range(35)] + ["word3", "café"]  # one of them twice, one not ASCII
STEM = "im_llama2_sampling_all_words"


# --- one game ------------------------------------------------------------------------------------------------------


def scripted_game(word, attacker_lines, defender_lines):
    """The episode, and the turns that the players were asked for, in their order."""
    players = {"attacker": ScriptedPlayer([attacker_lines]), "defender": ScriptedPlayer([defender_lines])}
    episode = asyncio.run(play_game(GAME, word, players, max_turns=3))
    asked = sorted((turn for player in players.values() for turn in player.asked), key=lambda turn: len(turn.history))
    return episode, asked


@pytest.mark.parametrize(
    "attacker_lines, defender_lines, outcome, length",
    [
        (["Hello!"], [GUESS.format("art")], taboo.DEFENDER_WINS, 2),
        (["Hello!", "I like art."], ["Hi."], taboo.ATTACKER_BREAKS, 3),
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
    replies = iter([Reply(" Hello! \n", "stop", 3), Reply("", "length", 9, prompt_cut=True)])

    class Speaker(Player):
        async def reply(self, turn):
            return next(replies)

    episode = asyncio.run(play_game(GAME, "art", dict.fromkeys(GAME.roles, Speaker()), max_turns=1, index=7))
    assert episode == {
        "index": 7,
        "target_word": "art",
        "max_turns": 1,
        "history": [
            {"role": "attacker", "content": "Hello!"},  # stripped, once, whoever the player
            {"role": "defender", "content": ""},  # an empty reply stays an empty message
        ],
        "outcome": "tied game",
        "length": 2,
        "replies": [
            {"finish_reason": "stop", "tokens": 3, "prompt_cut": False},
            {"finish_reason": "length", "tokens": 9, "prompt_cut": True},
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
    history = messages(GAME, "Hm\x1b[2J\n--- defender wins ---")
    text = episode_text({"target_word": "a\x07b", "history": history, "outcome": taboo.TIED})
    assert text == "--- a\ufffdb ---\nattacker: Hm\ufffd[2J\n    --- defender wins ---\n--- tied game ---"


# --- files ---------------------------------------------------------------------------------------------------------


def episode(index, word, text="Hello!"):
    return {
        "index": index,
        "target_word": word,
        "max_turns": 1,
        "history": messages(GAME, text, ""),
        "outcome": taboo.TIED,
        "length": 2,
        "replies": [{"finish_reason": reason, "tokens": 5, "prompt_cut": False} for reason in ("stop", "length")],
    }


def play_missing(folder, words, text="Hello!", stop_after=None):
    """A start that plays its missing games, or only so many of them. Returns their indices, and the files."""
    files = EpisodeFiles(folder, "run", words, GAME)
    missing = files.missing()
    for index, word in missing[:stop_after]:
        files.append(episode(index, word, text))
    return [index for index, _ in missing], files


def test_finished_games_survive_a_kill_and_are_put_together_in_word_order(tmp_path):
    assert play_missing(tmp_path, ["a", "b", "c"], stop_after=2)[0] == [0, 1, 2]
    lines = (tmp_path / "run_rank0.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run_rank0.jsonl").write_text("".join(reversed(lines)))
    earlier = [json.dumps(episode(*game)) + "\n" for game in ((0, "a"), (3, "d"))]  # game 0 counts once
    (tmp_path / "run_rank3.jsonl").write_text("".join(earlier))
    missing, files = play_missing(tmp_path, ["a", "b", "c", "d", "e"], stop_after=1)
    assert missing == [2, 4] and files.merge() == 1 and not files.results_path.exists()
    missing, files = play_missing(tmp_path, ["a", "b", "c", "d", "e"])
    assert missing == [4] and files.merge() == 0
    assert [game["target_word"] for game in read_json_or_jsonl(files.results_path)] == ["a", "b", "c", "d", "e"]
    counts = read_json(files.summary_path)
    assert (counts["games"], counts["new_tokens"]) == (5, 50)


def test_the_games_of_a_run_whose_name_goes_on_are_not_taken(tmp_path):
    (tmp_path / "run_rank1000_rank0.jsonl").write_text(json.dumps(episode(0, "six")) + "\n")
    missing, files = play_missing(tmp_path, ["a"], stop_after=0)
    assert missing == [0]
    assert not [path for pattern in files.patterns for path in tmp_path.glob(pattern)]  # results of another run
    (tmp_path / "run_rank1000.jsonl").write_text(json.dumps(episode(0, "a")) + "\n")
    assert files.missing() == []


def test_a_stored_game_of_another_word_is_an_error_that_names_both(tmp_path):
    play_missing(tmp_path, ["a", "b"])
    with pytest.raises(UserError, match="game 1 is about 'b', but the word list has 'c' there"):
        play_missing(tmp_path, ["a", "c"])
    with pytest.raises(UserError, match="game 1 is about 'b', but the word list has None there"):
        play_missing(tmp_path, ["a"])


def test_half_a_line_and_a_line_that_is_no_json_are_played_again(tmp_path, caplog):
    """A kill has left half a last line of this rank; another rank may be writing one; a survivor wrote the rest."""
    lines = [json.dumps(episode(0, "a")), json.dumps(episode(3, "d"))[40:], "\0\0", json.dumps(episode(1, "b"))[:-9]]
    (tmp_path / "run_rank0.jsonl").write_text("\n".join(lines))
    other, half = tmp_path / "run_rank1.jsonl", json.dumps(episode(2, "c"))[:50]
    other.write_text(half)
    missing, files = play_missing(tmp_path, ["a", "b", "c", "d"])
    assert missing == [1, 2, 3] and files.merge() == 0 and other.read_text() == half
    assert {"run_rank0.jsonl:2", "run_rank0.jsonl:3"} <= {message.split("/")[-1][:17] for message in caplog.messages}


REPLIES = ["a\u2028b", "a\x85b\x0cc", "half \ud83d a pair", "\udcff", "\U0001f600", "a\nb"]


def test_any_reply_survives_play_the_merge_and_becomes_the_target_that_is_trained_on(tmp_path, tokenizer, monkeypatch):
    """Only a newline ends a line. Half a surrogate pair is written as its escape, and a tokenizer sees U+FFFD."""
    words = [f"word{number}" for number in range(len(REPLIES))]
    players = {role: ScriptedPlayer([[text] for text in REPLIES]) for role in GAME.roles}
    monkeypatch.setattr(play, "make_players", lambda *args, **options: (players, 1))
    flags = play_llm_game.Flags(**dict.fromkeys(NAMES, "m"), max_turns=1)
    for number, _ in enumerate(words, start=1):  # a start plays one game
        files = EpisodeFiles(tmp_path, "run", words[:number], GAME)
        play.play_missing(GAME, [play.Planned("m", "m", 0)] * number, flags, files, templates=None)
    assert files.merge() == 0
    games = read_json_or_jsonl(files.results_path)
    assert [[message["content"] for message in game["history"]] for game in games] == [[text] * 2 for text in REPLIES]
    rows = tmp_path / "rows.jsonl"
    call(assign_rewards.main, *flags_of({"input_data_path": files.results_path, "output_data_path": rows, "ties": 1}))
    targets = [row["target"] for row in read_json_or_jsonl(rows)]
    assert targets == [text for text in REPLIES for _ in GAME.roles]
    for text, row in zip(targets, load_rows([str(rows)], tokenizer), strict=True):
        trained = tokenizer.decode([label for label in row["labels"] if label != -100][:-1])  # without EOS
        assert trained == re.sub("[\ud800-\udfff]", "\ufffd", text)


def test_games_are_played_group_by_group_of_players_and_seed_and_only_those_that_are_missing(tmp_path, monkeypatch):
    made, at_work = [], []

    class Speaker(Player):
        def __init__(self, name):
            self.name = name

        async def reply(self, turn):
            at_work.append((turn.index, self.name))
            return Reply(self.name, "stop", 1)

    def make_players(names, game, flags, *, seed, games_left, start):
        made.append((*names, seed, games_left))
        return dict(zip(game.roles, map(Speaker, names), strict=True)), 2

    monkeypatch.setattr(play, "make_players", make_players)
    pairs = [("new", "old", 1), ("new", "older", 1), ("new", "old", 1), ("new", "old", 2), ("new", "older", 1)]
    plan = [play.Planned(*pair, {"defender": f"{pair[1]}!"}) for pair in pairs]
    files = EpisodeFiles(tmp_path, "run", ["art"] * 5, GAME)
    files.append(episode(2, "art"))
    flags = play_llm_game.Flags(**dict.fromkeys(NAMES, "m"), max_turns=1)
    play.play_missing(GAME, plan, flags, files, templates=None)
    assert made == [("new", "old", 1, 1), ("new", "older", 1, 2), ("new", "old", 2, 1)]
    assert sorted(at_work) == sorted((index, name) for index in (0, 1, 3, 4) for name in pairs[index][:2])
    assert [index for index, name in at_work if name == "new"] == [0, 1, 4, 3]
    stored = files.finished()
    assert sorted(stored) == [0, 1, 2, 3, 4] and "defender" not in stored[2]
    for index in (0, 1, 3, 4):
        assert (stored[index]["history"][1]["content"] + "!") == stored[index]["defender"] == pairs[index][1] + "!"


def test_the_models_of_a_group_leave_memory_before_the_next_group_loads_its_own(
    tiny_model, other_model, tmp_path, monkeypatch
):
    in_memory, before_loading = weakref.WeakSet(), []

    def load(folder, flags):
        before_loading.append(len(in_memory))
        loaded = load_local_model(folder, flags)
        in_memory.add(loaded.model)
        return loaded

    monkeypatch.setattr(local, "load_local_model", load)
    third = copy_model(tiny_model, tmp_path / "third")
    files = EpisodeFiles(tmp_path, "run", ["art"] * 2, GAME)
    flags = play_llm_game.Flags(**dict.fromkeys(NAMES, "m"), max_turns=1, max_new_tokens=2)
    plan = [play.Planned(tiny_model, other_model, 0), play.Planned(other_model, str(third), 0)]
    play.play_missing(GAME, plan, flags, files, templates=prompts.default_templates(GAME))
    assert before_loading == [0, 1, 0, 1]


def test_the_summary_worked_by_hand():
    def game(outcome, *texts, replies=()):
        return {"history": messages(GAME, *texts), "outcome": outcome, "length": len(texts), "replies": replies}

    stop = {"finish_reason": "stop", "tokens": 1, "prompt_cut": True}
    cut = {"finish_reason": "length", "tokens": 5, "prompt_cut": False}
    games = [
        game("attacker wins", "a", "art", replies=[stop, cut]),
        game("defender wins", "a", "", "b", "I know the word! It is `art`!", replies=[stop] * 4),
        game("attacker breaks the rules", "art", replies=[{"finish_reason": "stop"}]),  # a server that counts nothing
        game("tied game"),
    ]
    assert summary(GAME, games) == {
        "games": 4,
        "outcomes": {"attacker wins": 1, "defender wins": 1, "attacker breaks the rules": 1, "tied game": 1},
        "defender_share_of_decided": 0.5,  # a breach decides nothing here
        "mean_length": 7 / 4,
        "messages": 7,
        "empty_replies": 1,
        "cut_off_replies": 1,
        "cut_prompts": 5,
        "new_tokens": 10,
    }
    line = summary_line(summary(GAME, games))
    for part in ("4 games", "attacker wins 1", "tied game 1", " 1.8 ", "7 messages", "1 are empty", "1 cut off"):
        assert part in line
    assert "5 prompts were cut" in line and "thought" not in line and summary_line(summary(GAME, []))
    counts = summary(load_game("twenty_questions"), [{"history": [], "outcome": "found", "length": 0}])
    assert (counts["outcomes"]["found"], counts["answerer_share_of_decided"]) == (1, None)  # nobody wins alone


# --- the program ---------------------------------------------------------------------------------------------------

NAMES = ("attacker_model_name_or_path", "defender_model_name_or_path", "data_path", "output_dir", "model_prefix")
NAMES += ("data_suffix",)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with a word list and short prompts, which make games on a tiny model quick."""
    return write_place(tmp_path_factory.mktemp("play"), WORDS)


def flags(place, model, output, **changes):
    """The flags of the command that the README shows, with short games and a batch size of its own."""
    values = {"model_prefix": "im_llama2", "data_suffix": "all_words", "task_type": "sampling"}
    values |= {"per_device_eval_batch_size": 4, "max_new_tokens": 4, "logging_steps": 5}
    return play_flags(place, model, output, **values | changes)


@pytest.fixture
def run(place, tiny_model, tmp_path):
    """Play with these flags; gives what the program wrote."""

    def play(output=tmp_path, status=0, **changes):
        return call(play_llm_game.main, *flags(place, tiny_model, output, **changes), status=status)

    return play


def results(folder, stem=STEM):
    return read_json_or_jsonl(folder / f"{stem}_results.json")


def test_two_processes_play_every_word_once(place, tiny_model, tmp_path):
    arguments = flags(place, tiny_model, tmp_path, bf16=True, tf32=True)
    printed = run_ranks(["tools/play_llm_game.py", *arguments])
    assert [(game["index"], game["target_word"]) for game in results(tmp_path)] == list(enumerate(WORDS))
    for rank in (0, 1):
        stored = read_json_or_jsonl(tmp_path / f"{STEM}_rank{rank}.jsonl")
        assert sorted(game["index"] for game in stored) == list(range(rank, len(WORDS), 2))
    counts = read_json(tmp_path / f"{STEM}_summary.json")
    assert counts["games"] == len(WORDS) == sum(counts["outcomes"].values())
    (line,) = [line for line in printed.splitlines() if line.startswith(summary_line(counts))]
    assert float(line.removesuffix(" new tokens per second").split()[-1].replace(",", "")) > 0
    assert "---" in printed  # a game to look at
    settings = read_json(tmp_path / f"{STEM}_settings.json")["settings"]
    assert (settings["temperature"], settings["top_k"], settings["dtype"]) == (1.2, 50, "bfloat16")


def test_lost_games_leave_status_3_and_the_same_command_plays_them(run, tmp_path, monkeypatch):
    class Unreliable(Player):
        lost = {1, 3}

        async def reply(self, turn):
            if turn.index in self.lost:
                raise ReplyUnavailable("no answer")
            return Reply("Hm.", "stop", 2)

    monkeypatch.setattr(play, "make_players", lambda *args, **options: (dict.fromkeys(GAME.roles, Unreliable()), 2))
    errors = run(max_games=6, status=3).errors
    assert "word1: left unfinished: no answer" in errors and "2 games are missing; rerun the same command" in errors
    assert not (tmp_path / f"{STEM}_results.json").exists()
    Unreliable.lost = set()
    assert "continuing: 4 of 6 games" in run(max_games=6).errors
    assert [game["index"] for game in results(tmp_path)] == list(range(6))
    assert [json.loads(line)["index"] for line in open(tmp_path / f"{STEM}_rank0.jsonl")] == [0, 2, 4, 5, 1, 3]


def test_the_record_names_the_engines_of_each_start_also_of_one_that_was_stopped(run, tmp_path, monkeypatch):
    append = EpisodeFiles.append

    def interrupted(self, episode):
        append(self, episode)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EpisodeFiles, "append", interrupted)
        run(max_games=6, status=130)  # --engine auto
    record = tmp_path / f"{STEM}_settings.json"
    assert read_json(record)["engines"] == [["slots"]] and not read_json(record)["finished"]
    run(max_games=6, engine="generate")
    assert read_json(record)["engines"] == [["slots"], ["generate"]] and read_json(record)["finished"]


def test_the_same_seed_plays_the_same_games(run, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(tmp_path / name, seed=seed, max_games=9)
    first, again, other = ((tmp_path / name / f"{STEM}_results.json").read_bytes() for name in "abc")
    assert first == again != other


def test_two_models_play_each_its_side(run, place, tiny_model, other_model, tmp_path):
    """Greedy games of two models: each message is what its own model says to the prompt."""
    run(task_type="testing", defender_model_name_or_path=other_model, max_games=6)
    how = EngineFlags(max_length=256, max_new_tokens=4, task_type="testing")
    templates = prompts.load_templates(place / "prompts.json", GAME)
    sides = [load_local_model(Path(folder), how) for folder in (tiny_model, other_model)]
    for game in results(tmp_path, "im_llama2_testing_all_words"):
        for number, message in enumerate(game["history"]):
            prompt = prompts.play_prompt(GAME, game["history"][:number], game["target_word"], 2, templates)
            engine = BatchEngine(sides[number % 2], 1)
            engine.start(0, Prompt(prompt, 0))
            ((_, reply),) = engine.run()
            assert message["content"] == reply.text.strip()
