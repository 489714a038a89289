"""The formats of other people's rows, and the kinds of rows."""

from collections.abc import Callable, Mapping

from tools.common.errors import UserError

QUERIES = ("query", "prompt")
TARGETS = ("target", "answer", "completion")  # the last one is TRL's
GAME, SFT = "game", "sft"
KINDS = {GAME: "rows of games", SFT: "SFT rows"}  # what they are called in messages


def alpaca_to_row(example: dict) -> dict:
    """Convert an Alpaca record (`instruction`, optional `input`, `output`) to `prompt`, `target` and `type`."""
    instruction, given, output = alpaca_texts(example)
    context = f"\n\n### Input: {given}" if given else ""
    prompt = f"### Instruction: {instruction}{context}\n\n### Response: "
    return {"prompt": prompt, "target": output, "type": "sft"}


def alpaca_texts(example: Mapping) -> tuple[str, str, str]:
    """Instruction, input (empty if null or missing) and output. UserError for a non-string."""
    given = "" if example.get("input") is None else example["input"]
    texts = {"instruction": example["instruction"], "input": given, "output": example["output"]}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f"Alpaca's {name!r} must be a string, not {text!r:.60}")
    return texts["instruction"], texts["input"], texts["output"]


def read_row(record: Mapping, from_alpaca: Callable[[dict], dict] = alpaca_to_row) -> dict:
    """A record with its texts as `query` and `target`, or with its conversation as `messages`.

    Null fields count as absent. `messages` are used only if there is no target. `from_alpaca` converts Alpaca's fields
    to prompt and target. UserError for a record with neither texts nor a conversation.
    """
    row = {key: value for key, value in record.items() if value is not None}
    messages = row.pop("messages", None)
    beside = [name for name in (*TARGETS, "output") if name in row]
    if messages and not beside:
        if row.get("tools"):
            raise UserError("'tools': conversations with tool calls are not supported")
        messages = messages if isinstance(messages, list) else [messages]
        return row | {"messages": [plain_message(message) for message in messages]}
    if {"instruction", "output"} <= row.keys() and not {*QUERIES, *TARGETS} & row.keys():
        row |= from_alpaca(row)
    query = next((row[name] for name in QUERIES if name in row), None)
    target = next((row[name] for name in TARGETS if name in row), None)
    if isinstance(query, str) and isinstance(target, str):
        return row | {"query": query, "target": target}
    fields = ", ".join(map(repr, row))
    if messages:
        raise UserError(f"'messages' beside {fields}: remove {', '.join(map(repr, beside))} to train on the messages")
    forms = "'query' and 'target' (or 'prompt' and 'answer'), 'messages', or Alpaca's 'instruction' and 'output'"
    raise UserError(f"a row needs the strings {forms}; this one has {fields}")


def row_kind(row: Mapping) -> str:
    """The kind of a row from `read_row`: SFT if its type says so, or if it came as messages or in Alpaca's form."""
    return SFT if "messages" in row or row.get("type") == SFT else GAME


def plain_message(message) -> dict[str, str]:
    """Role and content of a message. A list of text parts is joined.

    UserError for other contents, for tool calls, and for a weight, because only the last reply is trained on.
    """
    match message:
        case {"tool_calls": [_, *_]}:
            raise UserError("a message with 'tool_calls': conversations with tool calls are not supported")
        case {"weight": weight} if weight not in (None, 1):
            raise UserError(f"a message with 'weight' {weight!r:.20}: only the last reply is trained on")
        case {"role": str(role), "content": str(content)}:
            return {"role": role, "content": content}
        case {"role": str(role), "content": [_, *_] as parts} if all(map(is_text_part, parts)):
            return {"role": role, "content": "".join(part["text"] for part in parts)}
    raise UserError(f"a message needs 'role' and 'content' (not 'from' and 'value'), both strings: {message!r:.80}")


def is_text_part(part) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
