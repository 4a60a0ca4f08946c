"""Orders come from scores, files and chance; curves and interactions from measured sets."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mhaprune.measure import measurer as measurer_module
from mhaprune.measure.baselines import mean_z
from mhaprune.measure.measurer import Measurer
from mhaprune.measure.perplexity import row_nats
from mhaprune.measure.progress import Progress
from mhaprune.model.architectures import output_projections
from mhaprune.model.gating import gate_heads
from mhaprune.model.heads import Head
from mhaprune.prune.curves import Order
from mhaprune.prune.summary import curve_points
from mhaprune.run.config import PruneHeadsConfig
from mhaprune.run.curves import (
    check_orderings,
    draw_pairs,
    make_orders,
    measure_curves,
    measure_interactions,
    order_by,
    saved_values,
)
from mhaprune.run.measuring import measuring
from mhaprune.run.prepare import Prepared, prepare
from mhaprune.run.pruning_config import OrderingConfig, PruningConfig
from mhaprune.scores.catalogue import SCORES
from mhaprune.tables.csv_files import write_effects, write_rows
from mhaprune.tables.rows import HeadEffect, HeadScore, Interaction
from tests.micro import double_model, output_rows, without_heads
from tests.subjects import HEADS, make_subject
from tests.tiny import make_config, make_place, subject_of

ONCE = {"fisher": OrderingConfig("fisher")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def prepared(place: Path) -> Prepared:
    return prepare(make_config(place))


def pruning(place: Path, ablation: str = "zero", seed: int = 0, **changes: Any) -> PruneHeadsConfig:
    """Prune the place's model; `changes` are those of the pruning group."""
    base = make_config(place, ablation, resamples=200, tolerance_nats=1e-4, rows_per_batch=4)
    groups = base.model, base.dataset, base.evaluation, base.ablation, base.tracker
    values: dict[str, Any] = {"orderings": ONCE} | changes
    return PruneHeadsConfig(*groups, seed=seed, pruning=PruningConfig(**values))


# ---- orders from files


def saved_run(
    directory: Path, prepared: Prepared, effects: dict[Head, float], **changes: Any
) -> Path:
    """The directory of a run of rank_heads with these effects, of the same model and other text."""
    entries = {
        "weights_hash": prepared.loaded.weights_hash,
        "tokens_hash": "other",
        "finished_utc": "2025-01-02T03:04:05+00:00",
    }
    (directory / "manifest.json").write_text(json.dumps(entries | changes))
    rows = [
        HeadEffect(
            *(head.layer, head.head, nats, nats, nats, 1.0, 0.0, "useful", rank, 0.0, 0.0, 0.0, 6)
        )
        for rank, (head, nats) in enumerate(effects.items(), start=1)
    ]
    write_effects(directory / "effects.csv", rows)
    return directory


EFFECTS = {head: 0.125 * number for number, head in enumerate(HEADS[::-1])}


def test_the_effects_of_a_saved_run_are_taken_in_the_order_of_the_heads(tmp_path, prepared):
    run, said = saved_run(tmp_path, prepared, EFFECTS), []
    heads = [Head(1, 1), Head(0, 0), Head(1, 3)]
    values = saved_values(run, prepared, heads, False, said.append)
    assert values.tolist() == [EFFECTS[head] for head in heads]
    assert said == []


def test_a_run_that_only_scored_the_heads_will_do_as_well(tmp_path, prepared):
    run = saved_run(tmp_path, prepared, {})
    (run / "effects.csv").unlink()
    rows = [
        HeadScore("fisher", head.layer, head.head, nats, None) for head, nats in EFFECTS.items()
    ]
    write_rows(run / "scores.csv", HeadScore, rows)
    values = saved_values(run, prepared, HEADS, False, lambda line: pytest.fail(line))
    assert values.tolist() == [EFFECTS[head] for head in HEADS]


def test_the_ranking_of_another_model_is_refused(tmp_path, prepared):
    run = saved_run(tmp_path, prepared, EFFECTS, weights_hash="other")
    with pytest.raises(ValueError, match=r"^pruning\.ranking=.* is of another model \(its weights"):
        saved_values(run, prepared, HEADS, True, print)


