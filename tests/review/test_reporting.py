"""A run's page and a sweep's index: their data are those of the files, whatever program ran."""

import csv
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import yaml

from experiments import compare_scores, head_atlas, prune_heads, rank_heads
from mhaprune.review.index import refresh_index, runs_below, write_index
from mhaprune.review.page import pack_patterns
from mhaprune.review.report import read_page, rerun_command, write_report
from mhaprune.run.config import (
    CompareScoresConfig,
    HeadAtlasConfig,
    PruneHeadsConfig,
    RankHeadsConfig,
)
from mhaprune.run.launch import run_program
from mhaprune.tables.files import write_json
from mhaprune.tables.manifest import program_of
from mhaprune.tables.tables import SHOWN
from tests.tiny import make_place

TEXT = "</script><b>the cat's cat</b>"
SCHEMAS = {
    "rank_heads": (rank_heads, RankHeadsConfig),
    "compare_scores": (compare_scores, CompareScoresConfig),
    "prune_heads": (prune_heads, PruneHeadsConfig),
    "head_atlas": (head_atlas, HeadAtlasConfig),
}
SIZES = [
    "tracker=none",
    "dataset.num_stories=60",
    "evaluation.context_length=32",
    "evaluation.max_windows=4",
]
MEASURED = [*SIZES, "evaluation.resamples=100", "evaluation.calibration_windows=4"]
ROLES = ["roles.windows=1", "roles.repeats=2", "roles.period=16", f'text="{TEXT}"']
ARGUMENTS = {
    "rank_heads": [*MEASURED, *ROLES, "heads=[L0H*,L3H*]"],
    "compare_scores": [*MEASURED, "heads=[L0H*]", "~scores", "+scores={fisher: {}, random: {}}"],
    "prune_heads": [
        *(*MEASURED, "heads=[L0H*]", "pruning.step=4", "pruning.random_orders=2"),
        *("~pruning.orderings.leave_one_out", "pruning.pairs=3", "savings=true"),
    ],
    "head_atlas": [*SIZES, *ROLES],
}
FILES = {  # table of the page -> file
    "effects": "effects.csv",
    "roles": "roles.csv",
    "scores": "scores.csv",
    "agreement": "agreement.csv",
    "curves": "curve.csv",
    "interactions": "interactions.csv",
    "savings": "savings.csv",
}
HAVE = {
    "rank_heads": {"effects", "roles"},
    "compare_scores": {"scores", "agreement"},
    "prune_heads": {"curves", "interactions", "savings"},
    "head_atlas": {"roles"},
}
SECTIONS = {
    "rank_heads": ["effects", "heads", "attention", "about"],
    "compare_scores": ["scores", "agreement", "about"],
    "prune_heads": ["pruning", "interactions", "savings", "about"],
    "head_atlas": ["attention", "about"],
}
every_program = pytest.mark.parametrize("program", SCHEMAS)
Runs = dict[str, Path]


def start(place: Path, program: str, *arguments: str) -> None:
    """Run a program in `place`, in this process."""
    module, schema = SCHEMAS[program]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDRA_FULL_ERROR", "1")
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        patch.chdir(place)
        patch.setattr(sys, "argv", [f"/a b/{program}.py", *arguments])
        run_program(getattr(module, program), schema, program, refresh_index)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of each program on the demo model."""
    place = tmp_path_factory.mktemp("finished")
    for program, arguments in ARGUMENTS.items():
        start(place, program, *arguments, f"hydra.run.dir={program}")
    return {program: place / program for program in SCHEMAS}


@pytest.fixture
def copied(finished: Runs, tmp_path: Path) -> Callable[..., Path]:
    """Copy the run of a program, without some of its files."""

    def copied(program: str, *without: str) -> Path:
        ignored = shutil.ignore_patterns(*without, "report.html")
        return Path(shutil.copytree(finished[program], tmp_path / program, ignore=ignored))

    return copied


def data_of(page: str) -> dict[str, Any]:
    """What the page's scripts get to draw."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(text)


