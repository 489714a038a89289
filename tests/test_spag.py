"""The page of pieces: functions play, games become rows, the loss of a batch has a gradient."""

import asyncio
import copy
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from conftest import build_tokenizer
from helpers import ENVIRONMENT, Fork, finish
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import spag
from tools.common.errors import UserError
from tools.common.files import write_json
from tools.games import load_game
from tools.games.prompts import load_templates


def attacker(turn):
    assert "apple" in turn.prompt() or turn.secrets["target_word"] == "river"
    return "It grows on trees."


async def defender(turn):
    assert turn.secrets == {}
    return "I know the word! It is `apple`!"


@pytest.fixture
def episodes():
    return spag.play(["apple", "river"], attacker, defender)


def test_functions_play_and_their_games_become_rows(episodes):
    assert [spag.judge(episode) for episode in episodes] == [("defender wins", 2), ("attacker wins", 2)]
    rows = spag.rows(episodes)
    assert [(row["role"], row["reward"], row["weight"]) for row in rows] == [("defender", 1, 1), ("attacker", 1, 1)]
    assert "### Response:" in rows[0]["query"] and "apple" not in rows[0]["query"]
    assert spag.rows(episodes, prompt="random", seed=1)[0]["query"] != rows[0]["query"]
    assert len(spag.rows(episodes, game=load_game("taboo"), losers=0.5)) == 4
    with pytest.raises(ValueError, match="'twenty_questions', not of 'taboo'"):
        spag.judge(episodes[0] | {"game": "twenty_questions"})


def test_rows_follow_the_verdict_and_a_warning_counts_the_games_whose_stored_outcome_is_another(episodes, caplog):
    rows = spag.rows(episodes)
    assert not caplog.records
    assert spag.rows([episodes[0] | {"outcome": "tied game"}, episodes[1]]) == rows
    (warning,) = caplog.messages
    assert "1 of 2" in warning and "tied game -> defender wins: 1" in warning


def test_flags_of_play_count_for_functions_too(tmp_path):
    prompts = load_templates(load_game().prompt_file, load_game()) | {"rules": ["Rules of {max_turns} turns.\n"]}
    write_json(tmp_path / "prompts.json", prompts)
    seen = []
    flags = {"prompt_templates": str(tmp_path / "prompts.json"), "game_options": ["match=word"]}
    (episode,) = spag.play(["art"], lambda turn: seen.append(turn.prompt()) or "A start.", defender, **flags)
    assert seen[0].startswith("Rules of 5 turns.")
    assert episode["outcome"] == "attacker wins"  # "art" in "start" breaks no rule by whole words
    with pytest.raises(UserError, match="human needs python -m tools.play_llm_game"):
        spag.play(["art"], "human", defender)
    with pytest.raises(TypeError, match="nonsense"):
        spag.play(["art"], attacker, defender, nonsense=1)
    with pytest.raises(UserError, match="messages is None; it must be "):
        spag.rows([], messages=None)


def test_games_are_played_in_a_notebook_too_where_an_event_loop_runs():
    async def cell():
        return spag.play(["river"], attacker, defender)

    assert [episode["outcome"] for episode in asyncio.run(cell())] == ["attacker wins"]


def test_a_function_answers_all_waiting_games_as_one_batch():
    batches = []

    def hints(turns):
        batches.append(len(turns))
        return [f"A hint for {turn.secrets['target_word']}" if turn.history else "It grows." for turn in turns]

    episodes = spag.play(["apple", "river", "apple"], spag.batched(hints), lambda turn: "Hm?", max_turns=2)
    assert [episode["outcome"] for episode in episodes] == ["attacker breaks the rules"] * 3 and batches == [3, 3]


def test_a_batched_player_plays_on_after_a_play_that_failed_while_it_waited():
    player = spag.batched(lambda turns: ["It grows."] * len(turns))

    async def opens(turn):
        if turn.secrets["target_word"] == "river":
            await asyncio.sleep(0)  # the other game waits for its batch by now
            raise ZeroDivisionError
        return "Hm?"

    async def cell():
        with pytest.raises(ZeroDivisionError):
            await spag.play_async(["apple", "river"], opens, player, max_turns=1)
        return await asyncio.wait_for(spag.play_async(["apple"], opens, player, max_turns=1), timeout=30)

    (episode,) = asyncio.run(cell())
    assert episode["history"][1]["content"] == "It grows."


