"""Chat templates: three families of them, the same tokens in play and in training, and templates that cannot do."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, build_llama, build_tokenizer
from helpers import call, flags_of
from transformers import AutoTokenizer

from dataloaders import RowDataset, encode_example, load_rows
from tools import assign_rewards, play_llm_game
from tools.engine import model as models
from tools.engine.model import LocalModel
from tools.games import prompts
from tools.games.chat import DAY, ChatTemplate, chat_messages
from tools.games.taboo import Taboo
from utils import UserError, read_json_or_jsonl

TEMPLATES = Path(__file__).resolve().parent / "chat_templates"
SPECIAL = {  # the tokens that a family brings along; the last one ends a reply
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "headers": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "turns": ["<start_of_turn>", "<end_of_turn>"],
}
PROMPTS = ROOT / "data" / "tiny" / "prompts.json"  # short ones
GAME = Taboo()
LETTERS = 5  # of every reply of the model below
HISTORY = [
    {"role": "attacker", "content": "What hangs in a museum?"},
    {"role": "defender", "content": "Coats."},
    {"role": "attacker", "content": "And on its walls?"},
]


def conversation(history, max_turns, templates, *, task="art"):
    """The messages for the player who speaks next."""
    role = GAME.next_role(task, history)
    told = prompts.instruction(templates, role, GAME.secrets(role, task, history), max_turns)
    return chat_messages(history, role, prompts.rule_text(templates, max_turns), told)


def chat_tokenizer(family: str, template: str | None = None):
    """The tests' tokenizer with the special tokens and the template of a family; its EOS ends no reply."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(SPECIAL[family], special_tokens=True)
    tokenizer.chat_template = template or (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.fixture(scope="module", params=sorted(SPECIAL))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory) -> str:
    """A model folder whose tokenizer has a chat template."""
    folder, tokenizer = tmp_path_factory.mktemp(family), chat_tokenizer(family)
    build_llama(0, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# --- play and training -----------------------------------------------------------------------------------------------


class Watch:
    """What models are shown and what they sample; makes every reply LETTERS letters and the end token."""

    def __init__(self, monkeypatch, end: str):
        self.end, self.prompts, self.sampled = end, [], []
        load, encode = models.load_local_model, LocalModel.encode
        monkeypatch.setattr(models, "load_local_model", lambda *args, **how: self.hook(load(*args, **how)))
        monkeypatch.setattr(LocalModel, "encode", lambda model, prompt: self.note(encode(model, prompt)))

    def hook(self, model: LocalModel) -> LocalModel:
        allowed = torch.full((len(model.tokenizer),), -1e9)
        allowed[model.tokenizer("abcdefghij")["input_ids"]] = 0
        end_id = model.tokenizer.convert_tokens_to_ids(self.end)

        def choose(module, inputs, logits):
            logits = logits + allowed
            if len(self.sampled[-1]) == LETTERS:
                logits[..., end_id] = 1e9
            self.sampled[-1].append(int(logits[0, -1].argmax()))
            return logits

        model.model.lm_head.register_forward_hook(choose)
        return model

    def note(self, encoded):
        self.prompts.append(encoded[0])
        self.sampled.append([])
        return encoded


def play(folder: str, place: Path, status: int = 0, **changes):
    """Play two games by the program, one at a time; gives how it ended."""
    (place / "words.txt").write_text("piano\nviolin\n", encoding="utf-8")
    flags = dict.fromkeys(("attacker_model_name_or_path", "defender_model_name_or_path"), folder)
    flags |= {"data_path": place / "words.txt", "output_dir": place / "out", "model_prefix": "m", "data_suffix": "w"}
    flags |= {"task_type": "testing", "taboo_max_turns": 2, "max_length": 2048, "max_new_tokens": 12}
    flags |= {"concurrent_games": 1, "engine": "generate", "logging_steps": 0}  # the hook counts this engine's passes
    flags |= {"chat_template": True, "prompt_templates": PROMPTS}
    return call(play_llm_game.main, *flags_of(flags | changes), status=status)


def rewards(place: Path, status: int = 0, **changes):
    """Make rows of the games in `place`; gives how the program ended, and the rows."""
    rows = place / "rows.json"
    rows.unlink(missing_ok=True)
    flags = {"input_data_path": place / "out" / "m_testing_w_results.json", "output_data_path": rows}
    flags |= {"chat_template": True, "messages": "all", "prompt_templates": PROMPTS}
    ended = call(assign_rewards.main, *flags_of(flags | changes), status=status)
    return ended, read_json_or_jsonl(rows) if rows.exists() else None


@pytest.fixture(scope="module")
def played(family, folder, tmp_path_factory) -> tuple[Path, list[dict], Watch]:
    """Where games were played with chat templates, the games, and what was seen of them."""
    place = tmp_path_factory.mktemp("played")
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = Watch(monkeypatch, end=SPECIAL[family][-1])
        play(folder, place)
    return place, read_json_or_jsonl(place / "out" / "m_testing_w_results.json"), watch


def test_rows_are_in_training_the_very_tokens_of_play(family, folder, played, tmp_path):
    place, games, watch = played
    _, rows = rewards(place, tokenizer=folder, training_prompt="play")
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=2048)
    assert len(rows) == len(watch.prompts) == sum(len(game["history"]) for game in games) == 8
    for row, prompt, sampled in zip(rows, watch.prompts, watch.sampled, strict=True):
        assert len(sampled) == LETTERS + 1 and tokenizer.decode(sampled[-1]) == SPECIAL[family][-1]
        encoded = encode_example(row, tokenizer)
        assert encoded["input_ids"] == prompt + sampled
        assert encoded["labels"] == [-100] * len(prompt) + sampled
    assert [reply["finish_reason"] for game in games for reply in game["replies"]] == ["stop"] * 8
    stored = load_rows([str(place / "rows.json")], tokenizer, str(tmp_path / "cache"))
    tokens = [prompt + sampled for prompt, sampled in zip(watch.prompts, watch.sampled, strict=True)]
    assert [row["input_ids"] for row in RowDataset(*stored)] == tokens
    _, drawn = rewards(place, tokenizer=folder, seed=1)  # of random training prompts
    assert [row["target"] for row in drawn] == [row["target"] for row in rows]
    assert [row["query"] for row in drawn] != [row["query"] for row in rows]
    assert all(row["chat_template"] is True for row in drawn)


