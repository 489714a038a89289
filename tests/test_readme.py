"""Every README is true: commands and their flags, links, paths, rooms, and the game that the top one shows."""

import contextlib
import functools
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from tools import assign_rewards, evaluate_games, play_llm_game
from tools.players.player import STOP, Reply
from tools.selfplay.lineup import Lineup
from utils import read_json_or_jsonl

READMES = sorted(
    path
    for pattern in ("README.md", "*/README.md", "*/*/README.md")
    for path in ROOT.glob(pattern)
    if not any(part.startswith(".") or part in ("outputs", "runs") for part in path.relative_to(ROOT).parts)
)
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in READMES}
TOP = TEXTS["README.md"]
ROOMS = sorted(path.name for path in (ROOT / "tools").iterdir() if (path / "__init__.py").is_file())

LOOP = "tools/run_spag.sh"
MODULES_OF_OTHERS = {"venv", "sglang.launch_server", "sglang_router.launch_router"}
PROGRAMS_OF_OTHERS = {"pip", "srun", "sbatch", "vllm"}  # their flags are not checked
SHELL = {"source", "export", "read", "head", "seq", "for", "done", "cd"}
FLAGS_OF_OTHERS = {"--standalone", "--master_port", "--help", "--campaign", "--trial_seed"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(text))


def split_commands(line: str) -> list[list[str]]:
    """The words of each command of a line, without loops, settings in front and redirections."""
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
    """Every command of a README: of its shell blocks, joined over line ends, and whole ones in the prose."""
    lines = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    lines += [span for span in code_spans(text) if re.match(r"(python|torchrun|pip|bash|sbatch|tools/\S+\.sh) ", span)]
    return [words for line in lines if line.strip() for words in split_commands(line)]


COMMANDS = [words for text in TEXTS.values() for words in commands(text)]


def start_of_flags(words: list[str]) -> int:
    """Where the words after a Python program begin; before it are the launcher's."""
    return 1 + next(i for i, word in enumerate(words) if word.endswith(".py") or words[i - 1] == "-m")


def program_of(words: list[str]) -> str | None:
    """The Python program of this project that a command runs, as a path."""
    if words[0] not in ("python", "python3", "torchrun"):
        return None
    program = words[start_of_flags(words) - 1]
    if program in MODULES_OF_OTHERS:
        return None
    return program if program.endswith(".py") else program.replace(".", "/") + ".py"


PROGRAMS = sorted({program for words in COMMANDS if (program := program_of(words))})


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


def subcommand(words: list[str]) -> list[str]:
    """That of a command of a Python program, if it has one."""
    return [word for word in words[start_of_flags(words) :][:1] if re.fullmatch("[a-z]+", word)]


