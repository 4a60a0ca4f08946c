"""The program head_atlas: what each head looks at, on a sentence and on average."""

from pathlib import Path

from rich.console import Console

from mhaprune.review.console import print_files, print_heads_by_role, quiet_third_parties
from mhaprune.review.index import refresh_index
from mhaprune.roles.atlas import Judging, heads_by_role, write_atlas
from mhaprune.run.config import HeadAtlasConfig, RolesConfig, plain
from mhaprune.run.launch import run_program
from mhaprune.run.prepare import prepare
from mhaprune.run.recording import Recording, recorded
from mhaprune.tables.rows import HeadRole


def head_atlas(config: HeadAtlasConfig, directory: Path) -> None:
    """Write what every head of the model attends to into the run directory."""
    quiet_third_parties()
    console = Console()
    prepared = prepare(config)
    with recorded("head_atlas", config, prepared, directory, console) as recording:
        rows = keep_atlas(recording, config.text, config.roles)
        heads = heads_by_role(rows)
        recording.finish(
            {f"roles/{role}": len(names) for role, names in heads.items()}, {"roles": rows}
        )
    print_heads_by_role(console, heads)
    print_files(console, directory)


def keep_atlas(recording: Recording, text: str, config: RolesConfig) -> list[HeadRole]:
    """Write what heads attend to into the run's directory; return their roles, if any."""
    judging = Judging(**plain(config), seed=recording.config.seed)
    prepared, say = recording.prepared, recording.progress.say
    return write_atlas(recording.directory, prepared.loaded, prepared.sample, text, judging, say)


def main() -> None:
    """Start from the command line; see `launch.run_program`."""
    run_program(head_atlas, HeadAtlasConfig, "head_atlas", refresh_index)
