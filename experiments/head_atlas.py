"""What does each head look at? Its attention on a sentence, and its role on average.

python experiments/head_atlas.py text="The cat sat on the mat because it was tired"
python experiments/head_atlas.py model=gpt2 dataset=wikitext2

GPT-2's layers run written out (`mhaprune/attention.py`); other architectures bring their own.
"""

from pathlib import Path

from rich.console import Console

from mhaprune.atlas import heads_by_role, write_atlas
from mhaprune.config import HeadAtlasConfig
from mhaprune.console import print_files, print_heads_by_role, quiet_third_parties, say
from mhaprune.launch import run_program
from mhaprune.recording import recorded
from mhaprune.reporting import refresh_index
from mhaprune.runs import prepare


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


if __name__ == "__main__":
    run_program(head_atlas, HeadAtlasConfig, "head_atlas", refresh_index)
