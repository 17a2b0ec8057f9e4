"""When a rank of a `fully_shard` model waits for its collectives, which FSDP2 runs inside the passes."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from torch import nn

from trimtab.errors import TrimtabError
from trimtab.measure.local_clock import LocalClock

WAITS = {
    "unshard": "all-gather",
    "wait_for_unshard": "all-gather",
    "post_backward": "reduce-scatter",
    "finalize_backward": "reduce-scatter",
}
"""Methods of FSDP2's groups of parameters in which a rank, or on a GPU its stream, waits for others."""


class WaitObserver(Protocol):
    """Is told of waits."""

    def now(self) -> Any:
        """A timestamp."""

    def waits(self) -> Callable[[tuple[str, Any, Any]], None] | None:
        """Takes a collective's name, start and end; None while nobody wants to know."""


def observe_waits(model: nn.Module, observer: WaitObserver) -> None:
    """Tell `observer`, as long as it lives, of the collectives of a model's `fully_shard` modules, if it has some."""
    alive = weakref.ref(observer)
    _wrap(model, lambda method, name: _timed(method, name, alive))


def leave_out_waits(model: nn.Module, clock: Callable[[], LocalClock | None]) -> None:
    """Do not count, as long as there is a clock, what a rank waits in a model's `fully_shard` modules."""
    _wrap(model, lambda method, _name: _left_out(method, clock))


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on the model or its modules."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes a while
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer of a model of `fully_shard` modules has, also while the model has them whole."""
    return [param.sharded_param for group in _param_groups(model) for param in group.fsdp_params]


def _param_groups(model: nn.Module) -> list[Any]:
    """Of all `fully_shard` modules; none where a module is sharded over several meshes."""
    if "torch.distributed.fsdp" not in sys.modules:  # importing it takes a while
        return []
    from trimtab.doors.fsdp import param_groups, sharded_modules

    with suppress(TrimtabError):
        return [group for module in sharded_modules(model) for group in param_groups(module)]
    return []


def _wrap(model: nn.Module, wrapped: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> None:
    """Wrap every method in which a rank waits; it is called with the collective's name."""
    for group in _param_groups(model):
        for method, name in WAITS.items():
            setattr(group, method, wrapped(getattr(group, method), name))


def _left_out(method: Callable[..., Any], clock: Callable[[], LocalClock | None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def left_out(*args: Any, **kwargs: Any) -> Any:
        running = clock()
        if running is None:
            return method(*args, **kwargs)
        with running.waiting():
            return method(*args, **kwargs)

    return left_out


def _timed(method: Callable[..., Any], name: str, alive: weakref.ref[WaitObserver]) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        observer = alive()
        add = None if observer is None else observer.waits()
        if observer is None or add is None:
            return method(*args, **kwargs)
        start = observer.now()
        result = method(*args, **kwargs)
        add((name, start, observer.now()))
        return result

    return timed
