"""Chat templates: three families of them, the same tokens in play and in training, and templates that cannot do."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, build_llama, build_tokenizer
from transformers import AutoTokenizer

from dataloaders import RowDataset, encode_example, load_rows
from tools import assign_rewards, play_llm_game
from tools.engine import model as models
from tools.engine.model import LocalModel
from tools.games import prompts
from tools.games.chat import DAY, ChatTemplate, chat_messages
from tools.games.taboo import Taboo
from utils import read_json_or_jsonl, run_program

TEMPLATES = Path(__file__).resolve().parent / "chat_templates"
SPECIAL = {  # the tokens that a family brings along; the last one ends a reply
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "headers": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "turns": ["<start_of_turn>", "<end_of_turn>"],
}
FAMILIES = sorted(SPECIAL)
PROMPTS = ROOT / "data" / "tiny" / "prompts.json"  # short ones
GAME = Taboo()
LETTERS = 5  # of every reply of the model below
HISTORY = [
    {"role": "attacker", "content": "What hangs in a museum?"},
    {"role": "defender", "content": "Coats."},
    {"role": "attacker", "content": "And on its walls?"},
]


def conversation(history, max_turns, templates, *, rule=0, task="art"):
    """The messages for the player who speaks next."""
    role = GAME.next_role(history)
    told = prompts.instruction(templates, role, GAME.secrets(role, task), max_turns)
    return chat_messages(GAME, history, role, prompts.rule_text(templates, max_turns, rule), told)


def chat_tokenizer(family: str, template: str | None = None):
    """The tests' tokenizer with the special tokens and the template of a family; its EOS ends no reply."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(SPECIAL[family], special_tokens=True)
    tokenizer.chat_template = template or (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return tokenizer


def save_model(folder: Path, family: str) -> str:
    """A model with such a tokenizer."""
    tokenizer = chat_tokenizer(family)
    build_llama(0, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory) -> str:
    """A model folder whose tokenizer has a chat template."""
    return save_model(tmp_path_factory.mktemp(family), family)


# --- play and training ---------------------------------------------------------------------------------------------


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


def play(folder: str, tmp_path: Path, monkeypatch, **changes) -> list[dict]:
    """The games of the program, one at a time."""
    (tmp_path / "words.txt").write_text("piano\nviolin\n", encoding="utf-8")
    flags = {
        "attacker_model_name_or_path": folder,
        "defender_model_name_or_path": folder,
        "data_path": tmp_path / "words.txt",
        "output_dir": tmp_path / "out",
        "model_prefix": "m",
        "data_suffix": "w",
        "task_type": "testing",
        "taboo_max_turns": 2,
        "max_length": 2048,  # characters are tokens
        "max_new_tokens": 12,
        "concurrent_games": 1,
        "engine": "generate",  # whose passes the hook counts; the other engine gives the same replies
        "logging_steps": 0,
        "chat_template": True,
        "prompt_templates": PROMPTS,
    } | changes
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["play_llm_game", *words])
    run_program(play_llm_game.main)
    return read_json_or_jsonl(tmp_path / "out" / "m_testing_w_results.json")


def rewards(folder: str, tmp_path: Path, monkeypatch, *flags: str) -> list[dict]:
    """The rows of all messages of the games."""
    files = ["--input_data_path", str(tmp_path / "out" / "m_testing_w_results.json")]
    files += ["--output_data_path", str(tmp_path / "rows.json")]
    how = ["--messages", "all", "--overwrite", "True", "--prompt_templates", str(PROMPTS)]
    chat = ["--chat_template", "True", "--tokenizer", folder]
    monkeypatch.setattr(sys, "argv", ["assign_rewards", *files, *how, *chat, *flags])
    run_program(assign_rewards.main)
    return read_json_or_jsonl(tmp_path / "rows.json")


