"""Files made once, out of others: each with a file beside it that tells what it was made of."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.selfplay.rows import refuse_overwriting
from utils import file_sha256, flag, write_json


@dataclass(kw_only=True)
class OutputFile:
    """The file that a command makes."""

    output: str = flag("file to write; X_source.json beside X.EXT tells what it was made of")

    @property
    def source_path(self) -> Path:
        """The file that tells what the output was made of."""
        return Path(self.output).with_name(f"{Path(self.output).stem}_source.json")

    def check(self, *inputs: str, more: Iterable[str] = ()) -> None:
        """Raise ValueError if the output, or one more of its files, would be written over an input."""
        refuse_overwriting(inputs, [self.output, self.source_path, *more])

    def write_source(self, source: str, *inputs: str, settings: dict, counts: dict, **more) -> None:
        """Write down what the output was made of, and print it; the output must be there."""
        record = {
            "made_by": f"tools.prepare_data {type(self).__name__.lower()}",
            "source": source,
            "settings": settings,
            "counts": counts,
            "inputs": [{"file": path, "sha256": file_sha256(path)} for path in inputs],
            "output": {"file": Path(self.output).name, "sha256": file_sha256(self.output)},
            **more,
        }
        write_json(self.source_path, record)
        print(json.dumps(record, ensure_ascii=False))
