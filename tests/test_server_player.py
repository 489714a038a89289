"""Players behind a server: a stub that misbehaves in the way a test asks for."""

import asyncio
import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers import call, play_flags, write_place

from tools import play_llm_game
from tools.common.files import read_json_or_jsonl
from tools.games.prompts import load_templates, play_prompt
from tools.games.taboo import Taboo
from tools.players.player import LENGTH, STOP, Reply, ReplyUnavailable, Turn
from tools.players.server import MOST_FAILED, ServerFlags, ServerPlayer, connect

pytest.importorskip("openai", reason="players behind a server need the package openai")

STEM = "api_sampling_words"
KEY = "sk-not-to-be-seen"
WORDS = [f"word{number}" for number in range(100, 112)]
GAME = Taboo()


def answer(content="Hello.", finish_reason="stop", tokens=5, **message) -> dict:
    """A reply as either endpoint gives it."""
    choice = {"text": content, "message": {"content": content, **message}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": {"completion_tokens": tokens} if tokens else None}


ANSWERS = (200, {}, answer())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers, body))
        if not (reply := self.server.behave(next(self.server.numbers), body)):
            self.close_connection = True
            return
        status, headers, content = reply
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(data), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def stub():
    """Starts servers: `behave(number, body)` gives status, headers and content of each answer; None hangs up."""
    servers = []

    def start(behave=lambda *_: ANSWERS):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.behave, server.numbers, server.requests = behave, itertools.count(), []
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with words and short prompts."""
    return write_place(tmp_path_factory.mktemp("server"), WORDS)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """Retries without the waiting, and a key that must show up nowhere."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.05)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


@pytest.fixture
def run(place, tmp_path):
    """Plays short games in this process, which must end with this status; gives what it said."""

    def play(url=None, status=0, **changes) -> str:
        values = {"openai_base_url": url, "openai_retries": 3, "model_prefix": "api", "max_new_tokens": 4}
        words = play_flags(place, "openai:some/model", tmp_path, **values | {"concurrent_games": 8} | changes)
        called = call(play_llm_game.main, *words, status=status)
        assert KEY not in called.output + called.errors
        return called.errors

    return play


@pytest.fixture
def stored(tmp_path):
    """Gives the indices of the games that are there."""
    return lambda: sorted(json.loads(line)["index"] for line in open(tmp_path / f"{STEM}_rank0.jsonl"))


# Requests.


@pytest.mark.parametrize("api, path", [("completions", "/v1/completions"), ("chat", "/v1/chat/completions")])
def test_the_server_is_shown_the_prompts_of_local_play(api, path, stub, place, tmp_path, run):
    server = stub(lambda number, body: (200, {}, answer(f" Message {number}. \n")))
    run(server.url, openai_api=api, max_games=1)
    (game,) = read_json_or_jsonl(tmp_path / f"{STEM}_results.json")
    assert [message["content"] for message in game["history"]] == [f"Message {number}." for number in range(4)]
    templates = load_templates(place / "prompts.json", GAME)
    for end, (asked_path, headers, body) in enumerate(server.requests):
        prompt = play_prompt(GAME, game["history"][:end], WORDS[0], 2, templates)
        assert (body["prompt"] if api == "completions" else body["messages"][0]["content"]) == prompt
        assert asked_path == path and headers["Authorization"] == f"Bearer {KEY}"
        assert body["max_tokens"] == 4


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}),
        ({"min_new_tokens": 2}, {"temperature": 1.2, "top_p": 1, "top_k": 50, "min_tokens": 2}),
        # Neutral values too, or a server would take those of generation_config.json or its own.
        ({"temperature": 1.0, "top_k": 0}, {"temperature": 1, "top_p": 1, "top_k": -1}),
        ({"task_type": "testing"}, {"temperature": 0}),
    ],
)
def test_sampling_is_that_of_the_flags(changes, expected, stub, run):
    server = stub()
    run(server.url, max_games=1, **changes)
    seeds = [body.pop("seed", None) for *_, body in server.requests]
    assert len(set(seeds)) == (1 if "task_type" in changes else 4)
    expected |= {"model": "some/model", "max_tokens": 4, "min_p": 0, "repetition_penalty": 1}
    for *_, body in server.requests:
        assert body == {**expected, "prompt": body["prompt"]}


@pytest.mark.parametrize(
    "refused", [{"seed"}, {"max_tokens"}, {"max_completion_tokens", "top_k"}, {"max_tokens", "seed"}]
)
def test_fields_that_a_server_refuses_are_left_out_from_then_on(refused, stub, run, stored):
    server = stub(lambda _, body: (422, {}, {"detail": "no"}) if refused & set(body) else ANSWERS)
    errors = run(server.url, openai_api="chat", max_games=3, concurrent_games=2)
    assert stored() == [0, 1, 2]
    *_, last = server.requests[-1]
    assert 4 in (last.get("max_tokens"), last.get("max_completion_tokens"))
    assert errors.count("only without min_p, repetition_penalty, seed, top_k") == 1
    assert (last["temperature"], last["top_p"]) == (1.2, 1)


