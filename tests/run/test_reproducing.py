"""Reproducing runs: identical where nothing changed, refused where model or text did."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from experiments import prune_heads, rank_heads
from mhaprune.run import reproducing
from mhaprune.run.comparing import RULE
from mhaprune.run.config import PruneHeadsConfig, RankHeadsConfig
from mhaprune.run.launch import run_program
from mhaprune.run.reproducing import (
    KEYS,
    TABLE_RULE,
    keep_config,
    new_directory,
    reproduce,
    row_problems,
)
from mhaprune.tables.csv_files import read_effects, write_effects
from mhaprune.tables.rows import HeadEffect
from tests.programs import resume
from tests.tiny import make_place

SMALL = [
    *("model=local", "model.path=model", "model.device=cpu"),
    *("dataset=text", "dataset.path=stories.txt"),
    *("evaluation.context_length=16", "evaluation.max_windows=6", "evaluation.resamples=200"),
    *("evaluation.calibration_windows=4", "heads=[L0H0,L0H1,L1H1,L1H3]", "tracker=none"),
]
PRUNING = [
    *("~pruning.orderings.leave_one_out", "~pruning.orderings.activation_norm"),
    *("pruning.random_orders=1", "pruning.pairs=2", "export.dir=pruned", "export.num_heads=1"),
]


def start(place: Path, program: Any, schema: type, *arguments: str) -> Path:
    """Run a program in `place`, in this process; return its run directory."""
    name = Path(program.__file__).stem
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDRA_FULL_ERROR", "1")
        patch.chdir(place)
        own = f"hydra.run.dir={name}"
        patch.setattr(sys, "argv", [program.__file__, *SMALL, *arguments, own])
        run_program(getattr(program, name), schema, name)
    return place / name


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with a tiny model, a text, and a run of rank_heads, started there, on both."""
    place = make_place(tmp_path_factory.mktemp("original"))
    start(place, rank_heads, RankHeadsConfig)
    return place


@pytest.fixture
def place(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the original place, as if the run had been started in it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    place = tmp_path / "place"
    shutil.copytree(original, place)
    saved = place / "rank_heads" / ".hydra" / "hydra.yaml"
    saved.write_text(saved.read_text().replace(str(original), str(place)))
    monkeypatch.chdir(tmp_path)
    return place


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, place: Path) -> Callable[..., None]:
    """Let the program only copy the files of the run, as a program that reproduces it would."""

    def arrange(change: Callable[[Path], object] = lambda new: None) -> None:
        original = place / "copy"
        shutil.copytree(place / "rank_heads", original)

        def rerun(program: str, new: Path, started_in: Path) -> None:
            for path in [*original.glob("*.csv"), original / "manifest.json"]:
                shutil.copy(path, new)
            change(new)

        monkeypatch.setattr(reproducing, "rerun", rerun)

    return arrange


def edit_effects(path: Path, head: tuple[int, int], **changes: Any) -> None:
    rows = [
        HeadEffect(**vars(row) | (changes if (row.layer, row.head) == head else {}))
        for row in read_effects(path)
    ]
    write_effects(path, rows)


def tables_of(run: Path) -> str:
    """The CSV files that are compared, as they are listed."""
    return ", ".join(sorted({path.name for path in run.glob("*.csv")} - {"by_role.csv"}))


def effect_of(path: Path, layer: int, head: int) -> HeadEffect:
    [row] = [row for row in read_effects(path) if (row.layer, row.head) == (layer, head)]
    return row


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refused(run: Path, lines: list[str]) -> str:
    """Return why a run is not reproduced, and see that nothing ran and nothing was written."""
    before = sorted(run.parent.rglob("*"))
    with pytest.raises(ValueError) as error:
        reproduce(run, None, lines.append)
    assert sorted(run.parent.rglob("*")) == before
    assert not [line for line in lines if line.startswith("Running")]
    [line] = str(error.value).splitlines()
    return line


# ---- programs that really run


def test_a_run_is_reproduced_to_the_byte_in_a_directory_of_its_own(place, lines):
    run = place / "rank_heads"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert reproduce(Path("place/rank_heads"), None, lines.append) is True
    new = place / "rank_heads_reproduced"
    for path in run.glob("*.csv"):
        assert (new / path.name).read_bytes() == path.read_bytes()
    assert {path: path.read_bytes() for path in before} == before
    assert lines == [
        f"Running rank_heads again with the configuration of {run}, in {new}",
        f"identical: {tables_of(run)}",
        "The results agree",
    ]
    first, second = (json.loads((each / "manifest.json").read_text()) for each in (run, new))
    assert second["config"] == first["config"]
    assert second["started_utc"] >= first["finished_utc"]


