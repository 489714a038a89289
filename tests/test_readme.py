"""Every README is true: its commands and their flags, links, file names, and Python code."""

import contextlib
import functools
import io
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from helpers import ROOT, call

from tools import assign_rewards, evaluate_games, play_llm_game
from tools.loop.settings import DEFAULTS_FILE, read_file
from tools.players.player import STOP, Player, Reply
from tools.selfplay import play
from utils import read_json_or_jsonl

TEXTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for pattern in ("README.md", "data/RESULTS.md", "*/README.md", "*/*/README.md")
    for path in sorted(ROOT.glob(pattern))
    if not any(part.startswith(".") or part in ("outputs", "runs") for part in path.relative_to(ROOT).parts)
}
TOP = TEXTS["README.md"]
LOOP = "tools/run_spag.sh"
DEFAULTS = read_file(DEFAULTS_FILE)
MODULES_OF_OTHERS = {"venv", "sglang.launch_server", "sglang_router.launch_router"}
KNOWN_COMMANDS = {"bash", "python", "python3", "torchrun", LOOP, "pip", "hf", "srun", "sbatch", "vllm", "source"}
KNOWN_COMMANDS |= {"export", "read", "head", "seq", "for", "done", "cd", "git", "tools/study/run_study.sh"}
FLAGS_OF_OTHERS = {"--standalone", "--master_port", "--help", "--campaign", "--trial_seed"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def code_spans(text: str) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+?)`", prose(text))]


# Commands.


def split_commands(line: str) -> list[list[str]]:
    """The words of each command of a line, without loops, variables in front and redirections."""
    line = re.sub(r"^\s*for .*?; do\b|\s#.*", "", line)
    split = []
    for part in re.split(r"\s*(?:&&|;|&(?= *$)|& done)\s*", line):
        words = shlex.split(part)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words:
            split.append(words)
    return split


def commands(text: str) -> list[list[str]]:
    """Every command of a README: those of its shell blocks, and those in the prose."""
    lines = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    lines += [span for span in code_spans(text) if re.match(r"(python|torchrun|pip|bash|sbatch|tools/\S+\.sh) ", span)]
    return [words for line in lines if line.strip() for words in split_commands(line)]


COMMANDS = [words for text in TEXTS.values() for words in commands(text)]


def start_of_flags(words: list[str]) -> int:
    """Where the words after a program begin; before a Python program are the launcher's."""
    return 1 + next((i for i, word in enumerate(words) if word.endswith(".py") or words[i - 1] == "-m"), 0)


def program_of(words: list[str]) -> str | None:
    """The Python program of this project that a command runs, or the loop, as a path."""
    if words[0] == LOOP:
        return LOOP
    if words[0] not in ("python", "python3", "torchrun"):
        return None
    program = words[start_of_flags(words) - 1]
    if program in MODULES_OF_OTHERS:
        return None
    return program if program.endswith(".py") else program.replace(".", "/") + ".py"


def subcommand_of(words: list[str]) -> tuple[str, ...]:
    """("split",) of `prepare_data split --input ...`."""
    return tuple(word for word in words[start_of_flags(words) :][:1] if re.fullmatch("[a-z0-9]+", word))


@functools.cache
def accepted_flags(program: str, *subcommand: str) -> set[str]:
    """The flags in the program's --help, printed in this process."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [program, *subcommand, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / program), run_name="__main__")
    assert ended.value.code == 0
    return set(re.findall(r"--\w+", printed.getvalue()))


PROGRAMS = sorted({program for words in COMMANDS if (program := program_of(words))} - {LOOP})


def test_every_command_is_a_program_that_there_is():
    scripts = {word for words in COMMANDS for word in words if word.endswith(".sh")}
    assert scripts and all((ROOT / path).is_file() for path in [*scripts, *PROGRAMS])
    assert {words[0].rpartition("/bin/")[2] for words in COMMANDS} <= KNOWN_COMMANDS
    assert {"train.py", "tools/play_llm_game.py", "tools/assign_rewards.py", LOOP} <= {*map(program_of, commands(TOP))}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_accept_the_flags_they_are_given(program):
    for words in COMMANDS:
        if program_of(words) == program:
            flags = [word.split("=")[0] for word in words[start_of_flags(words) :] if word.startswith("--")]
            given = {flag for flag in flags if " " not in flag}  # others are values of the loop's *_ARGS
            assert given <= accepted_flags(program, *subcommand_of(words)), words


def test_the_loop_knows_the_settings_it_is_given():
    given = [word for words in COMMANDS if words[0] == LOOP for word in words[1:] if word != "..."]
    for word in given:
        name, equals, _ = word.partition("=")
        assert name in DEFAULTS if equals else word == "--help" or (ROOT / word).is_file(), word
    assert {"MODEL", "IMITATION_DATA", "WORDS", "OUTPUT"} <= {word.partition("=")[0] for word in given}


def test_every_flag_in_the_prose_belongs_to_a_program():
    known = set(FLAGS_OF_OTHERS)
    for words in COMMANDS:
        if (program := program_of(words)) in PROGRAMS:
            known |= accepted_flags(program) | accepted_flags(program, *subcommand_of(words))
    for name, text in TEXTS.items():
        spans = [span for span in code_spans(text) if not span.startswith("pip ")]
        flags = {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z]\w+\b(?!-)", span)}
        assert flags <= known, name


# Links and names.


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(TEXTS[name])):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / name).parent / path if path else ROOT / name
        assert place.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in anchors(place.read_text(encoding="utf-8")), f"{name}: {target}"


@pytest.mark.parametrize("name", TEXTS)
def test_every_file_and_function_that_is_named_is_there(name):
    """Files by their path, or by their name beside the README or at the top; functions as `module.function`."""
    words = [word for span in code_spans(TEXTS[name]) for word in span.split()]
    paths = {match[0] for word in words if (match := re.match(r"(?:(?:tools|tests|configs)/[\w/]+)?\w*\.?\w+", word))}
    paths = {path for path in paths if re.match(r"(tools|tests|configs)/", path) or path.endswith(".py")}
    missing = {path for path in paths if not ((ROOT / path).exists() or ((ROOT / name).parent / path).exists())}
    assert {path for path in missing if not re.search("[A-Z]{3}", path)} <= {"nim.py"}  # FILE.py stands for any file
    for module, function in re.findall(r"`(trainers|dataloaders|utils)\.(?!py`)(\w+)`", TEXTS[name]):
        assert re.search(rf"(def|class) {function}\b", (ROOT / f"{module}.py").read_text()), function


def test_the_readmes_name_every_room_and_program():
    rooms = {path.parent.name for path in (ROOT / "tools").glob("*/*.py")}
    programs = [path for path in (ROOT / "tools").glob("*.py") if '"__main__"' in path.read_text(encoding="utf-8")]
    maps = TOP + TEXTS["tools/README.md"]
    assert [room for room in sorted(rooms) if f"{room}/README.md)" not in maps] == []
    assert [path.name for path in programs if not re.search(rf"tools[./]{path.stem}\b", "".join(TEXTS.values()))] == []


# Python code.


def own_game(language: str) -> str:
    (code,) = blocks(TOP.partition("## Your own game")[2].partition("\n## ")[0], language)
    return code


@pytest.mark.parametrize("name", TEXTS)
def test_python_code_runs_as_it_is_written(name, tiny_model, monkeypatch, capsys):
    """A model folder stands where the code names one in outputs/."""
    for code in blocks(TEXTS[name], "python"):
        if name == "README.md" and code == own_game("python"):
            continue  # tested below
        exec(compile(re.sub(r'"outputs/[^"]*"', repr(tiny_model), code), name, "exec"), {"__name__": "readme"})


class Careful(Player):
    """Leaves a multiple of four wherever it can, else takes one."""

    async def reply(self, turn) -> Reply:
        taken = sum(int(re.search(r"\d+", message["content"])[0]) for message in turn.history)
        move = (int(turn.secrets["sticks"]) - taken) % 4 or 1
        assert f"There were {turn.secrets['sticks']} sticks" in turn.prompt()
        return Reply(f"I take {move}.", STOP, 3)


class Greedy(Player):
    """Always takes four, which is against the rules."""

    async def reply(self, turn) -> Reply:
        return Reply("I take 4.", STOP, 3)


@pytest.fixture
def nim(tmp_path, monkeypatch, tiny_model, other_model) -> dict[str, str]:
    """The files of the README in the current folder, scripted players in the place of models; NAME -> model folder."""
    (tmp_path / "nim.py").write_text(own_game("python"), encoding="utf-8")
    (tmp_path / "nim.json").write_text(own_game("json"), encoding="utf-8")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/sticks.txt").write_text("".join(f"{number}\n" for number in range(12, 41)))
    monkeypatch.chdir(tmp_path)
    players = {tiny_model: Careful(), other_model: Greedy()}

    def make_players(names, game, flags, **_):
        return {role: players[name] for role, name in zip(game.roles, names, strict=True)}, 4

    monkeypatch.setattr(play, "make_players", make_players)
    return {"careful": tiny_model, "greedy": other_model}


def test_the_game_of_the_readme_is_played_and_pays(nim):
    (words,) = [words for words in commands(TOP) if "nim.py:Nim" in words]
    call(play_llm_game.main, *[nim["careful"] if word == "M" else word for word in words[start_of_flags(words) :]])
    episodes = read_json_or_jsonl("outputs/nim/base_sampling_sticks_results.json")
    outcomes = {episode["target_word"]: episode["outcome"] for episode in episodes}
    assert len(outcomes) == 29 and {episode["game"] for episode in episodes} == {"nim"}
    assert outcomes == {str(n): "second wins" if n % 4 == 0 else "first wins" for n in range(12, 41)}

    files = ["--input_data_path", "outputs/nim/base_sampling_sticks_results.json", "--output_data_path", "rows.json"]
    call(assign_rewards.main, "--game", "nim.py:Nim", *files)
    rows = read_json_or_jsonl("rows.json")
    assert sum(row["reward"] for row in rows) == pytest.approx(29)
    assert {row["role"]: row["weight"] for row in rows} == {"first": 29 / (2 * 21), "second": 29 / (2 * 8)}
    assert all(re.fullmatch(r"I take [1-3]\.", row["target"]) and "stick" in row["query"] for row in rows)


def test_the_game_of_the_readme_is_matched(nim):
    players = [f"{name}={folder}" for name, folder in nim.items()]
    flags = ["--words", "data/sticks.txt", "--games_per_word", 1, "--output_dir", "match"]
    ended = call(evaluate_games.main, "--game", "nim.py:Nim", "--players", *players, *flags)
    results = json.loads(Path("match/matches.json").read_text(encoding="utf-8"))["results"]
    points = {(row["player"], row["role"]): row["points"] for row in results if row["seed"] is None}
    assert points["careful", "first"] == points["careful", "second"] == 1 and points["greedy", "both"] == 0
    outcomes = {episode["outcome"] for episode in read_json_or_jsonl("match/games_results.json")}
    assert outcomes == {"first errs", "second errs"} and "careful" in ended.output
