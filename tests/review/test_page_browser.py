"""The report page in a real browser: what a reader can see and do, by pointer and by keyboard."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mhaprune.review.page import Viewer, render_page
from tests.review.test_page import (
    HOSTILE,
    NUM_HEADS,
    NUM_LAYERS,
    SENTENCE,
    example_index,
    example_run,
    make_effects,
    make_patterns,
    make_roles,
    make_viewer,
)

try:
    from playwright.sync_api import Browser, Locator, Page, Request, expect, sync_playwright
except ImportError:
    pytest.skip("needs playwright", allow_module_level=True)

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)
MINUS = "\u2212"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"needs one of {', '.join(NAMES)}"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


Opener = Callable[..., Page]
PAGE = render_page(example_run())


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Open HTML from disk; in the end, no script failed and nothing but the file was asked for."""
    troubles: list[str] = []
    contexts = []

    def note_request(request: Request) -> None:
        if request.url.partition("#")[0] != (tmp_path / "report.html").as_uri():
            troubles.append(f"request: {request.url}")

    def open_html(html: str, **settings: Any) -> Page:
        file = tmp_path / "report.html"
        file.write_bytes(html.encode())
        window: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}} | settings
        context = browser.new_context(**window)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: troubles.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("requestfailed", lambda request: troubles.append(f"failed: {request.url}"))
        page.on("request", note_request)
        page.goto(file.as_uri())
        page.wait_for_selector("main > section .scroll, main > section dl")
        return page

    yield open_html
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture
def page(open_page: Opener) -> Page:
    return open_page(PAGE)


EFFECTS = {(row.layer, row.head): row for row in make_effects()}


def signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", MINUS)


def number(text: str) -> float:
    return float(text.replace(MINUS, "-"))


def cell(page: Page, layer: int, head: int) -> Locator:
    return page.locator(f'#effects [data-layer="{layer}"][data-head="{head}"]')


def rows(page: Page) -> Locator:
    return page.locator("#heads .table").first.locator("tbody tr:visible")


def column(page: Page, place: int) -> list[str]:
    return (
        rows(page)
        .locator(f":nth-child({place + 1})")
        .and_(page.locator("th, td"))
        .all_inner_texts()
    )


def tip(page: Page) -> str:
    return page.locator("#tooltip:visible").inner_text()


def focused(page: Page) -> str:
    return page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''")


def enlarged_name(page: Page) -> str:
    return page.locator("#attention .known h3").inner_text()


def test_every_section_is_drawn(page: Page):
    names = [link.get_attribute("href") for link in page.locator("nav a").all()]
    assert len(names) == 9
    for name in names:
        assert page.locator(f"{name} svg, {name} table, {name} dl").count() > 0, name


def test_the_heat_map_has_a_cell_for_each_head_and_marks_those_with_a_verdict(page: Page):
    assert page.locator("#effects [role=gridcell]").count() == NUM_LAYERS * NUM_HEADS
    for verdict in ("critical", "redundant"):
        expected = sum(row.verdict == verdict for row in EFFECTS.values())
        assert page.locator(f"#effects [role=gridcell].{verdict}").count() == expected
    assert page.locator("#effects [role=gridcell].unmeasured").count() == 1


def test_green_is_useful_brown_is_harmful_and_more_colour_is_more_effect(page: Page):
    def colour(layer: int, head: int) -> list[int]:
        found = cell(page, layer, head).evaluate("node => getComputedStyle(node).backgroundColor")
        return [int(part) for part in re.findall(r"\d+", found)]

    by_rank = sorted(EFFECTS.values(), key=lambda row: row.rank)
    most, least = by_rank[0], by_rank[-1]
    near_zero = min(EFFECTS.values(), key=lambda row: abs(row.effect_nats))
    red, green, blue = colour(most.layer, most.head)
    assert (red, green, blue) == (0, 60, 48)
    red, green, blue = colour(least.layer, least.head)
    assert least.effect_nats < -0.01
    assert red > green > blue
    assert min(colour(near_zero.layer, near_zero.head)) > 220


def test_hovering_a_cell_tells_the_numbers_of_its_head(page: Page):
    row = EFFECTS[2, 3]
    cell(page, 2, 3).hover()
    text = tip(page)
    assert text.startswith("L2H3")
    for number_shown in (row.effect_nats, row.ci_low, row.ci_high, row.delta_ppl):
        assert signed(number_shown) in text
    assert row.verdict in text
    assert "previous token (0.97)" in text
    cell(page, NUM_LAYERS - 1, NUM_HEADS - 1).hover()
    assert (EFFECTS.get((3, 7)), "not measured" in tip(page)) == (None, True)


