"""Collectives that use both directions of a link at once, whichever rank comes first.

Gloo sends a message once the receiver has said that it is ready, over the connection that carries the receiver's own
messages. Its all-to-all, and its all-gather between two ranks, start to send before they say so. Then the word of the
rank that comes later waits behind that rank's own payload, and the other payload starts only when the first, or half of
it, has arrived. Here every rank says what it is ready for before it sends anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.collectives.groups import backend_kind
from trimtab.collectives.reduction import Works, started
from trimtab.shutdown import close_at_exit

AHEAD_TAG = 0x7A
"""Of messages that another thread than the caller's starts: they must not be taken for the caller's own, which may
overtake them."""


def all_gather(
    output: torch.Tensor,
    values: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    in_stream: bool = False,
    ahead: bool = False,
) -> dist.Work:
    """Every rank's `values`, one after another in rank order, in `output` on every rank.

    Args:
        in_stream: NCCL sends from the current stream instead of the group's own one, whose work is ordered by calls
            and has a lower priority than the streams of FSDP2.
        ahead: the caller computes before it waits, so Gloo may not keep it (`Ahead`).
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if in_stream and values.device.type == "cuda":
        all_gather_single(output, values, group)
        return Works(values.device)
    # More than two ranks form a ring: what a rank sends and what it is ready for go to different neighbors.
    if world != 2 or not is_gloo(values.device, group):
        return started(all_gather_single(output, values, group, async_op=True))
    rows = output.view(world, -1)
    start = partial(exchange, values.device, group, [(values, 1 - rank)], [(rows[1 - rank], 1 - rank)])
    work = Ahead(partial(start, tag=AHEAD_TAG)) if ahead else start()
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
    *,
    tag: int = 0,
) -> dist.Work:
    """Send tensors to ranks of the group and receive others; what is empty is left out, on both sides."""
    operations = [
        dist.P2POp(operation, tensor, group=group, tag=tag, group_peer=peer)
        for operation, pairs in ((dist.irecv, receive), (dist.isend, send))  # in this order: see above
        for tensor, peer in pairs
        if tensor.numel()
    ]
    return Works(device, dist.batch_isend_irecv(operations) if operations else ())


class Ahead(dist.Work):
    """An exchange that another thread starts.

    Gloo writes to a connection in the thread that calls it, and only while nothing is read from there. The rank that
    comes last finds the other one sending already: starting its own exchange then takes it about as long as the
    exchange, and it cannot compute meanwhile. One thread starts all of them, in the order of the calls.
    """

    def __init__(self, start: Callable[[], dist.Work]) -> None:
        super().__init__()
        self._started: Future[dist.Work] = Future()
        _STARTER.submit(start, self._started)

    def wait(self, timeout: Any = None) -> bool:
        return self._started.result().wait()


class _Starter:
    """Runs calls one after another in a thread, which leaves before the interpreter does."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], dist.Work], Future[dist.Work]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        close_at_exit(self)

    def submit(self, call: Callable[[], dist.Work], result: Future[dist.Work]) -> None:
        self._calls.put((call, result))
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # as after a fork
                self._thread = threading.Thread(target=self._serve, name="trimtab-ahead", daemon=True)
                self._thread.start()

    def close(self, timeout: float | None = None) -> None:
        """Stop the thread once it has started what was submitted; another call begins a new one."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._calls.put(None)
            thread.join(timeout)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, result = item
            try:
                result.set_result(call())
            except BaseException as error:  # raised where it is waited for
                result.set_exception(error)
            del item, call, result  # not to keep their tensors until the next call


_STARTER = _Starter()


def is_gloo(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether Gloo carries the group's tensors on a device, and so nothing is ordered by streams."""
    return device.type == "cpu" and backend_kind(group, device) == "gloo"
