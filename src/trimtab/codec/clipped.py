"""Block quantisation with its range clipped, for error feedback: what is cut off is sent later.

At few bits a range that reaches to the largest values leaves the many small ones no levels: at 2 bits
rounding then errs by about the values themselves. A range of the block's typical size errs by a third of
them. The payload is the block codec's own; only what is encoded differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.codec.kernels import Kernels
    from trimtab.codec.packing import Packing

REACH = {1: 0.798, 2: 1.494, 3: 2.051}
"""By bits: outermost levels, over the root mean square, that err least on a normal distribution. With more
bits than these the largest values have levels to spare for them, and nothing is clipped."""

LARGEST = 0.125
"""The range reaches to at least this share of a block's largest value: a lone one is not owed for long."""


class ClippedKernels:
    """`Kernels` that encode values clipped to the typical size of their block. Use with error feedback only."""

    def __init__(self, inner: Kernels) -> None:
        self._inner = inner
        self.name = f"clipped {inner.name}"

    def encode(
        self,
        flat: torch.Tensor,
        packing: Packing,
        out: torch.Tensor,
        *,
        stream: int,
        scale: float = 1.0,
        stochastic: bool = True,
    ) -> None:
        """Encode `scale` × the packing's segments of `flat`, clipped, into the payload `out`."""
        if not any(segment.bits in REACH for segment in packing.segments):
            self._inner.encode(flat, packing, out, stream=stream, scale=scale, stochastic=stochastic)
            return
        clipped = torch.empty_like(flat)
        for segment in packing.segments:
            values = flat[segment.offset : segment.offset + segment.numel]
            into = clipped[segment.offset : segment.offset + segment.numel]
            if segment.bits not in REACH:
                into.copy_(values)
                continue
            whole = segment.numel // segment.block * segment.block
            if whole:
                shape = (-1, segment.block)
                _clip(values[:whole].view(shape), into[:whole].view(shape), REACH[segment.bits])
            if whole < segment.numel:
                _clip(values[whole:].view(1, -1), into[whole:].view(1, -1), REACH[segment.bits])
        self._inner.encode(clipped, packing, out, stream=stream, scale=scale, stochastic=stochastic)

    def decode(
        self, payload: torch.Tensor, packing: Packing, flat: torch.Tensor, *, add: bool = False
    ) -> None:
        """Write the payload's values over (or, with `add`, onto) the packing's segments of `flat`."""
        self._inner.decode(payload, packing, flat, add=add)

    def reduce_encode(
        self,
        flat: torch.Tensor,
        payloads: Sequence[torch.Tensor],
        packing: Packing,
        out: torch.Tensor,
        *,
        stream: int,
        scale: float = 1.0,
        stochastic: bool = True,
    ) -> None:
        """Add `payloads` to `scale` × `flat`; encode the sums, clipped, and leave them decoded in `flat`."""
        if scale != 1.0:
            flat.mul_(scale)
        for payload in payloads:
            self._inner.decode(payload, packing, flat, add=True)
        self.encode(flat, packing, out, stream=stream, stochastic=stochastic)
        self._inner.decode(out, packing, flat)


def _clip(values: torch.Tensor, out: torch.Tensor, reach: float) -> None:
    """Rows clipped to their own reach. A row that is not finite stays as it is, so that NaN and Inf travel."""
    typical = values.norm(dim=1, keepdim=True, dtype=torch.float32) / values.shape[1] ** 0.5
    largest = torch.maximum(values.amax(1, keepdim=True), -values.amin(1, keepdim=True)).float()
    bound = (
        torch.maximum(typical * reach, largest * LARGEST)
        .nan_to_num(nan=torch.inf, posinf=torch.inf)
        .to(values.dtype)
    )
    torch.minimum(values, bound, out=out)
    torch.maximum(out, -bound, out=out)
