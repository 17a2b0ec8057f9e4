"""The kernel contract, and the choice of its implementation for a device.

Three implementations give the same bits (docs/wire-format.md): the PyTorch reference
on any device, C++ for CPU tensors, Triton for CUDA tensors.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from trimtab.codec.packing import check_buffers
from trimtab.environment import logger
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from trimtab.codec.packing import Packing


class Kernels:
    """What every implementation offers; it writes `_encode` and `_decode`, which get buffers that fit the packing."""

    name = ""

    def encode(
        self,
        flat: Tensor,
        packing: Packing,
        out: Tensor,
        *,
        stream: int,
        scale: float = 1.0,
        stochastic: bool = True,
    ) -> None:
        """Encode `scale` × the packing's segments of `flat` into the payload `out`."""
        check_buffers(packing, flat, out)
        self._encode(flat, None, packing, out, stream, scale, stochastic)

    def decode(self, payload: Tensor, packing: Packing, flat: Tensor, *, add: bool = False) -> None:
        """Write the payload's values over (or, with `add`, onto) the packing's segments of `flat`."""
        check_buffers(packing, flat, payload)
        self._decode(payload, packing, flat, add)

    def reduce_encode(
        self,
        flat: Tensor,
        payloads: Sequence[Tensor],
        packing: Packing,
        out: Tensor,
        *,
        stream: int,
        scale: float = 1.0,
        stochastic: bool = True,
    ) -> None:
        """Add `payloads`, in order, to `scale` × `flat`; encode the sums into `out`.

        `flat` is left with the decoded values of `out`: what every other rank will receive.
        """
        check_buffers(packing, flat, out, *payloads)
        self._encode(flat, payloads, packing, out, stream, scale, stochastic)

    def _encode(
        self,
        flat: Tensor,
        payloads: Sequence[Tensor] | None,
        packing: Packing,
        out: Tensor,
        stream: int,
        scale: float,
        stochastic: bool,
    ) -> None:
        """`encode` with None, else `reduce_encode`."""
        raise NotImplementedError

    def _decode(self, payload: Tensor, packing: Packing, flat: Tensor, add: bool) -> None:
        raise NotImplementedError


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
