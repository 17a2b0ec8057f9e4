"""Reading and writing workloads: one strict JSON form."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

from trimtab.strict_files import FileFormat, replace_file
from trimtab.workload.workload import SCHEMA_VERSION, Workload

_FORMAT = FileFormat(
    adapter=TypeAdapter(Workload),
    noun="a workload",
    version=SCHEMA_VERSION,
    remedy="capture the model again",
    max_bytes=1 << 30,
)


def load_workload(path: str | Path) -> Workload:
    """Read what `save_workload` wrote.

    Raises:
        TrimtabError: naming the file, the place inside it, and the remedy.
    """
    return _FORMAT.load(path)


def save_workload(workload: Workload, path: str | Path) -> None:
    """Write a workload that `load_workload` reads back as an equal one."""
    replace_file(path, _FORMAT.adapter.dump_json(workload, exclude_defaults=True).decode())