def test_a_ranking_of_the_same_text_is_refused_unless_it_is_asked_for(tmp_path, prepared):
    run = saved_run(tmp_path, prepared, EFFECTS, tokens_hash=prepared.sample.tokens.hash)
    with pytest.raises(
        ValueError, match=r"was measured on this very text, .* pruning\.same_text=true$"
    ):
        saved_values(run, prepared, HEADS, False, print)
    said = []
    values = saved_values(run, prepared, HEADS, True, said.append)
    assert values.tolist() == [EFFECTS[head] for head in HEADS]
    assert said == [f"Note: {run} was measured on this very text; its curve is optimistic"]


def test_a_ranking_must_have_every_head(tmp_path, prepared):
    some = {head: EFFECTS[head] for head in HEADS[2:]}
    run = saved_run(tmp_path, prepared, some)
    with pytest.raises(ValueError, match=r"has no value for L0H0, L0H1$"):
        saved_values(run, prepared, HEADS, False, print)
    assert len(saved_values(run, prepared, HEADS[2:], False, print)) == 6


def test_a_run_that_is_not_finished_is_refused(tmp_path, prepared):
    run = saved_run(tmp_path, prepared, EFFECTS, finished_utc=None)
    with pytest.raises(ValueError, match=rf"is not finished; go on with resume={run}$"):
        saved_values(run, prepared, HEADS, False, print)


# ---- orders from scores


def test_orders_are_those_of_the_ranking_of_each_score_and_of_chance(tmp_path, prepared, place):
    ranking = str(saved_run(tmp_path, prepared, EFFECTS))
    subject, said = make_subject(double_model("gpt2")), []
    orderings = {"a": OrderingConfig("fisher"), "b": OrderingConfig("activation_norm")}
    config = pruning(place, orderings=orderings, ranking=ranking, random_orders=3)
    orders = make_orders(config, prepared, subject, said.append)
    assert [(order.ordering, order.direction) for order in orders] == [
        *(("ranking", "least"), ("ranking", "most"), ("a", "least"), ("a", "most")),
        *(("b", "least"), ("b", "most"), ("random_0", "least"), ("random_1", "least")),
        ("random_2", "least"),
    ]
    assert all(sorted(order.heads) == list(HEADS) for order in orders)
    assert orders[0].heads == HEADS[::-1]
    for least, most in zip(orders[0:6:2], orders[1:6:2], strict=True):
        assert least.heads == most.heads[::-1]
    fisher = SCORES["fisher"](subject).at(HEADS)
    assert orders[2].heads == tuple(HEADS[n] for n in np.argsort(fisher))
    assert len({order.heads for order in orders[-3:]}) == 3
    assert said == ["order a: done", "order b: done"]


def test_random_orders_are_those_of_the_seed(prepared, place):
    def drawn(seed: int) -> list[Order]:
        config = pruning(place, seed=seed, orderings={}, ranking="", random_orders=2)
        config.pruning.ranking = None
        return make_orders(config, prepared, make_subject(double_model("gpt2")), print)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_every_order_leaves_each_layer_its_heads_and_only_the_directions_asked_for(prepared, place):
    orderings = {"once": OrderingConfig("fisher"), "again": OrderingConfig("fisher", {}, 3)}
    config = pruning(place, orderings=orderings, min_per_layer=3, directions=["most"])
    orders = make_orders(config, prepared, make_subject(double_model("gpt2")), print)
    assert {order.direction for order in orders if "random" not in order.ordering} == {"most"}
    for order in orders:
        assert sorted(head.layer for head in order.heads) == [0, 1]


@pytest.mark.parametrize("kind", ["zero", "constant"])
def test_scores_may_be_taken_again_for_constants_and_order_the_heads_that_are_left(kind, place):
    """Four heads go by the first scores, the others by those of a model without these four."""
    subject, again = make_subject(double_model("gpt2"), kind), OrderingConfig("fisher", {}, 4)
    check_orderings({"a": again}, subject)
    first = SCORES["fisher"](subject).at(HEADS)
    gone = tuple(HEADS[n] for n in np.argsort(first)[:4])
    left = tuple(head for head in HEADS if head not in gone)
    smaller = replace(subject, model=without(subject.model, gone, subject.ablation), heads=left)
    second = SCORES["fisher"](smaller).at(left)
    expected = (*gone, *(left[n] for n in np.argsort(second)))
    assert order_by(subject, again, "least", pruning(place)) == expected


