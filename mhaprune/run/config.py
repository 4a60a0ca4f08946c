"""What a run is configured by: the schema and its checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mhaprune.run.mistakes import at_least, one_line, one_of
from mhaprune.run.pruning_config import ExportConfig, HealConfig, PruningConfig

PACKAGE = Path(__file__).resolve().parents[1]  # in a wheel conf/ lies in it, else beside it
CONF_DIR = next(place for place in (PACKAGE / "conf", PACKAGE.parent / "conf") if place.is_dir())

Schema = TypeVar("Schema")
EXAMPLE = "The cat sat on the mat because it was tired"


@dataclass
class ModelConfig:
    """Which model: the demo, one on the hub (`hub_id`, `revision`), or a local directory."""

    name: str
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = None
    gguf_file: str | None = None
    dtype: str = "float32"
    device: str = "auto"

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, ("float32", "float64", "bfloat16"))
        if self.dtype == "bfloat16":
            raise ValueError(
                "model.dtype=bfloat16 shifts every effect by about as much as the redundancy "
                "tolerance; use float32 or float64"
            )
        one_of("model.device", self.device, ("auto", "cpu", "cuda", "mps"))


@dataclass
class DatasetConfig:
    """Which text is evaluated, and which other text calibrates baselines."""

    name: str
    source: str
    num_stories: int = 400
    hub_id: str | None = None
    config_name: str | None = None
    split: str | None = None
    calibration_split: str | None = None
    column: str = "text"
    revision: str | None = None
    joiner: str = ""
    document_start: str | None = None
    path: str | None = None
    calibration_path: str | None = None
    calibration_fraction: float = 0.1
    separator: str = "none"
    bos: bool = False

    def __post_init__(self) -> None:
        one_of("dataset.source", self.source, ("stories", "hub", "text"))
        one_of("dataset.separator", self.separator, ("none", "eos"))
        at_least("dataset.num_stories", self.num_stories, 1)
        needed = {"stories": (), "hub": ("hub_id", "split"), "text": ("path",)}
        for key in needed[self.source]:
            if getattr(self, key) is None:
                raise ValueError(f"dataset.source={self.source} needs dataset.{key}")
        if not 0 < self.calibration_fraction < 1:
            raise ValueError(
                f"dataset.calibration_fraction={self.calibration_fraction} must lie between 0 and 1"
            )


@dataclass
class EvaluationConfig:
    """How the text is cut into windows, and when a head counts as redundant or critical."""

    context_length: int | None = None
    stride: int | None = None
    max_windows: int | None = None
    first_token: str = "scored"
    sampling: str = "exhaustive"
    engine: str = "auto"
    matmul: str = "exact"
    calibration_windows: int = 32
    rows_per_batch: int | None = None
    windows_per_unit: int = 4
    confidence: float = 0.95
    resamples: int = 10_000
    tolerance_nats: float = 0.01
    critical_nats: float = 0.05

    def __post_init__(self) -> None:
        one_of("evaluation.first_token", self.first_token, ("scored", "unscored"))
        one_of("evaluation.sampling", self.sampling, ("exhaustive", "adaptive"))
        one_of("evaluation.engine", self.engine, ("auto", "replay", "gating"))
        one_of("evaluation.matmul", self.matmul, ("exact", "fast"))
        for key in ("context_length", "stride", "calibration_windows", "rows_per_batch"):
            at_least(f"evaluation.{key}", getattr(self, key), 1)
        at_least("evaluation.windows_per_unit", self.windows_per_unit, 1)
        at_least(
            "evaluation.max_windows", self.max_windows, 2 if self.sampling == "exhaustive" else 8
        )
        at_least("evaluation.resamples", self.resamples, 100)
        if self.stride and self.context_length and self.stride > self.context_length:
            raise ValueError(
                f"evaluation.stride={self.stride} is above evaluation.context_length="
                f"{self.context_length}; tokens in between would never be scored"
            )
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"evaluation.confidence={self.confidence} must lie in [0.5, 1)")
        if not 0 < self.tolerance_nats <= self.critical_nats:
            raise ValueError(
                f"expected 0 < evaluation.tolerance_nats <= evaluation.critical_nats, "
                f"got {self.tolerance_nats} and {self.critical_nats}"
            )


@dataclass
class AblationConfig:
    """What replaces an ablated head's output."""

    kind: str
    steps: int = 60

    def __post_init__(self) -> None:
        one_of("ablation.kind", self.kind, ("zero", "mean", "resample", "optimal"))
        at_least("ablation.steps", self.steps, 1)


