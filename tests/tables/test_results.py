"""Result files survive full disks, and give back what was put in."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhaprune.tables.csv_files import read_effects, read_rows, write_effects, write_rows
from mhaprune.tables.files import write_atomically, write_json
from mhaprune.tables.rows import HeadEffect, HeadScore, ScoreAgreement

EFFECT = HeadEffect(
    layer=4,
    head=11,
    effect_nats=0.1 + 0.2,
    ci_low=0.25,
    ci_high=1 / 3,
    ppl_ablated=31.5,
    delta_ppl=1.5,
    verdict="critical",
    rank=1,
    delta_ppl_low=1.25,
    delta_ppl_high=1.75,
    standard_error=1e-17,
    num_windows=64,
)


_nats = st.floats(allow_nan=False, allow_infinity=False)


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_write_atomically_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old, and longer than the new")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert names_in(tmp_path) == ["summary.json"]


def test_written_files_have_the_permissions_of_ordinary_files(tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_text("")
    write_atomically(tmp_path / "ours", "")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "effects.csv"
    write_atomically(path, "old")

    def disk_full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    owner: Any = os if failing == "fsync" else Path
    monkeypatch.setattr(owner, failing, disk_full)
    with pytest.raises(OSError, match=r"cannot write .*effects\.csv: No space left on device; "):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["effects.csv"]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot write .*nowhere/a\.json: No such"):
        write_json(tmp_path / "nowhere" / "a.json", {})


def test_json_is_sorted_indented_and_ends_in_a_newline(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 0.1, "a": [1, None]})
    assert (tmp_path / "a.json").read_text() == (
        '{\n  "a": [\n    1,\n    null\n  ],\n  "b": 0.1\n}\n'
    )


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_json_refuses_what_is_not_a_number_and_keeps_the_old_file(
    tmp_path: Path, number: float
) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1.5})
    with pytest.raises(ValueError, match=r"a\.json: expected finite numbers only"):
        write_json(path, {"a": number})
    assert json.loads(path.read_text()) == {"a": 1.5}


def test_effects_csv_has_these_bytes(tmp_path: Path) -> None:
    path = tmp_path / "effects.csv"
    second = replace(EFFECT, layer=0, head=1, rank=2, verdict="redundant", effect_nats=-0.0)
    second = replace(second, correlation=0.75, variance_reduction=12.5)
    write_effects(path, [second, EFFECT])
    assert path.read_bytes() == (
        b"layer,head,effect_nats,ci_low,ci_high,ppl_ablated,delta_ppl,verdict,rank,"
        b"delta_ppl_low,delta_ppl_high,standard_error,num_windows,"
        b"correlation,variance_reduction\n"
        b"4,11,0.30000000000000004,0.25,0.3333333333333333,31.5,1.5,critical,1,"
        b"1.25,1.75,1e-17,64,,\n"
        b"0,1,-0.0,0.25,0.3333333333333333,31.5,1.5,redundant,2,"
        b"1.25,1.75,1e-17,64,0.75,12.5\n"
    )
    assert read_effects(path) == [EFFECT, second]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(_nats, _nats, st.integers(0, 99)), max_size=5), st.randoms())
def test_effects_read_back_exactly_and_their_order_does_not_change_the_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    numbers: list[tuple[float, float, int]],
    order: random.Random,
) -> None:
    path = tmp_path_factory.mktemp("effects") / "effects.csv"
    rows = [
        replace(
            EFFECT,
            effect_nats=effect,
            standard_error=error,
            head=head,
            rank=rank,
            correlation=effect if head % 2 else None,
        )
        for rank, (effect, error, head) in enumerate(numbers, start=1)
    ]
    write_effects(path, rows)
    content = path.read_bytes()
    assert repr(read_effects(path)) == repr(rows)
    order.shuffle(rows)
    write_effects(path, rows)
    assert path.read_bytes() == content


def test_an_effect_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="L4H11: expected a finite delta_ppl, got inf"):
        replace(EFFECT, delta_ppl=float("inf"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layer,head", "head,layer", "effects.csv: expected the columns layer,head,effect_nats"),
        ("0.25", "nan", "line 2: L4H11: expected a finite ci_low, got nan"),
        ("0.25", "a quarter", "line 2: could not convert string to float"),
        (",64,,", "", "line 2: .*shorter"),
        (",64,,", ",64,nan,", "line 2: L4H11: expected a finite correlation, got nan"),
        (",64,,", ",,,", "line 2: invalid literal for int"),
    ],
)
def test_a_damaged_effects_csv_is_refused_by_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "effects.csv"
    write_effects(path, [EFFECT])
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        read_effects(path)


SCORE = HeadScore(score="fisher", layer=4, head=11, value=0.1 + 0.2, standard_error=1e-17)
AGREEMENT = ScoreAgreement(
    score="gradient",
    spearman=0.1 + 0.2,
    ci_low=-0.25,
    ci_high=1 / 3,
    kendall=0.5,
    top_k_overlap=1.0,
    sign_agreement=0.0,
    reliability=-0.0,
    forward_equivalents=3.0,
    seconds=1e-17,
    kendall_low=-1.0,
    kendall_high=0.75,
)


def test_scores_csv_has_these_bytes_in_the_order_of_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    rows = [SCORE, replace(SCORE, score="a, b", layer=0, value=-0.0, standard_error=None)]
    write_rows(path, HeadScore, rows)
    assert path.read_bytes() == (
        b"score,layer,head,value,standard_error\n"
        b"fisher,4,11,0.30000000000000004,1e-17\n"
        b'"a, b",0,11,-0.0,\n'
    )
    assert read_rows(path, HeadScore) == rows


def test_agreement_csv_has_these_bytes(tmp_path: Path) -> None:
    path = tmp_path / "agreement.csv"
    write_rows(path, ScoreAgreement, [AGREEMENT])
    assert path.read_bytes() == (
        b"score,spearman,ci_low,ci_high,kendall,top_k_overlap,sign_agreement,reliability,"
        b"forward_equivalents,seconds,kendall_low,kendall_high\n"
        b"gradient,0.30000000000000004,-0.25,0.3333333333333333,0.5,1.0,0.0,-0.0,"
        b"3.0,1e-17,-1.0,0.75\n"
    )
    assert read_rows(path, ScoreAgreement) == [AGREEMENT]


def test_no_rows_are_a_heading_alone(tmp_path: Path) -> None:
    write_rows(tmp_path / "scores.csv", HeadScore, [])
    assert (tmp_path / "scores.csv").read_text() == "score,layer,head,value,standard_error\n"
    assert read_rows(tmp_path / "scores.csv", HeadScore) == []


def test_floats_of_numpy_are_written_as_any_others(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    write_rows(path, HeadScore, [replace(SCORE, value=np.float64(0.25))])
    assert path.read_text().splitlines()[1] == "fisher,4,11,0.25,1e-17"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("kind", "good", "field"),
    [
        (HeadScore, SCORE, "value"),
        (HeadScore, SCORE, "standard_error"),
        (ScoreAgreement, AGREEMENT, "spearman"),
        (ScoreAgreement, AGREEMENT, "seconds"),
    ],
)
def test_rows_that_are_not_finite_are_refused_by_file_and_column_and_nothing_is_written(
    tmp_path: Path, number: float, kind: Any, good: Any, field: str
) -> None:
    path = tmp_path / "some.csv"
    with pytest.raises(ValueError, match=rf"some\.csv: expected a finite {field} in every row"):
        write_rows(path, kind, [good, replace(good, **{field: number})])
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("score,layer", "layer,score", "scores.csv: expected the columns score,layer,head,value"),
        ("4,11", "4.5,11", "scores.csv, line 2: invalid literal for int"),
        ("4,11", "4,11,12", "scores.csv, line 2: .*longer"),
        ("0.30000000000000004", "", "scores.csv, line 2: could not convert string to float"),
    ],
)
def test_a_damaged_scores_csv_is_refused_by_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "scores.csv"
    write_rows(path, HeadScore, [SCORE])
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        read_rows(path, HeadScore)
