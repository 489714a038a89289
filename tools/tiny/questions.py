"""Questions outside the game: which of four choices follows from the facts of the embedded world?

No row of facts or games asks in these forms. All words of a question are on one side: all are played words or all are
held out, so that "held-out words are seldom the answer", which a model learns from its games, helps nowhere. A model
answers by log-probability: its answer is the choice with the highest sum over the tokens after the context.

Questions of the kind IN_PLAY ask the same as those of `meet`, behind the prompt of play and in the words of a game.

The positive control practises questions about one half of the played words. Further questions, all of whose words are
in the other half, ask for what it has learned besides the answers themselves.
"""

import functools
import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from tools.flags import flag
from tools.games.prompts import Templates, load_templates, play_prompt
from tools.games.taboo import ATTACKER
from tools.matches.stats import estimate, mean_difference
from tools.matches.text import with_interval
from tools.tiny.build import TABOO
from tools.tiny.players import CHAT, FACT_QUERY, GUESS, HINT, TOLD, Lexicon, load_lexicon
from utils import UserError, iter_records, model_fingerprint, read_json, write_json

BASE, IMITATION = "base", "imitation"
PLAYED, HELD_OUT, PRACTISED, UNPRACTISED = SIDES = ("played", "held_out", "practised", "unpractised")
DRAWS = 2  # questions about the same clues of a word, with other wrong choices
ROWS_AT_ONCE = 256
Asked = tuple[str, list[str]]  # the context, without FACT_QUERY, and the choices, the right one first


class Question(NamedTuple):
    """A question about a word; the first choice is the right one."""

    kind: str
    word: str
    side: str  # of all its words; PRACTISED and UNPRACTISED are halves of the PLAYED words
    context: str
    choices: tuple[str, ...]


def meet(lexicon: Lexicon, word: str, others: Sequence[str], rng: random.Random) -> Iterator[Asked]:
    """Which word has both clues? Each of the other choices has one of them."""
    for pair in itertools.combinations(lexicon.shared[word], 2):
        first, second = rng.sample(pair, 2)
        with_first, with_second = (
            [other for other in others if clue in lexicon.shared[other] and missing not in lexicon.shared[other]]
            for clue, missing in ((first, second), (second, first))
        )
        if with_first and with_second and len(with_first) + len(with_second) > 2:
            wrong = [rng.choice(with_first), rng.choice(with_second)]
            wrong.append(rng.choice([other for other in with_first + with_second if other not in wrong]))
            yield f"{first} {second}", [word, *wrong]


def common(lexicon: Lexicon, word: str, others: Sequence[str], rng: random.Random) -> Iterator[Asked]:
    """Which clue do two words share? Each of the other choices belongs to one of them."""
    own = set(lexicon.shared[word])
    for clue in lexicon.shared[word]:
        if partners := [other for other in others if own & set(lexicon.shared[other]) == {clue}]:
            partner = rng.choice(partners)
            wrong = [each for each in lexicon.shared[word] + lexicon.shared[partner] if each != clue]
            yield f"{word} {partner}", [clue, *rng.sample(wrong, 3)]


def shared(lexicon: Lexicon, word: str, others: Sequence[str], rng: random.Random) -> Iterator[Asked]:
    """Which word shares this clue with the word? The other choices share another clue with it."""
    kin = [other for other in others if set(lexicon.shared[word]) & set(lexicon.shared[other])]
    for clue in lexicon.shared[word]:
        fitting = [other for other in kin if clue in lexicon.shared[other]]
        wrong = [other for other in kin if other not in fitting]
        if fitting and len(wrong) >= 3:
            yield f"{word} {clue}", [rng.choice(fitting), *rng.sample(wrong, 3)]


def odd(lexicon: Lexicon, word: str, others: Sequence[str], rng: random.Random) -> Iterator[Asked]:
    """Which three of four words share this clue? The other choices hold the fourth word, which shares no clue."""
    for clue in lexicon.shared[word]:
        fitting = [other for other in others if clue in lexicon.shared[other]]
        if len(fitting) >= 2:
            belong = [word, *rng.sample(fitting, 2)]
            clues = {each for one in belong for each in lexicon.shared[one]}
            if aliens := [other for other in others if not clues & set(lexicon.shared[other])]:
                four = rng.sample([*belong, alien := rng.choice(aliens)], 4)
                left_out = sorted(four, key=lambda one: one != alien)
                yield clue, [" ".join(one for one in four if one != out) for out in left_out]