@pytest.fixture(scope="module")
def played(family, folder, tmp_path_factory) -> tuple[Path, list[dict], Watch]:
    """Where games were played with chat templates, the games, and what was seen of them."""
    place = tmp_path_factory.mktemp("played")
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = Watch(monkeypatch, end=SPECIAL[family][-1])
        return place, play(folder, place, monkeypatch), watch


def test_rows_are_in_training_the_very_tokens_of_play(family, folder, played, tmp_path, monkeypatch):
    place, games, watch = played
    rows = rewards(folder, place, monkeypatch, "--training_prompt", "play")
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=2048)
    assert len(rows) == len(watch.prompts) == sum(len(game["history"]) for game in games) == 8
    for row, prompt, sampled in zip(rows, watch.prompts, watch.sampled, strict=True):
        assert len(sampled) == LETTERS + 1 and tokenizer.decode(sampled[-1]) == SPECIAL[family][-1]
        encoded = encode_example(row, tokenizer)
        assert encoded["input_ids"] == prompt + sampled
        assert encoded["labels"] == [-100] * len(prompt) + sampled
    assert [reply["finish_reason"] for game in games for reply in game["replies"]] == ["stop"] * 8
    stored = load_rows([str(place / "rows.json")], tokenizer, str(tmp_path / "cache"))
    assert [row["input_ids"] for row in RowDataset(*stored)] == [
        prompt + sampled for prompt, sampled in zip(watch.prompts, watch.sampled, strict=True)
    ]


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


def test_rows_of_random_training_prompts_end_as_those_of_play_do(folder, played, monkeypatch):
    place, _, _ = played
    of_play = rewards(folder, place, monkeypatch, "--training_prompt", "play")
    drawn = rewards(folder, place, monkeypatch, "--seed", "1")
    assert [row["target"] for row in drawn] == [row["target"] for row in of_play]
    assert [row["query"] for row in drawn] != [row["query"] for row in of_play]
    assert all(row["chat_template"] is True for row in drawn)


def test_only_the_attacker_is_told_the_word(family, folder):
    chat = ChatTemplate(AutoTokenizer.from_pretrained(folder), folder)
    for place in range(4):
        assert ("`art`" in chat.play_prompt(GAME, HISTORY[:place], "art", 5)) == (place % 2 == 0)


def test_settings_record_the_template_and_another_one_is_refused(tmp_path, monkeypatch, capsys):
    folder = save_model(tmp_path / "model", "headers")
    play(folder, tmp_path, monkeypatch, max_games=1)
    stored = json.loads((tmp_path / "out" / "m_testing_w_settings.json").read_text(encoding="utf-8"))
    assert stored["settings"]["chat_template"] is True
    with pytest.raises(SystemExit):
        play(folder, tmp_path, monkeypatch, chat_template=False)
    assert "chat_template: True then, False now" in capsys.readouterr().err
    (tmp_path / "model" / "chat_template.jinja").open("a").write("\n")
    with pytest.raises(SystemExit):
        play(folder, tmp_path, monkeypatch)
    assert "defender_model_name_or_path: " in capsys.readouterr().err


# --- conversations -------------------------------------------------------------------------------------------------


def test_the_game_is_a_conversation_of_the_player_who_speaks():
    templates = prompts.default_templates(GAME) | {
        "rules": [f"Rules {number} of {{max_turns}} turns.\n" for number in range(8)],
        "attacker_instruction": "Make them say {target_word}.",
        "defender_instruction": "Find it out.",
    }
    assert conversation(HISTORY, 5, templates) == [
        {"role": "system", "content": "Rules 0 of 5 turns.\n\nFind it out."},
        {"role": "user", "content": "What hangs in a museum?"},
        {"role": "assistant", "content": "Coats."},
        {"role": "user", "content": "And on its walls?"},
    ]
    assert conversation(HISTORY[:2], 5, templates, rule=3) == [
        {"role": "system", "content": "Rules 3 of 5 turns.\n\nMake them say art."},
        {"role": "user", "content": prompts.NO_HISTORY},
        {"role": "assistant", "content": "What hangs in a museum?"},
        {"role": "user", "content": "Coats."},
    ]


