"""Reading and writing plans: one strict JSON form. A file is never left half-written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trimtab.errors import TrimtabError
from trimtab.planning.plan import PLAN_VERSION, Plan

_MAX_BYTES = 64 * 1024 * 1024
_ADAPTER: TypeAdapter[Plan] = TypeAdapter(Plan)
_REMEDY = "make the plan anew with `trimtab plan`"


def load_plan(path: str | Path) -> Plan:
    """Read a plan file, refusing anything that is not exactly in the form of `Plan`.

    Raises:
        TrimtabError: naming the file, the place inside it, and the remedy.
    """
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise TrimtabError(f"{path}: larger than {_MAX_BYTES >> 20} MiB; is this a plan?")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TrimtabError(f"{path}: not UTF-8 text; is this a plan?") from None
    except OSError as error:
        raise TrimtabError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    return parse_plan(text, source=str(path))


def parse_plan(text: str, *, source: str) -> Plan:
    """Read a plan from text; `source` is what errors call it."""
    try:
        tree = json.loads(text, object_pairs_hook=_unique, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TrimtabError(f"{source}: not valid JSON: {reason}; {_REMEDY}") from None
    if not isinstance(tree, dict):
        raise TrimtabError(f"{source}: holds {_called(tree)} where a plan is due; {_REMEDY}")
    # Another version may have other keys: complaining of those would mislead.
    if tree.get("version") != PLAN_VERSION:
        raise TrimtabError(
            f"{source}: version {tree.get('version')!r} is not read by this trimtab, which reads version "
            f"{PLAN_VERSION}; {_REMEDY}"
        )
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise TrimtabError(
            f"{source}: " + "; ".join(map(_say, error.errors()[:5])) + f"; {_REMEDY}"
        ) from None


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan that `load_plan` reads back as an equal one. An existing file is replaced in one step, at the end.

    Raises:
        TrimtabError: a folder that does not exist or cannot be written to.
    """
    path = Path(path)
    text = json.dumps(_ADAPTER.dump_python(plan, mode="json"), indent=1) + "\n"
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise TrimtabError(
            f"{path}: cannot be written: {error.strerror}; check the folder {path.parent}"
        ) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        Path(name).replace(path)
    except OSError as error:
        raise TrimtabError(f"{path}: cannot be written: {error.strerror}; check the path") from None
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in pairs:
        if key in tree:
            raise ValueError(f"key {key!r} appears twice")
        tree[key] = value
    return tree


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _say(error: Any) -> str:
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error["loc"] if p != "[key]")
    place = place.lstrip(".") or "the plan"
    kind = error["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{place}: unknown key"
    if kind in ("missing", "missing_argument"):
        return f"{place}: missing"
    if kind == "value_error":
        return f"{place}: {error['ctx']['error']}"
    return f"{place}: {error['msg'].removeprefix('Input ')}, not {_called(error['input'])}"


def _called(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
