"""Collectives that use both directions of a link at once, whichever rank comes first.

Gloo sends a message once the receiver has said that it is ready, over the connection that carries the receiver's own
messages. Its all-to-all, and its all-gather between two ranks, start to send before they say so. Then the word of the
rank that comes later waits behind that rank's own payload, and the other payload starts only when the first, or half of
it, has arrived. Here every rank says what it is ready for before it sends anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.collectives.groups import backend_kind
from trimtab.collectives.reduction import Works, started

def all_gather(
    output: torch.Tensor,
    values: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    in_stream: bool = False,
) -> dist.Work:
    """Every rank's `values`, one after another in rank order, in `output` on every rank.

    Args:
        in_stream: NCCL sends from the current stream instead of the group's own one, whose work is ordered by calls
            and has a lower priority than the streams of FSDP2.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if in_stream and values.device.type == "cuda":
        all_gather_single(output, values, group)
        return Works(values.device)
    # More than two ranks form a ring: what a rank sends and what it is ready for go to different neighbors.
    if world != 2 or not is_gloo(values.device, group):
        return started(all_gather_single(output, values, group, async_op=True))
    rows = output.view(world, -1)
    work = exchange(values.device, group, [(values, 1 - rank)], [(rows[1 - rank], 1 - rank)])
    rows[rank].copy_(values)
    return work


def all_to_all(
    output: torch.Tensor,
    values: torch.Tensor,
    into: Sequence[int],
    out: Sequence[int],
    group: dist.ProcessGroup,
    *,
    in_stream: bool = False,
) -> dist.Work:
    """Send `out[r]` elements of `values` to each rank r, and receive `into[r]` from it, in rank order.

    `in_stream` is as in `all_gather`.
    """
    sizes = list(into), list(out)
    if in_stream and values.device.type == "cuda":
        dist.all_to_all_single(output, values, *sizes, group=group)
        return Works(values.device)
    if not is_gloo(values.device, group):
        return started(dist.all_to_all_single(output, values, *sizes, group=group, async_op=True))
    rank = dist.get_rank(group)
    received, sent = output.split(list(into)), values.split(list(out))
    # Each rank starts with the next one, so that not all of them send to rank 0 first.
    peers = [(rank + ahead) % len(sent) for ahead in range(1, len(sent))]
    work = exchange(
        values.device,
        group,
        [(sent[peer], peer) for peer in peers],
        [(received[peer], peer) for peer in peers],
    )
    received[rank].copy_(sent[rank])
    return work


def exchange(
    device: torch.device,
    group: dist.ProcessGroup,
    send: Sequence[tuple[torch.Tensor, int]],
    receive: Sequence[tuple[torch.Tensor, int]],
) -> dist.Work:
    """Send tensors to ranks of the group and receive others; what is empty is left out, on both sides."""
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, pairs in ((dist.irecv, receive), (dist.isend, send))  # in this order: see above
        for tensor, peer in pairs
        if tensor.numel()
    ]
    return Works(device, dist.batch_isend_irecv(operations) if operations else ())


def is_gloo(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether Gloo carries the group's tensors on a device, and so nothing is ordered by streams."""
    return device.type == "cpu" and backend_kind(group, device) == "gloo"
