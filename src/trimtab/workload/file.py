"""Reading and writing workloads: JSON, strict."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trimtab.errors import TrimtabError
from trimtab.workload.workload import SCHEMA_VERSION, Workload

_ADAPTER: TypeAdapter[Workload] = TypeAdapter(Workload)


def load_workload(path: str | Path) -> Workload:
    """Read what `save_workload` wrote.

    Raises:
        TrimtabError: naming the file, the place inside it, and the remedy.
    """
    path = Path(path)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise TrimtabError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrimtabError(f"{path}: not valid JSON: {error}; capture the model anew") from None
    version = tree.get("version") if isinstance(tree, dict) else None
    if version != SCHEMA_VERSION:
        raise TrimtabError(
            f"{path}: version {version!r} is not read by this trimtab, which reads version {SCHEMA_VERSION}; "
            "capture the model anew"
        )
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the workload"
        raise TrimtabError(f"{path}: {place}: {first['msg']}; capture the model anew") from None


def save_workload(workload: Workload, path: str | Path) -> None:
    """Write a workload that `load_workload` reads back as an equal one."""
    Path(path).write_bytes(_ADAPTER.dump_json(workload, exclude_defaults=True))