def test_scores_are_not_taken_again_where_each_window_has_a_donor():
    subject = make_subject(double_model("gpt2"), "donors")
    refused = {}
    for every in (None, 1, 4, 8):
        try:
            check_orderings(ONCE | {"a": OrderingConfig("fisher", {}, every)}, subject)
        except ValueError as error:
            refused[every] = str(error)
    assert refused == dict.fromkeys(
        (1, 4, 8),
        "pruning.orderings.a: taking a score again with heads already ablated works for "
        "ablation=zero, mean and optimal, not for resample",
    )


def test_donors_are_refused_before_any_score_is_taken(prepared, place, monkeypatch):
    monkeypatch.setitem(SCORES, "fisher", lambda subject: pytest.fail("asked"))
    config = pruning(place, orderings=ONCE | {"a": OrderingConfig("fisher", {}, 4)})
    with pytest.raises(ValueError, match="not for resample"):
        make_orders(config, prepared, make_subject(double_model("gpt2"), "donors"), print)


def without(model: Any, heads: Sequence[Head], constants: Any) -> Any:
    """The model with the heads' rows of W_O zero and what their constants add in its bias."""
    removed = without_heads(model, heads)
    if constants is None:
        return removed
    for head in heads:
        bias = output_projections(removed)[head.layer].get_parameter("bias")
        bias.data += constants[head.layer, head.head].double() @ output_rows(model, head)
    return removed


