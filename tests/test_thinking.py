"""Private reasoning: what the other player reads, what is stored, and the rows. Servers: test_server_player.py."""

import asyncio

import pytest
from conftest import build_llama, build_tokenizer, load_chat_template
from helpers import call, flags_of, play_flags, write_place
from scripted import messages
from transformers import AutoTokenizer

from dataloaders import encode_example
from tools import assign_rewards, play_llm_game
from tools.common.errors import UserError
from tools.common.files import read_json, read_json_or_jsonl
from tools.engine.local import Codec
from tools.games.chat import ChatTemplate
from tools.games.taboo import Taboo
from tools.players.player import LENGTH, STOP, Reply, Sampling, ScriptedPlayer, split_thought
from tools.selfplay.episodes import summary
from tools.selfplay.play import play_game

GAME = Taboo()
# Special tokens, of which the last one ends a reply; tags of thoughts that are tokens; whether these are special.
FAMILIES = {
    "opens_thought": (["<|User|>", "<|Assistant|>", "<|end|>"], ["<think>", "</think>"], True),
    "empty_thought": (["<|im_start|>", "<|im_end|>"], ["<think>", "</think>"], False),
    "strips_thoughts": (["<|im_start|>", "<|im_end|>"], [], False),
}
OPENED = "opens_thought"  # whose prompts end in <think>
THOUGHTS = ["It is art. \n</think>", "Could it be art, or pai", "Silent.</think> So?</think>", "Art it is.</think>"]
MESSAGES = ["\n\nWhat hangs in a museum? ", "", "And on its walls?\n", "  I know the word! It is `art`!"]


def thinking_tokenizer(family: str):
    """The tests' tokenizer with the tokens and the template of a family."""
    special, tags, tags_are_special = FAMILIES[family]
    tokenizer = build_tokenizer(*special, chat_template=load_chat_template(family))
    tokenizer.add_tokens(tags, special_tokens=tags_are_special)
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_game_of_a_thinking_template_and_its_rows(family, tmp_path, monkeypatch):
    """Replies go through the engine; before they are decoded, those of the script take their place."""
    place, model, tokenizer = write_place(tmp_path, ["art"]), tmp_path / "model", thinking_tokenizer(family)
    tokenizer.save_pretrained(model)
    build_llama(0, len(tokenizer)).save_pretrained(model)
    opening = "" if family == OPENED else "<think>\n"
    thoughts = [opening + thought for thought in THOUGHTS]
    prompts, replies, decode, encode = [], [], Codec.decode, Codec.encode

    def scripted_decode(tokens, ids, **known):
        number = len(replies)
        written = tokens.tokenizer(thoughts[number] + MESSAGES[number], add_special_tokens=False)["input_ids"]
        replies.append([*written, tokens.chat.end_id])
        return decode(tokens, replies[-1][: -1 if number == 1 else None], **known)  # the second reply is cut

    def noted_encode(tokens, prompt):
        prompts.append(encode(tokens, prompt)[0])
        return encode(tokens, prompt)

    monkeypatch.setattr(Codec, "decode", scripted_decode)
    monkeypatch.setattr(Codec, "encode", noted_encode)
    how = {"max_turns": 2, "max_new_tokens": 64, "max_length": 1024, "model_prefix": "m"}
    call(play_llm_game.main, *play_flags(place, model, place, thinking=True, chat_template=True, **how))
    results = place / "m_sampling_words_results.json"
    (game,) = read_json(results)
    assert (game["outcome"], game["length"]) == ("defender wins", 4)
    assert [message["content"] for message in game["history"]] == [message.strip() for message in MESSAGES]
    assert [reply["thought"] for reply in game["replies"]] == thoughts
    assert [reply["text"] for reply in game["replies"]] == MESSAGES
    assert [reply["finish_reason"] for reply in game["replies"]] == [STOP, LENGTH, STOP, STOP]
    counts = read_json(place / "m_sampling_words_summary.json")
    assert (counts["thoughts"], counts["cut_thoughts"], counts["empty_replies"]) == (4, 1, 1)

    flags = {"input_data_path": results, "output_data_path": place / "rows.json", "messages": "all", "thinking": True}
    flags |= {"training_prompt": "play", "prompt_templates": place / "prompts.json", "chat_template": True}
    call(assign_rewards.main, *flags_of(flags | {"tokenizer": model}))
    rows = read_json_or_jsonl(place / "rows.json")
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = FAMILIES[family][0][-1]
    for row, prompt, reply, thought, message in zip(rows, prompts, replies, thoughts, MESSAGES, strict=True):
        assert row["target"] == thought + message + end and row["thought"] is True
        assert row["query"].endswith("<think>\n") == (family == OPENED)
        assert encode_example(row, tokenizer)["input_ids"] == prompt + reply


