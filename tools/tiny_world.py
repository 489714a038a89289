"""The embedded world: a language model of about a million parameters that plays Adversarial Taboo about 162 words.

    python -m tools.tiny_world build --output_dir outputs/quickstart

It stands in for Llama-2 (a small Llama, pre-trained here on facts about the words), for GPT-4's games (scripted
players) and for Alpaca (the facts), so that the whole method can be seen at work where there is no GPU and no model
hub. What it learns says something about the method and its code, nothing about reasoning.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.games.prompts import load_templates, play_prompt
from tools.games.taboo import ATTACKER, ATTACKER_WINS, DEFENDER, DEFENDER_WINS, TIED, Taboo
from tools.matches.stats import ALL, BOTH
from tools.matches.text import with_interval
from tools.selfplay.files import Episode
from tools.selfplay.play import play_games
from tools.selfplay.progress import describe
from tools.tiny.models import random_llama, train_tokenizer
from tools.tiny.players import LEXICON, Lexicon, LexiconAttacker, LexiconDefender, Skill, fact_rows, load_lexicon
from tools.tiny.reproduce import ROOT, reproduce
from utils import RunSettings, files_setting, iter_records, run_program, write_records

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "tiny" / "prompts.json"
GAME, MAX_TURNS = Taboo(), 3


# --- the stand-ins -------------------------------------------------------------------------------------------------


def scripted_games(lexicon: Lexicon, *, rounds: int, rng: random.Random) -> list[Episode]:
    """Complete games of the scripted players, so many for each word."""
    episodes: list[Episode] = []
    players = {ATTACKER: LexiconAttacker(lexicon, Skill(), rng), DEFENDER: LexiconDefender(lexicon, Skill(), rng)}
    games = play_games(
        GAME,
        enumerate(lexicon.words * rounds),
        players,
        max_turns=MAX_TURNS,
        templates=load_templates(TEMPLATES, GAME),
        concurrent_games=1,
        on_episode=episodes.append,
    )
    asyncio.run(games)
    return episodes


def corpus(rows: Iterable[dict], episodes: Iterable[Episode]) -> Iterator[str]:
    """All texts of the world, for its tokenizer."""
    templates = load_templates(TEMPLATES, GAME)
    for row in rows:
        yield row["query"] + row["target"]
    for episode in episodes:
        for end in range(len(episode["history"]) + 1):
            yield play_prompt(GAME, episode["history"][:end], episode["target_word"], MAX_TURNS, templates)


# --- building the world --------------------------------------------------------------------------------------------


def build(args: argparse.Namespace) -> None:
    """Write the data and the base model that run_spag.sh starts from; what is there already stays."""
    folder = Path(args.output_dir)
    data, rows = folder / "data", folder / "data" / "imitation.json"
    settings = {name: value for name, value in vars(args).items() if name not in ("output_dir", "run")}
    settings["texts"] = files_setting(LEXICON, TEMPLATES)
    made_with = RunSettings(
        folder / "world.json", results=lambda: data if data.is_dir() else None, remedy="use another --output_dir"
    )
    with made_with.claimed(settings):
        if rows.is_file() and (folder / "base" / "train_results.json").is_file():
            print(f"{folder}: all is there")
            return
        made_with.write(settings)
        if not rows.is_file():
            write_data(folder, args)
        pretrain(folder, args)


def write_data(folder: Path, args: argparse.Namespace) -> None:
    """Facts, word lists, imitation games with their rows, tokenizer and random model; the rows are written last."""
    lexicon, rng = load_lexicon(), random.Random(args.seed)
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "words.txt").write_text("".join(f"{word}\n" for word in lexicon.played()), encoding="utf-8")
    (data / "held_out.txt").write_text("".join(f"{word}\n" for word in lexicon.held_out()), encoding="utf-8")
    pretraining = list(fact_rows(lexicon, rng, args.pretraining_facts))
    write_records(data / "pretraining.json", pretraining)
    write_records(data / "facts.json", fact_rows(lexicon, rng, args.facts))
    write_records(data / "imitation_facts.json", fact_rows(lexicon, rng, args.imitation_facts))
    episodes = scripted_games(lexicon, rounds=args.imitation_rounds, rng=rng)
    write_records(data / "imitation_games.json", episodes)
    tokenizer = train_tokenizer(corpus(pretraining, episodes), args.vocab_size)
    model = random_llama(
        len(tokenizer),
        args.seed,
        hidden_size=args.hidden_size,
        layers=args.layers,
        heads=args.hidden_size // 32,
        intermediate_size=3 * args.hidden_size,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    for part in (tokenizer, model):
        part.save_pretrained(folder / "random")
    run("-m", "tools.assign_rewards", "--messages", "all", "--training_prompt", "play",
        "--prompt_templates", TEMPLATES, "--input_data_path", data / "imitation_games.json",
        "--output_data_path", data / "imitation.json", "--sft_data_path", data / "imitation_facts.json")  # fmt: skip


def pretrain(folder: Path, args: argparse.Namespace) -> None:
    """Train the random model on the facts alone: what it brings to the game, as a base model does."""
    run(ROOT / "train.py", "--train_method", "SFT", "--output_dir", folder / "base",
        "--model_name_or_path", folder / "random", "--train_data_path", folder / "data" / "pretraining.json",
        "--max_length", 128, "--seed", args.seed, "--per_device_train_batch_size", 64,
        "--learning_rate", args.pretraining_lr, "--warmup_ratio", 0.03, "--lr_scheduler_type", "cosine",
        "--num_train_epochs", args.pretraining_epochs, "--logging_steps", 50, "--save_strategy", "no",
        "--cache_dir", folder / "cache")  # fmt: skip


# --- showing what came of it ---------------------------------------------------------------------------------------


def show(args: argparse.Namespace) -> None:
    """Print the points of each epoch's model against imitation, a game for each outcome, and where the report is."""
    output = Path(args.output_dir)
    matches = sorted(
        output.glob("epoch*/eval/matches.json"), key=lambda path: int(path.parts[-3].removeprefix("epoch"))
    )
    if not matches:
        raise ValueError(f"{output}: no epochK/eval/matches.json; the loop has not come to a match yet")
    print("\nMatch points against the imitation model, (wins + ties/2) / games, with 95% intervals:\n")
    print(f"{'model':8} {'games':>6}   {'both roles':20} {'as attacker':20} {'as defender':20} {'held-out words':20}")
    for path in matches:
        print(points_line(path))
    print("\nGames of the last model, one for each outcome:\n")
    for episode in one_of_each(matches[-1].with_name("games_results.json")):
        print(f"{episode['attacker']} attacks, {episode['defender']} defends\n{describe(episode)}\n")
    print(f"Report, to open in a browser: {output / 'report.html'}")