def test_a_click_selects_a_head_everywhere(page: Page):
    cell(page, 3, 1).click()
    assert cell(page, 3, 1).get_attribute("aria-selected") == "true"
    assert page.locator("#effects .chosen").inner_text().startswith("L3H1")
    assert page.locator("#effects .row.selected").get_attribute("data-name") == "L3H1"
    assert page.locator("#heads tr.selected th").inner_text() == "L3H1"
    assert enlarged_name(page) == "L3H1"
    assert page.locator("#layer").input_value() == "3"
    cell(page, 0, 0).click()
    assert page.locator("#effects [aria-selected=true]").count() == 1
    assert page.locator("#heads tr.selected").count() == 1


def test_the_heat_map_works_by_keyboard_alone(page: Page):
    for _ in range(20):
        page.keyboard.press("Tab")
        if focused(page).startswith("L0H0"):
            break
    assert focused(page).startswith("L0H0, effect")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    assert focused(page).startswith("L1H1")
    assert tip(page).startswith("L1H1")
    page.keyboard.press("Enter")
    assert (enlarged_name(page), page.locator("#heads tr.selected th").inner_text()) == (
        "L1H1",
        "L1H1",
    )
    page.keyboard.press("Escape")
    assert page.locator("#tooltip").is_hidden()
    page.keyboard.press("End")
    assert focused(page).startswith("L1H7")
    page.keyboard.press("ArrowRight")
    assert focused(page).startswith("L1H7")
    page.keyboard.press("Tab")
    assert "role" not in focused(page)
    page.keyboard.press("Shift+Tab")
    assert focused(page).startswith("L1H7"), "one cell is in the tab order, the last one visited"


def test_the_ranking_lists_all_heads_by_rank_at_their_effects(page: Page):
    names = page.locator("#effects .ranking .row text").all_text_contents()
    by_rank = sorted(EFFECTS.values(), key=lambda row: row.rank)
    assert names == [f"L{row.layer}H{row.head}" for row in by_rank]
    ends = page.locator("#effects .ranking line.reach").evaluate_all(
        "lines => lines.map(line => [line.x1.baseVal.value, line.x2.baseVal.value])"
    )
    [[low, width]] = page.locator("#effects .ranking .tolerance").evaluate_all(
        "boxes => boxes.map(box => [box.x.baseVal.value, box.width.baseVal.value])"
    )
    for row, (start, end) in zip(by_rank, ends, strict=True):
        assert (start > low, end < low + width) == (row.ci_low > -0.01, row.ci_high < 0.01)


def test_sorting_by_effect_orders_the_rows_both_ways(page: Page):
    header = page.locator("#heads th", has_text="effect, nats/token").first
    header.locator("button").click()
    effects = [number(text) for text in column(page, 2)]
    assert effects == sorted(number(signed(row.effect_nats)) for row in EFFECTS.values())
    assert header.get_attribute("aria-sort") == "ascending"
    header.locator("button").press("Enter")
    assert [number(text) for text in column(page, 2)] == effects[::-1]
    assert header.get_attribute("aria-sort") == "descending"
    page.locator("#heads th button", has_text="head").first.click()
    names = [f"L{layer}H{head}" for layer, head in sorted(EFFECTS)]
    assert column(page, 0) == names
    assert page.locator("#heads .table").first.locator("[aria-sort]").count() == 1


def test_rows_without_a_role_come_last_however_they_are_sorted(page: Page):
    button = page.locator("#heads th button", has_text="role").first
    for first in ("duplicate token", "sink"):
        button.click()
        roles = column(page, 8)
        assert roles[0] == first
        assert not any(roles[5:])


def test_a_cell_tells_all_digits_of_its_number(page: Page):
    first = min(EFFECTS.values(), key=lambda row: row.rank)
    shown = rows(page).first.locator("td").nth(1)
    assert (shown.inner_text(), shown.get_attribute("title")) == (
        signed(first.effect_nats),
        repr(first.effect_nats),
    )


