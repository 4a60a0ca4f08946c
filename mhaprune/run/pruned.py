"""A run's pruned models: which heads go, what that costs and buys, and where one is saved."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import transformers
from jaxtyping import Float

from mhaprune.measure.baselines import Ablation, Donors
from mhaprune.measure.measurer import Measurer
from mhaprune.measure.perplexity import row_nats, sample_loss
from mhaprune.measure.progress import Progress
from mhaprune.measure.subject import Subject
from mhaprune.model.architectures import head_shape
from mhaprune.model.gating import gate_heads, gates_of
from mhaprune.model.heads import Head
from mhaprune.prune.compaction import compact, make_dense
from mhaprune.prune.curves import Curve, Order, make_curve
from mhaprune.prune.export import Form, check_directory, export, model_card
from mhaprune.prune.healing import Method, check_method, heal
from mhaprune.prune.savings import measure_savings
from mhaprune.prune.summary import curve_points, is_random
from mhaprune.run.config import PruneHeadsConfig
from mhaprune.run.curves import chosen_sets, intervals, losses_of
from mhaprune.run.prepare import Prepared
from mhaprune.run.pruning_config import HealConfig
from mhaprune.run.recording import Recording
from mhaprune.tables.manifest import read_manifest
from mhaprune.tables.rows import Saving
from mhaprune.text.sample import Sample

MAKE = {"compact": compact, "dense": make_dense}
SHARES = (0.1, 0.3, 0.5)
NEW_TOKENS = 32


def check_export(config: PruneHeadsConfig) -> None:
    """Raise ValueError, before anything is measured, where the export could not be written."""
    if config.export.dir is None:
        return
    check_directory(Path(config.export.dir))
    if config.ablation.kind == "resample":
        raise ValueError(
            "export.dir: a model cannot keep resampled heads; use ablation=zero, mean or optimal"
        )
    if "least" not in config.pruning.directions:
        raise ValueError("export.dir needs pruning.directions to contain least")
    names = [*config.pruning.orderings, *(["ranking"] if config.pruning.ranking else [])]
    if config.export.ordering not in (None, *names):
        raise ValueError(
            f"export.ordering={config.export.ordering} is not one of {', '.join(names)}"
        )


def check_pruned(config: PruneHeadsConfig, prepared: Prepared, heads: Sequence[Head]) -> None:
    """Raise ValueError, before anything is measured, for what cannot be done to this model.

    One head is removed on trial, in each form that will be made of it.
    """
    model = prepared.loaded.model
    shape = head_shape(model)
    chosen_sets(config, shape)
    forms: set[Form] = {"compact"} if config.savings or config.heal.steps else set()
    if config.export.dir is not None:
        forms.add(form_of(config))
    baseline = torch.ones(shape.num_layers, shape.num_heads, shape.d_head)
    for form in forms:
        MAKE[form](model, heads[:1], None if config.ablation.kind == "zero" else baseline)
    if config.heal.steps:
        check_method(method_of(config.heal))


def form_of(config: PruneHeadsConfig) -> Form:
    return "dense" if config.export.form == "dense" else "compact"


def method_of(config: HealConfig) -> Method:
    return "lora" if config.method == "lora" else "full"


def choose_point(config: PruneHeadsConfig, curves: Sequence[Curve]) -> tuple[Curve, int]:
    """Return the curve to export from and how many of its heads go.

    Without `export.ordering`, the best curve at the budget, or at 5% more perplexity. Raises
    ValueError where no head can go.
    """
    wanted = config.export
    if wanted.ordering is not None:
        curves = [curve for curve in curves if curve.ordering == wanted.ordering]
    increase = wanted.max_increase or 0.05
    best = best_curve(curves, increase)
    count = best.removable(increase) if wanted.num_heads is None else wanted.num_heads
    if count > len(best.order):
        raise ValueError(
            f"export.num_heads={count} is more than the {len(best.order)} heads that can go"
        )
    if count == 0:
        raise ValueError(
            f"export.max_increase={increase:g}: not one head can go within it by the interval's "
            f"upper end; allow more, or measure more windows"
        )
    return best, count


def best_curve(curves: Sequence[Curve], increase: float = 0.05) -> Curve:
    """Return the curve, random ones left out, by which the most heads can go at the increase.

    Of equal ones that with the smaller area, and one that ends early last.
    """
    named = [
        curve for curve in curves if curve.direction == "least" and not is_random(curve.ordering)
    ]

    def merit(curve: Curve) -> tuple[int, float]:
        return curve.removable(increase), -np.inf if curve.area is None else -curve.area

    return max(named, key=merit)


def compacted(
    prepared: Prepared, curve: Curve, ablation: Ablation
) -> dict[int, transformers.PreTrainedModel]:
    """Return the model without 10, 30 and 50% of the order's heads, by how many that are."""
    assert not isinstance(ablation, Donors)
    counts = sorted({round(share * len(curve.order)) for share in SHARES} - {0})
    model = prepared.loaded.model
    return {count: compact(model, curve.order[:count], ablation) for count in counts}


def look_at_pruned(
    config: PruneHeadsConfig,
    prepared: Prepared,
    curves: Sequence[Curve],
    measurer: Measurer,
) -> tuple[list[Saving], list[Curve]]:
    """Measure what models without 10, 30 and 50% of the best order's heads take, and heal them.

    Returns the rows of savings.csv and the healed models' curve, each if it is asked for.
    """
    if not config.savings and not config.heal.steps:
        return [], []
    curve = best_curve(curves)
    models = compacted(prepared, curve, measurer.subject.ablation)
    savings = savings_rows(prepared, models) if config.savings else []
    if not config.heal.steps:
        return savings, []
    return savings, [healed_curve(config, prepared, curve, models, measurer)]


