"""Activation norm: how much a head writes into the residual stream.

    value_h = mean over positions of |z_h W_O[h]|

Needs no loss and no gradient: the baseline that any method should beat. See arXiv 2504.03889.
"""

import numpy as np
import torch

from mhaprune.measure.subject import Subject
from mhaprune.model.architectures import output_projections, output_weights
from mhaprune.model.gating import captured_z
from mhaprune.scores.estimate import Estimate, batches, estimate_rates


@torch.no_grad()
def activation_norm(subject: Subject) -> Estimate:
    """Return the mean Euclidean norm of each head's contribution over all input positions."""
    shape, model = subject.shape, subject.model
    weights = [output_weights(module, shape.num_heads) for module in output_projections(model)]
    sums = np.zeros((shape.num_layers, shape.num_heads, len(subject.sample.windows)))
    lengths = np.array([window.num_inputs for window in subject.sample.windows])
    for numbers in batches(subject):
        inputs, _ = subject.sample.batch(numbers)
        is_input = torch.arange(inputs.shape[1]) < torch.tensor(lengths[numbers])[:, None]
        with captured_z(model) as captured:
            model.base_model(inputs.to(model.device), use_cache=False)
        for layer, (z, weight) in enumerate(zip(captured, weights, strict=True)):
            norms = torch.einsum("wphd,hdm->wphm", z, weight).norm(dim=-1).double().cpu()
            sums[layer][:, numbers] = (norms * is_input[..., None]).sum(1).numpy().T
    return estimate_rates(subject, sums, forward_equivalents=1, tokens=lengths)
