"""The one way to skip a test where the machine lacks what it needs; the reason is printed with the results."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def requires(
    *,
    root: bool = False,
    cuda: int = 0,
    compiler: bool = False,
    cgroup: bool = False,
    kernels: bool = False,
    int8: bool = False,
    modules: Sequence[str] = (),
    tools: Sequence[str] = (),
) -> pytest.MarkDecorator:
    """Skip the test or, as `pytestmark`, the module unless all of this is here.

    `cuda` is a number of GPUs, `cgroup` a CPU controller that this process may write to, `kernels` the C++
    kernels, `int8` a processor whose int8 products cannot saturate, `modules` are names to import, `tools` are
    commands.
    """
    missing = list(_missing(root, cuda, compiler, cgroup, kernels, int8, modules, tools))
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def _missing(
    root: bool,
    cuda: int,
    compiler: bool,
    cgroup: bool,
    kernels: bool,
    int8: bool,
    modules: Sequence[str],
    tools: Sequence[str],
) -> Iterator[str]:
    if root and os.geteuid() != 0:
        yield "root"
    if cuda and _gpus() < cuda:
        yield f"{cuda} CUDA device(s), found {_gpus()}"
    if compiler and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))):
        yield "a C++ compiler"
    if cgroup and not _cgroup_is_writable():
        yield "a writable cgroup CPU controller"
    if kernels and not _kernels_are_built():
        yield "the C++ kernels (make native)"
    if int8 and not _int8_is_offered():
        yield "a processor that offers int8"
    yield from (f"the module {name}" for name in modules if find_spec(name) is None)
    yield from (f"the command {name}" for name in tools if shutil.which(name) is None)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _int8_is_offered() -> bool:
    from trimtab.precision.devices import cpu_precisions

    return "int8" in cpu_precisions()


def _kernels_are_built() -> bool:
    from trimtab.codec import native

    return native.available()


def _cgroup_is_writable() -> bool:
    """Version 1 mounts a folder per controller; version 2 lists the controllers in a file at the root."""
    mount = Path("/sys/fs/cgroup")
    for first_version in (mount / "cpu", mount / "cpu,cpuacct"):
        if (first_version / "cpu.cfs_quota_us").exists() or (first_version / "cgroup.procs").exists():
            return os.access(first_version, os.W_OK)
    controllers = mount / "cgroup.controllers"
    return controllers.exists() and "cpu" in controllers.read_text().split() and os.access(mount, os.W_OK)