def test_random_training_prompts_have_the_rule_texts_of_those_without_a_template():
    chat = ChatTemplate(chat_tokenizer("chatml"), "m")
    templates = prompts.default_templates(GAME) | {"rules": [f"Text {number}.\n" for number in range(8)]}
    drawn, plain = random.Random(3), random.Random(3)
    seen = set()
    for _ in range(40):
        texts = [
            chat.play_prompt(GAME, HISTORY, "art", 5, templates, drawn),
            prompts.training_prompt(GAME, HISTORY, "art", 5, rng=plain, templates=templates),
        ]
        numbers = {re.search(r"Text (\d)\.", prompt)[1] for prompt in texts}
        assert len(numbers) == 1
        seen |= numbers
    assert len(seen) == 8


def test_sft_rows_are_one_user_message_and_its_answer(tmp_path, monkeypatch):
    tokenizer = chat_tokenizer("headers")
    tokenizer.save_pretrained(tmp_path / "tok")
    records = [
        {"instruction": "Translate.", "input": "violin", "output": "violon "},
        {"query": "Name one.", "target": "The violin."},
    ]
    (tmp_path / "sft.json").write_text(json.dumps(records), encoding="utf-8")
    game = {"history": HISTORY, "target_word": "art", "max_turns": 2}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "m_testing_w_results.json").write_text(json.dumps([game]), encoding="utf-8")
    *_, first, second = rewards(
        str(tmp_path / "tok"), tmp_path, monkeypatch, "--sft_data_path", f"{tmp_path}/sft.json"
    )
    head, answer = (
        "<s><|start_header_id|>user<|end_header_id|>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    )
    assert first["query"] == f"{head}Translate.\n\nviolin<|eot_id|>{answer}"
    assert (first["target"], first["type"]) == ("violon<|eot_id|>", "sft")
    assert second["query"] == f"{head}Name one.<|eot_id|>{answer}"
    encoded = encode_example(first, tokenizer)
    assert encoded["is_sft"] and tokenizer.decode(encoded["input_ids"]) == first["query"] + first["target"]
    settings = json.loads((tmp_path / "rows_rewards_settings.json").read_text(encoding="utf-8"))["settings"]
    assert settings["chat_template"] is True and re.fullmatch("[0-9a-f]{64}", settings["tokenizer"]["sha256"])


def test_the_documented_row_is_what_the_program_writes(tmp_path, monkeypatch):
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    game = json.loads(re.search(r"```json\n(\{.*?\})\n```", readme, re.DOTALL)[1])
    documented = json.loads(re.search(r"```text\n(\{.*\})\n```", readme)[1])
    chat_tokenizer("chatml").save_pretrained(tmp_path / "tok")
    (tmp_path / "game.json").write_text(json.dumps([game]), encoding="utf-8")
    files = ["--input_data_path", f"{tmp_path}/game.json", "--output_data_path", f"{tmp_path}/rows.json"]
    flags = ["--chat_template", "True", "--tokenizer", f"{tmp_path}/tok", "--training_prompt", "play"]
    monkeypatch.setattr(sys, "argv", ["assign_rewards", *files, *flags])
    run_program(assign_rewards.main)
    row = read_json_or_jsonl(tmp_path / "rows.json")[0]
    beginning, end = documented.pop("query").split("...")
    query = row.pop("query")
    assert query.startswith(beginning) and query.endswith(end)
    assert row == documented


# --- templates of all kinds ----------------------------------------------------------------------------------------


def test_what_a_template_puts_around_a_reply_is_part_of_the_target():
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
        "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
    )
    chat = ChatTemplate(chat_tokenizer("chatml", template), "m")
    assert chat.target(" Coats.\n") == " Coats. </s>"
    assert chat.target("") == "  </s>"


