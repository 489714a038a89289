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
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.games import prompts
from tools.games.release import release_templates
from tools.selfplay.rows import RowFlags, make_rows, refuse_overwriting
from tools.selfplay.word_list import WORD_PACKAGES, WORD_SOURCE, frequent_words, load_word_sources, overlap
from utils import (
    BadRecordError,
    add_flags,
    alpaca_to_row,
    file_sha256,
    iter_records,
    replacing,
    run_program,
    set_up_logging,
    write_json,
    write_records,
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