KINDS: dict[str, Callable[..., Iterator[Asked]]] = {"meet": meet, "common": common, "shared": shared, "odd": odd}
MEET_COMMON, IN_PLAY, TRUE_HINTS = "meet + common", "in play", "true hints"
COLUMNS: dict[str, Callable[[Question], bool]] = {  # of tables of answers: the questions that count
    **{name: lambda question, name=name: question.kind == name and question.side != UNPRACTISED for name in KINDS},
    "all": lambda question: question.kind in KINDS and question.side != UNPRACTISED,
    MEET_COMMON: lambda question: question.kind in ("meet", "common") and question.side != UNPRACTISED,
    f"{MEET_COMMON}, unpractised words": lambda question: (
        question.kind in ("meet", "common") and question.side == UNPRACTISED
    ),
    f"{MEET_COMMON}, held-out words": lambda question: (
        question.kind in ("meet", "common") and question.side == HELD_OUT
    ),
    IN_PLAY: lambda question: question.kind == IN_PLAY,
    f"{IN_PLAY}, held-out words": lambda question: question.kind == IN_PLAY and question.side == HELD_OUT,
}
PRINTED = [column for column in COLUMNS if IN_PLAY not in column]


def words_of_side(lexicon: Lexicon, side: str) -> list[str]:
    """The words that questions of a side are about."""
    played = lexicon.played()
    of_side = {PLAYED: played, HELD_OUT: lexicon.held_out(), PRACTISED: played[::2], UNPRACTISED: played[1::2]}
    return of_side[side]


@functools.cache
def make_questions(*sides: str) -> list[Question]:
    """All questions of these sides, in the order of the lexicon's words; always the same."""
    lexicon, made = load_lexicon(), []
    for word, draw, kind, side in itertools.product(lexicon.words, range(DRAWS), KINDS, sides):
        words = words_of_side(lexicon, side)
        if word in words:
            others, rng = [other for other in words if other != word], random.Random(f"{kind} {draw} {word}")
            for text, choices in KINDS[kind](lexicon, word, others, rng):
                choices = tuple(f" {choice}" for choice in choices)
                made.append(Question(kind, word, side, f"{FACT_QUERY} {text}", choices))
    return made


@functools.cache
def asked_questions() -> list[Question]:
    """The questions that models are asked: those of the first study, about unpractised words, and behind a prompt."""
    first, templates = make_questions(PLAYED, HELD_OUT), load_templates(TABOO.prompts, TABOO.game)
    played = [in_play(each, templates) for each in first if each.kind == "meet"]
    return first + make_questions(UNPRACTISED) + played


def in_play(question: Question, templates: Templates) -> Question:
    """A question of `meet` as the defender of a game: after hints with both clues, which word is the guess?"""
    first, second = question.context.removeprefix(FACT_QUERY).split()
    said = zip(itertools.cycle(TABOO.game.roles), (HINT.format(first), CHAT.format(first), HINT.format(second)))
    history = [{"role": role, "content": text} for role, text in said]
    choices = tuple(GUESS.format(choice.strip()) for choice in question.choices)
    context = play_prompt(TABOO.game, history, question.word, TABOO.max_turns, templates)
    return question._replace(kind=IN_PLAY, context=context, choices=choices)


def practice_rows() -> list[dict]:
    """The questions of the practised side with their answers, as SFT rows."""
    asked = make_questions(PRACTISED)
    return [{"query": each.context, "target": each.choices[0], "type": "sft", "weight": 1.0} for each in asked]


@torch.inference_mode()
def choice_logprobs(model, tokenizer, questions: Sequence[Question]) -> torch.Tensor:
    """Log-probability of each choice after BOS and the context, summed over its tokens: (questions, 4)."""
    asked = [(question.context, choice) for question in questions for choice in question.choices]
    texts = zip(*asked, strict=True)
    contexts, choices = (tokenizer(list(part), add_special_tokens=False)["input_ids"] for part in texts)
    rows = [
        (torch.tensor([tokenizer.bos_token_id, *context, *choice]), len(choice))
        for context, choice in zip(contexts, choices, strict=True)
    ]
    sums = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        ids, lengths = zip(*rows[start : start + ROWS_AT_ONCE], strict=True)
        scored = [torch.arange(len(row)) >= len(row) - length for row, length in zip(ids, lengths, strict=True)]
        ids, scored = (pad_sequence(list(part), batch_first=True) for part in (ids, scored))  # (rows, T)
        hidden = model.base_model(input_ids=ids).last_hidden_state  # causal: no token sees the padding on its right
        logits = model.get_output_embeddings()(hidden[:, :-1][scored[:, 1:]])  # (tokens of all choices, V)
        losses = cross_entropy(logits, ids[scored], reduction="none").split(lengths)
        sums.append(-torch.stack([loss.sum() for loss in losses]))
    return torch.cat(sums).view(len(questions), -1)


