"""The kernel contract: what the implementations in `reference`, `native` and `triton_kernels` offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from trimtab.codec.packing import Packing, check_buffers


class Rounding(NamedTuple):
    """How values are scaled and rounded when they are encoded."""

    stream: int
    scale: float
    stochastic: bool


class Kernels:
    """What every implementation offers; it writes `_encode` and `_decode`, which get buffers that fit the packing."""

    name = ""
    pinned = False
    """Payloads are in pinned memory of the host, wherever the values are."""

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
        self._encode(flat, None, packing, out, Rounding(stream, scale, stochastic))

    def decode(self, payload: Tensor, packing: Packing, flat: Tensor, *, add: bool = False) -> None:
        """Write the payload's values over (or, with `add`, onto) the packing's segments of `flat`."""
        check_buffers(packing, flat, payload)
        self._decode(payload, packing, flat, add)

    def decode_sum(self, payloads: Sequence[Tensor], packing: Packing, flat: Tensor) -> None:
        """Write the sum of several payloads' values, added in their order, over the packing's segments of `flat`."""
        for index, payload in enumerate(payloads):
            self.decode(payload, packing, flat, add=index > 0)

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
        self._encode(flat, payloads, packing, out, Rounding(stream, scale, stochastic))

    def _encode(
        self,
        flat: Tensor,
        payloads: Sequence[Tensor] | None,
        packing: Packing,
        out: Tensor,
        rounding: Rounding,
    ) -> None:
        """`encode` with None, else `reduce_encode`."""
        raise NotImplementedError

    def _decode(self, payload: Tensor, packing: Packing, flat: Tensor, add: bool) -> None:
        raise NotImplementedError