def savings_rows(
    prepared: Prepared, models: dict[int, transformers.PreTrainedModel]
) -> list[Saving]:
    """Measure intact and compacted models side by side: the rows of savings.csv."""
    length = prepared.protocol.context_length
    new_tokens = min(NEW_TOKENS, length // 2)
    intact = prepared.loaded.model
    measured = measure_savings(
        [intact, *models.values()], prompt_length=length - new_tokens, new_tokens=new_tokens
    )
    return [
        Saving(num_removed=count, **asdict(one))
        for count, one in zip((0, *models), measured, strict=True)
    ]


def heal_model(
    model: transformers.PreTrainedModel,
    calibration: Sample,
    config: HealConfig,
    seed: int,
    progress: Progress,
) -> transformers.PreTrainedModel:
    """Train a model on the calibration text, in place."""
    return heal(
        model,
        calibration,
        steps=config.steps,
        learning_rate=config.lr,
        windows_per_step=config.windows_per_step,
        method=method_of(config),
        seed=seed,
        progress=progress,
    )


def healed_curve(
    config: PruneHeadsConfig,
    prepared: Prepared,
    curve: Curve,
    models: dict[int, transformers.PreTrainedModel],
    measurer: Measurer,
) -> Curve:
    """Heal the models and measure them on the evaluation text: the curve afterwards.

    It begins at the intact model, as every curve does.
    """
    [intact_nats] = losses_of(measurer, [()], config.evaluation.windows_per_unit)
    progress, subject = measurer.progress, measurer.subject
    progress.begin("heal", len(models) * config.heal.steps * config.heal.windows_per_step)
    nats = [intact_nats]
    for model in models.values():
        healed = heal_model(model, prepared.calibration, config.heal, config.seed, progress)
        nats.append(model_nats(healed, subject.sample, subject.rows_per_batch))
    return make_curve(
        Order(f"{curve.ordering}_healed", "least", curve.order),
        [0, *models],
        intact_nats,
        np.stack(nats),
        subject.sample.num_tokens,
        subject.sample.blocks,
        **intervals(config),
    )


def model_nats(
    model: transformers.PreTrainedModel, sample: Sample, rows: int
) -> Float[np.ndarray, "window"]:
    """Return a model's total nats on each window of a sample."""
    numbers = range(len(sample.windows))
    parts = [
        row_nats(model, *sample.batch(numbers[first : first + rows])).numpy()
        for first in numbers[::rows]
    ]
    return np.concatenate(parts)


def export_pruned(
    config: PruneHeadsConfig,
    recording: Recording,
    curves: Sequence[Curve],
    subject: Subject,
) -> None:
    """Write the pruned model, healed if configured, where the configuration says, if anywhere."""
    wanted = config.export
    if wanted.dir is None:
        return
    prepared, ablation, say = recording.prepared, subject.ablation, recording.progress.say
    assert not isinstance(ablation, Donors)
    curve, count = choose_point(config, curves)
    heads = curve.order[:count]
    form = form_of(config)
    model = MAKE[form](prepared.loaded.model, heads, ablation)
    difference = largest_difference(subject, model, heads)
    say(f"The {wanted.form} and the masked model's logits differ by at most {difference:.1e}")
    healed = None
    if config.heal.steps:
        model = heal_model(model, prepared.calibration, config.heal, config.seed, Progress())
        nats = model_nats(model, subject.sample, subject.rows_per_batch)
        perplexity = sample_loss(subject.sample, nats).perplexity
        healed = f"{config.heal.steps} steps on calibration text; perplexity now {perplexity:.4g}"
        say(f"Healed by {healed}")
    rows = [asdict(point) for point in curve_points([curve])]
    nearest = max(n for n, done in enumerate(curve.num_removed) if done <= count)
    shape = head_shape(prepared.loaded.model)
    card = model_card(
        form=form,
        base_model=prepared.loaded.name,
        weights_hash=prepared.loaded.weights_hash,
        heads=heads,
        num_heads=shape.num_layers * shape.num_heads,
        ablation=f"{config.ablation.kind}, found on calibration text",
        protocol=str(prepared.protocol),
        curve=rows,
        chosen=nearest,
        healed=healed,
    )
    manifest = read_manifest(recording.directory) | {
        "removed_heads": [str(head) for head in sorted(heads)],
        "ordering": curve.ordering,
        "healed": healed,
    }
    place = Path(wanted.dir)
    export(place, model, prepared.loaded.tokenizer, form, card, manifest)
    say(f"Exported without {count} heads ({curve.ordering}): {place}, {wanted.form} form")


@torch.no_grad()
def largest_difference(
    subject: Subject, pruned: transformers.PreTrainedModel, heads: Sequence[Head]
) -> float:
    """Return how far the pruned model's logits are from the masked model's, on one window."""
    model, ablation = subject.model, subject.ablation
    assert not isinstance(ablation, Donors)
    inputs = subject.sample.batch([0])[0].to(model.device)
    [gate] = gates_of([tuple(heads)], subject.shape)
    constants = None if ablation is None else ablation.to(model.device)
    with gate_heads(model, gate.to(model.device), constants):
        masked = model(inputs, use_cache=False).logits
    return float((pruned(inputs, use_cache=False).logits - masked).abs().max())
