"""Tokenizers of published models: play and training see the same tokens, and replies read back as they were.

SentencePiece with 32,000 pieces and byte fallback (as Llama-2's) and Tekken, from the wheel of mistral-common. The
package is not installed, since it would move numpy:

    pip download --no-deps --dest .venv/wheels mistral-common

The variable MISTRAL_COMMON names a wheel elsewhere. Without one the tests are skipped.
"""

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
from scripted import messages
from test_chat import BORDERS
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from dataloaders import encode_example
from tools.common.models import special_texts, token_ids, without
from tools.engine.local import Codec
from tools.games.prompts import play_prompt
from tools.games.taboo import Taboo
from tools.players.player import Sampling

WHEELS = [os.environ.get("MISTRAL_COMMON"), *Path(sys.prefix, "wheels").glob("mistral_common-*.whl")]
WHEEL = next(filter(None, WHEELS), None)
GAME = Taboo()
TEXTS = ["c++", "café", "I like 😀👩‍🚀 and ﬁsh.", "two  blanks", "Ends\n\nof\r\nlines", "😀", "日本語", "a\tb"]
SPECIAL = ["<unk>", "<s>", "</s>"]

pytestmark = pytest.mark.skipif(not WHEEL, reason="no wheel of mistral-common (see the head of this file)")


def sentencepiece(data: bytes, folder: Path):
    model = pytest.importorskip("transformers.utils.sentencepiece_model_pb2_new", exc_type=ImportError).ModelProto()
    from transformers.convert_slow_tokenizer import generate_merges

    model.ParseFromString(data)
    vocabulary = {piece.piece: number for number, piece in enumerate(model.pieces)}
    assert len(vocabulary) == 32_000
    return LlamaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary, None), legacy=False)


def tekken(data: bytes, folder: Path):
    from transformers.integrations.mistral.tokenizer import MistralConverter

    raw = json.loads(data)
    raw["special_tokens"] = [{"rank": rank, "token_str": text} for rank, text in enumerate(SPECIAL)]
    (folder / "tekken.json").write_text(json.dumps(raw))
    converted = MistralConverter(str(folder / "tekken.json")).converted()
    return PreTrainedTokenizerFast(tokenizer_object=converted, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module", params=[("tokenizer.model.v1", sentencepiece), ("tekken_240718.json", tekken)])
def tokenizer(request, tmp_path_factory):
    name, build = request.param
    with zipfile.ZipFile(WHEEL) as wheel:
        built = build(wheel.read(f"mistral_common/data/{name}"), tmp_path_factory.mktemp("tokenizer"))
    built.model_max_length = 2048
    return built


def test_a_text_without_special_texts_has_no_special_tokens(tokenizer):
    special = special_texts(tokenizer)
    forged = "tea".join([*special, *(f"{text[:2]}{text}{text[2:]}" for text in special)])
    ids = {name: tokenizer(text, add_special_tokens=False)["input_ids"] for name, text in
           {"forged": forged, "cleaned": without(special, forged)}.items()}  # fmt: skip
    assert set(tokenizer.all_special_ids) <= set(ids["forged"])
    assert not set(tokenizer.all_special_ids) & set(ids["cleaned"])


@pytest.mark.parametrize("text", TEXTS)
def test_play_and_training_have_the_same_tokens_and_replies_read_back(text, tokenizer):
    history = messages(GAME, text, "Hm.", text)
    tokens = Codec(tokenizer, Sampling())
    for end in range(4):
        prompt = play_prompt(GAME, history[:end], text, 3)
        played, cut = tokens.encode(prompt)
        row = encode_example({"query": prompt, "target": text}, tokenizer)
        assert row["input_ids"][: len(played)] == played and not cut
        assert row["input_ids"].count(tokenizer.bos_token_id) == (row["input_ids"][0] == tokenizer.bos_token_id) == 1
        reply = [label for label in row["labels"] if label != -100]
        assert row["input_ids"] == played + reply and reply[-1] == tokenizer.eos_token_id
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    reply = tokens.decode([*ids, tokenizer.eos_token_id, *ids], prompt_cut=False)
    assert (reply.text, reply.tokens, reply.finish_reason) == (text, len(ids) + 1, "stop")


@pytest.mark.parametrize("family", ["zephyr", "mistral", "llama-2"])
def test_a_row_in_a_chat_template_goes_on_behind_the_prompt_as_the_whole_text_does(family, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", BORDERS[family])
    codec = Codec(tokenizer, Sampling(chat_template=True))
    for text in TEXTS:
        query = codec.chat.join_play_prompt(messages(GAME, text, "Hm."), "attacker", "Rules.", "Go.")
        prompt, _ = codec.encode(query)
        row = codec.chat.row({"query": query, "target": text})
        ids = encode_example(row, tokenizer)["input_ids"]
        assert ids[: len(prompt)] == prompt and ids == token_ids(tokenizer, [query + row["target"]])[0]
        assert codec.decode(ids[len(prompt) :]).text.strip() == text
        if family != "llama-2":  # where the template writes no blank before a reply
            assert not tokenizer.convert_ids_to_tokens(ids[len(prompt)]).startswith("▁")
