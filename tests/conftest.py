"""Models and tokenizers of a few thousand parameters, made on the spot: no test needs a network or a GPU.

Programs mostly run in this process (helpers.call) or in forks (forks.py): a start of Python with torch takes 4 to 8 s.
"""

import gc
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers have the environment of the process that starts them
    if not any("gpu" in Path(word.partition("::")[0]).parts for word in sys.argv[1:]):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same tests run on every machine; before torch is imported
    SHARED = tempfile.TemporaryDirectory(prefix="spag_tests")
    os.environ["HF_HOME"] = SHARED.name  # for data sets made here
# A background job of a shell ignores Ctrl-C, and so would the programs that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # otherwise two processes on two cores are ten times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core for each process of pytest
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without compiled modules a start takes 8 to 17 s
sys.dont_write_bytecode = False

# Tests depend on no clock, since other programs may be at work on the machine.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], max_examples=50
)
hypothesis.settings.load_profile("suite")

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).resolve().parent / "golden"


def pytest_addoption(parser):
    parser.addoption("--campaign", type=int, default=1, metavar="N", help="make N rounds of all kills")


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("kills"):
        metafunc.fixturenames.append("campaign_round")
        metafunc.parametrize("campaign_round", range(metafunc.config.getoption("campaign")))


@pytest.fixture(autouse=True)
def clean_process():
    """After each test, undo what a program leaves in this process: locks, environment, logging, accelerate's state."""
    from helpers import as_a_process

    with as_a_process():
        yield


def pytest_collection_modifyitems(items):
    """Begin with the longest file: at the end it would keep one of two cores waiting."""
    items.sort(key=lambda item: item.path.name != "test_train.py")


def pytest_collection_finish():
    """Exempt imported modules from garbage collection: the Trainer collects at each start, for 0.3 s."""
    gc.collect()
    gc.freeze()


def load_golden(name: str):
    """One file of recorded numbers; tests/golden/README.md says where they come from."""
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def build_tokenizer(*special: str, chat_template: str | None = None):
    """A byte-level tokenizer without merges: 256 bytes and four special tokens, one token per byte of text.

    It may have more special tokens and a chat template.
    """
    from tools.engine.random_model import train_tokenizer

    tokenizer = train_tokenizer((), 0)
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.chat_template = chat_template
    return tokenizer


def build_sentencepiece(texts, vocab_size: int, *special: str, chat_template: str | None = None):
    """A tokenizer as Llama-2's: a blank before each text, pieces within words, bytes for unknown characters.

    Not trained by SentencePiece: the merges are those of a BPE over words.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    words.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False))
    trained = json.loads(words.to_str())["model"]
    learned = sorted(trained["vocab"], key=trained["vocab"].get)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in trained["merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    blank = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.chat_template = chat_template
    return tokenizer


def load_chat_template(name: str) -> str:
    return (GOLDEN.parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def build_llama(seed: int, vocab_size: int, **changes):
    """A random Llama of some ten thousand parameters. Its weights are large, so that logits differ clearly."""
    from tools.engine.random_model import random_llama

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"intermediate_size": 64, "max_position_embeddings": 2048, "initializer_range": 0.1}
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
    """Folder of a second Llama of the same shape as `tiny_model`, with other weights."""
    return _save(tmp_path_factory.mktemp("other_model"), tokenizer, seed=1)


def _save(folder: Path, tokenizer, seed: int) -> str:
    build_llama(seed, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
