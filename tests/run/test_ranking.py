"""Losses of two windows of four tokens -> effects, intervals, verdicts and ranks, by arithmetic."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats

from mhaprune.measure.measurer import Losses
from mhaprune.measure.subject import Subject
from mhaprune.model.architectures import head_shape
from mhaprune.model.heads import Head
from mhaprune.model.load import LoadedModel
from mhaprune.run import ranking as ranking_module
from mhaprune.run.config import EvaluationConfig
from mhaprune.run.prepare import Prepared
from mhaprune.run.ranking import Ranking, rank, write_ranking
from mhaprune.tables.csv_files import read_effects
from mhaprune.tables.rows import HeadEffect
from mhaprune.text.sample import Protocol, Sample
from mhaprune.text.tokens import Tokens
from mhaprune.text.windows import Window
from tests.tiny import make_tokens, tiny_gpt2, tiny_tokenizer

INTACT_NATS = np.array([4.0, 8.0])  # 8 tokens: 1.5 nats/token
ABLATED_NATS = {
    Head(0, 0): [4.0, 8.0],  # nothing happens
    Head(0, 1): [8.0, 8.0],  # 0.5 nats/token, all in one window
    Head(1, 0): [5.0, 9.0],  # 0.25 in both
    Head(1, 1): [4.08, 8.08],  # 0.02 in both
    Head(1, 2): [3.0, 7.0],  # -0.25 in both
    Head(1, 3): [4.0, 8.0],  # nothing, again
}
HEADS = list(ABLATED_NATS)
SHAPE = head_shape(tiny_gpt2())  # 2 layers of 4 heads


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    """Nine tokens of 3 bytes in two windows that score four each."""
    ids = torch.arange(9)
    tokens = Tokens(ids=ids, num_bytes=0 * ids + 3, document=0 * ids, hash="tokens")
    loaded = LoadedModel("tiny", tiny_gpt2(), tiny_tokenizer(), "here", "weights", 1)
    protocol = Protocol("text", "", False, 4, 4, "scored", 2, 8, 9, "tokens")
    windows = (Window(0, 5, 1), Window(4, 9, 5))
    return Prepared(loaded, Sample(tokens, windows, protocol), Sample(tokens, ()))


@pytest.fixture(scope="module")
def ranked(prepared: Prepared) -> Ranking:
    return rank_heads_of(prepared, HEADS)


def rank_heads_of(prepared: Prepared, heads: list[Head]) -> Ranking:
    ablated = np.array([ABLATED_NATS[head] for head in heads])
    subject = Subject(prepared.loaded.model, prepared.sample, tuple(heads))
    return rank(subject, Losses(INTACT_NATS, ablated), EvaluationConfig())


def row_of(ranked: Ranking, head: Head) -> HeadEffect:
    [row] = [row for row in ranked.rows if (row.layer, row.head) == (head.layer, head.head)]
    return row


def test_effects_are_the_extra_nats_per_token(ranked):
    effects = {Head(row.layer, row.head): row.effect_nats for row in ranked.rows}
    assert effects == pytest.approx(dict(zip(HEADS, [0, 0.5, 0.25, 0.02, -0.25, 0], strict=True)))


def test_rows_are_in_order_of_rank_and_of_equals_the_earlier_head_comes_first(ranked):
    assert [row.rank for row in ranked.rows] == [1, 2, 3, 4, 5, 6]
    assert [str(Head(row.layer, row.head)) for row in ranked.rows] == [
        *("L0H1", "L1H0", "L1H1", "L0H0", "L1H3", "L1H2")
    ]


def test_verdicts_follow_the_thresholds(ranked):
    assert [row.verdict for row in ranked.rows] == [
        *("undetermined", "critical", "useful", "redundant", "redundant", "harmful")
    ]


def test_a_row_has_the_interval_of_its_head(ranked):
    row = row_of(ranked, Head(0, 1))
    # Deviations from 0.5 * 4 nats are +2 and -2: sqrt(2/1 * (4 + 4)) / 8 tokens.
    reach = 0.5 * stats.t.ppf(0.975, df=1)
    assert row.standard_error == pytest.approx(0.5)
    assert (row.ci_low, row.ci_high) == pytest.approx((0.5 - reach, 0.5 + reach))
    assert row.num_windows == 2
    assert (row.correlation, row.variance_reduction) == (None, None)


def test_a_row_has_the_perplexity_that_its_head_s_ablation_leads_to(ranked):
    row = row_of(ranked, Head(1, 0))
    assert row.ppl_ablated == pytest.approx(math.exp(1.75))
    assert row.delta_ppl == pytest.approx(math.exp(1.75) - math.exp(1.5))
    # Without the head both windows lose 0.25 more, so the factor exp(0.25) - 1 is certain and the
    # difference varies as the intact perplexity does: exp(1.5) * sqrt(2 * (2^2 + 2^2)) / 8.
    reach = math.expm1(0.25) * math.exp(1.5) * 0.5 * stats.t.ppf(0.975, df=1)
    assert row.delta_ppl_high - row.delta_ppl == pytest.approx(reach)
    assert row.delta_ppl - row.delta_ppl_low == pytest.approx(reach)


def test_the_summary_has_the_intact_loss_and_counts_the_verdicts(ranked):
    reach = 0.5 * stats.t.ppf(0.975, df=1)
    assert ranked.summary == {
        "baseline/nats_per_token": 1.5,
        "baseline/perplexity": pytest.approx(math.exp(1.5)),
        "baseline/perplexity_low": pytest.approx(math.exp(1.5 - reach)),
        "baseline/perplexity_high": pytest.approx(math.exp(1.5 + reach)),
        "baseline/bits_per_byte": pytest.approx(12 / math.log(2) / 24),
        "heads/num_measured": 6,
        "heads/num_critical": 1,
        "heads/num_useful": 1,
        "heads/num_redundant": 2,
        "heads/num_harmful": 1,
        "heads/num_undetermined": 1,
        "heads/share_of_windows": 1.0,
        "intervals/method": "Student t over 2 windows",
        "intervals/confidence": 0.95,
    }


PREDICTED_WINDOWS = 16


@pytest.fixture(scope="module")
def ranked_adaptively(prepared: Prepared) -> Ranking:
    """Head 0 is measured on 12 of 16 windows and head 1 on all; predictions are 3/4 and 1/2."""
    tokens = make_tokens(4 * PREDICTED_WINDOWS + 1)
    windows = tuple(Window(4 * n, 4 * n + 5, 4 * n + 1) for n in range(PREDICTED_WINDOWS))
    number = np.arange(PREDICTED_WINDOWS)
    intact, effects = 4.0 + number % 3, np.stack([0.25 * number, 1.0 + number % 2])
    ablated = intact + effects
    ablated[0, 12:] = np.nan
    predicted = np.stack([0.75 * effects[0], 0.5 * effects[1]])
    heads, losses = (Head(0, 1), Head(1, 2)), Losses(intact, ablated, predicted)
    subject = Subject(prepared.loaded.model, Sample(tokens, windows), heads)
    return rank(subject, losses, EvaluationConfig(sampling="adaptive"))


def test_with_predictions_effects_are_those_of_the_control_variate(ranked_adaptively):
    """Predictions in proportion to the effects give the mean over all windows: 7.5/16, 1.5/4."""
    first, second = ranked_adaptively.rows
    assert (first.layer, first.head, second.layer, second.head) == (0, 1, 1, 2)
    assert first.effect_nats == pytest.approx(0.25 * 7.5 / 4)
    assert second.effect_nats == pytest.approx(1.5 / 4)
    assert (first.num_windows, second.num_windows) == (12, 16)
    assert (first.correlation, second.correlation) == pytest.approx((1, 1))
    # Squared deviations: 143 of 12 windows, 340 of 16. Once all are measured there is no gain.
    assert first.variance_reduction == pytest.approx((143 / 12**2) / (340 / 16**2))
    assert second.variance_reduction == pytest.approx(1)
    assert ranked_adaptively.summary["heads/share_of_windows"] == pytest.approx(28 / 32)
    assert ranked_adaptively.summary["intervals/method"] == (
        "control variates, Student t over 16 blocks"
    )


def test_an_adaptive_ranking_is_read_back_as_it_was_written(ranked_adaptively, tmp_path):
    write_ranking(tmp_path, "a title", ranked_adaptively, SHAPE, tolerance_nats=0.01)
    assert read_effects(tmp_path / "effects.csv") == list(ranked_adaptively.rows)


def test_the_files_hold_what_was_ranked(ranked, tmp_path):
    write_ranking(tmp_path, "a title", ranked, SHAPE, tolerance_nats=0.01)
    assert {path.name for path in tmp_path.iterdir()} == {"effects.csv", "heatmap.png"}
    assert read_effects(tmp_path / "effects.csv") == list(ranked.rows)
    assert (tmp_path / "heatmap.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_numbers_are_written_before_the_picture(ranked, tmp_path, monkeypatch):
    def disk_is_full(figure: Figure, path: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(ranking_module, "save_png", disk_is_full)
    with pytest.raises(OSError, match="disk full"):
        write_ranking(tmp_path, "a title", ranked, SHAPE, tolerance_nats=0.01)
    assert {path.name for path in tmp_path.iterdir()} == {"effects.csv"}


def test_heads_that_were_not_selected_are_not_measured(prepared, tmp_path, monkeypatch):
    drawn: list[tuple[np.ndarray, dict[tuple[int, int], str], str]] = []
    draw = ranking_module.effect_heatmap

    def noting(grid, verdicts, title, tolerance_nats) -> Figure:
        drawn.append((grid, verdicts, title))
        return draw(grid, verdicts, title, tolerance_nats)

    monkeypatch.setattr(ranking_module, "effect_heatmap", noting)
    layer_1 = rank_heads_of(prepared, [head for head in HEADS if head.layer == 1])
    write_ranking(tmp_path, "a title", layer_1, SHAPE, tolerance_nats=0.01)
    assert layer_1.summary["heads/num_measured"] == 4
    assert {row.layer for row in read_effects(tmp_path / "effects.csv")} == {1}
    [(grid, verdict_at, title)] = drawn
    assert title == "a title"
    assert np.isnan(grid[0]).all()
    assert grid[1] == pytest.approx([0.25, 0.02, -0.25, 0.0])
    assert verdict_at == {
        (1, 0): "critical",
        (1, 1): "useful",
        (1, 2): "harmful",
        (1, 3): "redundant",
    }
