"""Every page is true: its commands and their flags, its links, and its Python code."""

import ast
import contextlib
import functools
import io
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from helpers import ENVIRONMENT, ROOT, call, finish, kill_all, start, wait_for, words_of, write_place
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import assign_rewards, play_llm_game, spag
from tools.common.files import read_json_or_jsonl, write_json
from tools.lab.study import read_study
from tools.loop.settings import TRAININGS, read_argument, read_file, read_loop
from tools.players.player import STOP, Player, Reply
from tools.selfplay import play

TEXTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for pattern in ("README.md", "data/*.md", "configs/*.md", "tests/*.md", "tools/**/*.md")
    for path in sorted(ROOT.glob(pattern))
}
TOP = TEXTS["README.md"]
GAMES = TEXTS["tools/games/README.md"]
PIECES = TEXTS["tools/spag.md"]
CALL = re.compile(r"(?:python3?|torchrun) (?:[^;&|#\n]*? )?(tools[./][\w./]+|train\.py)([^;&|#\n]*)")


def is_loop(program: str) -> bool:
    """Whether it is the loop, or a script that calls it with steps of its own."""
    return program == "tools/run_spag.py" or "run_spag.main(" in (ROOT / program).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> str:
    """The shell blocks of a README and the code spans in its prose, a command a line.

    A block that checks out an older commit is left out: its programs are those of that commit.
    """
    shown = [block for block in blocks(text, "bash") if not block.startswith("git worktree add")]
    spans = re.findall(r"`([^`]+)`", prose(text))
    return "\n".join([*shown, *map(" ".join, map(str.split, spans))]).replace("\\\n", " ")


def calls(text: str) -> list[tuple[str, list[str]]]:
    """The programs of this project that a README calls, as paths, and the words after them."""
    found = CALL.findall(commands(text))
    paths = [name if name.endswith(".py") else name.replace(".", "/") + ".py" for name, _ in found]
    return [(path, shlex.split(words)) for path, (_, words) in zip(paths, found, strict=True)]


CALLS = [each for text in TEXTS.values() for each in calls(text)]


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


@pytest.mark.parametrize("program", sorted({program for program, _ in CALLS if not is_loop(program)}))
def test_programs_accept_the_flags_they_are_given(program):
    for words in (words for name, words in CALLS if name == program):
        subcommand = [word for word in words[:1] if re.fullmatch("[a-z0-9]+", word)]
        given = {word.split("=")[0] for word in words if re.fullmatch(r"--\S+", word)}
        assert given <= accepted_flags(program, *subcommand), words


def test_the_readme_has_the_four_commands():
    assert {"train.py", "tools/play_llm_game.py", "tools/assign_rewards.py"} <= dict(calls(TOP)).keys()


@pytest.mark.parametrize("words", [words for program, words in CALLS if is_loop(program)], ids=" ".join)
def test_the_loop_knows_the_files_and_settings_it_is_given(words):
    for word in words:
        if "=" in word:
            read_argument(word)
        elif word != "--help":
            assert (ROOT / word).is_file(), word


@pytest.mark.parametrize("words", [words for program, words in CALLS if is_loop(program)], ids=" ".join)
def test_the_rows_of_a_step_are_whole_micro_batches(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word for word in words if not word.startswith(("like=", "--help"))]
    loop = read_loop([*words_of({"model": "m", "words": "w", "output": "o"}), *words])
    for table in map(loop.of, TRAININGS):
        assert loop.global_batch % table.per_device_train_batch_size == 0


@pytest.mark.parametrize("name", TEXTS)
def test_settings_files_can_be_read_as_they_are_written(name, tmp_path):
    for text in blocks(TEXTS[name], "toml"):
        path = tmp_path / "settings.toml"
        path.write_text(text, encoding="utf-8")
        assert read_study(str(path), []) if "[arms." in text else read_file(path)


