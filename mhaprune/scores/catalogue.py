"""The scores by name: each takes a `Subject`, and options of its own, and gives an `Estimate`."""

from collections.abc import Callable

from mhaprune.scores.activation_norm import activation_norm
from mhaprune.scores.adaptive import leave_one_out_adaptively
from mhaprune.scores.attribution import attribution
from mhaprune.scores.estimate import Estimate
from mhaprune.scores.fisher import fisher
from mhaprune.scores.gradient import gradient
from mhaprune.scores.integrated_gradients import integrated_gradients
from mhaprune.scores.learned_gates import learned_gates
from mhaprune.scores.leave_one_out import leave_one_out
from mhaprune.scores.random import random
from mhaprune.scores.shapley import shapley

SCORES: dict[str, Callable[..., Estimate]] = {
    "leave_one_out": leave_one_out,
    "adaptive": leave_one_out_adaptively,
    "gradient": gradient,
    "fisher": fisher,
    "attribution": attribution,
    "integrated_gradients": integrated_gradients,
    "shapley": shapley,
    "learned_gates": learned_gates,
    "activation_norm": activation_norm,
    "random": random,
}
