"""Values on a GPU, payloads in the host's memory: for exchanges between hosts that no kernel of the GPU waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.codec.contract import Kernels
from trimtab.codec.packing import Packing


class HostPayloads(Kernels):
    """Encodes and decodes where the values are; only payloads, an eighth of them in 4 bits, are copied.

    `encode` returns when the payload is in the host's memory; the thread sleeps until then. `decode` copies in the
    current stream: a payload may be overwritten when what that stream has queued is done.
    """

    pinned = True

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.name = f"{kernels.name}, payloads on the host"

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
        there = torch.empty_like(out, device=flat.device)
        self._kernels.encode(flat, packing, there, stream=stream, scale=scale, stochastic=stochastic)
        _fetch(there, out)

    def decode(self, payload: Tensor, packing: Packing, flat: Tensor, *, add: bool = False) -> None:
        self._kernels.decode(payload.to(flat.device, non_blocking=True), packing, flat, add=add)

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
        there = torch.empty_like(out, device=flat.device)
        arrived = [payload.to(flat.device, non_blocking=True) for payload in payloads]
        self._kernels.reduce_encode(
            flat, arrived, packing, there, stream=stream, scale=scale, stochastic=stochastic
        )
        _fetch(there, out)


def _fetch(there: Tensor, here: Tensor) -> None:
    here.copy_(there, non_blocking=True)
    sleep_until_done(there.device)


def sleep_until_done(device: torch.device) -> None:
    """Wait for what the current stream of a device has queued, without spinning."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)
        done.record()
        done.synchronize()
