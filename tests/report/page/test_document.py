"""The file: nothing is loaded, nothing in the data becomes markup, and it stays within its size."""

from __future__ import annotations

import json
import re
from typing import Any

from trimtab.report.page.cards import figure, figures, lines
from trimtab.report.page.document import Document, Section, fitted, to_html
from trimtab.report.page.values import embeddable, text

MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\u2028{{script}}"


def page(name: str, blocks: Any = None) -> Document:
    blocks = blocks or [figures(figure(name, name, name))]
    section = Section(id="overview", title=name, blocks=blocks)
    return Document(
        what="report",
        title=name,
        subtitle=name,
        verdict=name,
        notes=[("bad", name)],
        sections=[section],
        footer=name,
    )


def data_of(html: str) -> Any:
    match = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', html, re.S)
    assert match is not None
    return json.loads(match[1])


def test_markup_in_names_stays_text() -> None:
    html = to_html(page(MARKUP))
    assert len(re.findall("<script", html)) == 2  # the data and the one script
    assert "<img" not in html
    assert data_of(html)["sections"][0]["title"] == MARKUP.replace("\u2028", "\ufffd")


def test_the_policy_allows_only_the_two_hashes() -> None:
    html = to_html(page("run"))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert not re.search(r'(?:src|href)="(?!data:,|#main)', html)
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in html


def test_numbers_that_json_lacks_are_left_out() -> None:
    hostile = {"a": float("nan"), "b": float("inf"), "c": 10**400, "d": [1e308, 2**60, True, None]}
    assert embeddable(hostile) == {"a": None, "b": None, "c": None, "d": [1e308, 1.1529e18, True, None]}
    assert len(text("x" * 10_000)) == 400
    assert text("a\x00\x1b[31m\ud800") == "a\ufffd\ufffd[31m\ufffd"


def test_series_are_thinned_until_the_page_fits() -> None:
    asked: list[int] = []

    def make(points: int) -> Document:
        asked.append(points)
        series = [
            {"name": f"{at}", "x": [list(range(points))], "y": [at + 0.123] * points} for at in range(100)
        ]
        return page("run", [lines("loss", [("step", "")], ("loss", ""), series)])

    html = fitted(make, most_bytes=200_000)
    assert len(html.encode()) <= 200_000
    assert asked == [400, 200, 100]
