"""Names for scripts outside this project, which itself does not import this file."""

from tools.common.files import read_json_or_jsonl, read_words
from tools.common.models import model_setting
from tools.common.rowformats import alpaca_to_row

__all__ = ["alpaca_to_row", "model_setting", "read_json_or_jsonl", "read_words"]
