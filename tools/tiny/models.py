"""Random Llamas and their tokenizers, for the embedded world, the benchmarks and the tests."""

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}  # ids 0 to 3


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of text: 256 bytes and the special tokens."""
    tokens = [*SPECIAL_TOKENS.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens, trained on these texts."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def random_llama(
    vocab_size: int,
    seed: int,
    *,
    hidden_size: int,
    layers: int,
    heads: int,
    intermediate_size: int,
    dtype: torch.dtype = torch.float32,
    **config,
) -> LlamaForCausalLM:
    """A Llama with random weights, the same for the same seed; `config` are further fields of LlamaConfig."""
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate_size,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(**(settings | config)), dtype=dtype)
