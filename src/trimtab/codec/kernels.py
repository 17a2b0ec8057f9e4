"""The choice of the kernels for a device.

Three implementations give the same bits (docs/wire-format.md): the PyTorch reference
on any device, C++ for CPU tensors, Triton for CUDA tensors.
"""

from __future__ import annotations

from functools import cache

import torch

from trimtab.codec.contract import Kernels
from trimtab.environment import logger
from trimtab.errors import TrimtabError


def kernels_for(device: torch.device) -> Kernels:
    """The fastest implementation for tensors on `device`; on a CPU without the C++ library, the reference."""
    return _cuda() if device.type == "cuda" else _cpu() if device.type == "cpu" else _reference()


# Imported lazily: Triton is slow to import, and the C++ library may be missing.
@cache
def _cpu() -> Kernels:
    from trimtab.codec.native import NativeKernels

    try:
        return NativeKernels()
    except TrimtabError as error:
        logger().warning("CPU tensors fall back to the reference kernels, which are slow: %s", error)
        return _reference()


@cache
def _cuda() -> Kernels:
    from trimtab.codec.triton_kernels import TritonKernels

    return TritonKernels()


@cache
def _reference() -> Kernels:
    from trimtab.codec.reference import ReferenceKernels

    return ReferenceKernels()
