"""The README's commands: every program in them exists and accepts the flags it is given."""

import contextlib
import functools
import io
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT


def commands() -> list[list[str]]:
    """The words of every command line in the README's shell blocks, joined over line ends."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def program_of(words: list[str]) -> str | None:
    """The Python program that a command runs, as a path, or None."""
    if words[0] in ("python", "python3", "torchrun"):
        for word, following in zip(words[1:], [*words[2:], ""], strict=True):
            if word.endswith(".py"):
                return word
            if word == "-m" and following.startswith("tools."):
                return following.replace(".", "/") + ".py"
    return None


def start_of_flags(words: list[str]) -> int:
    """Where the words after the program begin; before it are the launcher's."""
    return 1 + next(i for i, word in enumerate(words) if word.endswith(".py") or word.startswith("tools."))


PROGRAMS = sorted({program for words in commands() if (program := program_of(words))})


def test_the_readme_shows_every_step_of_the_method():
    steps = {"train.py", "tools/play_llm_game.py", "tools/assign_rewards.py"}
    assert steps <= {program_of(words) for words in commands()}
    assert sum("train.py" in words for words in commands()) >= 3


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_in_the_readme_accept_the_flags_it_gives_them(program):
    for words in commands():
        if program_of(words) == program:
            subcommand = [word for word in words[start_of_flags(words) : start_of_flags(words) + 1] if word[0] != "-"]
            given = {word.split("=")[0] for word in words[start_of_flags(words) :] if word.startswith("--")}
            assert given <= accepted_flags(program, *subcommand), words


@functools.cache
def accepted_flags(program: str, *subcommand: str) -> set[str]:
    """Those in the program's --help, printed in this process: its packages are imported once for all programs."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [program, *subcommand, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / program), run_name="__main__")
    assert ended.value.code == 0
    return set(re.findall(r"--\w+", printed.getvalue()))


def test_the_loop_in_the_readme_accepts_the_flags_it_is_given():
    loops = [words for words in commands() if words[0] == "tools/run_spag.sh"]
    usage = subprocess.run(["bash", "tools/run_spag.sh", "--help"], cwd=ROOT, capture_output=True, text=True)
    for words in loops:
        assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--\w+", usage.stdout)), words
    assert loops


def test_shell_scripts_in_the_readme_exist():
    scripts = {word for words in commands() for word in words if word.endswith(".sh")}
    assert scripts and all((ROOT / script).is_file() for script in scripts)
