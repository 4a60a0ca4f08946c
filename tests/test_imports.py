"""Rooms import only those to their left, and each outside library has one place that knows it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROOMS = "tables text model stats measure scores prune roles review run cli __main__".split()
CONFIGURING = ("mhaprune.run.config", "mhaprune.run.launch", "mhaprune.run.mistakes")
KNOWN_ONLY_BY = {
    "wandb": ("mhaprune.run.tracking",),
    "hydra": (*CONFIGURING, "experiments"),
    "omegaconf": (*CONFIGURING, "experiments"),
    "datasets": ("mhaprune.text.load",),
    "huggingface_hub": ("mhaprune.text.hub", "mhaprune.prune.export"),
    "rich": ("mhaprune.review", "mhaprune.run", "mhaprune.cli", "experiments"),
    "matplotlib": ("mhaprune.review", "mhaprune.run"),
}
CALLED_ONLY_BY = {
    "from_pretrained": ("mhaprune.model.load",),
    "load_dataset": ("mhaprune.text.load",),
}
WITHOUT = {  # what no module of some rooms imports
    "torch": ("tables", "stats"),
    "transformers": ("tables", "stats"),
    "pathlib": ("stats", "scores"),
    "logging": ("tables", "text", "model", "stats", "measure", "scores", "prune", "roles"),
}
PROGRAMS = ("experiments", "scripts", "tests")


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def has(imported: set[str], package: str) -> bool:
    return any(is_within(name, package) for name in imported)


def room_of(module: str) -> str:
    """The room of `mhaprune.model.gating`, or "" for `mhaprune` itself, which is the way in."""
    return [*module.split("."), ""][1]


def imports(module: str, is_package: bool, source: str) -> set[str]:
    """Full names of what a module imports, anywhere in it: modules and members of modules."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


def uses(source: str) -> set[str]:
    """Every name and attribute that a module's source mentions."""
    nodes = list(ast.walk(ast.parse(source)))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in nodes if isinstance(node, ast.Name)}


def problems(module: str, is_package: bool, source: str) -> Iterator[str]:
    """What is wrong with the imports of one module."""
    imported = imports(module, is_package, source)
    known = {name: KNOWN_ONLY_BY[name] for name in KNOWN_ONLY_BY if has(imported, name)}
    called = {name: CALLED_ONLY_BY[name] for name in uses(source) & set(CALLED_ONLY_BY)}
    for name, places in (known | called).items():
        if not any(is_within(module, place) for place in places):
            yield f"{module} uses {name}, which only {' and '.join(places)} may"
    if not is_within(module, "mhaprune") or module == "mhaprune":
        return
    room = room_of(module)
    if room not in ROOMS:
        yield f"{module} is in no room: the rooms are {' '.join(ROOMS)}"
        return
    for name in PROGRAMS:
        if has(imported, name):
            yield f"{module} imports {name}, a program"
    for name in (name for name, rooms in WITHOUT.items() if room in rooms):
        if has(imported, name):
            yield f"{module} imports {name}, which {room} does without"
    for other in sorted({room_of(name) for name in imported if is_within(name, "mhaprune")}):
        if other in ROOMS and ROOMS.index(other) > ROOMS.index(room):
            yield f"{module} imports the room {other}, which lies to the right of {room}"


def sources(directory: str) -> dict[str, tuple[bool, str]]:
    """Module name -> whether it is a package, and its source."""
    found = {}
    for path in sorted((ROOT / directory).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = is_package, path.read_text(encoding="utf-8")
    return found


LIBRARY = sources("mhaprune")
EVERYTHING = LIBRARY | sources("experiments")


@pytest.mark.parametrize("module", EVERYTHING)
def test_a_module_imports_only_what_its_room_may(module):
    assert list(problems(module, *EVERYTHING[module])) == []


def test_the_modules_that_were_read_are_the_library():
    assert {"mhaprune", "mhaprune.model.gating", "mhaprune.scores.fisher"} <= set(LIBRARY)
    assert {room_of(name) for name in LIBRARY} == {"", *ROOMS}


@pytest.mark.parametrize("room", ROOMS[:-2])
def test_a_room_says_in_a_few_lines_what_lives_there(room):
    docstring = ast.get_docstring(ast.parse(LIBRARY[f"mhaprune.{room}"][1]))
    assert docstring is not None
    assert len(docstring.splitlines()) <= 5


# A check that cannot fail checks nothing.


@pytest.mark.parametrize(
    ("module", "source", "problem"),
    [
        ("mhaprune.stats.effects", "import torch", "imports torch, which stats does without"),
        (
            "mhaprune.scores.x",
            "from pathlib import Path",
            "imports pathlib, which scores does with",
        ),
        ("mhaprune.model.gating", "import logging", "imports logging, which model does without"),
        ("mhaprune.model.gating", "import experiments.rank_heads", "imports experiments, a prog"),
        ("mhaprune.cli", "from scripts import bench", "imports scripts, a program"),
        ("mhaprune.measure.store", "import wandb", "uses wandb, which only mhaprune.run.tr"),
        ("experiments.rank_heads", "import wandb", "uses wandb, which only mhaprune.run.tr"),
        ("mhaprune.model.load", "from hydra.errors import X", "uses hydra, which only mhaprune.ru"),
        ("mhaprune.prune.x", "def f():\n    import omegaconf", "uses omegaconf, which only"),
        ("mhaprune.run.x", "import datasets as d", "uses datasets, which only mhaprune.text.load"),
        ("mhaprune.run.x", "GPT2.from_pretrained('.')", "uses from_pretrained, which only"),
        (
            "mhaprune.model.gating",
            "from mhaprune.scores.fisher import f",
            "imports the room scores",
        ),
        (
            "mhaprune.measure.x",
            "from ..run.config import f",
            "the room run, which lies to the right",
        ),
        (
            "mhaprune.review.page",
            "def f():\n    import mhaprune.run.launch",
            "imports the room run",
        ),
        ("mhaprune.extra", "", "is in no room: the rooms are tables text"),
    ],
)
def test_a_bad_import_is_told_in_one_line(module, source, problem):
    found = list(problems(module, False, source))
    assert len(found) == 1
    assert found[0].startswith(module)
    assert problem in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mhaprune.stats.effects", "import numpy\nimport math"),
        ("mhaprune.measure.baselines", "import torch\nfrom mhaprune.model.gating import f"),
        ("mhaprune.tables.files", "from mhaprune import __version__\nfrom pathlib import Path"),
        ("mhaprune.run.tracking", "import wandb"),
        ("mhaprune.run.prepare", "from mhaprune.review.page import f"),
        ("mhaprune.measure.x", "config.datasets.wandb.hydra"),
        ("mhaprune.model.gating", "import torchvision\nimport hydrant"),
        ("experiments.rank_heads", "import hydra\nfrom mhaprune.model.load import f"),
    ],
)
def test_a_good_import_is_let_through(module, source):
    assert list(problems(module, False, source)) == []


def test_a_relative_import_means_another_module_in_a_package_than_in_a_module():
    assert imports("mhaprune.scores", True, "from . import a") == {"mhaprune.scores.a"}
    assert imports("mhaprune.scores.b", False, "from . import a") == {"mhaprune.scores.a"}
    assert imports("mhaprune.scores.b", False, "from ..model.heads import Head") == {
        "mhaprune.model.heads.Head"
    }