FILTERS = [
    ("L1", "all", lambda row: row.layer == 1),
    ("h2", "all", lambda row: row.head == 2),
    ("L1 h2", "all", lambda row: (row.layer, row.head) == (1, 2)),
    ("induction", "all", lambda row: (row.layer, row.head) in ((3, 1), (3, 4))),
    ("", "redundant", lambda row: row.verdict == "redundant"),
    ("L0", "critical", lambda row: row.layer == 0 and row.verdict == "critical"),
    ("nothing like it", "all", lambda row: False),
    ("", "all", lambda row: True),
]


def test_filters_keep_what_was_asked_for_and_say_how_many(page: Page):
    for search, verdict, is_kept in FILTERS:
        page.fill("#search", search)
        page.select_option("#verdict", label=verdict)
        kept = [f"L{row.layer}H{row.head}" for row in EFFECTS.values() if is_kept(row)]
        assert sorted(column(page, 0)) == sorted(kept), (search, verdict)
        assert page.locator("#heads output").inner_text() == f"{len(kept)} of 31 heads"


def test_effect_by_role_is_the_mean_over_its_heads(page: Page):
    table = page.locator("#heads .table").nth(1)
    line = table.locator("tr", has_text="induction").locator("th, td").all_inner_texts()
    rows = [EFFECTS[3, 1], EFFECTS[3, 4]]
    mean = np.mean([row.effect_nats for row in rows])
    counts = [str(sum(row.verdict == name for row in rows)) for name in ("critical", "redundant")]
    assert line == ["induction", "2", signed(float(mean)), *counts]


def test_another_score_is_drawn_when_it_is_chosen(page: Page):
    row = EFFECTS[0, 4]
    place = page.locator('#scores [data-layer="0"][data-head="4"]')
    place.hover()
    assert f"leave_one_out\n{row.effect_nats * 0.9:.4g}" in tip(page)
    page.select_option("#score", "gradient")
    place.hover()
    assert f"gradient\n{row.effect_nats * 3:.4g}" in tip(page)


def test_scores_are_placed_by_their_correlation(page: Page):
    plot = page.locator("#agreement svg").first
    names = plot.locator(".row text").all_text_contents()
    assert names[0] == "leave_one_out"
    assert names[-1] == "random"
    places = plot.locator(".dot").evaluate_all("dots => dots.map(dot => dot.cx.baseVal.value)")
    assert places == sorted(places, reverse=True)
    plot.locator(".dot").nth(1).hover()
    assert tip(page).replace("\n", " ").startswith("shapley Spearman 0.903")
    assert "0.761 to 0.961" in tip(page)


def test_curves_are_read_at_a_number_of_heads(page: Page):
    run = example_run()
    plot = page.locator("#pruning .plot svg").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    page.mouse.move(box["x"] + 58 + (box["width"] - 46 - 58) * 10 / 32, box["y"] + 100)
    text = tip(page)
    assert text.startswith("10 heads removed")
    for row in run.curves:
        if row.num_removed == 10 and not row.ordering.startswith("random"):
            name = f"{row.ordering}, {row.direction} important first"
            assert f"{name}\n{row.perplexity:.2f} [{row.ci_low:.2f}, {row.ci_high:.2f}]" in text
    at = [
        row.perplexity
        for row in run.curves
        if row.num_removed == 10 and row.ordering.startswith("random")
    ]
    assert f"random orders\n{min(at):.2f} to {max(at):.2f}" in text
    page.mouse.move(5, 5)
    plot.focus()
    page.keyboard.press("End")
    assert tip(page).startswith("32 heads removed")
    page.keyboard.press("ArrowLeft")
    assert tip(page).startswith("31 heads removed")


def test_the_legend_hides_lines_and_the_range_cuts_them(page: Page):
    lines = page.locator("#pruning .plot path.curve")
    assert lines.count() == 6
    page.get_by_label("gradient, most important first").uncheck()
    page.get_by_label("6 random orders").uncheck()
    assert (lines.count(), page.locator("#pruning .plot .band").count()) == (5, 0)
    names = page.locator("#pruning .plot svg text").all_text_contents()
    assert ("+10%" in names, "+1%" in names) == (True, False)
    page.select_option("#reach", "up to +20%")
    names = page.locator("#pruning .plot svg text").all_text_contents()
    assert {"+1%", "+5%", "+10%"} <= set(names)


def test_the_slider_changes_the_layer_and_its_heads(page: Page):
    slider = page.locator("#layer")
    for layer, key in ((1, "ArrowRight"), (2, "ArrowRight"), (3, "End"), (0, "Home")):
        slider.press(key)
        names = page.locator("#attention .thumbnails .name").all_inner_texts()
        assert names == [f"L{layer}H{head}" for head in range(NUM_HEADS)]
        assert enlarged_name(page).startswith(f"L{layer}H")


