"""The parts of a configuration that only prune_heads has."""

from dataclasses import dataclass, field
from typing import Any

from mhaprune.run.mistakes import at_least, one_of


@dataclass
class OrderingConfig:
    """An order in which heads go: by a score, taken once or again after every few heads."""

    score: str
    options: dict[str, Any] = field(default_factory=dict)
    rescore_every: int | None = None

    def __post_init__(self) -> None:
        at_least("pruning.orderings.*.rescore_every", self.rescore_every, 1)


@dataclass
class PruningConfig:
    """Which pruning curves are drawn, and which sets of heads are looked at together."""

    orderings: dict[str, OrderingConfig] = field(default_factory=dict)
    ranking: str | None = None
    same_text: bool = False
    directions: list[str] = field(default_factory=lambda: ["least", "most"])
    random_orders: int = 10
    step: int | None = None
    min_per_layer: int = 0
    pairs: int = 0
    sets: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.directions:
            raise ValueError("pruning.directions is empty; give least, most or both")
        for direction in self.directions:
            one_of("pruning.directions", direction, ("least", "most"))
        for key, least in (("random_orders", 0), ("min_per_layer", 0), ("pairs", 0), ("step", 1)):
            at_least(f"pruning.{key}", getattr(self, key), least)
        for name in self.orderings:
            if name == "ranking" or name.startswith("random_") or name.endswith("_healed"):
                raise ValueError(
                    f"pruning.orderings.{name}: ranking, random_... and ..._healed are names that "
                    f"the curves use already; choose another"
                )
        if not self.orderings and self.ranking is None:
            raise ValueError("no order to prune by; give pruning.orderings or pruning.ranking")


@dataclass
class ExportConfig:
    """Where a pruned model goes, and how many heads it loses: a number, or a perplexity budget."""

    dir: str | None = None
    form: str = "compact"
    ordering: str | None = None
    num_heads: int | None = None
    max_increase: float | None = None

    def __post_init__(self) -> None:
        one_of("export.form", self.form, ("compact", "dense"))
        at_least("export.num_heads", self.num_heads, 1)
        if self.dir is not None and (self.num_heads is None) == (self.max_increase is None):
            raise ValueError(
                "export.dir needs either export.num_heads or export.max_increase (0.05: 5% more "
                "perplexity)"
            )
        if self.max_increase is not None and self.max_increase <= 0:
            raise ValueError(f"export.max_increase={self.max_increase} must be above 0")


@dataclass
class HealConfig:
    """A short training of the pruned model on calibration text; 0 steps is none."""

    steps: int = 0
    lr: float = 3e-4
    windows_per_step: int = 8
    method: str = "full"

    def __post_init__(self) -> None:
        at_least("heal.steps", self.steps, 0)
        at_least("heal.windows_per_step", self.windows_per_step, 1)
        one_of("heal.method", self.method, ("full", "lora"))
        if self.lr <= 0:
            raise ValueError(f"heal.lr={self.lr} must be above 0")
