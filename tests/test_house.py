"""The house: which room may import which, read off the import statements."""

import ast
import importlib.util
from pathlib import Path

import pytest
from conftest import ROOT

FLOORS = ["utils", "flags", "games", "players", "engine", "selfplay", "matches", "pages tiny", "programs", "bench"]
HEIGHT = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}
ALONE = {"reasoning": {"utils"}, "loop": {"utils", "games"}}  # what these may import
TRAINING = {"train", "arguments", "dataloaders", "trainers"}
SOURCES = [*ROOT.glob("*.py"), *ROOT.glob("tools/**/*.py")]


def room_of(module: str) -> str | None:
    """The room of one of our modules, None for a library. "programs" are the files of tools/ but flags and bench."""
    first, *rest = module.split(".")
    if first != "tools":
        return first if first in TRAINING or first == "utils" else None
    if rest and (rest[0] in ("flags", "bench") or (ROOT / "tools" / rest[0]).is_dir()):
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


def arrows():
    for path in SOURCES:
        own = room_of(module_of(path))
        for module in sorted(imports(path)):
            other = room_of(module)
            if other and not (own == other and own != "programs"):
                yield pytest.param(own, other, id=f"{module_of(path)}->{module}")


@pytest.mark.parametrize("own, other", arrows())
def test_imports_go_one_way(own, other):
    if own in TRAINING or own == "utils":
        assert other in TRAINING | {"utils"}, "the training side imports nothing of tools/"
    elif own in ALONE:
        assert other in ALONE[own]
    elif other in TRAINING:
        assert own == "bench", "tools/ imports only utils of the training side"
    elif other in ALONE:
        assert own in ("programs", "bench")
    else:
        assert HEIGHT[other] < HEIGHT[own], f"{own} stands below {other}" if own != other else "programs import rooms"


def test_every_room_is_on_a_floor():
    rooms = {path.parent.name for path in ROOT.glob("tools/*/*.py")}
    assert rooms <= HEIGHT.keys() | ALONE.keys()


def test_no_room_is_called_like_a_package_or_a_program():
    """`python tools/x.py` puts tools/ on the import path."""
    rooms = {path.parent.name for path in ROOT.glob("tools/*/*.py")}
    assert not rooms & {path.stem for path in ROOT.glob("tools/*.py")}
    assert [room for room in sorted(rooms) if importlib.util.find_spec(room)] == []


def test_games_know_no_torch():
    for path in ROOT.glob("tools/games/*.py"):
        heavy = {module.split(".")[0] for module in imports(path)} & {"torch", "numpy", "datasets"}
        assert not heavy, path
