"""Build the toy world: facts, scripted games and their rows, a tokenizer, and a small Llama that knows the facts.

    python -m tools.lab.world.build --output_dir outputs/quickstart --seed 0

A Llama with about a million parameters, trained here on facts about 162 words, stands in for Llama-2, scripted players
for GPT-4, and the facts for Alpaca, so that the whole method runs without a GPU and without downloads.
"""

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.common.files import ROOT, write_records, write_words
from tools.common.flags import FlagGroup, compared_values, defaults, flag, parse_flags
from tools.common.models import make_weights_readable
from tools.common.programs import run_program, run_python
from tools.common.ranks import processes_of_cores
from tools.common.records import files_setting, stage
from tools.games.prompts import load_templates, play_prompt
from tools.games.taboo import Taboo
from tools.lab.world.players import LEXICON, Lexicon, Skill, fact_rows, load_lexicon, speak
from tools.players.player import ScriptedPlayer
from tools.selfplay.episodes import Episode
from tools.selfplay.play import play_games

GAME = Taboo()
MAX_TURNS = 3  # must equal max_turns in configs/tiny.toml, because the rules in a prompt state it
PROMPTS = ROOT / "configs" / "prompts" / "tiny.json"
TRUE_HINTS = Skill(breach=0, stray=0, slip=0, guess=(0,), last_guess=(0,))  # until the last turn
BELIEF_ROUNDS = 5  # games per held-out word on which belief is measured


@dataclass(kw_only=True)
class Flags(FlagGroup):
    output_dir: str = flag("folder to write to", compared=False)
    seed: int = flag("random seed", default=0)
    pretraining_facts: int = flag("fact rows that the base model is trained on", default=30000)
    imitation_facts: int = flag("fact rows mixed into imitation", default=4000)
    facts: int = flag("fact rows mixed into each epoch of self-play", default=1000)
    imitation_rounds: int = flag("scripted games per word", default=30)


def scripted_games(lexicon: Lexicon, words: Sequence[str], rng: random.Random, skill: Skill) -> list[Episode]:
    episodes: list[Episode] = []
    players = dict.fromkeys(GAME.roles, ScriptedPlayer(lambda turn: speak(turn, lexicon, skill, rng)))
    games = play_games(
        GAME,
        enumerate(words),
        players,
        max_turns=MAX_TURNS,
        templates=load_templates(PROMPTS, GAME),
        concurrent_games=1,
        on_episode=episodes.append,
    )
    asyncio.run(games)
    return episodes


def corpus(rows: Iterable[dict], episodes: Iterable[Episode]) -> Iterator[str]:
    templates = load_templates(PROMPTS, GAME)
    for row in rows:
        yield row["query"] + row["target"]
    for episode in episodes:
        history = episode["history"]
        task = episode["target_word"]
        max_turns = episode["max_turns"]
        for end in range(len(history) + 1):
            yield play_prompt(GAME, history[:end], task, max_turns, templates)


def write_data(folder: Path, flags: Flags) -> None:
    from tools.engine.random_model import SHAPE, random_llama, train_tokenizer  # imports torch

    lexicon = load_lexicon()
    rng = random.Random(flags.seed)
    data = folder / "data"
    for name, words in (("words", lexicon.played()), ("held_out", lexicon.held_out())):
        write_words(data / f"{name}.txt", words)
    pretraining = list(fact_rows(lexicon, rng, flags.pretraining_facts))
    write_records(data / "pretraining.json", pretraining)
    write_records(data / "facts.json", fact_rows(lexicon, rng, flags.facts))
    write_records(data / "imitation_facts.json", fact_rows(lexicon, rng, flags.imitation_facts))
    episodes = scripted_games(lexicon, lexicon.words * flags.imitation_rounds, rng, Skill())
    write_records(data / "imitation_games.json", episodes)
    # A separate generator, so that these games do not depend on the numbers of facts and imitation games.
    belief_rng = random.Random(f"belief {flags.seed}")
    games = scripted_games(lexicon, lexicon.held_out() * BELIEF_ROUNDS, belief_rng, TRUE_HINTS)
    write_records(data / "belief_games.json", [game | {"split": "held_out"} for game in games])
    # Large enough that each target word is a single token.
    tokenizer = train_tokenizer(corpus(pretraining, episodes), vocab_size=3072)
    tokenizer.save_pretrained(folder / "random")
    random_llama(len(tokenizer), flags.seed, **SHAPE, tie_word_embeddings=True).save_pretrained(folder / "random")
    make_weights_readable(folder / "random")
    argv = ["--input_data_path", data / "imitation_games.json", "--sft_data_path", data / "imitation_facts.json"]
    argv += ["--messages", "all", "--training_prompt", "play", "--prompt_templates", PROMPTS]
    run_python(ROOT / "tools/assign_rewards.py", *argv, "--output_data_path", data / "imitation.json")


def pretrain(folder: Path, flags: Flags) -> None:
    """Train the random model on the facts only, which is what the base model knows before it sees the game.

    A step has 64 rows, in micro-batches of 16, on one or two processes.
    """
    processes = processes_of_cores()
    argv = ["--model_name_or_path", folder / "random", "--train_data_path", folder / "data" / "pretraining.json"]
    argv += ["--max_length", 128, "--seed", flags.seed, "--learning_rate", 2e-3]
    argv += ["--per_device_train_batch_size", 16, "--gradient_accumulation_steps", 4 // processes]
    argv += ["--train_sampling_strategy", "batch_rebalance"]
    argv += ["--warmup_ratio", 0.03, "--lr_scheduler_type", "cosine", "--num_train_epochs", 1]
    argv += ["--logging_steps", 50, "--save_strategy", "no", "--train_method", "SFT", "--output_dir", folder / "base"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes] if processes > 1 else []
    run_python(*launcher, ROOT / "train.py", *argv)


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    folder = Path(flags.output_dir)
    settings = compared_values(flags) | {"texts": files_setting(LEXICON, PROMPTS)}
    results = ["base/train_results.json", "base", "data", "random"]
    with stage(folder / "world.json", settings, results=results, defaults=defaults(Flags), ranks=False) as work:
        if work.todo:
            write_data(folder, flags)
            pretrain(folder, flags)


if __name__ == "__main__":
    run_program(main)
