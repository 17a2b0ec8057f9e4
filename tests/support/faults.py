"""Slow links and dead peers, by wrapping: a process group that hands every operation to an inner Gloo group.

`ranks(2, function, faults=[Delay(0.01), Throttle(1e6)])` gives the function a default group with these faults;
groups made from it inherit them. A collective is held back on a thread of the group, in the order of the calls,
so the caller overlaps its work with it as with a real slow link; sends and receives hold back their caller.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import timedelta

BACKEND = "faulty"
_COLLECTIVES = [
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
]
_POINT_TO_POINT = ["send", "recv", "recv_anysource"]


@dataclass(kw_only=True)
class Call:
    """What a fault may know of the operation that it holds back."""

    rank: int
    index: int
    """How many operations this rank called on this group before."""
    bytes: int
    """What this rank contributes."""
    timeout: float


class Fault(Protocol):
    """Something that happens on one rank before an operation is handed on."""

    def __call__(self, call: Call) -> None: ...


@dataclass(frozen=True)
class Delay:
    """Every operation waits: so many seconds, or with a seed a random time up to that."""

    seconds: float
    rank: int | None = None
    """The rank that is late; None for every rank."""
    seed: int | None = None

    def __call__(self, call: Call) -> None:
        if self.rank in (None, call.rank):
            chance = 1.0
            if self.seed is not None:
                chance = random.Random(f"{self.seed} {call.rank} {call.index}").random()
            time.sleep(self.seconds * chance)


@dataclass(frozen=True)
class Throttle:
    """Every operation takes at least its bytes over this rate."""

    bytes_per_s: float
    rank: int | None = None

    def __call__(self, call: Call) -> None:
        if self.rank in (None, call.rank):
            time.sleep(call.bytes / self.bytes_per_s)


@dataclass(frozen=True)
class Drop:
    """From its nth operation on, a rank takes part in nothing, as if its cable were pulled.

    Its own operations end with an error after the group's timeout (`hang`) or at once; those of its peers end
    with Gloo's error after the timeout.
    """

    nth: int
    rank: int
    hang: bool = True

    def __call__(self, call: Call) -> None:
        if call.rank == self.rank and call.index >= self.nth:
            if self.hang:
                time.sleep(call.timeout)
            raise ConnectionError(f"rank {call.rank} is cut off since operation {self.nth}")


def install(faults: Iterable[Fault]) -> str:
    """Let every group of the backend whose name is returned have these faults, from now on in this process."""
    _Installed.faults = tuple(faults)
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    return BACKEND


class _Installed:
    faults: tuple[Fault, ...] = ()


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> FaultyGroup:
    return FaultyGroup(store, rank, size, timeout, _Installed.faults)


class FaultyGroup(dist.ProcessGroup):
    """A Gloo group on the CPU that suffers `faults` before each operation."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, faults: tuple[Fault, ...]
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        cpu = torch.device("cpu")
        gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.inner = dist.ProcessGroup(store, rank, size)
        self.inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.inner._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, gloo)
        # Code that asks for the device's backend, not for an operation (DeviceMesh), finds the inner one.
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._register_backend(cpu, dist.ProcessGroup.BackendType.CUSTOM, gloo)
        self._faults = faults
        self._timeout = timeout.total_seconds()
        self._calls = 0
        self._pending: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._drain, name="faulty-group", daemon=True)
        self._thread.start()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def shutdown(self) -> None:
        self._pending.put(None)
        self._thread.join(self._timeout)
        self.inner.shutdown()

    def monitored_barrier(self, *arguments: Any, **options: Any) -> Any:
        return self.inner.monitored_barrier(*arguments, **options)  # type: ignore[attr-defined]

    def _call(self, arguments: tuple[Any, ...]) -> Call:
        call = Call(
            rank=self.rank(), index=self._calls, bytes=_contribution(arguments), timeout=self._timeout
        )
        self._calls += 1
        return call

    def _suffer(self, call: Call) -> None:
        for fault in self._faults:
            fault(call)

    def _later(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        operation = getattr(self.inner, name)
        pending = _Pending(
            call=self._call(arguments),
            start=lambda: operation(*arguments, **options),
            outputs=[tensor for argument in arguments[:1] for tensor in _tensors(argument)],
        )
        self._pending.put(pending)
        return _HeldBack(pending.future)

    def _now(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self._suffer(self._call(arguments))
        return getattr(self.inner, name)(*arguments, **options)

    def _drain(self) -> None:
        while (pending := self._pending.get()) is not None:
            outcome: Any
            try:
                self._suffer(pending.call)
                pending.start().wait()
                outcome = pending.outputs
            except Exception as error:
                outcome = error
            pending.future.set_result(outcome)
            del pending, outcome


@dataclass(kw_only=True)
class _Pending:
    call: Call
    start: Callable[[], Any]
    outputs: list[torch.Tensor]
    future: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)


class _HeldBack(dist.Work):
    """The handle of an operation that the group's thread will start."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        # An exception set on a Python future is invisible to C++; one raised by a callback is not.
        self._future = future.then(_value_or_raise)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


def _value_or_raise(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value


def _contribution(arguments: tuple[Any, ...]) -> int:
    """Bytes of the input: the second argument where the first is the output, else the first."""
    sizes = [sum(tensor.nbytes for tensor in _tensors(argument)) for argument in arguments[:2]]
    return next((size for size in reversed(sizes) if size), 0)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _handed_on(name: str, how: Callable[..., Any]) -> Callable[..., Any]:
    def operation(self: FaultyGroup, *arguments: Any, **options: Any) -> Any:
        return how(self, name, arguments, options)

    return operation


for _names, _how in ((_COLLECTIVES, FaultyGroup._later), (_POINT_TO_POINT, FaultyGroup._now)):
    for _name in _names:
        if hasattr(dist.ProcessGroup, _name):  # torch 2.13 renamed some; each version has the ones it calls
            setattr(FaultyGroup, _name, _handed_on(_name, _how))


@dataclass(frozen=True)
class Die:
    """A rank is killed before its next collective once the file is there."""

    rank: int
    trigger: str

    def __call__(self, call: Call) -> None:
        if call.rank == self.rank and os.path.exists(self.trigger):  # noqa: PTH110 - a fault is plain data
            os.kill(os.getpid(), signal.SIGKILL)
