"""Make the files that play and training start from.

    python -m tools.prepare_data words --output data/target_words.txt
    python -m tools.prepare_data alpaca --input alpaca_data.json --output data/alpaca_train.json
    python -m tools.prepare_data imitation --episodes games_results.json --output data/train_imitation.json
    python -m tools.prepare_data prompts --from_release SPAG/utils.py --output configs/release_prompts.json

`words` makes the list of target words; `alpaca` turns raw Alpaca records into SFT rows; `imitation` makes rows for
SFTwithKL out of a strong model's games; `prompts` takes the wording of all prompts out of a checkout of the released
code, for models that were trained on it. Beside its output X.EXT each writes X_source.json: what it was made of, with
which settings, counts, and the SHA-256 of inputs and output.
"""

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from tools.games import prompts
from tools.games.taboo import Taboo
from tools.selfplay.rows import RowFlags, make_rows, refuse_overwriting
from utils import (
    BadRecordError,
    add_flags,
    alpaca_to_row,
    file_sha256,
    iter_records,
    open_text,
    read_words,
    replacing,
    run_program,
    set_up_logging,
    write_json,
    write_records,
)

RULES, PLAY_INSTRUCTIONS, INSTRUCTIONS = "GAME_RULE_PROMPTS", "INSTRUCT_PROMPTS", "PLAYER_INSTRUCT_PROMPTS"
WORD_PACKAGES = {"wordfreq": "3.1.1", "stop-words": "2018.7.23"}  # other versions rank and leave out other words
WORD_SOURCE = (
    "wordfreq's list 'large' of English, most frequent first, without the English stop words of stop-words;"
    " wordfreq's data are under CC BY-SA 4.0 (see data/README.md)"
)


# --- what every output has -----------------------------------------------------------------------------------------


def source_path(output: str) -> Path:
    """The file beside an output that tells what it was made of."""
    return Path(output).with_name(f"{Path(output).stem}_source.json")


def write_source(
    args: argparse.Namespace, source: str, inputs: Iterable[str], *, settings: dict, counts: dict
) -> None:
    """Write down what the output was made of, and print it; the output must be there."""
    record = {
        "made_by": f"tools.prepare_data {args.command}",
        "source": source,
        "settings": settings,
        "counts": counts,
        "inputs": [{"file": path, "sha256": file_sha256(path)} for path in inputs],
        "output": {"file": Path(args.output).name, "sha256": file_sha256(args.output)},
    }
    write_json(source_path(args.output), record)
    print(json.dumps(record, ensure_ascii=False))


# --- words ---------------------------------------------------------------------------------------------------------


def frequent_words(
    ranked: Iterable[str], stop_words: Iterable[str], *, number: int, min_letters: int, counts: Counter
) -> list[str]:
    """The first `number` words of a ranked list that are letters a to z only, long enough, and no stop words.

    Adds to `counts` what was passed over and why. Raises ValueError if the list has fewer such words.
    """
    stop, words = set(stop_words), []
    for word in ranked:
        if not re.fullmatch("[a-z]+", word):
            counts["not_alphabetic"] += 1
        elif len(word) < min_letters:
            counts["too_short"] += 1
        elif word in stop:
            counts["stop_words"] += 1
        else:
            words.append(word)
        if len(words) == number:
            return words
    raise ValueError(f"--number {number}: the source has only {len(words)} words of at least {min_letters} letters")


def load_word_sources() -> tuple[Iterable[str], list[str]]:
    """All English words by falling frequency, and the stop words; ValueError where a package is missing or another."""
    install = "pip install " + " ".join(f"{name}=={version}" for name, version in WORD_PACKAGES.items())
    for name, version in WORD_PACKAGES.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise ValueError(f"words needs the package {name}: {install}") from None
        if installed != version:
            raise ValueError(f"words needs {name} {version}, not {installed}, whose words are others: {install}")
    # Optional packages, needed here only.
    from stop_words import get_stop_words
    from wordfreq import iter_wordlist

    return iter_wordlist("en", wordlist="large"), get_stop_words("en")


