"""GRPO with TRL: the model plays one role of Taboo against a fixed opponent, and the game's points are its reward.

    python -m tools.examples.trl_grpo --model_name_or_path MODEL --role defender --opponent openai:NAME \
        --max_steps 100 --per_device_train_batch_size 8 --num_generations 8 --max_completion_length 64

MODEL needs a chat template. Flags are those of Settings, GRPOConfig and ModelConfig (`--use_peft True` for LoRA); on a
CPU add `--bf16 False`. `--max_completion_length` limits one message, and `--use_vllm` has no effect.
"""

import random
from dataclasses import dataclass
from functools import partial

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config
from trl.models import unwrap_model_for_generation

from tools import spag
from tools.common.files import read_words
from tools.games import load_game

GAME = load_game("taboo")
SENTENCES = ["What did you do today?", "Tell me more.", "I know the word! It is `music`!", "I like the winter."]


@dataclass
class Settings:
    role: str = "attacker"  # of the trained model
    opponent: str = ""  # a model folder or openai:MODEL; empty: random sentences
    words: str = "data/target_words.txt"
    turns: int = 3


@torch.no_grad()
def generate(model, trainer: GRPOTrainer, prompts: list[list[int]]) -> list[list[int]]:
    """A reply to each prompt, sampled with GRPOConfig's settings, up to its end token."""
    tokenizer = trainer.processing_class
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    output = model.generate(**inputs, generation_config=trainer.generation_config)
    replies = output[:, inputs["input_ids"].shape[1] :].tolist()
    ends = [[place for place, token in enumerate(reply, 1) if token in trainer.eos_token_ids] for reply in replies]
    return [reply[: end[0]] if end else reply for reply, end in zip(replies, ends, strict=True)]


def rollout(words: list[str], trainer: GRPOTrainer, settings: Settings) -> dict:
    """Play one game per word; TRL repeats each word `num_generations` times."""
    tokenizer, side = trainer.processing_class, GAME.roles.index(settings.role)
    transcripts = [spag.Transcript(tokenizer, enable_thinking=False) for _ in words]

    def messages(turns) -> list[str]:
        replies = generate(model, trainer, [transcripts[turn.index].read(turn.chat()) for turn in turns])
        for turn, reply in zip(turns, replies, strict=True):
            transcripts[turn.index].write(reply)
        return tokenizer.batch_decode(replies, skip_special_tokens=True)

    players = [settings.opponent or (lambda turn: random.choice(SENTENCES))]
    players.insert(side, spag.batched(messages))
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        games = spag.play(words, *players, max_turns=settings.turns, special=spag.special_texts(tokenizer))
    points = {each["index"]: GAME.points(each["target_word"], each["history"], each["outcome"]) for each in games}
    ended = [tokenizer.eos_token_id]  # the opponent ended the game before the model's first turn
    return {
        "prompt_ids": [each.prompt_ids or ended for each in transcripts],
        "completion_ids": [each.completion_ids or ended for each in transcripts],
        "env_mask": [each.mask or [0] for each in transcripts],  # 1: the model's own tokens
        "logprobs": None,
        "points": [points.get(index, (None, None))[side] for index in range(len(words))],
    }


def reward(points, **_):  # None for games that a server failed to answer
    return points


if __name__ == "__main__":
    settings, config, model = TrlParser((Settings, GRPOConfig, ModelConfig)).parse_args_and_config()
    how = {"rollout_func": partial(rollout, settings=settings), "peft_config": get_peft_config(model)}
    words = Dataset.from_dict({"prompt": read_words(settings.words)})
    GRPOTrainer(model.model_name_or_path, reward, config, words, **how).train()