def test_a_players_prompt_is_what_the_template_makes_of_its_conversation(family, folder, played):
    _, games, watch = played
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if family == "headers":
        tokenizer.chat_template = tokenizer.chat_template.replace("strftime_now('%d %b %Y')", f"'{DAY}'")
    shown, templates = iter(watch.prompts), prompts.load_templates(PROMPTS, GAME)
    for game in games:
        for place in range(len(game["history"])):
            system, *said = conversation(game["history"][:place], 2, templates, task=game["target_word"])
            if family == "turns":
                said[0] = {"role": "user", "content": system["content"] + "\n\n" + said[0]["content"]}
            else:
                said.insert(0, system)
            expected = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
            assert next(shown) == expected  # with one BOS where the template writes it, and none where it does not
            assert expected.count(tokenizer.bos_token_id) == (family != "chatml")


def test_settings_record_the_template_and_another_one_is_refused(tmp_path):
    tokenizer = chat_tokenizer("headers")
    for part in (build_llama(0, len(tokenizer)), tokenizer):
        part.save_pretrained(tmp_path / "model")
    play(tmp_path / "model", tmp_path, max_games=1)
    assert (
        "chat_template: True then, False now"
        in play(tmp_path / "model", tmp_path, max_games=1, chat_template=False, status=2).errors
    )
    (tmp_path / "model" / "chat_template.jinja").open("a").write("\n")
    assert "defender_model_name_or_path: " in play(tmp_path / "model", tmp_path, max_games=1, status=2).errors


def test_play_and_rewards_refuse_a_tokenizer_without_a_template(tiny_model, tmp_path):
    assert "has no chat template" in play(tiny_model, tmp_path, status=2).errors
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "m_testing_w_results.json").write_text("[]", encoding="utf-8")
    for flags, message in (
        ({}, "--tokenizer"),
        ({"chat_template": False, "tokenizer": tiny_model}, "--chat_template"),
        ({"tokenizer": tiny_model}, "has no chat template"),
    ):
        ended, rows = rewards(tmp_path, status=2, **flags)
        assert message in ended.errors and rows is None


# --- conversations ---------------------------------------------------------------------------------------------------


def test_the_game_is_a_conversation_of_the_player_who_speaks():
    templates = {"rules": ["Rules of {max_turns} turns.\n"], "attacker_instruction": "Make them say {target_word}."}
    templates |= {"defender_instruction": "Find it out."}
    assert conversation(HISTORY, 5, templates) == [
        {"role": "system", "content": "Rules of 5 turns.\n\nFind it out."},
        {"role": "user", "content": "What hangs in a museum?"},
        {"role": "assistant", "content": "Coats."},
        {"role": "user", "content": "And on its walls?"},
    ]
    assert conversation(HISTORY[:2], 5, templates) == [
        {"role": "system", "content": "Rules of 5 turns.\n\nMake them say art."},
        {"role": "user", "content": prompts.NO_HISTORY},
        {"role": "assistant", "content": "What hangs in a museum?"},
        {"role": "user", "content": "Coats."},
    ]


