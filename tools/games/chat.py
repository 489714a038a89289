"""Prompts and replies in a tokenizer's own chat template, for instruct models. No torch.

Play and training see the same texts. These are complete: they hold BOS, if the template writes it, and the token that
ends a reply.
"""

import hashlib
from random import Random

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tools.games import prompts
from tools.games.game import Game, History
from tools.games.prompts import Templates
from utils import UserError, alpaca_to_row, split_revision

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
DAY = "26 Jul 2024"  # what templates that tell the date are given, so that prompts do not change from day to day
FIXED_DAY = f"{{%- macro strftime_now(format) -%}}{DAY}{{%- endmacro -%}}"
TRIAL = [
    {"role": role, "content": f"Trial{role}{i}"} for i, role in enumerate((SYSTEM, USER, ASSISTANT, USER, ASSISTANT))
]


def chat_messages(history: History, role: str, rules: str, told: str) -> list[dict[str, str]]:
    """The game as a conversation of the player in this role, who is the assistant.

    The system message holds the rules and the player's instruction (`told`); the other player is the user. If this
    player opens the game, a first user message says that it has begun. Messages of one player in a row are joined.
    """
    messages = [{"role": SYSTEM, "content": f"{rules}\n{told}"}]
    if not history or history[0]["role"] == role:
        messages.append({"role": USER, "content": prompts.NO_HISTORY})
    for message in history:
        speaker = ASSISTANT if message["role"] == role else USER
        if messages[-1]["role"] == speaker:  # many templates insist that user and assistant alternate
            messages[-1]["content"] += f"\n{message['content']}"
        else:
            messages.append({"role": speaker, "content": message["content"]})
    return messages


class ChatTemplate:
    """The chat template of a tokenizer. `end_id` is the token that ends a reply; errors call the model `name`.

    Raises UserError if the tokenizer has no template, or if the template leaves out messages, begins replies with
    thinking, or ends them without a special token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str):
        self.tokenizer, self.name = tokenizer, name
        try:
            template = tokenizer.get_chat_template()
        except ValueError:
            raise UserError(f"{name}: its tokenizer has no chat template; leave out --chat_template") from None
        self.sha256 = hashlib.sha256(template.encode()).hexdigest()
        self.template = (FIXED_DAY if "strftime_now" in template else "") + template
        self.has_system = True  # _render below reads it
        try:
            self.has_system = TRIAL[0]["content"] in self._render(TRIAL[:2])
        except TemplateError:  # the template refuses system messages
            self.has_system = False
        whole = self._render(TRIAL, reply_follows=False)
        if missing := [each["content"] for each in TRIAL if each["content"] not in whole]:
            raise UserError(f"{name}: its chat template leaves out messages (of a trial, {', '.join(missing)})")
        # `lead` and `end` are what the template writes around a reply: the rendered text with the last reply, less the
        # prompt for that reply.
        before, _, after = whole.rpartition(TRIAL[-1]["content"])
        prompt = self._render(TRIAL[:-1])
        if prompt.rstrip().endswith("<think>"):  # thinking would be part of the message that the other player reads
            raise UserError(f"{name}: its chat template begins each reply with <think>; leave out --chat_template")
        self.lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
        tokens = {*tokenizer.all_special_tokens, *map(str, tokenizer.added_tokens_decoder.values())} - {""}
        found = [(after.index(token), -len(token), token) for token in tokens if token in after]
        # The first special token after the reply ends it; where several begin at one place, the longest.
        place, _, end = min(found, default=(0, 0, tokenizer.eos_token))
        if end is None:
            raise UserError(f"{name}: no token ends a reply in its chat template; leave out --chat_template")
        self.end, self.end_id = after[:place] + end, tokenizer.convert_tokens_to_ids(end)

    def play_prompt(
        self, game: Game, history: History, task: str, max_turns: float, *, templates: Templates, rng: Random | None
    ) -> str:
        """The prompt of play, up to where the reply begins. With `rng`, a rule text is drawn.

        Then all draws of `prompts.training_prompt` are made, and only that of the rule text is used.
        """
        role = game.next_role(task, history)
        rule = prompts.draw_layout(game, role, rng, len(templates[prompts.RULES])).rule if rng else 0
        told = prompts.instruction(templates, role, game.secrets(role, task, history), max_turns)
        return self.join_play_prompt(history, role, prompts.rule_text(templates, max_turns, rule), told)

    def join_play_prompt(self, history: History, role: str, rules: str, told: str) -> str:
        """A play prompt from the messages so far, the rule text and the player's instruction."""
        try:
            return self._render(chat_messages(history, role, rules, told))
        except TemplateError as error:
            raise UserError(
                f"{self.name}: its chat template refuses the game ({error}); leave out --chat_template"
            ) from None

    @staticmethod
    def alpaca_to_turn(example: dict) -> dict:
        """A raw Alpaca record as `utils.alpaca_to_row` gives it, but with the prompt that a user would send."""
        row = alpaca_to_row(example)
        return row | {"prompt": "\n\n".join(filter(None, (example["instruction"], example.get("input"))))}

    def row(self, row: dict) -> dict:
        """A row with complete texts. The query of a game row is complete already; that of an SFT row is rendered.

        A row with `chat_template` has been through this and stays as it is.
        """
        if row.get("chat_template"):
            return row
        query = row["query"]
        if row.get("type") == "sft":
            query = self._render([{"role": USER, "content": query}])
        target = f"{self.lead}{row['target'].strip()}{self.end}"
        return row | {"query": query, "target": target, "chat_template": True}

    def _render(self, messages: list[dict[str, str]], *, reply_follows: bool = True) -> str:
        if not self.has_system and messages[0]["role"] == SYSTEM:  # its text goes into the first user message
            system, first, *rest = messages
            messages = [{"role": USER, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
        return self.tokenizer.apply_chat_template(
            messages,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=reply_follows,
            enable_thinking=False,  # a player's message is its whole reply
            date_string=DAY,
        )


def load_chat_template(name: str) -> ChatTemplate:
    """The chat template of a tokenizer, given as a folder, a name on the hub, or NAME@REVISION."""
    repository, revision = split_revision(name)
    tokenizer = AutoTokenizer.from_pretrained(repository, revision=revision or "main", trust_remote_code=False)
    return ChatTemplate(tokenizer, name)
