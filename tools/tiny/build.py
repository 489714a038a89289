"""The world itself: facts, scripted games and their rows, a tokenizer and a small Llama trained on the facts."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from tools.flags import flag
from tools.games.game import DEFAULT_GAME, EPISODE_KEYS, Game
from tools.games.guess_my_city import GuessMyCity
from tools.games.prompts import load_templates, play_prompt
from tools.games.taboo import Taboo
from tools.games.twenty_questions import TwentyQuestions
from tools.selfplay.files import Episode
from tools.selfplay.play import play_games
from tools.selfplay.rewards import ALL
from tools.selfplay.row_flags import PLAY, RowFlags
from tools.selfplay.rows import make_rows
from tools.tiny import players
from tools.tiny.models import SHAPE, random_llama, train_tokenizer
from tools.tiny.players import LEXICON, ROOT, Lexicon, Skill, fact_rows, load_lexicon
from utils import UserError, files_setting, read_json, read_json_or_jsonl, read_words, stage, write_records

TINY = LEXICON.parent


class Scripted(NamedTuple):
    """A game as it is played in this world."""

    game: Game
    prompts: Path
    max_turns: int
    players: tuple[type, type]
    task: Callable[[Lexicon, str], str] = lambda lexicon, word: word


GAMES = {
    "taboo": Scripted(Taboo(), TINY / "prompts.json", 3, (players.LexiconAttacker, players.LexiconDefender)),
    "twenty_questions": Scripted(
        TwentyQuestions(), TINY / "twenty_questions.json", 4, (players.LexiconGuesser, players.LexiconAnswerer)
    ),
    "guess_my_city": Scripted(
        GuessMyCity(), TINY / "guess_my_city.json", 3, (players.CityGuesser, players.CityAnswerer), players.city_task
    ),
}
TABOO = GAMES[DEFAULT_GAME]
IMITATED = Skill()
ORACLE = Skill(breach=0, stray=0, forget=0, slip=0, guess=(1, 0), last_guess=(1, 0))  # hints and guesses are right
ORACLE_EPOCHS, ORACLE_ROUNDS = 3, 12  # with as many games a word as configs/tiny.sh plays
PRACTICE_PASSES = 2  # over the questions in practice.json, whose rows then are about as many as those of an epoch


@dataclass(kw_only=True)
class Build:
    """Make the data and the base model that tools/run_spag.sh starts from."""

    output_dir: str = flag("folder to write to")
    seed: int = flag("of everything that is drawn", default=0)
    pretraining_facts: int = flag("fact rows the base model is trained on", default=30000)
    imitation_facts: int = flag("fact rows mixed into imitation", default=4000)
    facts: int = flag("fact rows mixed into each epoch of self-play", default=1000)
    imitation_rounds: int = flag("scripted games for each word", default=30)
    games: list[str] = flag("whose scripted games are imitated", default=[DEFAULT_GAME], choices=tuple(GAMES))

    def __post_init__(self):
        if DEFAULT_GAME not in self.games:
            raise UserError(f"--games {' '.join(self.games)}: {DEFAULT_GAME} must be one of them")

    def run(self) -> None:
        """Make all that is missing."""
        folder = Path(self.output_dir)
        data, base = folder / "data", folder / "base" / "train_results.json"
        settings = asdict(self) | {"texts": files_setting(LEXICON, *(GAMES[game].prompts for game in self.games))}
        del settings["output_dir"]
        with stage(folder / "world.json", settings, results=["base/train_results.json", "data", "random"]) as todo:
            if todo:
                write_data(folder, self)
                pretrain(folder, self)
        words, held_out = (len(read_words(data / name)) for name in ("words.txt", "held_out.txt"))
        rows, loss = len(read_json_or_jsonl(data / "imitation.json")), read_json(base)["train_loss"]
        print(
            f"{folder}: {words} words and {held_out} held out, {rows:,} rows to imitate, base model trained on "
            f"{self.pretraining_facts:,} facts to a mean loss of {loss:.3f}"
        )


def scripted_games(
    scripted: Scripted,
    lexicon: Lexicon,
    *,
    rounds: int,
    rng: random.Random,
    words: Sequence[str] | None = None,
    skill: Skill = IMITATED,
) -> list[Episode]:
    """Complete games of a game's scripted players, so many for each word; without `words` for all of the lexicon."""
    episodes: list[Episode] = []
    playing = [player(lexicon, skill, rng) for player in scripted.players]
    games = play_games(
        scripted.game,
        enumerate([scripted.task(lexicon, word) for word in words or lexicon.words] * rounds),
        dict(zip(scripted.game.roles, playing, strict=True)),
        max_turns=scripted.max_turns,
        templates=load_templates(scripted.prompts, scripted.game),
        concurrent_games=1,
        on_episode=episodes.append,
    )
    asyncio.run(games)
    return episodes


