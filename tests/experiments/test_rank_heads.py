"""The program from its arguments to its files: right numbers, resuming, mistakes in one line."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from experiments import rank_heads as program
from mhaprune.measure import measurer
from mhaprune.model.heads import Head, select_heads
from mhaprune.run import ranking
from mhaprune.run.config import CONF_DIR, RankHeadsConfig, validate
from mhaprune.run.launch import run_program
from mhaprune.text.stories import story_texts
from tests.micro import numpy_gpt2, numpy_nats, output_rows, without_heads
from tests.tiny import tiny_gpt2, tiny_tokenizer

CONTEXT, NUM_WINDOWS = 16, 6
HEADS = select_heads(["L*H*"], 2, 4)
EXPERIMENTS = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))
COLUMNS = (
    "layer head effect_nats ci_low ci_high ppl_ablated delta_ppl verdict rank "
    "delta_ppl_low delta_ppl_high standard_error num_windows "
    "correlation variance_reduction"
).split()
FILES = {
    *("effects.csv", "heatmap.png", "manifest.json", "measurements.jsonl", "summary.json"),
    *("attention.npz", "by_role.csv", "report.html", "roles.csv"),
}
Run = Callable[..., Path]


@dataclass(frozen=True)
class Place:
    """A directory with a tiny model of 2 layers x 4 heads and two texts, and how to name them."""

    directory: Path

    @property
    def model(self) -> str:
        return f"model.path={self.directory}/model"

    @property
    def texts(self) -> tuple[str, str]:
        paths = (self.directory / "evaluation.txt", self.directory / "calibration.txt")
        return f"dataset.path={paths[0]}", f"dataset.calibration_path={paths[1]}"

    def arguments(self, num_windows: int = NUM_WINDOWS, *more: str) -> list[str]:
        """A whole run on some windows of `CONTEXT` tokens."""
        evaluation = {"context_length": CONTEXT, "max_windows": num_windows, "resamples": 200}
        return [
            *("model=local", self.model, "model.device=cpu", "dataset=text", *self.texts),
            *(f"evaluation.{key}={value}" for key, value in evaluation.items()),
            *("tracker=none", *more),
        ]

    def ids(self, name: str) -> torch.Tensor:
        text = (self.directory / name).read_text()
        return torch.tensor(tiny_tokenizer()(text)["input_ids"])


def make_model() -> GPT2LMHeadModel:
    """Random weights so large that every head matters."""
    model = tiny_gpt2()
    with torch.no_grad():
        for weight in model.transformer.h.parameters():
            weight *= 6
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    directory = tmp_path_factory.mktemp("place")
    make_model().save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    (directory / "evaluation.txt").write_text("\n".join(story_texts(5, 20)))
    (directory / "calibration.txt").write_text("\n".join(story_texts(6, 3)))
    return Place(directory)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the program with these arguments; the run directory is `tmp_path / name`."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, name: str | None = "run") -> Path:
        directory = [f"hydra.run.dir={tmp_path / name}"] if name else []
        monkeypatch.setattr(sys, "argv", ["rank_heads.py", *arguments, *directory])
        run_program(program.rank_heads, RankHeadsConfig, "rank_heads")
        return tmp_path / (name or "")

    return run


@pytest.fixture
def refused(run: Run, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the program and return the one line with which it refuses."""

    def refused(*arguments: str, name: str | None = "run") -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            run(*arguments, name=name)
        assert stop.value.code == 2
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return refused


