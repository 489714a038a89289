"""Language models in this process: loading them, text to token ids and back.

Weights are read from .safetensors files only. Code in a model folder runs only with --trust_remote_code True.
"""

import contextlib
import logging
import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from tools.games.chat import ChatTemplate
from tools.players.player import LENGTH, STOP, Reply, Sampling, Turn
from utils import UserError, split_revision, warn_on_rank_0

logger = logging.getLogger(__name__)


class ModelTokens:
    """A model's tokenizer, which turns prompts into token ids and token ids into replies."""

    def __init__(self, tokenizer, sampling: Sampling, generation: GenerationConfig | None = None):
        self.tokenizer, self.sampling = tokenizer, sampling
        own = generation.eos_token_id if generation else None
        ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
        self.stop_ids: list[int] = sorted(ends - {None})  # each ends a reply
        self.bos_id: int | None = tokenizer.bos_token_id
        self.chat: ChatTemplate | None = None

    def use_chat_template(self, name: str) -> None:
        """From now on, write prompts with the tokenizer's chat template, which adds BOS itself."""
        self.chat, self.bos_id = ChatTemplate(self.tokenizer, name), None
        self.stop_ids = sorted({*self.stop_ids, self.chat.end_id})

    def encode_turn(self, turn: Turn) -> tuple[list[int], bool]:
        """The token ids of this turn's prompt, and whether it was cut."""
        return self.encode(turn.prompt(self.chat))

    def encode(self, prompt: str) -> tuple[list[int], bool]:
        """BOS and the token ids of a prompt, and whether it was cut: a prompt that is too long loses its beginning."""
        ids = [] if self.bos_id is None else [self.bos_id]
        ids += self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        limit = self.sampling.max_length - self.sampling.max_new_tokens
        return ids[-limit:], len(ids) > limit

    def decode(self, ids: list[int], prompt_cut: bool) -> Reply:
        """The reply that these token ids stand for, up to the first end token."""
        end = next((at for at, token in enumerate(ids) if token in self.stop_ids), None)
        tokens = len(ids) if end is None else end + 1
        text = self.tokenizer.decode(ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        again = self.tokenizer(text.strip(), add_special_tokens=False, verbose=False)["input_ids"]
        retokenized = True if again != ids[:end] else None
        reason = LENGTH if end is None else STOP
        return Reply(text, reason, tokens, prompt_cut, token_ids=ids[:end], retokenized=retokenized)


class LocalModel(ModelTokens):
    """A causal language model, its tokenizer, and the sampling settings of its replies."""

    def __init__(self, model, tokenizer, sampling: Sampling):
        super().__init__(tokenizer, sampling, model.generation_config)
        self.model = model
        self.attention: str = model.config._attn_implementation  # the slot engine replaces it in the model
        self.cache_tokens: int | None = None  # tokens whose keys and values fit in memory; None: any number
        # `generate` would take settings that we leave unset, such as a repetition penalty, from the model folder.
        model.generation_config = GenerationConfig()


# Loading.


def load_local_model(
    folder: Path,
    sampling: Sampling,
    *,
    dtype: torch.dtype | str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> LocalModel:
    """Load a model folder onto the device of this process, or as transformers' `device_map` says.

    `dtype` None: the one in the model's config. Raises UserError for a model that cannot be loaded or does not fit.
    """
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread; a new thread begins with the first GPU
    disable_progress_bar()  # "Loading weights"
    tokenizer = _load_tokenizer(folder, trust_remote_code)
    model = _load_weights(
        folder, dtype=dtype or "auto", device_map=device_map or {"": device}, trust_remote_code=trust_remote_code
    )
    logger.info("%s: %s on %s", folder, model.dtype, device_map or device)
    local = LocalModel(model.eval(), tokenizer, sampling)
    if not local.stop_ids:
        warn_on_rank_0("%s: no EOS token, so every reply has --max_new_tokens tokens", folder)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions and sampling.max_length > positions:
        warn_on_rank_0("%s: made for %d positions, but --max_length is %d", folder, positions, sampling.max_length)
    return local


def load_tokens(name: str, sampling: Sampling, *, trust_remote_code: bool = False) -> ModelTokens:
    """The tokenizer of a model that runs in another process. Raises UserError if it cannot be loaded."""
    name, revision = split_revision(name)
    how = {"revision": revision or "main"}
    tokenizer = _load_tokenizer(name, trust_remote_code, **how)
    generation = None  # the folder may hold nothing but a tokenizer
    try:
        generation = GenerationConfig.from_pretrained(name, **how)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **how)
            generation = GenerationConfig.from_model_config(config)
    return ModelTokens(tokenizer, sampling, generation)


def _load_tokenizer(name: str | Path, trust_remote_code: bool, **how):
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **how)
    except Exception as error:  # the package tokenizers raises plain Exception for a broken file
        raise UserError(f"{name}: no tokenizer that can be loaded ({describe(error)})") from None


def _load_weights(folder: Path, **settings):
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, use_safetensors=True, **settings
        )
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{folder}: the model does not fit on {own_device()}; use --bf16 True, or --device_map auto with one "
            f"process per machine, which spreads it over the GPUs ({error})"
        ) from None
    except Exception as error:  # a broken file may raise any type
        raise UserError(f"{folder}: its weights cannot be loaded ({describe(error)})") from None
    if loaded["missing_keys"]:
        raise UserError(f"{folder}: weights are missing ({', '.join(sorted(loaded['missing_keys']))})")
    return model


def describe(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def own_device() -> torch.device:
    """The GPU of this process, CUDA's or Apple's; the CPU if there is none.

    Raises UserError if a machine with CUDA GPUs has more processes than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise UserError(f"process {local_rank} of this machine has no GPU; there are {torch.cuda.device_count()}")
    return torch.device("cuda", local_rank)
