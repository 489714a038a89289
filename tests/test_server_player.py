"""Players behind a server: what is asked of it, what its faults do to games, what it costs.

Against two servers on loopback: a stub that misbehaves as it is told, and the one that comes with transformers.
"""

import contextlib
import gzip
import json
import math
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT, build_llama, build_tokenizer
from forks import python

from dataloaders import encode_example, normalize_row
from tools import assign_rewards, evaluate_games, play_llm_game
from tools.games.prompts import default_templates, load_templates, play_prompt
from tools.games.taboo import Taboo
from tools.players import server_flags
from tools.players.budget import Cost, Estimator, TokenBudget
from tools.selfplay.options import PlayFlags
from utils import read_json_or_jsonl, run_program, write_json

pytest.importorskip("openai", reason="players behind a server need the package openai")

from tools.players import connection  # noqa: E402
from tools.players import server as server_player  # noqa: E402

STEM = "api_sampling_words"
KEY = "sk-not-to-be-seen"
WORDS = [f"word{number}" for number in range(100, 140)]
GAME = Taboo()
MODEL = "openai:some/model"
USAGE = {"prompt_tokens": 70, "completion_tokens": 5}


# --- a server that misbehaves as it is told ------------------------------------------------------------------------


def said(text="Hello.", finish_reason="stop", usage=USAGE) -> dict:
    """A reply as either endpoint gives it."""
    choice = {"index": 0, "text": text, "message": {"role": "assistant", "content": text}}
    return {"choices": [choice | {"finish_reason": finish_reason}], **({"usage": usage} if usage else {})}