def test_rows_of_thoughts_need_the_prompts_of_play():
    words = ("--input_data_path", "games", "--output_data_path", "rows", "--thinking", "True")
    assert "--thinking True needs --training_prompt play" in call(assign_rewards.main, *words, status=2).errors


def test_special_tokens_are_left_out_and_an_unfinished_second_thought_is_private_too():
    tokens = Codec(thinking_tokenizer(OPENED), Sampling(thinking=True))
    ids = tokens.tokenizer("Hm.</think>A<|User|>B")["input_ids"]
    reply = Reply("AB", LENGTH, len(ids), prompt_cut=True, thought="Hm.</think>")
    assert tokens.decode(ids, prompt_cut=True) == reply
    assert split_thought("a</think>b<think>c") == ("a</think>b<think>c", "")
    assert split_thought("a") == ("a", "") and split_thought("a", needs_tag=True) == ("", "a")
    assert split_thought("[THINK]a[/THINK] b") == ("[THINK]a[/THINK]", " b")


@pytest.mark.parametrize(
    "family, lead", [(OPENED, "\n</think>\n\n"), ("empty_thought", "<think>\n\n</think>\n\n"), ("strips_thoughts", "")]
)
def test_a_row_without_a_thought_has_an_empty_one_where_the_template_opens_or_writes_one(family, lead):
    chat = ChatTemplate(thinking_tokenizer(family), "m", thinking=True)
    row = chat.row({"query": "Hi.", "target": " Hello. ", "type": "sft"})
    assert row["target"] == f"{lead}Hello.{FAMILIES[family][0][-1]}"


def test_enable_thinking_follows_the_flag_and_without_it_a_template_that_opens_a_thought_is_refused():
    history = messages(GAME, "One.", "Two.")
    for family in ("empty_thought", "strips_thoughts"):
        prompts = [
            ChatTemplate(thinking_tokenizer(family), "m", thinking).join_play_prompt(history, "attacker", "R.", "Go.")
            for thinking in (True, False)
        ]
        assert ["</think>" in prompt for prompt in prompts] == [False, True]
    with pytest.raises(UserError, match="begins replies with <think>; omit --chat_template"):
        ChatTemplate(thinking_tokenizer(OPENED), "m")


@pytest.mark.parametrize("thinking, outcome", [(True, "defender wins"), (False, "attacker breaks the rules")])
def test_a_thought_that_names_the_word_is_no_breach(thinking, outcome):
    lines = ["<think>My word is art.</think> A picture?", "I know the word! It is `art`!"]
    players = dict.fromkeys(GAME.roles, ScriptedPlayer(lambda turn: lines[len(turn.history)], thinking))
    game = asyncio.run(play_game(GAME, "art", players, max_turns=2))
    assert game["outcome"] == outcome
    assert [reply.get("thought") for reply in game["replies"]][:1] == [lines[0][:-11] if thinking else None]
    assert ("thoughts" in summary(GAME, [game])) == thinking