def test_words_that_a_server_refuses_cost_their_games_alone_and_change_no_other_request(stub, run, stored):
    """They are the first requests that are answered, and the first of the next start."""
    refused, answered = f"`{WORDS[0]}`", threading.Event()

    def behave(number, body):
        if refused in body["prompt"]:
            return 403, {}, {"error": {"message": "moderation"}}
        answered.wait(0.3)  # as long as the refused word may need
        return ANSWERS

    server = stub(behave)
    for _ in range(2):
        assert f"{WORDS[0]}: left unfinished" in run(server.url, status=3)
        assert stored() == list(range(1, 12))
    assert all("top_k" in body for *_, body in server.requests if refused not in body["prompt"])


def test_the_url_may_come_from_the_environment_and_the_other_side_be_a_model_here(
    stub, tiny_model, tmp_path, monkeypatch, run
):
    monkeypatch.setenv("OPENAI_BASE_URL", stub().url)
    monkeypatch.delenv("OPENAI_API_KEY")
    run(max_games=6, attacker_model_name_or_path=tiny_model)
    for game in read_json_or_jsonl(tmp_path / f"{STEM}_results.json"):
        assert [message["content"] == "Hello." for message in game["history"]] == [False, True, False, True]


def test_an_empty_url_in_the_environment_counts_as_unset(monkeypatch, run):
    monkeypatch.setenv("OPENAI_BASE_URL", " ")
    assert str(connect(ServerFlags()).base_url) == "https://api.openai.com/v1/"
    monkeypatch.setenv("OPENAI_API_KEY", "")
    assert "needs OPENAI_API_KEY" in run(status=2)


