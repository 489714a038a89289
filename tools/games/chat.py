"""Prompts through a tokenizer's own chat template, for instruct models: the same texts in play and in training rows.

The texts are complete: BOS, where the template writes it, and the token that ends a reply are in them. No torch.
"""

import hashlib
import random
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tools.games import prompts
from tools.games.game import Game, History
from tools.games.prompts import Templates
from utils import alpaca_to_row, shown

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
PROBES = ("ProbeSystemText", "ProbeFirstText", "ProbeSecondText", "ProbeThirdText")  # look like nothing in a template
PROBE = [{"role": r, "content": text} for r, text in zip((SYSTEM, USER, ASSISTANT, USER), PROBES, strict=True)]
RENDER_SECONDS = 10  # of one prompt, which takes some milliseconds
DAY = "26 Jul 2024"  # for templates that tell the date: a game gives the same prompt on every day
FIXED_DAY = f"{{%- macro strftime_now(format) -%}}{DAY}{{%- endmacro -%}}"
Conversation = Sequence[dict[str, str]]


def chat_messages(game: Game, history: History, role: str, rules: str, told: str) -> list[dict[str, str]]:
    """The game as a conversation, for the player in this role: `role` and `content` of each message.

    System: the rule text, a blank line, the player's instruction. Then the player's own messages are the assistant's,
    the other's the user's. Who opens the game is first told that it has begun, so that user and assistant alternate
    and the user has the last word.
    """
    messages = [{"role": SYSTEM, "content": f"{rules}\n{told}"}]
    if role == game.roles[0]:
        messages.append({"role": USER, "content": prompts.NO_HISTORY})
    for message in history:
        messages.append({"role": ASSISTANT if message["role"] == role else USER, "content": message["content"]})
    return messages


class ChatTemplate:
    """The chat template of a tokenizer: prompts of the game, and targets as the assistant's messages.

    `end_id` is the token that ends a reply. Raises ValueError for a tokenizer without a template, and for a template
    that cannot hold a game; `name` is what to call the model in it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str):
        self.tokenizer, self.name = tokenizer, name
        try:
            template = tokenizer.get_chat_template()
        except ValueError:
            raise ValueError(
                f"{name}: its tokenizer has no chat template; leave out --chat_template, or save one beside it"
            ) from None
        self.sha256 = hashlib.sha256(template.encode()).hexdigest()
        self.template = (FIXED_DAY if "strftime_now" in template else "") + template
        self.has_system = True  # until it is tried
        self.has_system = self._keeps_system()
        self.lead, after = self._frame_of_reply()
        before_end, end = self._end_of_reply(after)
        self.end, self.end_id = before_end + end, tokenizer.convert_tokens_to_ids(end)

    def play_prompt(
        self,
        game: Game,
        history: History,
        task: str,
        max_turns: float,
        templates: Templates | None = None,
        rng: random.Random | None = None,
    ) -> str:
        """The prompt up to where the reply begins: of play or, with `rng`, under a rule text drawn for training.

        It is the one that `prompts.training_prompt` draws; the layout is always the template's.
        """
        templates = templates or prompts.default_templates(game)
        role = game.next_role(history)
        rule = prompts.draw_layout(game, role, rng, len(templates[prompts.RULES])).rule if rng else 0
        told = prompts.instruction(templates, role, game.secrets(role, task), max_turns)
        return self.join_play_prompt(game, history, role, prompts.rule_text(templates, max_turns, rule), told)

    def join_play_prompt(self, game: Game, history: History, role: str, rules: str, told: str) -> str:
        return self._render(chat_messages(game, history, role, rules, told))

    def target(self, text: str) -> str:
        """A reply as the model is to produce it after the prompt: with what the template puts around it."""
        return f"{self.lead}{text.strip()}{self.end}"

    @staticmethod
    def alpaca_to_turn(example: dict) -> dict:
        """A raw Alpaca record as `utils.alpaca_to_row` gives it, but its prompt as a user would send it."""
        row = alpaca_to_row(example)
        return row | {"prompt": "\n\n".join(text for text in (example["instruction"], example.get("input")) if text)}

    def rows(self, rows: Iterable[dict]) -> Iterator[dict]:
        """Rows with complete texts. Game rows have such a query already; an SFT row gets one, as a user's message."""
        for row in rows:
            query = row["query"]
            if row.get("type") == "sft":
                query = self._render([{"role": USER, "content": query}])
            yield row | {"query": query, "target": self.target(row["target"]), "chat_template": True}

    def _render(self, messages: Conversation, *, reply_follows: bool = True) -> str:
        if not self.has_system and messages[0]["role"] == SYSTEM:  # its text goes before that of the first user
            system, first, *rest = messages
            messages = [{"role": USER, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
        try:
            with time_limit(RENDER_SECONDS):
                prompt = self.tokenizer.apply_chat_template(
                    list(messages),
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=reply_follows,
                    enable_thinking=False,  # a message is to be said, not thought about in a part that nobody keeps
                    date_string=DAY,
                )
            return str(prompt)
        except Exception as error:  # a template is a program: it divides by zero, recurses, loops
            why = shown(str(error)) or type(error).__name__
            raise ValueError(f"{self.name}: its chat template refuses a conversation of the game ({why})") from None

    def _keeps_system(self) -> bool:
        """Whether the template takes a system message and shows it: some raise an error, some leave it out."""
        try:
            return PROBES[0] in self._render(PROBE[:2])
        except ValueError:
            return False

    def _frame_of_reply(self) -> tuple[str, str]:
        """What the template writes between the prompt and a reply, and all that it writes after the reply."""
        prompt = self._render(PROBE)
        if missing := [text for text in PROBES if text not in prompt]:
            raise ValueError(f"{self.name}: its chat template leaves out messages ({', '.join(missing)} of a trial)")
        reply = {"role": ASSISTANT, "content": "ProbeReplyText"}
        before, _, after = self._render([*PROBE, reply], reply_follows=False).rpartition(reply["content"])
        return before[len(prompt) :] if before.startswith(prompt) else "", after

    def _end_of_reply(self, after: str) -> tuple[str, str]:
        """The first special token in what follows a reply, and the text before it; EOS where the template has none."""
        tokenizer = self.tokenizer
        special = {*tokenizer.all_special_tokens, *map(str, tokenizer.added_tokens_decoder.values())} - {""}
        found = [(after.index(token), -len(token), token) for token in special if token in after]
        if found:
            place, _, token = min(found)
            return after[:place], token
        if tokenizer.eos_token is None:
            raise ValueError(f"{self.name}: neither its chat template nor its tokenizer has a token that ends a reply")
        return "", tokenizer.eos_token


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError in a block that takes longer; without effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_) -> NoReturn:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def load_chat_template(name: str) -> ChatTemplate:
    """The chat template of a tokenizer by its folder or name on the hub; ValueError if it cannot be had."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself for a broken file
        raise ValueError(f"{name}: no tokenizer that can be loaded ({type(error).__name__})") from None
    return ChatTemplate(tokenizer, name)