def test_a_pruning_run_is_reproduced_without_its_export(place, lines, capfd, monkeypatch):
    """In this process, which has imported the program already."""

    def rerun(program: str, new: Path, started_in: Path) -> None:
        assert (program, started_in) == ("prune_heads", place)
        monkeypatch.chdir(started_in)
        resume("prune_heads", new)

    monkeypatch.setattr(reproducing, "rerun", rerun)
    run = start(place, prune_heads, PruneHeadsConfig, *PRUNING)
    exported = {path: path.stat().st_mtime_ns for path in (place / "pruned").iterdir()}
    assert reproduce(run, place / "again", lines.append) is True
    assert "identical: curve.csv, interactions.csv" in lines
    assert "The pruned model is not exported again (export.dir=pruned)" in lines
    assert "differs in what was run: export.dir: pruned -> null" in lines
    assert {path: path.stat().st_mtime_ns for path in (place / "pruned").iterdir()} == exported
    assert f"Files in {place / 'again'}: curve.csv" in capfd.readouterr().out


def test_a_program_that_fails_is_an_error_that_names_the_new_directory(place, lines, monkeypatch):
    failing = shutil.which("false")
    assert failing
    monkeypatch.setattr(sys, "executable", failing)
    with pytest.raises(ValueError) as error:
        reproduce(place / "rank_heads", place / "new", lines.append)
    assert str(error.value) == f"rank_heads ended with exit code 1 in {place / 'new'}"


def test_the_configuration_of_a_reproduction_is_that_of_the_run_but_for_tracker_and_export(
    tmp_path,
):
    config = {
        "scores": {"zeta": {}, "alpha": {"steps": 16, "rate": 1e-5, "name": "1e-5"}},
        "tracker": {"mode": "online", "project": "p"},
        "export": {"dir": "pruned", "form": "dense"},
    }
    new = tmp_path / "new"
    keep_config(new, config, "prune_heads", tmp_path, "offline", lambda line: None)
    saved = OmegaConf.to_container(OmegaConf.load(new / ".hydra" / "config.yaml"))
    assert saved == {
        "scores": config["scores"],
        "tracker": {"mode": "offline", "project": "p"},
        "export": {"dir": None, "form": "dense"},
    }
    assert isinstance(saved, dict) and list(saved["scores"]) == ["zeta", "alpha"]
    hydra = OmegaConf.load(new / ".hydra" / "hydra.yaml")
    assert hydra.hydra.runtime.cwd == str(tmp_path)
    assert hydra.hydra.job.name == "prune_heads"


# ---- what agrees


def test_an_effect_beyond_the_interval_does_not_agree(place, lines, copied):
    copied()
    path = place / "rank_heads" / "effects.csv"
    row = effect_of(path, 1, 1)
    shift = row.ci_high - row.ci_low + 0.001
    moved = {name: getattr(row, name) + shift for name in ("effect_nats", "ci_low", "ci_high")}
    edit_effects(path, (1, 1), **moved)
    assert reproduce(place / "rank_heads", None, lines.append) is False
    [problem] = [line for line in lines if line.startswith("does not agree")]
    assert problem.startswith(
        "does not agree: effects.csv, L1H1: intervals do not overlap: "
        f"{row.effect_nats + shift:+.4f} ["
    )
    assert problem.endswith(f"-> {row.effect_nats:+.4f} [{row.ci_low:+.4f}, {row.ci_high:+.4f}]")
    assert lines[-2:] == [f"{RULE} {TABLE_RULE}", "The results do not agree"]


def test_an_effect_within_the_interval_agrees_and_the_difference_is_told(place, lines, copied):
    copied()
    path = place / "rank_heads" / "effects.csv"
    row = effect_of(path, 0, 1)
    shift = (row.ci_high - row.ci_low) / 4
    edit_effects(path, (0, 1), effect_nats=row.effect_nats + shift)
    assert reproduce(place / "rank_heads", None, lines.append) is True
    assert lines[-3:] == [
        f"effects.csv differs by at most {shift:.2g} nats/token "
        f"(L0H1: {row.effect_nats + shift:+.4f} -> {row.effect_nats:+.4f})",
        f"{RULE} {TABLE_RULE}",
        "The results agree",
    ]


