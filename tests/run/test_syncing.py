"""A run that is rebuilt from its files shows what its program showed, value by value."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from experiments import rank_heads as program
from mhaprune.run.config import RankHeadsConfig
from mhaprune.run.launch import run_program
from mhaprune.run.syncing import sync_run
from mhaprune.tables.csv_files import read_table, write_rows
from mhaprune.tables.rows import (
    CurvePoint,
    HeadEffect,
    HeadRole,
    HeadScore,
    Interaction,
    RoleEffect,
    Saving,
    ScoreAgreement,
)

SMALL = [
    *("heads=[L0H0,L1H3,L3H2]", "dataset.num_stories=40", "evaluation.context_length=32"),
    *("evaluation.max_windows=4", "evaluation.resamples=100", "seed=7", "roles.windows=1"),
    *("roles.repeats=1", "roles.period=16"),
    *("tracker.group=a-sweep", "tracker.tags=[demo,small]", "tracker.project=heads"),
]
TABLES = {"curve": 2, "interactions": 1, "savings": 1, "roles": 2}


def start(patch: pytest.MonkeyPatch, directory: Path, *arguments: str) -> None:
    patch.setenv("COLUMNS", "80")
    patch.setenv("HYDRA_FULL_ERROR", "1")
    patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    own = f"hydra.run.dir={directory}"
    patch.setattr(sys, "argv", ["rank_heads.py", *SMALL, *arguments, own])
    run_program(program.rank_heads, RankHeadsConfig, "rank_heads")


def records_in(directory: Path) -> list[dict[str, Any]]:
    """The records of the run directory's only W&B run."""
    [file] = directory.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def bodies(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in records if record["type"] == kind]


def summary_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    updates = [body["update"] for body in bodies(records, "summary")]
    return {name: value for update in updates for name, value in update.items()}


def tables_of(directory: Path) -> dict[str, dict[str, Any]]:
    """Columns and data of each table in the W&B run, by name."""
    files = directory.glob("wandb/offline-run-*/files/media/table/*.table.json")
    return {file.name.split("_")[0]: json.loads(file.read_text()) for file in files}


