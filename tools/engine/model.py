"""Language models in this process: what their folder must hold, loading, answering prompts, how many fit in memory.

Weights are read from .safetensors files only, and code that comes with a model runs only if the user said so.
"""

import logging
import os
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import psutil
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from tools.players.player import LENGTH, STOP, Reply, Sampling
from utils import TOKENIZER_FILES, rank, warn_once

# The most prompts that a batch chosen from memory holds, and for `generate` on a CPU, where larger ones gained little.
# At once: with kept caches on a GPU; with them on a CPU, or without them on a GPU; without them on a CPU.
MOST_GAMES, MOST_PROMPTS, CPU_BATCH = 1024, 256, 64
MEMORY_SHARE = 0.7  # of the free memory, given to the games; the rest absorbs fragmentation and the cache's growth

MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
logger = logging.getLogger(__name__)


class LocalModel:
    """A causal language model with its tokenizer, answering batches of prompts by plain `generate`."""

    def __init__(self, model, tokenizer, sampling: Sampling):
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.stop_ids = _stop_ids(model, tokenizer)
        # Of the three any will do: attention never sees padding.
        known = (tokenizer.pad_token_id, *self.stop_ids, 0)
        self.pad_id = next(token for token in known if token is not None)
        self.generation_config = self._generation_config()
        # Fields that are unset in ours would be filled in from the model folder: repetition penalties and the like.
        model.generation_config = GenerationConfig()

    def encode(self, prompt: str) -> tuple[list[int], bool]:
        """[BOS] + the prompt's tokens, cut from the left (BOS too) if they are too many; and whether they were."""
        bos = self.tokenizer.bos_token_id
        ids = [] if bos is None else [bos]
        ids += self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        limit = self.sampling.max_length - self.sampling.max_new_tokens
        return ids[-limit:], len(ids) > limit

    def generate(self, prompts: Sequence[str]) -> list[Reply]:
        """One reply per prompt, drawn from torch's global generator."""
        encoded = [self.encode(prompt) for prompt in prompts]
        width = max(len(ids) for ids, _ in encoded)
        input_ids = torch.full((len(prompts), width), self.pad_id)  # (batch, width), padded on the left
        attention_mask = torch.zeros_like(input_ids)
        for row, (ids, _) in enumerate(encoded):
            input_ids[row, width - len(ids) :] = torch.tensor(ids)
            attention_mask[row, width - len(ids) :] = 1
        output = self.model.generate(
            input_ids=input_ids.to(self.model.device),
            attention_mask=attention_mask.to(self.model.device),
            generation_config=self.generation_config,
        )
        new_ids = output[:, width:].tolist()  # (batch, up to max_new_tokens)
        return [self.decode(ids, cut) for ids, (_, cut) in zip(new_ids, encoded, strict=True)]

    def decode(self, ids: list[int], prompt_cut: bool) -> Reply:
        end = next((at for at, token in enumerate(ids) if token in self.stop_ids), None)
        tokens = len(ids) if end is None else end + 1
        text = self.tokenizer.decode(ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Reply(text, LENGTH if end is None else STOP, tokens, prompt_cut)

    def _generation_config(self) -> GenerationConfig:
        sampling = self.sampling
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        return GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens,
            do_sample=sampling.do_sample,
            **(drawn if sampling.do_sample else {}),
            num_beams=1,
            repetition_penalty=1.0,
            use_cache=True,
            pad_token_id=self.pad_id,
            eos_token_id=self.stop_ids or None,
        )


class BatchEngine:
    """Answers requests batch after batch by plain `generate`, for any causal language model.

    A batch lasts as long as its longest reply, and every prompt is computed in whole. When the device's memory runs
    out, it goes on with batches of half the size.
    """

    def __init__(self, local: LocalModel, batch_size: int):
        self.local, self.batch_size = local, batch_size
        self.waiting: deque[tuple[int, str]] = deque()  # request, prompt

    def start(self, request: int, prompt: str, *, game: int) -> None:
        """Note a request; its game is of no use here."""
        self.waiting.append((request, prompt))

    def run(self) -> list[tuple[int, Reply]]:
        """The next batch of (request, reply)."""
        while True:
            batch = list(islice(self.waiting, self.batch_size))
            try:
                replies = self.local.generate([prompt for _, prompt in batch])
                break
            except torch.OutOfMemoryError:
                if self.batch_size == 1:
                    raise
            warn_once("out of memory with %d prompts at once; going on with half as many", self.batch_size)
            self.batch_size //= 2
            torch.cuda.empty_cache()
        for _ in batch:
            self.waiting.popleft()
        return [(request, reply) for (request, _), reply in zip(batch, replies, strict=True)]