def test_a_contradicting_verdict_does_not_agree(place, lines, copied):
    copied(lambda new: edit_effects(new / "effects.csv", (0, 0), verdict="critical"))
    edit_effects(place / "rank_heads" / "effects.csv", (0, 0), verdict="redundant")
    assert reproduce(place / "rank_heads", None, lines.append) is False
    assert "does not agree: effects.csv, L0H0: verdicts contradict: redundant -> critical" in lines


def test_a_table_that_is_not_written_again_does_not_agree(place, lines, copied):
    copied()
    (place / "rank_heads" / "extra.csv").write_text("layer,head\n0,0\n")
    assert reproduce(place / "rank_heads", None, lines.append) is False
    assert "does not agree: extra.csv was not written again" in lines


def test_other_versions_are_named(place, lines, copied):
    copied()
    versions = json.loads((place / "rank_heads" / "manifest.json").read_text())["versions"]
    edit_json(
        place / "rank_heads" / "manifest.json",
        lambda manifest: manifest["versions"].update(torch="1.0", numpy=None),
    )
    assert reproduce(place / "rank_heads", None, lines.append) is True
    assert lines[1:] == [
        f"identical: {tables_of(place / 'rank_heads')}",
        f"differs in what was run: versions.numpy: null -> {versions['numpy']}",
        f"differs in what was run: versions.torch: 1.0 -> {versions['torch']}",
        "The results agree",
    ]


SCORES = [
    {"score": "fisher", "layer": "0", "head": "0", "value": "2.0", "standard_error": ""},
    {"score": "fisher", "layer": "0", "head": "1", "value": "0.001", "standard_error": ""},
    {"score": "gradient", "layer": "0", "head": "0", "value": "0.1", "standard_error": ""},
]


@pytest.mark.parametrize(
    ("row", "value", "agrees"),
    [
        (0, "2.0199", True),
        (0, "2.0201", False),
        (1, "0.0209", True),
        (1, "-0.0191", False),
        (2, "0.10099", True),
        (2, "0.1011", False),
        (2, "", False),
    ],
)
def test_scores_agree_within_1_percent_of_the_largest_of_their_kind(row, value, agrees):
    other = [dict(each) for each in SCORES]
    other[row]["value"] = value
    keys = KEYS["scores.csv"]
    name = " ".join(SCORES[row][key] for key in keys)
    change = f"value {SCORES[row]['value']}, standard_error  -> value {value}, standard_error "
    assert row_problems(SCORES, other[::-1], keys) == ([] if agrees else [f"{name}: {change}"])


def test_curves_agree_where_their_intervals_overlap():
    row = {"ordering": "fisher", "direction": "least", "num_removed": "4", "perplexity": "5.0"}
    first, keys = [row | {"ci_low": "4.0", "ci_high": "6.0"}], KEYS["curve.csv"]
    assert row_problems(first, [row | {"ci_low": "6.0", "ci_high": "9.0"}], keys) == []
    assert row_problems(first, [row | {"ci_low": "6.1", "ci_high": "9.0"}], keys) == [
        "fisher least 4: perplexity 5.0, ci_low 4.0, ci_high 6.0 -> "
        "perplexity 5.0, ci_low 6.1, ci_high 9.0"
    ]
    assert row_problems(first, [], keys) == ["fisher least 4: in one of the runs only"]


def test_rows_of_an_unknown_file_go_by_their_numbers_and_text_must_be_equal():
    first = [{"kind": "a", "value": "100"}, {"kind": "b", "value": "1"}]
    assert row_problems(first, [first[0], {"kind": "b", "value": "2"}], ()) == []
    assert row_problems(first, [first[0], {"kind": "c", "value": "1"}], ()) == [
        "row 2: kind b, value 1 -> kind c, value 1"
    ]
    assert row_problems(first, first[:1], ()) == ["row 2: in one of the runs only"]


def test_seconds_are_not_compared(tmp_path):
    for name, seconds in (("a", 1.5), ("b", 2.5)):
        (tmp_path / name).write_text(f"score,spearman,seconds\nfisher,0.5,{seconds}\n")
    table = reproducing.read_table(tmp_path / "a")
    assert table == [{"score": "fisher", "spearman": "0.5"}]
    assert reproducing.read_table(tmp_path / "b") == table


