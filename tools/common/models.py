"""Models and tokenizers: their folders, loading, token ids, special tokens, digests."""

import functools
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tools.common.errors import UserError, user_errors
from tools.common.files import StrPath
from tools.common.ranks import warn_on_rank_0

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Files to download from the hub: weights in one format, configuration, tokenizer, code.
MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.model.*", "*.tiktoken", "*.txt", "*.jinja", "*.py", "*.md"]
TWICE = ["consolidated*", "original/*"]  # the same weights in another layout
# The date in chat templates that write one, fixed so that prompts are the same every day. It is Llama 3's default.
DAY = "26 Jul 2024"
FIXED_DAY = f"{{%- macro strftime_now(format) -%}}{DAY}{{%- endmacro -%}}"
# Files that training writes beside a model and that do not affect its replies.
RECORDS = {
    "README.md",
    "settings.json",
    "complete",
    "trainer_state.json",
    "training_args.bin",
    "train_results.json",
    "eval_results.json",
    "all_results.json",
}


def chat_text(tokenizer, messages: list[dict], **options) -> str:
    """Messages in the tokenizer's chat template, with a fixed date; `options` of `apply_chat_template`."""
    template = tokenizer.get_chat_template()
    template = (FIXED_DAY if "strftime_now" in template else "") + template
    options |= {"chat_template": template, "date_string": DAY, "tokenize": False}
    return tokenizer.apply_chat_template(messages, **options)


def whole_characters(text: str) -> str:
    """The text with U+FFFD for unpaired surrogates, which tokenizers reject."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@functools.cache
def model_folder(name: str) -> Path:
    """The folder `name`, or the local snapshot of that model on the hub. UserError unless it holds a model."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        with user_errors(f"{name}: no such folder, and no such model on the hub or in its cache", OSError, ValueError):
            folder = Path(snapshot_download(name, allow_patterns=MODEL_FILES, ignore_patterns=TWICE))
    has_config = (folder / "config.json").is_file()
    has_adapter = (folder / "adapter_config.json").is_file()
    if has_config and has_adapter:  # transformers would add the adapter to weights that may already include it
        remedy = "delete it if the weights are merged, or use the training's folder merged/"
        raise UserError(f"{folder}: adapter_config.json beside a full model; {remedy}")
    if has_adapter:
        remedy = "use the folder merged/ inside it, which train.py writes with --lora_merge True"
        raise UserError(f"{folder}: an adapter (adapter_config.json, no config.json), not a model; {remedy}")
    if not has_config:
        raise UserError(f"{folder}: no config.json; this is not a model folder")
    return folder


def from_folder(auto, name: StrPath, **options):
    """`auto.from_pretrained` of a model's folder. UserError with transformers' message if it cannot be loaded."""
    folder = model_folder(str(name))
    with user_errors(folder, ValueError, ImportError):
        try:
            return auto.from_pretrained(folder, **options)
        except ValueError as error:
            if "trust_remote_code" in str(error):
                raise UserError(f"{folder}: comes with its own code; --trust_remote_code True runs it") from error
            raise


def load_model(name: StrPath, **options):
    """Load a causal language model in eval mode, from safetensors only, because pickled weights could run code.

    UserError if it cannot be loaded, lacks weights, or is a masked language model.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # "Loading weights"
    options |= {"use_safetensors": True, "output_loading_info": True}
    model, report = from_folder(AutoModelForCausalLM, name, **options)
    if report["missing_keys"]:  # transformers would initialize them at random
        raise UserError(f"{name}: weights are missing ({', '.join(sorted(report['missing_keys']))})")
    with user_errors(name, UserError):
        check_causal(model.config)
    return model


def check_causal(config) -> None:
    """UserError for a masked language model: transformers would load it, but its tokens attend to later ones."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise UserError(f"a masked language model ({config.model_type}); use a causal one, or set is_decoder to true")


def warn_of_positions(config, max_length: int) -> None:
    """Warn if --max_length exceeds the model's `max_position_embeddings`."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        warn_on_rank_0("--max_length %d exceeds the %d positions in the model's config.json", max_length, positions)


def make_weights_readable(folder: StrPath) -> None:
    """Apply the umask to saved weights, which safetensors makes readable by the owner only."""
    mask = os.umask(0)
    os.umask(mask)
    for path in Path(folder).glob("*.safetensors"):
        path.chmod(0o666 & ~mask)


def check_token(token: int, tokenizer, vocab_size: float) -> None:
    """UserError for a token id outside the `vocab_size` rows of the model's embeddings."""
    if token >= vocab_size:
        text = tokenizer.convert_ids_to_tokens(int(token))
        raise UserError(f"token {token} ({text}) is outside the model's {vocab_size}; is this the model's tokenizer?")


