"""Prompts and replies in a tokenizer's own chat template, the same in play and training. Needs transformers, no torch.

The texts are complete: they hold BOS, if the template writes it, and the token that ends a reply.
"""

import hashlib
import re

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tools.games import prompts
from tools.games.game import History
from utils import UserError, chat_text, user_errors

SYSTEM = "system"
USER = "user"
ASSISTANT = "assistant"
EMPTY = "..."  # takes the place of an empty message in templates that refuse one
OPEN_THOUGHT = re.compile(r"((<|\[)(think(?:ing)?>|THINK\]))\s*$")
TAGS = re.compile(r"</?think(ing)?>|\[/?THINK\]")
SAMPLE = [{"role": role, "content": f"A {role}'s text"} for role in (SYSTEM, USER, ASSISTANT)]


def chat_messages(history: History, role: str, rules: str, request: str) -> list[dict[str, str]]:
    """The game as a conversation of the player in this role, who is the assistant; the other player is the user."""
    messages = [{"role": SYSTEM, "content": f"{rules}\n{request}"}]
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

    With `thinking` the template asks for thoughts, and one that it opens itself begins in the prompt. UserError if
    there is no template, if it leaves out a message, if replies begin with a text that the model has to write, or if,
    without `thinking`, with a thought.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str, thinking: bool = False):
        self.tokenizer = tokenizer
        self.name = name
        self.thinking = thinking
        if not tokenizer.chat_template:
            raise UserError(f"{name}: its tokenizer has no chat template; leave out --chat_template")
        with user_errors(name, ValueError):  # several templates, and none of them the default
            template = tokenizer.get_chat_template()
        self.sha256 = hashlib.sha256(template.encode()).hexdigest()
        try:
            self.has_system = SAMPLE[0]["content"] in self._apply(SAMPLE[:2])
        except TemplateError:  # some refuse a system message
            self.has_system = False
        # Mistral's templates show a system message only in the user's last message, so ask for it without a reply.
        with_system = self._render(SAMPLE[:2])
        prompt = self._render(SAMPLE[1:2])
        whole = self._render(SAMPLE[1:], reply_follows=False)
        must_appear = (SAMPLE[0], with_system), (SAMPLE[1], with_system), (SAMPLE[1], whole), (SAMPLE[2], whole)
        if not all(message["content"] in text for message, text in must_appear):
            raise UserError(f"{name}: its chat template leaves out messages; leave out --chat_template")
        before, _, after = whole.rpartition(SAMPLE[-1]["content"])
        self.lead = before.removeprefix(prompt) if before.startswith(prompt) else ""  # what it writes before a reply
        lead_ids = tokenizer(self.lead, add_special_tokens=False)["input_ids"]
        shown = str(tokenizer.decode(lead_ids, skip_special_tokens=True))
        if TAGS.sub("", shown).strip():  # as gpt-oss, whose replies name their channels
            raise UserError(f"{name}: its replies begin with {self.lead!r}, which the other player would read")
        ids = tokenizer(after, add_special_tokens=False)["input_ids"]
        self.end_id = next((token for token in ids if token in tokenizer.added_tokens_decoder), tokenizer.eos_token_id)
        end = str(tokenizer.convert_ids_to_tokens(self.end_id))
        self.end = (after.partition(end)[0] if end in after else "") + end  # and behind it
        if opened := OPEN_THOUGHT.search(prompt):
            if not thinking:  # the other player would read it
                raise UserError(f"{name}: its template begins replies with {opened[1]}; leave out --chat_template")
            self.lead = f"\n{opened[2]}/{opened[3]}\n\n"  # a message without a thought: the thought is empty

    def join_play_prompt(self, history: History, role: str, rules: str, request: str) -> str:
        """The prompt of play, up to where the reply begins."""
        return self._render(chat_messages(history, role, rules, request))

    def row(self, row: dict) -> dict:
        """A row with complete texts. The query of a game row is complete already; that of an SFT row is rendered.

        A target with a thought (`thought`) is exactly what the model wrote and gets only the end token. A row with
        `chat_template` has been through this and stays as it is.
        """
        if row.get("chat_template"):
            return row
        query = row["query"]
        if row.get("type") == "sft":
            query = self._render([{"role": USER, "content": query}])
        target = f"{self.lead}{row['target'].strip()}{self.end}"
        if row.get("thought"):
            target = row["target"] + self.tokenizer.decode([self.end_id])
        return row | {"query": query, "target": target, "chat_template": True}

    def _render(self, messages: list[dict[str, str]], *, reply_follows: bool = True) -> str:
        """The text of these messages. A template without system messages gets their text in the first user message."""
        if not self.has_system and messages[0]["role"] == SYSTEM:
            system, first, *rest = messages
            messages = [{"role": USER, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
        try:
            return self._apply(messages, reply_follows=reply_follows)
        except TemplateError as error:
            if all(message["content"].strip() for message in messages):
                line = f"{self.name}: its chat template refuses the game ({error}); leave out --chat_template"
                raise UserError(line) from None
        filled = [message | {"content": message["content"].strip() or EMPTY} for message in messages]
        return self._render(filled, reply_follows=reply_follows)

    def _apply(self, messages: list[dict[str, str]], *, reply_follows: bool = True) -> str:
        options = {"add_generation_prompt": reply_follows, "enable_thinking": self.thinking}
        return chat_text(self.tokenizer, messages, **options)
