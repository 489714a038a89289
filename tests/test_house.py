"""The house: which room may import which, read from the import statements."""

import ast
import importlib.util
from pathlib import Path

import pytest
from helpers import ROOT

# A room may import those before it. "flags" is tools/flags.py, "spag" the page of pieces, "programs" all others.
FLOORS = [
    "utils",
    "games",
    "flags",
    "players",
    "engine",
    "selfplay",
    "matches",
    "pages tiny study",
    "programs spag",
]
HEIGHT = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}
ALONE = {"reasoning": {"utils"}, "loop": {"utils", "games"}}  # all that these may import
TRAINING = {"train", "arguments", "dataloaders", "trainers"}
TAKES_LOSSES = {"spag", "figure"}  # pieces for people, and the picture of the loss
SOURCES = sorted([*ROOT.glob("*.py"), *ROOT.glob("tools/**/*.py")])


def room_of(module: str) -> str | None:
    """The room of one of our modules, None for modules of others."""
    first, *rest = module.split(".")
    if first != "tools":
        return first if first in TRAINING | {"utils"} else None
    if rest and (rest[0] in HEIGHT or (ROOT / "tools" / rest[0]).is_dir()):
        return rest[0]
    return "programs"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def may_import(path: Path, own: str, other: str) -> bool:
    if own == "utils" or own in TRAINING:
        return other in TRAINING | {"utils"}  # the training side imports nothing of tools/
    if own in ALONE:
        return other in ALONE[own]
    if other in TRAINING:
        return path.stem in TAKES_LOSSES  # else tools/ imports only utils of the training side
    if other in ALONE:
        return own == "programs" or other == "reasoning" and own in ("study", "tiny")
    return HEIGHT[other] < HEIGHT[own]


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_go_one_way(path):
    own = room_of(module_of(path))
    others = {module: room_of(module) for module in imports(path)}
    wrong = [module for module, room in others.items() if room and room != own and not may_import(path, own, room)]
    assert not wrong


def test_programs_do_not_import_each_other():
    for path in ROOT.glob("tools/*.py"):
        assert "programs" not in {room_of(module) for module in imports(path) if module.startswith("tools.")}, path


def test_no_room_is_called_like_a_package_or_a_program():
    """`python tools/x.py` puts tools/ first on the import path."""
    rooms = {path.parent.name for path in ROOT.glob("tools/*/*.py")}
    assert not rooms & {path.stem for path in ROOT.glob("tools/*.py")}
    assert [room for room in sorted(rooms) if importlib.util.find_spec(room)] == []


def test_games_import_no_torch():
    for path in ROOT.glob("tools/games/*.py"):
        assert not {module.split(".")[0] for module in imports(path)} & {"torch", "numpy", "datasets"}, path
