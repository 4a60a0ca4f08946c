"""Results -> one HTML page that opens from disk: no network, no library, no second file.

The page is static text (title, facts, protocol, settings) and, for what is drawn, the numbers as
JSON beside plain JavaScript (`assets/`). Nothing that a run brings along is ever parsed as HTML:
the templates escape texts, the scripts put text in as text, and a content security policy forbids
the page to load or send anything.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from urllib.parse import quote

import numpy as np
from jaxtyping import Float
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mhaprune.tables.rows import (
    CurvePoint,
    HeadEffect,
    HeadRole,
    HeadScore,
    Interaction,
    Saving,
    ScoreAgreement,
)
from mhaprune.tables.tables import SHOWN

SCRIPTS = "dom data numbers colours tooltip selection table heatmap".split()
PAGE_SCRIPTS = (
    "ranking effects heads scores agreement curve_plot curves attention_maps sentence attention"
).split()


@dataclass(frozen=True)
class Viewer:
    """A sentence and where every head looks: row `query` of a pattern sums to 1 over its keys."""

    tokens: Sequence[str]
    patterns: Float[np.ndarray, "layer head query key"]  # in [0, 1], zero where key > query
    note: str | None = None


@dataclass(frozen=True)
class RunPage:
    """What one run found. A section appears on the page if the run has its rows.

    Of the rows the columns in `SHOWN` are drawn; `removable` is what `summary.removable_rows`
    returns: order, counts at +1%, +5%, +10%, area. Nats are per token.
    """

    title: str
    num_layers: int
    num_heads: int
    subtitle: str = ""
    facts: Sequence[tuple[str, str]] = ()
    confidence: float = 0.95
    tolerance_nats: float = 0.01
    critical_nats: float = 0.05
    effects: Sequence[HeadEffect] = ()
    roles: Sequence[HeadRole] = ()
    scores: Sequence[HeadScore] = ()
    agreement: Sequence[ScoreAgreement] = ()
    curves: Sequence[CurvePoint] = ()
    ppl_intact: float | None = None
    removable: Sequence[tuple[str, Sequence[str], str]] = ()
    interactions: Sequence[Interaction] = ()
    savings: Sequence[Saving] = ()
    viewer: Viewer | None = None
    protocol: str = ""
    config_yaml: str = ""
    command: str = ""
    details: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class IndexEntry:
    """One run of a sweep: `href` is the path of its page from the index's directory.

    `settings` is what was chosen (ablation, model), `numbers` what came out (perplexity, critical).
    """

    name: str
    href: str
    num_layers: int
    num_heads: int
    settings: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float | int] = field(default_factory=dict)
    effects: Sequence[HeadEffect] = ()
    tolerance_nats: float = 0.01


def render_page(data: RunPage) -> str:
    """Return the page of one run as HTML.

    Raises ValueError for NaN and infinity, heads that the model does not have, curves without
    `ppl_intact` and a viewer whose patterns do not fit (`pack_patterns`).
    """
    tables = {name: _table(name, getattr(data, name)) for name in SHOWN}
    for name in ("effects", "roles", "scores"):
        _check_heads(name, tables[name], data.num_layers, data.num_heads)
    if data.curves and not (data.ppl_intact and data.ppl_intact > 0):
        raise ValueError(f"curves need the intact model's perplexity, got {data.ppl_intact}")
    numbers = "num_layers num_heads confidence tolerance_nats critical_nats ppl_intact removable"
    drawn = {name: getattr(data, name) for name in numbers.split()} | tables
    if data.viewer is not None:
        drawn["viewer"] = _viewer(data.viewer, data.num_layers, data.num_heads)
    sections = {
        "effects": ("Effects", data.effects),
        "heads": ("Heads", data.effects),
        "scores": ("Scores", data.scores),
        "agreement": ("Score agreement", data.agreement),
        "pruning": ("Pruning curves", data.curves),
        "interactions": ("Interactions", data.interactions),
        "savings": ("Savings", data.savings),
        "attention": ("Attention", data.viewer is not None),
        "about": ("About this run", True),
    }
    present = [(name, title) for name, (title, rows) in sections.items() if rows]
    return _render("page.html", [*SCRIPTS, *PAGE_SCRIPTS, "page"], present, drawn, **vars(data))


def render_index(runs: Sequence[IndexEntry], title: str) -> str:
    """Return the index of a sweep as HTML: its runs side by side, each linked to its own page.

    Settings that all runs share stand below, the others are columns. Raises ValueError for no runs,
    a path that is not relative, NaN and infinity.
    """
    if not runs:
        raise ValueError("an index needs at least one run, got none")
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    differ = [key for key in keys if len({run.settings.get(key) for run in runs}) > 1]
    same = [(key, runs[0].settings[key]) for key in keys if key not in differ]
    drawn = {
        "setting_names": differ,
        "number_names": list(dict.fromkeys(key for run in runs for key in run.numbers)),
        "runs": [_index_run(run) for run in runs],
    }
    sections = {
        "runs": ("Runs", True),
        "maps": ("Effects side by side", any(run.effects for run in runs)),
        "same": ("Settings that all runs share", same),
    }
    present = [(name, heading) for name, (heading, rows) in sections.items() if rows]
    said = {"title": title, "subtitle": f"{len(runs)} runs", "facts": (), "same": same}
    return _render("index.html", [*SCRIPTS, "index"], present, drawn, **said)


def pack_patterns(patterns: Float[np.ndarray, "layer head query key"]) -> str:
    """Return the patterns as base64 of one byte per weight, round(255 * weight).

    Only keys up to the query are kept, row after row, so T tokens take T (T + 1) / 2 bytes a head.
    Raises ValueError for weights outside [0, 1] or above the diagonal.
    """
    if not ((patterns >= 0) & (patterns <= 1)).all():  # NaN is neither
        raise ValueError("expected attention weights from 0 to 1, got others")
    if np.triu(patterns, k=1).any():
        raise ValueError("expected causal attention, got weights of keys after their query")
    rows, columns = np.tril_indices(patterns.shape[-1])
    weights = np.rint(255 * patterns[..., rows, columns]).astype(np.uint8)
    return base64.b64encode(weights.tobytes()).decode()


def _viewer(viewer: Viewer, num_layers: int, num_heads: int) -> dict[str, Any]:
    size = len(viewer.tokens)
    expected = (num_layers, num_heads, size, size)
    if not size or viewer.patterns.shape != expected:
        raise ValueError(
            f"expected patterns of layer, head, query, key {expected} for {size} tokens, "
            f"got {viewer.patterns.shape}"
        )
    packed = pack_patterns(viewer.patterns)
    return {"tokens": list(viewer.tokens), "note": viewer.note, "weights": packed}


def _index_run(run: IndexEntry) -> dict[str, Any]:
    if run.href.startswith("/"):
        raise ValueError(f"expected a path relative to the index's directory, got {run.href!r}")
    table = _table("effects", run.effects)
    _check_heads(f"effects of {run.name}", table, run.num_layers, run.num_heads)
    plain = "name num_layers num_heads settings numbers tolerance_nats".split()
    drawn = {name: getattr(run, name) for name in plain}
    return drawn | {"href": quote(run.href), "effects": table}


def _table(name: str, rows: Sequence[object]) -> dict[str, Any]:
    """Return columns and rows of a table; lists, as names in every row would double the page."""
    cells = [[getattr(row, column) for column in SHOWN[name]] for row in rows]
    return {"columns": SHOWN[name], "rows": cells}


def _check_heads(name: str, table: dict[str, Any], num_layers: int, num_heads: int) -> None:
    at = [table["columns"].index(column) for column in ("layer", "head")]
    for row in table["rows"]:
        layer, head = (row[n] for n in at)
        if not (0 <= layer < num_layers and 0 <= head < num_heads):
            raise ValueError(
                f"{name}: expected a head of {num_layers} layers x {num_heads} heads, "
                f"got L{layer}H{head}"
            )


def _render(
    template: str,
    scripts: Sequence[str],
    sections: Sequence[tuple[str, str]],
    drawn: Mapping[str, Any],
    **said: Any,
) -> str:
    """Fill a template with texts (`said`), sections (name, heading) and what the scripts draw."""
    return PAGES.get_template(template).render(
        **said, asset=_asset, scripts=scripts, sections=sections, drawn=Markup(_json(drawn))
    )


def _asset(name: str) -> Markup:
    asset = resources.files("mhaprune.review").joinpath("assets", name)
    return Markup(asset.read_text(encoding="utf-8"))


def _whole(value: object) -> object:
    """Return text whose halves of surrogate pairs, which no file can hold, are U+FFFD."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


PAGES = Environment(
    loader=PackageLoader("mhaprune.review", "assets"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_whole,
    trim_blocks=True,
    keep_trailing_newline=True,
)


def _json(value: object) -> str:
    """Return JSON that no HTML parser can take for markup: pure ASCII, without `<`, `>` and `&`."""
    text = json.dumps(_finite(value, "page"), ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any, where: str) -> Any:
    """Return plain values. Raises ValueError, saying where, on NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each, f"{where}[{n}]") for n, each in enumerate(value)]
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(f"{where}: expected a finite number, got {plain}")
    return plain
