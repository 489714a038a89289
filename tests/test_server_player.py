"""Players behind a server: a stub that misbehaves in the way a test asks for, and the server of transformers."""

import asyncio
import contextlib
import json
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
from helpers import call, play_flags, start, write_place

from tools import play_llm_game
from tools.games.prompts import load_templates, play_prompt
from tools.games.taboo import Taboo
from tools.players.player import Reply, ReplyUnavailable, Sampling, Turn
from tools.players.server import ServerFlags, ServerPlayer
from utils import read_json_or_jsonl

pytest.importorskip("openai", reason="players behind a server need the package openai")

STEM = "api_sampling_words"
KEY = "sk-not-to-be-seen"
WORDS = [f"word{number}" for number in range(100, 140)]
GAME = Taboo()
MODEL = "openai:some/model"
USAGE = {"prompt_tokens": 70, "completion_tokens": 5}
UNFINISHED = 3


# --- a server that misbehaves in the way a test asks for -------------------------------------------------------------


def answer(content="Hello.", finish_reason="stop", usage=USAGE, **message) -> dict:
    """A reply as either endpoint gives it."""
    choice = {"index": 0, "text": content, "message": {"role": "assistant", "content": content, **message}}
    return {"choices": [choice | {"finish_reason": finish_reason}], "usage": usage}


