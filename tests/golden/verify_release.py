"""Compare the recorded numbers of this folder with what the first release of SPAG computes.

    python verify_release.py --release release

README.md beside this file has the environment, and where the release comes from. Its own modules get the inputs of the
recorded files. Texts, integers, booleans and null must be equal, floats within 1e-6 relative or, where sums of larger
terms end near zero, within 2e-7 absolute: two units in the last place of 1.0 in fp32. Trainings may differ by five
times as much, because 20 steps of Adam let the rounding of another CPU grow. Exit status 1 if anything differs.
Nothing of this project is imported, and nothing of the release is in here.

Three things are set from outside, and none of them changes what is computed:
- TextBlob asks NLTK's sentence splitter before it splits a target word into tokens; the splitter's trained model is
  a download. "The whole text is one sentence" stands in for it. An untrained splitter must give the same.
- GPUs are hidden, so that the training runs on the CPU in fp32, as it was recorded.
- `random` and `Trainer.train` of the release are watched, for draws, losses and gradient norms.
"""

import argparse
import contextlib
import copy
import hashlib
import importlib
import inspect
import io
import json
import math
import os
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}

import nltk
import torch
import transformers
from textblob import Word
from transformers import AutoModelForCausalLM, AutoTokenizer

# Git's ids of the files of commit 4abe36b that are called here.
RELEASE_FILES = {
    "arguments.py": "c71801432752b1b645a66e8841db7c9c97640ca3",
    "dataloaders.py": "6785ab976747b3dbcd2fd22f8855e5d72ba80f5c",
    "tools/assign_rewards.py": "4cc03729084693ace7e32b5f5cd1cd72da875de8",
    "train.py": "9bb94209b4781164cd578b96832ea65372bc68cf",
    "trainers.py": "a18587ad81ae558afc47d61306a217dea33550e1",
    "utils.py": "f458183ffcd815c0574108841d5994e31f860522",
}
RECORDED_WITH = {"torch": "2.13.0+cpu", "transformers": "4.37.2", "accelerate": "0.26.1", "numpy": "1.26.4"}
RECORDED_WITH |= {"textblob": "0.20.1", "nltk": "3.10.4"}
DRAWS = ["dialog_separator", "player_names", "prompt_type", "system_name", "rule_index"]
DRAWS += ["alpaca_system_prefix", "alpaca_instruction_as_prefix"]
SAMPLE_HISTORIES = {  # as the note of queries.json says; target "TGT", 7 turns
    "empty": [],
    "attacker_last": [{"role": "attacker", "content": "QQ1"}],
    "defender_last": [{"role": "attacker", "content": "QQ1"}, {"role": "defender", "content": "RR1"}],
}
IGNORE = -100
TRAININGS = "trainings"
TRAINING_ROUNDING = 5  # trainings may differ by so many times as much
GOLDEN = Path(__file__).resolve().parent