@functools.cache
def loop_settings() -> set[str]:
    usage = subprocess.run(["bash", LOOP, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {f"--{name.lower()}" for name in re.findall(r"^  ([A-Z_]+)=", usage.stdout, flags=re.MULTILINE)}


# --- commands ------------------------------------------------------------------------------------------------------


def test_the_top_readme_shows_every_step_of_the_method():
    steps = {"train.py", "tools/play_llm_game.py", "tools/assign_rewards.py"}
    assert steps <= {program_of(words) for words in commands(TOP)}
    assert sum("train.py" in words for words in commands(TOP)) >= 2 and sum("train.py" in w for w in COMMANDS) >= 3
    assert ["bash", "tools/quickstart.sh"] in commands(TOP) and ["bash", "tools/test.sh"] in commands(TOP)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_accept_the_flags_they_are_given(program):
    for words in COMMANDS:
        if program_of(words) == program:
            given = {word.split("=")[0] for word in words[start_of_flags(words) :] if word.startswith("--")}
            assert given <= accepted_flags(program, *subcommand(words)), words


def test_the_loop_accepts_the_flags_it_is_given():
    loops = [words for words in COMMANDS if words[0] == LOOP]
    for words in loops:
        assert {word for word in words if word.startswith("--") and " " not in word} <= loop_settings(), words
    assert len(loops) >= 2


def test_every_command_is_one():
    scripts = {word for words in COMMANDS for word in words if word.endswith(".sh")}
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    own = {"bash", "python", "python3", "torchrun", LOOP}
    assert {words[0].rpartition("/bin/")[2] for words in COMMANDS} <= own | SHELL | PROGRAMS_OF_OTHERS
    assert all((ROOT / program).is_file() for program in PROGRAMS)


def test_every_flag_in_the_prose_belongs_to_a_program():
    known = loop_settings() | FLAGS_OF_OTHERS
    for words in COMMANDS:
        if program := program_of(words):
            known |= accepted_flags(program) | accepted_flags(program, *subcommand(words))
    for name, text in TEXTS.items():
        spans = [span for span in code_spans(text) if not span.startswith("pip ")]
        flags = {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z]\w+\b(?!-)", span)}
        assert flags <= known, name


def test_no_command_writes_into_the_root():
    for words in COMMANDS:
        for flag, value in zip(words, words[1:], strict=False):
            if flag.startswith("--out") or flag in (">", "--held_out"):
                assert "/" in value or value.isupper(), words


# --- places --------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
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
def test_every_file_of_the_project_that_is_named_is_there(name):
    """By its whole path, or by the name of a Python file beside the README or at the top."""
    text = re.sub(r"^\| .*? \|", "|", TEXTS[name].partition("## Where what was")[2], flags=re.MULTILINE)
    text = TEXTS[name].partition("## Where what was")[0] + text  # without the column of what was
    words = [word for span in code_spans(text) for word in span.split()]
    paths = {match[0] for word in words if (match := re.match(r"(?:(?:tools|tests|configs)/[\w/]+)?\w*\.?\w+", word))}
    paths = {path for path in paths if re.match(r"(tools|tests|configs)/", path) or path.endswith(".py")}
    missing = {path for path in paths if not ((ROOT / path).exists() or ((ROOT / name).parent / path).exists())}
    assert {path for path in missing if not re.search("[A-Z]{3}", path)} <= {"nim.py"}  # FILE.py stands for any


@pytest.mark.parametrize("name", TEXTS)
def test_every_function_that_is_named_is_there(name):
    """As `FILE.py`: `function`, `function`, or as `module.function` of the files at the top."""
    named = [
        (path, function)
        for path, functions in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", TEXTS[name])
        for function in re.findall(r"\w+", functions)
    ]
    named += [
        (f"{module}.py", function) for module, function in re.findall(r"`(trainers|utils)\.(?!py`)(\w+)`", TEXTS[name])
    ]
    for path, function in named:
        assert re.search(rf"(def|class) {function}\b", (ROOT / path).read_text(encoding="utf-8")), (path, function)


def test_the_map_lists_the_rooms_and_programs_that_there_are():
    text = TEXTS["tools/README.md"]
    rooms = re.findall(r"^\| \[(\w+)\]\(\1\) \|", text.partition("## Rooms")[2], flags=re.MULTILINE)
    assert sorted(rooms) == ROOMS
    programs = re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (`.*?) \|", text.partition("## Rooms")[0], re.M)))
    files = [path.name for path in (ROOT / "tools").iterdir() if path.suffix in (".py", ".sh")]
    assert sorted(programs) == sorted(name for name in files if name not in ("__init__.py", "tools.py"))


# --- shape ---------------------------------------------------------------------------------------------------------


def test_the_top_readme_is_short():
    assert len(TOP.splitlines()) <= 250
    assert [line for line in TOP.splitlines() if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("name", TEXTS)
def test_lines_are_short_but_for_tables_and_code(name):
    assert [line for line in prose(TEXTS[name]).splitlines() if len(line) > 120 and not line.startswith("|")] == []


# --- the game of the top README --------------------------------------------------------------------------------------


class Careful:
    """Leaves a multiple of four wherever it can, else takes one."""

    async def reply(self, turn) -> Reply:
        taken = sum(int(re.search(r"\d+", message["content"])[0]) for message in turn.history)
        move = (int(turn.secrets["sticks"]) - taken) % 4 or 1
        assert f"There were {turn.secrets['sticks']} sticks" in turn.prompt()
        return Reply(f"I take {move}.", STOP, 3)


class Greedy:
    """Always takes four, which is against the rules."""

    async def reply(self, turn) -> Reply:
        return Reply("I take 4.", STOP, 3)


@pytest.fixture
def nim(tmp_path, monkeypatch, tiny_model, other_model) -> dict[str, str]:
    """The files of the README in the current folder, scripted players in the place of models; NAME -> model folder."""
    section = TOP.partition("## Your own game")[2].partition("\n## ")[0]
    (code,), (prompts,) = blocks(section, "python"), blocks(section, "json")
    (tmp_path / "nim.py").write_text(code, encoding="utf-8")
    (tmp_path / "nim.json").write_text(prompts, encoding="utf-8")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/sticks.txt").write_text("".join(f"{number}\n" for number in range(12, 41)))
    monkeypatch.chdir(tmp_path)
    players = {tiny_model: Careful(), other_model: Greedy()}

    def build_players(lineup, names, on_batch, *, seed):
        return {role: players[name] for role, name in zip(lineup.game.roles, names, strict=True)}, 4

    monkeypatch.setattr(Lineup, "build_players", build_players)
    return {"careful": tiny_model, "greedy": other_model}


def run_program(monkeypatch, program, *words) -> None:
    monkeypatch.setattr(sys, "argv", [program.__name__, *map(str, words)])
    program.main()


def test_the_game_of_the_readme_is_played_and_pays(nim, monkeypatch):
    (words,) = [words for words in commands(TOP) if "nim.py:Nim" in words]
    after = [nim["careful"] if word == "M" else word for word in words[start_of_flags(words) :]]
    run_program(monkeypatch, play_llm_game, *after)
    episodes = read_json_or_jsonl("outputs/nim/base_sampling_sticks_results.json")
    outcomes = {episode["target_word"]: episode["outcome"] for episode in episodes}
    assert len(outcomes) == 29 and {episode["game"] for episode in episodes} == {"nim"}
    assert outcomes == {str(n): "second wins" if n % 4 == 0 else "first wins" for n in range(12, 41)}

    files = ["--input_data_path", "outputs/nim/base_sampling_sticks_results.json", "--output_data_path", "rows.json"]
    run_program(monkeypatch, assign_rewards, "--game", "nim.py:Nim", *files)
    rows = read_json_or_jsonl("rows.json")
    assert sum(row["reward"] for row in rows) == pytest.approx(29)
    assert {row["role"]: row["weight"] for row in rows} == {"first": 29 / (2 * 21), "second": 29 / (2 * 8)}
    assert all(re.fullmatch(r"I take [1-3]\.", row["target"]) and "stick" in row["query"] for row in rows)


def test_the_game_of_the_readme_is_matched(nim, monkeypatch, capsys):
    players = [f"{name}={folder}" for name, folder in nim.items()]
    flags = ["--words", "data/sticks.txt", "--games_per_word", 1, "--output_dir", "match"]
    run_program(monkeypatch, evaluate_games, "--game", "nim.py:Nim", "--players", *players, *flags)
    results = json.loads(Path("match/matches.json").read_text(encoding="utf-8"))["results"]
    points = {(row["player"], row["role"]): row["points"] for row in results if row["seed"] is None}
    assert points["careful", "first"] == points["careful", "second"] == 1 and points["greedy", "both"] == 0
    outcomes = {episode["outcome"] for episode in read_json_or_jsonl("match/games_results.json")}
    assert outcomes == {"first errs", "second errs"} and "careful" in capsys.readouterr().out
