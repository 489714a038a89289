"""Models and tokenizers of a few thousand parameters, made on the spot: no test needs a network or a GPU."""

import json
import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
signal.signal(signal.SIGINT, signal.default_int_handler)  # programs under test are interrupted, in the background too
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two busy processes on two cores are ten times slower without

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).resolve().parent / "golden"


def pytest_collection_modifyitems(items):
    """The file that takes longest comes first: begun last by one of two processes, the other would wait for it."""
    items.sort(key=lambda item: item.path.name != "test_train.py")


def load_golden(name: str):
    """One file of recorded numbers; tests/golden/README.md says where they come from."""
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def build_tokenizer():
    """A byte-level tokenizer without merges: 256 bytes and four special tokens, one token per byte of text."""
    from tools.tiny.models import byte_tokenizer

    return byte_tokenizer()


def build_llama(seed: int, vocab_size: int, **changes):
    """A random Llama of some ten thousand parameters, its weights large enough that logits differ clearly."""
    from tools.tiny.models import random_llama

    shape = {"hidden_size": 32, "layers": 2, "heads": 2, "intermediate_size": 64}
    config = {"max_position_embeddings": 2048, "initializer_range": 0.1}
    return random_llama(vocab_size, seed, **(shape | config | changes))


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, tokenizer) -> str:
    """Folder of a tiny Llama with its tokenizer."""
    return _save(tmp_path_factory.mktemp("tiny_model"), tokenizer, seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory, tokenizer) -> str:
    """Folder of a second Llama, like `tiny_model` but for its weights."""
    return _save(tmp_path_factory.mktemp("other_model"), tokenizer, seed=1)


def _save(folder: Path, tokenizer, seed: int) -> str:
    build_llama(seed, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
