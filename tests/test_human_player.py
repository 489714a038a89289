"""A person at the terminal: the real program on a pseudo-terminal, against the tiny model."""

import contextlib
import io
import os
import pty
import select
import signal
from types import SimpleNamespace

import pytest
from conftest import ROOT
from graded_game import Divide
from helpers import ENVIRONMENT, Fork, call, play_flags

from tools import play_llm_game
from tools.common.files import read_json_or_jsonl
from tools.games import load_game
from tools.players.human import HumanPlayer

DEADLINE = 60  # seconds for the program to say what is waited for
STEM = "m_sampling_words"


@pytest.fixture
def flags(tiny_model, tmp_path):
    """Of games of two turns against a model; makes the flags for a person in one role."""
    (tmp_path / "words.txt").write_text("piano\nviolin", encoding="utf-8")

    def make(role: str) -> list[str]:
        settings = {f"{role}_model_name_or_path": "human", "model_prefix": "m", "max_new_tokens": 6}
        settings |= {"prompt_templates": ROOT / "configs/prompts/tiny.json", "max_turns": None, "taboo_max_turns": 2}
        return play_flags(tmp_path, tiny_model, tmp_path / "out", **settings)

    return make


@pytest.fixture
def terminal():
    """Starts the program on a terminal of its own; it is ended with the test."""
    started = []

    def begin(flags: list[str]) -> Terminal:
        started.append(Terminal(flags))
        return started[-1]

    yield begin
    for each in started:
        each.program.kill()
        each.program.wait()
        os.close(each.end)


class Terminal:
    """The program with a terminal of its own; `screen` is what it wrote there and nobody has read."""

    def __init__(self, flags: list[str]):
        self.end, inner = pty.openpty()
        how = {"terminal": os.ttyname(inner), "env": ENVIRONMENT | {"TERM": "dumb"}}
        self.program = Fork(["-m", "tools.play_llm_game", *flags], **how)
        os.close(inner)
        self.screen = ""

    def read_until(self, text: str) -> str:
        """What the program writes before this text."""
        while text not in self.screen:
            assert self._read(), f"waiting for {text!r}, got {self.screen!r}"
        before, _, self.screen = self.screen.partition(text)
        return before

    def read_all(self, status: int = 0) -> str:
        """What the program writes until its end, which must have this status."""
        while self._read():
            pass
        assert self.program.wait(timeout=DEADLINE) == status, self.screen
        return self.screen

    def _read(self) -> bytes:
        data = b""
        if select.select([self.end], [], [], DEADLINE)[0]:
            with contextlib.suppress(OSError):  # the program has closed its end
                data = os.read(self.end, 4096)
        self.screen += data.decode(errors="replace").replace("\r\n", "\n")
        return data

    def interrupt(self) -> None:
        """Ctrl-C, once more if Python missed it: it does between a key and its wait for the next one."""
        for _ in range(3):
            self.program.send_signal(signal.SIGINT)
            if select.select([self.end], [], [], 10)[0]:
                return

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())


def test_a_person_defends_and_guesses_right(flags, terminal, tmp_path):
    screen = terminal(flags("defender"))
    intro = screen.read_until("you, defender> ")
    for text in ("game 1: you are the defender", "turn 1 of 2", "Taboo in 2 turns.", "Defender, reply or guess."):
        assert text in intro
    assert "A guess reads: I know the word! It is `word`!" in intro and "\nattacker: " in intro
    assert "piano" not in intro  # the target word is the attacker's secret
    screen.type("\n")  # says nothing: asked again
    screen.read_until("you, defender> ")
    screen.type("Is it large?\n")
    assert "turn 2 of 2" in screen.read_until("you, defender> ")
    screen.type("I know the word! It is `piano`!\n")
    screen.read_until("--- defender wins; the secret was `piano` ---")
    assert "game 2: you are the defender" in screen.read_until("you, defender> ")
    screen.type("It is a violin, I think.\n")
    screen.read_until("--- attacker wins; the secret was `violin` ---")
    assert "game/s" not in screen.read_all()  # no bar between the lines
    first, second = read_json_or_jsonl(tmp_path / "out" / f"{STEM}_results.json")
    said = [message["content"] for message in first["history"][1::2]]
    assert said == ["Is it large?", "I know the word! It is `piano`!"]
    assert (first["outcome"], second["outcome"]) == ("defender wins", "attacker wins")


def test_a_person_attacks_and_leaves_by_ctrl_d_or_ctrl_c_and_the_same_command_goes_on(flags, terminal, tmp_path):
    screen = terminal(flags("attacker"))
    intro = screen.read_until("you, attacker> ")
    assert "game 1: you are the attacker" in intro and "piano" in intro
    screen.type("Say piano.\n")
    screen.read_until("--- attacker breaks the rules; ")
    screen.read_until("you, attacker> ")
    screen.type("\x04")
    screen.read_until("You left.")
    rest = screen.read_all(status=3)  # games are missing
    assert "Traceback" not in rest and "violin" not in rest  # words to come are not told
    again = terminal(flags("attacker"))
    assert "game 2: you are the attacker" in again.read_until("you, attacker> ")
    again.type("half a mess")
    again.read_until("half a mess")
    again.interrupt()  # acts at once, in the middle of a line
    assert "Traceback" not in again.read_until("You left.") + again.read_all(status=130)
    assert len(read_json_or_jsonl(tmp_path / "out" / f"{STEM}_rank0.jsonl")) == 1


@pytest.mark.parametrize(
    "game, task, end",
    [(load_game("twenty_questions"), "apple", "; the secret was `apple` ---"), (Divide(), "10", "--- over ---")],
)
def test_the_end_of_a_game_names_its_secret_if_it_has_one(game, task, end, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    HumanPlayer(game).game_over({"history": [], "outcome": "over", "target_word": task})
    assert capsys.readouterr().out.strip().endswith(end)


def test_a_person_without_a_terminal_is_told_so(flags, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "human needs a terminal" in call(play_llm_game.main, *flags("defender"), status=2).errors
