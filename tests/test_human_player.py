"""A person at the terminal: the real program on a pseudo-terminal, against the tiny model."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from helpers import ENVIRONMENT, call, flags_of

from tools import play_llm_game
from tools.players.human import show_answers
from utils import read_json_or_jsonl

DEADLINE = 60  # seconds for the program to say what is waited for
STEM = "m_sampling_w"
WORDS = ["piano", "violin"]


@pytest.fixture
def flags(tiny_model, tmp_path):
    """Of a game of one turn; a person defends unless told otherwise."""
    (tmp_path / "words.txt").write_text("\n".join(WORDS), encoding="utf-8")

    def make(attacker=tiny_model, defender="human", **changes) -> list[str]:
        settings = {
            "attacker_model_name_or_path": attacker,
            "defender_model_name_or_path": defender,
            "data_path": tmp_path / "words.txt",
            "output_dir": tmp_path / "out",
            "model_prefix": "m",
            "data_suffix": "w",
            "prompt_templates": ROOT / "data" / "tiny" / "prompts.json",
            "taboo_max_turns": 2,
            "max_length": 400,
            "max_new_tokens": 6,
        } | changes
        return flags_of(settings)

    return make


class Terminal:
    """The program with a terminal of its own; `screen` is all that it wrote there."""

    def __init__(self, flags: list[str]):
        self.end, inner = pty.openpty()
        # A session of its own whose terminal this is, so that Ctrl-C typed there is its signal.
        self.program = subprocess.Popen(
            [sys.executable, "-c", START, *flags],
            stdin=inner,
            stdout=inner,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=ENVIRONMENT | {"TERM": "dumb"},
            start_new_session=True,
        )
        os.close(inner)
        self.screen, self.seen = "", 0

    def wait_for(self, text: str) -> str:
        """Read until this text is there; what was written before it, since the last time."""
        start, deadline = self.seen, time.monotonic() + DEADLINE
        while (place := self.screen.find(text, start)) < 0:
            assert self._read(deadline), f"waiting for {text!r}, got {self.screen!r}"
        self.seen = place + len(text)
        return self.screen[start:place]

    def press(self, key: str, until: str) -> None:
        """Press a key, and again every 5 seconds, until this text is there: one at the wrong instant may be lost."""
        for _ in range(10):
            self.type(key)
            again = time.monotonic() + 5
            while until not in self.screen[self.seen :] and time.monotonic() < again and self.program.poll() is None:
                self._read(again)
            if until in self.screen[self.seen :]:
                return

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def finish(self) -> tuple[int, str]:
        """Exit status, and standard error; the screen is then complete."""
        deadline = time.monotonic() + DEADLINE
        while self._read(deadline):
            pass
        error = self.program.stderr.read().decode()
        return self.program.wait(timeout=DEADLINE), error

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.end], [], [], max(0, deadline - time.monotonic()))
        try:
            data = os.read(self.end, 4096) if ready else b""
        except OSError:  # the program has closed its end
            data = b""
        self.screen += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


# Takes the terminal as the controlling one, which a new session does not have by itself.
START = (
    "import fcntl, runpy, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "runpy.run_module('tools.play_llm_game', run_name='__main__', alter_sys=True)"
)


@pytest.fixture
def terminal():
    """Start the program; it is ended with the test."""
    started = []

    def start(flags: list[str]) -> Terminal:
        started.append(Terminal(flags))
        return started[-1]

    yield start
    for one in started:
        if one.program.poll() is None:
            os.killpg(one.program.pid, signal.SIGKILL)
        one.program.wait()
        one.program.stderr.close()
        os.close(one.end)


def test_a_person_defends_and_guesses_right(flags, terminal, tmp_path):
    screen = terminal(flags())
    intro = screen.wait_for("you, defender> ")
    assert "game 1: you are the defender" in intro and "turn 1 of 2" in intro
    assert "Taboo in 2 turns." in intro and "Defender, reply or guess." in intro
    assert "A guess reads: I know the word! It is `word`!" in intro
    assert "piano" not in intro  # the target word is the attacker's secret
    assert re.search(r"^attacker: ", intro, re.MULTILINE)
    screen.type("\n")  # says nothing: asked again
    screen.wait_for("you, defender> ")
    screen.type("Is it large?\n")
    assert "turn 2 of 2" in screen.wait_for("you, defender> ")
    screen.type("I know the word! It is `piano`!\n")
    screen.wait_for("--- defender wins; the target word was `piano` ---")
    assert "game 2: you are the defender" in screen.wait_for("you, defender> ")
    screen.type("It is a violin, I think.\n")
    screen.wait_for("--- attacker wins; the target word was `violin` ---")
    status, error = screen.finish()
    assert status == 0, error
    assert "game/s" not in screen.screen + error  # no bar between the lines
    first, second = read_json_or_jsonl(tmp_path / "out" / f"{STEM}_results.json")
    said = [message["content"] for message in first["history"][1::2]]
    assert said == ["Is it large?", "I know the word! It is `piano`!"]
    assert (first["outcome"], second["outcome"]) == ("defender wins", "attacker wins")
    settings = json.loads((tmp_path / "out" / f"{STEM}_settings.json").read_text())["settings"]
    assert settings["defender_model_name_or_path"] == "human"


def test_a_person_attacks_and_leaves_by_ctrl_d_or_ctrl_c_and_the_same_command_goes_on(
    flags, terminal, tmp_path, tiny_model
):
    screen = terminal(flags("human", tiny_model))
    intro = screen.wait_for("you, attacker> ")
    assert "game 1: you are the attacker" in intro and "piano" in intro
    screen.type("Say piano.\n")
    screen.wait_for("--- attacker breaks the rules; ")
    screen.wait_for("you, attacker> ")
    screen.type("\x04")
    screen.wait_for("You have left.")
    status, error = screen.finish()
    assert status == 0 and "Traceback" not in error
    assert "violin" not in screen.screen.partition("You have left")[2] + error  # words to come are not told
    again = terminal(flags("human", tiny_model))
    assert "game 2: you are the attacker" in again.wait_for("you, attacker> ")
    again.type("half a mess")
    again.wait_for("half a mess")
    again.press("\x03", until="You have left.")  # acts at once, in the middle of a line
    again.wait_for("You have left.")
    status, error = again.finish()
    assert status == 0 and "Traceback" not in error
    assert len(read_json_or_jsonl(tmp_path / "out" / f"{STEM}_rank0.jsonl")) == 1


def test_all_new_messages_are_shown_and_none_steers_the_terminal(capsys):
    history = [{"role": role, "content": role} for role in ("attacker", "defender", "attacker")]
    history.append({"role": "attacker", "content": "clear \x1b[2J\nthe screen, \u00e9"})
    show_answers(history, "defender")
    assert capsys.readouterr().out == "attacker: attacker\nattacker: clear \ufffd[2J\n    the screen, \u00e9\n"


def test_a_person_without_a_terminal_is_told_so(flags, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "human needs a terminal" in call(play_llm_game.main, *flags(), status=2).errors
