"""Starting a program in this process, as its command line would."""

import importlib
import sys
from pathlib import Path

import pytest

from mhaprune.run import config
from mhaprune.run.launch import run_program

SCHEMAS = {
    "rank_heads": config.RankHeadsConfig,
    "prune_heads": config.PruneHeadsConfig,
    "compare_scores": config.CompareScoresConfig,
    "head_atlas": config.HeadAtlasConfig,
}


def start(name: str, *arguments: str) -> None:
    """Run `experiments/NAME.py ARGUMENTS`; raises SystemExit where that would exit by itself."""
    program = importlib.import_module(f"experiments.{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDRA_FULL_ERROR", "1")
        patch.setattr(sys, "argv", [f"experiments/{name}.py", *arguments])
        run_program(getattr(program, name), SCHEMAS[name], name)


def resume(name: str, directory: Path) -> None:
    """Go on with a run."""
    start(name, f"resume={directory}")