def test_random_training_prompts_have_the_rule_texts_of_those_without_a_template():
    chat = ChatTemplate(chat_tokenizer("chatml"), "m")
    templates = prompts.default_templates(GAME) | {"rules": [f"Text {number}.\n" for number in range(8)]}
    by_chat, plain, seen = random.Random(3), random.Random(3), set()
    for _ in range(40):
        drawn = chat.play_prompt(GAME, HISTORY, "art", 5, templates, by_chat)
        rule = re.search(r"Text (\d)\.", drawn)[0]
        assert rule in prompts.training_prompt(GAME, HISTORY, "art", 5, rng=plain, templates=templates)
        seen.add(rule)
    assert len(seen) == 8


def test_sft_rows_are_one_user_message_and_its_answer(tmp_path):
    tokenizer = chat_tokenizer("headers")
    tokenizer.save_pretrained(tmp_path / "tok")
    records = [{"instruction": "Translate.", "input": "violin", "output": "violon "}]
    records += [{"query": "Name one.", "target": "The violin."}]
    (tmp_path / "sft.json").write_text(json.dumps(records), encoding="utf-8")
    (tmp_path / "game.json").write_text(json.dumps([{"history": HISTORY, "target_word": "art", "max_turns": 2}]))
    files = {"input_data_path": tmp_path / "game.json", "sft_data_path": tmp_path / "sft.json"}
    _, (*_, first, second) = rewards(tmp_path, tokenizer=tmp_path / "tok", **files)
    head = "<s><|start_header_id|>user<|end_header_id|>\n\n"
    answer = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert first["query"] == f"{head}Translate.\n\nviolin<|eot_id|>{answer}"
    assert (first["target"], first["type"]) == ("violon<|eot_id|>", "sft")
    assert second["query"] == f"{head}Name one.<|eot_id|>{answer}"
    encoded = encode_example(first, tokenizer)
    assert encoded["is_sft"] and tokenizer.decode(encoded["input_ids"]) == first["query"] + first["target"]
    settings = json.loads((tmp_path / "rows_rewards_settings.json").read_text(encoding="utf-8"))["settings"]
    assert settings["chat_template"] is True and re.fullmatch("[0-9a-f]{64}", settings["tokenizer"]["sha256"])


# --- templates of all kinds ------------------------------------------------------------------------------------------

LINES = "{% for m in messages %}{{ m.role + ': ' + m.content + END }}{% endfor %}"
ANSWER = "{% if add_generation_prompt %}assistant: {% if enable_thinking is false %}<none>{% endif %}{% endif %}"


@pytest.mark.parametrize(
    "template, target",
    [
        ("{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
         "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}", " Coats. </s>"),
        (LINES.replace("END", "'<|im_end|>\n'") + ANSWER, "Coats.<|im_end|>"),
        (LINES.replace("END", "'\n'") + ANSWER, "Coats.</s>"),  # no special token: EOS ends the reply
    ],
    ids=["with text around replies", "with a special token", "with neither"],
)  # fmt: skip
def test_a_target_is_what_the_template_writes_up_to_the_token_that_ends_a_reply(template, target):
    chat = ChatTemplate(chat_tokenizer("chatml", template), "m")
    (row,) = chat.rows([{"query": "", "target": " Coats.\n"}])
    assert row["target"] == target
    assert target.endswith(chat.tokenizer.decode([chat.end_id]))


def test_a_system_message_that_a_template_leaves_out_goes_to_the_user_and_thinking_is_off():
    shown = LINES.replace("in messages", "in messages if m.role != 'system'").replace("END", "'</s>'") + ANSWER
    chat = ChatTemplate(chat_tokenizer("chatml", shown), "m")
    prompt = chat.play_prompt(GAME, HISTORY, "art", 5)
    assert "user: " + prompts.rule_text(prompts.default_templates(GAME), 5) in prompt
    assert prompt.endswith("assistant: <none>")


def test_a_template_that_leaves_out_messages_is_refused():
    with pytest.raises(UserError, match="^m: its chat template leaves out messages"):
        ChatTemplate(chat_tokenizer("chatml", "{{ messages[-1].content }}"), "m")


def test_complete_texts_need_a_mark_that_is_true_or_false_and_a_token_of_the_tokenizer(tokenizer):
    row = {"query": "<|im_start|>user\n", "target": "Coats.<|im_end|>", "chat_template": True}
    assert encode_example(row, chat_tokenizer("chatml"))["input_ids"][-1] == 261
    with pytest.raises(ValueError, match="special token of this tokenizer"):  # another model's template
        encode_example(row, tokenizer)
    plain = {"query": "q", "target": "t"}
    for mark in (1, "True", None, []):
        with pytest.raises(ValueError, match="'chat_template' must be true or false"):
            encode_example(plain | {"chat_template": mark}, tokenizer)
    assert encode_example(plain | {"chat_template": False}, tokenizer) == encode_example(plain, tokenizer)
    assert tokenizer.decode(encode_example(plain, tokenizer)["input_ids"]) == "<s>qt</s>"
