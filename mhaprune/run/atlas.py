"""The program head_atlas: what each head looks at, on a sentence and on average."""

from pathlib import Path

from rich.console import Console

from mhaprune.review.console import print_files, print_heads_by_role, quiet_third_parties, say
from mhaprune.review.index import refresh_index
from mhaprune.roles.atlas import heads_by_role, write_atlas
from mhaprune.run.config import HeadAtlasConfig
from mhaprune.run.launch import run_program
from mhaprune.run.prepare import prepare
from mhaprune.run.recording import recorded


def head_atlas(config: HeadAtlasConfig, directory: Path) -> None:
    """Write what every head of the model attends to into the run directory."""
    quiet_third_parties()
    console = Console()
    prepared = prepare(config)
    with recorded("head_atlas", config, prepared, directory, console) as recording:
        rows = write_atlas(
            directory, prepared, config.text, config.roles, config.seed, lambda x: say(console, x)
        )
        heads = heads_by_role(rows)
        recording.finish(
            {f"roles/{role}": len(names) for role, names in heads.items()}, {"roles": rows}
        )
    print_heads_by_role(console, heads)
    print_files(console, directory)


def main() -> None:
    """Start from the command line; see `launch.run_program`."""
    run_program(head_atlas, HeadAtlasConfig, "head_atlas", refresh_index)