def plain(value: Any) -> Any:
    """The value as the recorded files write it: lists for tensors and tuples, "NaN" for a number that is none."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return value


def leaves(stored: Any, got: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """The single values of a recorded output beside those of the release."""
    if isinstance(stored, dict) and isinstance(got, dict) and stored.keys() <= got.keys():
        for key in stored:
            yield from leaves(stored[key], got[key], f"{where}.{key}")
    elif isinstance(stored, list) and isinstance(got, list) and len(stored) == len(got) and stored:
        for index, (one, other) in enumerate(zip(stored, got, strict=True)):
            yield from leaves(one, other, f"{where}[{index}]")
    else:
        yield where, stored, got


def distance(stored: Any, got: Any) -> float:
    """0 for equal values, the relative difference of two floats, infinity for anything else that differs."""
    if stored == got and isinstance(stored, bool) == isinstance(got, bool):
        return 0.0
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (stored, got))
    if not numbers or not isinstance(stored, float):
        return math.inf
    return abs(stored - got) / max(abs(stored), abs(got))


@dataclass
class Tally:
    """Counts the equal outputs of one file."""

    name: str
    tolerance: float = 1e-6  # relative
    floor: float = 2e-7  # absolute
    cases: Counter = field(default_factory=Counter)
    values: Counter = field(default_factory=Counter)
    floats: Counter = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def verdict(self, stored: Any, got: Any) -> str:
        apart = distance(stored, got)
        if apart == 0:
            return "equal"
        if apart <= self.tolerance:
            return "relative"
        return "floor" if apart < math.inf and abs(stored - got) <= self.floor else "differs"

    def check(self, where: str, stored: Any, got: Any) -> None:
        """Compare one case: a recorded output, or several by name."""
        equal = True
        for place, one, other in leaves(stored, plain(got), where):
            verdict = self.verdict(one, other)
            self.values[verdict != "differs"] += 1
            self.floats[verdict] += isinstance(one, float)
            if verdict == "differs":
                equal = False
                self.differences.append(f"{place}: recorded {str(one)[:90]}, release {str(other)[:90]}")
        self.cases[equal] += 1

    def report(self, seconds: float, shown: int) -> None:
        cases, values = (f"{counts[True]} of {counts.total()}" for counts in (self.cases, self.values))
        how = "exact"
        if self.floats.total():
            how = f"of {self.floats.total()} floats {self.floats['equal']} to the last bit, {self.floats['relative']} "
            how += f"within {self.tolerance:g} relative, {self.floats['floor']} within {self.floor:g} absolute"
        print(f"{self.name}: {cases} cases equal, {values} values; {how}; {seconds:.0f} s", flush=True)
        for difference in self.differences[:shown]:
            print(f"    differs: {difference}")


def attempt(call: Callable, *args: Any, **named: Any) -> tuple[Any, str | None, str | None]:
    """The result of the call, or the name and the text of what it raised."""
    try:
        return call(*args, **named), None, None
    except Exception as error:
        name = "re.error" if isinstance(error, re.error) else type(error).__name__
        return None, name, str(error)


def begins(stored: str | None, message: str | None) -> str | None:
    """The recorded text of an exception, which is shortened, if the release's begins with it."""
    return stored if stored and message and message.startswith(stored.rstrip(". …")) else message