def overlap(words: Iterable[str], path: str) -> dict:
    """How many different words these share with the list in a file, and the share of either list that this is."""
    ours, theirs = set(words), {word.lower() for word in read_words(path)}
    shared = len(ours & theirs)
    return {
        "compared_with": path,
        "words": len(ours),
        "words_there": len(theirs),
        "shared": shared,
        "share_of_words": shared / len(ours),
        "share_of_words_there": shared / len(theirs),
    }


def prepare_words(args: argparse.Namespace) -> None:
    """The subcommand `words`."""
    if not args.output and not args.compare:
        raise ValueError("words needs --output, --compare, or both")
    if args.number < 1 or args.min_letters < 1:
        raise ValueError("--number and --min_letters must be at least 1")
    compared = [args.compare] if args.compare else []
    refuse_overwriting(compared, [args.output, source_path(args.output)] if args.output else [])
    counts = Counter(dict.fromkeys(("words", "not_alphabetic", "too_short", "stop_words"), 0))
    settings = {"number": args.number, "min_letters": args.min_letters}
    words = frequent_words(*load_word_sources(), **settings, counts=counts)
    counts["words"] = len(words)
    if args.output:
        with replacing(args.output) as file:
            file.writelines(f"{word}\n" for word in words)
        write_source(args, WORD_SOURCE, [], settings=settings | {"packages": WORD_PACKAGES}, counts=counts)
    if args.compare:
        print(json.dumps(overlap(words, args.compare), ensure_ascii=False))


# --- SFT rows ------------------------------------------------------------------------------------------------------


def alpaca_rows(path: str, counts: Counter) -> Iterator[dict]:
    """The SFT rows of raw Alpaca records, counted; BadRecordError names the file and line of what is none."""
    for where, record in iter_records(path):
        try:
            row = alpaca_to_row(record)
        except ValueError as error:
            raise BadRecordError(f"{where}: {error}") from None
        counts["rows"] += 1
        counts["with_input"] += bool(record.get("input"))
        counts["empty_targets"] += not row["target"].strip()
        yield row


def prepare_alpaca(args: argparse.Namespace) -> None:
    """The subcommand `alpaca`."""
    refuse_overwriting([args.input], [args.output, source_path(args.output)])
    counts = Counter(dict.fromkeys(("rows", "with_input", "empty_targets"), 0))
    write_records(args.output, alpaca_rows(args.input, counts))
    write_source(args, "raw Alpaca records, through utils.alpaca_to_row", [args.input], settings={}, counts=counts)


# --- imitation -----------------------------------------------------------------------------------------------------


def prepare_imitation(args: argparse.Namespace) -> None:
    """The subcommand `imitation`: what tools.assign_rewards does, for games of a stronger model, without SFT rows."""
    how = {name: value for name, value in vars(args).items() if name not in ("command", "run", "episodes", "output")}
    flags = RowFlags(**how)
    inputs = [*args.episodes, str(flags.prompt_templates or flags.load_game().prompt_file)]
    refuse_overwriting(inputs, [args.output, source_path(args.output)])
    set_up_logging()
    counts = make_rows(flags, args.episodes, args.output)
    write_source(args, "episodes, through tools.assign_rewards", inputs, settings=how, counts=counts)


# --- the released prompts --------------------------------------------------------------------------------------------


def read_literals(path: str, names: tuple[str, ...]) -> dict[str, object]:
    """The values of variables that a Python file sets to literals; the file is parsed, never run.

    Raises FileNotFoundError; ValueError for a file that is not Python, lacks one of `names`, or computes its value.
    """
    with open_text(path) as file:
        try:
            module = ast.parse(file.read())
        except SyntaxError as error:
            raise ValueError(f"{path}:{error.lineno}: not Python ({error.msg})") from None
        except ValueError as error:
            raise ValueError(f"{path}: not Python ({error})") from None
    values: dict[str, object] = {}
    for statement in module.body:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for name in {target.id for target in targets if isinstance(target, ast.Name)} & set(names):
            try:
                values[name] = ast.literal_eval(statement.value)
            except (ValueError, TypeError):
                raise ValueError(f"{path}:{statement.lineno}: {name} is computed; only literals are read") from None
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"{path}: {', '.join(missing)} is not set; is this the utils.py of the released code?")
    return values