def test_a_small_picture_has_the_colours_of_its_weights(page: Page):
    page.locator("#layer").press("Home")
    pixels = (
        page.locator("#attention canvas")
        .nth(2)
        .evaluate("canvas => [...canvas.getContext('2d').getImageData(0, 0, 10, 10).data]")
    )
    colours = np.array(pixels).reshape(10, 10, 4)
    weights = make_viewer().patterns[0, 2]
    assert (colours[..., 3] == 255).tolist() == np.tri(10, dtype=bool).tolist()
    lower = np.tril_indices(10)
    order = np.argsort(weights[lower])
    assert (np.diff(colours[..., 0][lower][order]) <= 0).all(), "more attention is darker"


def test_a_click_on_a_head_enlarges_it_with_role_effect_and_verdict(page: Page):
    page.locator("#layer").press("End")
    page.locator("#attention .thumbnails button").nth(4).click()
    assert enlarged_name(page) == "L3H4"
    known = page.locator("#attention .known").inner_text()
    row = EFFECTS[3, 4]
    assert "induction (0.50)" in known
    assert signed(row.effect_nats) in known
    assert row.verdict in known
    assert page.locator("#attention .query-name").all_text_contents() == [
        s.strip() for s in SENTENCE
    ]
    assert page.locator("#attention .key-name").all_text_contents() == [s.strip() for s in SENTENCE]
    assert page.locator("#heads tr.selected th").inner_text() == "L3H4"
    page.locator("#attention .thumbnails button").nth(5).press("Enter")
    assert enlarged_name(page) == "L3H5"


def weight(layer: int, head: int, query: int, key: int) -> str:
    return f"{round(255 * make_viewer().patterns[layer, head, query, key]) / 255:.2f}"


def test_hovering_a_weight_tells_query_key_and_number(page: Page):
    cell(page, 2, 5).click()
    cells = page.locator("#attention .cells rect")
    for query, key in ((7, 1), (9, 9), (4, 0)):
        cells.nth(query * (query + 1) // 2 + key).hover(force=True)
        names = [SENTENCE[place].strip() for place in (query, key)]
        said = "query '{}' \u2192 key '{}': ".format(*names) + weight(2, 5, query, key)
        assert tip(page).splitlines()[0] == said


def test_hovering_a_small_picture_tells_the_same(page: Page):
    cell(page, 1, 0).click()
    canvas = page.locator("#attention canvas").nth(6)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.15 * box["width"], box["y"] + 0.75 * box["height"])
    assert tip(page).splitlines()[0] == f"query 'it' \u2192 key 'cat': {weight(1, 6, 7, 1)}"
    page.mouse.move(box["x"] + 0.85 * box["width"], box["y"] + 0.15 * box["height"])
    assert page.locator("#tooltip").is_hidden(), "no key comes after its query"


def test_weights_are_read_by_arrow_keys(page: Page):
    cell(page, 2, 5).click()
    page.locator("#attention .map svg").focus()
    for key in ["ArrowDown"] * 7 + ["ArrowRight", "ArrowRight", "ArrowLeft"]:
        page.keyboard.press(key)
    assert tip(page).splitlines()[0] == f"query 'it' \u2192 key 'cat': {weight(2, 5, 7, 1)}"
    page.keyboard.press("End")
    assert tip(page).splitlines()[0] == f"query 'it' \u2192 key 'it': {weight(2, 5, 7, 7)}"


def test_a_token_of_the_sentence_shows_where_it_looks(page: Page):
    cell(page, 2, 5).click()
    tokens = page.locator("#attention .token")
    tokens.nth(7).hover()
    shown = page.locator("#attention .token .weight").all_inner_texts()
    exact = make_viewer().patterns[2, 5, 7]
    for key in range(8):
        assert float(shown[key] or 0) == pytest.approx(exact[key], abs=0.008)
    assert shown[8:] == ["", ""]
    page.mouse.move(5, 5)
    assert page.locator("#attention .token.query .text").inner_text() == "tired"
    tokens.nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#attention .token.query .text").inner_text() == "cat"