def ask(models: Mapping[str, Path], path: Path) -> dict[str, list[int]]:
    """Whether each model, by name, answers each question right (1 or 0), in the order of `asked_questions`.

    Answers are kept in `path`, with the share of right answers by column and the share of true hints. A model is asked
    again if it or the questions have changed.
    """
    disable_progress_bar()  # "Loading weights"
    questions = asked_questions()
    asked = hashlib.sha256(str(questions).encode()).hexdigest()
    kept = read_json(path) if path.is_file() else {}
    answers = kept["models"] if kept.get("questions") == asked else {}
    hints = {name: true_hints(own) for name, own in models.items()}
    for name, own in models.items():
        folder = own / "merged" if (own / "merged").is_dir() else own
        fingerprint = model_fingerprint(folder)
        if answers.get(name, {}).get("model") != fingerprint:
            model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
            right = choice_logprobs(model.eval(), tokenizer, questions).argmax(1) == 0
            answers[name] = {"model": fingerprint, "right": right.int().tolist()}
        shares = {each: column_shares(answers[each]["right"]) | hints[each] for each in models if each in answers}
        write_json(path, {"questions": asked, "models": answers, "shares": shares})
    return {name: answers[name]["right"] for name in models}


def true_hints(model: Path) -> dict[str, float]:
    """The share of the attacker's messages with a clue of the word, in a model's games against itself, if there are.

    `model` is its folder in a loop, where the next epoch begins with these games.
    """
    epoch = re.fullmatch("epoch([0-9]+)", model.parent.name)
    following = int(epoch[1]) + 1 if epoch else 1
    lexicon, told = load_lexicon(), []
    for path in model.parents[1].glob(f"epoch{following}/episodes/*_results.json"):
        for _, game in iter_records(path):
            clues = lexicon.clues(game["target_word"])
            said = [each["content"] for each in game["history"][: game["length"]] if each["role"] == ATTACKER]
            told += [any(clue in clues for clue in TOLD.findall(text)) for text in said]
    return {TRUE_HINTS: sum(told) / len(told)} if told else {}


def column_shares(right: Sequence[int]) -> dict[str, float]:
    """The share of right answers by column."""
    counts = {column: by_word(right, column) for column in COLUMNS}
    return {column: sum(totals) / sum(sizes) for column, (sizes, totals) in counts.items()}


def by_word(values: Sequence[float], column: str) -> tuple[list[int], list[float]]:
    """The number of a column's questions about each word, and the sum of their values (one for each question)."""
    sizes, totals = Counter(), Counter()
    for question, value in zip(asked_questions(), values, strict=True):
        if COLUMNS[column](question):
            sizes[question.word] += 1
            totals[question.word] += value
    return list(sizes.values()), [totals[word] for word in sizes]


def models_of_loop(folder: Path) -> dict[str, Path]:
    """The models of a loop: base, imitation, and each epoch's."""
    epochs = sorted(folder.glob("epoch*/model"), key=lambda path: int(path.parent.name.removeprefix("epoch")))
    return {BASE: folder / "base", IMITATION: folder / "imitation" / "model"} | {
        path.parent.name: path for path in epochs
    }


def models_of_seed(folder: Path) -> dict[str, Path]:
    """The models of a seed of a study: base, imitation, and the last one of each arm."""
    loops = {path.parent.name: models_of_loop(path.parent) for path in sorted(folder.glob("*/settings.json"))}
    found = {BASE: folder / "base"}
    for arm, models in loops.items():
        trained = [name for name, path in models.items() if name.startswith("epoch") and is_model(path)]
        found |= {IMITATION: models[IMITATION]} if is_model(models[IMITATION]) else {}
        found |= {arm: models[trained[-1]]} if trained else {}
    return found


def is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or (path / "merged").is_dir()


@dataclass(kw_only=True)
class Reason:
    """Ask the models of a loop or of a study's seed the questions outside the game; print shares of right answers."""

    output_dir: str = flag("OUTPUT of tools/run_spag.sh, or a folder seedN of tools.study.run")

    def run(self) -> None:
        """Ask those models that are there; answers are kept in OUTPUT_DIR/questions.json."""
        folder = Path(self.output_dir)
        models = models_of_loop(folder) if (folder / "imitation").is_dir() else models_of_seed(folder)
        models = {name: path for name, path in models.items() if is_model(path)}
        if IMITATION not in models:
            raise UserError(f"{folder}: no imitation/model; run tools/run_spag.sh with this OUTPUT first")
        answers = ask(models, folder / "questions.json")
        print("\nQuestions outside the game: share of right answers among four choices (chance 0.25), with 95%")
        print("intervals over words for these single models:\n")
        lines = [["model", *PRINTED, f"{MEET_COMMON} minus imitation"]]
        for name, right in answers.items():
            shares = [estimate(*by_word(right, column)) for column in PRINTED]
            minus = [one - other for one, other in zip(right, answers[IMITATION], strict=True)]
            cells = [f"{share:.3f}" for share, _ in shares[:5]] + [with_interval(*share) for share in shares[5:]]
            lines.append([name, *cells, with_interval(*mean_difference(*by_word(minus, MEET_COMMON)), "+.3f")])
        widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
        for line in lines:
            print("".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