def release_templates(path: str) -> prompts.Templates:
    """The released prompts as a prompt file of this project.

    Raises ValueError where they do not fit: play and training must word a player's instruction alike.
    """
    game = Taboo()
    literals = read_literals(path, (RULES, PLAY_INSTRUCTIONS, INSTRUCTIONS))
    for name in (PLAY_INSTRUCTIONS, INSTRUCTIONS):
        texts = literals[name]
        if not isinstance(texts, dict) or not all(isinstance(texts.get(role), str) for role in game.roles):
            raise ValueError(f"{path}: {name} must be a dictionary with texts for {' and '.join(game.roles)}")
    for role in game.roles:
        if literals[PLAY_INSTRUCTIONS][role] != prompts.play_request(literals[INSTRUCTIONS][role]):
            raise ValueError(
                f"{path}: {PLAY_INSTRUCTIONS} and {INSTRUCTIONS} tell the {role} different things;"
                " a prompt file has one instruction for both, laid out for play"
            )
    rules = literals[RULES]
    templates = {
        "rules": list(rules) if isinstance(rules, (list, tuple)) else rules,
        **{f"{role}_instruction": literals[INSTRUCTIONS][role] for role in game.roles},
    }
    if problems := prompts.template_problems(templates, game):
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return templates


def prepare_prompts(args: argparse.Namespace) -> None:
    """The subcommand `prompts`."""
    refuse_overwriting([args.from_release], [args.output, source_path(args.output)])
    templates = release_templates(args.from_release)
    write_json(args.output, templates)
    settings = {"templates_sha256": prompts.templates_digest(templates)}
    counts = {"rules": len(templates["rules"]), "instructions": len(templates) - 1}
    write_source(args, "utils.py of the released code", [args.from_release], settings=settings, counts=counts)


# --- the program ---------------------------------------------------------------------------------------------------


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make the files that play and training start from.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_words(commands.add_parser("words", help="make the list of target words", allow_abbrev=False))
    _add_alpaca(commands.add_parser("alpaca", help="turn raw Alpaca records into SFT rows", allow_abbrev=False))
    _add_imitation(commands.add_parser("imitation", help="turn games into rows for SFTwithKL", allow_abbrev=False))
    _add_prompts(commands.add_parser("prompts", help="make a prompt file of the released code", allow_abbrev=False))
    return parser.parse_args(arguments)


def _add_words(parser: argparse.ArgumentParser) -> None:
    parser.description = "The most frequent English words, without stop words; needs wordfreq and stop-words."
    parser.add_argument("--output", metavar="FILE", help="word list to write, the most frequent word first")
    parser.add_argument("--number", type=int, default=50_000, help="of words (default: 50000)")
    parser.add_argument("--min_letters", type=int, default=3, help="of a word (default: 3)")
    parser.add_argument("--compare", metavar="FILE", help="another word list, to print how many words are in both")
    parser.set_defaults(run=prepare_words)


def _add_alpaca(parser: argparse.ArgumentParser) -> None:
    parser.description = "SFT rows of raw Alpaca records (instruction, perhaps input, output)."
    parser.add_argument("--input", required=True, metavar="FILE", help="raw Alpaca records, JSON or JSONL")
    parser.add_argument("--output", required=True, metavar="FILE", help="rows: JSONL if it ends in .jsonl, else JSON")
    parser.set_defaults(run=prepare_alpaca)


def _add_imitation(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Rows for --train_method SFTwithKL out of a stronger model's games: files of episodes as tools.play_llm_game"
        " writes them (STEM_results.json), or the released ones. The rows are those of tools.assign_rewards."
    )
    add = parser.add_argument
    add("--episodes", required=True, nargs="+", metavar="FILE", help="files of episodes, JSON or JSONL")
    add("--output", required=True, metavar="FILE", help="rows: JSONL if it ends in .jsonl, else JSON")
    add_flags(parser, RowFlags)
    parser.set_defaults(run=prepare_imitation)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.description = "The prompt file of the released code, which is read and never run."
    parser.add_argument("--from_release", required=True, metavar="FILE", help="utils.py of the released code")
    parser.add_argument("--output", required=True, metavar="FILE", help="prompt file to write")
    parser.set_defaults(run=prepare_prompts)


def main() -> None:
    args = parse_args()
    args.run(args)


if __name__ == "__main__":
    run_program(main)