# ---- what is refused


def test_another_text_is_refused_and_named(place, lines):
    manifest = json.loads((place / "rank_heads" / "manifest.json").read_text())
    text = place / "stories.txt"
    text.write_text("Once more. " + text.read_text())
    line = refused(place / "rank_heads", lines)
    assert line.startswith(
        "the evaluation text (or the tokenizer) has changed: tokens hash "
        f"{manifest['tokens_hash'][:12]} then, "
    )
    assert line.endswith(" now (dataset.path=stories.txt)")


def test_another_calibration_text_is_refused_and_named(place, lines):
    with (place / "stories.txt").open("a") as file:
        file.write("The end.")
    line = refused(place / "rank_heads", lines)
    assert "the calibration text (or the tokenizer) has changed: calibration hash " in line


def test_another_model_is_refused_and_named(place, lines):
    manifest = json.loads((place / "rank_heads" / "manifest.json").read_text())
    weights = place / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["transformer.h.0.mlp.c_fc.bias"] += torch.tensor(0.5)
    save_file(tensors, weights, metadata={"format": "pt"})
    line = refused(place / "rank_heads", lines)
    assert line.startswith(
        f"the model has changed: weights hash {manifest['weights_hash'][:12]} then, "
    )
    assert line.endswith(" now (model.path=model)")


def test_what_is_gone_is_refused_and_named(place, lines):
    (place / "stories.txt").unlink()
    assert refused(place / "rank_heads", lines).startswith("expected a text file at stories.txt")
    shutil.rmtree(place / "model")
    assert refused(place / "rank_heads", lines).startswith("model has no config.json")
    for path in (place / "rank_heads").glob("*.csv"):
        path.unlink()
    assert refused(place / "rank_heads", lines).endswith("to compare: it has no CSV file")
    (place / "rank_heads" / ".hydra" / "config.yaml").unlink()
    line = refused(place / "rank_heads", lines)
    assert line.startswith("cannot read ") and line.endswith(
        "config.yaml: No such file or directory"
    )
    (place / "rank_heads" / "manifest.json").unlink()
    assert refused(place / "rank_heads", lines).endswith("it has no manifest.json")


def test_a_run_of_no_program_of_ours_is_refused(place, lines):
    run = place / "rank_heads"
    edit_json(run / "manifest.json", lambda manifest: manifest.update(command=["/a/other.py"]))
    hydra = run / ".hydra" / "hydra.yaml"
    program = reproducing.find_program
    manifest = json.loads((run / "manifest.json").read_text())
    assert program(run, manifest, {"job": {"name": "rank_heads"}}) == "rank_heads"
    hydra.write_text(hydra.read_text().replace("name: rank_heads", "name: other"))
    assert "was made by other, which is none of rank_heads, compare_scores, " in refused(run, lines)


def test_where_the_run_was_started_is_gone_relative_paths_start_here(place, tmp_path, lines):
    assert reproducing.starting_place({"runtime": {"cwd": str(place)}}, lines.append) == place
    gone = {"runtime": {"cwd": "/no/such/place"}}
    assert lines == []
    assert reproducing.starting_place(gone, lines.append) == tmp_path
    assert lines == [
        "The run was started in /no/such/place, which is not there; relative paths start here "
        "instead"
    ]


def test_the_new_directory_is_never_one_that_holds_something(tmp_path):
    run = tmp_path / "a.run"
    for ending in ("_reproduced", "_reproduced_2", "_reproduced_3"):
        assert new_directory(run, None) == tmp_path / f"a.run{ending}"
        (tmp_path / f"a.run{ending}").mkdir()
    empty = tmp_path / "a.run_reproduced"
    assert new_directory(run, empty) == empty
    (empty / "file").touch()
    for taken in (empty, empty / "file"):
        with pytest.raises(ValueError, match="is not an empty directory; choose another"):
            new_directory(run, taken)


def test_a_ranking_to_prune_by_that_is_gone_is_refused(place, lines):
    saved = place / "rank_heads" / ".hydra" / "config.yaml"
    saved.write_text(saved.read_text() + "pruning:\n  ranking: gone\n")
    line = refused(place / "rank_heads", lines)
    assert line == "gone is not the directory of a run: it has no manifest.json"
