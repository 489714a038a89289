"""GRPO by TRL on a game: the example trains a tiny model for two steps."""

import re

import pytest
import torch
from conftest import build_llama, load_chat_template
from helpers import Fork, finish, flags_of

from tools.engine.random_model import train_tokenizer
from tools.games import load_game
from tools.games.prompts import default_templates


@pytest.fixture
def chat_model(tmp_path):
    tokenizer = train_tokenizer(default_templates(load_game("taboo"))["rules"], 600)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = load_chat_template("chatml")
    tokenizer.save_pretrained(tmp_path / "model")
    build_llama(0, len(tokenizer)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("role", ["attacker", "defender"])
def test_two_steps_of_grpo(role, chat_model, tmp_path):
    pytest.importorskip("trl", reason="pip install -r tests/requirements.txt")
    (tmp_path / "words.txt").write_text("winter\nmusic\n", encoding="utf-8")  # the opponent says both now and then
    flags = {"model_name_or_path": chat_model, "role": role, "words": tmp_path / "words.txt", "max_steps": 2}
    flags |= {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 8, "logging_steps": 1}
    flags |= {"bf16": torch.cuda.is_available(), "report_to": "none", "output_dir": tmp_path / "out", "seed": 2}
    printed = finish(Fork(["-m", "tools.examples.trl_grpo", *flags_of(flags)]))
    steps = [
        {name: float(re.search(rf"'{name}': '([^']*)'", line)[1]) for name in ("grad_norm", "reward_std")}
        for line in printed.splitlines()
        if "'grad_norm'" in line
    ]
    assert len(steps) == 2 and all(step["grad_norm"] > 0 or step["reward_std"] == 0 for step in steps)
    assert any(step["reward_std"] > 0 for step in steps)