def effects_in(directory: Path) -> dict[Head, dict[str, str]]:
    """The rows of effects.csv, in its order."""
    with (directory / "effects.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {Head(int(row["layer"]), int(row["head"])): row for row in rows}


def json_in(directory: Path, name: str) -> dict[str, Any]:
    return json.loads((directory / name).read_text())


def lines_in(directory: Path) -> list[str]:
    path = directory / "measurements.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def content(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# ---- the numbers, against loops that share no code with the library


def windows_of(ids: torch.Tensor) -> list[torch.Tensor]:
    """Windows that read `CONTEXT` tokens and score the one after each; the next starts there."""
    return [ids[start : start + CONTEXT + 1] for start in range(0, len(ids) - CONTEXT, CONTEXT)]


def loss_of(model: Any, windows: list[torch.Tensor]) -> float:
    """Nats per token."""
    with torch.no_grad():
        logits = torch.cat([model(window[None, :-1]).logits[0] for window in windows])
    return F.cross_entropy(logits, torch.cat([window[1:] for window in windows])).item()


@pytest.mark.parametrize("engine", ["replay", "gating"])
def test_a_run_writes_the_loss_without_each_head(run, place, engine):
    directory = run(*place.arguments(), f"evaluation.engine={engine}")
    model, windows = make_model(), windows_of(place.ids("evaluation.txt"))[:NUM_WINDOWS]
    intact = loss_of(model, windows)
    effects = effects_in(directory)
    assert len(effects) == 8
    for head, row in effects.items():
        ablated = loss_of(without_heads(model, [head]), windows)
        assert list(row) == COLUMNS
        assert float(row["effect_nats"]) == pytest.approx(ablated - intact, abs=2e-6)
        assert float(row["ppl_ablated"]) == pytest.approx(np.exp(ablated), rel=2e-6)
        assert float(row["delta_ppl"]) == pytest.approx(np.exp(ablated) - np.exp(intact), abs=1e-3)
        assert float(row["ci_low"]) < float(row["effect_nats"]) < float(row["ci_high"])
        assert row["num_windows"] == str(NUM_WINDOWS)
        assert row["correlation"] == row["variance_reduction"] == ""
    assert min(abs(float(row["effect_nats"])) for row in effects.values()) > 1e-4
    in_order = sorted(effects, key=lambda head: -float(effects[head]["effect_nats"]))
    assert list(effects) == in_order
    assert [int(effects[head]["rank"]) for head in in_order] == list(range(1, 9))

    summary = json_in(directory, "summary.json")
    assert summary["baseline/nats_per_token"] == pytest.approx(intact, rel=1e-6)
    assert summary["baseline/perplexity"] == pytest.approx(np.exp(intact), rel=1e-5)
    scored = tiny_tokenizer().decode(torch.cat([window[1:] for window in windows]))
    bits = intact * NUM_WINDOWS * CONTEXT / np.log(2)
    assert summary["baseline/bits_per_byte"] == pytest.approx(bits / len(scored), rel=1e-6)


def loss_with(
    windows: list[torch.Tensor], head: Head, stand_in: Callable[[int], np.ndarray]
) -> float:
    """Nats per token, in numpy, where `stand_in(window)` replaces the head's z."""

    def replace(window: int) -> Callable[[int, np.ndarray], np.ndarray]:
        def replaced(layer: int, z: np.ndarray) -> np.ndarray:
            if layer == head.layer:
                z = z.copy()
                z[:, head.head] = stand_in(window)
            return z

        return replaced

    model = make_model()
    nats = [
        numpy_nats(numpy_gpt2(model, window[:-1], replace(index))[0], window[1:].numpy())
        for index, window in enumerate(windows)
    ]
    return sum(nats) / (len(windows) * CONTEXT)


@pytest.mark.parametrize("ablation", ["mean", "resample"])
@pytest.mark.parametrize("engine", ["replay", "gating"])
def test_mean_and_resample_ablations_put_calibration_outputs_in_a_head_s_place(
    run, place, ablation, engine
):
    choices = [f"ablation={ablation}", f"evaluation.engine={engine}", "seed=3"]
    arguments = place.arguments(NUM_WINDOWS, *choices, "evaluation.calibration_windows=4")
    effects = effects_in(run(*arguments))
    model, windows = make_model(), windows_of(place.ids("evaluation.txt"))[:NUM_WINDOWS]
    calibration = windows_of(place.ids("calibration.txt"))[:4]
    donors = [numpy_gpt2(model, window[:-1])[1] for window in calibration]
    order = np.random.default_rng(3).permutation(4)
    intact = loss_of(model, windows)
    for head, row in effects.items():
        z = np.stack([outputs[head.layer][:, head.head] for outputs in donors])
        stand_ins = {
            "mean": lambda window, z=z: z.mean(axis=(0, 1)),
            "resample": lambda window, z=z: z[order[window % 4]],
        }
        ablated = loss_with(windows, head, stand_ins[ablation])
        assert float(row["effect_nats"]) == pytest.approx(ablated - intact, abs=2e-6)
    assert min(abs(float(row["effect_nats"])) for row in effects.values()) > 1e-4


def test_a_run_leaves_its_files_and_says_what_it_was(run, place):
    directory = run(*place.arguments())
    assert {path.name for path in directory.iterdir() if path.is_file()} == FILES
    assert {path.name for path in directory.iterdir()} == FILES | {".hydra"}
    assert (directory / "heatmap.png").read_bytes().startswith(b"\x89PNG\r\n")
    manifest = json_in(directory, "manifest.json")
    assert manifest["finished_utc"] >= manifest["started_utc"]
    assert manifest["config"]["evaluation"]["context_length"] == CONTEXT
    assert manifest["protocol"]["num_windows"] == NUM_WINDOWS
    assert len(lines_in(directory)) == 2 * (1 + 2)  # blocks of 4 and 2 windows; intact, two layers


def test_one_layer_can_be_measured_alone(run, place):
    directory = run(*place.arguments(NUM_WINDOWS, "heads=[L1H*]"))
    assert {head.layer for head in effects_in(directory)} == {1}
    assert json_in(directory, "summary.json")["heads/num_measured"] == 4


def test_a_sweep_measures_each_ablation_in_its_own_directory(run, place, tmp_path):
    run("-m", *place.arguments(), "ablation=zero,mean", "hydra.sweep.dir=sweep", name=None)
    jobs = [tmp_path / "sweep" / f"{n}_local_text_{a}" for n, a in enumerate(("zero", "mean"))]
    zero, mean = (effects_in(job) for job in jobs)
    assert zero.keys() == mean.keys() == set(HEADS)
    assert all(zero[head]["effect_nats"] != mean[head]["effect_nats"] for head in HEADS)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs_on_a_tiny_model_and_text(run, place, experiment):
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        said = validate(compose("rank_heads", [f"experiment={experiment}"]), RankHeadsConfig)
    directory = run(
        f"experiment={experiment}",
        *place.arguments(NUM_WINDOWS, f"evaluation.stride={CONTEXT}"),
    )
    did = OmegaConf.load(directory / ".hydra" / "config.yaml")
    assert did.ablation.kind == said.ablation.kind
    assert did.evaluation.first_token == said.evaluation.first_token
    assert (did.model.name, did.dataset.name) == ("local", "text")
    assert effects_in(directory).keys() == set(HEADS)


def test_the_summary_says_finished_so_it_is_written_last(
    refused, run, place, tmp_path, monkeypatch
):
    def disk_is_full(*arguments: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(ranking, "save_png", disk_is_full)
        assert refused(*place.arguments()) == "disk full"
    written = {path.name for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert written == {"effects.csv", "manifest.json", "measurements.jsonl"}
    assert json_in(tmp_path / "run", "manifest.json")["finished_utc"] is None
    run(f"resume={tmp_path / 'run'}", name=None)
    assert json_in(tmp_path / "run", "manifest.json")["finished_utc"]


# ---- ranked by an estimate


def scores_in(directory: Path) -> list[dict[str, str]]:
    with (directory / "scores.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("engine", ["replay", "gating"])
def test_ranking_by_gradient_writes_scores_and_no_effects(run, place, capsys, engine):
    directory = run(*place.arguments(), "score=gradient", f"evaluation.engine={engine}")
    names = {path.name for path in directory.iterdir() if path.is_file()}
    assert names == {
        *("scores.csv", "heatmap.png", "manifest.json", "summary.json"),
        *("attention.npz", "report.html", "roles.csv"),
    }
    assert (directory / "heatmap.png").read_bytes().startswith(b"\x89PNG\r\n")
    rows = scores_in(directory)
    assert list(rows[0]) == ["score", "layer", "head", "value", "standard_error"]
    assert {row["score"] for row in rows} == {"gradient"}
    assert {Head(int(row["layer"]), int(row["head"])) for row in rows} == set(HEADS)
    values = [float(row["value"]) for row in rows]
    assert values == sorted(values, reverse=True) and values[-1] > 0
    assert all(float(row["standard_error"]) > 0 for row in rows)
    assert json_in(directory, "summary.json") == {
        "score/name": "gradient",
        "score/forward_equivalents": 3,
        "heads/num_measured": 8,
    }
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    top = lines.index("Highest by gradient, of 8 heads")
    shown = [line.split()[1] for line in lines[top + 2 : top + 10]]
    assert shown == [f"L{row['layer']}H{row['head']}" for row in rows]
    assert max(map(len, lines[top : top + 10])) <= 80


def test_the_slope_by_a_gate_is_that_of_finite_differences(run, place):
    """Scaling a head's rows of W_O by 1 +- 0.01, window by window."""
    rows = scores_in(run(*place.arguments(), "score=gradient", "heads=[L1H2,L0H1]"))
    windows = windows_of(place.ids("evaluation.txt"))[:NUM_WINDOWS]
    for row in rows:
        losses = []
        for scale in (1.01, 0.99):
            model = make_model().double()
            output_rows(model, Head(int(row["layer"]), int(row["head"]))).mul_(scale)
            losses.append([loss_of(model, [window]) for window in windows])
        slopes = np.subtract(*losses) / 0.02
        assert float(row["value"]) == pytest.approx(np.abs(slopes).mean(), rel=2e-3)


def test_a_sweep_over_scores_gives_each_its_own_directory(run, place, tmp_path):
    scores = ["gradient", "fisher", "attribution", "shapley"]
    sweep = ["-m", f"score={','.join(scores)}", "hydra.sweep.dir=sweep"]
    run(*sweep, *place.arguments(4, "heads=[L0H*]"), name=None)
    jobs = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    found = [{row["score"] for row in scores_in(job)} for job in jobs]
    assert found == [{score} for score in scores]
    assert all(len(scores_in(job)) == 4 for job in jobs)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["score=nope"], "score=nope is not one of activation_norm, attribution, fisher, "),
        (["score.name=nope"], "score 'nope' is not one of leave_one_out, adaptive, gradient, "),
        (["+score.options.n=1"], "score leave_one_out has no option 'n'; it has windows_per_unit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_score_that_does_not_exist_is_told_in_one_line(refused, place, arguments, line):
    assert refused(*place.arguments(), *arguments).startswith(line)


# ---- measured adaptively

ADAPTIVE = ("evaluation=adaptive", "heads=[L0H*,L1H0]")


def test_an_adaptive_run_measures_each_head_on_as_many_windows_as_it_takes(run, place, capsys):
    num_windows, heads = 40, select_heads(["L0H*", "L1H0"], 2, 4)
    directory = run(*place.arguments(num_windows, *ADAPTIVE))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert {path.name for path in directory.iterdir() if path.is_file()} == FILES
    effects, summary = effects_in(directory), json_in(directory, "summary.json")
    assert effects.keys() == set(heads)
    measured = {head: int(row["num_windows"]) for head, row in effects.items()}
    assert set(measured.values()) == {16, 32, 40}
    assert summary["heads/share_of_windows"] == pytest.approx(np.mean([*measured.values()]) / 40)
    assert summary["intervals/method"].startswith("control variates, Student t over 40 blocks")
    kept = [json.loads(line) for line in lines_in(directory)]
    for head, row in effects.items():
        assert list(row) == COLUMNS
        assert -1 <= float(row["correlation"]) <= 1
        assert float(row["variance_reduction"]) > 0
        assert (row["verdict"] == "undetermined") == (measured[head] == 16)  # given up at once
        of_head = [
            line
            for line in kept
            if line["ablation"] == "zero" and line["layer"] == head.layer
            if head.head in line["heads"]
        ]
        assert sum(len(line["windows"]) for line in of_head) == measured[head]

    model, windows = make_model(), windows_of(place.ids("evaluation.txt"))[:num_windows]
    intact = loss_of(model, windows)
    for head in [head for head in heads if measured[head] == num_windows]:
        ablated = loss_of(without_heads(model, [head]), windows)
        assert float(effects[head]["effect_nats"]) == pytest.approx(ablated - intact, abs=2e-6)

    looks = [line.split(":")[0] for line in lines if " settled" in line]
    assert looks == ["16 of 40 windows", "32 of 40 windows", "40 of 40 windows"]
    top = lines.index("Most important heads")
    header = "rank head nats/token 95% interval windows corr. verdict".split()
    assert lines[top + 1].split() == header
    head, row = next(iter(effects.items()))
    assert lines[top + 2].split()[-3:] == [
        *(row["num_windows"], f"{float(row['correlation']):.2f}", row["verdict"])
    ]
    [last] = [number for number, line in enumerate(lines) if line.startswith("5 heads: ")]
    assert max(map(len, lines[top : last + 1])) <= 80


def test_two_adaptive_runs_are_the_same_bytes(run, place):
    first, second = (run(*place.arguments(40, *ADAPTIVE), name=name) for name in ("a", "b"))
    for name in ("effects.csv", "summary.json", "measurements.jsonl"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_an_adaptive_run_that_is_interrupted_goes_on_to_the_same_bytes(
    run, place, tmp_path, monkeypatch
):
    whole = run(*place.arguments(40, *ADAPTIVE), name="whole")
    with monkeypatch.context() as patch:
        patch.setattr(measurer, "measure", interrupted_after(4))
        with pytest.raises(SystemExit):
            run(*place.arguments(40, *ADAPTIVE))
    assert 0 < len(lines_in(tmp_path / "run")) < len(lines_in(whole))
    run(f"resume={tmp_path / 'run'}", name=None)
    for name in ("effects.csv", "measurements.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


def test_a_text_too_short_to_measure_adaptively_is_told_in_one_line(refused, place, tmp_path):
    (tmp_path / "short.txt").write_text("a b c d e f g h " * 6)
    short = f"dataset.path={tmp_path}/short.txt"
    line = refused(*place.arguments(40, *ADAPTIVE), short)
    assert line.startswith("adaptive measuring takes at least 8 windows, got ")
    assert not (tmp_path / "run" / "measurements.jsonl").exists()


# ---- interruptions


def test_a_killed_run_goes_on_to_the_same_bytes(run, place, tmp_path):
    arguments = place.arguments(120, "evaluation.windows_per_unit=1")
    killed, num_units = tmp_path / "killed", 120 * 3
    process = subprocess.Popen(
        [sys.executable, program.__file__, *arguments, f"hydra.run.dir={killed}"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(lines_in(killed)) < 5 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    measured = lines_in(killed)
    assert 5 <= len(measured) < num_units
    assert not (killed / "effects.csv").exists() and not (killed / "summary.json").exists()
    assert json_in(killed, "manifest.json")["finished_utc"] is None

    run(f"resume={killed}", name=None)
    assert len(lines_in(killed)) >= num_units
    assert lines_in(killed)[: len(measured) - 1] == measured[:-1]  # the last may have been torn
    whole = run(*arguments, name="whole")
    assert (killed / "effects.csv").read_bytes() == (whole / "effects.csv").read_bytes()
    assert json_in(killed, "summary.json") == json_in(whole, "summary.json")
    assert json_in(killed, "manifest.json")["finished_utc"]


def interrupted_after(num_units: int) -> Callable[..., Iterator[Any]]:
    measure = measurer.measure

    def interrupted(*arguments: Any, **options: Any) -> Iterator[Any]:
        for number, measured in enumerate(measure(*arguments, **options)):
            if number == num_units:
                raise KeyboardInterrupt
            yield measured

    return interrupted


def test_an_interrupted_run_keeps_what_it_measured_and_measures_only_the_rest(
    run, place, tmp_path, monkeypatch, capfd
):
    with monkeypatch.context() as patch:
        patch.setattr(measurer, "measure", interrupted_after(4))
        with pytest.raises(SystemExit) as stop:
            run(*place.arguments())
    assert stop.value.code == 130
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("interrupted; what was measured is kept")
    assert line.endswith(f"resume={tmp_path / 'run'}")
    assert len(lines_in(tmp_path / "run")) == 4
    run(f"resume={tmp_path / 'run'}", name=None)
    assert len(lines_in(tmp_path / "run")) == 6
    whole = run(*place.arguments(), name="whole")
    assert lines_in(tmp_path / "run") == lines_in(whole)
    assert (tmp_path / "run/effects.csv").read_bytes() == (whole / "effects.csv").read_bytes()


def test_resuming_a_finished_run_changes_no_number_and_measures_nothing(run, place, monkeypatch):
    directory = run(*place.arguments())
    dated = {"manifest.json", "report.html"}
    before = {name: (directory / name).read_bytes() for name in FILES - dated}
    monkeypatch.setattr(measurer, "measure", interrupted_after(0))
    run(f"resume={directory}", name=None)
    assert {name: (directory / name).read_bytes() for name in before} == before


def test_resuming_takes_no_other_arguments(run, refused, place):
    directory = run(*place.arguments())
    before = content(directory)
    line = refused(f"resume={directory}", "seed=1", name=None)
    assert line.startswith("resume takes the configuration of the run") and "seed=1" in line
    assert content(directory) == before


@pytest.mark.parametrize(
    ("file", "what"),
    [("evaluation.txt", "another text"), ("calibration.txt", "another calibration text")],
)
def test_a_run_does_not_go_on_with_a_text_that_has_changed(
    run, refused, place, tmp_path, file, what
):
    texts = {name: place.directory / name for name in ("evaluation.txt", "calibration.txt")}
    for name, path in texts.items():
        (tmp_path / name).write_bytes(path.read_bytes())
    own = [f"dataset.path={tmp_path}/evaluation.txt"]
    own += [f"dataset.calibration_path={tmp_path}/calibration.txt"]
    directory = run(*place.arguments(), *own)
    before = content(directory)
    (tmp_path / file).write_text("Once more. " + (tmp_path / file).read_text())
    assert f"was measured with {what} (" in refused(f"resume={directory}", name=None)
    assert content(directory) == before


def test_a_directory_with_a_run_is_left_as_it_is(run, refused, place):
    directory = run(*place.arguments())
    before = content(directory)
    assert f"already holds a run; go on with it by resume={directory}" in refused(
        *place.arguments(), "ablation=mean"
    )
    assert content(directory) == before


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["heads=[L9H0]"], "layer in 'L9H0' is out of range: this model has 0 to 1, got 9"),
        (["heads=[L1H4]"], "head in 'L1H4' is out of range: this model has 0 to 3, got 4"),
        (["heads=[X]"], "expected a head such as 'L4H11', 'L2H*' or 'L*H3', got 'X'"),
        (["heads=[]"], "no heads were selected"),
        (["evaluation.stride=17"], "evaluation.stride=17 is above evaluation.context_length=16"),
        (
            ["evaluation.context_length=null", "evaluation.stride=65"],
            "evaluation.stride=65 is above the context length of 64",
        ),
        (
            ["evaluation.context_length=65"],
            "evaluation.context_length=65 is above the model's context of 64 tokens",
        ),
        (["dataset.path=empty.txt"], "empty.txt has no text in it"),
        (["dataset.path=short.txt"], "the text has 5 tokens, but one window takes 17"),
        (["dataset.calibration_path=short.txt"], "calibration text: the text has 5 tokens"),
        (["dataset.path=missing.txt"], "expected a text file at missing.txt: No such file"),
        (["dataset.path=."], "expected a text file at .: Is a directory"),
        (["model.path=empty"], "empty has no config.json"),
        (["model.path=missing"], "missing has no config.json"),
        (["dataset.separator=eos", "dataset.calibration_fraction=2"], "dataset.calibration_frac"),
        (["evaluation.resamples=100", "evaluation.confidence=0.99"], "confidence 0.99 takes at l"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_one_line(refused, place, tmp_path, arguments, line):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("a b c")
    (tmp_path / "empty").mkdir()
    assert refused(*place.arguments(), *arguments).startswith(line)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_calibrating_on_the_evaluation_text_is_refused(refused, place):
    path = place.texts[0].removeprefix("dataset.path=")
    line = refused(*place.arguments(), f"dataset.calibration_path={path}")
    assert line.startswith("the calibration text holds ")


# ---- what is shown


def wandb_records(directory: Path, kind: str) -> list[dict[str, Any]]:
    """What the run's only W&B file says under `kind`."""
    [file] = directory.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return [record[kind] for record in records if record["type"] == kind]


@pytest.mark.usefixtures("tracked")
def test_an_offline_w_and_b_run_shows_what_the_files_say(run, place):
    directory = run(*place.arguments(), "tracker=offline")
    [file] = directory.glob("wandb/offline-run-*/files/media/table/heads*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["name", *COLUMNS, "role"]
    effects = effects_in(directory)
    assert [row[0] for row in table["data"]] == [str(head) for head in effects]
    for shown, row in zip(table["data"], effects.values(), strict=True):
        cells = ["" if cell is None else str(cell) for cell in shown[1:-1]]
        assert cells == list(row.values())

    shown = {
        k: v for each in wandb_records(directory, "summary") for k, v in each["update"].items()
    }
    assert json_in(directory, "summary.json").items() <= shown.items()
    assert shown["baseline/perplexity"] > 1
    [artifact] = [a for a in wandb_records(directory, "artifact") if a["type"] == "ranking"]
    files = {entry["path"]: Path(entry["local_path"]) for entry in artifact["manifest"]["contents"]}
    tables = {"effects.csv", "roles.csv", "by_role.csv"}
    assert files.keys() == {*tables, "summary.json", "manifest.json", "report.html"}
    assert all(path.read_bytes() == (directory / n).read_bytes() for n, path in files.items())
    [closed] = wandb_records(directory, "exit")
    assert closed.get("exit_code", 0) == 0  # a zero is not written


@pytest.mark.usefixtures("tracked")
def test_a_run_that_fails_is_marked_failed_in_w_and_b(refused, place, tmp_path, monkeypatch):
    def out_of_memory(*arguments: Any) -> None:
        raise ValueError("no memory")

    monkeypatch.setattr(ranking, "measure_losses", out_of_memory)
    assert refused(*place.arguments(), "tracker=offline") == "no memory"
    [closed] = wandb_records(tmp_path / "run", "exit")
    assert closed["exit_code"] == 1


def test_the_terminal_shows_protocol_perplexity_heads_counts_and_files(run, capsys):
    thresholds = [f"evaluation.{name}_nats=0.3" for name in ("tolerance", "critical")]
    small = ["evaluation.max_windows=4", "evaluation.context_length=64", "tracker=none"]
    directory = run(*small, *thresholds)
    output = capsys.readouterr().out
    summary, effects = json_in(directory, "summary.json"), effects_in(directory)
    lines = [line.rstrip() for line in output.splitlines()]
    assert lines[0].startswith("Protocol: stories, joined by '<|endoftext|>', no BOS; 4 windows of")
    assert re.fullmatch(r"Engine: replay, \d+ windows at once", lines[1])
    [intact] = [line for line in lines if line.startswith("Intact perplexity ")]
    assert intact.startswith(f"Intact perplexity {summary['baseline/perplexity']:.3f} [")

    top, redundant = (lines.index(f"Most {kind} heads") for kind in ("important", "redundant"))
    header = "rank head nats/token 95% interval perplexity verdict".split()
    assert lines[top + 1].split() == lines[redundant + 1].split() == header
    head, row = next(iter(effects.items()))
    assert lines[top + 2].split()[:3] == ["1", str(head), f"{float(row['effect_nats']):+.4f}"]
    assert lines[top + 2].split()[-1] == row["verdict"]
    named = [line.split()[1] for line in lines[redundant + 2 : redundant + 12]]
    quiet = {str(head): abs(float(row["effect_nats"])) for head, row in effects.items()}
    candidates = [str(head) for head, row in effects.items() if row["verdict"] == "redundant"]
    assert named == sorted(candidates, key=lambda name: quiet[name])[:10]
    assert max(len(line) for line in lines[top : redundant + 12]) <= 80

    [counts] = [line for line in lines if line.startswith("32 heads: ")]
    assert f"{summary['heads/num_redundant']} redundant" in counts
    roles = lines[lines.index("Effects by role") :]
    assert roles[1].split() == "role heads mean effect critical redundant most important".split()
    assert max(len(line) for line in roles[:-2]) <= 80
    assert lines[-2] == f"Files in {directory}: {', '.join(sorted(FILES))}"
    assert lines[-1] == f"Page: {directory}/report.html"