def shell_loop(python: str, model: str, **changes) -> str:
    """The loop over epochs of the README, with a tiny model in the place of eight GPUs, and with changed flags."""
    (code,) = [block for block in blocks(TOP, "bash") if "for epoch in" in block]
    assert "model=models/imitation" in code
    code = code.replace("models/imitation", model)
    code, number = re.subn(r"^launch=\([^)]*\)", f"launch=({python})", code, flags=re.MULTILINE)
    assert number == 1
    code = re.sub(r" --(deepspeed \S+|bf16 True)", "", code).replace("python tools/", f"{python} tools/")
    for name, value in changes.items():
        code, number = re.subn(rf"--{name} \S+", f"--{name} {value}", code)
        assert number, name
    return code


@pytest.mark.kills
def test_the_shell_loop_of_the_readme_runs_as_it_is_pasted_and_continues_after_a_kill(tmp_path, tiny_model):
    for name in ("train.py", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_place(tmp_path, [f"word{number}" for number in range(16)])
    (tmp_path / "data").mkdir()
    (tmp_path / "words.txt").rename(tmp_path / "data/all_target_words.txt")
    (tmp_path / "prompts.json").rename(tmp_path / "data/released_prompts.json")
    write_json(tmp_path / "data/alpaca_train.json", [{"instruction": "Say it.", "input": "", "output": "It."}] * 8)
    smaller = {"max_length": 160, "max_new_tokens": "16 --max_turns 2", "gradient_accumulation_steps": 2}
    # A model of random weights wins no game, so all messages are rows.
    code = shell_loop(sys.executable, tiny_model, **smaller, sft_data_path="data/alpaca_train.json --messages all")
    how = {"cwd": tmp_path, "env": ENVIRONMENT}

    killed = start(["bash", "-c", code], **how)
    assert wait_for(lambda: any(tmp_path.glob("outputs/shell/epoch1/model/checkpoint-*/complete")), killed)
    kill_all(killed, tmp_path)
    assert not (tmp_path / "outputs/shell/epoch2").exists()
    games = (tmp_path / "outputs/shell/epoch1/games/spag_sampling_words_results.json").read_bytes()
    continued = start(["bash", "-c", code], **how)
    first, second = tmp_path / "outputs/shell/epoch1", tmp_path / "outputs/shell/epoch2"
    settings = second / "games/spag_sampling_words_settings.json"
    assert wait_for(settings.exists, continued)
    kill_all(continued, tmp_path)  # the second epoch is like the first

    assert (first / "games/spag_sampling_words_results.json").read_bytes() == games
    assert (first / "model/model.safetensors").is_file() and not list(first.glob("model/checkpoint-*"))
    assert json.loads((first / "model/settings.json").read_text())["finished"]
    player = json.loads(settings.read_text())["settings"]["attacker_model_name_or_path"]
    assert player["path"] == "outputs/shell/epoch1/model"


def test_the_shell_loop_of_the_readme_ends_where_a_step_fails_and_leaves_the_terminal_open(tmp_path):
    (tmp_path / "program").write_text("#!/bin/sh\ncase $1 in *play*) exit 3 ;; esac\n")
    (tmp_path / "program").chmod(0o755)
    code = shell_loop(str(tmp_path / "program"), "models/imitation")
    assert "set -e" not in code
    printed = finish(start(["bash", "-c", f"{code}\necho epoch $epoch, status $?"], cwd=tmp_path))
    assert printed.splitlines()[-1].startswith("epoch 1")


@pytest.mark.parametrize("name", TEXTS)
def test_comments_in_shell_blocks_hold_no_quote_which_a_pasted_line_would_open_in_zsh(name):
    lines = "\n".join(blocks(TEXTS[name], "bash")).splitlines()
    assert [line for line in lines if line.startswith("#") and re.search("['\"`]", line)] == []


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name):
    # A badge of GitHub leads out of the repository.
    for path, anchor in re.findall(r"\]\((?!https?:|../../actions)([^)\s#]*)#?([^)\s]*)\)", prose(TEXTS[name])):
        place = (ROOT / name).parent / path if path else ROOT / name
        assert place.exists(), path
        if anchor:  # GitHub makes it of a heading
            headings = re.findall(r"^#+ (.*)$", prose(place.read_text(encoding="utf-8")), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{path}#{anchor}"


def table_of_files() -> str:
    """A line for each file of code, with the first line of its docstring, as tools/README.md has them."""
    lines, folder = [], ROOT
    for pattern in ("*.py", "tools/*.py", "tools/*/*.py", "tools/*/*/*.py"):
        for path in sorted(path for path in ROOT.glob(pattern) if path.name != "__init__.py"):
            if path.parent != folder:
                folder = path.parent
                lines.append(f"| **{folder.relative_to(ROOT).as_posix()}/** | |\n")
            link = Path(os.path.relpath(path, ROOT / "tools")).as_posix()
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            lines.append(f"| [{path.name}]({link}) | {docstring.splitlines()[0]} |\n")
    return "".join(lines)


def test_the_table_of_files_has_the_first_line_of_each_docstring():
    assert table_of_files() in TEXTS["tools/README.md"], "paste this table:\n" + table_of_files()


def own_game(language: str) -> str:
    (code,) = blocks(GAMES.partition("## Your own game")[2].partition("\n## ")[0], language)
    return code


@pytest.mark.parametrize("name", TEXTS)
def test_python_code_runs_as_it_is_written(name, tiny_model, monkeypatch, capsys):
    """A page's blocks go on from each other. A model folder stands where the code names one in outputs/."""
    names = {"__name__": "readme"}
    for code in blocks(TEXTS[name], "python"):
        if name == "tools/games/README.md" and code == own_game("python"):
            continue  # tested below
        exec(compile(re.sub(r'"outputs/[^"]*"', repr(tiny_model), code), name, "exec"), names)


def own_rewards() -> dict:
    """The functions of tools/spag.md that change rows."""
    (code,) = [code for code in blocks(PIECES, "python") if "fmean" in code]
    functions: dict = {}
    exec(code, functions)
    return functions


def test_the_functions_of_the_page_of_pieces_change_weights_roles_and_rewards():
    """Two games that the attacker wins and one that the defender wins, of one message each, and an SFT row."""
    rows = [{"role": "attacker", "reward": reward, "weight": 0.75} for reward in (1.0, 1.0, -1.0)]
    rows += [{"role": "defender", "reward": reward, "weight": 1.5} for reward in (-1.0, -1.0, 1.0)]
    rows.append({"type": "sft", "weight": 1.0})
    with_weight, of_role, minus_mean = map(own_rewards().get, ("with_weight", "of_role", "minus_mean"))
    assert [row["weight"] for row in with_weight(rows, "defender", 2.0)] == [0.75] * 3 + [2.0] * 3 + [1.0]
    assert of_role(rows, "attacker") == [row | {"weight": 1.0} for row in [*rows[:3], rows[-1]]]
    changed = minus_mean(minus_mean(rows, "attacker"), "defender")  # the means are 1/3 and -1/3
    expected = [2 / 3, 2 / 3, -4 / 3, -2 / 3, -2 / 3, 4 / 3]
    assert [row["reward"] for row in changed[:-1]] == pytest.approx(expected) and changed[-1] == rows[-1]
    assert {row["weight"] for row in changed} == {1.0}
    assert [row["weight"] for row in rows] == [0.75] * 3 + [1.5] * 3 + [1.0]  # the rows given stay as they are


def one_step_by_the_page(folder, model: str, dtype: torch.dtype, **settings):
    """Train by the page of pieces for a step on eight games; return the Trainer."""
    (code,) = [code for code in blocks(PIECES, "python") if "(Trainer)" in code]
    names: dict = {"__name__": "readme"}
    exec(code, names)
    words = [f"word{number}" for number in range(8)]
    guess = "I know the word! It is {}!"
    episodes = spag.play(words, lambda turn: "It is near.", lambda turn: guess.format(words[turn.index]))
    rows = spag.rows(episodes, losers=0.5)
    policy, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=dtype) for _ in range(2))
    settings |= {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True}
    return names["train"](policy, reference, AutoTokenizer.from_pretrained(model), rows, str(folder), **settings)