@pytest.mark.parametrize("engine", ["replay", "gating"])
@pytest.mark.parametrize("kind", ["zero", "constant"])
@pytest.mark.parametrize(
    ("score", "options"),
    [
        *(("leave_one_out", {}), ("gradient", {}), ("attribution", {}), ("activation_norm", {})),
        ("integrated_gradients", {"steps": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_score_taken_again_is_that_of_a_model_without_the_heads_that_went(
    score, options, kind, engine, place, monkeypatch
):
    asked = []

    def spied(subject, **options):
        estimate = SCORES[score](subject, **options)
        asked.append((subject.heads, estimate.at(subject.heads)))
        return estimate

    monkeypatch.setitem(SCORES, "spied", spied)
    subject = make_subject(double_model("gpt2"), kind, engine=engine)
    order = order_by(subject, OrderingConfig("spied", options, 3), "least", pruning(place))
    assert sorted(order) == list(HEADS)
    assert [len(left) for left, _ in asked] == [8, 5, 2]
    for left, values in asked:
        gone = order[: len(HEADS) - len(left)]
        assert {*gone, *left} == set(HEADS)
        oracle = replace(subject, model=without(subject.model, gone, subject.ablation), heads=left)
        expected = SCORES[score](oracle, **options).at(left)
        np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-12)
    assert asked[0][0] == HEADS


# ---- curves


@contextmanager
def measurer(prepared: Prepared, config: PruneHeadsConfig, directory: Path) -> Iterator[Measurer]:
    subject = subject_of(prepared, HEADS, config)
    with measuring(subject, prepared, config, directory, Progress()) as found:
        yield found


def gated_rate(prepared: Prepared, heads: tuple[Head, ...], constants: Any = None) -> float:
    """Nats per token of the text with the heads ablated, all windows in one pass."""
    gate = torch.ones(2, 4)
    for head in heads:
        gate[head.layer, head.head] = 0
    batch = prepared.sample.batch(range(len(prepared.sample.windows)))
    with gate_heads(prepared.loaded.model, gate, constants):
        nats = row_nats(prepared.loaded.model, *batch)
    return float(nats.sum()) / sum(window.num_scored for window in prepared.sample.windows)


@pytest.mark.parametrize("ablation", ["zero", "mean"])
def test_a_point_of_a_curve_is_the_loss_without_the_first_heads_of_its_order(
    tmp_path, prepared, place, ablation
):
    config = pruning(place, ablation, step=3)
    orders = [Order("a", "least", HEADS), Order("b", "most", HEADS[5:1:-1])]
    with measurer(prepared, config, tmp_path) as measured:
        curves = measure_curves(orders, measured, config)
    constants = None
    if ablation == "mean":
        constants = mean_z(prepared.loaded.model, prepared.calibration, 4)
    assert [curve.num_removed.tolist() for curve in curves] == [[0, 3, 6, 8], [0, 3, 4]]
    for order, curve in zip(orders, curves, strict=True):
        assert (curve.ordering, curve.direction) == (order.ordering, order.direction)
        assert curve.order == order.heads
        expected = [gated_rate(prepared, order.heads[:n], constants) for n in curve.num_removed]
        np.testing.assert_allclose(curve.nats_per_token, expected, rtol=0, atol=1e-5)
        ratio = np.exp(np.array(expected) - expected[0]) - 1
        np.testing.assert_allclose(curve.increase, ratio, rtol=0, atol=1e-5)


def test_sets_that_the_store_holds_are_not_measured_again(tmp_path, prepared, place, monkeypatch):
    config, orders = pruning(place, step=4), [Order("a", "least", HEADS)]
    with measurer(prepared, config, tmp_path) as measured:
        before = measure_curves(orders, measured, config)
    monkeypatch.setattr(
        measurer_module, "measure_sets", lambda subject, units: iter(units and [1 / 0])
    )
    with measurer(prepared, config, tmp_path) as measured:
        after = measure_curves(orders, measured, config)
    assert curve_points(after) == curve_points(before)


@pytest.mark.parametrize("ablation", ["zero", "resample"])
def test_interactions_are_of_the_sets_asked_for_and_of_the_first_pairs(
    tmp_path, prepared, place, ablation
):
    config = pruning(place, ablation, sets=[["L0H0", "L1H*"], ["L1H2", "L0H3"]], pairs=3)
    order = (Head(1, 2), Head(0, 3), Head(0, 1), Head(0, 0))
    with measurer(prepared, config, tmp_path) as measured:
        rows = measure_interactions(config, order, measured)
    assert [row.heads for row in rows] == [
        *("L0H0 L1H0 L1H1 L1H2 L1H3", "L0H3 L1H2"),
        *("L0H1 L1H2", "L0H1 L0H3"),
    ]
    for row in rows:
        assert row.interaction_nats == pytest.approx(row.joint_nats - row.sum_nats, abs=1e-12)
        assert row.ci_low <= row.interaction_nats <= row.ci_high
    if ablation == "zero":
        intact = gated_rate(prepared, ())
        for row in rows:
            heads = tuple(Head.parse(name) for name in row.heads.split())
            alone = sum(gated_rate(prepared, (head,)) - intact for head in heads)
            assert row.joint_nats == pytest.approx(gated_rate(prepared, heads) - intact, abs=1e-5)
            assert row.sum_nats == pytest.approx(alone, abs=1e-5)


def test_without_sets_and_pairs_nothing_is_measured(tmp_path, prepared, place):
    config = pruning(place)
    with measurer(prepared, config, tmp_path) as measured:
        assert measure_interactions(config, HEADS, measured) == []
    assert not (tmp_path / "measurements.jsonl").exists()


# ---- what they say


def interaction(heads: str, nats: float) -> Interaction:
    return Interaction(heads, nats, 0.0, nats, nats, nats, True, False)


def test_pairs_are_drawn_on_both_sides_of_the_diagonal_with_heads_in_order():
    rows = [interaction("L0H2 L0H10", 0.25), interaction("L0H2 L1H0", -0.5)]
    figure = draw_pairs([*rows, interaction("L0H0 L0H1 L1H1", 9.0)], "a run")
    assert figure is not None
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["L0H2", "L0H10", "L1H0"]
    drawn = np.ma.asarray(axes.images[0].get_array()).filled(np.nan)
    nan = np.nan
    expected = [[nan, 0.25, -0.5], [0.25, nan, nan], [-0.5, nan, nan]]
    np.testing.assert_array_equal(drawn, expected)


def test_without_pairs_there_is_no_picture_of_them():
    assert draw_pairs([interaction("L0H0 L0H1 L1H1", 9.0)], "a run") is None