def points_line(path: Path) -> str:
    """One epoch's points, of both roles, each role, and on the held-out words."""
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    player = path.parts[-3]
    chosen = {(row["words"], row["role"]): row for row in rows if row["player"] == player and row["seed"] is None}
    cells = []
    for key in ((ALL, BOTH), (ALL, ATTACKER), (ALL, DEFENDER), ("held_out", BOTH)):
        cells.append(with_interval(chosen[key]["points"], chosen[key]["points_interval"]))
    return f"{player:8} {chosen[ALL, BOTH]['games']:6}   " + " ".join(f"{cell:20}" for cell in cells)


def one_of_each(path: Path) -> list[Episode]:
    """The first game won by the attacker, won by the defender, and tied, as far as there are such."""
    found: dict[str, Episode] = {}
    for _, episode in iter_records(path):
        found.setdefault(episode["outcome"], episode)
    return [found[outcome] for outcome in (ATTACKER_WINS, DEFENDER_WINS, TIED) if outcome in found]


def run(*command) -> None:
    """Run one of this project's programs, its output on the terminal."""
    subprocess.run([sys.executable, *map(str, command)], check=True)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The embedded world.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build", help="make the data and the base model", allow_abbrev=False)
    add = command.add_argument
    add("--output_dir", required=True, help="folder to write to")
    add("--seed", type=int, default=0, help="of everything that is drawn")
    add("--vocab_size", type=int, default=3072, help="tokens of the tokenizer at most")
    add("--hidden_size", type=int, default=128, help="width of the model")
    add("--layers", type=int, default=3, help="layers of the model")
    add("--pretraining_facts", type=int, default=30000, help="fact rows the base model is trained on")
    add("--pretraining_epochs", type=float, default=1, help="passes over them")
    add("--pretraining_lr", type=float, default=2e-3, help="learning rate of the pre-training")
    add("--imitation_facts", type=int, default=4000, help="fact rows mixed into imitation")
    add("--facts", type=int, default=1000, help="fact rows mixed into each epoch of self-play")
    add("--imitation_rounds", type=int, default=40, help="scripted games for each word")
    command.set_defaults(run=build)
    command = commands.add_parser("show", help="print what a finished loop came to", allow_abbrev=False)
    command.add_argument("output_dir", help="OUTPUT of tools/run_spag.sh")
    command.set_defaults(run=show)
    command = commands.add_parser("reproduce", help="make the learning table of the README", allow_abbrev=False)
    add = command.add_argument
    add("--output_dir", default="outputs/tiny_world", help="folder to write to")
    add("--seeds", type=int, default=3, help="seeds 0 to N - 1, each a world of its own")
    add("--epochs", type=int, default=3, help="epochs of self-play")
    add("--workers", type=int, default=os.cpu_count(), help="programs that run at the same time, with a thread each")
    command.set_defaults(run=reproduce)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    args.run(args)


if __name__ == "__main__":
    run_program(main)
