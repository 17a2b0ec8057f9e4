"""The codec on CUDA tensors, in Triton: the same bits as the reference, at memory speed.

After the first use of a packing nothing here waits for the device or allocates; launches go to the
current stream. The exception is `reduce_encode` of payloads at irregular distances: they are first
copied into one buffer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from trimtab.codec import triton_device, triton_raw
from trimtab.codec.kernels import Kernels
from trimtab.codec.packing import RAW
from trimtab.codec.triton_tables import groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trimtab.codec.packing import Packing
    from trimtab.codec.triton_tables import Group


class TritonKernels(Kernels):
    name = "triton"

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
        if payloads is not None and (not payloads or packing.nbytes == 0):
            # A sum of one: the rank's own values, which must still become what the others receive.
            self._encode(flat, None, packing, out, stream, scale, stochastic)
            self._decode(out, packing, flat, add=False)
            return
        first, stride, gap = out, 0, 0
        if payloads:
            first, regular = payloads[0], spacing([payload.data_ptr() for payload in payloads])
            if regular is None:
                first, regular = torch.stack(list(payloads)), (packing.nbytes, len(payloads))
            stride, gap = regular
        wide = (out.data_ptr() | first.data_ptr() | stride) % 8 == 0
        with torch.cuda.device_of(flat):
            for group in _groups(packing, flat.device):
                common = (flat, first, out, group.owners, group.table)
                options = {"COUNT": len(payloads or ()), **group.options(flat.dtype, wide)}
                if group.bits == RAW:
                    triton_raw.encode_raw[(group.tiles,)](*common, scale, stride, gap, **options)
                else:
                    triton_device.encode[(group.tiles,)](
                        *common, stream, scale, stride, gap, STOCHASTIC=stochastic, **options
                    )

    def _decode(self, payload: Tensor, packing: Packing, flat: Tensor, add: bool) -> None:
        wide = payload.data_ptr() % 8 == 0
        with torch.cuda.device_of(flat):
            for group in _groups(packing, flat.device):
                kernel = triton_raw.decode_raw if group.bits == RAW else triton_device.decode
                options = group.options(flat.dtype, wide)
                kernel[(group.tiles,)](flat, payload, group.owners, group.table, ADD=add, **options)


def spacing(addresses: Sequence[int]) -> tuple[int, int] | None:
    """(stride, gap) such that address i is the first + (i + (i ≥ gap)) · stride; None if there is none.

    The payloads of a reduction are the rows of one buffer without the owner's own: regular, with one gap.
    """
    count = len(addresses)
    steps = [b - a for a, b in pairwise(addresses)]
    stride = min(steps, key=abs, default=0)
    gaps = [i + 1 for i, step in enumerate(steps) if step != stride]
    if not gaps:
        return stride, count
    if len(gaps) == 1 and steps[gaps[0] - 1] == 2 * stride:
        return stride, gaps[0]
    return None


def _groups(packing: Packing, device: torch.device) -> tuple[Group, ...]:
    key = (TritonKernels, device)
    if key not in packing.prepared:
        packing.prepared[key] = groups(packing, device)
    prepared: tuple[Group, ...] = packing.prepared[key]
    return prepared