def git_id(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def import_release(folder: Path) -> SimpleNamespace:
    """The release's modules; they import each other by bare names, so its folders come first in sys.path."""
    sys.path[:0] = [str(folder), str(folder / "tools")]
    modules = SimpleNamespace()
    for name in ("utils", "dataloaders", "arguments", "trainers", "train", "assign_rewards"):
        module = importlib.import_module(name)
        assert Path(module.__file__).resolve().is_relative_to(folder), f"{name} came from {module.__file__}"
        setattr(modules, name, module)
    return modules


def check_release(folder: Path, tally: Tally) -> None:
    for name, stored in RELEASE_FILES.items():
        tally.check(name, stored, git_id(folder / name))


def warn_of_versions() -> None:
    for name, recorded in RECORDED_WITH.items():
        installed = version(name)
        if installed.split("+")[0] != recorded.split("+")[0]:
            print(f"note: {name} is {installed}; the numbers were recorded with {recorded}")


def one_sentence(text: str, language: str = "english") -> list[str]:
    return [text]


def untrained_punkt(text: str, language: str = "english") -> list[str]:
    return nltk.tokenize.punkt.PunktSentenceTokenizer().tokenize(text)


def with_punkt(check: Callable, *args: Any) -> None:
    with mock.patch.object(nltk.tokenize, "sent_tokenize", untrained_punkt):
        check(*args)


class OneWord:
    """Stands for TextBlob: the plural of the whole text as a single word."""

    def __init__(self, text: str):
        self.words, self.text = self, text

    def pluralize(self) -> list[str]:
        return [Word(self.text).pluralize()]


def judged(release: SimpleNamespace, case: dict) -> tuple[dict, str | None]:
    judge, history = release.assign_rewards.get_game_outcome, copy.deepcopy(case["history"])
    result, raises, message = attempt(judge, history, case["target_word"], case["max_turns"])
    outcome, length = result or (None, None)
    return {"outcome": outcome, "history_length": length, "raises": raises}, message


def check_judge(release: SimpleNamespace, cases: list[dict], tally: Tally) -> None:
    inputs = {"id", "category", "note", "history", "target_word", "max_turns"}
    for case in cases:
        got, message = judged(release, case)
        with mock.patch.object(release.assign_rewards, "TextBlob", OneWord):
            shortcut, _ = judged(release, case)
        got |= {"same_with_word_pluralize": shortcut == got, "with_word_pluralize": shortcut}
        got["raises_message"] = begins(case.get("raises_message"), message)
        tally.check(f"game {case['id']}", {key: case[key] for key in case.keys() - inputs}, got)


def check_derivatives(release: SimpleNamespace, cases: list[dict], tally: Tally) -> None:
    for case in cases:
        words, raises, _ = attempt(release.assign_rewards.get_derivative_words, case["word"])
        got = {"derivatives": words, "raises": raises}
        tally.check(repr(case["word"]), {key: case[key] for key in got}, got)


def rewarded(release: SimpleNamespace, episodes: list[dict], decay: float) -> tuple[list[dict], list[dict], str]:
    """The release's rows for these episodes, the episodes as it leaves them, and what it prints."""
    episodes = copy.deepcopy(episodes)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        rows = release.assign_rewards.compute_self_play_sample_rewards(episodes, decay)
    return rows, episodes, printed.getvalue()


def records_of(rows: list[dict], episodes: list[dict]) -> list[dict]:
    """The rows with the place of their message: the release leaves a `query` in each message that it made a row of."""
    messages = [(episode, i) for episode in episodes for i in range(len(episode["history"]))]
    places = [(episode, i) for episode, i in messages if "query" in episode["history"][i]]
    found = list(zip(places, rows, strict=True))
    assert all(episode["history"][i]["query"] == row["query"] for (episode, i), row in found)
    return [row | {"episode": episode["id"], "message": i} for (episode, i), row in found]


def totals_of(rows: list[dict], printed: str) -> dict:
    """Sums over the rows, and the numbers of the line that the release prints."""
    numbers = [json.loads(number) for number in re.findall(r"\d+(?:\.\d+)?", printed)]
    names = ["records", "decided_games", "attacker_games", "defender_games", "attacker_weight", "defender_weight"]
    totals = dict(zip(names, numbers, strict=True))
    totals["sum_reward"] = sum(row["reward"] for row in rows)
    totals["sum_reward_times_weight"] = sum(row["reward"] * row["weight"] for row in rows)
    return totals | {f"{role}_records": sum(row["role"] == role for row in rows) for role in ("attacker", "defender")}


def check_rewards(release: SimpleNamespace, recorded: dict, tally: Tally) -> None:
    for episode in recorded["episodes"]:
        got, _ = judged(release, episode)
        tally.check(f"episode {episode['id']}", {key: episode[key] for key in ("outcome", "history_length")}, got)
    by_id = {episode["id"]: episode for episode in recorded["episodes"]}
    for run in recorded["runs"]:
        rows, after, printed = rewarded(release, [by_id[i] for i in run["episode_ids"]], run["decay_weight"])
        got = {"totals": totals_of(rows, printed), "records": records_of(rows, after)}
        tally.check(f"{run['set']} at {run['decay_weight']}", {key: run[key] for key in got}, got)


def check_special_rewards(release: SimpleNamespace, recorded: dict, inputs: dict, tally: Tally) -> None:
    for case in recorded["special"]:
        given = inputs[case["name"]]
        result, raises, message = attempt(rewarded, release, given["episodes"], given["decay_weight"])
        got = {"raises": raises, "raises_message": begins(case.get("raises_message"), message)}
        if result:
            rows, after, _ = result
            got |= {"records": len(rows), "rewards": [row["reward"] for row in rows]}
            got["message_keys_after"] = [[sorted(message) for message in episode["history"]] for episode in after]
        tally.check(case["name"], {key: case[key] for key in case.keys() - {"name", "note"}}, got)


def digest(text: str) -> dict:
    return {"n_chars": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def described(release: SimpleNamespace, query: str, case: dict, facts: dict) -> dict:
    """The recorded description of a play prompt, found in the release's text."""
    word, empty = case["target_word"], not case["history"]
    rule = release.utils.GAME_RULE_PROMPTS[0].format(max_turns=case["max_turns"])
    instruction_at, marker_at = (query.rindex(facts[key]) for key in ("instruction_prefix", "response_marker"))
    instruction, middle = query[instruction_at:marker_at], query[len(rule) : instruction_at]
    block = None if empty else middle
    ends = {role: text.format(target_word=word) for role, text in release.utils.INSTRUCT_PROMPTS.items()}
    parts = {"rule": 0, "history": len(rule), "instruction": instruction_at, "response_marker": marker_at}
    got = {"next_player": next(role for role in ends if query.endswith(ends[role]))}
    got |= {"starts_with_rule": query.startswith(rule), "rule_chars": len(rule)}
    got["rule_contains_max_turns"] = str(case["max_turns"]) in rule
    got |= {"middle_kind": "no_history_sentence" if empty else "history_block", "history_block": block}
    got |= {"history_block_offset": None if empty else len(rule), "instruction_offset": instruction_at}
    got |= {"response_marker_offset": marker_at, "ends_with": query[marker_at:], "order": sorted(parts, key=parts.get)}
    quoted = facts["target_quoting_in_attacker_instruction"].format(target_word=word)
    got["target_in_instruction"] = quoted in instruction
    got["target_in_history_block"] = word in (block or "") if word else None
    return got | {"target_in_query": word in query if word else None}


def check_play_prompts(release: SimpleNamespace, recorded: dict, tally: Tally) -> None:
    calls = {
        "convert": release.utils.convert_game_history_to_query,
        "randomly_convert": release.utils.randomly_convert_game_history_to_query,
    }
    default = inspect.signature(calls["convert"]).parameters["max_turns"].default
    tally.check("default_max_turns", recorded["default_max_turns"], default)
    for number, case in enumerate(recorded["cases"]):
        call = calls[case.get("function", "convert")]
        query, raises, _ = attempt(call, case["history"], case["target_word"], case["max_turns"])
        got = {"raises": raises}
        if query is not None:
            got |= digest(query) | described(release, query, case, recorded)
        inputs = {"history", "target_word", "max_turns", "function"}
        tally.check(f"case {number}", {key: case[key] for key in case.keys() - inputs}, got)


def check_play_layout(release: SimpleNamespace, recorded: dict, tally: Tally) -> None:
    """The recorded facts on how a play prompt is put together."""
    ask = release.utils.convert_game_history_to_query
    talk = [{"role": "attacker", "content": "hm"}, {"role": "defender", "content": "no"}]
    rule, defender = release.utils.GAME_RULE_PROMPTS[0], ask(talk[:1], "TGT")
    lines = [recorded["history_line_format"].format(**message) for message in talk]
    block = "".join([recorded["history_header"], *lines, recorded["instruction_prefix"]])
    got = {
        "rule_ends_with_newline": rule.endswith("\n"),
        "rule_starts_with_newline": rule.startswith("\n"),
        "defender_instruction_contains_target": "TGT" in defender,
        "response_marker_followed_by_space_or_newline": defender[-1].isspace(),
        "empty_history_sentence_instead_of_header": recorded["history_header"] not in ask([], "TGT"),
    }
    for key, value in got.items():
        tally.check(key, recorded[key], value)
    tally.check("history block", True, block in ask(talk, "TGT"))
    for role, player in (("attacker", "defender"), ("defender", "attacker"), ("other", "attacker")):
        end = release.utils.INSTRUCT_PROMPTS[player].format(target_word="TGT")
        tally.check(f"after {role}", True, ask([{"role": role, "content": "hm"}], "TGT").endswith(end))


class WatchedRandom:
    """Stands in for the release's `random`: draws from the real one and keeps the options and the results."""

    def __init__(self):
        self.options, self.drawn = [], []

    def choice(self, options: list) -> Any:
        self.options.append(options)
        self.drawn.append(random.choice(options))
        return self.drawn[-1]

    def uniform(self, low: float, high: float) -> float:
        self.drawn.append(random.uniform(low, high))
        return self.drawn[-1]


def drawn(release: SimpleNamespace, kind: str, seed: int) -> tuple[str, dict, list]:
    """A training prompt of the release, the choices it drew, and the lists it drew from."""
    watched = WatchedRandom()
    random.seed(seed)
    with mock.patch.object(release.utils, "random", watched):
        query = release.utils.randomly_convert_game_history_to_query(SAMPLE_HISTORIES[kind], "TGT", 7)
    choices = dict.fromkeys(DRAWS) | dict(zip(DRAWS, watched.drawn, strict=False))
    choices["player_names"] = list(choices["player_names"])
    choices["rule_index"] = release.utils.GAME_RULE_PROMPTS.index(choices["rule_index"])
    for name in DRAWS[5:]:
        choices[name] = None if choices[name] is None else choices[name] < 0.2
    return query, choices, watched.options


def check_samples(release: SimpleNamespace, samples: list[dict], tally: Tally) -> None:
    for sample in samples:
        query, choices, _ = drawn(release, sample["history_kind"], sample["seed"])
        stored = {key: sample[key] for key in sample.keys() - {"history_kind", "seed"}}
        tally.check(f"{sample['history_kind']}, seed {sample['seed']}", stored, choices | digest(query))


def rule_facts(index: int, rule: str) -> dict:
    quote = rule[rule.index("target word", rule.index("I know the word!")) - 1]
    opening = rule.strip().split("\n\n")[1]  # the first paragraph only names the game
    slots, size = rule.count("{max_turns}"), digest(rule)
    return {
        "index": index,
        "uses_max_turns": slots > 0,
        "n_max_turns_slots": slots,
        "starts_with_newline": rule.startswith("\n"),
        "ends_with_newline": rule.endswith("\n"),
        "n_chars_template": size["n_chars"],
        "sha256_of_template": size["sha256"],
        "defender_described_first": opening.find("defender") < opening.find("attacker") or "attacker" not in opening,
        "guess_phrase_quote": quote,
    }


def check_options(release: SimpleNamespace, recorded: dict, tally: Tally) -> None:
    """The lists that the release draws from, and facts on its eight rules."""
    _, _, options = drawn(release, "attacker_last", 0)
    names = {"defender": "<next player's role>", "attacker": "<other role>"}
    options[1] = [[names.get(name, name) for name in pair] for pair in options[1]]
    for name, values in zip(DRAWS[:4], options, strict=False):
        tally.check(name, recorded[name]["values"], values)
    rules = [rule_facts(*numbered) for numbered in enumerate(options[4])]
    tally.check("rule_index", recorded["rule_index"]["variants"], rules)
    tally.check("n_variants", recorded["rule_index"]["n_variants"], len(rules))


def structure(choices: dict) -> str:
    parts = [f"{name.removeprefix('alpaca_')}={choices[name]}" for name in DRAWS[5:] if choices[name] is not None]
    return "/".join([choices["prompt_type"], *parts])


def check_frequencies(release: SimpleNamespace, recorded: dict, tally: Tally) -> None:
    """How often the release draws what over the seeds 0, 1, 2, ...; only alpaca prompts have the last two draws."""
    seeds = recorded["observed_frequencies"]["seeds"]
    for kind, stored in recorded["observed_frequencies"]["per_history_kind"].items():
        counts, structures, odd = {name: Counter() for name in DRAWS}, Counter(), 0
        for seed in range(seeds):
            query, choices, _ = drawn(release, kind, seed)
            structures[structure(choices)] += 1
            odd += not query.endswith(recorded["all_queries_end_with"])
            odd += ("TGT" in query) == (kind == "attacker_last")  # the target belongs to the attacker's prompts alone
            for name in DRAWS:
                value = choices[name]
                if value is not None:
                    counts[name]["/".join(value) if name == "player_names" else str(value)] += 1
        shares = {name: {value: n / count.total() for value, n in count.items()} for name, count in counts.items()}
        tally.check(f"frequencies, {kind}", stored, shares)
        tally.check(f"structures, {kind}", recorded["observed_frequencies"]["structures"][kind], dict(structures))
        tally.check(f"ends and targets, {kind}", 0, odd)


def check_queries(release: SimpleNamespace, recorded: dict, tally: Tally) -> None:
    if "fixed_converter" in recorded:
        check_play_prompts(release, recorded["fixed_converter"], tally)
        check_play_layout(release, recorded["fixed_converter"], tally)
    training = recorded.get("random_converter", recorded)  # a file may hold the samples alone
    check_samples(release, training["seed_samples"]["samples"], tally)
    if "options" in training:
        check_options(release, training["options"], tally)
        check_frequencies(release, training, tally)


def tokenizer_of(case: dict) -> Any:
    named = {key: case[key] for key in ("padding_side", "truncation_side") if key in case}
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "tok", model_max_length=case.get("max_length", 64), **named)
    tokenizer.pad_token = case.get("pad_token", tokenizer.pad_token)
    return tokenizer


def collate(release: SimpleNamespace, items: list[dict], tokenizer: Any) -> dict[str, torch.Tensor]:
    return release.dataloaders.offline_ppo_data_collactor(SimpleNamespace(debug_mode=False), items, tokenizer)


def batch_facts(batch: dict[str, torch.Tensor], tokenizer: Any) -> dict:
    labels = batch["labels"] != IGNORE
    facts = {"shape": list(labels.shape), "dtypes": {key: str(value.dtype) for key, value in batch.items()}}
    facts |= {"n_label_tokens": labels.sum(1), "n_label_tokens_after_shift": labels[:, 1:].sum(1)}
    return facts | {"pad_token_id": tokenizer.pad_token_id} | batch


def check_collator(release: SimpleNamespace, recorded: dict, tally: Tally) -> None:
    items, tokenizer = [entry["item"] for entry in recorded["items"]], tokenizer_of({})
    tally.check("vocab_size", recorded["vocab_size"], len(tokenizer))
    special = {key: getattr(tokenizer, f"{key}_token_id") for key in recorded["special"]}
    tally.check("special", recorded["special"], special)
    tally.check("ignore_index", recorded["ignore_index"], release.utils.IGNORE_INDEX)
    for stored in recorded["encodings"]:
        texts = [items[stored["id"]].get(key) for key in ("query", "target")]
        ids = [None if text is None else tokenizer.encode(text, add_special_tokens=False) for text in texts]
        got = dict(zip(("query_ids", "target_ids"), ids, strict=True))
        tally.check(f"encoding {stored['id']}", {key: stored[key] for key in got}, got)
    inputs = {"id", "item_ids", "max_length", "padding_side", "truncation_side", "pad_token"}
    for case in recorded["cases"]:
        tokenizer = tokenizer_of(case)
        batch = collate(release, [items[i] for i in case["item_ids"]], tokenizer)
        stored = {key: case[key] for key in case.keys() - inputs}
        tally.check(f"case {case['id']}", stored, batch_facts(batch, tokenizer))


def check_collator_edges(release: SimpleNamespace, recorded: dict, tally: Tally) -> None:
    for case in recorded["errors"]:
        _, raises, _ = attempt(collate, release, case["batch"], tokenizer_of({}))
        tally.check(case["note"], case["raises"], raises)
    for number, case in enumerate(recorded["batch_padding"]):
        tokenizer = tokenizer_of(case | {"max_length": case["model_max_length"]})
        named = {key: case[key] for key in ("padding", "max_length", "pad_token_id")}
        got = release.dataloaders.batch_padding(case["inputs"], tokenizer, **named)
        tally.check(f"batch_padding {number}", {key: case[key] for key in got}, got)


def load_models(recorded: dict, attention: str) -> torch.nn.Module:
    """The policy with its frozen reference as the release's training hangs it in: both in train mode."""
    names = (recorded["models"][key] for key in ("policy", "ref"))
    policy, ref = (
        AutoModelForCausalLM.from_pretrained(GOLDEN / name, attn_implementation=attention) for name in names
    )
    policy.ref_model = ref.requires_grad_(False)
    return policy.train()


def own_parameters(policy: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: value for name, value in policy.named_parameters() if not name.startswith("ref_model.")}


def norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(tensor.double().pow(2).sum().item() for tensor in tensors))


