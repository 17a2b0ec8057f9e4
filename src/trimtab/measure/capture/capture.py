"""From a model and a sample batch to a `Workload`, without running anything at full size."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.errors import TrimtabError
from trimtab.measure.capture.assemble import assemble
from trimtab.measure.capture.call import DTYPES
from trimtab.measure.capture.trace import Tracer
from trimtab.measure.capture.values import MOST_VALUES
from trimtab.precision.half import DTYPES as HALVES
from trimtab.precision.operators import LowPrecisionForward

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from trimtab.measure.capture.call import Call, Meta
    from trimtab.workload.workload import Workload

    Loss = Callable[[Any], torch.Tensor]


def capture_workload(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    autocast: str | None = None,
    device: str | None = None,
    bucket_cap_mb: float | None = None,
    real: bool = False,
) -> Workload:
    """What one training step of a model asks for.

    The forward pass runs twice, for two sizes of batch, on tensors without memory and without values: a model
    that fits on no device at hand is captured in seconds, and it may lie on the meta device. Nothing of the
    model changes.

    Args:
        model: as it will be trained: its training mode and which parameters need gradients count.
        batch: what the model is called with: a tensor, a tuple of arguments or a dict of keywords. Axis 0 of
            its tensors is the batch.
        loss: makes the scalar loss of what the model returns; where absent, nothing follows the model.
        autocast: "bf16" or "fp16", if the step will run under `torch.autocast`.
        device: "cpu" or "cuda", if not the model's own: kernels and autocast's rules differ.
        bucket_cap_mb: as DDP's.
        real: run the model on its own tensors instead, for one that looks at values. It then runs once, at
            the batch's size, and the workload cannot be re-sized.

    Raises:
        TrimtabError: the model cannot run without values, or `set_precision` has changed it.
    """
    model = model.module if isinstance(model, DistributedDataParallel) else model
    _refuse_changed(model)
    if autocast is not None and autocast not in ("bf16", "fp16"):
        raise TrimtabError(f"capture: autocast is 'bf16' or 'fp16'; got {autocast!r}")
    kind = _device_type(model, device)

    def assembled(calls: list[Call], second: list[Call] | None, size: int) -> Workload:
        return assemble(
            model,
            calls,
            second,
            batch=[_sized_meta(t, _batch_size(batch), size) for t in _tensors(batch)],
            batch_size=size,
            autocast=autocast,
            bucket_cap_mb=bucket_cap_mb,
        )

    size = _batch_size(batch)
    if real:
        with torch.random.fork_rng():
            return assembled(_forward(model, batch, _values(model), loss, autocast, kind), None, size)
    try:
        calls = _fake_forward(model, batch, size, loss, autocast, kind)
    except Exception as error:
        raise TrimtabError(
            f"capture: {type(model).__name__} did not run on tensors without values: "
            f"{type(error).__name__}: {_first_line(error)}. If it runs by itself, it looks at values: use "
            "capture_workload(..., real=True), which runs it once"
        ) from error
    try:
        more = [
            _fake_forward(model, batch, size + extra, loss, autocast, kind)
            for extra in (1, 2)[: 1 + (size == 1)]
        ]
    except Exception:  # a model may insist on its batch size: then it has that one only
        return assembled(calls, None, size)
    workload = assembled(calls, more[0], size)
    if size == 1 and not workload.resizable:
        # An axis of length 1 needs fewer copies. Larger batches tell how it grows, and serve for one too.
        general = assembled(more[0], more[1], 2)
        return general.at_batch(1) if general.resizable else workload
    return workload


def _fake_forward(
    model: nn.Module, batch: Any, size: int, loss: Loss | None, autocast: str | None, device: str
) -> list[Call]:
    old = _batch_size(batch)
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        # One for each, so that shared parameters stay shared.
        if id(tensor) not in made:
            made[id(tensor)] = (
                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                if shape is None
                else torch.empty(shape, dtype=tensor.dtype, device=device)
            ).requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    def sized(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        grows = value.dim() > 0 and len(value) == old
        if _has_values(value):
            rows = torch.arange(size) % old
            return (value.cpu()[rows] if grows else value.clone()).to(device)
        return fake(value, (size, *value.shape[1:]) if grows else None)

    batch = tree_map(lambda v: sized(v) if isinstance(v, torch.Tensor) and _has_values(v) else v, batch)
    buffers = {name: b.to(device, copy=True) for name, b in model.named_buffers() if _has_values(b)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = {
            name: fake(tensor)
            for names in (
                model.named_parameters(remove_duplicate=False),
                model.named_buffers(remove_duplicate=False),
            )
            for name, tensor in names
        }
        batch = tree_map(lambda v: v if isinstance(v, torch.Tensor) and _has_values(v) else sized(v), batch)
        return _forward(model, batch, values | buffers, loss, autocast, device)


def _forward(
    model: nn.Module,
    batch: Any,
    values: dict[str, torch.Tensor],
    loss: Loss | None,
    autocast: str | None,
    device: str,
) -> list[Call]:
    named = dict(model.named_parameters())
    tracer = Tracer(model, {name: values[name] for name in named})
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    args = args if isinstance(args, (tuple, list)) else (args,)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if autocast is not None:
            stack.enter_context(torch.autocast(device, HALVES[autocast]))
        stack.enter_context(tracer.watching())
        result = functional_call(model, values, tuple(args), kwargs, tie_weights=False)
        if loss is not None:
            loss(result)
    return tracer.calls


def _has_values(tensor: torch.Tensor) -> bool:
    """Whole numbers keep theirs: see `trimtab.measure.capture.values`."""
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return (
        whole
        and tensor.device.type != "meta"
        and not isinstance(tensor, FakeTensor)
        and tensor.numel() <= MOST_VALUES
    )


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and copies of buffers: a forward pass may change those."""
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}


def _refuse_changed(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get("forward"), LowPrecisionForward):
            raise TrimtabError(
                f"capture: set_precision has set {name or 'the model'}, but a workload describes the model before "
                "that; capture it first, or call trimtab.set_precision(model, {}) and capture then"
            )


def _device_type(model: nn.Module, wanted: str | None) -> str:
    own = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")
    kind = wanted or own
    if kind == "cuda" and not torch.cuda.is_available():
        raise TrimtabError(
            "capture: this torch sees no CUDA device, without which CUDA's kernels cannot be named; "
            "capture on a machine with one, or leave out device"
        )
    return kind


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _sized_meta(tensor: torch.Tensor, old: int, new: int) -> Meta:
    shape = tuple(tensor.shape)
    return ((new, *shape[1:]) if shape[:1] == (old,) else shape), DTYPES[tensor.dtype]


def _batch_size(batch: Any) -> int:
    for tensor in _tensors(batch):
        if tensor.dim():
            return len(tensor)
    raise TrimtabError("capture: the sample batch holds no tensor with an axis; axis 0 is the batch")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
