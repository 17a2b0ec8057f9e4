"""The reference has a page for every public module, and what the docs name exists: files, names, results, links."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING

import pytest
from tests.docs.code_blocks import PAGES, ROOT

import trimtab

if TYPE_CHECKING:
    from pathlib import Path

REFERENCE = ROOT / "docs" / "reference"
MODULES = [
    "trimtab",
    *(f"trimtab.{page.stem}" for page in REFERENCE.glob("*.md") if page.stem not in ("index", "trimtab")),
]
PROSE = [page for page in PAGES if page.parent.name != "reference"]


def test_the_reference_has_a_page_for_every_public_module() -> None:
    """The site fills a page with the names that the module's `__all__` lists."""
    index = (REFERENCE / "index.md").read_text()
    for module in MODULES:
        page = f"{module.rpartition('.')[2]}.md"
        assert f"\n::: {module}" in (REFERENCE / page).read_text()
        assert f"[`{module}`]({page})" in index
        assert f"reference/{page}" in (ROOT / "mkdocs.yml").read_text()
    verbs = set(re.findall(r"^::: trimtab\.(\w+)$", (REFERENCE / "trimtab.md").read_text(), re.MULTILINE))
    assert verbs == set(trimtab.__all__) - {"__version__"}


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_files_that_pages_name_exist(path: Path) -> None:
    text = path.read_text()
    sources = re.findall(r"\btrimtab/[\w/]+(?:\.py|/)", text)
    missing = [
        name for name in sources if not (ROOT / "src" / name).exists() and not name.startswith("trimtab/_")
    ]
    in_walk = re.findall(
        r"`((?:api|cli|codec|collectives|control|doors|measure|planning|predict)/[\w/]+\.py)`", text
    )
    missing += [name for name in in_walk if not (ROOT / "src" / "trimtab" / name).exists()]
    results = re.findall(
        r"\b([a-z0-9]+(?:-[a-z0-9]+)*-(?:h200|cpu|seeds|links|again|mbit|gbit|none)\.json)\b", text
    )
    missing += [name for name in results if not (ROOT / "benchmarks" / "results" / name).exists()]
    assert not missing, missing


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_public_names_that_pages_use_are_public(path: Path) -> None:
    """`trimtab.X` and `trimtab.folder.X`, in prose and in code: no deeper, and there."""
    for dotted in set(re.findall(r"\btrimtab(?:\.[A-Za-z_]\w*)+", path.read_text())):
        if dotted.endswith((".py", ".json", ".cli", ".X")):
            continue
        first, *rest = dotted.split(".")[1:]
        if f"trimtab.{first}" in MODULES:
            module = importlib.import_module(f"trimtab.{first}")
            assert len(rest) <= 1, f"{dotted}: deeper than one documented module"
            assert not rest or hasattr(module, rest[0]), dotted
        elif first != "models":  # in hidden setups
            assert hasattr(importlib.import_module("trimtab"), first), dotted


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name}: {target}"