class Stub:
    """An HTTP server: `behave(number, body)` gives status, headers and body of each answer, or what writes it.

    None hangs up.
    """

    tokenize = staticmethod(lambda body: (404, {}, {}))

    def __init__(self, behave=lambda number, body: (200, {}, said())):
        self.behave, self.lock = behave, threading.Lock()
        self.requests, self.times, self.in_flight = [], [], 0
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    return self.answer(*stub.tokenize(body))
                with stub.lock:
                    number = len(stub.requests)
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    stub.requests.append((self.path, headers, body))
                    stub.times.append(time.monotonic())
                    stub.in_flight += 1
                answer = stub.behave(number, body)
                with stub.lock:
                    stub.in_flight -= 1
                if answer is None:
                    self.close_connection = True
                    return
                if callable(answer):
                    return answer(self)
                self.answer(*answer)

            def answer(self, status, headers, body):
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256

            def handle_error(self, request, client_address):  # of clients that no longer wait
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
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

        def start(*behave):
            made = Stub(*behave)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with words and short prompts."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    rules = [f"Rule {number}: {{max_turns}} turns.\n" for number in range(8)]
    write_json(
        folder / "prompts.json",
        {"rules": rules, "attacker_instruction": "Hide `{target_word}`.", "defender_instruction": "Guess."},
    )
    return folder


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch):
    """Backoff without the waiting, nothing of this machine's environment, a key that must show up nowhere."""
    monkeypatch.setattr(server_player, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(server_player, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(server_player, "REST", 0.2)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def flags(place, output, url=None, **changes):
    """A command with short games; None leaves a flag out."""
    values = {
        "attacker_model_name_or_path": MODEL,
        "defender_model_name_or_path": MODEL,
        "openai_base_url": url,
        "model_prefix": "api",
        "data_suffix": "words",
        "data_path": place / "words.txt",
        "output_dir": output,
        "max_turns": 2,
        "max_length": 256,
        "max_new_tokens": 4,
        "prompt_templates": place / "prompts.json",
        "max_concurrency": 8,
        "openai_retries": 3,
        "openai_timeout": 20,
    }
    lists = {name: value if isinstance(value, list) else [value] for name, value in {**values, **changes}.items()}
    return [str(text) for name, value in lists.items() if value != [None] for text in (f"--{name}", *value)]


def run_here(arguments, monkeypatch, program=play_llm_game):
    """The program in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", [f"tools/{program.__name__.split('.')[-1]}.py", *arguments])
    try:
        run_program(program.main)
    except SystemExit as stop:
        return stop.code
    return 0


def results(folder, stem=STEM):
    return read_json_or_jsonl(folder / f"{stem}_results.json")


def stored(folder, stem=STEM):
    """The indices of the games that are there, in the order in which they ended."""
    return [json.loads(line)["index"] for line in (folder / f"{stem}_rank0.jsonl").read_text().splitlines()]


def last_line(capsys):
    return capsys.readouterr().err.splitlines()[-1]


# --- what is asked -------------------------------------------------------------------------------------------------


class TestRequests:
    @pytest.mark.parametrize("api", ["completions", "chat"])
    def test_the_server_is_shown_the_prompts_of_local_play(self, api, stub, place, tmp_path, monkeypatch):
        server = stub(lambda number, body: (200, {}, said(f" Message {number}. \n")))
        arguments = flags(place, tmp_path, server.url, openai_api=api, max_games=1)
        assert run_here(arguments, monkeypatch) == 0
        (game,) = results(tmp_path)
        assert [message["content"] for message in game["history"]] == [f"Message {number}." for number in range(4)]
        templates = load_templates(place / "prompts.json", GAME)
        told = [play_prompt(GAME, game["history"][:end], WORDS[0], 2, templates) for end in range(4)]
        assert server.prompts() == told
        where = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}[api]
        assert {path for path, *_ in server.requests} == {where}
        if api == "chat":
            assert all(
                body["messages"] == [{"role": "user", "content": prompt}]
                for prompt, (*_, body) in zip(told, server.requests, strict=True)
            )

    @pytest.mark.parametrize(
        "changes, expected",
        [
            ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
            ({"task_type": "testing"}, {"temperature": 0}),
            (
                {"openai_extra_sampling": True, "min_new_tokens": 2},
                {"temperature": 1.2, "top_p": 1.0, "top_k": 50, "min_tokens": 2},
            ),
            (
                {"openai_extra_sampling": True, "top_k": 0},
                {"temperature": 1.2, "top_p": 1.0, "top_k": -1, "min_tokens": 0},
            ),
            ({"openai_extra_sampling": True, "task_type": "testing"}, {"temperature": 0, "min_tokens": 0}),
        ],
    )
    def test_sampling_is_that_of_the_flags(self, changes, expected, stub, place, tmp_path, monkeypatch):
        server = stub()
        assert run_here(flags(place, tmp_path, server.url, max_games=1, **changes), monkeypatch) == 0
        for *_, body in server.requests:
            del body["prompt"]
            assert body == {"model": "some/model", "max_tokens": 4, **expected}

    def test_with_its_tokenizer_prompts_go_out_as_ids(
        self, stub, place, tiny_model, tokenizer, tmp_path, monkeypatch, capsys
    ):
        """The server says that it sees 70 tokens, which is not what it was sent."""
        server = stub()
        how = {"openai_tokenizer": tiny_model, "max_length": 60, "max_games": 2, "min_new_tokens": 1}
        assert run_here(flags(place, tmp_path, server.url, allow_cuts=True, **how), monkeypatch) == 0
        game = results(tmp_path)[0]
        prompt = play_prompt(GAME, [], game["target_word"], 2, load_templates(place / "prompts.json", GAME))
        ids = [1, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        assert len(ids) > 56 and ids[-56:] in server.prompts()
        for *_, body in server.requests:
            assert body["stop_token_ids"] == [2] and body["min_tokens"] == 1 and body["return_token_ids"]
        assert len({body["seed"] for *_, body in server.requests}) == 8
        assert all(reply["prompt_cut"] for reply in game["replies"])
        assert capsys.readouterr().err.count("counts 70 prompt tokens, 56 were sent") == 1

    @pytest.mark.parametrize(
        "counted, message",
        [
            ((200, {}, {"count": 69}), "puts 1 special tokens before prompts"),
            ((200, {}, {"count": 70}), "puts no special tokens before prompts"),
            ((404, {}, {}), "it cannot be known whether"),
            ((200, {}, {"count": "many"}), "it cannot be known whether"),
        ],
    )
    def test_without_it_a_run_says_whether_the_tokens_are_known(
        self, counted, message, stub, place, tmp_path, monkeypatch, capsys
    ):
        server = stub()
        server.tokenize = lambda body: counted
        assert run_here(flags(place, tmp_path, server.url, max_games=2), monkeypatch) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if "--openai_tokenizer MODEL" in line]
        assert len(lines) == 1 and message in lines[0]

    def test_models_that_know_max_completion_tokens_only_are_asked_again_with_it(
        self, stub, place, tmp_path, monkeypatch
    ):
        def behave(number, body):
            if "max_tokens" in body:
                refusal = {"message": "use max_completion_tokens", "param": "max_tokens", "code": "unsupported"}
                return 400, {}, {"error": refusal}
            return 200, {}, said()

        server = stub(behave)
        assert run_here(flags(place, tmp_path, server.url, openai_api="chat", max_games=4), monkeypatch) == 0
        limits = [{key: body[key] for key in body if key.startswith("max")} for *_, body in server.requests]
        assert {"max_completion_tokens": 4} in limits and len(limits) <= 4 * 4 + 4  # each game refused once at most

    def test_no_more_requests_are_in_flight_than_allowed_to_all_servers_together(
        self, stub, place, tmp_path, monkeypatch
    ):
        together, opened = [], threading.Event()

        def behave(number, body):
            together.append(sum(server.in_flight for server in servers))
            if together[-1] == 5 and not opened.is_set():
                time.sleep(0.7)  # for a sixth one to come
                opened.set()
            opened.wait(30)
            return 200, {}, said()

        servers = [stub(behave), stub(behave)]
        how = {"max_concurrency": 5, "concurrent_games": 20, "max_games": 20}
        assert run_here(flags(place, tmp_path, [server.url for server in servers], **how), monkeypatch) == 0
        assert max(together) == 5

    def test_games_are_dealt_out_to_the_servers_and_stay_there(self, stub, place, tmp_path, monkeypatch):
        servers = [stub(), stub(), stub()]
        urls = [server.url for server in servers]
        assert run_here(flags(place, tmp_path, urls, max_games=9), monkeypatch) == 0
        for number, server in enumerate(servers):
            named = [word for prompt in server.prompts() for word in re.findall("`(.*)`", prompt)]
            assert set(named) == set(WORDS[number:9:3])
            assert len(server.requests) == 3 * 4

    def test_the_base_url_may_come_from_the_environment(self, stub, place, tmp_path, monkeypatch):
        server = stub()
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert run_here(flags(place, tmp_path, max_games=2), monkeypatch) == 0
        assert len(server.requests) == 8

    def test_either_side_may_be_a_server_and_the_other_a_model_here(
        self, stub, place, tiny_model, tmp_path, monkeypatch
    ):
        for side, place_in_game in (("attacker", 0), ("defender", 1)):
            server = stub()
            changes = {f"{side}_model_name_or_path": MODEL}
            other = {"attacker": "defender", "defender": "attacker"}[side]
            changes[f"{other}_model_name_or_path"] = tiny_model
            output = tmp_path / side
            assert run_here(flags(place, output, server.url, max_games=6, **changes), monkeypatch) == 0
            games = results(output)
            assert len(server.requests) == 6 * 2
            for game in games:
                said_by_server = [message["content"] == "Hello." for message in game["history"]]
                assert said_by_server == [place == place_in_game for place in (0, 1, 0, 1)]
                assert ["prompt_tokens" in reply for reply in game["replies"]] == said_by_server
            summary = json.loads((output / f"{STEM}_summary.json").read_text())
            assert (summary["server_prompt_tokens"], summary["server_new_tokens"]) == (6 * 2 * 70, 6 * 2 * 5)

    def test_open_files_suffice_for_the_connections(self, stub, place, tmp_path, monkeypatch):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            opened = len(os.listdir("/dev/fd"))  # by the tests before this one
            resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 100, hard))
            assert run_here(flags(place, tmp_path, stub().url, max_concurrency=300, max_games=1), monkeypatch) == 0
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(800, hard), hard)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TestKey:
    def test_it_reaches_the_server_and_nothing_else(self, stub, place, tmp_path, monkeypatch, capfd):
        def behave(number, body):
            if number in (3, 4):  # a server that repeats it in its errors
                return 500, {}, {"error": {"message": f"bad luck with {KEY}"}}
            return (200, {}, said()) if number < 20 else (401, {}, {"error": {"message": f"wrong key {KEY}"}})

        server = stub(behave)
        assert run_here(flags(place, tmp_path, server.url), monkeypatch) == 2
        assert {headers["authorization"] for _, headers, _ in server.requests} == {f"Bearer {KEY}"}
        out, err = capfd.readouterr()
        assert "wrong key ***" in err
        assert KEY not in out + err
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files and not any(KEY in path.read_text() for path in files)

    def test_a_server_without_keys_needs_none(self, stub, place, tmp_path, monkeypatch):
        monkeypatch.delenv("OPENAI_API_KEY")
        assert run_here(flags(place, tmp_path, stub().url, max_games=2), monkeypatch) == 0


# --- faults --------------------------------------------------------------------------------------------------------


def hangs(number, body):
    time.sleep(1)
    return 200, {}, said()


def drips(number, body):
    """A blank at a time, for ever: each comes in time, the answer never does."""

    def write(handler):
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(b" ")
                time.sleep(0.05)

    return write


PASSING_FAULTS = {
    "429": lambda number, body: (429, {"Retry-After": "0.1"}, {"error": {"message": "slow down"}}),
    "500": lambda number, body: (500, {}, b"Internal Server Error"),
    "503": lambda number, body: (503, {}, {"error": {"message": "loading"}}),
    "hung up": lambda number, body: None,
    "slow": hangs,
    "no JSON": lambda number, body: (200, {"Content-Type": "text/html"}, b"<html>Welcome!</html>"),
    "broken JSON": lambda number, body: (200, {}, b'{"choices": ['),
    "a list": lambda number, body: (200, {}, [1, 2]),
    "no choices": lambda number, body: (200, {}, {"choices": []}),
    "null choices": lambda number, body: (200, {}, {"choices": None}),
    "null text": lambda number, body: (200, {}, said(None)),
    "half a character": lambda number, body: (200, {}, said("\ud800")),
    "broken off": lambda number, body: (200, {}, said("Hel", "content_filter")),
    "dripping": drips,
    "endless": lambda number, body: (200, {}, b" " * (connection.BODY_LIMIT + 1)),
    "endless when unpacked": lambda number, body: (200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(10**8))),
    "a long message": lambda number, body: (200, {}, said("x" * (connection.MESSAGE_LIMIT + 1))),
    "nested": lambda number, body: (200, {}, b'{"choices": ' + b"[" * 10**6 + b"]" * 10**6 + b"}"),
    "a nested text": lambda number, body: (
        200,
        {},
        b'{"choices": [{"finish_reason": "stop", "text": %s1%s}]}' % (b"[" * 900, b"]" * 900),
    ),
    "more tokens than there are": lambda number, body: (200, {}, said(usage=USAGE | {"prompt_tokens": 10**30})),
    "infinitely many tokens": lambda number, body: (200, {}, said(usage=USAGE | {"completion_tokens": 1e999})),
    "less than no tokens": lambda number, body: (200, {}, said(usage=USAGE | {"prompt_tokens": -5})),
    "a million ids that are none": lambda number, body: (
        200,
        {},
        b'{"choices": [{"finish_reason": "stop", "text": "", "token_ids": [%s-1]}]}' % (b"-1," * 10**6),
    ),
    "true tokens": lambda number, body: (200, {}, said(usage=USAGE | {"prompt_tokens": True})),
}


class TestFaults:
    @pytest.mark.parametrize("fault", PASSING_FAULTS)
    def test_what_passes_is_sat_out(self, fault, stub, place, tmp_path, monkeypatch, caplog):
        def behave(number, body):
            return PASSING_FAULTS[fault](number, body) if number % 3 == 1 and number < 12 else (200, {}, said())

        server = stub(behave)
        changes = {"max_games": 5, "openai_timeout": 0.3 if fault in ("slow", "dripping") else 20, "openai_retries": 8}
        assert run_here(flags(place, tmp_path, server.url, **changes), monkeypatch) == 0
        assert len(server.requests) == 5 * 4 + 4
        for game in results(tmp_path):
            assert [message["content"] for message in game["history"]] == ["Hello."] * 4
        assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]

    def test_requests_follow_no_redirect(self, stub, place, tmp_path, monkeypatch, capsys):
        other = stub()
        server = stub(lambda number, body: (307, {"Location": f"{other.url}/completions"}, {}))
        assert run_here(flags(place, tmp_path, server.url), monkeypatch) == 2
        assert f"it redirects to {other.url}/completions; requests go to the base URL only" in last_line(capsys)
        assert other.requests == []

    def test_what_a_server_says_of_an_error_is_no_longer_than_a_line_and_moves_no_cursor(
        self, stub, place, tmp_path, monkeypatch, capsys
    ):
        server = stub(lambda number, body: (400, {}, {"error": {"message": "no\x1b[2J\n" + "very " * 10**5 + "long"}}))
        assert run_here(flags(place, tmp_path, server.url), monkeypatch) == 2
        line = last_line(capsys)
        assert "no\ufffd[2J very very" in line and len(line) < 500

    def test_retry_after_is_waited_for(self, stub, place, tmp_path, monkeypatch):
        server = stub(lambda number, body: (429, {"Retry-After": "1"}, {}) if number == 0 else (200, {}, said()))
        assert run_here(flags(place, tmp_path, server.url, max_games=1), monkeypatch) == 0
        assert server.times[1] - server.times[0] >= 1

    def test_retry_after_says_seconds_or_nothing(self):
        assert server_player.retry_after("7") == 7
        assert server_player.retry_after("0.5") == 0.5
        assert [server_player.retry_after(text) for text in (None, "soon", "-3", "0", "nan")] == [0] * 5

    def test_waits_double_up_to_a_cap_and_are_drawn(self, stub, place, tmp_path, monkeypatch):
        drawn = []
        monkeypatch.setattr(server_player, "FIRST_WAIT", 0.001)
        monkeypatch.setattr(server_player, "LONGEST_WAIT", 0.004)
        monkeypatch.setattr(server_player.random, "uniform", lambda *ends: drawn.append(ends) or 1)
        wait, waits = server_player.asyncio.sleep, []
        monkeypatch.setattr(server_player.asyncio, "sleep", lambda seconds: waits.append(seconds) or wait(0))
        server = stub(lambda number, body: (503, {}, {}) if number < 5 else (200, {}, said()))
        assert run_here(flags(place, tmp_path, server.url, max_games=1, openai_retries=5), monkeypatch) == 0
        assert waits == [0.001, 0.002, 0.004, 0.004, 0.004] and set(drawn) == {(0.5, 1)}

    def test_a_long_ban_is_not_sat_out(self, stub, place, tmp_path, monkeypatch, capsys):
        server = stub(lambda number, body: (429, {"Retry-After": "3600"}, {}) if number == 0 else (200, {}, said()))
        assert run_here(flags(place, tmp_path, server.url, max_games=3), monkeypatch) == 3
        assert "1 games are missing" in last_line(capsys)
        assert len(server.requests) == 1 + 2 * 4

    @pytest.mark.parametrize("fault", ["500", "hung up", "null text"])
    def test_a_game_whose_reply_cannot_be_had_is_left_for_the_next_start(
        self, fault, stub, place, tmp_path, monkeypatch, capsys
    ):
        ill = True

        def behave(number, body):
            if ill and f"`{WORDS[3]}`" in body["prompt"] and "Hello." in body["prompt"]:  # at its third message
                return PASSING_FAULTS[fault](number, body)
            return 200, {}, said()

        server = stub(behave)
        arguments = flags(place, tmp_path, server.url, max_games=12)
        assert run_here(arguments, monkeypatch) == 3
        err = capsys.readouterr().err
        assert err.splitlines()[-1] == "play_llm_game.py: 1 games are missing; the same command plays them"
        assert f"{WORDS[3]}: left unfinished" in err and "(asked 4 times)" in err
        assert sorted(stored(tmp_path)) == [index for index in range(12) if index != 3]
        assert not (tmp_path / f"{STEM}_results.json").exists()
        ill, before = False, len(server.requests)
        assert run_here(arguments, monkeypatch) == 0
        assert len(server.requests) - before == 4  # that game alone, from its beginning
        assert [game["target_word"] for game in results(tmp_path)] == WORDS[:12]

    def test_a_prompt_that_is_too_long_for_the_server_leaves_its_game_unfinished(
        self, stub, place, tmp_path, monkeypatch, capsys
    ):
        def behave(number, body):
            if f"`{WORDS[2]}`" in body["prompt"] and "Hello." in body["prompt"]:
                return 400, {}, {"error": {"message": "maximum context length is 99 tokens", "code": 400}}
            return 200, {}, said()

        server = stub(behave)
        assert run_here(flags(place, tmp_path, server.url, max_games=6), monkeypatch) == 3
        assert re.search(rf"{WORDS[2]}: left unfinished: .*maximum context length", capsys.readouterr().err)
        assert sorted(stored(tmp_path)) == [0, 1, 3, 4, 5]
        assert len(server.requests) == 5 * 4 + 3  # it is not asked again

    def test_when_nothing_comes_the_run_ends_instead_of_walking_through_all_words(
        self, stub, place, tmp_path, monkeypatch, capsys
    ):
        server = stub(lambda number, body: (503, {}, {}) if number >= 8 else (200, {}, said()))
        changes = {"openai_retries": 1, "max_concurrency": 2}
        assert run_here(flags(place, tmp_path, server.url, **changes), monkeypatch) == 3
        err = capsys.readouterr().err
        assert "20 games in a row had to be left unfinished" in err
        # Eight replies are two games of four, or one where a third game takes the last of them.
        assert re.search(r"3[89] games are missing; the same command plays them", err.splitlines()[-1])
        assert len(server.requests) <= 8 + 2 * 22

    def test_a_server_that_is_down_from_the_start_ends_the_run_too(self, place, tmp_path, monkeypatch, capsys):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
            assert run_here(flags(place, tmp_path, url, openai_retries=1), monkeypatch) == 3
        assert "40 games are missing" in last_line(capsys)

    def test_of_several_servers_the_others_take_over(self, stub, place, tmp_path, monkeypatch):
        monkeypatch.setattr(server_player, "REST", 600)
        dead, alive = stub(lambda number, body: None), stub()
        arguments = flags(place, tmp_path, [dead.url, alive.url], openai_retries=1)
        assert run_here(arguments, monkeypatch) == 0
        assert len(results(tmp_path)) == 40
        assert len(alive.requests) == 40 * 4
        assert 1 <= len(dead.requests) <= 8  # those in flight before the first one failed

    @pytest.mark.parametrize(
        "status, error, message",
        [
            (401, {"message": "Incorrect API key"}, "401.*Incorrect API key"),
            (403, {"message": "not yours"}, "403.*not yours"),
            (404, {"message": "The model `some/model` does not exist"}, "404.*does not exist"),
            (429, {"message": "You exceeded your quota", "code": "insufficient_quota"}, "429.*exceeded your quota"),
            (400, {"message": "Unknown field\n top_q"}, "400.*Unknown field"),  # the first request: so are all others
        ],
    )
    def test_a_wrong_key_or_model_fails_at_once_with_one_line(
        self, status, error, message, stub, place, tmp_path, monkeypatch, capsys
    ):
        server = stub(lambda number, body: (status, {}, {"error": error}))
        assert run_here(flags(place, tmp_path, server.url, max_concurrency=1), monkeypatch) == 2
        line = last_line(capsys)
        assert re.match(rf"play_llm_game.py: error: openai:some/model: 127.0.0.1:\d+: .*{message}", line)
        assert len(server.requests) == 1
        assert stored(tmp_path) == []

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

        server = stub(behave)
        command = [python(), "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
        command += ["--monitor_interval=0.1", "tools/play_llm_game.py"]
        # Word 1 comes last among those of rank 1's first requests: one at a time, so another was answered before it.
        words = tmp_path / "words.txt"
        words.write_text("\n".join([WORDS[0], WORDS[3], WORDS[2], WORDS[1], *WORDS[4:12]]))
        command += flags(place, tmp_path, server.url, max_concurrency=1, data_path=words)
        environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
        finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert finished.returncode != 0
        assert "play_llm_game.py: 1 games are missing; the same command plays them" in finished.stderr
        games = [game for rank in (0, 1) for game in read_json_or_jsonl(tmp_path / f"{STEM}_rank{rank}.jsonl")]
        assert sorted(game["index"] for game in games) == [index for index in range(12) if index != 3]


# --- tokens and money ----------------------------------------------------------------------------------------------


class TestTokens:
    def test_they_are_summed_and_shown(self, stub, place, tmp_path, monkeypatch, capsys):
        prices = {"price_in": 2, "price_out": 30}
        assert run_here(flags(place, tmp_path, stub().url, max_games=10, **prices), monkeypatch) == 0
        out, err = capsys.readouterr()
        summary = json.loads(out.splitlines()[-1])
        assert (summary["server_prompt_tokens"], summary["server_new_tokens"]) == (40 * 70, 40 * 5)
        assert "servers answered: 40 calls, 2,800 prompt and 200 completion tokens, price 0.01" in err
        assert "server tokens=3,000" in err  # beside the bar

    def test_a_bad_reply_is_paid_too(self, stub, place, tmp_path, monkeypatch, capsys):
        server = stub(lambda number, body: (200, {}, said(None) if number == 0 else said()))
        assert run_here(flags(place, tmp_path, server.url, max_games=1), monkeypatch) == 0
        assert "servers answered: 5 calls, 350 prompt and 25 completion tokens" in capsys.readouterr().err

    def test_tokens_that_a_server_does_not_count_are_estimated_and_that_is_said_once(
        self, stub, place, tmp_path, monkeypatch, capsys
    ):
        server = stub(lambda number, body: (200, {}, said("Twelve chars", usage=None)))
        assert run_here(flags(place, tmp_path, server.url, max_games=3), monkeypatch) == 0
        assert capsys.readouterr().err.count("does not say how many tokens it takes") == 1
        assert [reply["tokens"] for game in results(tmp_path) for reply in game["replies"]] == [3] * 12

    def test_the_limit_stops_before_it_is_passed_and_a_larger_one_goes_on(
        self, stub, place, tmp_path, monkeypatch, capsys
    ):
        """A game takes 4 x 37 = 148 tokens; the estimate says 146."""
        usage = {"prompt_tokens": 33, "completion_tokens": 4}
        server = stub(lambda number, body: (200, {}, said(usage=usage)))
        first = flags(place, tmp_path, server.url, max_total_tokens=2000)
        assert run_here(first, monkeypatch) == 3
        assert re.search(r"games are missing; --max_total_tokens 2000 has no room for them", last_line(capsys))
        played = len(stored(tmp_path))
        assert played in (12, 13)  # 13 x 148 = 1924
        assert len(server.requests) == 4 * played  # games that had begun have ended
        more = flags(place, tmp_path, server.url, max_total_tokens=4500)
        assert run_here(more, monkeypatch) == 3
        assert len(stored(tmp_path)) in (29, 30)  # 30 x 148 = 4440, counting what was spent before
        assert run_here(flags(place, tmp_path, server.url), monkeypatch) == 0
        assert len(server.requests) == 40 * 4

    def test_the_meter_keeps_room_for_the_games_that_are_being_played(self):
        meter = TokenBudget()
        meter.set_limit(1000, likely_game=100)
        games = meter.deal((index, "word") for index in range(100))
        assert [index for index, _ in games] == list(range(10))
        assert meter.exhausted
        meter.exhausted = False
        for index in range(10):  # they turn out cheaper
            meter.charge(index, 30, 5)
            meter.charge(index, 10, 5)
            meter.end(index)
        assert meter.spent == Cost(20, 400, 100)
        # One of the next costs (4 x 100 + 10 x 50) / 14 = 64.3 as far as is known: seven of them fit into the rest.
        assert [index for index, _ in meter.deal((index, "word") for index in range(10, 100))] == list(range(10, 17))
        meter.charge(10, 80, 20)  # and one of those was dearer than that
        meter.end(10)
        assert meter.spent.tokens == 600


class TestEstimate:
    def test_it_adds_up(self, place):
        """The rule has 16 characters; the messages' labels " - attacker: " and line ends are counted, texts not."""
        templates = load_templates(place / "prompts.json", GAME)
        said = [[{"role": GAME.roles[k % 2], "content": ""} for k in range(length)] for length in range(4)]
        prompts = [math.ceil(len(play_prompt(GAME, history, "art", 2, templates)) / 3) for history in said]
        estimator = Estimator(GAME, templates, 2, 10)
        cost = partial(estimator.cost, task="art", assumed=estimator.most)
        assert cost((MODEL, MODEL)) == Cost(4, sum(prompts) + 10 * (0 + 1 + 2 + 3), 40)
        assert cost((MODEL, "folder")) == Cost(2, prompts[0] + prompts[2] + 20, 20)
        assert cost(("folder", MODEL)) == Cost(2, prompts[1] + prompts[3] + 40, 20)
        assert cost(("folder", "folder")) == Cost()

    def test_a_dry_run_prints_it_and_calls_nobody(self, stub, place, tmp_path, monkeypatch, capsys):
        server = stub()
        monkeypatch.delenv("OPENAI_API_KEY")
        monkeypatch.setattr(server_flags, "find_spec", lambda name: None)  # needs no package either
        prices = {"price_in": 1000, "price_out": 2000}
        arguments = [*flags(place, tmp_path / "out", server.url, **prices), "--dry_run"]
        assert run_here(arguments, monkeypatch) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "40 games to play"
        likely = re.fullmatch(
            r"likely:  160 calls, ([\d,]+) prompt and 640 completion tokens, price ([\d.]+)", lines[1]
        )
        prompt_tokens = int(likely[1].replace(",", ""))
        assert float(likely[2]) == pytest.approx(prompt_tokens / 1000 + 640 / 500, abs=0.01)
        most = re.fullmatch(r"at most: 160 calls, ([\d,]+) prompt and 640 completion tokens, price .*", lines[2])
        assert int(most[1].replace(",", "")) > prompt_tokens
        assert "prompts at 4 characters a token" in lines[3]
        assert server.requests == []
        assert not (tmp_path / "out").exists()

    def test_of_a_run_that_was_begun_it_counts_what_is_missing(self, stub, place, tmp_path, monkeypatch, capsys):
        server = stub()
        assert run_here(flags(place, tmp_path, server.url, max_games=15), monkeypatch) == 0
        assert "15 games to play\n    likely:  60 calls" in capsys.readouterr().err  # before the first call
        for overwrite, games in ((False, 25), (True, 40)):
            arguments = flags(place, tmp_path, server.url, dry_run=True, overwrite=overwrite)
            assert run_here(arguments, monkeypatch) == 0
            assert capsys.readouterr().out.startswith(f"{games} games to play\n")
        assert len(stored(tmp_path)) == 15

    def test_the_imitation_games_of_the_paper(self, capsys):
        """30,000 words, both sides: the README's figures."""
        estimator = Estimator(GAME, default_templates(GAME), GAME.max_turns, PlayFlags().max_new_tokens)
        text = estimator.describe([((MODEL, MODEL), ["sixish"] * 30000)], None, None)
        assert "30,000 games to play\nlikely:  180,000 calls" in text
        assert "at most: 300,000 calls" in text


# --- the programs --------------------------------------------------------------------------------------------------


class TestSettings:
    def test_servers_may_move_but_not_change_their_api(self, stub, place, tmp_path, monkeypatch, capsys):
        assert run_here(flags(place, tmp_path, stub().url, max_games=2), monkeypatch) == 0
        settings = json.loads((tmp_path / f"{STEM}_settings.json").read_text())["settings"]
        assert settings["attacker_model_name_or_path"] == {
            "path": MODEL,
            "api": "completions",
            "extra_sampling": False,
        }
        other = stub()
        assert run_here(flags(place, tmp_path, other.url, max_games=4), monkeypatch) == 0
        assert len(other.requests) == 8
        for changes in ({"openai_api": "chat"}, {"defender_model_name_or_path": "openai:other"}):
            assert run_here(flags(place, tmp_path, other.url, max_games=6, **changes), monkeypatch) == 2
            assert "made with other settings" in last_line(capsys)

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"attacker_model_name_or_path": "openai:"}, "'openai:' names no model"),
            ({"max_concurrency": 0, "openai_retries": -1}, "--openai_retries is -1; .*; --max_concurrency is 0"),
            ({"openai_timeout": 0, "max_total_tokens": 0}, "--max_total_tokens is 0; .*; --openai_timeout is 0.0"),
            ({"price_in": 1}, "--price_in and --price_out go together"),
            ({"min_new_tokens": 2}, "--min_new_tokens is for servers that know min_tokens"),
            ({"openai_base_url": "localhost:8000"}, "'localhost:8000' is no base URL"),
            ({"openai_base_url": "http://host:port/v1"}, "'http://host:port/v1' is no base URL"),
            ({"openai_base_url": "http://a host/v1"}, "'http://a host/v1' is no base URL"),
            ({"openai_base_url": "http://me:hush@host/v1"}, "^(?!.*hush).*holds a user or a password"),
            ({"openai_api": "responses"}, "argument --openai_api: invalid choice"),
            ({"openai_tokenizer": "m", "openai_api": "chat"}, "--openai_tokenizer sends token ids: not to"),
            ({"openai_base_url": None, "OPENAI_API_KEY": None}, "needs OPENAI_API_KEY for OpenAI itself"),
        ],
    )
    def test_bad_flags_end_with_one_line(self, changes, message, place, tmp_path, monkeypatch, capsys):
        for variable in [name for name in changes if name.isupper()]:
            monkeypatch.delenv(variable)
            changes = {name: value for name, value in changes.items() if name != variable}
        url = changes.pop("openai_base_url", "http://127.0.0.1:9/v1")
        assert run_here(flags(place, tmp_path / "out", url, **changes), monkeypatch) == 2
        assert re.search(message, last_line(capsys))
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY}\u00fc", f" {KEY}", "\ufeff" + KEY])
    def test_a_key_that_no_header_can_hold_is_named_but_not_shown(self, key, place, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        assert run_here(flags(place, tmp_path / "out", "http://127.0.0.1:9/v1"), monkeypatch) == 2
        line = last_line(capsys)
        assert "OPENAI_API_KEY holds a blank, a line end or a character that is not ASCII" in line and KEY not in line

    def test_flags_of_servers_need_a_server(self, place, tiny_model, tmp_path, monkeypatch, capsys):
        models = {f"{side}_model_name_or_path": tiny_model for side in GAME.roles}
        arguments = flags(place, tmp_path, "http://h/v1", max_total_tokens=5, dry_run=True, **models)
        assert run_here(arguments, monkeypatch) == 2
        assert "--openai_base_url, --max_total_tokens, --dry_run: only for players openai:MODEL" in last_line(capsys)

    def test_a_missing_package_is_named_with_its_command(self, place, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(server_flags, "find_spec", lambda name: None)
        assert run_here(flags(place, tmp_path / "out", "http://h/v1"), monkeypatch) == 2
        line = last_line(capsys)
        assert "openai:MODEL needs a package: pip install" in line
        command = re.search('pip install "(.*?)"', line)[1]
        assert command in (ROOT / "requirements.txt").read_text()
        assert command in (ROOT / "tests" / "requirements.txt").read_text()


class TestEvaluation:
    @staticmethod
    def flags(place, model, output, url, **changes):
        values = {"players": [f"local={model}", f"api={MODEL}"], "words": place / "words.txt", "max_words": 4}
        values |= {"games_per_word": 1, "task_type": "sampling", "output_dir": output, "openai_base_url": url}
        values |= {"max_turns": 2, "max_length": 256, "max_new_tokens": 4, "openai_retries": 1}
        values |= {"prompt_templates": place / "prompts.json"} | changes
        lists = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
        return [str(text) for name, value in lists.items() for text in (f"--{name}", *value)]

    def test_a_server_may_be_one_of_the_players(self, stub, place, tiny_model, tmp_path, monkeypatch, capsys):
        """A word that the server refuses first thing in a match, but after it has answered in another one."""
        ill = True
        server = stub(
            lambda number, body: (422, {}, {}) if ill and f"`{WORDS[0]}`" in body["prompt"] else (200, {}, said())
        )
        arguments = self.flags(place, tiny_model, tmp_path, server.url, max_concurrency=1)
        assert run_here([*arguments, "--dry_run"], monkeypatch, evaluate_games) == 0
        assert "8 games to play\nlikely:  16 calls" in capsys.readouterr().out
        assert run_here(arguments, monkeypatch, evaluate_games) == 3
        assert "evaluate_games.py: 1 games are missing; the same command plays them" in last_line(capsys)
        assert not (tmp_path / "matches.json").exists()
        ill = False
        assert run_here(arguments, monkeypatch, evaluate_games) == 0
        rows = json.loads((tmp_path / "matches.json").read_text())["results"]
        assert {(row["player"], row["opponent"]) for row in rows} == {("api", "local"), ("local", "api")}

    def test_the_limit_holds_over_all_matches(self, stub, place, tiny_model, tmp_path, monkeypatch, capsys):
        """A game takes 2 x 75 tokens."""
        server = stub()
        arguments = self.flags(place, tiny_model, tmp_path, server.url, max_total_tokens=700, max_concurrency=1)
        assert run_here(arguments, monkeypatch, evaluate_games) == 3
        assert "--max_total_tokens 700 has no room for them" in last_line(capsys)
        assert 3 * 2 <= len(server.requests) <= 4 * 2


def test_games_of_a_strong_model_become_rows_to_imitate(stub, place, tokenizer, tmp_path, monkeypatch):
    """The README's way: chat games on the first words, rewards, rows that the trainer reads."""

    def behave(number, body):
        prompt = body["messages"][0]["content"]
        if "Hide `" in prompt:
            return 200, {}, said("It has four letters and a number.")
        return 200, {}, said("I know the word! It is `word105`!")  # right once, wrong otherwise

    how = {"openai_api": "chat", "max_games": 10, "temperature": 1.0}
    assert run_here(flags(place, tmp_path, stub(behave).url, **how), monkeypatch) == 0
    arguments = ["--input_data_path", str(tmp_path / f"{STEM}_results.json")]
    arguments += ["--output_data_path", str(tmp_path / "rows.json"), "--prompt_templates", str(place / "prompts.json")]
    assert run_here(arguments, monkeypatch, assign_rewards) == 0
    rows = [normalize_row(row) for row in read_json_or_jsonl(tmp_path / "rows.json")]
    assert [row["target"].startswith("I know") for row in rows] == [index == 5 for index in range(10)]
    assert sum(row["weight"] for row in rows) == 10
    for row in rows:
        encoded = encode_example(row, tokenizer)
        assert tokenizer.decode(encoded["input_ids"]).endswith(row["target"] + tokenizer.eos_token)


# --- an independent server -----------------------------------------------------------------------------------------


class TransformersServe:
    """`transformers serve` with one model, on a port that it comes back to after it was killed."""

    def __init__(self, model, log: Path):
        self.model, self.log = model, log
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            self.port = unused.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.start()

    def start(self):
        command = [python(), "-m", "transformers.cli.transformers", "serve", self.model, "--device", "cpu"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        with open(self.log, "a") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def wait(self):
        deadline = time.monotonic() + 120
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).read()
            time.sleep(0.1)

    def kill(self):
        self.process.kill()
        self.process.wait()


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
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason="transformers serve needs fastapi and uvicorn")
    server = TransformersServe(served_model, tmp_path_factory.mktemp("log") / "serve.log")
    yield server
    server.kill()


@pytest.fixture(scope="module", autouse=True)
def start_early(request):
    """The server starts while the tests above it run."""
    if any("serve" in item.fixturenames for item in request.session.items if item.module is request.module):
        request.getfixturevalue("serve")


class TestTransformersServe:
    """Greedy games must be those that the same model plays in this process, message by message."""

    STEM = "api_testing_words"

    @pytest.fixture(scope="class")
    def words(self, tmp_path_factory):
        path = tmp_path_factory.mktemp("words") / "words.txt"
        path.write_text("\n".join(f"word{number}" for number in range(100)))
        return path

    @pytest.fixture(scope="class")
    def local_games(self, words, place, served_model, tmp_path_factory):
        output = tmp_path_factory.mktemp("local")
        with pytest.MonkeyPatch.context() as patch:
            assert run_here(self.flags(place, words, output, served_model), patch) == 0
        return [game["history"] for game in results(output, self.STEM)]

    @staticmethod
    def flags(place, words, output, model, url=None, **changes):
        models = {f"{side}_model_name_or_path": model for side in GAME.roles}
        how = {"data_path": words, "task_type": "testing", "max_new_tokens": 3, **models}
        return flags(place, output, url, **how, **changes)

    @pytest.fixture(autouse=True)
    def patience(self, monkeypatch):
        monkeypatch.setattr(server_player, "LONGEST_WAIT", 1)

    @pytest.mark.parametrize("api, kills", [("completions", True), ("chat", False)])
    def test_a_hundred_games_at_concurrency_32(
        self, api, kills, serve, served_model, words, local_games, place, tmp_path, monkeypatch, capsys
    ):
        serve.wait()
        stored_at_kill = []

        def kill_in_the_middle():
            while len(stored_lines(tmp_path)) < 20:
                time.sleep(0.01)
            serve.kill()
            stored_at_kill.extend(stored_lines(tmp_path))
            serve.start()

        killer = threading.Thread(target=kill_in_the_middle, daemon=True)
        if kills:
            killer.start()
        changes = {"openai_api": api, "max_concurrency": 32, "openai_retries": 500}
        arguments = self.flags(place, words, tmp_path, f"openai:{served_model}", serve.url, **changes)
        assert run_here(arguments, monkeypatch) == 0
        if kills:
            killer.join()
            assert 20 <= len(stored_at_kill) < 80
            assert set(stored_at_kill) <= set(stored_lines(tmp_path))
        games = results(tmp_path, self.STEM)
        assert sorted(stored(tmp_path, self.STEM)) == list(range(100))
        assert [game["history"] for game in games] == local_games
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert summary["games"] == 100 and summary["server_new_tokens"] <= 400 * 3
        for game in games:
            for reply in game["replies"]:
                assert reply["prompt_tokens"] > 60  # one for each byte of the prompt, and BOS
                assert reply["finish_reason"] == ("length" if reply["tokens"] == 3 else "stop")

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"openai_extra_sampling": True}, "Unexpected fields in the request: {'min_tokens'}"),
            ({"attacker_model_name_or_path": "openai:other"}, "requested 'other'"),
        ],
    )
    def test_what_it_refuses_ends_the_run_with_its_words(
        self, changes, message, serve, served_model, words, place, tmp_path, monkeypatch, capsys
    ):
        serve.wait()
        arguments = self.flags(place, words, tmp_path, f"openai:{served_model}", serve.url)
        arguments += [text for name, value in changes.items() for text in (f"--{name}", str(value))]
        assert run_here(arguments, monkeypatch) == 2
        assert message in last_line(capsys)


def stored_lines(folder):
    """The lines of all rank files, without an unfinished last one."""
    text = b"".join(path.read_bytes().rpartition(b"\n")[0] + b"\n" for path in folder.glob("*_rank*.jsonl"))
    return [line for line in text.split(b"\n") if line]
