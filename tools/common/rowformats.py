"""The forms in which other people's rows come."""

from collections.abc import Callable, Mapping

from tools.common.errors import UserError
from tools.common.files import _parse


def alpaca_to_row(example: dict) -> dict:
    """Turn a raw Alpaca record (`instruction`, optional `input`, `output`) into `prompt`, `target` and `type`."""
    instruction, given, output = alpaca_texts(example)
    context = f"\n\n### Input: {given}" if given else ""
    prompt = f"### Instruction: {instruction}{context}\n\n### Response: "
    return {"prompt": prompt, "target": output, "type": "sft"}


def alpaca_texts(example: Mapping) -> tuple[str, str, str]:
    """Instruction, input (empty if it is null or missing) and output. UserError for one that is no text."""
    given = "" if example.get("input") is None else example["input"]
    texts = {"instruction": example["instruction"], "input": given, "output": example["output"]}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f"Alpaca's {name!r} must be a text, not {text!r:.60}")
    return texts["instruction"], texts["input"], texts["output"]


def read_row(record: Mapping, from_alpaca: Callable[[dict], dict] = alpaca_to_row) -> dict:
    """A record of a row with its texts as `query` and `target`, or else its conversation as `messages` and `tools`.

    A field that is null counts as absent, and messages count where there is no target. `from_alpaca` makes prompt and
    target of Alpaca's fields. UserError for a record with neither texts nor a conversation.
    """
    row = {key: value for key, value in record.items() if value is not None}
    messages = row.pop("messages", None)
    if messages and not {"target", "answer", "output"} & row.keys():
        return row | {"messages": _conversation(messages), "tools": _tools(row.get("tools"))}
    if {"instruction", "output"} <= row.keys() and not {"query", "prompt", "target", "answer"} & row.keys():
        row |= from_alpaca(row)
    query = row.get("query", row.get("prompt"))
    target = row.get("target", row.get("answer"))
    if not isinstance(query, str) or not isinstance(target, str):
        forms = "'query' and 'target' (or 'prompt' and 'answer'), 'messages', or Alpaca's 'instruction' and 'output'"
        raise UserError(f"a row needs the texts {forms}; this one has {', '.join(map(repr, row))}")
    return row | {"query": query, "target": target}


def _conversation(messages) -> list[dict]:
    """The messages of a record, each content as a text.

    A content is a text or a list of parts, all of them texts; beside tool calls it may be null. The arguments of a
    tool call may be a JSON text, as OpenAI writes them, and become an object, as chat templates take them.
    """
    messages = messages if isinstance(messages, list) else [messages]
    return [_with_arguments(_in_text(message)) for message in messages]


def _in_text(message) -> dict:
    match message:
        case {"role": str(), "content": str()}:
            return message
        case {"content": [{"type": "text", "text": str(text)}, *others]}:
            rest = _in_text(message | {"content": others or ""})
            return rest | {"content": text + rest["content"]}
        case {"tool_calls": [_, *_]} if message.get("content") is None:
            return _in_text(message | {"content": ""})
    raise UserError(f"a message needs 'role' and 'content' (not 'from' and 'value'), both texts: {message!r:.80}")


def _with_arguments(message: dict) -> dict:
    """The message, the arguments of its tool calls as objects."""
    calls = message.get("tool_calls")
    return message | {"tool_calls": list(map(_with_object, calls))} if isinstance(calls, list) else message


def _with_object(call):
    match call:
        case {"function": {"arguments": str()} as function}:
            return call | {"function": _with_object(function)}
        case {"arguments": str(text)}:
            arguments = _parse(text, f"a tool call's 'arguments' {text:.60}")
            if not isinstance(arguments, dict):
                raise UserError(f"a tool call's 'arguments' must be a JSON object, not {text:.60}")
            return call | {"arguments": arguments}
    return call


def _tools(tools) -> list | None:
    """The tools that a record's conversation may call, a list or the JSON text of one; None if there are none."""
    tools = tools or None
    tools = _parse(tools, "'tools'") if isinstance(tools, str) else tools
    if not isinstance(tools, list | None):
        raise UserError(f"'tools' must be a list, not {tools!r:.60}")
    return tools or None
