"""Randomly initialized Llamas and their tokenizers, for the toy world and the tests."""

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}  # ids 0 to 3
SHAPE = {  # of the toy world's models
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "max_position_embeddings": 256,
}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `texts`, with `vocab_size` tokens but at least the 256 bytes and SPECIAL_TOKENS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def random_llama(vocab_size: int, seed: int, *, dtype: torch.dtype = torch.float32, **config) -> LlamaForCausalLM:
    """A Llama with random weights drawn from `seed`; `config` has further fields of LlamaConfig."""
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab_size, **special | config), dtype=dtype)
