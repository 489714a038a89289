"""requirements.txt: lean, with the optional parts as comments that the tests' requirements hold."""

import re

from conftest import ROOT

OPTIONAL = re.compile(r"# (?P<name>[\w-]+)(?P<bounds>[<>=][^ ]*) +# (?P<purpose>\S.*)")


def optional_parts() -> dict[str, str]:
    """Bounds by name, of the lines below "Optional"."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    lines = text.partition("# Optional")[2].splitlines()[1:]
    parts = [OPTIONAL.fullmatch(line) for line in lines]
    assert lines and all(parts), f"not '# NAME>=BOUNDS  # purpose': {lines}"
    return {part["name"]: part["bounds"] for part in parts}


def test_optional_parts_are_comments_of_one_line_with_their_purpose():
    assert {"peft", "matplotlib", "wandb"} <= set(optional_parts())


def test_the_tests_install_every_optional_part_within_the_same_bounds():
    lines = (ROOT / "tests" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    missing = {name + bounds for name, bounds in optional_parts().items()} - set(lines)
    assert not missing
