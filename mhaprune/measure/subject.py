"""What a measurement is about: heads of a model, on windows of a text, against an ablation."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mhaprune.measure.baselines import Ablation
from mhaprune.model.architectures import HeadShape, head_shape
from mhaprune.model.heads import Head
from mhaprune.text.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Engine = Literal["replay", "gating"]


@dataclass(frozen=True, eq=False)
class Subject:
    """The heads that are measured, of a model, on a sample, against an ablation.

    `engine` is how heads are ablated: "replay", for the architectures that it knows, gives the same
    numbers as "gating" up to rounding, faster. At most `rows_per_batch` windows go through the
    model at once. `seed` is that of everything random. `shape` follows from the model.
    """

    model: "PreTrainedModel"
    sample: Sample
    heads: tuple[Head, ...]
    ablation: Ablation = None
    rows_per_batch: int = 16
    engine: Engine = "gating"
    seed: int = 0
    shape: HeadShape = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", head_shape(self.model))
