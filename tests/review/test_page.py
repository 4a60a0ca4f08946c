"""The report page holds its run's numbers, whatever the run's texts are made of."""

import base64
import dataclasses
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float

from mhaprune.review.page import (
    IndexEntry,
    RunPage,
    Viewer,
    pack_patterns,
    render_index,
    render_page,
)
from mhaprune.tables.rows import (
    CurvePoint,
    HeadEffect,
    HeadRole,
    HeadScore,
    Interaction,
    Saving,
    ScoreAgreement,
)
from mhaprune.tables.tables import SHOWN, TABLES

NUM_LAYERS, NUM_HEADS = 4, 8
SENTENCE = ["The", " cat", " sat", " on", " the", " mat", " because", " it", " was", " tired"]
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "<img src=x onerror=alert(1)>",
    "&amp;",
    "\"'`${x}",
    "\u2028\u2029",
    "\x00\x1b\x7f",
    "\ud800",
    "😀",
    "\u202e",
]


def verdict_of(low: float, high: float) -> str:
    if low > 0.05:
        return "critical"
    if low > 0.01:
        return "useful"
    if low >= -0.01 and high <= 0.01:
        return "redundant"
    return "harmful" if high < -0.01 else "undetermined"


def make_effects(num_layers: int = NUM_LAYERS, num_heads: int = NUM_HEADS) -> list[HeadEffect]:
    """Effects of all heads but the last, of every size and sign, by rank."""
    generator = np.random.default_rng(5)
    count = num_layers * num_heads - 1
    nats = np.sort(np.exp(generator.normal(-3.6, 2.2, count)) - 0.016)[::-1]
    spread = 0.0015 + 0.12 * np.abs(nats)
    places = generator.permutation(count)
    return [
        HeadEffect(
            *divmod(int(place), num_heads),
            effect_nats=float(effect),
            ci_low=float(effect - margin),
            ci_high=float(effect + margin),
            ppl_ablated=float(6.45 * np.exp(effect)),
            delta_ppl=float(6.45 * np.expm1(effect)),
            verdict=verdict_of(effect - 1.2 * margin, effect + 1.2 * margin),
            rank=rank,
            delta_ppl_low=float(6.45 * np.expm1(effect - margin)),
            delta_ppl_high=float(6.45 * np.expm1(effect + margin)),
            standard_error=float(margin / 2),
            num_windows=64,
        )
        for rank, (place, effect, margin) in enumerate(
            zip(places, nats, spread, strict=True), start=1
        )
    ]


