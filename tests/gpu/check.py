"""What check.sh needs of Python: random models of real shapes, rows, a comparison of replies, the report.

python tests/gpu/check.py model FOLDER 1b
python tests/gpu/check.py split ROWS.json NUMBER FOLDER
python tests/gpu/check.py compare RESULTS.json RESULTS.json
python tests/gpu/check.py report OUT
"""

import csv
import importlib.metadata
import json
import platform
import re
import sys
from itertools import takewhile
from pathlib import Path
from statistics import median

SHAPES = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"intermediate_size": 8192},
    "7b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008},
}
VOCABULARY = {"tiny": 4000}  # default 32,000, as Llama-2's
# Dense bf16 TFLOP/s as the makers give them, by a part of the card's name; the first that fits counts.
PEAKS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "B200": 2250, "A100": 312, "L40S": 362, "A10G": 70, "A10": 125}
PEAKS |= {"L4": 121, "RTX 5090": 209, "RTX 4090": 165, "RTX 3090": 71, "A6000": 155}
PACKAGES = ["torch", "transformers", "accelerate", "datasets", "deepspeed", "peft", "vllm"]
WARM_UP = 2  # steps that are not counted, if there are more


def model(folder: str, shape: str) -> None:
    """A Llama of random weights in bf16, whose tokenizer knows the words and games of this project."""
    import torch

    from tools.common.files import ROOT, read_json_or_jsonl, read_words
    from tools.engine.random_model import random_llama, train_tokenizer

    games = read_json_or_jsonl(ROOT / "data/imitation_games.jsonl")
    texts = [message["content"] for game in games for message in game["history"]]
    vocabulary = VOCABULARY.get(shape, 32000)
    tokenizer = train_tokenizer([*texts, *read_words(ROOT / "data/target_words.txt")], min(vocabulary, 16000))
    tokenizer.add_tokens([f"<extra{number}>" for number in range(vocabulary - len(tokenizer))])  # each id has a text
    tokenizer.save_pretrained(folder)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        llama = random_llama(vocabulary, 0, dtype=torch.bfloat16, max_position_embeddings=4096, **SHAPES[shape])
    llama.save_pretrained(folder)
    print(f"{llama.num_parameters():,} parameters")


def split(rows: str, number: str, folder: str) -> None:
    """Rows of imitation, instruction data, and games of which self-play learns, each of about this number."""
    every, size = json.loads(Path(rows).read_text()), int(number)
    data = [{"instruction": row["query"][-200:], "output": row["target"]} for row in every[size : size + size // 4]]
    games = Path(folder, "own/games.jsonl").read_text().splitlines()[: size // 3]  # some 2.6 rows a game
    Path(folder, "imitation.json").write_text(json.dumps(every[:size]))
    Path(folder, "sft.json").write_text(json.dumps(data))
    Path(folder, "some_games.jsonl").write_text("\n".join(games) + "\n")


def compare(*results: str) -> None:
    """Count equal greedy replies. A game is compared up to its first difference: then the prompts differ too."""
    ours, theirs = (
        [[message["content"] for message in game["history"]] for game in json.loads(Path(path).read_text())]
        for path in results
    )
    same = [
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*pair, strict=False))))
        for pair in zip(ours, theirs, strict=True)
    ]
    compared = [n + (n < max(map(len, pair))) for n, pair in zip(same, zip(ours, theirs, strict=True), strict=True)]
    print(f"{sum(same)} of {sum(compared)} greedy replies equal")


def report(out: str) -> None:
    folder = Path(out)
    print("# check.sh\n")
    print("\n".join(f"- {line}" for line in environment(folder)))
    print(
        "\n| measure | value | share of the card | memory in use, MiB | status | seconds |\n|---|---|---|---|---|---|"
    )
    steps = list(csv.reader(open(folder / "steps.tsv"), delimiter="\t")) if (folder / "steps.tsv").exists() else []
    for part, name, status, seconds, memory in steps:
        value, share = measured(folder, part, name)
        state = {"0": "ok", "124": "ended by the clock", "left_out": "no time left"}.get(status, f"failed ({status})")
        print(f"| {part}: {name} | {value} | {share} | {memory} | {state} | {seconds} |")


def environment(folder: Path) -> list[str]:
    card = (folder / "card").read_text().splitlines() if (folder / "card").exists() else ["none"]
    lines = [f"card: {each} (name, memory, driver)" for each in card]
    lines.append(f"machine: {platform.platform()}, Python {platform.python_version()}")
    installed = {each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}
    return [*lines, ", ".join(f"{name} {installed.get(name, 'is not installed')}" for name in PACKAGES)]


def measured(folder: Path, part: str, name: str) -> tuple[str, str]:
    """What a step has measured, and which share of the card's arithmetic that is by model FLOPs."""
    log = folder / part / f"{name}.log"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    trained = folder / part / {"imitation": "imitation", "self-play": "spag1"}.get(name, name) / "trainer_state.json"
    if trained.exists():
        return training(trained, folder, part, name)
    speeds = [re.match(r"\| (slots|generate|vllm) \| \d+ \| [\d.]+ \| ([\d.]+) \|", line) for line in lines]
    if found := [match.groups() for match in speeds if match]:
        shape = model_of(folder, "7b")
        values = [f"{engine} {speed} new tokens/s" for engine, speed in found]
        shares = [share(2 * parameters(shape), float(speed), folder) for _, speed in found]
        return ", ".join(values), ", ".join(filter(None, shares))
    last = lines[-1] if lines else ""
    if played := re.search(r"[\d,.]+ new tokens per second", last):
        last = f"{played[0]}; {last}"
    return last.replace("|", "/")[:160], ""


def training(state: Path, folder: Path, part: str, name: str) -> tuple[str, str]:
    steps = [entry for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]
    if not steps:
        return "no step", ""
    speed = median(step["tokens_per_second"] for step in steps[WARM_UP:] or steps)
    value = f"{speed:.0f} tokens/s, loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}, {len(steps)} steps"
    shape = next((shape for shape in SHAPES if f"_{shape}_" in f"_{part}_{name}_"), None)
    if shape is None:
        return value, ""
    flops = 4 if "OfflinePO" in name else 6  # a parameter and token; the frozen weights under LoRA get no gradient
    return value, share(flops * parameters(shape), speed, folder)


def share(flops: float, tokens_per_second: float, folder: Path) -> str:
    cards = (folder / "card").read_text().splitlines() if (folder / "card").exists() else []
    peak = next((peak for name, peak in PEAKS.items() if cards and name in cards[0]), None)
    return f"{flops * tokens_per_second / (peak * 1e12 * len(cards)):.1%}" if peak else ""


def model_of(folder: Path, shape: str) -> str:
    """The shape of the larger model that was made: on a CPU a tiny one."""
    return shape if (folder / "data" / f"model_{shape}.log").exists() else "tiny"


def parameters(shape: str) -> int:
    size = SHAPES[shape]
    width, kv_share = size["hidden_size"], size.get("num_key_value_heads", 1) / size["num_attention_heads"]
    attention = width * width * (2 + 2 * (kv_share if "num_key_value_heads" in size else 1))
    layer = attention + 3 * width * size["intermediate_size"]
    return int(size["num_hidden_layers"] * layer + 2 * VOCABULARY.get(shape, 32000) * width)


if __name__ == "__main__":
    {each.__name__: each for each in (model, split, compare, report)}[sys.argv[1]](*sys.argv[2:])