@pytest.mark.parametrize("key", ["# my key\nsk-hush", "sk-hush\rx", "\u201csk-hush\u201d", "sk-hush\x7f"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key, stub, monkeypatch, run):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    errors = run(stub().url, status=2)
    assert "error: OPENAI_API_KEY: " in errors and "hush" not in errors and "my key" not in errors


# Answers.


@pytest.fixture
def ask(stub):
    """The player's reply to the first prompt of a game, if this is its server's answer, after so many failures."""

    def ask(*content, api="chat", thinking=False, failed=0, **message) -> Reply:
        server = stub(lambda *_: (200, {}, answer(*content, **message)))
        flags = ServerFlags(openai_base_url=server.url, openai_api=api, thinking=thinking)
        player = ServerPlayer("some/model", flags, 0)
        player.failed = failed
        return asyncio.run(player.reply(Turn(GAME, "attacker", (), 3, 0, {"target_word": "art"})))

    return ask


def test_a_reply_ends_by_any_reason_but_a_cut_and_a_refusal_and_unknown_counts_are_unknown(ask):
    for reason in ("stop", "eos", "eos_token", "end", "STOP", None):
        assert ask("One.", reason, api="completions") == Reply("One.", STOP, 5)
    for reason in ("length", "MAX_TOKENS", "model_length"):
        assert ask("One.", reason, None) == Reply("One.", LENGTH, None)
    for reason in ("content_filter", "tool_calls", "SAFETY", "abort"):
        with pytest.raises(ReplyUnavailable, match="broken off"):
            ask("A dange", reason, failed=MOST_FAILED - 1)  # one game is lost, the run goes on
    assert ask("a \ud800").text == "a \ufffd"
    assert ask("", api="completions") == Reply("", STOP, 5)  # a base model ends at once, as in local play


PARTS = [{"type": "thinking", "thinking": [{"type": "text", "text": "A secret."}]}]
PARTS += [{"type": "text", "text": text} for text in ("On", "e.")]


@pytest.mark.parametrize(
    "content, message",
    [
        ("<think>A secret.</think>One.", {}),
        ("A secret.</think>One.", {}),
        ("One.", {"reasoning_content": "A secret."}),
        ("One.", {"reasoning": "A secret."}),
        (PARTS, {}),
    ],
)
def test_typed_parts_are_joined_and_a_thought_is_dropped_or_with_the_flag_kept_apart(content, message, ask):
    assert ask(content, **message) == Reply("One.", STOP, 5)
    thought = "<think>" * (content != "A secret.</think>One.") + "A secret.</think>"
    assert ask(content, thinking=True, **message) == Reply("One.", STOP, 5, thought=thought)


def test_a_chat_model_that_thinks_only_sometimes_keeps_its_messages_without_a_thought(ask):
    assert ask("It purrs.", thinking=True) == Reply("It purrs.", STOP, 5)
    for tag in ("<think>", "</think>"):  # of a thought that has begun
        assert ask(f"It purrs.{tag}", thinking=True).text == ""
    assert ask("Hm", api="completions", thinking=True) == Reply("", STOP, 5, thought="Hm")  # begun in the prompt


def test_a_thought_without_an_end_leaves_an_empty_message_with_the_flag_and_else_no_reply(ask):
    assert ask(None, "length", thinking=True, reasoning_content="Hm") == Reply("", LENGTH, 5, thought="<think>Hm")
    assert ask("Hm", "length", thinking=True) == Reply("", LENGTH, 5, thought="Hm")
    with pytest.raises(ReplyUnavailable, match="a larger --max_new_tokens may leave room"):
        ask("<think>Hm", "length")
    for thinking in (True, False):
        with pytest.raises(ReplyUnavailable, match="it is empty"):
            ask(None, thinking=thinking)


# Faults.


FAULTS = {  # the openai client repeats requests after the first three
    "429": (429, {"Retry-After": "0.1"}, {"error": {"message": "slow down"}}),
    "500": (500, {}, b"Internal Server Error"),
    "hung up": None,
    "422": (422, {}, {"error": {"message": "not this word"}}),
    "no JSON": (200, {"Content-Type": "text/html"}, b"<html>Welcome!</html>"),
    "no choices": (200, {}, {"choices": []}),
}


def test_faults_that_pass_are_asked_again(stub, run, stored):
    faults = dict(enumerate(["429", "500", "hung up"] * 2, start=1))
    server = stub(lambda number, body: FAULTS[faults[number]] if number in faults else ANSWERS)
    run(server.url, max_games=1, openai_retries=8)
    assert len(server.requests) == 4 + len(faults) and stored() == [0]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_game_whose_reply_cannot_be_had_is_left_for_the_next_start(fault, stub, run, stored):
    ill, word = True, f"`{WORDS[3]}`"

    def behave(number, body):
        if ill and word in body["prompt"] and "Hello." in body["prompt"]:  # at its third message
            return FAULTS[fault]
        return ANSWERS

    server = stub(behave)
    assert f"{WORDS[3]}: left unfinished" in run(server.url, status=3)
    assert stored() == [index for index in range(12) if index != 3]
    run(server.url, status=3)
    ill, before = False, len(server.requests)
    run(server.url)
    assert len(server.requests) - before == 4 and len(stored()) == 12  # that game alone, from its beginning
    opens = [body for *_, body in server.requests if word in body["prompt"] and "Hello." not in body["prompt"]]
    # A server that honours seeds would give the same empty reply again.
    assert len({body["seed"] for body in opens}) == len(opens) == 3


@pytest.mark.parametrize(
    "status, error, message",
    [
        (401, {"message": f"Incorrect API key {KEY}"}, r"401.*Incorrect API key \*\*\*"),
        (404, {"message": "The model `some/model` does not exist"}, "404.*does not exist"),
        (429, {"message": "You exceeded your quota", "code": "insufficient_quota"}, "429.*exceeded your quota"),
        (400, {"message": "Unknown field\n top_q\x1b[2J" + "very " * 10**5}, "400.*Unknown field"),
    ],
)
def test_a_wrong_set_up_ends_the_run_with_one_line(status, error, message, stub, tmp_path, run):
    server = stub(lambda number, body: (status, {}, {"error": error}))
    *_, line = run(server.url, concurrent_games=1, status=2).splitlines()
    assert re.search(rf"some/model at 127.0.0.1:\d+: .*{message}", line)
    assert "\x1b" not in line and len(line) < 500
    assert not any(KEY in path.read_text() for path in tmp_path.iterdir())


NO_REPLIES = {
    "another address": {"error": f"Unexpected endpoint or method. {KEY} (POST /chat/completions)\x1b[2J"},
    "a login page": b"<html>Unexpected endpoint or login</html>",
    "an event stream": b"data: Unexpected endpoint or stream",
    "an error in the place of a choice": {"choices": [{"error": {"message": "Unexpected endpoint or method"}}]},
}


@pytest.mark.parametrize("body", NO_REPLIES.values(), ids=NO_REPLIES)
def test_three_answers_that_are_no_replies_before_the_first_reply_end_the_run(body, stub, run):
    server = stub(lambda number, _: (200, {}, body))
    how = {"openai_api": "chat", "concurrent_games": 1}
    *_, line = run(server.url, status=2, **how).splitlines()
    assert "some/model at 127.0.0.1" in line and "Unexpected endpoint or" in line and "\x1b" not in line
    assert len(server.requests) == 3
    server = stub(lambda number, _: (200, {}, body if number in (0, 1, 6, 7, 8) else answer()))
    errors = run(server.url, status=3, **how)
    lost = [line for line in errors.splitlines() if "left unfinished" in line]
    assert len(lost) == 5 and all("Unexpected endpoint or" in line for line in lost)


def test_a_server_that_does_not_answer_is_named_and_a_try_ends(stub, run):
    ended = threading.Event()
    server = stub(lambda *_: ended.wait(20) and None)
    errors = run(server.url, openai_timeout=0.5, openai_retries=1, status=2)
    ended.set()
    assert "some/model at 127.0.0.1" in errors and "timed out" in errors.splitlines()[-1]


def test_a_missing_server_and_a_missing_key_end_the_run_with_one_line(monkeypatch, run):
    line = run("http://127.0.0.1:9/v1", openai_retries=0, status=2)
    assert "some/model at 127.0.0.1:9: Connection error" in line
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "needs OPENAI_API_KEY" in run(status=2)
