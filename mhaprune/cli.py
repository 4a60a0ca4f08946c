"""`mhaprune COMMAND ...`: the programs, and what can be done with finished runs.

Commands import what they need when they run: the command line itself starts at once.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mhaprune import __version__
from mhaprune.review.console import quiet_third_parties, say
from mhaprune.run.exits import plain_exits
from mhaprune.tables.manifest import is_finished

PROGRAMS = {  # those that take Hydra's overrides: the module, and what it does
    "rank": ("rank", "rank heads by the loss without them, or by an estimate"),
    "scores": ("compare_scores", "judge every estimate by the measured effects"),
    "prune": ("prune", "draw pruning curves; export a pruned model"),
    "atlas": ("atlas", "show what every head attends to"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits with 0, with 1 where runs do not agree, with 2 on a mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in PROGRAMS:
        sys.argv = ["mhaprune", *arguments]  # from where the program, and its manifest, read it
        module, _ = PROGRAMS[arguments[0]]
        importlib.import_module(f"mhaprune.run.{module}").main()
        sys.exit(0)
    chosen = parser().parse_args(arguments)
    quiet_third_parties()
    with plain_exits():
        agrees = COMMANDS[chosen.command](chosen, Console())
    sys.exit(0 if agrees else 1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    whole = argparse.ArgumentParser(
        "mhaprune",
        description="Which attention heads does a transformer need?",
        epilog="rank, scores, prune and atlas take key=value: mhaprune rank --help lists the keys. "
        "The other commands take the directories of finished runs.",
    )
    whole.add_argument("-V", "--version", action="version", version=f"mhaprune {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, what) in PROGRAMS.items():
        commands.add_parser(name, help=what)
    report = commands.add_parser("report", help="write report.html anew; of a sweep, index.html")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="of runs or sweeps")
    compare = commands.add_parser("compare", help="compare the rankings and verdicts of runs")
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="two or more")
    again = commands.add_parser(
        "reproduce",
        help="run a configuration again: the same numbers?",
        description="Run a saved configuration again and compare; exit code 1: not the same.",
    )
    again.add_argument("run", type=Path, metavar="RUN_DIR")
    again.add_argument("--out", type=Path, metavar="DIR", help="the new run's directory")
    sync = commands.add_parser("sync", help="show a run's files in Weights & Biases")
    sync.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    sync.add_argument("--offline", action="store_true", help="into RUN_DIR/wandb, without network")
    return whole


def _report(chosen: argparse.Namespace, console: Console) -> bool:
    from mhaprune.review.index import runs_below, write_index
    from mhaprune.review.report import write_report

    for directory in chosen.runs:
        is_sweep = directory.is_dir() and not (directory / "manifest.json").exists()
        runs = runs_below(directory) if is_sweep else [directory]
        if is_sweep and runs:
            for run in runs:
                if is_finished(run):
                    say(console, f"Page: {write_report(run)}")
            say(console, f"Index: {write_index(directory)}")
        else:
            say(console, f"Page: {write_report(directory)}")
    return True


def _compare(chosen: argparse.Namespace, console: Console) -> bool:
    from mhaprune.run.comparing import compare_runs, print_comparisons

    print_comparisons(console, compare_runs(chosen.runs))
    return True


def _reproduce(chosen: argparse.Namespace, console: Console) -> bool:
    from mhaprune.run.reproducing import reproduce

    return reproduce(chosen.run, chosen.out, lambda line: say(console, line))


def _sync(chosen: argparse.Namespace, console: Console) -> bool:
    from mhaprune.run.syncing import sync_run

    mode = "offline" if chosen.offline else "online"
    done = [sync_run(run, mode, lambda line: say(console, line)) for run in chosen.runs]
    return all(done)


COMMANDS = {"report": _report, "compare": _compare, "reproduce": _reproduce, "sync": _sync}
