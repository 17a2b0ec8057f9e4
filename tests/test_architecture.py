"""The table of docs/architecture.md is the rule: which folder of src/trimtab may import which, and no cycles.

Lazy imports, `TYPE_CHECKING` imports, module names in strings (`-m`, `import_module`) and `trimtab.verb` through
the lazy package all count. Every folder may import the modules of the first row, and they each other.
No module is imported here, so that the check takes a moment.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "trimtab"
MOST_FILES_IN_A_FOLDER = 20


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package by the name of its folder."""
    return {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(SOURCE.rglob("*.py"))
    }


def folder_of(module: str) -> str:
    """The first part below `trimtab`: a folder, or a module at the top."""
    return module.split(".")[1]


@cache
def exported() -> dict[str, str]:
    """Public name to the module it is loaded from on first use (`_MODULES` in trimtab/__init__.py)."""
    for node in ast.parse((SOURCE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            names: dict[str, str] = ast.literal_eval(node.value)
            return names
    raise AssertionError("trimtab/__init__.py has no table _MODULES")


@cache
def imports(module: str) -> frozenset[tuple[str, bool]]:
    """The modules of ours that this one names, and whether only for type checking."""
    return frozenset(
        (name, typing)
        for name, typing in _imports(module)
        if name in modules() and name not in ("trimtab", module)
    )


def _imports(module: str) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(modules()[module].read_text())
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules() else str(node.module) for name in dotted]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "trimtab"
        ):
            names = [exported().get(node.attr, "")]
        yield from ((name, id(node) in typing_only) for name in names)


@cache
def table() -> dict[str, set[str]]:
    """Folder to what it may import, from docs/architecture.md: folders, or single modules such as `codec.native`.

    A row speaks of the rows above it: names in backquotes, "all of the above", or "all of the above but" names.
    """
    lines = iter((ROOT / "docs" / "architecture.md").read_text().splitlines())
    assert any(re.fullmatch(r"\|\s*folder\s*\|\s*holds\s*\|\s*may import\s*\|", line) for line in lines)
    next(lines)  # the rule below the heading
    allowed: dict[str, set[str]] = {}
    leaves: set[str] = set()
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines):
        folders, _, may_import = line.strip("|").split("|")
        row, named = (
            {name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", cell)}
            for cell in (folders, may_import)
        )
        assert {name.split(".")[0] for name in named} <= set(allowed), f"a name that no row above has: {line}"
        if "all of the above but" in may_import:
            named = set(allowed) - named
        elif "all of the above" in may_import:
            named = set(allowed)
        leaves = leaves or row
        allowed.update({folder: leaves | named | {folder} for folder in row})
    return allowed


def test_the_table_lists_every_folder() -> None:
    assert set(table()) == {folder_of(module) for module in modules() if module != "trimtab"}


def test_folders_import_only_what_the_table_allows() -> None:
    crossing = {
        (module, name)
        for module in modules()
        if module != "trimtab"
        for name, _ in imports(module)
        if not any(f"{name}.".startswith(f"trimtab.{allowed}.") for allowed in table()[folder_of(module)])
    }
    assert crossing == set(), "imports that docs/architecture.md does not allow"


def test_no_import_cycles() -> None:
    """Type-checking imports within a folder are the one exception: they run nowhere and cross nothing."""
    reachable = {
        module: {
            name for name, typing in imports(module) if not (typing and folder_of(name) == folder_of(module))
        }
        for module in modules()
        if module != "trimtab"
    }
    for middle in reachable:  # Warshall's transitive closure
        for names in reachable.values():
            if middle in names:
                names |= reachable[middle]
    assert {module for module, names in reachable.items() if module in names} == set()


def test_no_folder_is_flat_and_long() -> None:
    sizes = Counter(path.parent for path in modules().values())
    assert {str(folder): size for folder, size in sizes.items() if size > MOST_FILES_IN_A_FOLDER} == {}
