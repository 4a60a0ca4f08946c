"""Run a finished run again, from its saved configuration, and say whether the numbers are the same.

Before anything is measured, model and texts are checked to be those of the run; the program then
runs as it did the first time, in a process of its own and a directory of its own.
"""

import contextlib
import csv
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mhaprune.model.load import load_model
from mhaprune.run.comparing import (
    HASH_DIGITS,
    RULE,
    describe_difference,
    disagreements,
    largest_difference,
    pair_effects,
    what_differs,
)
from mhaprune.run.config import DatasetConfig, ModelConfig, plain, validate
from mhaprune.run.prepare import tokenize_texts
from mhaprune.tables.csv_files import read_effects
from mhaprune.tables.files import write_atomically
from mhaprune.tables.manifest import PROGRAMS, program_of, read_manifest
from mhaprune.tables.tables import TABLES

TIMED = {name for table in TABLES.values() for name in table.timed}
KEYS = {table.file: table.keys for table in TABLES.values()}  # other rows go by their numbers
DERIVED = {table.file for table in TABLES.values() if table.derived}
ROUNDING = 0.01
TABLE_RULE = (
    f"Other rows agree where their intervals overlap or, without intervals, where numbers differ "
    f"by at most {ROUNDING:.0%} of the largest of their column and score."
)
Rows = list[dict[str, str]]
Say = Callable[[str], object]


def reproduce(directory: Path, out: Path | None, say: Say, tracker: str = "none") -> bool:
    """Run a finished run again and return whether the results agree.

    The new run lies in `out` or, by default, beside the old one; `tracker` is its tracker.mode. A
    pruned model is not exported again. What agrees is said by `RULE` and `TABLE_RULE`: all heads,
    or rows, of the old run must be there again and agree, and no verdict may contradict.

    Raises ValueError where there is no finished run, where its program, model or texts are gone or
    have changed (nothing has been written then), and where the program fails.
    """
    directory = directory.resolve()
    manifest = read_manifest(directory)
    config = _read_yaml(directory / ".hydra" / "config.yaml", "model", "dataset", "tracker")
    hydra = _read_yaml(directory / ".hydra" / "hydra.yaml", "hydra")["hydra"]
    program = find_program(directory, manifest, hydra)
    names = sorted({path.name for path in directory.glob("*.csv")} - DERIVED)
    if not names:
        raise ValueError(f"{directory} holds no results to compare: it has no CSV file")
    new = new_directory(directory, out)
    place = starting_place(hydra, say)
    with contextlib.chdir(place):
        check_inputs(config, manifest)
    say(f"Running {program} again with the configuration of {directory}, in {new}")
    keep_config(new, config, program, place, tracker, say)
    rerun(program, new, place)
    agree = compare_tables(directory, new, names, say)
    for line in what_differs(manifest, read_manifest(new)):
        say(f"differs in what was run: {line}")
    say("The results agree" if agree else "The results do not agree")
    return agree


def find_program(directory: Path, manifest: Mapping[str, Any], hydra: Mapping[str, Any]) -> str:
    """Return the program of a run, by its command or else by the name of its Hydra job."""
    names = [program_of(manifest), hydra["job"]["name"]]
    for name in names:
        if name in PROGRAMS.values():
            return name
    raise ValueError(
        f"{directory} was made by {names[0]}, which is none of {', '.join(PROGRAMS.values())}"
    )


def starting_place(hydra: Mapping[str, Any], say: Say) -> Path:
    """Return the directory that a run was started in: its relative paths start there."""
    place = Path(hydra["runtime"]["cwd"])
    if place.is_dir():
        return place
    say(f"The run was started in {place}, which is not there; relative paths start here instead")
    return Path.cwd()


def new_directory(directory: Path, out: Path | None) -> Path:
    """Return a directory for the new run that does not exist yet, or is empty."""
    if out is not None:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ValueError(f"{out} is not an empty directory; choose another for the new run")
        return out.resolve()
    endings = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    places = (directory.with_name(f"{directory.name}_reproduced{ending}") for ending in endings)
    return next(place for place in places if not place.exists())


