"""Two tiny models that know only which byte follows which, and invented questions in the eight benchmarks' columns.

A model's log-probability of a text is a sum over a table, which scores the benchmarks without the harness.
"""

import itertools
from pathlib import Path

import datasets
import torch
from conftest import build_llama, build_tokenizer
from transformers import AutoModelForCausalLM

TOKENIZER = build_tokenizer()
# What each model says after a colon or a question mark, and the letter that it prefers among A to D.
HABITS = {"yes": (": yes\n\n", "A"), "no": (": no\n\n", "D")}
ROWS = [(["yes", "no", "never", "often"], 0), (["no", "sure", "yes", "late"], 2), (["yes", "soon", "far", "no"], 3)]
RIGHT_OF_TWO = (0, 1, 0)  # of `yes` and `no`


def write_model(folder: Path, habit: str) -> Path:
    """Save a Llama without attention and MLP: the logits are a row of its output matrix."""
    size = len(TOKENIZER)
    shape = {"hidden_size": size, "num_hidden_layers": 1, "intermediate_size": 8, "tie_word_embeddings": False}
    model = build_llama(len(habit), size, max_position_embeddings=8192, **shape)
    text, letter = HABITS[habit]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for byte, follower in itertools.pairwise(tokens(text)):
            model.lm_head.weight[follower, byte] += 1.0
        model.lm_head.weight[tokens(letter), tokens(" ")] += 0.5
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


def write_data(folder: Path) -> dict[str, list]:
    """Write a folder for each data set, named like the hub's, with its columns; return the right answers by task."""
    letters = ["A", "B", "C", "D"]
    of_four = [right for _, right in ROWS]
    four = [{"question": "Well?", "choices": choices, "answer": right} for choices, right in ROWS]
    logiqa = [{"text": "It is so.", "question": "Well?", "options": c, "answer": right} for c, right in ROWS]
    mutual = [{"article": "m : well ?", "options": c, "answers": letters[right]} for c, right in ROWS]
    arc = [{"question": "Well?", "choices": {"text": c, "label": letters}, "answerKey": letters[r]} for c, r in ROWS]
    two = [{"goal": "Say it.", "sol1": "yes", "sol2": "no", "label": right} for right in RIGHT_OF_TWO]
    names = {"option1": "yes", "option2": "no"}
    gaps = [{"sentence": "They say _ to it.", **names, "answer": str(1 + right)} for right in RIGHT_OF_TWO]
    bbh = [{"input": f"Is {n} odd?", "target": ("yes", "no")[right]} for n, right in enumerate(RIGHT_OF_TWO)]
    for name, config, splits, rows in (
        ("cais/mmlu", "anatomy", ("dev", "test"), four * 2),
        ("cais/mmlu", "virology", ("dev", "test"), four * 2),
        ("SaylorTwift/bbh", "navigate", ("test",), bbh),
        ("SaylorTwift/bbh", "web_of_lies", ("test",), bbh),
        ("lighteval/mutual_harness", "mutual", ("train", "validation"), mutual),
        ("allenai/ai2_arc", "ARC-Easy", ("train", "validation", "test"), arc),
        ("allenai/ai2_arc", "ARC-Challenge", ("train", "validation", "test"), arc),
        ("baber/logiqa2", "logiqa2", ("train", "validation", "test"), logiqa),
        ("allenai/winogrande", "winogrande_xl", ("train", "validation"), gaps),
        ("baber/piqa", "default", ("train", "validation"), two),
    ):
        files = {split: f"{config}/{split}-00000-of-00001.parquet" for split in splits}
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file in files.values():
            datasets.Dataset.from_list(rows).to_parquet(folder / name / file)
        with open(readme := folder / name / "README.md", "a") as file:
            file.write("" if readme.stat().st_size else "---\nconfigs:\n")
            file.write(f"- config_name: {config}\n  data_files:\n")
            file.writelines(f"  - {{split: {split}, path: {path}}}\n" for split, path in files.items())
    for readme in folder.rglob("README.md"):
        readme.write_text(readme.read_text() + "---\n")
    of_two, texts = list(RIGHT_OF_TWO), [row["target"] for row in bbh]
    of_tasks = dict.fromkeys(("arc_easy", "arc_challenge", "mutual", "logiqa2"), of_four)
    of_tasks |= dict.fromkeys(("mmlu_anatomy", "mmlu_virology"), of_four * 2)
    of_tasks |= dict.fromkeys(("winogrande", "piqa"), of_two)
    return of_tasks | dict.fromkeys(("bbh_fewshot_navigate", "bbh_fewshot_web_of_lies"), texts)


def is_right(model: Path, question: dict, right: int | str) -> bool:
    """Score a kept question of the harness without the harness."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.arange(len(TOKENIZER))[:, None]).logits
    table = logits[:, 0].log_softmax(-1)  # (bytes, followers): log p(follower | byte)
    if isinstance(right, str):
        said = tokens(question["prompts"][0])[-1:]
        while TOKENIZER.decode(said[-2:]) != "\n\n":
            said.append(int(table[said[-1]].argmax()))
        return TOKENIZER.decode(said[1:]).strip() == right
    prompts, choices = question["prompts"], question["choices"]
    scores = []
    for prompt, choice in itertools.product(prompts, dict.fromkeys(choices)):
        text = tokens(prompt)[-1:] + tokens(choice)
        scores.append(sum(float(table[byte, follower]) for byte, follower in itertools.pairwise(text)))
    return scores.index(max(scores)) == right
