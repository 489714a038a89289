"""The records beside rows and episodes: in which layout texts are, and which tokenizer token ids belong to."""

from collections.abc import Sequence
from pathlib import Path

from utils import UserError, read_json

TOKENIZER = "tokenizer_sha256"  # in a record: the fingerprint of the tokenizer of stored token ids


def record_of(rows_path: str | Path) -> Path:
    """The record of how a file of rows was made: X_rewards_settings.json beside X.json."""
    return Path(rows_path).with_name(f"{Path(rows_path).stem}_rewards_settings.json")


def layout_of(rows_path: str | Path) -> dict[str, str | None] | None:
    """In which layout the rows of a file are, as their record says; None for rows without a record.

    `training_prompt` is "random" or "play". `chat_template`, `prompt_templates` and `tokenizer_sha256` are SHA-256;
    the first is None without a chat template, the last for rows without token ids. Rows that assign_rewards has not
    made have no record. Raises UserError for a damaged one.
    """
    record = record_of(rows_path)
    if not record.is_file():
        return None
    stored = read_json(record)
    try:
        settings = stored["settings"]
        return {
            "training_prompt": settings["training_prompt"],
            "chat_template": (settings["tokenizer"] or {}).get("sha256"),
            "prompt_templates": settings["prompt_templates"]["sha256"],
            TOKENIZER: stored.get(TOKENIZER),
        }
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{record}: not the record of a file of rows; make the rows again") from None


def tokenizer_of(episodes: Sequence[str]) -> str:
    """The fingerprint of the tokenizer whose token ids stand in these files of episodes.

    Play leaves it in STEM_settings.json beside STEM_results.json, by role. Raises UserError if it is not there, or if
    there are several, since a row of ids has to be of the tokenizer that is trained.
    """
    texts_alone = "--retokenize True makes rows of the texts alone"
    found = set()
    for path in map(Path, episodes):
        record = path.with_name(f"{path.stem.removesuffix('_results')}_settings.json")
        stored = read_json(record) if record.is_file() else None
        by_role = stored.get(TOKENIZER) if isinstance(stored, dict) else None
        if not by_role or not isinstance(by_role, dict) or not all(isinstance(sha, str) for sha in by_role.values()):
            raise UserError(
                f"{path}: {record.name} beside it does not name the tokenizer of stored token ids; {texts_alone}"
            )
        found |= set(by_role.values())
    if len(found) > 1:
        raise UserError(f"{', '.join(map(str, episodes))}: token ids of different tokenizers; {texts_alone}")
    return found.pop()
