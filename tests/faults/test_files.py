"""Damaged files: no whole game of a rank file is lost, and every program ends with success or a one-line error."""

import json
import random
import shutil

import pytest
from helpers import as_a_process
from programs import GAME, WORDS, episode, programs

from tools.selfplay.files import EpisodeFiles

ODD_VALUES = [None, True, -1, 0, 10**30, 1e999, "", "\x00", "\u2028", "\ud800", [], {}, [[]], "a" * 10_000]
ODD_VALUES += ["../../x", "<b>"]


def damage(content: bytes, rng: random.Random) -> bytes:
    """Cut the content off, overwrite, repeat or shuffle a part, insert null bytes, or change one value."""
    kind, place = rng.randrange(6), rng.randrange(len(content) + 1)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + rng.randbytes(rng.randint(1, 20)) + content[place + rng.randint(0, 20) :]
    if kind == 2:
        return content + content[place:]
    if kind == 3:
        return content[:place] + b"\0" * rng.randint(1, 500) + content[place:]
    if kind == 4:
        lines = content.splitlines(keepends=True) or [b""]
        rng.shuffle(lines)
        return b"".join(lines[: rng.randint(0, len(lines))])
    return odd_value(content, rng)


def odd_value(content: bytes, rng: random.Random) -> bytes:
    """Change one value of a JSON or JSONL file, or one line of any other file."""
    text = content.decode("utf-8", "replace")
    try:
        records, lines = json.loads(text), False
    except ValueError:
        try:
            records, lines = [json.loads(line) for line in text.splitlines() if line.strip()], True
        except ValueError:
            parts = text.split("\n")
            parts[rng.randrange(len(parts))] = str(rng.choice(ODD_VALUES))
            return "\n".join(parts).encode("utf-8", "replace")
    changed = change(records, rng)
    if lines and isinstance(changed, list):
        return "".join(json.dumps(record) + "\n" for record in changed).encode()
    return json.dumps(changed).encode()


def change(value, rng: random.Random):
    """Return the value with one part of it, at any depth, replaced, removed or wrapped in a list."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key, copy = rng.choice(keys), value.copy()
        if rng.random() < 0.15:
            del copy[key]
        else:
            copy[key] = change(copy[key], rng)
        return copy
    nested = "[" * 3000 + "]" * 3000
    return rng.choice([*ODD_VALUES, [value], {"x": value}, json.loads(nested[2500:3500])])


def test_damaged_rank_files(tmp_path, trials):
    """Whole games are kept unchanged. The others are played again, or an error names the file."""

    def trial(rng: random.Random) -> None:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        (tmp_path / "s_settings.json").write_text(json.dumps({"settings": {"seed": 1}, "finished": False}))
        path = tmp_path / "s_rank0.jsonl"
        lines = [json.dumps(episode(index, rng), ensure_ascii=False).encode() for index in range(6)]
        path.write_bytes(damage(b"\n".join(lines) + b"\n", rng))
        before = path.read_bytes()
        whole = {line for line in before.split(b"\n")[:-1] if line in lines}
        files = EpisodeFiles(tmp_path, "s", WORDS, GAME)
        kept = {index for index, line in enumerate(lines) if line in whole}
        with as_a_process(), files.stage({"seed": 1}):
            try:
                missing = files.finished().missing()
            except ValueError as error:
                assert "\n" not in str(error) and "s_rank0.jsonl" in str(error) and path.read_bytes() == before
                return
            assert kept.isdisjoint(missing)
            for index in missing:
                files.append(episode(index, rng))
            files.merge(seconds=1, tokens_before=0)
        results = json.loads(files.results_path.read_text())
        assert [game["index"] for game in results] == list(range(len(WORDS)))
        assert all(game["target_word"] == WORDS[game["index"]] for game in results)
        assert whole <= set(path.read_bytes().split(b"\n"))

    trials.run("damaged rank files", trial, short=40, each=20)


@pytest.mark.parametrize("name", ["assign_rewards", "split", "report", "show", "play", "matches", "train"])
def test_mutated_files(name, inputs, tmp_path, trials):
    def trial(rng: random.Random) -> None:
        output = tmp_path / "out"
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        program = programs(inputs, output)[name]
        path = inputs / rng.choice(program.reads)
        before = path.read_bytes()
        try:
            path.write_bytes(damage(before, rng))
            program.run()
        finally:
            path.write_bytes(before)

    short, each = (3, 30) if name in ("play", "matches", "train") else (8, 50)
    trials.run(f"mutated files, {name}", trial, short=short, each=each)