def test_in_the_caller_s_event_loop_a_player_uses_what_belongs_to_this_loop():
    async def cell():
        message = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, message.set_result, "An apple</s> tree.")

        async def wait(turn):
            return await message

        return await spag.play_async(["apple"], wait, defender, special=["</s>"])

    (episode,) = asyncio.run(cell())
    assert episode["outcome"] == "attacker breaks the rules"
    assert episode["history"][0]["content"] == "An apple tree."


@pytest.mark.parametrize("end", ["</s>", " </s>"])  # the latter as in Llama-2's template
def test_a_transcript_holds_a_game_as_a_trainer_reads_it(tokenizer, end):
    """The template writes each message as <role>text</s>; a byte is a token."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}{{ extra }}"
    )
    transcript = spag.Transcript(tokenizer, extra="")
    chat = [{"role": "system", "content": "R"}, {"role": "user", "content": "Hi"}]
    ids = [
        tokenizer(text)["input_ids"]
        for text in (f"<s>R{end}<u>Hi{end}<a>", "yes</s>", f"<u>@@@{end}<a>", "no", f"{end}<u>x{end}<a>")
    ]
    assert transcript.read(chat) == ids[0]
    transcript.write(ids[1])
    assert transcript.read(
        [*chat, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "@@@"}]
    ) == sum(ids[:3], [])
    transcript.write(ids[3])  # cut off: the end token is what the model reads
    assert transcript.read([{"role": "user", "content": "x"}]) == sum(ids, [])
    assert transcript.prompt_ids == ids[0]
    lengths = [len(part) for part in ids[1:]]
    assert transcript.mask == [1] * lengths[0] + [0] * lengths[1] + [1] * lengths[2] + [0] * lengths[3]


def test_special_texts_include_those_that_no_role_of_the_tokenizer_names():
    tokenizer = build_tokenizer("<|turn|>")
    special = spag.special_texts(tokenizer)
    seen = spag.step("taboo", "apple", [], "It grows<|turn|></s> on trees.", special=special)
    assert seen.history[0]["content"] == "It grows on trees."


def test_a_game_step_by_step():
    seen = spag.step("taboo", "apple", [], " It grows<|im_end|>\n on trees. ", special="<|im_end|>")
    assert seen == spag.step("taboo", "apple", [], " It grows<|im_end|>\n on trees. ", special=["<|im_end|>"])
    assert seen == ([{"role": "attacker", "content": "It grows\n on trees."}], "defender", None, {})
    ended = spag.step("taboo", "apple", seen.history, "I know the word! It is `apple`!")
    assert ended[1:] == (None, "defender wins", {"attacker": 0.0, "defender": 1.0})
    assert ended.history[:1] == seen.history and len(seen.history) == 1  # the input is not changed
    breach = spag.step(load_game("taboo"), "apple", [], "An apple.")
    assert breach[1:] == (None, "attacker breaks the rules", {"attacker": 0.0, "defender": 1.0})
    tie = spag.step("taboo", "apple", seen.history, "Hm.", max_turns=1)
    assert tie[1:] == (None, "tied game", {"attacker": 0.5, "defender": 0.5})


def test_a_step_refuses_what_is_not_a_text_and_a_game_that_is_over():
    for message in (None, 3, b"bytes"):
        with pytest.raises(ValueError, match="must be a string"):
            spag.step("taboo", "apple", [], message)
    ended = spag.step("taboo", "apple", [], "An apple.")
    with pytest.raises(ValueError, match="is over"):
        spag.step("taboo", "apple", ended.history, "Hm.")


@pytest.mark.parametrize("name", ["taboo", "twenty_questions"])
def test_the_chat_of_a_role_only_grows(name):
    game, history = load_game(name), []
    chats = {role: [] for role in game.roles}
    for text in ("Does it live?", "No.", "Is it big?", "", "Is it old?", "Yes."):
        role = game.next_role("river", history)
        chat = spag.chat(game, "river", history)
        assert chat[: len(chats[role])] == chats[role] and len(chat) > len(chats[role])
        assert [message["role"] for message in chat[1:]] == ["user", "assistant"] * (len(chat) // 2 - 1) + ["user"]
        chats[role] = [*chat, {"role": "assistant", "content": text}]
        history = [*history, {"role": role, "content": text}]


def test_a_model_plays_and_a_batch_has_a_loss(episodes, tiny_model):
    (episode,) = spag.play(["apple"], tiny_model, defender, max_turns=1, max_length=2000, max_new_tokens=4)
    assert episode["replies"][0]["tokens"] <= 4 and episode["outcome"] == "defender wins"
    policy, reference = (AutoModelForCausalLM.from_pretrained(tiny_model) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # behind the model's vocabulary
    batch = spag.batch(spag.rows(episodes), tokenizer, vocab_size=policy.config.vocab_size)
    loss, metrics = spag.loss(policy, reference, batch)
    assert float(loss) == pytest.approx(-1)  # ratio 1, KL 0

    def slope(**coefficients) -> float:
        policy.zero_grad()
        spag.loss(policy, reference, batch, **coefficients)[0].backward()
        return policy.lm_head.weight.grad.norm().item()

    detached = slope(detach_kl=True)  # R; otherwise R - beta
    assert [slope() / detached, slope(kl_coeff=0.6) / detached] == pytest.approx([1 - 0.2, 1 - 0.6], rel=1e-4)
    assert all(parameter.grad is None for parameter in reference.parameters())
    assert spag.loss(torch.nn.DataParallel(policy), reference, batch)[0] == loss  # wrapped, as on several GPUs


@pytest.mark.parametrize("engine", ["slots", "generate"])
def test_play_leaves_torch_s_seed_precision_and_attention_of_the_caller_as_they_were(engine, tiny_model):
    how = {"engine": engine, "max_turns": 1, "max_length": 2000, "max_new_tokens": 4}
    texts = []
    try:
        torch.set_float32_matmul_precision("medium")
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.manual_seed(5)
        expected = [torch.randperm(9).tolist() for _ in range(3)]
        torch.manual_seed(5)
        shuffles = [torch.randperm(9).tolist()]
        for _ in range(2):
            (episode,) = spag.play(["apple"], tiny_model, defender, **how)
            texts.append(episode["history"][0]["content"])
            shuffles.append(torch.randperm(9).tolist())
        assert shuffles == expected and texts[0] == texts[1]
        assert torch.get_float32_matmul_precision() == "medium" and torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # the newer way, which the name above does not describe
        spag.play(["apple"], tiny_model, defender, **how)
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_model_that_was_saved_anew_plays_as_it_is_now(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.lm_head.weight.data *= -1

    def hint() -> str:
        options = {"task_type": "testing", "max_turns": 1, "max_length": 2000, "max_new_tokens": 4}
        return spag.play(["apple"], str(tmp_path), defender, **options)[0]["history"][0]["content"]

    before = hint()
    model.save_pretrained(tmp_path)
    assert hint() != before


def test_playing_and_rows_need_no_torch():
    code = "import sys; from tools import spag; e = spag.play(['a'], lambda t: 'Hm.', lambda t: 'So?'); spag.rows(e)"
    code += "; spag.chat('taboo', 'a', spag.step('taboo', 'a', [], 'Hm.').history)"
    code += "; print({'torch', 'transformers', 'jinja2'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], env=ENVIRONMENT, text=True) == "set()\n"


def test_a_script_s_own_utils_py_is_no_obstacle(tiny_model, tmp_path):
    """Python puts the script's folder first on the path, so `import utils` finds the script's."""
    (tmp_path / "utils.py").write_text("NAME = 'mine'\n", encoding="utf-8")
    script = f"""
        import utils
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from tools import spag

        episodes = spag.play(["cat"], lambda turn: "It purrs.", {tiny_model!r}, max_turns=1, max_new_tokens=4)
        rows = spag.rows(episodes, ties=0.5, losers=0.5)
        model, tokenizer = (kind.from_pretrained({tiny_model!r}) for kind in (AutoModelForCausalLM, AutoTokenizer))
        loss, _ = spag.loss(model, model, spag.batch(rows, tokenizer), detach_kl=True)
        print(utils.NAME, spag.judge(episodes[0]).outcome, loss.isfinite().item())
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script), encoding="utf-8")
    printed = finish(Fork([tmp_path / "script.py"], cwd=tmp_path))
    assert printed.splitlines()[-1] == "mine tied game True"


def test_the_epoch_on_the_page_runs_as_it_stands_and_teaches(capsys):
    code = textwrap.dedent("\n".join(line for line in spag.__doc__.splitlines() if line.startswith("    ")))
    names = {}
    exec(compile(code, "spag", "exec"), names)
    assert names["outcomes"] == ["defender wins", "attacker wins"]
    winners = [(row["role"], row["target"]) for row in names["rows"]]
    assert winners == [("defender", "I know the word! It is cat!"), ("attacker", "It purrs.")]
    after, _ = spag.loss(
        names["policy"], names["reference"], spag.batch(names["rows"], names["tokenizer"], max_length=256)
    )
    assert after < names["loss"]
