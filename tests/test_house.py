"""The house: which room may import which, read from the import statements."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
from helpers import ROOT, finish, start

# A room may import those before it. "spag" is the page of pieces. Nothing imports lab and examples.
ROOMS = "common, games, players, engine, selfplay, measure, programs spag, loop, lab examples"
HEIGHT = {room: floor for floor, rooms in enumerate(ROOMS.split(", ")) for room in rooms.split()}
TRAINING = {"train", "arguments", "dataloaders", "trainers"}
TAKES_LOSSES = {"spag"}  # pieces for people
STARTS_ALL = {"run_spag", "quickstart"}  # programs that run the others
TAKES_PARSER = {"settings", "check"}  # the loop: the flags of train.py, and what it refuses


def room_of(module: str) -> str | None:
    """The room of one of our modules, None for modules of others."""
    first, *rest = module.split(".")
    if first != "tools":
        return first if first in TRAINING | {"utils"} else None
    return rest[0] if rest and (rest[0] in HEIGHT or (ROOT / "tools" / rest[0]).is_dir()) else "programs"


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def may_import(path: Path, own: str, other: str) -> bool:
    if path.stem in STARTS_ALL:
        return other not in ("lab", "examples")
    if own == "utils" or other == "utils":  # names for scripts of others
        return own == "utils" and other == "common"
    if own in TRAINING:
        return other in TRAINING | {"common"}
    if other in TRAINING:
        return path.stem in TAKES_LOSSES | TAKES_PARSER
    return HEIGHT[other] < HEIGHT[own]


@pytest.mark.parametrize("path", sorted([*ROOT.glob("*.py"), *ROOT.glob("tools/**/*.py")]), ids=lambda path: path.stem)
def test_imports_go_one_way_and_programs_do_not_import_each_other(path):
    own = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    others = {module: room_of(module) for module in imports(path)}
    wrong = [module for module, room in others.items() if room and not may_import(path, own, room)]
    assert all(others[module] == own != "programs" for module in wrong), wrong


@pytest.mark.parametrize("room", ["lab", "examples"])
def test_nothing_outside_lab_and_examples_imports_them(room):
    """Neither by an import nor as "tools.examples.module:Class". So no other file depends on them."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("tools/**/*.py")]
    others = [path for path in files if not path.is_relative_to(ROOT / "tools" / room)]
    assert len(others) < len(files)
    by_name = re.compile(rf"tools\.{room}\.\w+:")
    for path in others:
        assert not {module for module in imports(path) if f"{module}.".startswith(f"tools.{room}.")}, path
        assert not by_name.search(path.read_text(encoding="utf-8")), path


def test_no_room_is_called_like_a_package_or_a_program():
    """`python tools/x.py` puts tools/ first on the import path."""
    rooms = {path.parent.name for path in ROOT.glob("tools/*/*.py")}
    assert not rooms & {path.stem for path in ROOT.glob("tools/*.py")}
    assert [room for room in sorted(rooms) if importlib.util.find_spec(room)] == []


REQUIREMENT = re.compile(r"^(# )?([\w-]+)[><=]", re.MULTILINE)
# What the product uses without an import of its own: as a plugin, as a file, or as a program.
NOT_IMPORTED = {"tensorboard", "textblob", "wandb", "lm-eval"}


def test_requirements_name_what_the_product_imports():
    """Lines in comments are optional packages."""
    product = [*ROOT.glob("*.py"), *ROOT.glob("tools/**/*.py")]
    modules = {module.partition(".")[0] for path in product for module in imports(path)}
    ours = {path.stem for path in ROOT.glob("*.py")} | {"tools"}
    distributions = importlib.metadata.packages_distributions()
    imported = {distributions.get(module, [module])[0].lower() for module in modules - ours - sys.stdlib_module_names}
    named = {name.lower() for _, name in REQUIREMENT.findall((ROOT / "requirements.txt").read_text())}
    assert imported - named == set() and named - imported <= NOT_IMPORTED


def test_neither_a_test_nor_what_it_starts_sees_a_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    show = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert finish(start([sys.executable, "-c", show])) == "''\n"
