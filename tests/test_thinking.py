"""Private reasoning: what the other player reads, what is stored, and the rows, for engines, servers and scripts."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from conftest import build_llama, build_tokenizer
from helpers import call, flags_of, play_flags, write_place
from transformers import AutoTokenizer

from dataloaders import encode_example
from tools import assign_rewards, play_llm_game
from tools.engine.local import ModelTokens
from tools.games.chat import ChatTemplate
from tools.games.taboo import Taboo
from tools.players.player import LENGTH, STOP, Reply, ReplyUnavailable, Sampling, ScriptedPlayer, Turn, split_thought
from tools.players.server import ServerFlags, ServerPlayer
from tools.selfplay.episodes import summary
from tools.selfplay.play import play_game
from utils import UserError, read_json, read_json_or_jsonl

GAME = Taboo()
TEMPLATES = Path(__file__).resolve().parent / "chat_templates"
# Special tokens, of which the last one ends a reply; tags of thoughts that are tokens; whether these are special.
FAMILIES = {
    "opens_thought": (["<|User|>", "<|Assistant|>", "<|end|>"], ["<think>", "</think>"], True),
    "empty_thought": (["<|im_start|>", "<|im_end|>"], ["<think>", "</think>"], False),
    "strips_thoughts": (["<|im_start|>", "<|im_end|>"], [], False),
}
OPENED = "opens_thought"  # whose prompts end in <think>
THOUGHTS = ["It is art. \n</think>", "Could it be art, or pai", "Silent.</think> So?</think>", "Art it is.</think>"]
MESSAGES = ["\n\nWhat hangs in a museum? ", "", "And on its walls?\n", "  I know the word! It is `art`!"]
THINKING = {"thinking": True, "max_turns": 2, "max_new_tokens": 64, "max_length": 1024, "model_prefix": "m"}


def thinking_tokenizer(family: str):
    """The tests' tokenizer with the tokens and the template of a family."""
    special, tags, tags_are_special = FAMILIES[family]
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens(tags, special_tokens=tags_are_special)
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models, by family."""
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        tokenizer = thinking_tokenizer(family)
        tokenizer.save_pretrained(folder)
        build_llama(0, len(tokenizer)).save_pretrained(folder)
    return folders


@pytest.fixture
def place(tmp_path):
    return write_place(tmp_path, ["art"])


def rows_of(place: Path, games: Path, status: int = 0, **changes) -> list[dict]:
    """The rows of all messages of these games."""
    flags = {"input_data_path": games, "output_data_path": place / "rows.json", "messages": "all", "thinking": True}
    flags |= {"training_prompt": "play", "prompt_templates": place / "prompts.json"}
    called = call(assign_rewards.main, *flags_of(flags | changes), status=status)
    return called.errors if status else read_json_or_jsonl(place / "rows.json")


def check_game(game: dict, thoughts: list[str], messages: list[str]) -> None:
    """The game as it is stored: no history holds a thought, thought and text are exactly what was written."""
    assert (game["outcome"], game["length"]) == ("defender wins", 4)
    assert [message["content"] for message in game["history"]] == [message.strip() for message in messages]
    assert [reply["thought"] for reply in game["replies"]] == thoughts
    assert [reply["text"] for reply in game["replies"]] == messages


# Engines and rows.


@pytest.mark.parametrize("engine", ["slots", "generate"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_game_of_a_thinking_template_and_its_rows(family, engine, models, place, monkeypatch):
    """Replies go through the engine; before they are decoded, those of the script take their place."""
    opening = "" if family == OPENED else "<think>\n"
    thoughts = [opening + thought for thought in THOUGHTS]
    prompts, replies, decode = [], [], ModelTokens.decode
    encode = ModelTokens.encode

    def scripted_decode(tokens, ids, prompt_cut):
        number = len(replies)
        written = tokens.tokenizer(thoughts[number] + MESSAGES[number], add_special_tokens=False)["input_ids"]
        replies.append([*written, tokens.chat.end_id])
        return decode(tokens, replies[-1][: -1 if number == 1 else None], prompt_cut)  # the second reply is cut

    def noted_encode(tokens, prompt):
        prompts.append(encode(tokens, prompt)[0])
        return encode(tokens, prompt)

    monkeypatch.setattr(ModelTokens, "decode", scripted_decode)
    monkeypatch.setattr(ModelTokens, "encode", noted_encode)
    flags = play_flags(place, models[family], place, engine=engine, chat_template=True, **THINKING)
    called = call(play_llm_game.main, *flags)
    assert "--max_new_tokens 64 leaves little room for thoughts" in called.errors
    results = place / "m_sampling_words_results.json"
    (game,) = read_json(results)
    check_game(game, thoughts, MESSAGES)
    assert [reply["finish_reason"] for reply in game["replies"]] == [STOP, LENGTH, STOP, STOP]
    counts = read_json(place / "m_sampling_words_summary.json")
    assert (counts["thoughts"], counts["cut_thoughts"], counts["empty_replies"]) == (4, 1, 1)

    rows = rows_of(place, results, chat_template=True, tokenizer=models[family])
    tokenizer = AutoTokenizer.from_pretrained(models[family])
    end = FAMILIES[family][0][-1]
    for row, prompt, reply, thought, message in zip(rows, prompts, replies, thoughts, MESSAGES, strict=True):
        assert row["target"] == thought + message + end and row["thought"] is True
        assert row["query"].endswith("<think>\n") == (family == OPENED)
        assert encode_example(row, tokenizer)["input_ids"] == prompt + reply


def test_rows_of_thoughts_need_the_prompts_of_play(place):
    assert "--thinking True needs --training_prompt play" in rows_of(place, place, 2, training_prompt="random")


def test_special_tokens_are_left_out_and_an_unfinished_second_thought_is_private_too():
    tokens = ModelTokens(thinking_tokenizer(OPENED), Sampling())
    tokens.thinking = True
    ids = tokens.tokenizer("Hm.</think>A<|User|>B")["input_ids"]
    assert tokens.decode(ids, False) == Reply("AB", LENGTH, len(ids), thought="Hm.</think>")
    assert split_thought("a</think>b<think>c") == ("a</think>b<think>c", "")
    assert split_thought("a") == ("a", "") and split_thought("a", needs_tag=True) == ("", "a")
    assert split_thought("[THINK]a[/THINK] b") == ("[THINK]a[/THINK]", " b")


# Templates.


@pytest.mark.parametrize(
    "family, lead", [(OPENED, "\n</think>\n\n"), ("empty_thought", "<think>\n\n</think>\n\n"), ("strips_thoughts", "")]
)
def test_a_row_without_a_thought_has_an_empty_one_where_the_template_opens_or_writes_one(family, lead):
    chat = ChatTemplate(thinking_tokenizer(family), "m", thinking=True)
    row = chat.row({"query": "Hi.", "target": " Hello. ", "type": "sft"})
    assert row["target"] == f"{lead}Hello.{FAMILIES[family][0][-1]}"


def test_enable_thinking_follows_the_flag_and_without_it_a_template_that_opens_a_thought_is_refused():
    history = [{"role": "attacker", "content": "One."}, {"role": "defender", "content": "Two."}]
    for family in ("empty_thought", "strips_thoughts"):
        prompts = [
            ChatTemplate(thinking_tokenizer(family), "m", thinking).join_play_prompt(history, "attacker", "R.", "Go.")
            for thinking in (True, False)
        ]
        assert ["</think>" in prompt for prompt in prompts] == [False, True]
    with pytest.raises(UserError, match="begins replies with <think>; leave out --chat_template"):
        ChatTemplate(thinking_tokenizer(OPENED), "m")


# Scripts and servers.


@pytest.mark.parametrize("thinking, outcome", [(True, "defender wins"), (False, "attacker breaks the rules")])
def test_a_thought_that_names_the_word_is_no_breach(thinking, outcome):
    lines = ["<think>My word is art.</think> A picture?", "I know the word! It is `art`!"]
    players = dict.fromkeys(GAME.roles, ScriptedPlayer(lambda turn: lines[len(turn.history)], thinking))
    game = asyncio.run(play_game(GAME, "art", players, max_turns=2))
    assert game["outcome"] == outcome
    assert [reply.get("thought") for reply in game["replies"]][:1] == [lines[0][:-11] if thinking else None]
    assert ("thoughts" in summary(GAME, [game])) == thinking


@pytest.fixture
def stub(monkeypatch):
    """Makes stub servers that end with the test."""
    pytest.importorskip("openai", reason="players behind a server need the package openai")
    from test_server_player import Stub

    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with contextlib.ExitStack() as stack:
        yield lambda behave: stack.enter_context(contextlib.closing(Stub(behave)))


def test_a_game_through_a_server_and_its_rows(stub, place):
    from test_server_player import MODEL, answer

    def behave(number, body):  # the first two come as reasoning_content, the others in tags
        if number < 2:
            reasoning = THOUGHTS[number].removesuffix("</think>")
            return 200, {}, answer(MESSAGES[number], ("stop", "length")[number], reasoning_content=reasoning)
        return 200, {}, answer(THOUGHTS[number] + MESSAGES[number])

    flags = play_flags(place, MODEL, place, openai_base_url=stub(behave).url, openai_api="chat", **THINKING)
    call(play_llm_game.main, *flags)
    (game,) = read_json(place / "m_sampling_words_results.json")
    thoughts = [f"<think>{thought}" if number < 2 else thought for number, thought in enumerate(THOUGHTS)]
    check_game(game, thoughts, MESSAGES)
    assert read_json(place / "m_sampling_words_summary.json")["cut_thoughts"] == 1
    rows = rows_of(place, place / "m_sampling_words_results.json")
    assert [row["target"] for row in rows] == [t + message for t, message in zip(thoughts, MESSAGES, strict=True)]


def test_a_servers_thought_without_a_message_is_an_empty_message_and_no_reply_at_all_loses_the_game(stub):
    from test_server_player import answer

    def ask(content, **message) -> Reply:
        server = stub(lambda *_: (200, {}, answer(content, "length", **message)))
        flags = ServerFlags(openai_base_url=server.url, openai_api="chat")
        player = ServerPlayer("m", flags, Sampling(max_new_tokens=8), thinking=True)
        return asyncio.run(player.reply(Turn(GAME, "attacker", (), 3, 0, {"target_word": "art"})))

    assert ask(None, reasoning_content="Hm") == Reply("", LENGTH, 5, thought="<think>Hm")
    assert ask("Hm") == Reply("", LENGTH, 5, thought="Hm")
    assert ask("I know.</think> " + "word " * 99).text == " word" * 6  # 8 words with those of the thought
    with pytest.raises(ReplyUnavailable, match="the reply is empty"):
        ask(None)