class Stub:
    """An HTTP server: `behave(number, body)` gives status, headers and body of each answer; None hangs up."""

    def __init__(self, behave=lambda number, body: (200, {}, answer())):
        self.requests: list[tuple[str, dict, dict]] = []
        requests, lock = self.requests, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(requests)
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    requests.append((self.path, headers, body))
                if not (reply := behave(number, body)):
                    self.close_connection = True
                    return
                status, headers, content = reply
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                headers = {"Content-Type": "application/json", **headers, "Content-Length": len(data)}
                for name, value in headers.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # of clients that are gone
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def stub():
    """Makes stubs that end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *behave: stack.enter_context(contextlib.closing(Stub(*behave)))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with words and short prompts."""
    return write_place(tmp_path_factory.mktemp("server"), WORDS)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """Retries without the waiting, nothing of this machine's environment, a key that must show up nowhere."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.05)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def flags(place, output, url=None, **changes):
    """A command with short games; None leaves a flag out."""
    values = {"openai_base_url": url, "model_prefix": "api", "max_new_tokens": 4, "max_concurrency": 8}
    values |= {"openai_retries": 3, "openai_timeout": 20}
    return play_flags(place, MODEL, output, **values | changes)


def run(*flags, status=0):
    """Play in this process, which must end with this status; the last line of errors, and all of them."""
    called = call(play_llm_game.main, *flags, status=status)
    assert KEY not in called.output + called.errors
    return (called.errors.splitlines() or [""])[-1], called.errors


def results(folder, stem=STEM):
    return read_json_or_jsonl(folder / f"{stem}_results.json")


def stored(folder):
    """The indices of the games that are there."""
    path = folder / f"{STEM}_rank0.jsonl"
    return sorted(json.loads(line)["index"] for line in path.read_text().splitlines()) if path.exists() else []


# --- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api, path", [("completions", "/v1/completions"), ("chat", "/v1/chat/completions")])
def test_the_server_is_shown_the_prompts_of_local_play(api, path, stub, place, tmp_path):
    server = stub(lambda number, body: (200, {}, answer(f" Message {number}. \n")))
    run(*flags(place, tmp_path, server.url, openai_api=api, max_games=1))
    (game,) = results(tmp_path)
    assert [message["content"] for message in game["history"]] == [f"Message {number}." for number in range(4)]
    templates = load_templates(place / "prompts.json", GAME)
    for end, (asked_path, headers, body) in enumerate(server.requests):
        prompt = play_prompt(GAME, game["history"][:end], WORDS[0], 2, templates)
        assert (body["prompt"] if api == "completions" else body["messages"][0]["content"]) == prompt
        assert asked_path == path and body["max_tokens"] == 4
        assert headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}),
        ({"min_new_tokens": 2}, {"temperature": 1.2, "top_k": 50, "min_tokens": 2}),
        ({"temperature": 1.0, "top_k": 0}, {}),  # neutral values are not sent
        ({"task_type": "testing"}, {"temperature": 0}),
    ],
)
def test_sampling_is_that_of_the_flags(changes, expected, stub, place, tmp_path):
    server = stub()
    run(*flags(place, tmp_path, server.url, max_games=1, **changes))
    seeds = [body.pop("seed", None) for *_, body in server.requests]
    assert len(set(seeds)) == (1 if "task_type" in changes else 4)
    for *_, body in server.requests:
        assert body == {"model": "some/model", "prompt": body["prompt"], "max_tokens": 4, **expected}


@pytest.mark.parametrize(
    "refused", [{"seed"}, {"max_tokens"}, {"max_completion_tokens", "top_k"}, {"max_tokens", "seed"}]
)
def test_fields_that_a_server_refuses_are_left_out_from_then_on(refused, stub, place, tmp_path):
    server = stub(lambda _, body: (422, {}, {"detail": "no"}) if refused & set(body) else (200, {}, answer()))
    _, errors = run(*flags(place, tmp_path, server.url, openai_api="chat", max_games=3, max_concurrency=2))
    assert stored(tmp_path) == [0, 1, 2]
    *_, last = server.requests[-1]
    assert 4 in (last.get("max_tokens"), last.get("max_completion_tokens"))
    assert errors.count("trying without min_tokens, seed, top_k") == (refused != {"max_tokens"})


def test_the_url_may_come_from_the_environment_and_the_other_side_may_be_a_model_here(
    stub, place, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setenv("OPENAI_BASE_URL", stub().url)
    monkeypatch.delenv("OPENAI_API_KEY")
    run(*flags(place, tmp_path, max_games=6, attacker_model_name_or_path=tiny_model))
    for game in results(tmp_path):
        assert [message["content"] == "Hello." for message in game["history"]] == [False, True, False, True]


def test_a_server_here_goes_without_a_proxy_and_one_that_cannot_be_used_is_named(stub, place, tmp_path, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    url = stub().url
    run(*flags(place, tmp_path, url, max_games=1))
    run(*flags(place, tmp_path / "other", url.replace("127.0.0.1", "localhost"), max_games=1))
    monkeypatch.setenv("ALL_PROXY", "gopher://me:hush@proxy:9")
    line, errors = run(*flags(place, tmp_path / "far", "http://far.example/v1"), status=2)
    assert "ALL_PROXY: this proxy cannot be used" in line and "hush" not in errors


# --- what is taken of answers ----------------------------------------------------------------------------------------


def ask(server, api="completions") -> Reply:
    """A reply of at most 4 tokens to the first prompt of a game."""
    server_flags = ServerFlags(openai_base_url=server.url, openai_api=api)
    player = ServerPlayer("some/model", server_flags, Sampling(max_new_tokens=4))
    return asyncio.run(player.reply(Turn(GAME, "attacker", (), 3, 0, {"target_word": "art"})))


def test_tokens_that_the_server_does_not_count_are_unknown(stub):
    for usage in (None, {}, {"completion_tokens": None}, {"completion_tokens": 5.0}, {"prompt_tokens": 9}, "5"):
        server = stub(lambda *_, usage=usage: (200, {}, answer(usage=usage)))
        assert ask(server) == Reply("Hello.", "stop", None)


@pytest.mark.parametrize(
    "finish_reason, reasons",
    [
        ("stop", ("stop", "eos", "eos_token", "end", "end_turn", "STOP", None)),
        ("length", ("length", "max_tokens", "MAX_TOKENS", "model_length")),
        (None, ("content_filter", "tool_calls", "SAFETY", "error")),
    ],
)
def test_a_reply_ends_by_any_reason_but_a_cut_and_a_refusal(finish_reason, reasons, stub):
    for reason in reasons:
        server = stub(lambda *_, reason=reason: (200, {}, answer(finish_reason=reason)))
        if finish_reason:
            assert ask(server) == Reply("Hello.", finish_reason, 5)
        else:
            with pytest.raises(ReplyUnavailable, match="the reply was broken off"):
                ask(server)


@pytest.mark.parametrize(
    "content, message",
    [
        ("<think>A secret.</think>One.", {}),
        ("A secret.</think>One.", {}),
        ("One.", {"reasoning_content": "A secret."}),
        ("One.", {"reasoning": "A secret."}),
        ([{"type": "thinking", "thinking": "A secret."}, {"type": "text", "text": "One."}], {}),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "A secret."}]},
          {"type": "text", "text": "On"}, {"type": "text", "text": "e."}], {}),
    ],
)  # fmt: skip
def test_a_thought_of_a_chat_model_is_dropped(content, message, stub):
    server = stub(lambda *_: (200, {}, answer(content, **message)))
    assert ask(server, "chat") == Reply("One.", "stop", 5)


def test_a_thought_without_an_end_and_an_empty_reply_of_a_chat_model_lose_the_game(stub):
    for content in ("<think>A secret.", " ", None, []):
        with pytest.raises(ReplyUnavailable, match="a larger --max_new_tokens leaves room for thoughts"):
            ask(stub(lambda *_, content=content: (200, {}, answer(content, "length"))), "chat")
    # A base model that ends at once says nothing, as in local play.
    assert ask(stub(lambda *_: (200, {}, answer("")))).text == ""


def test_a_reply_far_above_the_limit_is_cut_and_counts_as_cut_and_half_a_character_is_replaced(stub):
    server = stub(lambda *_: (200, {}, answer("word " * 3000)))
    assert ask(server, "chat") == Reply("word word word word", "length", 5)
    assert ask(stub(lambda *_: (200, {}, answer("eight words are twice the limit, not more")))).finish_reason == "stop"
    assert ask(stub(lambda *_: (200, {}, answer("a \ud800")))).text == "a \ufffd"


# --- faults ----------------------------------------------------------------------------------------------------------


FAULTS = {  # the openai client repeats requests after the first three
    "429": (429, {"Retry-After": "0.1"}, {"error": {"message": "slow down"}}),
    "500": (500, {}, b"Internal Server Error"),
    "hung up": None,
    "422": (422, {}, {"error": {"message": "not this word"}}),
    "no JSON": (200, {"Content-Type": "text/html"}, b"<html>Welcome!</html>"),
    "no choices": (200, {}, {"choices": []}),
}


@pytest.mark.parametrize("fault", ["429", "500", "hung up"])
def test_a_fault_that_passes_is_asked_again(fault, stub, place, tmp_path):
    server = stub(lambda number, body: FAULTS[fault] if number % 3 == 1 and number < 12 else (200, {}, answer()))
    run(*flags(place, tmp_path, server.url, max_games=5, openai_retries=8))
    assert len(server.requests) == 5 * 4 + 4 and stored(tmp_path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_game_whose_reply_cannot_be_had_is_left_for_the_next_start(fault, stub, place, tmp_path):
    ill = True

    def behave(number, body):
        if ill and f"`{WORDS[3]}`" in body["prompt"] and "Hello." in body["prompt"]:  # at its third message
            return FAULTS[fault]
        return 200, {}, answer()

    server = stub(behave)
    arguments = flags(place, tmp_path, server.url, max_games=12)
    _, errors = run(*arguments, status=UNFINISHED)
    assert f"{WORDS[3]}: left unfinished" in errors
    assert stored(tmp_path) == [index for index in range(12) if index != 3]
    assert not (tmp_path / f"{STEM}_results.json").exists()
    ill, before = False, len(server.requests)
    run(*arguments)
    assert len(server.requests) - before == 4  # that game alone, from its beginning
    assert [game["target_word"] for game in results(tmp_path)] == WORDS[:12]


@pytest.mark.parametrize(
    "status, error, message",
    [
        (401, {"message": f"Incorrect API key {KEY}"}, r"401.*Incorrect API key \*\*\*"),
        (404, {"message": "The model `some/model` does not exist"}, "404.*does not exist"),
        (429, {"message": "You exceeded your quota", "code": "insufficient_quota"}, "429.*exceeded your quota"),
        (400, {"message": "Unknown field\n top_q\x1b[2J" + "very " * 10**5}, "400.*Unknown field"),
    ],
)
def test_a_wrong_key_or_model_and_a_first_request_that_is_refused_end_the_run_with_one_line(
    status, error, message, stub, place, tmp_path
):
    server = stub(lambda number, body: (status, {}, {"error": error}))
    line, _ = run(*flags(place, tmp_path, server.url, max_concurrency=1), status=2)
    assert re.search(rf"some/model at 127.0.0.1:\d+: .*{message}", line)
    assert "\x1b" not in line and len(line) < 500
    assert stored(tmp_path) == [] and not any(KEY in path.read_text() for path in tmp_path.iterdir())


def test_a_missing_server_and_a_missing_key_end_the_run_with_one_line(place, tmp_path, monkeypatch):
    line, _ = run(*flags(place, tmp_path, "http://127.0.0.1:9/v1", openai_retries=0), status=2)
    assert "some/model at 127.0.0.1:9: Connection error" in line
    monkeypatch.delenv("OPENAI_API_KEY")
    line, _ = run(*flags(place, tmp_path / "other"), status=2)
    assert "needs OPENAI_API_KEY" in line


# --- an independent server -------------------------------------------------------------------------------------------


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


def test_greedy_games_of_a_real_server_are_those_of_the_same_model_in_this_process(
    serve, served_model, place, tmp_path
):
    def play(name, output, url=None, **changes):
        models = {f"{side}_model_name_or_path": name for side in GAME.roles}
        settings = {"task_type": "testing", "max_new_tokens": 3, "max_games": 10}
        run(*flags(place, output, url, **settings | models | changes))
        return results(output, "api_testing_words")

    local = [game["history"] for game in play(served_model, tmp_path / "local")]
    for api in ("completions", "chat"):
        games = play(f"openai:{served_model}", tmp_path / api, serve, openai_api=api)
        assert [game["history"] for game in games] == local
        for reply in (reply for game in games for reply in game["replies"]):
            assert reply["finish_reason"] == ("length" if reply["tokens"] == 3 else "stop")
