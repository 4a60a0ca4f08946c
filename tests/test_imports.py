"""Imports go downward only, and each outside library has one place that knows it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    # 0: plain numbers
    "agreement control_variates heads statistics windows",
    # 1: torch
    "architectures attention attention_toy baselines eager gating kernels patterns perplexity "
    "replay text",
    # 2: what answers a question about heads
    "compaction head_sets healing modeling_pruned optimal pruning savings scores",
    # 3: the edges; they do not know each other
    "config console export load machine manifest page report results store stories tracking",
    # 4: what ties the edges together
    "atlas cli comparing curves exporting launch measuring ranking recording reporting reproducing "
    "runs scoring syncing",
)
EDGES = 3
KNOWN_ONLY_BY = {
    "wandb": ("mhaprune.tracking",),
    "hydra": ("mhaprune.config", "mhaprune.launch", "experiments"),
    "omegaconf": ("mhaprune.config", "mhaprune.launch", "experiments"),
    "datasets": ("mhaprune.load",),
    "huggingface_hub": ("mhaprune.load",),
}
CALLED_ONLY_BY = {"from_pretrained": ("mhaprune.load",), "load_dataset": ("mhaprune.load",)}
UNKNOWN_TO_THE_CORE = ("logging", "pathlib")
UNKNOWN_TO_LAYER_0 = ("torch", "transformers")
PROGRAMS = ("experiments", "scripts", "tests")


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def has(imported: set[str], package: str) -> bool:
    return any(is_within(name, package) for name in imported)


def layer_of(module: str) -> int | None:
    """The layer of `mhaprune.gating` or of anything in it; the package itself is at the bottom."""
    if module == "mhaprune":
        return 0
    part = module.split(".")[1]
    found = [layer for layer, parts in enumerate(LAYERS) if part in parts.split()]
    return found[0] if found else None


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


def module_of(name: str, modules: set[str]) -> str | None:
    """The module that an imported name is, or is in; None for what is not ours."""
    return max((module for module in modules if is_within(name, module)), key=len, default=None)


def problems(module: str, is_package: bool, source: str, modules: set[str]) -> Iterator[str]:
    """What is wrong with the imports of one module; `modules` are all those of the package."""
    imported = imports(module, is_package, source)
    known = {name: KNOWN_ONLY_BY[name] for name in KNOWN_ONLY_BY if has(imported, name)}
    called = {name: CALLED_ONLY_BY[name] for name in uses(source) & set(CALLED_ONLY_BY)}
    for name, places in (known | called).items():
        if not any(is_within(module, place) for place in places):
            yield f"{module} uses {name}, which only {' and '.join(places)} may"
    if not is_within(module, "mhaprune"):
        return
    if module == "mhaprune":  # makes exported models loadable; what it imports, all others do
        ours = {module_of(name, modules) for name in imported if is_within(name, "mhaprune")}
        if not ours <= {"mhaprune", "mhaprune.modeling_pruned"}:
            yield "mhaprune imports more of the library than modeling_pruned"
        return
    layer = layer_of(module)
    if layer is None:
        yield f"{module} is in no layer: add it to LAYERS in tests/test_imports.py"
        return
    unknown = PROGRAMS
    unknown += UNKNOWN_TO_THE_CORE if layer < EDGES else ()
    unknown += UNKNOWN_TO_LAYER_0 if layer == 0 else ()
    for name in unknown:
        if has(imported, name):
            yield f"{module} imports {name}, which layer {layer} does not know"
    for other in sorted({module_of(name, modules) or module for name in imported} - {module}):
        below = layer_of(other)
        if below is not None and below > layer:
            yield f"{module} (layer {layer}) imports {other} (layer {below}): imports go downward"
        elif below == layer == EDGES:
            yield f"{module} imports {other}: edges do not import each other"


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
def test_a_module_imports_only_what_its_layer_may(module):
    assert list(problems(module, *EVERYTHING[module], set(LIBRARY))) == []


def test_the_modules_that_were_read_are_the_library():
    assert {"mhaprune", "mhaprune.heads", "mhaprune.scores.leave_one_out"} <= set(LIBRARY)


# A check that cannot fail checks nothing.

MODULES = {f"mhaprune.{part}" for layer in LAYERS for part in layer.split()} | {
    "mhaprune",
    "mhaprune.scores.taylor",
    "mhaprune.extra",
}


@pytest.mark.parametrize(
    ("module", "source", "problem"),
    [
        ("mhaprune.heads", "import torch", "imports torch, which layer 0 does not know"),
        ("mhaprune.heads", "from transformers import X", "imports transformers, which layer 0"),
        ("mhaprune.gating", "import logging", "imports logging, which layer 1 does not know"),
        ("mhaprune.scores.taylor", "from pathlib import Path", "imports pathlib, which layer 2"),
        ("mhaprune.gating", "import experiments.rank_heads", "imports experiments, which layer 1"),
        ("mhaprune.cli", "from scripts import bench", "imports scripts, which layer 4"),
        ("mhaprune.runs", "import wandb", "uses wandb, which only mhaprune.tracking may"),
        ("experiments.rank_heads", "import wandb", "uses wandb, which only mhaprune.tracking may"),
        ("mhaprune.load", "from hydra.errors import X", "uses hydra, which only mhaprune.config"),
        ("mhaprune.runs", "def f():\n    import omegaconf", "uses omegaconf, which only"),
        ("mhaprune.runs", "import datasets as d", "uses datasets, which only mhaprune.load may"),
        ("mhaprune.runs", "GPT2.from_pretrained('.')", "uses from_pretrained, which only"),
        ("mhaprune.gating", "from mhaprune.scores.taylor import f", "(layer 1) imports mhaprune.s"),
        ("mhaprune.heads", "from mhaprune import gating", "(layer 0) imports mhaprune.gating (l"),
        ("mhaprune.heads", "from . import gating", "(layer 0) imports mhaprune.gating (layer 1)"),
        ("mhaprune.scores.taylor", "from ..load import f", "(layer 2) imports mhaprune.load (lay"),
        ("mhaprune.report", "import mhaprune.results", "edges do not import each other"),
        ("mhaprune.report", "if TYPE_CHECKING:\n    from .results import X", "edges do not import"),
        ("mhaprune.results", "from mhaprune.runs import f", "(layer 3) imports mhaprune.runs (la"),
        ("mhaprune.extra", "", "is in no layer: add it to LAYERS in tests/test_imports.py"),
    ],
)
def test_a_bad_import_is_told_in_one_line(module, source, problem):
    found = list(problems(module, False, source, MODULES))
    assert len(found) == 1
    assert found[0].startswith(module)
    assert problem in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mhaprune.heads", "import numpy"),
        ("mhaprune.baselines", "import torch\nfrom mhaprune.gating import captured_z"),
        ("mhaprune.scores.taylor", "from mhaprune.gating import f\nfrom mhaprune.heads import g"),
        ("mhaprune.results", "from mhaprune import __version__\nfrom pathlib import Path"),
        ("mhaprune.tracking", "import wandb"),
        ("mhaprune.runs", "from mhaprune.load import f\nfrom mhaprune.ranking import g"),
        ("mhaprune.runs", "config.datasets.wandb.hydra"),
        ("mhaprune.gating", "import torchvision\nimport hydrant"),
        ("experiments.rank_heads", "import hydra\nfrom mhaprune.load import f"),
    ],
)
def test_a_good_import_is_let_through(module, source):
    assert list(problems(module, False, source, MODULES)) == []


def test_a_relative_import_means_another_module_in_a_package_than_in_a_module():
    assert imports("mhaprune.scores", True, "from . import a") == {"mhaprune.scores.a"}
    assert imports("mhaprune.scores.b", False, "from . import a") == {"mhaprune.scores.a"}
    assert imports("mhaprune.scores.b", False, "from ..heads import Head") == {
        "mhaprune.heads.Head"
    }
