"""Ask models of the embedded world questions outside the game: which of four choices follows from the facts?

    python -m tools.lab.world.questions --models base=outputs/quickstart/base epoch3=outputs/quickstart/epoch3/model \\
        --output_dir outputs/quickstart

No row of facts or games asks in these forms. All words of a question are played words, or all are held out: models
learn from their games that held-out words are seldom the answer, which must not help. Shares of right answers are
written to OUTPUT_DIR/questions.json.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
import torch

from dataloaders import SPAGCollator, encode_example
from tools.flags import NAMED_MODELS, NamedPath, flag, parse_flags
from tools.lab.world.players import FACT_QUERY, Lexicon, load_lexicon
from tools.measure.estimates import estimate, markdown, with_interval
from trainers import label_logprob, num_scored
from utils import load_model, load_tokenizer, run_program, write_json

PLAYED, HELD_OUT = "played", "held_out"
DRAWS = 2  # questions about the same clues of a word, with other wrong choices
AT_ONCE = 64  # questions


class Question(NamedTuple):
    """A question about a word; the first choice is the right one."""

    kind: str
    word: str
    side: str  # of all its words
    context: str
    choices: tuple[str, ...]


@dataclass(kw_only=True)
class Flags:
    models: list[NamedPath] = flag("models to ask", **NAMED_MODELS)
    output_dir: str = flag("folder of the result")


def meet(lexicon: Lexicon, word: str, others: Sequence[str], rng: random.Random) -> Iterator[tuple[str, list[str]]]:
    """Which word has both clues? Each of the other choices has one of them."""
    for pair in itertools.combinations(lexicon.shared[word], 2):
        first, second = rng.sample(pair, 2)
        with_first, with_second = (
            [other for other in others if clue in lexicon.shared[other] and lacking not in lexicon.shared[other]]
            for clue, lacking in ((first, second), (second, first))
        )
        if with_first and with_second and len(with_first) + len(with_second) > 2:
            wrong = [rng.choice(with_first), rng.choice(with_second)]
            wrong.append(rng.choice([other for other in with_first + with_second if other not in wrong]))
            yield f"{first} {second}", [word, *wrong]


def common(lexicon: Lexicon, word: str, others: Sequence[str], rng: random.Random) -> Iterator[tuple[str, list[str]]]:
    """Which clue do two words share? Each of the other choices belongs to one of them."""
    clues = set(lexicon.shared[word])
    for clue in lexicon.shared[word]:
        if partners := [other for other in others if clues & set(lexicon.shared[other]) == {clue}]:
            partner = rng.choice(partners)
            wrong = [other for other in lexicon.shared[word] + lexicon.shared[partner] if other != clue]
            yield f"{word} {partner}", [clue, *rng.sample(wrong, 3)]


def make_questions(lexicon: Lexicon) -> list[Question]:
    """All questions, in the order of the lexicon's words; always the same."""
    questions = []
    for side, words in ((PLAYED, lexicon.played()), (HELD_OUT, lexicon.held_out())):
        for word, draw, kind in itertools.product(words, range(DRAWS), (meet, common)):
            others = [other for other in words if other != word]
            rng = random.Random(f"{kind.__name__} {draw} {word}")
            for text, choices in kind(lexicon, word, others, rng):
                texts = tuple(f" {choice}" for choice in choices)
                questions.append(Question(kind.__name__, word, side, f"{FACT_QUERY} {text}", texts))
    return questions


@torch.inference_mode()
def choice_logprobs(model, tokenizer, questions: Sequence[Question]) -> torch.Tensor:
    """Log-probability of each choice after BOS and the context, summed over its tokens: (questions, 4)."""
    pairs = ((question.context, choice) for question in questions for choice in question.choices)
    rows = [encode_example({"query": context, "target": choice}, tokenizer) for context, choice in pairs]
    for row in rows:  # without EOS: more may follow a choice
        row["input_ids"].pop()
        row["labels"].pop()
    batch = SPAGCollator(tokenizer)(rows)
    sums = label_logprob(model, model, batch) * num_scored(batch)
    return sums.view(len(questions), -1)


def ask(folder: str, questions: Sequence[Question]) -> list[bool]:
    """Whether the right choice, the first one, has a higher log-probability than all others, for each question."""
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    batches = [questions[start : start + AT_ONCE] for start in range(0, len(questions), AT_ONCE)]
    logprobs = torch.cat([choice_logprobs(model, tokenizer, batch) for batch in batches])
    return (logprobs[:, 0] > logprobs[:, 1:].amax(1)).tolist()


def shares(questions: Sequence[Question], right: Sequence[bool]) -> dict[str, tuple[float, list[float]]]:
    """The share of right answers by column of the table, with its 95% interval over words."""
    frame = pd.DataFrame(questions).assign(right=right)
    columns = {
        "meet": frame[frame.kind == "meet"],
        "common": frame[frame.kind == "common"],
        "meet + common": frame,
        "meet + common, held-out words": frame[frame.side == HELD_OUT],
    }
    by_word = {name: lines.groupby("word").right.agg(["size", "sum"]) for name, lines in columns.items()}
    return {name: estimate(*words.to_numpy().T) for name, words in by_word.items()}


def main() -> None:
    flags, questions = parse_flags(Flags, description=__doc__), make_questions(load_lexicon())
    by_model = {name: shares(questions, ask(path, questions)) for name, path in flags.models}
    means = {name: {column: mean for column, (mean, _) in row.items()} for name, row in by_model.items()}
    write_json(f"{flags.output_dir}/questions.json", {"shares": means})
    lines = [[name, *(with_interval(*share) for share in row.values())] for name, row in by_model.items()]
    print(markdown([["right of four choices", *next(iter(by_model.values()))], *lines]))


if __name__ == "__main__":
    run_program(main)