def shown_by(table: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of a table in the W&B run as a CSV file has them."""
    data = [["" if cell is None else str(cell) for cell in line] for line in table["data"]]
    return table["columns"], data


def rows_in(path: Path) -> tuple[list[str], list[list[str]]]:
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return header, rows


def artifact_of(records: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Metadata and files of the artifact "ranking"."""
    [ranking] = [each for each in bodies(records, "artifact") if each["type"] == "ranking"]
    files = ranking["manifest"]["contents"]
    return json.loads(ranking["metadata"]), {
        each["path"]: Path(each["local_path"]).read_bytes() for each in files
    }


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.usefixtures("tracked")
@pytest.mark.parametrize("ranked_by", ["leave_one_out", "activation_norm"])
def test_a_rebuilt_run_shows_what_the_program_itself_shows(tmp_path, monkeypatch, ranked_by):
    effects = ranked_by == "leave_one_out"
    file = "effects.csv" if effects else "scores.csv"
    rebuilt, original = (tmp_path / place / "the_run" for place in ("rebuilt", "original"))
    start(monkeypatch, original, f"score={ranked_by}")
    shutil.copytree(original, rebuilt, ignore=shutil.ignore_patterns("wandb"))

    said: list[str] = []
    assert sync_run(rebuilt, "offline", said.append)
    [place] = rebuilt.glob("wandb/offline-run-*")
    assert said == [f"W&B: the run is in {place}; upload it by: wandb sync {place}"]

    records, others = records_in(rebuilt), records_in(original)
    summary = read(rebuilt / "summary.json")
    assert summary.items() <= summary_of(records).items()
    assert summary_of(records).keys() == summary_of(others).keys() - {"heads/done"}  # a curve
    assert summary.items() <= summary_of(others).items()

    tables = tables_of(rebuilt)
    header, rows = rows_in(rebuilt / file)
    columns, cells = shown_by(tables["heads"])
    assert columns == ["name", *header, *(["role"] if effects else [])]
    at = header.index("layer"), header.index("head")
    names = [f"L{row[at[0]]}H{row[at[1]]}" for row in rows]
    assert [line[: len(header) + 1] for line in cells] == [
        [name, *row] for name, row in zip(names, rows, strict=True)
    ]
    if effects:
        _, judged = rows_in(rebuilt / "roles.csv")
        role_of = {f"L{row[0]}H{row[1]}": row[2] for row in judged}
        assert [line[-1] for line in cells] == [role_of[name] for name in names]
        assert shown_by(tables["roles"]) == rows_in(rebuilt / "by_role.csv")
    assert tables.keys() == ({"heads", "roles"} if effects else {"heads"})
    assert tables == tables_of(original)

    run, other = (bodies(each, "run")[0] for each in (records, others))
    for key in ("project", "run_group", "tags", "job_type", "display_name"):
        assert run[key] == other[key]
    assert (run["project"], run["run_group"], run["tags"]) == (
        "heads",
        "a-sweep",
        ["demo", "small"],
    )
    assert (run["job_type"], run["display_name"]) == ("rank_heads", "the_run")
    assert run["config"]["update"] == other["config"]["update"]
    assert run["config"]["update"]["seed"] == 7

    metadata, files = artifact_of(records)
    hashes = {name: read(rebuilt / "manifest.json")[name] for name in metadata}
    assert metadata == hashes == artifact_of(others)[0] and len(metadata) == 2
    assert files == {name: (rebuilt / name).read_bytes() for name in files}
    assert files.keys() == artifact_of(others)[1].keys() > {file, "summary.json", "report.html"}
    for directory in (rebuilt, original):
        [picture] = directory.glob("wandb/offline-run-*/files/media/images/heatmap_*.png")
        assert picture.read_bytes() == (rebuilt / "heatmap.png").read_bytes()
    assert bodies(records, "exit")[0].get("exit_code", 0) == 0  # a zero is not written


# ---- files made by hand


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A run of prune_heads as its files say it, with one table that no program writes."""
    directory = tmp_path / "made"
    directory.mkdir()
    tracker = {"mode": "none", "project": "mhaprune", "name": None, "group": None, "tags": []}
    manifest = {
        "config": {"tracker": tracker, "seed": 0},
        "command": ["experiments/prune_heads.py", "seed=0"],
        "weights_hash": "aa11",
        "tokens_hash": "bb22",
        "finished_utc": "2026-01-01T00:00:00+00:00",
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    summary = {"baseline/perplexity": 29.5, "heads_removed_at_5pct": {"fisher": 3}}
    (directory / "summary.json").write_text(json.dumps(summary))
    points = [CurvePoint("fisher", "least", n, 3.25, 25.5, 25.0, 1e-17) for n in (0, 4)]
    write_rows(directory / "curve.csv", CurvePoint, points)
    pair = Interaction("L0H1 L2H3", 0.5, 0.25, 0.25, 0.1, 0.4, True, False)
    write_rows(directory / "interactions.csv", Interaction, [pair])
    write_rows(directory / "savings.csv", Saving, [Saving(0, 1000, 64, 2e3, 1e2)])
    (directory / "roles.csv").write_text("layer,head,role,score\n0,1,induction,0.5\n2,3,,\n")
    (directory / "scores.csv").write_text("score,layer,head,value,standard_error\n")
    matplotlib.image.imsave(directory / "curves.png", np.zeros((2, 3)))
    return directory


@pytest.mark.usefixtures("tracked")
def test_each_csv_file_with_rows_is_a_table_and_each_picture_is_shown(made):
    said: list[str] = []
    assert sync_run(made, "offline", said.append) and len(said) == 1
    tables = tables_of(made)
    assert {name: len(table["data"]) for name, table in tables.items()} == TABLES
    assert tables["curve"]["data"][1] == ["fisher", "least", 4, 3.25, 25.5, 25.0, 1e-17]
    assert tables["interactions"]["data"] == [["L0H1 L2H3", 0.5, 0.25, 0.25, 0.1, 0.4, True, False]]
    assert tables["roles"]["columns"] == ["name", "layer", "head", "role", "score"]
    assert tables["roles"]["data"] == [["L0H1", 0, 1, "induction", 0.5], ["L2H3", 2, 3, None, None]]
    records = records_in(made)
    assert summary_of(records)["heads_removed_at_5pct"] == {"fisher": 3}
    assert bodies(records, "run")[0]["job_type"] == "prune_heads"
    csv_files = {f"{name}.csv" for name in (*TABLES, "scores")}
    assert artifact_of(records)[1].keys() == csv_files | {"summary.json", "manifest.json"}
    assert list(made.glob("wandb/offline-run-*/files/media/images/curves_*.png"))


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (
            HeadEffect,
            [
                HeadEffect(0, 1, 0.1 + 0.2, -1e-17, 1.0, 30.0, 2.0, "useful", 1, 0.0, 1.5, 0.25, 8),
                HeadEffect(
                    *(1, 0, -1.0, -2.0, 0.0, 3.0, 2.0, "harmful", 2, 1.0, 1.0, 0.1, 4),
                    correlation=0.5,
                    variance_reduction=1.0,
                ),
            ],
        ),
        (HeadScore, [HeadScore("fisher", 0, 0, 2.0, None), HeadScore("fisher", 0, 1, 1.0, None)]),
        (ScoreAgreement, [ScoreAgreement("random", *(number / 8 for number in range(11)))]),
        (
            HeadRole,
            [
                HeadRole(0, 1, "induction", 0.5, *(n / 3 for n in range(9))),
                HeadRole(0, 2, None, None, *(n / 3 for n in range(9))),
            ],
        ),
        (RoleEffect, [RoleEffect(None, 2, 0.25, 0.5, 0, 1, 1, 0, 0, "L0H2 L0H3")]),
        (Interaction, [Interaction("L0H1", 0.0, 0.0, 0.0, 0.0, 0.0, False, True)]),
    ],
)
def test_what_write_rows_wrote_comes_back_with_its_types(tmp_path, kind, rows):
    write_rows(tmp_path / "rows.csv", kind, rows)
    found = read_table(tmp_path / "rows.csv")
    expected = [vars(row) for row in rows]
    assert found == expected
    for row, wanted in zip(found, expected, strict=True):
        assert list(map(type, row.values())) == list(map(type, wanted.values()))


def test_a_column_is_text_where_one_of_its_cells_is(tmp_path):
    (tmp_path / "a.csv").write_text("name,number,none\n1,1,\nx,2.5,\n")
    assert read_table(tmp_path / "a.csv") == [
        {"name": "1", "number": 1.0, "none": None},
        {"name": "x", "number": 2.5, "none": None},
    ]
    (tmp_path / "empty.csv").write_text("")
    assert read_table(tmp_path / "empty.csv") == []
    (tmp_path / "torn.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(ValueError, match=r"torn\.csv, line 3: expected 2 cells, got 1$"):
        read_table(tmp_path / "torn.csv")


# ---- what cannot be synced


def test_a_run_without_a_name_of_its_own_is_called_after_its_directory(made, monkeypatch):
    monkeypatch.chdir(made)
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", None)  # any import of it fails
    assert not sync_run(Path(), "online", said.append)
    [line] = said
    assert line.startswith("W&B: this run is not tracked (")
    assert f"The files in {made} are complete without it; mhaprune sync {made} " in line


@pytest.mark.usefixtures("tracked")
def test_nobody_being_logged_in_is_told_in_one_line(made, monkeypatch):
    said: list[str] = []
    assert sync_run(made, "online", said.append) is False
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("W&B: this run is not tracked (")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("manifest.json", r"^{} is not the directory of a run: it has no manifest.json$"),
        ("summary.json", r"^the run in {} has no summary.json; nothing to sync without it$"),
        ("finished_utc", r"^the run in {} is not finished; go on with resume={}$"),
    ],
)
def test_what_is_no_finished_run_is_refused_in_one_line(made, missing, message):
    if missing == "finished_utc":
        entries = read(made / "manifest.json") | {"finished_utc": None}
        (made / "manifest.json").write_text(json.dumps(entries))
    else:
        (made / missing).unlink()
    with pytest.raises(ValueError, match=message.format(made, made)):
        sync_run(made, "offline", print)
    assert not (made / "wandb").exists()