def corpus(rows: Iterable[dict], episodes: Mapping[str, Iterable[Episode]]) -> Iterator[str]:
    """All texts of the world, for its tokenizer."""
    for row in rows:
        yield row["query"] + row["target"]
    for name, played in episodes.items():
        game, templates = GAMES[name].game, load_templates(GAMES[name].prompts, GAMES[name].game)
        for episode in played:
            history, task, max_turns = (episode[key] for key in EPISODE_KEYS)
            for end in range(len(history) + 1):
                yield play_prompt(game, history[:end], task, max_turns, templates)


def write_data(folder: Path, world: Build) -> None:
    """Facts, word lists, imitation games with their rows, tokenizer and random model."""
    from tools.tiny.questions import practice_rows  # which needs transformers, as all of the rest

    lexicon, rng = load_lexicon(), random.Random(world.seed)
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    for name in world.games:
        for part, words in (("words", lexicon.played()), ("held_out", lexicon.held_out())):
            tasks = "".join(f"{GAMES[name].task(lexicon, word)}\n" for word in words)
            (data / f"{part}{suffix(name)}.txt").write_text(tasks, encoding="utf-8")
    pretraining = list(fact_rows(lexicon, rng, world.pretraining_facts))
    write_records(data / "pretraining.json", pretraining)
    facts = list(fact_rows(lexicon, rng, world.facts))
    write_records(data / "facts.json", facts)
    write_records(data / "practice.json", facts + practice_rows() * PRACTICE_PASSES)
    write_records(data / "imitation_facts.json", fact_rows(lexicon, rng, world.imitation_facts))
    episodes = {
        name: scripted_games(GAMES[name], lexicon, rounds=world.imitation_rounds, rng=rng) for name in world.games
    }
    oracle = random.Random(f"oracle {world.seed}")
    for epoch in range(1, ORACLE_EPOCHS + 1):
        played = scripted_games(TABOO, lexicon, rounds=ORACLE_ROUNDS, rng=oracle, words=lexicon.played(), skill=ORACLE)
        write_records(data / f"oracle_games{epoch}.json", played)
    tokenizer = train_tokenizer(corpus(pretraining, episodes), vocab_size=3072)
    model = random_llama(len(tokenizer), world.seed, **SHAPE, tie_word_embeddings=True)
    for part in (tokenizer, model):
        part.save_pretrained(folder / "random")
    for name in sorted(world.games, key=lambda name: name == DEFAULT_GAME):
        games, prompts = data / f"imitation_games{suffix(name)}.json", str(GAMES[name].prompts)
        write_records(games, episodes[name])
        flags = RowFlags(game=name, messages=ALL, training_prompt=PLAY, prompt_templates=prompts)
        facts = str(data / "imitation_facts.json") if name == DEFAULT_GAME else None
        make_rows(flags, [str(games)], str(data / f"imitation{suffix(name)}.json"), sft=facts)


def suffix(game: str) -> str:
    """What the names of a game's files end in."""
    return "" if game == DEFAULT_GAME else f"_{game}"


def pretrain(folder: Path, world: Build) -> None:
    """Train the random model on the facts alone: what it brings to the game, as a base model does."""
    command = [
        *(sys.executable, ROOT / "train.py", "--train_method", "SFT", "--output_dir", folder / "base"),
        *("--model_name_or_path", folder / "random", "--train_data_path", folder / "data" / "pretraining.json"),
        *("--max_length", 128, "--seed", world.seed, "--per_device_train_batch_size", 64, "--learning_rate", 2e-3),
        *("--warmup_ratio", 0.03, "--lr_scheduler_type", "cosine", "--num_train_epochs", 1),
        *("--logging_steps", 50, "--save_strategy", "no"),
    ]
    subprocess.run(list(map(str, command)), check=True)
