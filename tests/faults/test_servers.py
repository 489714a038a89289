"""Servers that are slow, wrong or hostile: each game is played once with what was said well, or the run says why."""

import random
import shutil
import time

import pytest
from programs import WORDS, Inputs, call
from test_server_player import Stub, said
from trials import flags_of

from tools.selfplay.progress import UNFINISHED
from utils import read_json_or_jsonl

server = pytest.importorskip("tools.players.server", reason="players behind a server need the package openai")
GOOD = {"Hello.", "Nö.", "Perhaps.", ""}


def drip(handler) -> None:
    """A blank now and then, without end."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def flood(handler) -> None:
    """A body of 200 MB."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b'"' + b"a" * 10**6)


def hang_up(handler) -> None:
    """Less than was announced."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


def hostile(rng: random.Random):
    """One bad answer."""
    redirect = {"Location": rng.choice(["http://127.0.0.1:9/v1/completions", "file:///etc/passwd", "/v1/elsewhere"])}
    odd = rng.choice([None, -1, 10**40, 1e308, "7", True, [], {}])
    return rng.choice(
        [
            drip,
            flood,
            hang_up,
            None,
            (200, {}, b"[" * 100_000),
            (200, {}, b"\xff\xfe{"),
            (200, {}, b""),
            (200, {}, {"choices": odd}),
            (200, {}, {"choices": [odd]}),
            (200, {}, said(text=odd if odd != "7" else None)),
            (200, {}, said(text="x" * 10**6)),
            (200, {"Content-Encoding": "gzip"}, b"not gzip"),
            (rng.choice([301, 302, 307, 308]), redirect, b""),
            (rng.choice([408, 429, 500, 502, 599]), {"Retry-After": rng.choice(["0", "-1", "x"])}, b"\x1b[2Jbad\r\n"),
        ]
    )


def test_servers_that_misbehave_now_and_then(tmp_path, tiny_model, other_model, trials, monkeypatch):
    monkeypatch.setattr(server, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(server, "LONGEST_WAIT", 0.02)
    monkeypatch.setattr(server, "REST", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "in").mkdir()
    inputs = Inputs(tmp_path / "in", tiny_model, other_model)

    def trial(rng: random.Random) -> None:
        share = rng.choice([0.1, 0.5])

        def behave(number, body):
            return hostile(rng) if number and rng.random() < share else (200, {}, said(rng.choice(sorted(GOOD))))

        output, stub = tmp_path / "out", Stub(behave)
        shutil.rmtree(output, ignore_errors=True)
        main, _, command, flags = inputs.programs(output)["play_llm_game"]
        models = {f"{role}_model_name_or_path": "openai:m" for role in ("attacker", "defender")}
        how = {"openai_base_url": stub.url, "openai_timeout": 0.5, "openai_retries": 30, "max_games": len(WORDS)}
        status, started = UNFINISHED, time.monotonic()
        try:
            while status == UNFINISHED and time.monotonic() - started < 60:
                status, errors = call(main, *command, *flags_of(flags | models | how), left=UNFINISHED)
                assert "\x1b" not in errors
        finally:
            stub.close()
        assert status == 0, errors[-2000:]
        games = read_json_or_jsonl(output / "m_sampling_w_results.json")
        assert [game["target_word"] for game in games] == WORDS
        assert {message["content"] for game in games for message in game["history"]} <= GOOD

    trials.run("hostile servers", trial, short=1)
