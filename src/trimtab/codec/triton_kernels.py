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
from trimtab.codec.packing import RAW, check_buffers
from trimtab.codec.triton_tables import groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.codec.packing import Packing
    from trimtab.codec.triton_tables import Group


class TritonKernels:
    """Implements `Kernels`."""

    name = "triton"

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
        """Encode `scale` × the packing's segments of `flat` into the payload `out`."""
        check_buffers(packing, flat, out)
        self._encode(flat, out, 0, 0, 0, packing, out, stream, scale, stochastic)

    def decode(
        self, payload: torch.Tensor, packing: Packing, flat: torch.Tensor, *, add: bool = False
    ) -> None:
        """Write the payload's values over (or, with `add`, onto) the packing's segments of `flat`."""
        check_buffers(packing, flat, payload)
        wide = payload.data_ptr() % 8 == 0
        with torch.cuda.device_of(flat):
            for group in _groups(packing, flat.device):
                kernel = triton_raw.decode_raw if group.bits == RAW else triton_device.decode
                kernel[(group.tiles,)](
                    flat,
                    payload,
                    group.owners,
                    group.table,
                    ADD=add,
                    **group.constants(flat.dtype, wide),
                    num_warps=group.warps,
                    enable_fp_fusion=False,
                )

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
        """Add `payloads`, in order, to `scale` × `flat`; encode the sums into `out`.

        `flat` is left with the decoded values of `out`: what every other rank will receive.
        """
        check_buffers(packing, flat, out, *payloads)
        if not payloads or packing.nbytes == 0:
            # A sum of one: the rank's own values, which must still become what the others receive.
            self.encode(flat, packing, out, stream=stream, scale=scale, stochastic=stochastic)
            self.decode(out, packing, flat)
            return
        count, first = len(payloads), payloads[0]
        regular = spacing([payload.data_ptr() for payload in payloads])
        if regular is None:
            first, regular = torch.stack(list(payloads)), (packing.nbytes, count)
        self._encode(flat, first, count, *regular, packing, out, stream, scale, stochastic)

    def _encode(
        self,
        flat: torch.Tensor,
        payloads: torch.Tensor,
        count: int,
        stride: int,
        gap: int,
        packing: Packing,
        out: torch.Tensor,
        stream: int,
        scale: float,
        stochastic: bool,
    ) -> None:
        wide = (out.data_ptr() | payloads.data_ptr() | stride) % 8 == 0
        with torch.cuda.device_of(flat):
            for group in _groups(packing, flat.device):
                common = (flat, payloads, out, group.owners, group.table)
                options = {
                    "COUNT": count,
                    **group.constants(flat.dtype, wide),
                    "num_warps": group.warps,
                    "enable_fp_fusion": False,
                }
                if group.bits == RAW:
                    triton_raw.encode_raw[(group.tiles,)](*common, scale, stride, gap, **options)
                else:
                    triton_device.encode[(group.tiles,)](
                        *common, stream, scale, stride, gap, STOCHASTIC=stochastic, **options
                    )


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