def _stop_ids(model, tokenizer) -> list[int]:
    """The end tokens: the tokenizer's, and those that the model's own generation settings add."""
    own = model.generation_config.eos_token_id
    own = [] if own is None else [own] if isinstance(own, int) else own
    return sorted({*own, tokenizer.eos_token_id} - {None})


# --- loading -------------------------------------------------------------------------------------------------------


def model_folder(name: str) -> Path:
    """The folder of a model given by folder or by its name on the Hugging Face hub; ValueError if it is incomplete."""
    if os.path.isdir(name):
        folder = Path(name)
    else:
        try:
            folder = Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
        except (OSError, ValueError) as error:
            why = type(error).__name__
            raise ValueError(f"{name}: no such folder, nor a model that can be had from the hub ({why})") from None
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json; this is not a model folder")
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ValueError(f"{folder}: no tokenizer ({', '.join(TOKENIZER_FILES)}); save it beside the model")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: no weights in .safetensors form; convert them with save_pretrained")
    return folder


def load_local_model(
    folder: Path,
    sampling: Sampling,
    *,
    dtype: torch.dtype | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> LocalModel:
    """Load a model folder on the GPU of this process (else the CPU), or as transformers' `device_map` says.

    `dtype` None is the one in the model's own config. Raises ValueError, with what to do, if memory does not suffice.
    """
    if rank() != 0:
        disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            output_loading_info=True,
            dtype=dtype or "auto",
            device_map=device_map or {"": own_device()},
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{folder}: the model does not fit on {own_device()}; use --bf16 True, or --device_map auto with one "
            f"process per machine, which spreads it over the GPUs ({error})"
        ) from None
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{folder}: its weights cannot be loaded ({error})") from None
    if loaded["missing_keys"]:
        raise ValueError(f"{folder}: weights are missing ({', '.join(sorted(loaded['missing_keys']))})")
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise ValueError(f"{folder}: the tokenizer has {len(tokenizer)} tokens, more than the model's embeddings")
    logger.info("%s: %s on %s", folder, model.dtype, device_map or own_device())
    if dtype is None and model.dtype == torch.float16:
        warn_once("%s: float16, as its config says; --bf16 True has the wider range", folder)
    if not _stop_ids(model, tokenizer):
        warn_once("%s: no EOS token, so every reply takes all of --max_new_tokens", folder)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions and sampling.max_length > positions:
        warn_once("%s: made for %d positions, --max_length is %d", folder, positions, sampling.max_length)
    return LocalModel(model.eval(), tokenizer, sampling)


def own_device() -> torch.device:
    """The GPU of this process, Apple's, or the CPU where there is none; ValueError for more processes than GPUs."""
    if not torch.cuda.is_available():
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(f"process {local_rank} of this machine has no GPU; there are {torch.cuda.device_count()}")
    return torch.device("cuda", local_rank)


def batch_size_for_memory(model, max_length: int, *, kept_caches: bool, engines: int = 1) -> int:
    """How many prompts to answer at once: as many as fit with their caches and activations.

    A prompt is counted at its full `max_length` tokens, all of them computed at once; but where an engine has
    `kept_caches`, which computes little at a time, without activations, and on a GPU at half the length: most games
    are shorter, and if they are not, it goes on with fewer. So many `engines` share the memory; to be called when all
    models are loaded.
    """
    on_gpu = model.device.type == "cuda"
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * heads * head_size  # keys and values of a token
    if not kept_caches:
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        numbers += 8 * config.hidden_size + 4 * inner  # activations of one layer
    tokens = max_length // 2 if kept_caches and on_gpu else max_length
    per_prompt = tokens * numbers * model.dtype.itemsize + 4 * 4 * config.vocab_size  # logits of a place in float32
    fitting = int(MEMORY_SHARE * _free_memory(model) / engines / per_prompt)
    most = MOST_GAMES if on_gpu and kept_caches else MOST_PROMPTS if on_gpu or kept_caches else CPU_BATCH
    return min(max(fitting, 1), most)


def _free_memory(model) -> int:
    """Bytes free on the devices that hold the model; of RAM, this process's share."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    if devices:
        return sum(torch.cuda.mem_get_info(device)[0] for device in devices)
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