def loss_and_gradient(trainer: type, policy: torch.nn.Module, batch: dict, coefficients: dict, entries: list) -> dict:
    """The loss that the release's trainer computes for a batch, and its gradient."""
    policy.zero_grad()
    settings = SimpleNamespace(args=SimpleNamespace(debug_mode=False, **coefficients))
    loss = trainer.compute_loss(settings, policy, batch)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in own_parameters(policy).items()}
    got = {"loss": loss.detach(), "grad_none": [name for name in gradients if gradients[name] is None]}
    got["grad_norm"] = norm([gradient for gradient in gradients.values() if gradient is not None])
    places = [(gradients[entry["param"]].flatten(), entry["flat_index"]) for entry in entries]
    return got | {"grad_entries": [values[index].item() for values, index in places]}


@torch.no_grad()
def logprobs(release: SimpleNamespace, policy: torch.nn.Module, batch: dict) -> dict[str, torch.Tensor]:
    inputs, got = {key: batch[key] for key in ("input_ids", "attention_mask")}, {}
    for name, model in (("policy_logprob", policy), ("ref_logprob", policy.ref_model)):
        got[name] = release.trainers.compute_lm_loglikeli(model(**inputs).logits, batch["labels"])
    return got


def computed(release: SimpleNamespace, policy: torch.nn.Module, inputs: dict, recorded: dict) -> dict:
    """All that is recorded of a batch for one kind of attention."""
    batch = {key: torch.tensor(value, dtype=torch.float) for key, value in inputs.items()}
    batch |= {key: batch[key].long() for key in ("input_ids", "labels")}
    got = logprobs(release, policy, batch)
    got["ratio"] = (got["policy_logprob"] - got["ref_logprob"]).exp()
    trainers = {"SFTwithKL": "SFTWeightedWithKLTrainer", "OfflinePO": "OfflineWeightedPolicyTrainer"}
    for method, name in trainers.items():
        trainer, coefficients = getattr(release.trainers, name), recorded["coefficients"][method]
        got[method] = loss_and_gradient(trainer, policy, batch, coefficients, recorded["grad_entries"])
        got[f"{method}_loss"] = got[method]["loss"]
    return got


