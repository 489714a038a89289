"""Chat templates: three families of them, the same tokens in play and in training, and templates that are refused."""

import asyncio
import json
import random
import re
from pathlib import Path

import pytest
from conftest import ROOT, build_llama, build_tokenizer
from helpers import call, flags_of

import tools.games.chat
from dataloaders import encode_example, load_rows
from tools import assign_rewards, play_llm_game
from tools.engine.model import LocalModel, ModelTokens
from tools.games import prompts
from tools.games.chat import DAY, ChatTemplate, chat_messages
from tools.games.taboo import Taboo
from tools.players.player import STOP, Sampling
from tools.selfplay.layout import layout_of
from tools.selfplay.play import play_game
from utils import UserError, read_json_or_jsonl, tokenizer_fingerprint, write_json, write_records

TEMPLATES = Path(__file__).resolve().parent / "chat_templates"
SPECIAL = {  # the tokens of a family; the last one ends a reply
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "headers": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "turns": ["<start_of_turn>", "<end_of_turn>"],
}
PROMPTS = ROOT / "data" / "tiny" / "prompts.json"  # short ones
GAME = Taboo()
OWN_PROMPTS = prompts.default_templates(GAME)
HISTORY = [
    {"role": "attacker", "content": "What hangs in a museum?"},
    {"role": "defender", "content": "Coats."},
    {"role": "attacker", "content": "And on its walls?"},
]


def conversation(history, max_turns, templates):
    """The messages for the player who speaks next; the word is art."""
    role = GAME.next_role("art", history)
    told = prompts.instruction(templates, role, GAME.secrets(role, "art", history), max_turns)
    return chat_messages(history, role, prompts.rule_text(templates, max_turns), told)


