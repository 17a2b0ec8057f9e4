"""A page as data, and the one self-contained HTML file that shows it.

The file loads nothing: style and script are inside, and a content security policy allows these two by their hashes and
nothing else. The data is JSON in which `<`, `>` and `&` are escaped; the script puts it on the page as text only.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from trimtab.report.page.cards import Card
from trimtab.report.page.values import embeddable, text
from trimtab.strict_files import replace_file

MOST_BYTES = 1_000_000
"""Bytes of a page."""

POINTS, FEWEST_POINTS = 400, 20
"""Points of a series before it is thinned, and at which thinning stops."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A tab."""

    id: str
    title: str
    blocks: Sequence[Card]


@dataclass(frozen=True, kw_only=True)
class Document:
    """Everything on a page."""

    what: str
    """Kind of page: "report", "plan", ..."""

    title: str
    subtitle: str
    verdict: str
    """What came of it, in one sentence."""

    sections: Sequence[Section]
    notes: Sequence[tuple[str, str]] = field(default=())
    """(tone, text): what a reader must know first, such as that the run crashed."""

    footer: str = ""

    def tree(self) -> dict[str, Any]:
        return {
            "version": 1,
            "sections": [
                {"id": one.id, "title": one.title, "blocks": one.blocks}
                for one in self.sections
                if one.blocks
            ],
        }


def to_html(document: Document) -> str:
    """The page of a document."""
    page, style, script = _assets()
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(script)}'; style-src 'sha256-{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(embeddable(document.tree()), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    notes = "".join(
        f'<p class="note {tone}" role="note">{escape(text(note, 1000))}</p>' for tone, note in document.notes
    )
    parts = {
        "csp": policy,
        "generator": "trimtab",
        "what": escape(document.what),
        "title": escape(text(document.title)),
        "subtitle": escape(text(document.subtitle)),
        "verdict": escape(text(document.verdict, 1000)),
        "notes": notes,
        "footer": escape(text(document.footer, 1000)),
        "style": style,
        "script": script,
        "data": data,
    }
    html = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)
    return html.encode("utf-8", "replace").decode("utf-8")  # lone surrogates of broken names


def fitted(make: Callable[[int], Document], most_bytes: int = MOST_BYTES) -> str:
    """The page of what `make` makes for a number of points per series: as many as the size allows."""
    points = POINTS
    while True:
        html = to_html(make(points))
        if len(html.encode()) <= most_bytes or points <= FEWEST_POINTS:
            return html
        points = max(FEWEST_POINTS, points // 2)


def write_page(html: str, path: str | Path) -> None:
    """Write a page, whole or not at all."""
    replace_file(path, html)


@cache
def _assets() -> tuple[str, str, str]:
    """The template, the style and the script."""
    folder = resources.files("trimtab.report.page") / "assets"
    page, style, *scripts = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "charts.js", "kinds.js", "page.js")
    )
    return page, style, "\n".join(scripts)


def _hash(content: str) -> str:
    return b64encode(sha256(content.encode()).digest()).decode()
