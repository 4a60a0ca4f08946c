"""The team's dashboard in Weights & Biases, as code.

pip install wandb-workspaces
python scripts/wandb_workspace.py --entity TEAM --project mhaprune   # saves it; needs a key
python scripts/wandb_workspace.py --json FILE                        # neither key nor network

It shows what the programs log (`mhaprune/run/tracking.py`) of all runs that are visible in the
project.
"""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mhaprune.run.config import CONF_DIR
from mhaprune.stats.effects import VERDICTS
from mhaprune.tables.files import write_json

NAME = "Attention heads"


def heads(wr: Any) -> list[Any]:
    """What each head is worth: picture, ranking and roles."""
    return [
        wr.MediaBrowser(title="Effect of each head", media_keys=["heatmap"], num_columns=2),
        wr.WeavePanelSummaryTable(table_name="heads"),
        wr.WeavePanelSummaryTable(table_name="roles"),
    ]


def verdicts(wr: Any) -> list[Any]:
    """How many heads can go, and of how many the data do not say."""
    counts = [f"heads/num_{verdict}" for verdict in VERDICTS]
    return [
        wr.BarPlot(title="Heads by verdict", metrics=counts),
        wr.BarPlot(title="Heads measured", metrics=["heads/num_measured"]),
        wr.BarPlot(title="Share of the windows measured", metrics=["heads/share_of_windows"]),
    ]


def intact_model(wr: Any) -> list[Any]:
    """What every effect is compared with."""
    interval = [f"baseline/perplexity{end}" for end in ("_low", "", "_high")]
    return [
        wr.BarPlot(title="Intact perplexity", metrics=["baseline/perplexity"]),
        wr.BarPlot(title="Its interval", metrics=interval),
        wr.BarPlot(title="Bits per byte", metrics=["baseline/bits_per_byte"]),
    ]


def pruning(wr: Any) -> list[Any]:
    """How the loss grows as heads go together."""
    orders = OmegaConf.load(CONF_DIR / "pruning" / "one_shot.yaml").orderings
    gone = [f"heads_removed_at_5pct.{order}" for order in orders]
    areas = [f"area_nats_least_first.{order}" for order in orders]
    return [
        wr.MediaBrowser(title="Pruning curves", media_keys=["curves"], num_columns=1),
        wr.MediaBrowser(title="Pairs", media_keys=["pairs"], num_columns=1),
        wr.BarPlot(title="Heads that go at 5% more perplexity", metrics=gone),
        wr.BarPlot(title="Mean loss added along the way, nats/token", metrics=areas),
        *(wr.WeavePanelSummaryTable(table_name=n) for n in ("curve", "interactions", "savings")),
    ]


def agreement(wr: Any) -> list[Any]:
    """Which score to trust."""
    scores = OmegaConf.load(CONF_DIR / "compare_scores.yaml").scores
    spearman = [f"compare/{score}/spearman" for score in scores]
    return [
        wr.BarPlot(title="Rank correlation with the measured effects", metrics=spearman),
        wr.MediaBrowser(media_keys=["cost"], title="Agreement against cost", num_columns=1),
        wr.MediaBrowser(media_keys=["scatter"], title="Scores against effects", num_columns=1),
        wr.WeavePanelSummaryTable(table_name="agreement"),
        wr.WeavePanelSummaryTable(table_name="scores"),
    ]


def sweeps(wr: Any) -> list[Any]:
    """What changes with the configuration, and from one group of runs (`tracker.group`) to another.

    In W&B's own sweeps `model` is the option's name; here it is what other runs have, `model.name`.
    """
    column, redundant = wr.ParallelCoordinatesPlotColumn, wr.SummaryMetric("heads/num_redundant")
    keys = ("model.name", "dataset.name", "ablation.kind", "evaluation.tolerance_nats")
    configured = [column(metric=wr.Config(key)) for key in keys]
    return [
        wr.BarPlot(
            title="Redundant heads by group",
            metrics=["heads/num_redundant"],
            groupby=wr.Metric("Group"),
            groupby_aggfunc="mean",
            groupby_rangefunc="minmax",
        ),
        wr.ParallelCoordinatesPlot(
            title="From configuration to redundant heads",
            columns=[*configured, column(metric=redundant)],
        ),
        wr.ScatterPlot(title="By ablation", x=wr.Config("ablation.kind"), y=redundant),
        wr.ScatterPlot(title="By model", x=wr.Config("model.name"), y=redundant),
    ]


def running(wr: Any) -> list[Any]:
    """How far the runs are."""
    return [wr.LinePlot(title="Heads done and settled", y=["heads/done", "heads/settled"])]


SECTIONS = {
    "Heads": heads,
    "Verdicts": verdicts,
    "Intact model": intact_model,
    "Pruning": pruning,
    "Agreement of scores": agreement,
    "Sweeps": sweeps,
    "Progress": running,
}


def build(entity: str, project: str) -> Any:
    """Return the dashboard, not saved yet: a `wandb_workspaces.workspaces.Workspace`."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=name, panels=panels(wr), is_open=True) for name, panels in SECTIONS.items()
    ]
    return ws.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def serialised(workspace: Any) -> dict[str, Any]:
    """Return the dashboard as W&B keeps it, as plain JSON values."""
    spec = workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
    return {"project": workspace.project, "name": workspace.name, "spec": json.loads(spec)}


def save(workspace: Any) -> str | None:
    """Save the dashboard as a new view of the project; return what went wrong, if anything."""
    import wandb

    try:
        if not wandb.login(prompt=False):
            return "nobody is logged in to W&B; run `wandb login`, or set WANDB_API_KEY"
        with contextlib.redirect_stderr(io.StringIO()):  # where it says what we say
            workspace.save()
        print(f"Dashboard at {workspace.url}")
    except Exception as error:
        return f"W&B did not save the dashboard: {' '.join(str(error).split())}"
    return None


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0, or 2 after one line that says what is missing."""
    parser = argparse.ArgumentParser(description="The team's dashboard in Weights & Biases.")
    parser.add_argument("--entity", help="the team or user that it is saved for")
    parser.add_argument("--project", default="mhaprune")
    parser.add_argument("--json", type=Path, help="write it to this file instead of saving it")
    wanted = parser.parse_args(arguments)
    trouble = None
    if find_spec("wandb_workspaces") is None:
        trouble = "wandb-workspaces is not installed; pip install wandb-workspaces"
    elif wanted.json is not None:
        write_json(wanted.json, serialised(build(wanted.entity or "", wanted.project)))
        print(f"Dashboard in {wanted.json}")
    elif wanted.entity is None:
        trouble = "expected --entity TEAM to save it for, or --json FILE"
    else:
        trouble = save(build(wanted.entity, wanted.project))
    if trouble:
        print(f"error: {trouble}", file=sys.stderr)
    return 2 if trouble else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