def load_tokenizer(name: str, **options):
    """A model's tokenizer, with the normalizer and pre_tokenizer of its tokenizer.json if there is one.

    transformers 5 replaces them by those of the class named in tokenizer_config.json: a LlamaTokenizer without a
    leading space (Yi) would get one, and a byte-level one (DeepSeek) would lose its spaces. mistral-common is never
    used, because it reads tekken.json and gives "[INST]" other ids.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = from_folder(AutoTokenizer, name, mistral_format=False, **options)
    if (legacy := getattr(tokenizer, "legacy", None)) is not None:
        tokenizer.init_kwargs["legacy"] = legacy  # save_pretrained would omit it from tokenizer_config.json
    file = model_folder(name) / "tokenizer.json"
    if not file.is_file() or not hasattr(tokenizer, "backend_tokenizer") or _splits_as(tokenizer, file):
        return tokenizer
    options.pop("trust_remote_code", None)
    as_in_file = PreTrainedTokenizerFast.from_pretrained(file.parent, **options)
    for role, text in tokenizer.special_tokens_map.items():  # BOS may be a default of the class
        if getattr(as_in_file, role, None) is None:
            setattr(as_in_file, role, text)
    return as_in_file


def _splits_as(tokenizer, file: Path) -> bool:
    from tokenizers import Tokenizer

    ours = tokenizer.backend_tokenizer
    stored = Tokenizer.from_file(str(file))
    pairs = [(ours.normalizer, stored.normalizer), (ours.pre_tokenizer, stored.pre_tokenizer)]
    return all(one.__getstate__() == other.__getstate__() for one, other in pairs)  # JSON


def token_ids(tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without BOS and EOS. Special tokens in a text are parsed."""
    texts = [whole_characters(text) for text in texts]
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []


class EncodedPair(NamedTuple):
    query: list[int]
    target: list[int]
    is_apart: bool  # in a chat template, yet encoded separately


def encode_pairs(tokenizer, pairs: Sequence[tuple[str, str, bool]]) -> list[EncodedPair]:
    """Token ids of (query, target, chat_template) triples.

    In a chat template the two are encoded as one text, and the target is what follows the query's tokens: the
    SentencePiece tokenizers of Llama-2 and Mistral put a space before every text, so a target encoded alone would
    begin with "▁It" where the model had sampled "It". If a merge crosses the boundary, so that the query's tokens are
    not a prefix of the whole, and in rows without a template (as released), they are encoded separately.
    """
    queries = list(dict.fromkeys(query for query, _, _ in pairs))
    ids_of = dict(zip(queries, token_ids(tokenizer, queries), strict=True))
    texts = token_ids(tokenizer, [query + target if chat else target for query, target, chat in pairs])
    encoded = []
    for (query, target, chat), ids in zip(pairs, texts, strict=True):
        before = ids_of[query] if chat else []
        is_apart = ids[: len(before)] != before
        of_target = token_ids(tokenizer, [target])[0] if is_apart else ids[len(before) :]
        encoded.append(EncodedPair(ids_of[query], of_target, is_apart))
    return encoded


def special_texts(tokenizer) -> frozenset[str]:
    """The strings that this tokenizer parses as special tokens."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return frozenset(filter(None, [*added, *tokenizer.all_special_tokens]))


def without(texts: frozenset[str], text: str) -> str:
    """`text` with all `texts` removed, including those that appear only after others are removed."""
    if texts:
        while (shorter := _any_of(texts).sub("", text)) != text:
            text = shorter
    return text


@functools.lru_cache(maxsize=16)
def _any_of(texts: frozenset[str]) -> re.Pattern:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def model_setting(name: str) -> dict:
    """A model as a setting of a stage: its path, and the SHA-256 of all files in its folder except RECORDS.

    All bytes are hashed, because two models may differ in a single token's embedding.
    """
    folder = model_folder(name)
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in RECORDS and not path.name.startswith("."):
            status = path.stat()
            digest.update(f"{path.name} {_file_sha256(path, status.st_size, status.st_mtime_ns)} ".encode())
    commit = {"commit": folder.name} if folder.parent.name == "snapshots" else {}  # of the hub
    return {"path": name, "sha256": digest.hexdigest()} | commit


@functools.cache
def _file_sha256(path: Path, size: int, mtime_ns: int) -> str:
    """Cached, because a program asks several times and 14 GB take 15 s."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_for_training(
    name: str, *, dtype: "torch.dtype", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> "PreTrainedModel":
    """Load a causal language model for training. Of a multimodal model, only the text part is trained."""
    model = load_model(name, trust_remote_code=trust_remote_code, dtype=dtype, attn_implementation=attn_implementation)
    if model.generation_config is not None:
        try:
            model.generation_config.validate(strict=True)
        except ValueError:  # temperature without do_sample, as in copies of Llama-2, cannot be saved
            model.generation_config.do_sample = True
    restore_rope(model)
    freeze_all_but_text(model)
    return model


def restore_rope(model: "PreTrainedModel") -> None:
    """Recompute RoPE frequencies in fp32, because transformers before 5.23 rounds them to half under ZeRO-3."""
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.float())
            model._init_weights(module)


def freeze_all_but_text(model: "PreTrainedModel") -> None:
    """Freeze the non-text parts of a multimodal model, because DDP needs a gradient for every trainable weight."""
    if model.config.get_text_config() is model.config:
        return
    parts = filter(None, (model.get_decoder(), model.get_output_embeddings()))
    text = {id(weights) for part in parts for weights in part.parameters()}
    for weights in model.parameters():
        weights.requires_grad_(weights.requires_grad and id(weights) in text)
