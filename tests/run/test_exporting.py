"""Which pruned model is exported, and what is refused before anything is measured."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mhaprune.model.heads import Head
from mhaprune.prune.curves import Curve, Order, make_curve
from mhaprune.run.config import (
    AblationConfig,
    DatasetConfig,
    EvaluationConfig,
    ModelConfig,
    PruneHeadsConfig,
    TrackerConfig,
)
from mhaprune.run.prepare import Prepared, prepare
from mhaprune.run.pruned import best_curve, check_export, check_pruned, choose_point
from mhaprune.run.pruning_config import ExportConfig, HealConfig, OrderingConfig, PruningConfig
from tests.micro import tiny_model
from tests.subjects import HEADS
from tests.tiny import make_config, make_place


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(make_config(make_place(tmp_path_factory.mktemp("place"))))


def pruning(ablation: str = "zero", changes: Any = None, **export: Any) -> PruneHeadsConfig:
    """Prune by fisher and gradient; `changes` are those of the pruning group."""
    orderings = {name: OrderingConfig(name) for name in ("fisher", "gradient")}
    return PruneHeadsConfig(
        ModelConfig("demo"),
        DatasetConfig("stories", "stories"),
        EvaluationConfig(),
        AblationConfig(ablation),
        TrackerConfig("none"),
        pruning=PruningConfig(orderings, **changes or {}),
        export=ExportConfig(**export),
    )


def curve(ordering: str, added_nats: list[float], direction: Any = "least") -> Curve:
    """A curve over 0, 1, 2 ... heads whose intervals are points."""
    intact, points = np.full(4, 10.0), list(range(len(added_nats)))
    order = Order(ordering, direction, tuple(Head(0, n) for n in points[1:]))
    return make_curve(
        *(order, points, intact),
        *(intact + 10 * np.array(added_nats)[:, None], np.full(4, 10), np.arange(4)),
        confidence=0.95,
        num_resamples=200,
        seed=0,
    )


FISHER = curve("fisher", [0.0, 0.001, 0.03, 0.5])
GRADIENT = curve("gradient", [0.0, 0.002, 0.04, 0.06])
MOST = curve("fisher", [0.0, -0.1, -0.1, -0.1], "most")
RANDOM = curve("random_0", [0.0, 0.0, 0.0, 0.0])
CURVES = [FISHER, MOST, GRADIENT, RANDOM]


def test_the_best_curve_lets_most_heads_go_at_the_increase_then_has_the_least_area():
    assert best_curve(CURVES) is GRADIENT  # both let 2 go at 5%
    assert best_curve(CURVES, 0.01) is GRADIENT
    assert best_curve([FISHER, MOST, RANDOM], 0.07) is FISHER
    lower = curve("lower", [0.0, 0.0, 0.2, 0.2])
    assert best_curve([lower, FISHER]) is FISHER


@pytest.mark.parametrize(
    ("export", "expected"),
    [
        ({"num_heads": 3}, (GRADIENT, 3)),
        ({"num_heads": 3, "ordering": "fisher"}, (FISHER, 3)),
        ({"max_increase": 0.07}, (GRADIENT, 3)),
        ({"max_increase": 0.07, "ordering": "fisher"}, (FISHER, 2)),
        ({"max_increase": 0.01}, (GRADIENT, 1)),
    ],
)
def test_heads_go_by_number_or_by_budget_along_the_order_asked_for_or_the_best(export, expected):
    assert choose_point(pruning(dir="x", **export), CURVES) == expected


@pytest.mark.parametrize(
    ("export", "message"),
    [
        ({"num_heads": 4}, r"^export\.num_heads=4 is more than the 3 heads that can go$"),
        ({"max_increase": 1e-4}, r"^export\.max_increase=0\.0001: not one head can go within it"),
    ],
)
def test_a_point_that_the_curve_does_not_have_is_refused(export, message):
    with pytest.raises(ValueError, match=message):
        choose_point(pruning(dir="x", **export), CURVES)


def refusal(config: PruneHeadsConfig) -> str | None:
    """Why the export is refused; None where it is not."""
    try:
        check_export(config)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("ablation", "changes", "ordering", "message"),
    [
        (
            *("resample", {}, None),
            "export.dir: a model cannot keep resampled heads; use ablation=zero, mean or optimal",
        ),
        (
            *("zero", {"directions": ["most"]}, None),
            "export.dir needs pruning.directions to contain least",
        ),
        ("zero", {}, "nope", "export.ordering=nope is not one of fisher, gradient"),
    ],
)
def test_nothing_is_checked_where_nothing_is_exported(
    tmp_path, ablation, changes, ordering, message
):
    """What is refused with a directory to export to, and only with one."""
    told = [
        refusal(pruning(ablation, changes, dir=place, num_heads=1, ordering=ordering))
        for place in (str(tmp_path), None)
    ]
    assert told == [message, None]


@pytest.mark.parametrize(
    ("ranked", "possible"),
    [
        ({}, [None, "fisher", "gradient"]),
        ({"ranking": "run"}, [None, "fisher", "gradient", "ranking"]),
    ],
)
def test_an_export_by_any_order_that_there_is_and_by_no_other_passes(tmp_path, ranked, possible):
    names = [None, "fisher", "gradient", "ranking", "activation_norm", "random_0", ""]
    for place in (tmp_path, tmp_path / "new"):
        exports = {name: {"dir": str(place), "num_heads": 1, "ordering": name} for name in names}
        told = {name: refusal(pruning("mean", ranked, **exports[name])) for name in names}
        assert [name for name in names if told[name] is None] == possible
        assert told["random_0"] == (
            f"export.ordering=random_0 is not one of {', '.join(filter(None, possible))}"
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ablation", "changes", "ordering", "message"),
    [
        ("resample", {}, None, r"^export\.dir: a model cannot keep resampled heads; use ablation="),
        ("zero", {"directions": ["most"]}, None, r"^export\.dir needs pruning\.directions to cont"),
        ("zero", {}, "nope", r"^export\.ordering=nope is not one of fisher, gradient$"),
        ("zero", {}, "ranking", r"^export\.ordering=ranking is not one of fisher, gradient$"),
    ],
)
def test_an_export_that_could_not_be_written_is_refused(
    tmp_path: Path, ablation: str, changes: dict[str, Any], ordering: str | None, message: str
):
    export = {"dir": str(tmp_path), "num_heads": 1, "ordering": ordering}
    with pytest.raises(ValueError, match=message):
        check_export(pruning(ablation, changes, **export))


@pytest.mark.parametrize(
    ("architecture", "ablation", "export", "message"),
    [
        ("bloom", "zero", {"dir": "x", "num_heads": 1}, "cannot compact a model of type 'bloom'"),
        (
            "qwen2",
            "mean",
            {"dir": "x", "num_heads": 1, "form": "dense"},
            "a dense qwen2 model has no output bias to hold a baseline that is not zero; use the c",
        ),
    ],
)
def test_a_form_that_the_architecture_does_not_have_is_refused(
    prepared, architecture, ablation, export, message
):
    model = replace(prepared.loaded, model=tiny_model(architecture))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_pruned(pruning(ablation, **export), replace(prepared, loaded=model), HEADS)


def test_savings_and_healing_of_what_cannot_be_compacted_are_refused(prepared):
    bloom = replace(prepared, loaded=replace(prepared.loaded, model=tiny_model("bloom")))
    for changes in ({"savings": True}, {"heal": HealConfig(steps=1)}):
        with pytest.raises(ValueError, match=r"^cannot compact a model of type 'bloom'"):
            check_pruned(replace(pruning(), **changes), bloom, HEADS)
        check_pruned(replace(pruning(), **changes), prepared, HEADS)


def test_sets_of_heads_that_do_not_exist_are_refused(prepared):
    with pytest.raises(ValueError, match=r"^.*L9H0.*"):
        check_pruned(pruning(changes={"sets": [["L0H0", "L9H0"]]}), prepared, HEADS)


def test_low_rank_healing_without_peft_is_refused(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    config = replace(pruning(), heal=HealConfig(steps=1, method="lora"))
    with pytest.raises(ValueError, match=r"^heal\.method=lora needs peft; pip install"):
        check_pruned(config, prepared, HEADS)


def test_a_directory_that_holds_something_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"exists and is not an empty directory; choose another$"):
        check_export(pruning(dir=str(tmp_path), num_heads=1))