def test_the_trainer_of_the_page_of_pieces_loses_no_small_step_of_a_bf16_model(tmp_path, tiny_model):
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).state_dict()
    settings = {"per_device_train_batch_size": 16, "learning_rate": 2e-6, "bf16": True}
    trainer = one_step_by_the_page(tmp_path, tiny_model, torch.bfloat16, **settings)
    name = "model.layers.0.mlp.down_proj.weight"
    assert (trainer.model.state_dict()[name].float() != start[name].float()).float().mean() > 0.9


def test_the_trainer_of_the_page_of_pieces_has_the_same_step_with_and_without_accumulation(tmp_path, tiny_model):
    logged = []
    for batch_size in (16, 4):
        settings = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 16 // batch_size}
        trainer = one_step_by_the_page(tmp_path / str(batch_size), tiny_model, torch.float32, **settings)
        logged.append(trainer.state.log_history[0])
    whole, split = logged
    assert whole["loss"] == pytest.approx(-0.125, abs=1e-4)  # rewards 1 and -0.5, weight 0.5, ratio 1
    assert split["loss"] == pytest.approx(whole["loss"], abs=1e-4)
    assert split["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-3)


def test_a_stored_reference_gives_the_loss_of_the_page_of_pieces(tiny_model):
    (code,) = [code for code in blocks(PIECES, "python") if "stored_logprob" in code]
    names: dict = {}
    exec(code, names)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    rows = spag.rows(spag.play(["cat"], lambda turn: "It purrs.", lambda turn: "I know the word! It is cat!"))
    batch = spag.batch(rows, tokenizer)
    loss, metrics = names["loss_with_stored"](model, batch, names["stored_logprob"](model, batch))
    assert loss.requires_grad and loss.item() == pytest.approx(-0.5)  # reward 1, weight 0.5, ratio 1
    assert metrics["policy_loss"].item() == loss.item() and tuple(metrics["log_ratio"]) == (0, 1)


class Careful(Player):
    """Leaves a multiple of four wherever it can, else takes one."""

    async def reply(self, turn) -> Reply:
        taken = sum(int(re.search(r"\d+", message["content"])[0]) for message in turn.history)
        move = (int(turn.secrets["sticks"]) - taken) % 4 or 1
        assert f"There were {turn.secrets['sticks']} sticks" in turn.prompt()
        return Reply(f"I take {move}.", STOP, 3)


def test_the_game_of_the_readme_is_played_and_pays(tmp_path, monkeypatch):
    (tmp_path / "nim.py").write_text(own_game("python"), encoding="utf-8")
    (tmp_path / "nim.json").write_text(own_game("json"), encoding="utf-8")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/sticks.txt").write_text("".join(f"{number}\n" for number in range(12, 41)))
    monkeypatch.chdir(tmp_path)
    players = {"first": Careful(), "second": Careful()}
    monkeypatch.setattr(play, "make_players", lambda *_, **__: (players, 4))
    (words,) = [words for _, words in calls(GAMES) if "nim.py:Nim" in words]
    call(play_llm_game.main, *words)
    path = "outputs/nim/me_sampling_sticks_results.json"
    outcomes = {episode["target_word"]: episode["outcome"] for episode in read_json_or_jsonl(path)}
    assert outcomes == {str(n): "second wins" if n % 4 == 0 else "first wins" for n in range(12, 41)}

    call(assign_rewards.main, "--game", "nim.py:Nim", "--input_data_path", path, "--output_data_path", "rows.json")
    rows = read_json_or_jsonl("rows.json")
    assert sum(row["reward"] for row in rows) == pytest.approx(29)
    assert {row["role"]: row["weight"] for row in rows} == {"first": 29 / (2 * 21), "second": 29 / (2 * 8)}
    assert all(re.fullmatch(r"I take [1-3]\.", row["target"]) and "stick" in row["query"] for row in rows)