@dataclass
class RolesConfig:
    """On how much text it is judged what each head attends to."""

    windows: int = 4
    repeats: int = 8
    period: int = 64

    def __post_init__(self) -> None:
        at_least("roles.windows", self.windows, 0)
        at_least("roles.repeats", self.repeats, 1)
        at_least("roles.period", self.period, 16)


@dataclass
class ShardConfig:
    """Which part of a run's units of work this job measures: part `index` of `count`."""

    count: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        at_least("shard.count", self.count, 1)
        if not 0 <= self.index < self.count:
            raise ValueError(f"shard.index={self.index} must lie from 0 to {self.count - 1}")


@dataclass
class ScoreConfig:
    """Which score ranks the heads, and the options of that score by their names."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrackerConfig:
    """How the run is shown in Weights & Biases."""

    mode: str
    project: str = "mhaprune"
    name: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        one_of("tracker.mode", self.mode, ("offline", "online", "none"))


@dataclass
class ReadingConfig:
    """Which model reads which text."""

    model: ModelConfig
    dataset: DatasetConfig
    evaluation: EvaluationConfig


@dataclass
class MeasureConfig(ReadingConfig):
    """What every program that measures heads needs to know."""

    ablation: AblationConfig
    tracker: TrackerConfig
    heads: list[str] = field(default_factory=lambda: ["L*H*"])
    seed: int = 0
    failure: str = "continue"

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        one_of("failure", self.failure, ("continue", "stop"))


@dataclass
class RankHeadsConfig(MeasureConfig):
    """The whole configuration of `experiments/rank_heads.py`."""

    score: ScoreConfig = field(default_factory=lambda: ScoreConfig("leave_one_out"))
    roles: RolesConfig = field(default_factory=RolesConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    text: str = EXAMPLE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard.count == 1:
            return
        if self.score.name != "leave_one_out" or self.evaluation.sampling != "exhaustive":
            raise ValueError(
                "shard.count: only score=leave_one_out with exhaustive sampling can be shared out"
            )


@dataclass
class HeadAtlasConfig(ReadingConfig):
    """The whole configuration of `experiments/head_atlas.py`."""

    tracker: TrackerConfig
    roles: RolesConfig = field(default_factory=RolesConfig)
    text: str = EXAMPLE
    seed: int = 0
    failure: str = "continue"

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        one_of("failure", self.failure, ("continue", "stop"))


@dataclass
class CompareScoresConfig(MeasureConfig):
    """The whole configuration of `experiments/compare_scores.py`; scores by name, with options."""

    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    top_k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("top_k", self.top_k, 1)
        if self.evaluation.sampling == "adaptive":
            raise ValueError("scores are judged by exhaustive measuring; use evaluation=default")
        if not self.scores:
            raise ValueError("no scores to compare; give at least one, such as +scores.fisher={}")


@dataclass(kw_only=True)
class PruneHeadsConfig(MeasureConfig):
    """The whole configuration of `experiments/prune_heads.py`."""

    pruning: PruningConfig  # no default: its orderings would come back where a user removes them
    export: ExportConfig = field(default_factory=ExportConfig)
    heal: HealConfig = field(default_factory=HealConfig)
    savings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluation.sampling == "adaptive":
            raise ValueError("curves are measured exhaustively; use evaluation=default")
        if not (self.savings or self.heal.steps):
            return
        if self.ablation.kind == "resample":
            raise ValueError(
                "savings and heal: a model cannot keep resampled heads; use ablation=zero, mean or "
                "optimal"
            )
        if "least" not in self.pruning.directions:
            raise ValueError("savings and heal need pruning.directions to contain least")


def validate(config: Mapping[str, Any], schema: type[Schema]) -> Schema:
    """Return the configuration as the schema's dataclass; ValueError says what is wrong."""
    try:
        missing = sorted(OmegaConf.missing_keys(config))  # a default would cover up for a ???
        if missing:
            add = " ".join(f"{key}=..." for key in missing)
            raise ValueError(f"no value for {', '.join(missing)}; add {add}")
        made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), config))
    except OmegaConfBaseException as error:
        raise ValueError(one_line(error)) from error
    assert isinstance(made, schema)
    return made


def plain(config: object) -> dict[str, Any]:
    """Return a configuration dataclass as nested dicts of plain values."""
    made = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    assert isinstance(made, dict)
    return {str(key): value for key, value in made.items()}