def drawn_in(directory: Path, name: str = "report.html") -> dict[str, Any]:
    return data_of((directory / name).read_text(encoding="utf-8"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def edit(path: Path, **changes: Any) -> None:
    write_json(path, read(path) | changes)


def cell(value: Any) -> str:
    """Spell a number of the page as CSV does."""
    return "" if value is None else str(value)


# ---- the page of a run


@every_program
def test_every_table_of_the_page_is_that_of_the_file(finished, program):
    drawn = drawn_in(finished[program])
    for name, file in FILES.items():
        rows = []
        if name in HAVE[program]:
            with (finished[program] / file).open(newline="", encoding="utf-8") as opened:
                rows = [[row[key] for key in SHOWN[name]] for row in csv.DictReader(opened)]
            assert rows, name
        assert tuple(drawn[name]["columns"]) == SHOWN[name]
        assert [[cell(value) for value in row] for row in drawn[name]["rows"]] == rows, name


@every_program
def test_the_page_has_the_sections_that_the_run_has_results_for(finished, program):
    page = (finished[program] / "report.html").read_text()
    assert re.findall(r'<section id="(\w+)"', page) == SECTIONS[program]


@every_program
def test_shape_thresholds_and_perplexity_are_those_of_the_run(finished, program):
    drawn = drawn_in(finished[program])
    summary = read(finished[program] / "summary.json")
    assert (drawn["num_layers"], drawn["num_heads"]) == (4, 8)
    assert (drawn["confidence"], drawn["tolerance_nats"], drawn["critical_nats"]) == (
        *(0.95, 0.01, 0.05),
    )
    assert drawn["ppl_intact"] == summary.get("baseline/perplexity")
    assert (drawn["ppl_intact"] is None) == (program in ("compare_scores", "head_atlas"))


@every_program
def test_a_page_written_again_is_the_program_s_own_to_the_byte(finished, copied, program):
    again = write_report(copied(program))
    assert again.name == "report.html"
    assert again.read_bytes() == (finished[program] / "report.html").read_bytes()


@every_program
def test_title_protocol_settings_and_versions_are_in_the_manifest(finished, program):
    manifest = read(finished[program] / "manifest.json")
    page = read_page(finished[program])
    ablation = "" if program == "head_atlas" else ", zero ablation"
    assert page.title == f"demo on stories{ablation}"
    assert re.fullmatch(rf"{program}, \d{{4}}-\d\d-\d\d \d\d:\d\d UTC", page.subtitle)
    assert manifest["finished_utc"].startswith(page.subtitle.split()[1])
    assert yaml.safe_load(page.config_yaml) == manifest["config"]
    assert page.protocol == manifest["protocol_line"]
    details = dict(page.details)
    assert details["weights hash"] == manifest["weights_hash"]
    assert details["torch"] == manifest["versions"]["torch"]
    assert (details["seed"], details["device"]) == ("0", manifest["device"])
    text = unescape((finished[program] / "report.html").read_text())
    for part in (page.title, page.subtitle, page.protocol, page.config_yaml, page.command):
        assert part in text


@pytest.mark.parametrize("program", ["rank_heads", "head_atlas"])
def test_the_sentence_is_that_of_the_file_and_its_markup_is_text(finished, program):
    with np.load(finished[program] / "attention.npz") as saved:
        tokens, weights = json.loads(str(saved["tokens"])), saved["weights"]
    viewer = drawn_in(finished[program])["viewer"]
    assert "".join(tokens) == TEXT
    assert (viewer["tokens"], viewer["note"]) == (tokens, None)
    assert viewer["weights"] == pack_patterns(weights / 255)
    page = (finished[program] / "report.html").read_text()
    assert len(re.findall(r"</script", page, re.I)) == 2
    assert "<b>" not in page


def test_a_run_without_roles_and_sentence_has_a_page_without_them(copied):
    page = write_report(copied("rank_heads", "roles.csv", "attention.npz")).read_text()
    assert re.findall(r'<section id="(\w+)"', page) == ["effects", "heads", "about"]
    drawn = data_of(page)
    assert "viewer" not in drawn
    assert drawn["roles"]["rows"] == []
    assert len(drawn["effects"]["rows"]) == 16


def test_the_heads_that_can_go_are_in_the_summary(finished):
    summary = read(finished["prune_heads"] / "summary.json")
    rows = drawn_in(finished["prune_heads"])["removable"]
    counts = [summary[f"heads_removed_at_{increase}"] for increase in ("1pct", "5pct", "10pct")]
    areas = summary["area_nats_least_first"]
    assert [row[0] for row in rows] == ["activation_norm", "gradient", "2 random"]
    for name, found, area in rows[:2]:
        assert found == [str(count[name]) for count in counts]
        assert area == f"{areas[name]:.2f}"
    _, ranges, area = rows[2]
    chance = [sorted(count[name] for name in ("random_0", "random_1")) for count in counts]
    assert ranges == [f"{low} to {high}" for low, high in chance]
    assert area == "{:.2f} to {:.2f}".format(*sorted((areas["random_0"], areas["random_1"])))


@every_program
def test_an_unfinished_run_is_refused_in_one_line_and_gets_no_page(copied, program):
    directory = copied(program)
    edit(directory / "manifest.json", finished_utc=None)
    with pytest.raises(ValueError) as error:
        write_report(directory)
    assert str(error.value) == (
        f"the run in {directory} is not finished; go on with resume={directory}"
    )
    assert not (directory / "report.html").exists()


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"^\S+ is not the directory of a run: it has no manif"):
        write_report(tmp_path)


def test_a_damaged_file_is_refused_by_its_name_and_line(copied):
    directory = copied("rank_heads")
    with (directory / "effects.csv").open("a") as file:
        file.write("0,1\n")
    with pytest.raises(ValueError, match=r"effects\.csv, line 18: "):
        write_report(directory)


# ---- headline numbers


def facts_of(directory: Path, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    write_json(directory / "summary.json", summary)
    return list(read_page(directory).facts)


def test_facts_are_the_perplexity_with_its_interval_and_the_verdicts(copied):
    counts = {"critical": 3, "useful": 0, "redundant": 12, "harmful": 1, "undetermined": 16}
    assert facts_of(
        copied("rank_heads"),
        {
            "baseline/nats_per_token": 1.8,
            "baseline/perplexity": 6.4499,
            "baseline/perplexity_low": 6.3012,
            "baseline/perplexity_high": 6.6,
            **{f"heads/num_{verdict}": count for verdict, count in counts.items()},
        },
    ) == [
        ("Intact perplexity", "6.450 [6.301, 6.600]"),
        *((verdict.capitalize(), str(count)) for verdict, count in counts.items()),
    ]


def test_facts_name_the_best_order_for_each_increase_and_chance_is_none(copied):
    counts = {"gradient": 4, "fisher": 7, "random_0": 9}
    assert facts_of(
        copied("prune_heads"),
        {
            "baseline/perplexity": 6.0,
            "heads_removed_at_1pct": counts,
            "heads_removed_at_5pct": counts | {"gradient": 8},
            "heads_removed_at_10pct": counts,
        },
    ) == [
        ("Intact perplexity", "6.000"),
        ("Heads that can go at +1%", "7 (fisher)"),
        ("Heads that can go at +5%", "8 (gradient)"),
        ("Heads that can go at +10%", "7 (fisher)"),
    ]


def test_facts_are_the_conclusion_and_the_heads_of_each_role(copied, finished):
    summary = read(finished["compare_scores"] / "summary.json")
    assert list(read_page(finished["compare_scores"]).facts) == [
        ("Conclusion", summary["compare/conclusion"])
    ]
    assert facts_of(copied("head_atlas"), {"roles/induction": 2, "roles/duplicate token": 0}) == [
        ("Duplicate token heads", "0"),
        ("Induction heads", "2"),
    ]


def test_an_order_that_was_not_measured_all_the_way_has_no_area(copied):
    counts = {"gradient": 4, "gradient_healed": 8}
    directory = copied("prune_heads")
    summary = {f"heads_removed_at_{n}pct": counts for n in (1, 5, 10)}
    areas = {"area_nats_least_first": {"gradient": 1.005}, "baseline/perplexity": 6.0}
    write_json(directory / "summary.json", summary | areas)
    assert list(read_page(directory).removable) == [
        ("gradient", ["4", "4", "4"], "1.00"),
        ("gradient_healed", ["8", "8", "8"], ""),
    ]


def test_the_command_is_quoted_for_a_shell_and_starts_in_a_checkout(finished):
    words = [*ARGUMENTS["head_atlas"], "hydra.run.dir=head_atlas"]
    command = read_page(finished["head_atlas"]).command
    assert shlex.split(command) == ["python", "experiments/head_atlas.py", *words]
    manifest = {"command": ["C d/x.py", "heads=[L0H*]", "text=it's $HOME", "a"]}
    assert rerun_command(manifest) == (
        """python experiments/x.py 'heads=[L0H*]' 'text=it'"'"'s $HOME' a"""
    )
    assert program_of(manifest) == "x"


def test_a_run_that_was_resumed_still_shows_how_it_was_started(copied):
    directory = copied("head_atlas")
    command = read_page(directory).command
    start(directory.parent, "head_atlas", "resume=head_atlas")
    assert read_page(directory).command == command


# ---- the index of a sweep

SWEEP = [
    *("model=local", "model.path=model", "model.device=cpu", "dataset=text"),
    *("dataset.path=stories.txt", "evaluation.context_length=16", "evaluation.max_windows=4"),
    *("evaluation.resamples=100", "heads=[L0H*]", "roles.windows=0", "hydra.sweep.dir=sweep"),
    "tracker=none",
]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose second job of three failed."""
    place = make_place(tmp_path_factory.mktemp("swept"))
    with pytest.raises(SystemExit):
        start(place, "rank_heads", "-m", *SWEEP, "seed=1,x,3")
    return place / "sweep"


@pytest.fixture
def sweep(swept: Path, tmp_path: Path) -> Path:
    """A copy of the sweep, to be changed."""
    return Path(shutil.copytree(swept, tmp_path / "sweep"))


NAMES = [f"{number}_local_text_zero" for number in range(3)]
NOT_A_NUMBER = "failed: seed: Value 'x' of type 'str' could not be converted to Integer"


def test_the_index_that_the_last_job_leaves_shows_all_jobs(swept):
    drawn = drawn_in(swept, "index.html")
    assert [run["name"] for run in drawn["runs"]] == NAMES
    assert [run["settings"]["state"] for run in drawn["runs"]] == [
        *("finished", NOT_A_NUMBER, "finished")
    ]
    assert [run["settings"]["seed"] for run in drawn["runs"]] == ["1", "x", "3"]


def test_each_run_of_the_index_has_its_own_numbers_and_effects(swept):
    first, failed, third = drawn_in(swept, "index.html")["runs"]
    for run in (first, third):
        summary = read(swept / run["name"] / "summary.json")
        assert run["numbers"]["perplexity"] == summary["baseline/perplexity"]
        assert run["numbers"]["nats per token"] == summary["baseline/nats_per_token"]
        assert run["numbers"]["num undetermined"] == summary["heads/num_undetermined"]
        assert (run["num_layers"], run["num_heads"], run["tolerance_nats"]) == (2, 4, 0.01)
        with (swept / run["name"] / "effects.csv").open(newline="") as file:
            rows = [[row[key] for key in SHOWN["effects"]] for row in csv.DictReader(file)]
        assert [[cell(value) for value in row] for row in run["effects"]["rows"]] == rows
    assert (failed["numbers"], failed["effects"]["rows"]) == ({}, [])


def test_every_link_of_the_index_leads_to_something(swept):
    links = [unquote(run["href"]) for run in drawn_in(swept, "index.html")["runs"]]
    assert links == [f"{NAMES[0]}/report.html", NAMES[1], f"{NAMES[2]}/report.html"]
    assert all((swept / link).exists() for link in links)


def test_an_index_of_finished_runs_has_only_settings_that_differ_as_columns(sweep):
    shutil.rmtree(sweep / NAMES[1])
    page = write_index(sweep).read_text()
    assert data_of(page)["setting_names"] == ["seed"]
    shared = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page))
    assert (shared["state"], shared["evaluation.max_windows"]) == ("finished", "4")
    assert not [name for name in shared if name.startswith("tracker")]


def test_a_job_that_failed_adds_no_columns_but_those_that_differ(sweep):
    names = data_of(write_index(sweep).read_text())["setting_names"]
    assert sorted(names) == ["seed", "state"]


def test_runs_are_in_the_order_of_their_job_numbers(sweep):
    for number in (10, 21, 9):
        shutil.copytree(sweep / NAMES[2], sweep / f"{number}_local_text_zero")
    shutil.copytree(sweep / NAMES[2], sweep / "by_hand")
    (sweep / "notes").mkdir()
    assert [path.name.split("_")[0] for path in runs_below(sweep)] == [
        *("by", "0", "1", "2", "9", "10", "21")
    ]
    assert [run["name"] for run in data_of(write_index(sweep).read_text())["runs"]] == [
        path.name for path in runs_below(sweep)
    ]


def test_a_run_that_goes_on_is_shown_as_not_finished_and_its_page_as_its_directory(sweep):
    edit(sweep / NAMES[0] / "manifest.json", finished_utc=None)
    run, *_ = data_of(write_index(sweep).read_text())["runs"]
    assert (run["settings"]["state"], run["href"]) == ("not finished", NAMES[0])
    assert (run["numbers"], run["settings"]["seed"]) == ({}, "1")


def shard_job(directory: Path, count: int) -> None:
    """Make a job's own directory, as Hydra leaves it where the job works elsewhere."""
    (directory / ".hydra").mkdir(parents=True)
    text = yaml.safe_dump({"seed": 1, "shard": {"count": count, "index": 0}})
    (directory / ".hydra" / "config.yaml").write_text(text)


def test_jobs_that_work_on_a_shard_elsewhere_are_left_out_unless_they_failed(sweep):
    shard_job(sweep / "3_local_text_zero", 4)
    shard_job(sweep / "4_local_text_zero", 4)
    shard_job(sweep / "5_local_text_zero", 1)
    write_json(sweep / "4_local_text_zero" / "failed.json", {"error": "no memory"})
    runs = data_of(write_index(sweep).read_text())["runs"]
    assert [run["name"].split("_")[0] for run in runs] == ["0", "1", "2", "4", "5"]
    assert [run["settings"]["state"] for run in runs[3:]] == ["failed: no memory", "not finished"]


def test_a_directory_without_runs_has_no_index(tmp_path):
    with pytest.raises(ValueError, match=r"^no run below \S+: expected directories with a manif"):
        write_index(tmp_path)
    assert not (tmp_path / "index.html").exists()


def test_only_a_sweep_s_index_is_refreshed(sweep):
    """It then shows what the jobs left since: here that one more failed."""
    index, before = sweep / "index.html", data_of((sweep / "index.html").read_text())
    index.write_text("old")
    refresh_index(sweep / NAMES[0])
    assert data_of(index.read_text()) == before
    write_json(sweep / NAMES[2] / "failed.json", {"error": "no memory"})
    (sweep / NAMES[2] / "manifest.json").unlink()
    refresh_index(sweep / NAMES[0])
    first, second, third = data_of(index.read_text())["runs"]
    assert [first, second] == before["runs"][:2]
    assert (third["name"], third["settings"]["state"]) == (NAMES[2], "failed: no memory")
    index.write_text("old")
    (sweep / "multirun.yaml").unlink()
    refresh_index(sweep / NAMES[0])
    assert index.read_text() == "old"


def test_an_index_of_comparisons_has_each_score_s_agreement(finished, tmp_path):
    shutil.copytree(finished["compare_scores"], tmp_path / "0_run")
    summary = read(tmp_path / "0_run" / "summary.json")
    [run] = data_of(write_index(tmp_path).read_text())["runs"]
    assert run["numbers"]["num heads"] == 8
    for score in ("fisher", "random"):
        expected = summary[f"compare/{score}/spearman"]
        assert [n for name, n in run["numbers"].items() if score in name] == [expected]


def test_an_index_of_prunings_has_the_best_order_s_counts(finished, tmp_path):
    shutil.copytree(finished["prune_heads"], tmp_path / "0_run")
    counts = {"gradient": 1, "fisher": 3, "random_0": 8}
    changes = {f"heads_removed_at_{n}pct": counts for n in (1, 5, 10)}
    edit(tmp_path / "0_run" / "summary.json", **changes)
    [run] = data_of(write_index(tmp_path).read_text())["runs"]
    assert {f"heads that go at +{n}%": 3 for n in (1, 5, 10)}.items() <= run["numbers"].items()
    summary = read(tmp_path / "0_run" / "summary.json")
    assert run["numbers"]["perplexity"] == summary["baseline/perplexity"]


def test_an_index_of_prunings_says_each_count_once(finished, tmp_path):
    shutil.copytree(finished["prune_heads"], tmp_path / "0_run")
    [run] = data_of(write_index(tmp_path).read_text())["runs"]
    assert [name for name in run["numbers"] if "10" in name] == ["heads that go at +10%"]


@pytest.mark.parametrize("torn", ["", "text: 'The c"])
def test_a_job_that_is_just_being_started_does_not_break_the_index(sweep, torn):
    """Another process writes its configuration at this moment."""
    (sweep / "3_local_text_zero" / ".hydra").mkdir(parents=True)
    (sweep / "3_local_text_zero" / ".hydra" / "config.yaml").write_text(torn)
    runs = data_of(write_index(sweep).read_text())["runs"]
    assert [run["name"] for run in runs][:3] == NAMES


def test_a_job_that_failed_does_not_show_the_home_directory(sweep, monkeypatch):
    saved = sweep / NAMES[1] / ".hydra" / "config.yaml"
    config = yaml.safe_load(saved.read_text())
    config["model"]["path"] = "/home/somebody/model"
    saved.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("HOME", "/home/somebody")
    assert "somebody" not in write_index(sweep).read_text()
