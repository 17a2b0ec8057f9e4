"""The page in a real browser: no error, no request, and all of it works by pointer and keyboard, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.report.page.made_up import LAYERS, plan, write_run
from tests.report.page.test_document import MARKUP
from tests.support.browser import Browser, chromium

from trimtab.cli.report import report
from trimtab.report.page.bench import bench_document
from trimtab.report.page.document import to_html, write_page
from trimtab.report.page.predicted import plan_document, simulation_document

pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no browser: apt-get install chromium")

WIDTHS = (1440, 390)
LAYOUT_SHIFTS = """new Promise(done => {
    new PerformanceObserver(list => done(list.getEntries().map(shift => [
        shift.value, ...shift.sources.map(source => (source.node || document).textContent.slice(0, 60))
    ]))).observe({ type: "layout-shift", buffered: true });
    setTimeout(() => done([]), 150);
})"""
"""What moved since the page was loaded."""

UNNAMED_AXES = """(id => {
    const { sections } = JSON.parse(document.getElementById("report-data").textContent);
    const one = block => [block.axis];
    const kinds = { lines: b => [b.x[0].name, b.y.name], map: b => [b.axis, b.what], bars: one, spans: one };
    const charts = [...document.querySelectorAll(`#${id} .chart`)];
    return sections.find(one => one.id === id).blocks.filter(block => kinds[block.kind]).flatMap((block, at) =>
        kinds[block.kind](block).filter(name => !name || !charts[at].textContent.includes(name))
            .map(() => block.title));
})"""
"""Titles of charts of which an axis does not say what it is."""

CUT = """[...document.querySelectorAll('.panel:not([hidden]) .chart')].flatMap(chart => {
    const frame = chart.getBoundingClientRect();
    return [...chart.querySelectorAll('text')].filter(text => {
        const box = text.getBoundingClientRect();
        const beside = box.left < frame.left - 1 || box.right > frame.right + 1;
        return beside || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
    }).map(text => text.textContent);
})"""
"""Labels that stick out of their charts."""

PANELS = ["overview", "step", "loss", "settings", "controller", "resources", "environment"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = chromium()
    assert executable is not None
    with Browser(executable, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    report([write_run(out.parent / "run", steps=400)], out=out)
    return out


def clean(browser: Browser, page: Path) -> None:
    """Nothing was complained of, and nothing but the file was asked for."""
    assert browser.errors == []
    assert {url.partition("#")[0] for url in browser.requests} == {page.resolve().as_uri()}


def test_every_part_is_drawn_at_both_widths(browser: Browser, page: Path) -> None:
    for width in WIDTHS:
        browser.resize(width)
        browser.open(page)
        assert browser.evaluate(LAYOUT_SHIFTS) == []
        assert browser.evaluate("[...document.querySelectorAll('[role=tabpanel]')].map(p => p.id)") == PANELS
        for panel in PANELS:
            browser.click(f"#tab-{panel}")
            visible = browser.evaluate(
                "[...document.querySelectorAll('.panel:not([hidden])')].map(p => p.id)"
            )
            assert visible == [panel]
            charts = browser.evaluate(f"""[...document.querySelectorAll('#{panel} .chart')].map(chart =>
                [chart.querySelectorAll('svg > *').length, chart.querySelectorAll('text').length])""")
            assert all(shapes > 8 and texts > 3 for shapes, texts in charts), (panel, charts)
            sound(browser, panel, width)
        clean(browser, page)


def sound(browser: Browser, panel: str, width: int) -> None:
    """The panel that is shown fits its width, and its charts say what they show."""
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert "cannot be shown" not in browser.evaluate(f"document.getElementById('{panel}').textContent")
    assert browser.evaluate(f"{UNNAMED_AXES}('{panel}')") == []
    assert browser.evaluate(CUT) == []


def test_pages_of_a_plan_a_simulation_and_a_bench(browser: Browser, tmp_path: Path) -> None:
    prices = {"price_per_hour": 2.0, "samples_per_s": 100.0}
    outcomes = [
        {"what": name, "ranks": 4, "step_ms": 90.0, **prices} for name in ("as given", "links twice as fast")
    ]
    spans = [(0, "forward", "all", 0.0, 0.03), (None, "wire", "bucket 0", 0.03, 0.09)]
    rows = [{"method": name, "step_ms": 12.0, "wire_mb": 3.0} for name in ("ddp", "trimtab", "ideal")]
    documents = (
        plan_document(plan(), title="plan.json", model="gpt"),
        simulation_document(
            model="gpt", outcomes=outcomes, cases=[], said=["x"], roles=["T4"], timeline=spans
        ),
        bench_document(
            name="ddp", rows=rows, summary={"over_ddp": 3.0}, settings={"cores": 2}, command="trimtab"
        ),
    )
    for document in documents:
        write_page(to_html(document), tmp_path / "page.html")
        for width in WIDTHS:
            browser.resize(width)
            browser.open(tmp_path / "page.html")
            assert browser.evaluate(LAYOUT_SHIFTS) == []
            for panel in browser.evaluate("[...document.querySelectorAll('[role=tabpanel]')].map(p => p.id)"):
                browser.click(f"#tab-{panel}")
                sound(browser, panel, width)
            clean(browser, tmp_path / "page.html")


def test_tabs_tooltips_and_zoom_by_pointer(browser: Browser, page: Path) -> None:
    browser.resize(1440)
    browser.open(page, "#loss")
    box = browser.box("#loss .chart")
    middle = box["y"] + box["height"] / 2
    browser.mouse("mouseMoved", box["x"] + box["width"] / 2, middle)
    shown = browser.evaluate(
        "document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent"
    )
    assert shown.startswith("step ")
    assert "loss: " in shown
    before = browser.evaluate("document.querySelector('#loss .chart').textContent")
    browser.mouse("mousePressed", box["x"] + 200, middle)
    browser.mouse("mouseMoved", box["x"] + 320, middle)
    browser.mouse("mouseReleased", box["x"] + 420, middle)
    assert browser.evaluate("document.querySelector('#loss .chart').dataset.zoomed") == "true"
    zoomed = browser.evaluate("document.querySelector('#loss .chart').textContent")
    assert zoomed != before
    browser.click("#loss .zoom button:last-child")
    assert browser.evaluate("document.querySelector('#loss .chart').textContent") == before
    browser.click("#loss .bar button[aria-pressed=false]")  # by time
    assert "time" in browser.evaluate("document.querySelector('#loss .chart').textContent")
    browser.click("#tab-step")
    browser.click("#step .zoom button")
    assert browser.evaluate("document.querySelector('#step .chart[data-zoomed=true]') !== null")
    assert browser.evaluate("location.hash") == "#step"
    browser.mouse("mouseMoved", *_middle(browser, "#step .chart rect"))
    assert "rank 0" in browser.evaluate("document.getElementById('tip').textContent")
    clean(browser, page)


def _middle(browser: Browser, selector: str) -> tuple[float, float]:
    box = browser.box(selector)
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_everything_by_keyboard(browser: Browser, page: Path) -> None:
    browser.resize(390)
    browser.open(page)
    browser.evaluate("document.getElementById('tab-overview').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate("document.activeElement.id") == "tab-step"
    browser.press("End")
    assert (
        browser.evaluate("[...document.querySelectorAll('.panel')].filter(p => !p.hidden)[0].id")
        == PANELS[-1]
    )
    browser.press("Home")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    browser.press("Tab")  # the first control of the panel
    assert browser.evaluate("document.getElementById('loss').contains(document.activeElement)")
    browser.evaluate("document.querySelector('#loss .chart').focus()")
    browser.press("End")
    last = browser.evaluate("document.getElementById('live').textContent")
    assert last.startswith("step 400")
    browser.press("ArrowLeft")
    assert browser.evaluate("document.getElementById('live').textContent") != last
    browser.press("+")
    assert browser.evaluate("document.activeElement.dataset.zoomed") == "true"
    browser.press("0")
    assert browser.evaluate("document.activeElement.dataset.zoomed") == "false"
    browser.evaluate("document.querySelector('#loss details.data summary').focus()")
    browser.press("Enter")
    rows = browser.evaluate("document.querySelectorAll('#loss details.data tbody tr').length")
    assert rows > 60  # the table behind the chart
    unnamed = browser.evaluate("""[...document.querySelectorAll('button, [role=tab], [tabindex]:not([tabindex="-1"])')]
        .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim())).length""")
    assert unnamed == 0
    clean(browser, page)


def test_light_and_dark(browser: Browser, page: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    browser.resize(1440)
    browser.prefer("dark")
    browser.open(page)
    dark = browser.evaluate(background)
    browser.prefer("light")
    light = browser.evaluate(background)
    assert light != dark
    for name, color in (("light", light), ("dark", dark), ("auto", light)):
        browser.click("#theme")
        assert browser.evaluate("document.getElementById('theme').getAttribute('aria-label')").endswith(
            "automatic" if name == "automatic" else name
        )
        assert browser.evaluate(background) == color
    clean(browser, page)


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=200)
    evil = MARKUP.replace("alert(1)", "window.hacked=1").replace("\u2028", "")
    for file in folder.iterdir():
        content = file.read_text()
        for name in (
            "node-0",
            "Tesla T4",
            "train.py",
            "rank 2 computes",
            "fast",
            "bucket 0",
            LAYERS[2],
            "compress",
        ):
            content = content.replace(name, evil)
        file.write_text(content.replace("0.0048", "1e999") + '\n{"kind": NaN\n')
    out = tmp_path / "report.html"
    report([folder], out=out)
    browser.resize(1440)
    browser.open(out)
    for panel in PANELS:
        browser.click(f"#tab-{panel}")
    assert browser.evaluate("window.hacked === undefined")
    assert browser.evaluate("document.querySelectorAll('img, iframe, object').length") == 0
    assert "</script>" in browser.evaluate("document.getElementById('overview').textContent")
    clean(browser, out)


def test_two_runs_and_a_run_without_steps(browser: Browser, page: Path, tmp_path: Path) -> None:
    out = tmp_path / "two.html"
    report([page.parent / "run", write_run(tmp_path / "slow", pace=2.0, steps=300)], out=out)
    for width in WIDTHS:
        browser.resize(width)
        browser.open(out, "#step")
        assert browser.evaluate("document.querySelectorAll('#step .columns > div').length") == 2
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        clean(browser, out)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.json").write_text('{"version": 1}')
    report([empty])
    browser.open(empty / "report.html")
    assert "No training step was recorded" in browser.evaluate(
        "document.getElementById('verdict').textContent"
    )
    clean(browser, empty / "report.html")
