"""Reading and writing plans: one strict JSON form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from trimtab.planning.plan import PLAN_VERSION, Plan
from trimtab.strict_files import FileFormat, replace_file

if TYPE_CHECKING:
    from pathlib import Path

_FORMAT = FileFormat(
    adapter=TypeAdapter(Plan),
    noun="a plan",
    version=PLAN_VERSION,
    remedy="make the plan again with `trimtab plan`",
    max_bytes=64 << 20,
)


def load_plan(path: str | Path) -> Plan:
    """Read a plan file, refusing anything that is not exactly in the form of `Plan`.

    Raises:
        TrimtabError: naming the file, the place inside it, and the remedy.
    """
    return _FORMAT.load(path)


def parse_plan(text: str, *, source: str) -> Plan:
    """Read a plan from text; `source` is what errors call it."""
    return _FORMAT.parse(text, source=source)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan that `load_plan` reads back as an equal one.

    Raises:
        TrimtabError: a folder that does not exist or cannot be written to.
    """
    replace_file(path, json.dumps(_FORMAT.adapter.dump_python(plan, mode="json"), indent=1) + "\n")
