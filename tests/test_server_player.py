"""Players behind a server: what is asked of it, what its faults do to games, the cap on its tokens.

Against two servers on loopback: a stub that misbehaves as it is told, and the one that comes with transformers.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import build_llama, build_tokenizer
from helpers import TORCHRUN, call, flags_of, play_flags, start, write_place

from tools import evaluate_games, play_llm_game
from tools.games.prompts import load_templates, play_prompt
from tools.games.taboo import Taboo
from utils import read_json_or_jsonl

pytest.importorskip("openai", reason="players behind a server need the package openai")

STEM = "api_sampling_words"
KEY = "sk-not-to-be-seen"
WORDS = [f"word{number}" for number in range(100, 140)]
GAME = Taboo()
MODEL = "openai:some/model"
USAGE = {"prompt_tokens": 70, "completion_tokens": 5}
UNFINISHED = 3


# --- a server that misbehaves as it is told ------------------------------------------------------------------------


def said(text="Hello.", finish_reason="stop", usage=USAGE) -> dict:
    """A reply as either endpoint gives it."""
    choice = {"index": 0, "text": text, "message": {"role": "assistant", "content": text}}
    return {"choices": [choice | {"finish_reason": finish_reason}], **({"usage": usage} if usage else {})}


class JSONHandler(BaseHTTPRequestHandler):
    """Reads and sends JSON."""

    protocol_version = "HTTP/1.1"

    def body(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, status, headers, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers, "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


class JSONServer(ThreadingHTTPServer):
    request_queue_size = 512

    def handle_error(self, request, client_address):  # of clients that are gone
        pass


class Stub:
    """An HTTP server: `behave(number, body)` gives status, headers and body of each answer; None hangs up."""

    def __init__(self, behave=lambda number, body: (200, {}, said())):
        self.requests, lock = [], threading.Lock()
        requests = self.requests

        class Handler(JSONHandler):
            def do_POST(self):
                body = self.body()
                with lock:
                    number = len(requests)
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    requests.append((self.path, headers, body))
                if answer := behave(number, body):
                    self.answer(*answer)
                else:
                    self.close_connection = True

        self.server = JSONServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def prompts(self):
        """What was asked, from whichever endpoint."""
        return [body["prompt"] if "prompt" in body else body["messages"][0]["content"] for *_, body in self.requests]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def stub():
    """Makes stubs that end with the test."""
    with contextlib.ExitStack() as stack:

        def make(*behave):
            made = Stub(*behave)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with words and short prompts."""
    return write_place(tmp_path_factory.mktemp("server"), WORDS)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """Retries without the waiting, nothing of this machine's environment, a key that must show up nowhere."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.05)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def flags(place, output, url=None, **changes):
    """A command with short games; None leaves a flag out."""
    values = {"openai_base_url": url, "model_prefix": "api", "max_new_tokens": 4, "max_concurrency": 8}
    values |= {"openai_retries": 3, "openai_timeout": 20}
    return play_flags(place, MODEL, output, **values | changes)


def run(*flags, status=0, program=play_llm_game):
    """The program in this process, which must end with this status; its last line of errors, and all that it said."""
    called = call(program.main, *flags, status=status)
    assert KEY not in called.output + called.errors
    return called


def last_line(called):
    return called.errors.splitlines()[-1]


def results(folder, stem=STEM):
    return read_json_or_jsonl(folder / f"{stem}_results.json")


def stored(folder, stem=STEM):
    """The indices of the games that are there, in the order in which they ended."""
    path = folder / f"{stem}_rank0.jsonl"
    return [json.loads(line)["index"] for line in path.read_text().splitlines()] if path.exists() else []


# --- what is asked -------------------------------------------------------------------------------------------------


class TestRequests:
    @pytest.mark.parametrize("api", ["completions", "chat"])
    def test_the_server_is_shown_the_prompts_of_local_play(self, api, stub, place, tmp_path):
        server = stub(lambda number, body: (200, {}, said(f" Message {number}. \n")))
        run(*flags(place, tmp_path, server.url, openai_api=api, max_games=1))
        (game,) = results(tmp_path)
        assert [message["content"] for message in game["history"]] == [f"Message {number}." for number in range(4)]
        templates = load_templates(place / "prompts.json", GAME)
        told = [play_prompt(GAME, game["history"][:end], WORDS[0], 2, templates) for end in range(4)]
        assert server.prompts() == told
        where, limit = {"completions": ("", "max_tokens"), "chat": ("chat/", "max_completion_tokens")}[api]
        for path, _, body in server.requests:
            assert path == f"/v1/{where}completions" and body[limit] == 4
            assert api != "chat" or [message["role"] for message in body["messages"]] == ["user"]

    @pytest.mark.parametrize(
        "changes, expected",
        [
            ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
            ({"task_type": "testing"}, {"temperature": 0}),
            (
                {"openai_extra_sampling": True, "min_new_tokens": 2},
                {"temperature": 1.2, "top_p": 1.0, "top_k": 50, "min_tokens": 2},
            ),
            ({"openai_extra_sampling": True, "task_type": "testing"}, {"temperature": 0, "min_tokens": 0}),
        ],
    )
    def test_sampling_is_that_of_the_flags(self, changes, expected, stub, place, tmp_path):
        server = stub()
        run(*flags(place, tmp_path, server.url, max_games=1, **changes))
        for *_, body in server.requests:
            del body["prompt"]
            assert body == {"model": "some/model", "max_tokens": 4, **expected}

    def test_with_its_tokenizer_prompts_go_out_as_ids(self, stub, place, tiny_model, tokenizer, tmp_path):
        server = stub(lambda number, body: (200, {}, said("")))  # an empty reply is one, as in local play
        how = {"openai_tokenizer": tiny_model, "max_length": 60, "max_games": 2, "min_new_tokens": 1}
        run(*flags(place, tmp_path, server.url, allow_cuts=True, **how))
        game = results(tmp_path)[0]
        prompt = play_prompt(GAME, [], game["target_word"], 2, load_templates(place / "prompts.json", GAME))
        ids = [1, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        assert len(ids) > 56 and ids[-56:] in server.prompts()
        for *_, body in server.requests:
            assert body["stop_token_ids"] == [2] and body["min_tokens"] == 1 and body["return_token_ids"]
        assert len({body["seed"] for *_, body in server.requests}) == 8
        assert all(reply["prompt_cut"] for reply in game["replies"])

    def test_no_more_requests_are_in_flight_than_allowed(self, stub, place, tmp_path):
        in_flight, most, opened = [], [], threading.Event()

        def behave(number, body):
            in_flight.append(number)
            most.append(len(in_flight))
            if most[-1] == 5 and not opened.is_set():
                time.sleep(0.7)  # for a sixth one to come
                opened.set()
            opened.wait(30)
            in_flight.remove(number)
            return 200, {}, said()

        run(*flags(place, tmp_path, stub(behave).url, max_concurrency=5, concurrent_games=20, max_games=20))
        assert max(most) == 5

    def test_the_base_url_may_come_from_the_environment_and_a_server_may_need_no_key(
        self, stub, place, tmp_path, monkeypatch
    ):
        server = stub()
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.delenv("OPENAI_API_KEY")
        run(*flags(place, tmp_path, max_games=2))
        assert len(server.requests) == 8

    @pytest.mark.parametrize("side, place_in_game", [("attacker", 0), ("defender", 1)])
    def test_either_side_may_be_a_server_and_the_other_a_model_here(
        self, side, place_in_game, stub, place, tiny_model, tmp_path
    ):
        server, other = stub(), {"attacker": "defender", "defender": "attacker"}[side]
        changes = {f"{side}_model_name_or_path": MODEL, f"{other}_model_name_or_path": tiny_model}
        run(*flags(place, tmp_path, server.url, max_games=6, **changes))
        assert len(server.requests) == 6 * 2
        for game in results(tmp_path):
            said_by_server = [message["content"] == "Hello." for message in game["history"]]
            assert said_by_server == [place == place_in_game for place in (0, 1, 0, 1)]
            assert ["prompt_tokens" in reply for reply in game["replies"]] == said_by_server
        summary = json.loads((tmp_path / f"{STEM}_summary.json").read_text())
        assert (summary["server_prompt_tokens"], summary["server_new_tokens"]) == (6 * 2 * 70, 6 * 2 * 5)

    def test_the_key_reaches_the_server_and_nothing_else(self, stub, place, tmp_path):
        """The server repeats it in what it says."""

        def behave(number, body):
            return (200, {}, said()) if number < 20 else (401, {}, {"error": {"message": f"wrong key {KEY}"}})

        server = stub(behave)
        assert "wrong key ***" in last_line(run(*flags(place, tmp_path, server.url), status=2))
        assert {headers["authorization"] for _, headers, _ in server.requests} == {f"Bearer {KEY}"}
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files and not any(KEY in path.read_text() for path in files)


# --- faults --------------------------------------------------------------------------------------------------------


FAULTS = {  # of which the openai client repeats the first ones
    "429": (429, {"Retry-After": "0.1"}, {"error": {"message": "slow down"}}),
    "500": (500, {}, b"Internal Server Error"),
    "hung up": None,
    "no JSON": (200, {"Content-Type": "text/html"}, b"<html>Welcome!</html>"),
    "no choices": (200, {}, {"choices": []}),
    "no text": (200, {}, said(None)),
    "half a character": (200, {}, said("\ud800")),
    "broken off": (200, {}, said("Hel", "content_filter")),
    "less than no tokens": (200, {}, said(usage=USAGE | {"prompt_tokens": -5})),
    "token ids that are none": (200, {}, {"choices": [{"finish_reason": "stop", "text": "", "token_ids": [-1]}]}),
}


class TestFaults:
    @pytest.mark.parametrize("fault", ["429", "500", "hung up"])
    def test_what_passes_is_asked_again(self, fault, stub, place, tmp_path):
        server = stub(lambda number, body: FAULTS[fault] if number % 3 == 1 and number < 12 else (200, {}, said()))
        run(*flags(place, tmp_path, server.url, max_games=5, openai_retries=8))
        assert len(server.requests) == 5 * 4 + 4
        for game in results(tmp_path):
            assert [message["content"] for message in game["history"]] == ["Hello."] * 4

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_game_whose_reply_cannot_be_had_is_left_for_the_next_start(self, fault, stub, place, tmp_path):
        ill = True

        def behave(number, body):
            if ill and f"`{WORDS[3]}`" in body["prompt"] and "Hello." in body["prompt"]:  # at its third message
                return FAULTS[fault]
            return 200, {}, said()

        server = stub(behave)
        arguments = flags(place, tmp_path, server.url, max_games=12)
        left = run(*arguments, status=UNFINISHED)
        assert "1 games are missing; the same command plays them" in last_line(left)
        assert f"{WORDS[3]}: left unfinished" in left.errors
        assert sorted(stored(tmp_path)) == [index for index in range(12) if index != 3]
        assert not (tmp_path / f"{STEM}_results.json").exists()
        ill, before = False, len(server.requests)
        run(*arguments)
        assert len(server.requests) - before == 4  # that game alone, from its beginning
        assert [game["target_word"] for game in results(tmp_path)] == WORDS[:12]

    @pytest.mark.parametrize("api, status", [("completions", 0), ("chat", UNFINISHED)])
    def test_an_empty_reply_of_a_chat_model_loses_its_game(self, api, status, stub, place, tmp_path):
        """A base model that ends at once says nothing, as in local play."""
        server = stub(lambda number, body: (200, {}, said(" " if number == 2 else "Hm.")))
        run(*flags(place, tmp_path, server.url, openai_api=api, max_games=2), status=status)
        assert len(stored(tmp_path)) == (2 if status == 0 else 1)

    def test_thinking_of_a_chat_model_is_no_part_of_its_message(self, stub, place, tmp_path):
        texts = ["<think>A secret.</think> One.", "A secret.</think>Two.", "Three.", "<think>A secret."]
        server = stub(lambda number, body: (200, {}, said(texts[number % 4], "length" if number > 4 else "stop")))
        how = {"openai_api": "chat", "max_concurrency": 1, "concurrent_games": 1}
        lost = run(*flags(place, tmp_path, server.url, **how, max_games=1), status=UNFINISHED)
        shown = [body["messages"][0]["content"] for *_, body in server.requests]
        assert all(text in shown[3] for text in ("One.", "Two.", "Three.")) and "secret" not in "".join(shown)
        assert "--max_new_tokens" not in lost.errors
        lost = run(*flags(place, tmp_path, server.url, **how, max_games=1), status=UNFINISHED)
        assert "thinking may have taken all --max_new_tokens" in lost.errors

    def test_a_request_without_an_answer_in_time_is_asked_again(self, stub, place, tmp_path):
        server = stub(lambda number, body: time.sleep(2 * (number == 1)) or (200, {}, said()))
        run(*flags(place, tmp_path, server.url, max_games=1, openai_timeout=0.5))
        assert len(server.requests) == 5

    @pytest.mark.parametrize(
        "status, error, message",
        [
            (307, {"message": "moved"}, "307.*moved"),  # redirects are not followed
            (401, {"message": "Incorrect API key"}, "401.*Incorrect API key"),
            (403, {"message": "not yours"}, "403.*not yours"),
            (404, {"message": "The model `some/model` does not exist"}, "404.*does not exist"),
            (429, {"message": "You exceeded your quota", "code": "insufficient_quota"}, "429.*exceeded your quota"),
            (400, {"message": "Unknown field\n top_q\x1b[2J" + "very " * 10**5}, "400.*Unknown field"),
        ],
    )
    def test_a_wrong_key_or_model_and_a_first_request_that_is_refused_end_the_run_with_one_line(
        self, status, error, message, stub, place, tmp_path
    ):
        server = stub(lambda number, body: (status, {"Location": "/v1/completions"}, {"error": error}))
        line = last_line(run(*flags(place, tmp_path, server.url, max_concurrency=1), status=2))
        assert re.search(rf"some/model at 127.0.0.1:\d+: .*{message}", line)
        assert "\x1b" not in line and len(line) < 500
        assert len(server.requests) == (4 if status == 429 else 1)
        assert stored(tmp_path) == []

    def test_when_nothing_comes_the_run_ends_instead_of_walking_through_all_words(self, stub, place, tmp_path):
        server = stub(lambda number, body: FAULTS["500"] if number >= 8 else (200, {}, said()))
        left = run(*flags(place, tmp_path, server.url, openai_retries=1, max_concurrency=2), status=UNFINISHED)
        assert "20 games in a row had to be left unfinished" in left.errors
        assert len(server.requests) <= 8 + 2 * 22

    def test_under_torchrun_other_ranks_end_their_games_before_the_launch_fails(self, stub, place, tmp_path):
        last_of_rank_1 = [time.monotonic()]

        def behave(number, body):
            word = next(iter(re.findall("`(.*)`", body["prompt"])), None)
            if word == WORDS[1]:
                return 422, {}, {"error": {"message": "not this word"}}
            if word in WORDS[1:12:2]:
                last_of_rank_1[0] = time.monotonic()
            while word == WORDS[10] and time.monotonic() - last_of_rank_1[0] < 4:  # long enough to end rank 0 in it
                time.sleep(0.05)
            return 200, {}, said()

        # Word 1 comes last among those of rank 1's first requests: one at a time, so another was answered before it.
        words = tmp_path / "words.txt"
        words.write_text("\n".join([WORDS[0], WORDS[3], WORDS[2], WORDS[1], *WORDS[4:12]]))
        arguments = flags(place, tmp_path, stub(behave).url, max_concurrency=1, data_path=words)
        process = start([*TORCHRUN, "--nproc_per_node=2", "tools/play_llm_game.py", *arguments], env=os.environ)
        printed, _ = process.communicate(timeout=300)
        assert process.returncode != 0
        assert "play_llm_game.py: 1 games are missing; the same command plays them" in printed
        games = [game for rank in (0, 1) for game in read_json_or_jsonl(tmp_path / f"{STEM}_rank{rank}.jsonl")]
        assert sorted(game["index"] for game in games) == [index for index in range(12) if index != 3]

    def test_rank_0_ends_as_a_rank_that_lost_games(self, stub, place, tmp_path, monkeypatch):
        (tmp_path / f".{STEM}_rank1.lock").touch()
        monkeypatch.setenv("WORLD_SIZE", "2")
        left = run(*flags(place, tmp_path, stub().url, max_games=2), status=UNFINISHED)
        assert "1 games are missing; the same command plays them" in last_line(left) and stored(tmp_path) == [0]


# --- the cap on tokens ---------------------------------------------------------------------------------------------


class TestCap:
    def test_no_game_begins_once_it_is_reached_and_earlier_starts_count(self, stub, place, tmp_path):
        """A game takes 4 x 37 = 148 tokens; two are played at once."""
        server = stub(lambda number, body: (200, {}, said(usage={"prompt_tokens": 33, "completion_tokens": 4})))
        for cap, games in ((1000, 7), (2000, 14)):
            left = run(*flags(place, tmp_path, server.url, max_total_tokens=cap, max_concurrency=2), status=UNFINISHED)
            assert f"--max_total_tokens if {cap} are used up" in last_line(left)
            assert games <= len(stored(tmp_path)) <= games + 1
            assert len(server.requests) == 4 * len(stored(tmp_path))  # games that had begun have ended
        run(*flags(place, tmp_path, server.url))
        assert len(server.requests) == 40 * 4

    def test_it_is_divided_by_the_processes(self, stub, place, tmp_path, monkeypatch):
        monkeypatch.setattr("tools.selfplay.play.world_size", lambda: 4)
        run(*flags(place, tmp_path, stub().url, max_total_tokens=1200, max_concurrency=1), status=UNFINISHED)
        assert stored(tmp_path) == [0]  # a game takes 300 tokens

    def test_a_server_that_counts_no_tokens_cannot_be_capped(self, stub, place, tmp_path):
        server = stub(lambda number, body: (200, {}, said(usage=None)))
        refused = run(*flags(place, tmp_path, server.url, max_total_tokens=5), status=2)
        assert "counts no tokens" in last_line(refused)
        run(*flags(place, tmp_path, server.url, max_games=2))
        assert {reply["tokens"] for game in results(tmp_path) for reply in game["replies"]} == {0}


# --- the programs --------------------------------------------------------------------------------------------------


def test_servers_may_move_but_not_change_their_api(stub, place, tmp_path):
    run(*flags(place, tmp_path, stub().url, max_games=2))
    settings = json.loads((tmp_path / f"{STEM}_settings.json").read_text())["settings"]
    expected = {"path": MODEL, "api": "completions", "extra_sampling": False}
    assert settings["attacker_model_name_or_path"] == expected
    other = stub()
    run(*flags(place, tmp_path, other.url, max_games=4))
    assert len(other.requests) == 8
    for changes in ({"openai_api": "chat"}, {"defender_model_name_or_path": "openai:other"}):
        refused = run(*flags(place, tmp_path, other.url, max_games=6, **changes), status=2)
        assert "made with other settings" in last_line(refused)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_concurrency": 0, "openai_retries": -1}, "--openai_retries is -1; .*; --max_concurrency is 0"),
        ({"min_new_tokens": 2}, "--min_new_tokens needs a server"),
        ({"url": "http://a host/v1"}, "--openai_base_url must look like"),
        ({"url": "http://me:hush@host/v1"}, "^(?!.*hush).*without user and password"),
        ({"openai_api": "responses"}, "--openai_api"),
        ({"openai_tokenizer": "m", "openai_api": "chat"}, "--openai_tokenizer sends token ids"),
        ({"url": None, "OPENAI_API_KEY": ""}, "needs OPENAI_API_KEY for OpenAI itself"),
        ({"OPENAI_API_KEY": f"{KEY}\n"}, "OPENAI_API_KEY holds"),
        ({"OPENAI_API_KEY": f"{KEY}\u00fc"}, "OPENAI_API_KEY holds"),
    ],
)
def test_bad_flags_end_with_one_line(changes, message, place, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", changes.get("OPENAI_API_KEY", KEY))
    changes = {"url": "http://127.0.0.1:9/v1"} | {name: value for name, value in changes.items() if name.islower()}
    refused = run(*flags(place, tmp_path / "out", **changes), status=2)
    assert re.search(message, last_line(refused))
    assert not (tmp_path / "out").exists()


def test_without_the_package_of_its_client_a_server_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused = run(*flags(place, tmp_path / "out", "http://127.0.0.1:9/v1"), status=2)
    assert "pip install" in last_line(refused) and not (tmp_path / "out").exists()


def test_a_server_may_be_one_of_the_players_of_a_match(stub, place, tiny_model, tmp_path):
    """A word that the server refuses first thing in a match, but after it has answered in another one."""
    ill = True
    server = stub(
        lambda number, body: (422, {}, {}) if ill and f"`{WORDS[0]}`" in body["prompt"] else (200, {}, said())
    )
    values = {"players": [f"local={tiny_model}", f"api={MODEL}"], "words": place / "words.txt", "max_words": 4}
    values |= {"games_per_word": 1, "task_type": "sampling", "output_dir": tmp_path, "openai_base_url": server.url}
    values |= {"max_turns": 2, "max_length": 256, "max_new_tokens": 4, "openai_retries": 1, "max_concurrency": 1}
    arguments = flags_of(values | {"prompt_templates": place / "prompts.json"})
    left = run(*arguments, status=UNFINISHED, program=evaluate_games)
    assert "1 games are missing; the same command plays them" in last_line(left)
    assert not (tmp_path / "matches.json").exists()
    ill = False
    run(*arguments, program=evaluate_games)
    rows = json.loads((tmp_path / "matches.json").read_text())["results"]
    assert {(row["player"], row["opponent"]) for row in rows} == {("api", "local"), ("local", "api")}


# --- an independent server -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served_model(tmp_path_factory):
    """A tiny model whose tokenizer puts BOS first, as servers rely on, with a chat template that adds nothing else."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    folder = tmp_path_factory.mktemp("served")
    build_llama(0, len(tokenizer), num_hidden_layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def serve(served_model, tmp_path_factory):
    """The URL of `transformers serve` with that model."""
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason="transformers serve needs fastapi and uvicorn")
    log = Path(tmp_path_factory.mktemp("log") / "serve.log")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", served_model, "--device", "cpu"]
    with open(log, "w") as file:
        process = start([*command, "--host", "127.0.0.1", "--port", address[10:]], stdout=file, stderr=file)
    deadline = time.monotonic() + 120
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{address}/health", timeout=5).close()
                break
            time.sleep(0.1)
        yield f"http://{address}/v1"
    finally:
        process.kill()
        process.wait()


class TestTransformersServe:
    STEM = "api_testing_words"

    @staticmethod
    def flags(place, output, model, url=None, **changes):
        models = {f"{side}_model_name_or_path": model for side in GAME.roles}
        return flags(place, output, url, task_type="testing", max_new_tokens=3, **models | changes)

    @pytest.fixture(scope="class")
    def local_games(self, place, served_model, tmp_path_factory):
        output = tmp_path_factory.mktemp("local")
        run(*self.flags(place, output, served_model))
        return [game["history"] for game in results(output, self.STEM)]

    @pytest.mark.parametrize("api", ["completions", "chat"])
    def test_greedy_games_are_those_of_the_same_model_in_this_process(
        self, api, serve, served_model, local_games, place, tmp_path
    ):
        run(*self.flags(place, tmp_path, f"openai:{served_model}", serve, openai_api=api))
        games = results(tmp_path, self.STEM)
        assert [game["history"] for game in games] == local_games
        for game in games:
            for reply in game["replies"]:
                assert reply["prompt_tokens"] > 60  # one for each byte of the prompt, and BOS
                assert reply["finish_reason"] == ("length" if reply["tokens"] == 3 else "stop")