def check_losses(release: SimpleNamespace, recorded: dict, items: list[dict], tally: Tally) -> None:
    policies = {attention: load_models(recorded, attention) for attention in ("sdpa", "eager")}
    outputs = ["policy_logprob", "ref_logprob", "ratio", "SFTwithKL", "OfflinePO", "eager", "inputs"]
    outputs += ["n_label_tokens", "n_label_tokens_after_shift"]
    for case in recorded["batches"]:
        tokenizer = tokenizer_of(case)
        batch = collate(release, [items[i]["item"] for i in case["item_ids"]], tokenizer)
        got = computed(release, policies["sdpa"], case["inputs"], recorded) | {"inputs": batch}
        got["eager"] = computed(release, policies["eager"], case["inputs"], recorded)
        got |= {key: value for key, value in batch_facts(batch, tokenizer).items() if key.startswith("n_label")}
        tally.check(f"batch {case['id']}", {key: case[key] for key in outputs}, got)


@dataclass
class Watch:
    """What happens inside a training run of the release."""

    trainer: Any = None
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    modes: dict = field(default_factory=dict)

    def train(self, original: Callable, trainer: Any, *args: Any, **named: Any) -> Any:
        """Stands in for Trainer.train: watches this trainer's losses and gradient norms, then trains."""
        self.trainer = trainer
        compute_loss, clip = trainer.compute_loss, trainer.accelerator.clip_grad_norm_
        trainer.compute_loss = lambda model, inputs: self.see_loss(model, compute_loss(model, inputs))
        trainer.accelerator.clip_grad_norm_ = lambda *given: self.see_norm(clip(*given))
        return original(trainer, *args, **named)

    def see_loss(self, model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
        if not self.losses:
            ref, every = getattr(model, "ref_model", None), list(model.parameters())
            self.modes = {"policy_training": model.training, "ref_training": ref.training if ref else None}
            self.modes["n_trainable"] = sum(each.numel() for each in every if each.requires_grad)
            self.modes["n_all"] = sum(each.numel() for each in every)
        self.losses.append(loss.item())
        return loss

    def see_norm(self, value: torch.Tensor) -> torch.Tensor:
        self.norms.append(value.item())
        return value

    def collate(self, original: Callable, args: Any, batch: list[dict], tokenizer: Any) -> dict:
        self.batches.append([row["query_id"] for row in batch])
        return original(args, batch, tokenizer)


def command_line(data: str, settings: dict, output: str) -> list[str]:
    """The arguments of the release's train.py: those recorded, and what keeps the run on the CPU, silent, unsaved."""
    given = {key: value for key, value in settings.items() if value != ""}
    given |= {key: GOLDEN / given[key] for key in ("model_name_or_path", "ref_model_name_or_path") if key in given}
    given |= {"output_dir": output, "train_data_path": GOLDEN / data, "remove_unused_columns": False}
    given |= {"logging_steps": 1, "save_strategy": "no", "evaluation_strategy": "no", "report_to": "none"}
    given |= {"disable_tqdm": True, "use_cpu": True}
    return ["train.py", *(text for key, value in given.items() for text in (f"--{key}", str(value)))]


def watched_run(release: SimpleNamespace, arguments: list[str]) -> Watch:
    """One run of the release's train.py in this process."""
    watch, original = Watch(), transformers.Trainer.train

    def train(*args: Any, **named: Any) -> Any:
        return watch.train(original, *args, **named)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", arguments))
        stack.enter_context(mock.patch.object(transformers.Trainer, "train", train))
        for name in ("sft_data_collactor", "offline_ppo_data_collactor"):
            spy = partial(watch.collate, getattr(release.train, name))
            stack.enter_context(mock.patch.object(release.train, name, spy))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        release.train.train()
    return watch


def final_state(watch: Watch, settings: dict, entries: list[dict]) -> dict:
    """The trained parameters: their norm, how far they moved, and single entries."""
    start = AutoModelForCausalLM.from_pretrained(GOLDEN / settings["model_name_or_path"]).state_dict()
    trained = {name: value.detach() for name, value in own_parameters(watch.trainer.model).items()}
    values = [trained[entry["param"]].flatten()[entry["flat_index"]].item() for entry in entries]
    moved = norm([trained[name].double() - start[name].double() for name in trained])
    found = [{**entry, "value": value} for entry, value in zip(entries, values, strict=True)]
    return {"param_norm": norm(list(trained.values())), "update_norm": moved, "entries": found}


def run_outputs(watch: Watch, run: dict) -> dict:
    history, used = watch.trainer.state.log_history, len(watch.losses)
    steps = [entry for entry in history if "loss" in entry]
    return {
        "mode_at_first_step": watch.modes,
        "logged_loss": [step["loss"] for step in steps],
        "learning_rate_logged_after_step": [step["learning_rate"] for step in steps],
        "micro_losses": watch.losses,
        "grad_norm_before_clipping": watch.norms,
        "micro_batches_query_ids": watch.batches[:used],
        "prefetched_unused_batches": len(watch.batches) - used,
        "final": final_state(watch, run["args"], run["final"]["entries"]),
        "train_loss_reported": history[-1]["train_loss"],
    }


def check_train_runs(release: SimpleNamespace, recorded: dict, tally: Tally) -> None:
    """Each run, and once more where the record says that two runs are equal to the last bit."""
    for name, run in recorded["runs"].items():
        results = []
        for _ in range(2 if run["bitwise_repeatable_here"] else 1):
            with tempfile.TemporaryDirectory() as output:
                watch = watched_run(release, command_line(recorded["dataset"], run["args"], output))
            results.append(plain(run_outputs(watch, run)))
        tally.check(name, {key: run[key] for key in results[0]}, results[0])
        if len(results) == 2:
            tally.check(f"{name} twice", True, results[0] == results[1])


def load(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def checks(folder: Path, release: SimpleNamespace) -> dict[str, Callable[[Tally], None]]:
    """The check of each part by its name."""
    judge, derivatives, rewards = load("judge"), load("derivatives"), load("rewards")
    collator, losses = load("collator"), load("losses")
    return {
        "files": partial(check_release, folder),
        "judge": partial(check_judge, release, judge),
        "derivatives": partial(check_derivatives, release, derivatives),
        "judge, untrained splitter": partial(with_punkt, check_judge, release, judge),
        "derivatives, untrained splitter": partial(with_punkt, check_derivatives, release, derivatives),
        "rewards": partial(check_rewards, release, rewards),
        "rewards, special": partial(check_special_rewards, release, rewards, load("rewards_special")),
        "queries": partial(check_queries, release, load("queries")),
        "collator": partial(check_collator, release, collator),
        "collator, errors and padding": partial(check_collator_edges, release, collator),
        "losses": partial(check_losses, release, losses, collator["items"]),
        TRAININGS: partial(check_train_runs, release, load("train_run")),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the recorded numbers with the first release of SPAG.")
    parser.add_argument("--release", type=Path, required=True, help="checkout of Linear95/SPAG at 4abe36b")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts that are checked (default: all)")
    parser.add_argument("--show", type=int, default=5, help="differences shown of each part")
    return parser.parse_args()


def main() -> int:
    args = parse()
    torch.set_num_threads(1)  # more threads add up in another order
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)  # odd target words in the release's patterns
    nltk.tokenize.sent_tokenize = one_sentence
    warn_of_versions()
    folder = args.release.resolve()
    parts = checks(folder, import_release(folder))
    tallies = []
    for name in args.only or parts:
        looser = TRAINING_ROUNDING if name == TRAININGS else 1
        tally = Tally(name, Tally.tolerance * looser, Tally.floor * looser)
        started = time.monotonic()
        parts[name](tally)
        tally.report(time.monotonic() - started, args.show)
        tallies.append(tally)
    cases = sum((tally.cases for tally in tallies), Counter())
    values = sum((tally.values for tally in tallies), Counter())
    print(f"in all {cases[True]} of {cases.total()} cases and {values[True]} of {values.total()} values are equal")
    return 1 if cases[False] else 0


if __name__ == "__main__":
    sys.exit(main())