def make_patterns(
    num_layers: int, num_heads: int, num_tokens: int
) -> Float[np.ndarray, "layer head query key"]:
    """Causal attention of every kind: to the first token, the one before, itself, and mixed."""
    generator = np.random.default_rng(11)
    query, key = np.indices((num_tokens, num_tokens))
    liking = np.stack([key == 0, key == query - 1, key == query, key == key])
    kinds = generator.integers(4, size=(num_layers, num_heads))
    noise = generator.normal(size=(num_layers, num_heads, num_tokens, num_tokens))
    logits = np.where(key <= query, 4.0 * liking[kinds] + noise, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def make_viewer(num_layers: int = NUM_LAYERS, num_heads: int = NUM_HEADS) -> Viewer:
    patterns = make_patterns(num_layers, num_heads, len(SENTENCE))
    return Viewer(SENTENCE, patterns, "The text starts without a beginning-of-text token.")


def make_curves(num_heads: int = 32) -> list[CurvePoint]:
    speeds = {"leave_one_out": 1.0, "gradient": 1.3, "activation_norm": 1.9}
    speeds |= {f"random_{n}": 1.8 + 0.15 * n for n in range(6)}
    points = []
    for ordering, speed in speeds.items():
        for direction in ("least", "most") if not ordering.startswith("random") else ("least",):
            for removed in range(num_heads + 1):
                share = removed / num_heads
                rise = 5.4 * (
                    share ** (4 / speed) if direction == "least" else share ** (0.3 + 0.15 * speed)
                )
                nats = 1.864 + rise
                ppl = math.exp(nats)
                margin = 0.04 * rise
                points.append(
                    CurvePoint(
                        *(ordering, direction, removed, nats, ppl),
                        *(ppl * math.exp(-margin), ppl * math.exp(margin)),
                    )
                )
    return points


def make_agreement() -> list[ScoreAgreement]:
    numbers = {
        "leave_one_out": (0.975, 0.908, 0.992, 33.0),
        "gradient": (0.815, 0.598, 0.930, 3.0),
        "fisher": (0.831, 0.622, 0.933, 3.0),
        "attribution": (0.412, 0.061, 0.689, 3.0),
        "shapley": (0.903, 0.761, 0.961, 640.0),
        "activation_norm": (0.634, 0.330, 0.828, 1.0),
        "random": (-0.087, -0.420, 0.266, 0.0),
    }
    return [
        ScoreAgreement(
            *(name, rho, low, high, rho * 0.8, 0.75, 0.9, 0.88, cost, cost * 0.3),
            *(low * 0.8, high * 0.8),
        )
        for name, (rho, low, high, cost) in numbers.items()
    ]


def make_scores() -> list[HeadScore]:
    rows = make_effects()
    return [
        HeadScore(name, row.layer, row.head, sign * row.effect_nats * factor, error)
        for name, sign, factor, error in (("leave_one_out", 1, 0.9, 0.01), ("gradient", 1, 3, None))
        for row in rows
    ]


def make_roles() -> list[HeadRole]:
    roles = {(2, 3): ("previous token", 0.97), (3, 1): ("induction", 0.62)}
    roles |= {(0, 2): ("duplicate token", 0.55), (1, 6): ("sink", 0.91), (3, 4): ("induction", 0.5)}
    return [
        HeadRole(layer, head, role, score, *[0.0] * 9)
        for layer in range(NUM_LAYERS)
        for head in range(NUM_HEADS)
        for role, score in [roles.get((layer, head), (None, None))]
    ]


def example_run() -> RunPage:
    """A page with every section, like that of a demo run."""
    verdicts = [row.verdict for row in make_effects()]
    return RunPage(
        title="demo on stories, zero ablation",
        subtitle="Ranking of attention heads by the measured change in loss",
        facts=[
            ("perplexity, intact", "6.450 [6.301, 6.606]"),
            ("loss", "1.8641 nats/token"),
            *((name, str(verdicts.count(name))) for name in sorted(set(verdicts))),
        ],
        num_layers=NUM_LAYERS,
        num_heads=NUM_HEADS,
        effects=make_effects(),
        roles=make_roles(),
        scores=make_scores(),
        agreement=make_agreement(),
        curves=make_curves(),
        ppl_intact=math.exp(1.864),
        removable=[
            ("leave_one_out", ["3", "6", "9"], "0.99"),
            ("6 random", ["0 to 3", "0 to 5", "0 to 6"], "1.51 to 2.20"),
        ],
        interactions=[
            Interaction("L0H4 L0H6", 0.0308, 0.0068, 0.0240, 0.0003, 0.0478, True, True),
            Interaction("L0H6 L3H4", 0.0272, 0.0189, 0.0084, 0.0018, 0.0149, False, False),
        ],
        savings=[
            Saving(0, 957184, 4096, 5251.7, 275.6),
            Saving(10, 880000, 2816, 6010.2, 301.4),
        ],
        viewer=make_viewer(),
        protocol="stories, 64 windows of 256 tokens, stride 256, no BOS, 16,384 tokens scored once",
        config_yaml="model:\n  name: demo\nablation:\n  kind: zero\nseed: 0\n",
        command="python experiments/rank_heads.py model=demo dataset=stories ablation=zero seed=0",
        details=[("commit", "9e82d5c"), ("python", "3.11.7"), ("torch", "2.13.0"), ("seed", "0")],
    )


def example_index() -> str:
    runs = [
        IndexEntry(
            name=f"ablation={kind}",
            href=f"ablation={kind},seed=#1/report.html",
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            settings={"model": "demo", "ablation": kind},
            numbers={"perplexity": 6.45, "critical": critical},
            effects=make_effects(),
        )
        for kind, critical in (("zero", 6), ("mean", 3), ("resample", 4))
    ]
    return render_index(runs, "Sweep of ablations")


class Reader(HTMLParser):
    """What a browser's parser would find: elements, attributes and texts."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags:
            self.texts.setdefault(self.tags[-1], []).append(data)

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0])

    @property
    def sections(self) -> list[str]:
        return re.findall(r"#([a-z]+)", " ".join(value or "" for _, value in self.attributes))


def unpack(weights: str, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `pack_patterns`, written again."""
    flat = iter(base64.b64decode(weights))
    patterns = np.zeros(shape)
    for layer, head, query in np.ndindex(shape[:3]):
        for key in range(query + 1):
            patterns[layer, head, query, key] = next(flat) / 255
    assert next(flat, None) is None
    return patterns


def rows_of(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_every_number_of_every_table_comes_back_as_it_was():
    run = example_run()
    data = Reader(render_page(run)).data
    for name, columns in SHOWN.items():
        rows = [{key: getattr(row, key) for key in columns} for row in getattr(run, name)]
        assert rows and rows_of(data[name]) == rows, name
    assert data["ppl_intact"] == run.ppl_intact
    assert data["removable"] == [list(row) for row in run.removable]
    assert data["viewer"]["tokens"] == SENTENCE


def test_the_columns_of_a_table_are_fields_of_its_rows():
    for name, table in TABLES.items():
        fields = {field.name for field in dataclasses.fields(table.row_type)}
        assert fields >= {*table.keys, *table.shown, *table.timed}, name
        assert table.keys, name


def test_hostile_texts_come_back_as_they_were_and_make_no_element():
    patterns = make_patterns(NUM_LAYERS, NUM_HEADS, len(HOSTILE))
    plain = example_run()
    hostile = "".join(HOSTILE)
    run = replace(
        plain,
        title=hostile,
        subtitle=hostile,
        facts=[(hostile, hostile)] * len(plain.facts),
        viewer=Viewer(HOSTILE, patterns, hostile),
        removable=[(hostile, ["1", "2", "3"], hostile)] * 2,
        protocol=hostile,
        config_yaml=hostile,
        command=hostile,
        details=[(hostile, hostile)] * len(plain.details),
    )
    page = render_page(run)
    page.encode("utf-8")
    read, harmless = Reader(page), Reader(render_page(plain))
    assert read.data["viewer"]["tokens"] == HOSTILE
    assert read.data["viewer"]["note"] == hostile
    assert read.tags == harmless.tags
    assert read.tags.count("script") == 2
    assert read.attributes == harmless.attributes
    assert "".join(read.texts["h1"]) == hostile.replace("\ud800", "\ufffd")


@given(st.lists(st.text(st.characters(), min_size=0, max_size=8), min_size=1, max_size=6))
def test_any_tokens_come_back_as_they_were(tokens: list[str]):
    viewer = Viewer(tokens, np.broadcast_to(np.eye(len(tokens)), (1, 1, *(2 * [len(tokens)]))))
    run = RunPage(title="".join(tokens), num_layers=1, num_heads=1, viewer=viewer)
    page = render_page(run)
    page.encode("utf-8")
    assert Reader(page).data["viewer"]["tokens"] == tokens


@pytest.mark.parametrize(
    "page", [render_page(example_run()), example_index()], ids=["run", "index"]
)
def test_a_page_refers_to_nothing_outside_itself(page: str):
    rest = page.replace("http://www.w3.org/2000/svg", "")
    for reference in ("http:", "https:", "//cdn", "@import", "url(http", "import(", "fetch("):
        assert reference not in rest
    read = Reader(page)
    assert not {name for name, _ in read.attributes} & {"src", "srcset", "background", "action"}
    assert not {"link", "iframe", "img", "object", "base"} & set(read.tags)
    assert set(re.findall(r"url\((.*?)\)", rest)) <= {"#curve-frame"}
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    )
    assert ("content", policy) in read.attributes
    assert read.tags.count("script") == 2


def test_no_script_parses_text_as_html():
    page = render_page(example_run())
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in page


SECTIONS = {
    "effects": ["effects", "heads"],
    "scores": ["scores"],
    "agreement": ["agreement"],
    "curves": ["pruning"],
    "interactions": ["interactions"],
    "savings": ["savings"],
    "viewer": ["attention"],
}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_is_there_if_the_run_has_its_data(name: str):
    full = example_run()
    alone = RunPage(
        title="",
        num_layers=NUM_LAYERS,
        num_heads=NUM_HEADS,
        ppl_intact=6.0,
        **{name: getattr(full, name)},
    )
    assert Reader(render_page(alone)).sections == [*SECTIONS[name], "about"]


def test_all_sections_are_there_in_order_and_the_navigation_leads_to_them():
    page = render_page(example_run())
    everything = [section for sections in SECTIONS.values() for section in sections]
    assert Reader(page).sections == [*everything, "about"]
    assert re.findall(r'<section id="(\w+)"', page) == [*everything, "about"]


def test_weights_are_kept_to_within_half_a_step_of_one_in_255():
    patterns = make_patterns(3, 2, 9)
    again = unpack(pack_patterns(patterns), patterns.shape)
    assert np.abs(again - patterns).max() <= 1 / 510 + 1e-12


def test_the_order_of_the_bytes_is_layer_head_query_key():
    patterns = np.array([[[[1.0, 0], [0.2, 0.8]], [[1.0, 0], [0.6, 0.4]]]])
    assert list(base64.b64decode(pack_patterns(patterns))) == [255, 51, 204, 255, 153, 102]


def test_gpt2_xl_with_64_tokens_stays_under_8_megabytes():
    patterns = make_patterns(48, 25, 64)
    run = replace(
        example_run(),
        num_layers=48,
        num_heads=25,
        effects=make_effects(48, 25),
        viewer=Viewer([" token"] * 64, patterns),
    )
    page = render_page(run)
    num_weights = 48 * 25 * 64 * 65 // 2
    assert len(Reader(page).data["viewer"]["weights"]) == num_weights * 4 // 3 == 3_328_000
    assert len(page.encode()) < 4_000_000


@pytest.mark.parametrize("bad", [math.nan, math.inf, np.float64("nan")])
def test_what_is_not_finite_is_refused_and_said_where(bad: float):
    row = replace(make_scores()[0], value=bad)
    with pytest.raises(ValueError, match=r"scores.rows\[0\]\[3\]: expected a finite number"):
        render_page(replace(example_run(), scores=[row]))
    patterns = np.full((NUM_LAYERS, NUM_HEADS, 1, 1), bad)
    with pytest.raises(ValueError, match="weights from 0 to 1"):
        render_page(replace(example_run(), viewer=Viewer(["a"], patterns)))
    with pytest.raises(ValueError, match=r"numbers.perplexity: expected a finite number"):
        render_index(
            [IndexEntry("a", "a/report.html", 1, 1, numbers={"perplexity": float(bad)})], ""
        )


def test_numbers_of_numpy_are_numbers():
    row = replace(make_effects()[0], effect_nats=np.float64(0.5))
    [found] = rows_of(Reader(render_page(replace(example_run(), effects=[row]))).data["effects"])
    assert found["effect_nats"] == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3, "viewer": None}, "expected a head of 3 layers x 8 heads, got L3H"),
        ({"ppl_intact": None}, "curves need the intact model's perplexity, got None"),
        ({"viewer": Viewer(["a"], np.ones((4, 8, 2, 2)))}, r"\(4, 8, 1, 1\) for 1 tokens, got"),
        ({"viewer": Viewer(["a", "b"], np.ones((4, 8, 2, 2)))}, "keys after their query"),
        ({"viewer": Viewer([], np.ones((4, 8, 0, 0)))}, "for 0 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as error:
        render_page(replace(example_run(), **change))
    assert "\n" not in str(error.value)


def test_an_index_links_to_its_runs_by_relative_paths_that_a_browser_reads_back():
    data = Reader(example_index()).data
    assert data["runs"][0]["href"] == "ablation%3Dzero%2Cseed%3D%231/report.html"
    assert data["setting_names"] == ["ablation"]
    assert data["number_names"] == ["perplexity", "critical"]
    assert [run["numbers"]["critical"] for run in data["runs"]] == [6, 3, 4]


def test_what_all_runs_share_is_said_once_below_the_table():
    read = Reader(example_index())
    assert (read.texts["dt"], read.texts["dd"][:1]) == (["model"], ["demo"])


@pytest.mark.parametrize("href", ["/etc/passwd", "//host/page"])
def test_an_index_refuses_a_path_that_is_not_relative(href: str):
    with pytest.raises(ValueError, match="a path relative to the index's directory"):
        render_index([IndexEntry("a", href, 1, 1)], "")


def test_a_path_with_a_colon_is_a_path_not_a_scheme():
    [run] = Reader(render_index([IndexEntry("a", "javascript:alert(1)", 1, 1)], "")).data["runs"]
    assert run["href"] == "javascript%3Aalert%281%29"


def test_an_index_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one run"):
        render_index([], "")