def test_hostile_texts_are_shown_as_texts(open_page: Opener):
    run = replace(
        example_run(),
        title=HOSTILE[0],
        viewer=Viewer(HOSTILE, make_patterns(NUM_LAYERS, NUM_HEADS, len(HOSTILE)), HOSTILE[1]),
        command=HOSTILE[2],
        removable=[(HOSTILE[0], ["1", "2", "3"], "0")],
    )
    page = open_page(render_page(run))
    assert page.title() == HOSTILE[0]
    assert page.locator("h1").inner_text() == HOSTILE[0]
    assert page.locator("#command").inner_text() == HOSTILE[2]
    tokens = page.locator("#attention .token .text").all_inner_texts()
    assert tokens[:5] == HOSTILE[:5]
    assert tokens[5:7] == ["\\u2028\\u2029", "\u2400\u241b\\u007f"]
    assert tokens[8:] == ["😀", "\\u202e"]
    assert HOSTILE[1] in page.locator("#attention .note").all_inner_texts()
    assert page.locator("img, main script").count() == 0


@pytest.mark.parametrize("html", [PAGE, example_index()], ids=["run", "index"])
def test_a_phone_scrolls_the_page_one_way_only_and_its_controls_can_be_hit(
    open_page: Opener, html: str
):
    page = open_page(html, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    controls = page.locator("button, select, nav a, summary, .check, input:not([type=checkbox])")
    for control in controls.all():
        box = control.bounding_box()
        assert box is None or box["height"] >= 40, control.evaluate("node => node.outerHTML")


def test_a_finger_reads_by_a_tap(open_page: Opener):
    page = open_page(PAGE, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    cell(page, 2, 3).tap()
    assert tip(page).startswith("L2H3")
    page.locator("#pruning .plot svg").first.tap()
    assert "heads removed" in tip(page)
    page.locator("#attention .cells rect").nth(0).tap(force=True)
    assert tip(page).startswith("query 'The' \u2192 key 'The': 1.00")


def test_a_run_with_attention_alone_shows_roles_and_says_that_effects_were_not_measured(
    open_page: Opener,
):
    run = replace(
        *(example_run(),),
        **dict.fromkeys(("effects", "scores", "agreement", "curves", "interactions"), ()),
        savings=(),
        roles=make_roles(),
    )
    page = open_page(render_page(run))
    page.locator("#layer").press("End")
    page.locator("#attention .thumbnails button").nth(1).click()
    assert page.locator("#attention .pairs").inner_text().split("\n") == [
        "role",
        "induction (0.62)",
    ]


def test_scores_alone_are_drawn_without_effects(open_page: Opener):
    run = example_run()
    alone = replace(
        run, effects=(), roles=(), agreement=(), curves=(), interactions=(), savings=(), viewer=None
    )
    page = open_page(render_page(alone))
    assert page.locator("#scores [role=gridcell]:not(.unmeasured)").count() == 31
    assert page.locator("#scores tbody tr").count() == 31


def test_the_command_is_copied(open_page: Opener):
    page = open_page(PAGE, permissions=["clipboard-read", "clipboard-write"])
    page.click("#copy")
    expect(page.locator("#copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == example_run().command


def test_the_index_sorts_its_runs_and_draws_their_effects(open_page: Opener):
    page = open_page(example_index())
    page.locator("th button", has_text="critical").click()
    assert page.locator("#runs tbody th").all_inner_texts() == [
        "ablation=mean",
        "ablation=resample",
        "ablation=zero",
    ]
    link = page.locator("#runs a").first.evaluate("link => decodeURIComponent(link.pathname)")
    assert link.endswith("/ablation=mean,seed=#1/report.html")
    assert page.locator("#maps [role=grid]").count() == 3
    page.locator("#maps [data-layer='2'][data-head='3']").first.hover()
    assert signed(EFFECTS[2, 3].effect_nats) in tip(page)


def test_gpt2_xl_opens_within_two_seconds_of_work(open_page: Opener):
    run = replace(
        example_run(),
        num_layers=48,
        num_heads=25,
        effects=make_effects(48, 25),
        viewer=Viewer([" token"] * 64, make_patterns(48, 25, 64)),
    )
    page = open_page(render_page(run))
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # not who else uses the CPU
    page.reload()
    page.locator("#attention .map svg").hover()
    metrics = session.send("Performance.getMetrics")["metrics"]
    seconds = {metric["name"]: metric["value"] for metric in metrics}
    assert page.locator("#heads tbody").first.locator("tr").count() == 48 * 25 - 1
    assert 0 < seconds["TaskDuration"] < 2