def chat_tokenizer(family: str, template: str | None = None):
    """The tests' tokenizer with the special tokens and the template of a family; its EOS ends no reply."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(SPECIAL[family], special_tokens=True)
    tokenizer.chat_template = template or (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return tokenizer


def play(folder: str, place: Path, status: int = 0, **changes):
    """Play a game by the program; return how it ended."""
    (place / "words.txt").write_text("piano\n", encoding="utf-8")
    flags = dict.fromkeys(("attacker_model_name_or_path", "defender_model_name_or_path"), folder)
    flags |= {"data_path": place / "words.txt", "output_dir": place / "out", "model_prefix": "m", "data_suffix": "w"}
    flags |= {"task_type": "testing", "taboo_max_turns": 2, "max_length": 2048, "max_new_tokens": 12}
    flags |= {"logging_steps": 0, "chat_template": True, "prompt_templates": PROMPTS}
    return call(play_llm_game.main, *flags_of(flags | changes), status=status)


def rewards(place: Path, status: int = 0, **changes):
    """Make rows of the games in `place`; return how the program ended, and the rows."""
    rows = place / "rows.json"
    rows.unlink(missing_ok=True)
    flags = {"input_data_path": place / "games.json", "output_data_path": rows}
    flags |= {"chat_template": True, "messages": "all", "prompt_templates": PROMPTS}
    ended = call(assign_rewards.main, *flags_of(flags | changes), status=status)
    return ended, read_json_or_jsonl(rows) if rows.exists() else None


# --- play and training -----------------------------------------------------------------------------------------------


class Speaker:
    """Says letters and the token that ends a reply, and keeps the tokens of each prompt and reply."""

    def __init__(self, family: str):
        self.tokens = ModelTokens(chat_tokenizer(family), Sampling())
        self.tokens.use_chat_template(family)
        self.end = self.tokens.tokenizer.convert_tokens_to_ids(SPECIAL[family][-1])
        self.prompts: list[list[int]] = []
        self.replies: list[list[int]] = []

    async def reply(self, turn):
        prompt, cut = self.tokens.encode_turn(turn)
        letters = "abcdefgh"[len(self.prompts) :]
        self.prompts.append(prompt)
        self.replies.append([*self.tokens.tokenizer(letters, add_special_tokens=False)["input_ids"], self.end])
        return self.tokens.decode(self.replies[-1], cut)


@pytest.mark.parametrize("family", SPECIAL)
def test_rows_are_in_training_the_very_tokens_of_play(family, tmp_path):
    speaker = Speaker(family)
    players = dict.fromkeys(GAME.roles, speaker)
    templates = prompts.load_templates(PROMPTS, GAME)
    games = [
        asyncio.run(play_game(GAME, word, players, max_turns=2, templates=templates)) for word in ("piano", "sun")
    ]
    assert [reply["finish_reason"] for game in games for reply in game["replies"]] == [STOP] * 8
    write_records(tmp_path / "games.json", games)
    tokenizer = speaker.tokens.tokenizer
    tokenizer.save_pretrained(tmp_path / "tok")
    fingerprint = tokenizer_fingerprint(tmp_path / "tok")
    write_json(tmp_path / "games_settings.json", {"tokenizer_sha256": dict.fromkeys(GAME.roles, fingerprint)})
    _, rows = rewards(tmp_path, tokenizer=tmp_path / "tok", training_prompt="play")
    assert [row["target_ids"] for row in rows] == [reply[:-1] for reply in speaker.replies]
    for row, prompt, reply in zip(rows, speaker.prompts, speaker.replies, strict=True):
        encoded = encode_example(row, tokenizer)
        assert encoded["input_ids"] == prompt + reply
        assert encoded["labels"] == [-100] * len(prompt) + reply
    tokens = [prompt + reply for prompt, reply in zip(speaker.prompts, speaker.replies, strict=True)]
    for number, sha256 in enumerate((fingerprint, None)):  # the ids of play, and the texts, which have the same ids
        cache = tmp_path / f"cache{number}"
        stored = load_rows([str(tmp_path / "rows.json")], tokenizer, cache, tokenizer_sha256=sha256)
        assert [row["input_ids"] for row in stored] == tokens
    _, drawn = rewards(tmp_path, tokenizer=tmp_path / "tok", seed=1, retokenize=True)  # of random training prompts
    assert [row["target"] for row in drawn] == [row["target"] for row in rows]
    assert [row["query"] for row in drawn] != [row["query"] for row in rows]
    assert all(row["chat_template"] is True for row in drawn)


@pytest.mark.parametrize("family", SPECIAL)
def test_a_players_prompt_is_what_the_template_makes_of_its_conversation(family):
    tokenizer = chat_tokenizer(family)
    chat = ChatTemplate(tokenizer, "m")
    if family == "headers":
        tokenizer.chat_template = tokenizer.chat_template.replace("strftime_now('%d %b %Y')", f"'{DAY}'")
    for length in range(4):
        shown = chat.play_prompt(GAME, HISTORY[:length], "art", 5, templates=OWN_PROMPTS, rng=None)
        said = conversation(HISTORY[:length], 5, OWN_PROMPTS)
        if family == "turns":  # which has no system messages
            system, first, *rest = said
            said = [{"role": "user", "content": system["content"] + "\n\n" + first["content"]}, *rest]
        assert shown == tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        assert shown.count(tokenizer.bos_token) == (family != "chatml")  # one BOS where the template writes it


def test_play_shows_chat_prompts_and_its_settings_refuse_another_template(tmp_path, monkeypatch):
    tokenizer, encode, asked = chat_tokenizer("headers"), LocalModel.encode, []
    for part in (build_llama(0, len(tokenizer)), tokenizer):
        part.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(LocalModel, "encode", lambda model, prompt: asked.append(prompt) or encode(model, prompt))
    play(tmp_path / "model", tmp_path)
    (game,) = read_json_or_jsonl(tmp_path / "out" / "m_testing_w_results.json")
    chat, short = ChatTemplate(tokenizer, "m"), prompts.load_templates(PROMPTS, GAME)
    before = [game["history"][:place] for place in range(len(game["history"]))]
    assert asked == [chat.play_prompt(GAME, each, "piano", 2, templates=short, rng=None) for each in before]
    errors = play(tmp_path / "model", tmp_path, chat_template=False, status=2).errors
    assert "chat_template: True then, False now" in errors
    (tmp_path / "model" / "chat_template.jinja").open("a").write("\n")
    assert "defender_model_name_or_path: " in play(tmp_path / "model", tmp_path, status=2).errors


def test_play_and_rewards_refuse_a_tokenizer_without_a_template(tiny_model, tmp_path):
    assert "has no chat template" in play(tiny_model, tmp_path, status=2).errors
    (tmp_path / "games.json").write_text("[]", encoding="utf-8")
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
    templates = OWN_PROMPTS | {"rules": [f"Text {number}.\n" for number in range(8)]}
    by_chat, plain, seen = random.Random(3), random.Random(3), set()
    for _ in range(40):
        drawn = chat.play_prompt(GAME, HISTORY, "art", 5, templates=templates, rng=by_chat)
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
    write_records(tmp_path / "games.json", [{"history": HISTORY, "target_word": "art", "max_turns": 2}])
    _, (*_, first, second) = rewards(tmp_path, tokenizer=tmp_path / "tok", sft_data_path=tmp_path / "sft.json")
    head = "<s><|start_header_id|>user<|end_header_id|>\n\n"
    answer = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert first["query"] == f"{head}Translate.\n\nviolin<|eot_id|>{answer}"
    assert (first["target"], first["type"]) == ("violon<|eot_id|>", "sft")
    assert second["query"] == f"{head}Name one.<|eot_id|>{answer}"
    encoded = encode_example(first, tokenizer)
    assert encoded["is_sft"] and tokenizer.decode(encoded["input_ids"]) == first["query"] + first["target"]
    settings = json.loads((tmp_path / "rows_rewards_settings.json").read_text(encoding="utf-8"))["settings"]
    assert settings["chat_template"] is True and re.fullmatch("[0-9a-f]{64}", settings["tokenizer"]["sha256"])
    assert layout_of(tmp_path / "rows.json")["chat_template"] == settings["tokenizer"]["sha256"]


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
    row = chat.row({"query": "", "target": " Coats.\n"})
    assert row["target"] == target
    assert target.endswith(chat.tokenizer.decode([chat.end_id]))


def test_a_system_message_that_a_template_leaves_out_goes_to_the_user_and_thinking_is_off():
    shown = LINES.replace("in messages", "in messages if m.role != 'system'").replace("END", "'</s>'") + ANSWER
    chat = ChatTemplate(chat_tokenizer("chatml", shown), "m")
    prompt = chat.play_prompt(GAME, HISTORY, "art", 5, templates=OWN_PROMPTS, rng=None)
    assert "user: " + prompts.rule_text(OWN_PROMPTS, 5) in prompt
    assert prompt.endswith("assistant: <none>")


def test_a_template_that_leaves_out_messages_is_refused():
    with pytest.raises(UserError, match="^m: its chat template leaves out messages"):
        ChatTemplate(chat_tokenizer("chatml", "{{ messages[-1].content }}"), "m")


def test_a_template_that_begins_replies_with_thinking_is_refused_unless_the_thinking_is_closed():
    thinking = LINES.replace("END", "'</s>'") + ANSWER.replace("<none>", "<think>\n")
    with pytest.raises(UserError, match="^m: .*<think>.*--chat_template"):
        ChatTemplate(chat_tokenizer("chatml", thinking), "m")
    ChatTemplate(chat_tokenizer("chatml", thinking.replace("<think>", "<think></think>")), "m")


def test_a_template_without_any_end_token_is_refused():
    tokenizer = chat_tokenizer("chatml", LINES.replace("END", "'\n'"))
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="^m: no token ends a reply"):
        ChatTemplate(tokenizer, "m")


def test_messages_in_a_row_are_joined_and_a_template_that_still_refuses_is_named():
    turns = (TEMPLATES / "turns.jinja").read_text(encoding="utf-8")  # in which roles must alternate
    strict = "{% if add_generation_prompt and messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    chat = ChatTemplate(chat_tokenizer("turns", turns + strict), "m")

    def shown(*roles):
        history = [{"role": role, "content": f"Said {place}."} for place, role in enumerate(roles)]
        return chat.join_play_prompt(history, "attacker", "Rules.", "Go.")

    assert "Said 0.\nSaid 1.<end_of_turn>" in shown("defender", "defender")
    assert "Said 0.\nSaid 1.<end_of_turn>" in shown("attacker", "attacker", "defender")
    with pytest.raises(UserError, match="^m: .*--chat_template"):
        shown("defender", "attacker")


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


def test_sft_rows_that_are_in_a_chat_template_already_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat_tokenizer("chatml").save_pretrained("model")
    told = {"query": "<|im_start|>user\nA bird?<|im_end|>\n<|im_start|>assistant\n", "target": "No.<|im_end|>"}
    write_records("sft.json", [told | {"chat_template": True}, {"query": "A bird?", "target": "No."}])
    write_records("games.json", [])
    flags = {"input_data_path": "games.json", "output_data_path": "rows.json", "sft_data_path": "sft.json"}
    flags |= {"tokenizer": "model", "chat_template": True, "min_game_rows": 0}
    call(assign_rewards.main, *flags_of(flags))
    rows = read_json_or_jsonl("rows.json")
    assert [{name: row[name] for name in told} for row in rows] == [told, told]
    assert all(row["chat_template"] is True and row["type"] == "sft" for row in rows)


def test_the_tokenizer_of_a_commit_on_the_hub_is_asked_for_by_name_and_revision(monkeypatch):
    asked = []
    monkeypatch.setattr(tools.games.chat, "ChatTemplate", lambda tokenizer, name: name)
    monkeypatch.setattr(
        tools.games.chat.AutoTokenizer, "from_pretrained", lambda name, revision, **how: asked.append((name, revision))
    )
    assert tools.games.chat.load_chat_template("org/name@0123abc") == "org/name@0123abc"
    tools.games.chat.load_chat_template("org/name")
    assert asked == [("org/name", "0123abc"), ("org/name", "main")]
