"""Prompts and replies in a tokenizer's chat template, the same in play and training. Needs transformers, no torch.

The texts include all special tokens: BOS, if the template writes it, and the token that ends a reply.
"""

import hashlib
from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tools.common.errors import UserError, user_errors
from tools.common.models import chat_text, token_ids, without
from tools.games import prompts
from tools.games.game import History
from tools.games.prompts import ASSISTANT, SYSTEM, USER, chat_messages

EMPTY = "..."  # replaces empty messages in templates that reject them
SPEAKERS = (SYSTEM, USER, ASSISTANT, USER, ASSISTANT)
SAMPLE = [{"role": role, "content": f"Text {number} of {role}"} for number, role in enumerate(SPEAKERS)]


def end_of_reply(tokenizer, ids: Sequence[int]) -> int | None:
    """The index of the token that ends a reply among those that a template writes after it: the first added token.

    Whitespace is skipped, because GPT-NeoX and Gemma have added tokens for it, and replies would stop at their first
    empty line.
    """
    added = tokenizer.added_tokens_decoder
    return next((n for n, token in enumerate(ids) if token in added and not str(added[token]).isspace()), None)


class ChatTemplate:
    """A tokenizer's chat template. `end_id` is the token that ends a reply; `name` is the model's, for errors.

    What the template writes around a reply is found by rendering SAMPLE, because tokenizers do not declare it. With
    `thinking` the template asks for thoughts; if it opens the thought itself, the opening tag is part of the prompt.
    UserError if there is no template, if it drops a message, or if replies begin with other text, such as a channel
    name or, without `thinking`, a thought.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str, thinking: bool = False):
        self.tokenizer = tokenizer
        self.name = name
        self.thinking = thinking
        self.sha256 = hashlib.sha256(self._template().encode()).hexdigest()
        self.has_system = self._shows_system_messages()
        system, *talk = SAMPLE
        *before, answer = talk
        # Mistral's templates put the system message into the last user message.
        with_system = self._render([system, talk[0]])
        prompt = self._render(before)
        conversation = self._render(talk, reply_follows=False)
        self._check_it_shows(system, talk[0], text=with_system)
        self._check_it_shows(*before, text=prompt)
        self._check_it_shows(*talk, text=conversation)
        before_answer, _, after_answer = conversation.rpartition(answer["content"])
        # A target is target_start + message + target_end, and ends with the token `end_id`.
        self.target_start = self._target_start(prompt, before_answer)
        self.end_id = self._ending_token(after_answer)
        self.target_end = self._target_end(after_answer)

    def _template(self) -> str:
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.name}: its tokenizer has no chat template; omit --chat_template")
        with user_errors(self.name, ValueError):  # several templates without a default
            return self.tokenizer.get_chat_template()

    def _shows_system_messages(self) -> bool:
        system, user, *_ = SAMPLE
        try:
            return system["content"] in self._apply([system, user])
        except TemplateError:  # some templates reject system messages
            return False

    def _check_it_shows(self, *messages: dict[str, str], text: str) -> None:
        if not all(message["content"] in text for message in messages):
            raise UserError(f"{self.name}: its chat template drops messages; omit --chat_template")

    def _target_start(self, prompt: str, before_answer: str) -> str:
        """What precedes the message in a target without a thought; usually empty.

        It is what the template writes between prompt and answer, such as an empty thought, or the closing tag if the
        prompt opens a thought. UserError for text that the other player would read.
        """
        written = before_answer.removeprefix(prompt) if before_answer.startswith(prompt) else ""
        shown = str(self.tokenizer.decode(self._ids(written), skip_special_tokens=True))
        if without(prompts.ALL_THOUGHT_TAGS, shown).strip():  # as in gpt-oss, whose replies name their channels
            raise UserError(f"{self.name}: its replies begin with {written!r}, which the other player would read")
        opened = next((tag for tag in prompts.THOUGHT_TAGS if prompt.rstrip().endswith(tag)), None)
        if opened is None:
            return written
        if not self.thinking:  # the whole reply would be the message, so the other player would read the thought
            raise UserError(f"{self.name}: its template begins replies with {opened}; omit --chat_template")
        return f"\n{prompts.THOUGHT_TAGS[opened]}\n\n"

    def _ending_token(self, after_answer: str) -> int:
        """The token that ends a reply. In many chat models it differs from the tokenizer's EOS."""
        ids = self._ids(after_answer)
        end = end_of_reply(self.tokenizer, ids)
        return self.tokenizer.eos_token_id if end is None else ids[end]

    def _target_end(self, after_answer: str) -> str:
        """What the template writes after an answer, up to and including the token that ends a reply."""
        end_token = str(self.tokenizer.convert_ids_to_tokens(self.end_id))
        before_end, found, _ = after_answer.partition(end_token)
        return before_end + end_token if found else end_token

    def _ids(self, text: str) -> list[int]:
        return token_ids(self.tokenizer, [text])[0]

    def join_play_prompt(self, history: History, role: str, rules: str, request: str) -> str:
        """Play's prompt, up to where the reply begins."""
        return self._render(chat_messages(history, role, rules, request))

    def row(self, row: dict) -> dict:
        """The row with all special tokens in its texts, marked by `chat_template`. Marked rows are returned unchanged.

        Queries of game rows are already rendered; those of SFT rows are rendered here. A target with a `thought` is
        exactly what the model wrote, so only the end token is added.
        """
        if row.get("chat_template"):
            return row
        query = row["query"]
        if row.get("type") == "sft":
            query = self._render([{"role": USER, "content": query}])
        if row.get("thought"):
            target = row["target"] + self.tokenizer.decode([self.end_id])
        else:
            target = self.target_start + row["target"].strip() + self.target_end
        return row | {"query": query, "target": target, "chat_template": True}

    def _render(self, messages: list[dict[str, str]], *, reply_follows: bool = True) -> str:
        """Render messages. Without system messages in the template, their text goes into the first user message.

        If the template rejects empty messages, all messages are stripped, and empty ones become EMPTY.
        """
        if not self.has_system and messages[0]["role"] == SYSTEM:
            system, first, *rest = messages
            messages = [{"role": USER, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
        try:
            return self._apply(messages, reply_follows=reply_follows)
        except TemplateError as error:
            if all(message["content"].strip() for message in messages):
                line = f"{self.name}: its chat template rejects the game ({error}); omit --chat_template"
                raise UserError(line) from None
        filled = [message | {"content": message["content"].strip() or EMPTY} for message in messages]
        return self._render(filled, reply_follows=reply_follows)

    def _apply(self, messages: list[dict[str, str]], *, reply_follows: bool = True) -> str:
        options = {"add_generation_prompt": reply_follows, "enable_thinking": self.thinking}
        return chat_text(self.tokenizer, messages, **options)
