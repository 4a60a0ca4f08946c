"""The atlas from its arguments to its files, on the demo model and on one that is too small."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments import head_atlas as program
from experiments import rank_heads
from mhaprune.model.load import DEMO_MODEL_DIR
from mhaprune.roles.patterns import ROLES
from mhaprune.run.config import HeadAtlasConfig, RankHeadsConfig
from mhaprune.run.launch import run_program
from mhaprune.text.stories import story_texts
from tests.tiny import tiny_gpt2, tiny_tokenizer

SMALL = [
    *("evaluation.context_length=64", "evaluation.max_windows=4"),
    *("roles.windows=2", "roles.repeats=2", "roles.period=16"),
]
FILES = {"attention.npz", "manifest.json", "report.html", "roles.csv", "summary.json"}
COLUMNS = (
    "layer head role score previous_token current_token first_token induction duplicate_token "
    "entropy_nats normalized_entropy mean_distance output_norm"
).split()
TEXT = "The cat sat on the mat because it was tired"
Run = Callable[..., Path]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the program with these arguments; the run directory is `tmp_path / name`."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, name: str | None = "run", tracker: str = "none") -> Path:
        own = [f"hydra.run.dir={tmp_path / name}"] if name else []
        flags = [argument for argument in arguments if argument == "-m"]
        others = [argument for argument in arguments if argument != "-m"]
        argv = ["head_atlas.py", *flags, *SMALL, *others, f"tracker={tracker}", *own]
        monkeypatch.setattr(sys, "argv", argv)
        run_program(program.head_atlas, HeadAtlasConfig, "head_atlas")
        return tmp_path / (name or "")

    return run


def rows_in(directory: Path) -> list[dict[str, str]]:
    with (directory / "roles.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read(directory: Path, name: str) -> dict[str, Any]:
    return json.loads((directory / name).read_text())


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_file()}


@pytest.mark.usefixtures("tracked")
def test_a_run_leaves_its_files_and_says_which_heads_have_which_role(run, capsys):
    directory = run(tracker="offline")
    assert names_in(directory) == FILES
    rows = rows_in(directory)
    assert list(rows[0]) == COLUMNS
    assert [(row["layer"], row["head"]) for row in rows] == [
        (str(layer), str(head)) for layer in range(4) for head in range(8)
    ]
    named = {
        role: sorted(
            (row for row in rows if row["role"] == role), key=lambda row: -float(row["score"])
        )
        for role in ROLES
    }
    assert read(directory, "summary.json") == {f"roles/{r}": len(x) for r, x in named.items()}
    assert sum(len(of_role) for of_role in named.values()) >= 3  # the demo model has some
    assert all((row["role"] == "") == (row["score"] == "") for row in rows)
    for role, (column, least, _) in ROLES.items():
        for row in named[role]:
            assert float(row[column]) == float(row["score"]) >= least

    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("Protocol: stories, ")
    for role, of_role in named.items():
        heads = ", ".join(f"L{row['layer']}H{row['head']}" for row in of_role)
        assert f"{role}: {heads or 'no head'}" in lines
    assert lines[-2] == f"Files in {directory}: {', '.join(sorted(FILES))}"
    assert lines[-1] == f"Page: {directory}/report.html"
    assert read(directory, "manifest.json")["finished_utc"]

    [file] = directory.glob("wandb/offline-run-*/files/media/table/roles*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["name", *COLUMNS]
    shown = [["" if cell is None else str(cell) for cell in row[1:]] for row in table["data"]]
    assert shown == [list(row.values()) for row in rows]


def test_the_sentence_s_weights_are_the_model_s_own(run):
    directory = run("roles.windows=0")
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, attn_implementation="eager")
    ids = tokenizer(TEXT, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        eager = torch.cat(model.eval()(ids, output_attentions=True).attentions).numpy()
    with np.load(directory / "attention.npz") as saved:
        tokens, weights = json.loads(str(saved["tokens"])), saved["weights"]
    assert "".join(tokens) == TEXT
    assert weights.shape == (4, 8, len(tokens), len(tokens)) == eager.shape
    assert np.abs(weights / 255 - eager).max() <= 1 / 510 + 1e-6


def test_two_runs_are_the_same_bytes_and_another_seed_moves_induction_only(run):
    first, second, other = (
        run(f"seed={n}", name=name) for n, name in ((0, "a"), (0, "b"), (1, "c"))
    )
    for name in ("attention.npz", "roles.csv", "summary.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    before, after = rows_in(first), rows_in(other)
    moved = {key for key in COLUMNS[4:] if [r[key] for r in before] != [r[key] for r in after]}
    assert moved == {"induction", "duplicate_token"}


def test_without_windows_there_are_no_roles(run):
    directory = run("roles.windows=0")
    assert names_in(directory) == FILES - {"roles.csv"}
    assert set(read(directory, "summary.json").values()) == {0}


@pytest.fixture
def short(tmp_path: Path) -> list[str]:
    """A model whose context is too short to tell roles."""
    tiny_gpt2(n_positions=32).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "stories.txt").write_text("\n".join(story_texts(5, 20)))
    return [
        *("model=local", "model.path=model", "model.device=cpu", "dataset=text"),
        *("dataset.path=stories.txt", "evaluation.context_length=16"),
    ]


TOO_SHORT = (
    "The roles of heads are left out: roles take a context of at least 33 tokens, this model's is "
    "32"
)


def test_a_context_too_short_for_roles_is_said_and_the_run_goes_on(run, short, capsys, monkeypatch):
    directory = run(*short)
    assert TOO_SHORT in capsys.readouterr().out.splitlines()
    assert names_in(directory) == FILES - {"roles.csv"}
    assert read(directory, "manifest.json")["finished_utc"]
    assert '"viewer":{' in (directory / "report.html").read_text()

    ranking = [*short, "evaluation.max_windows=4", "evaluation.resamples=100", "tracker=none"]
    monkeypatch.setattr(sys, "argv", ["rank_heads.py", *ranking, "hydra.run.dir=ranked"])
    run_program(rank_heads.rank_heads, RankHeadsConfig, "rank_heads")
    assert TOO_SHORT in capsys.readouterr().out.splitlines()
    assert names_in(directory.parent / "ranked") == {
        *("attention.npz", "effects.csv", "heatmap.png", "manifest.json"),
        *("measurements.jsonl", "report.html", "summary.json"),
    }


def test_a_sweep_of_sentences_keeps_each_in_its_own_directory(run, tmp_path):
    run("-m", "text=a cat,'a dog, too'", "roles.windows=0", "hydra.sweep.dir=sweep", name=None)
    sentences = []
    for number in range(2):
        with np.load(tmp_path / "sweep" / f"{number}_demo" / "attention.npz") as saved:
            sentences.append("".join(json.loads(str(saved["tokens"]))))
    assert sentences == ["a cat", "a dog, too"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["roles.windows=-1"], "roles.windows=-1 must be at least 0"),
        (["roles.repeats=0"], "roles.repeats=0 must be at least 1"),
        (["roles.period=15"], "roles.period=15 must be at least 16"),
        (["seed=-1"], "seed=-1 must be at least 0"),
        (["ablation=zero"], "ablation is not in the configuration; --cfg job shows what is"),
        (["heads=[L0H0]"], "heads is not in the configuration; --cfg job shows what is"),
        (["failure=later"], "failure=later is not one of continue, stop"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(run, capfd, tmp_path, arguments, line):
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    [error] = capfd.readouterr().err.splitlines()
    assert error.startswith(f"error: {line}")
    assert not (tmp_path / "run" / "manifest.json").exists()