def check_inputs(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Raise ValueError unless model and texts are, by their hashes, those that were measured."""
    model = validate(config["model"], ModelConfig)
    dataset = validate(config["dataset"], DatasetConfig)
    if ranking := config.get("pruning", {}).get("ranking"):
        read_manifest(Path(ranking))  # raises where it is gone
    loaded = load_model(**{**plain(model), "device": "cpu"})  # hashes are the same on any device
    place = _first_set("model", plain(model), ("hub_id", "path", "name"))
    now = {"weights_hash": ("the model", loaded.weights_hash, place)}
    _refuse_changes(manifest, now)
    evaluation, calibration = (tokens.hash for tokens in tokenize_texts(loaded, dataset))
    places = plain(dataset)
    evaluated = _first_set("dataset", places, ("path", "hub_id", "source"))
    calibrated = _first_set("dataset", places, ("calibration_path", "path", "hub_id", "source"))
    now = {
        "tokens_hash": ("the evaluation text (or the tokenizer)", evaluation, evaluated),
        "calibration_hash": ("the calibration text (or the tokenizer)", calibration, calibrated),
    }
    _refuse_changes(manifest, now)


def _refuse_changes(manifest: Mapping[str, Any], now: Mapping[str, tuple[str, str, str]]) -> None:
    """Raise ValueError where a hash is no longer what it was: (what, hash, where) by its name."""
    changes = [
        f"{what} has changed: {name.replace('_', ' ')} {manifest[name][:HASH_DIGITS]} then, "
        f"{value[:HASH_DIGITS]} now ({where})"
        for name, (what, value, where) in now.items()
        if manifest[name] != value
    ]
    if changes:
        raise ValueError("; ".join(changes))


def _first_set(group: str, values: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return the first of the keys that is not null, as on the command line."""
    return next(f"{group}.{key}={values[key]}" for key in keys if values[key] is not None)


def keep_config(
    new: Path, config: Mapping[str, Any], program: str, place: Path, tracker: str, say: Say
) -> None:
    """Write what the program and another `reproduce` need, as JSON, which YAML contains."""
    config = {**config, "tracker": {**config["tracker"], "mode": tracker}}
    if "shard" in config:
        config["shard"] = {"count": 1, "index": 0}
    export = config.get("export") or {}
    if export.get("dir") is not None:
        say(f"The pruned model is not exported again (export.dir={export['dir']})")
        config["export"] = {**export, "dir": None}
    hydra = {
        "runtime": {"cwd": str(place), "output_dir": str(new)},
        "job": {"name": program},
    }
    (new / ".hydra").mkdir(parents=True)
    for name, content in (("config", config), ("hydra", {"hydra": hydra})):
        # not write_json: sorted keys would change the order of scores
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        write_atomically(new / ".hydra" / f"{name}.yaml", text + "\n")


def rerun(program: str, new: Path, place: Path) -> None:
    """Let the program do what the new directory's configuration says; its output passes through."""
    [command] = [name for name, started in PROGRAMS.items() if started == program]
    start = [sys.executable, "-P", "-m", "mhaprune"]  # -P: import nothing that lies in `place`
    sys.stdout.flush()
    done = subprocess.run([*start, command, f"resume={new}"], cwd=place)
    if done.returncode:
        raise ValueError(f"{program} ended with exit code {done.returncode} in {new}")


def compare_tables(directory: Path, new: Path, names: Sequence[str], say: Say) -> bool:
    """Say how far the named CSV files of two runs agree, and return whether all of them do."""
    missing = [name for name in names if not (new / name).is_file()]
    tables = {
        name: (read_table(directory / name), read_table(new / name))
        for name in names
        if name not in missing
    }
    same = [name for name, (ours, theirs) in tables.items() if ours == theirs]
    if same:
        say(f"identical: {', '.join(same)}")
    problems = [f"{name} was not written again" for name in missing]
    for name in [name for name in tables if name not in same]:
        if name == "effects.csv":
            runs = read_effects(directory / name), read_effects(new / name)
            pairs = pair_effects(*runs)
            most = f" by at most {describe_difference(largest_difference(pairs))}" if pairs else ""
            problems += [f"{name}, {problem}" for problem in disagreements(*runs)]
        else:
            most, keys = "", KEYS.get(name, ())
            problems += [f"{name}, {problem}" for problem in row_problems(*tables[name], keys)]
        say(f"{name} differs{most}")
    for problem in problems:
        say(f"does not agree: {problem}")
    if len(same) < len(names):
        say(f"{RULE} {TABLE_RULE}")
    return not problems


def read_table(path: Path) -> Rows:
    """Return the rows of a CSV file as they are written, less the columns that hold times."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: cell for name, cell in row.items() if name not in TIMED} for row in rows]


def row_problems(first: Rows, other: Rows, keys: Sequence[str]) -> list[str]:
    """Return, a line each, the rows that one table lacks and those that do not agree."""
    ours, theirs = by_key(first, keys), by_key(other, keys)
    problems = [
        f"{key}: in one of the runs only"
        for key in {**ours, **theirs}
        if (key in ours) != (key in theirs)
    ]
    for key, row in ours.items():
        group = [each for each in first if "score" not in keys or each["score"] == row["score"]]
        if key in theirs and not rows_agree(row, theirs[key], group):
            cells = [
                ", ".join(f"{name} {cell}" for name, cell in each.items() if name not in keys)
                for each in (row, theirs[key])
            ]
            problems.append(f"{key}: {' -> '.join(cells)}")
    return problems


def by_key(rows: Rows, keys: Sequence[str]) -> dict[str, dict[str, str]]:
    """Name each row by its cells in the columns `keys` or, without such, by its number."""
    return {
        " ".join(row[name] for name in keys) or f"row {number}": row
        for number, row in enumerate(rows, start=1)
    }


def rows_agree(first: Mapping[str, str], other: Mapping[str, str], group: Rows) -> bool:
    """Return whether two rows agree, by `TABLE_RULE`; `group` are the rows of the same score."""
    if {"ci_low", "ci_high"} <= first.keys() & other.keys():
        low = max(float(first["ci_low"]), float(other["ci_low"]))
        return low <= min(float(first["ci_high"]), float(other["ci_high"]))
    return first.keys() == other.keys() and all(
        first[name] == other[name]
        or _nearly_equal(first[name], other[name], [row[name] for row in group])
        for name in first
    )


def _nearly_equal(first: str, other: str, column: Sequence[str]) -> bool:
    try:
        largest = max(abs(float(cell)) for cell in column if cell)
        return abs(float(first) - float(other)) <= ROUNDING * largest
    except ValueError:  # text: equal or not
        return False


def _read_yaml(path: Path, *needed: str) -> dict[str, Any]:
    """Read what Hydra saved; ValueError, naming the file, where it is missing or broken."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or not content.keys() >= {*needed}:
        raise ValueError(f"{path}: expected the keys {', '.join(needed)}, got {content!s:.60}")
    return content
