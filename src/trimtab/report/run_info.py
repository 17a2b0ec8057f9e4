"""The making of a run folder: its name, and run.json."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

VERSION = 1
"""Version of the run folder: of run.json and of every event."""

RUNS = "trimtab-runs"

_PACKAGES = ("torch", "numpy", "transformers", "accelerate", "lightning", "ray")


def run_name(script: str, prefix: str) -> str:
    """The name of a run folder."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{prefix}-{Path(script).stem or 'run'}")


def new_run_folder(script: str, base: Path | None = None) -> Path:
    """The path of a new folder, `trimtab-runs/<UTC time>-<script>`; it is made when something is written to it."""
    parent = (base or Path.cwd()) / RUNS
    name = run_name(script, time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def write_run_info(
    folder: Path, *, command: Sequence[str], script: str, world_size: int | None, **more: Any
) -> None:
    """Write run.json; the first to do so wins, because several nodes may share a folder. Raises OSError."""
    info = {
        "version": VERSION,
        "trimtab": _version("trimtab"),
        "command": list(command),
        "script": script,
        "directory": str(Path.cwd()),
        "world_size": world_size,
        "started": round(time.time(), 3),
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "host": socket.gethostname(),
            "cpus": os.cpu_count(),
            "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
            "variables": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(("TRIMTAB_", "CUDA_VISIBLE", "NCCL_", "GLOO_", "OMP_NUM"))
            },
        },
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / "run.json").open("x", encoding="utf-8") as file:
            file.write(json.dumps(info, indent=1, default=str) + "\n")
    except FileExistsError:
        return


def add_run_info(folder: Path, **more: Any) -> None:
    """Add to run.json what was not known when the job started. Raises OSError and ValueError."""
    from trimtab.strict_files import replace_file  # brings pydantic, which ranks that write events do without

    path = folder / "run.json"
    info = json.loads(path.read_text(encoding="utf-8"))
    replace_file(path, json.dumps({**info, **more}, indent=1, default=str) + "\n")


def _version(package: str) -> str | None:
    if package in sys.modules and hasattr(sys.modules[package], "__version__"):
        return str(sys.modules[package].__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