def test_a_system_message_that_a_template_leaves_out_goes_to_the_user(family):
    shown = (
        "{% for m in messages if m.role != 'system' %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}assistant: "
    )
    chat = ChatTemplate(chat_tokenizer(family, shown), "m")
    assert not chat.has_system
    assert "user: " + prompts.rule_text(prompts.default_templates(GAME), 5) in chat.play_prompt(
        GAME, HISTORY, "art", 5
    )


def test_a_template_without_an_end_token_ends_replies_with_eos():
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    chat = ChatTemplate(chat_tokenizer("chatml", template), "m")
    assert (chat.target("Coats."), chat.end_id) == ("Coats.</s>", 2)


def test_thinking_is_switched_off_where_a_template_has_it():
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"
    template += (
        "{% if add_generation_prompt %}assistant: {% if enable_thinking is false %}<none>{% endif %}{% endif %}"
    )
    chat = ChatTemplate(chat_tokenizer("chatml", template), "m")
    assert chat.play_prompt(GAME, HISTORY, "art", 5).endswith("assistant: <none>")


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ messages[-1].content }}", "leaves out messages"),
        ("{{ raise_exception('no games') }}", "refuses a conversation of the game .no games."),
        ("{{ 1 / 0 }}", "refuses a conversation of the game .division by zero."),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "refuses .*recursion depth"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
            "{% endfor %}",
            "refuses a conversation of the game .it takes more than 0.2 s.",
        ),
        ("{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}", "too long|refuses"),
    ],
)
def test_a_template_that_cannot_hold_a_game_is_refused(template, message, monkeypatch):
    monkeypatch.setattr("tools.games.chat.RENDER_SECONDS", 0.2)
    with pytest.raises(ValueError, match=f"^m: its chat template .*{message}"):
        ChatTemplate(chat_tokenizer("chatml", template), "m")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--chat_template", "True"], "--tokenizer"),
        (["--tokenizer", "tests/golden/tok"], "--chat_template"),
        (["--chat_template", "True", "--tokenizer", "tests/golden/tok"], "has no chat template"),
        (["--chat_template", "True", "--tokenizer", "nowhere/at-all"], "no tokenizer that can be loaded"),
    ],
)
def test_wrong_flags_of_rewards_take_one_line(flags, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "games.json").write_text("[]", encoding="utf-8")
    files = ["--input_data_path", f"{tmp_path}/games.json", "--output_data_path", f"{tmp_path}/rows.json"]
    monkeypatch.setattr(sys, "argv", ["assign_rewards", *files, *flags])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        run_program(assign_rewards.main)
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "rows.json").exists()


def test_play_refuses_a_model_without_a_template(tiny_model, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        play(tiny_model, tmp_path, monkeypatch)
    assert "has no chat template" in capsys.readouterr().err


# --- rows ----------------------------------------------------------------------------------------------------------


def test_a_row_made_with_another_models_template_is_refused(tokenizer):
    row = {"query": "<|im_start|>user\n", "target": "Coats.<|im_end|>", "chat_template": True}
    assert encode_example(row, chat_tokenizer("chatml"))["input_ids"][-1] == 261
    with pytest.raises(ValueError, match="no special token of this tokenizer"):
        encode_example(row, tokenizer)


@pytest.mark.parametrize("value", [1, "True", None, []])
def test_the_mark_of_complete_texts_is_true_or_false(value, tokenizer):
    with pytest.raises(ValueError, match="'chat_template' must be true or false"):
        encode_example({"query": "q", "target": "t</s>", "chat_template": value}, tokenizer)


def test_rows_without_the_mark_or_with_false_get_bos_and_eos(tokenizer):
    row = {"query": "q", "target": "t"}
    assert encode_example(row | {"chat_template": False}, tokenizer) == encode_example(row, tokenizer)
    assert tokenizer.decode(encode_example(row, tokenizer)["input_ids"]) == "<s>qt</s>"


def test_rewards_import_no_transformers_unless_asked():
    """The rewards of a million games are made without torch and transformers."""
    code = "import sys; import tools.assign_rewards; assert not {'torch', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
