"""From a model and a sample batch to a `Workload`, without allocating memory for it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.measure.capture.assemble import Captured, assemble, grow_alike
from trimtab.measure.capture.call import DTYPES, Call, Meta, tensors_in
from trimtab.measure.capture.trace import Tracer
from trimtab.measure.capture.values import MOST_VALUES
from trimtab.measure.out_of_memory import is_out_of_memory
from trimtab.model_state import unchanged
from trimtab.models.spec import ModelSpec, batch_size, load_model, resized
from trimtab.precision.operators import LowPrecisionForward
from trimtab.precision.products import DTYPES as HALVES
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
    sizes: Sequence[int] = (),
) -> Workload:
    """The workload of one training step of a model.

    The forward pass runs with two batch sizes, on fake tensors without memory or values: a model that fits on no
    available device is captured in seconds, and it may be on the meta device. The model does not change.

    Args:
        model: as it will be trained, in its training mode and with its `requires_grad` flags.
        batch: what the model is called with: a tensor, a tuple of arguments or a dict of keywords. Axis 0 of
            its tensors is the batch.
        loss: computes the scalar loss from the model's output; without it, nothing follows the model.
        autocast: "bf16" or "fp16", if the step will run under `torch.autocast`.
        device: "cpu" or "cuda", if not the model's own: kernels and autocast rules differ.
        bucket_cap_mb: as DDP's.
        real: run the model on its own tensors instead, if its control flow depends on values.
        sizes: batch sizes that will matter. Their smallest and largest are captured if the model does not accept one
            sample more than `batch` has, or makes other calls then: operators in between are interpolated.

    Raises:
        TrimtabError: the model cannot run on fake tensors, or `set_precision` has changed it.
    """
    model = model.module if isinstance(model, DistributedDataParallel) else model
    _refuse_changed(model)
    if autocast is not None and autocast not in ("bf16", "fp16"):
        raise TrimtabError(f"capture: autocast is 'bf16' or 'fp16'; got {autocast!r}")
    kind = _device_type(model, device)

    own = batch_size(batch)

    def captured(size: int) -> Captured:
        with unchanged(model):
            if real:
                with torch.random.fork_rng():
                    calls = _forward(model, resized(batch, size), _values(model), loss, autocast, kind)
            else:
                calls = _fake_forward(model, batch, size, loss, autocast, kind)
        return Captured(size, calls)

    def assembled(one: Captured, two: Captured | None) -> Workload:
        return assemble(
            model,
            one,
            two,
            batch=[_sized_meta(t, own, one.samples) for t in tensors_in(batch)],
            autocast=autocast,
            bucket_cap_mb=bucket_cap_mb,
        )

    try:
        first = captured(own)
    except Exception as error:
        if real:
            raise
        raise TrimtabError(
            f"capture: {type(model).__name__} did not run on fake tensors: "
            f"{type(error).__name__}: {_first_line(error)}. If it runs normally, it depends on values: use "
            "capture_workload(..., real=True), which runs it"
        ) from error
    # Sizes that depend on values differ by chance: batches that are further apart show better how they grow.
    low, high = (min(sizes), max(sizes)) if len(set(sizes)) > 1 else (own, 2 * own)
    # With one sample an axis may need fewer copies; larger batches show how shapes grow, and apply to one sample too.
    close = [(own, own + 1), *([(2, 3)] if own == 1 else [])]
    known = {own: first}
    differing: tuple[Captured, Captured] | None = None
    for pair in ([] if real else close) + [(low, high)]:
        try:
            for size in pair:
                known.setdefault(size, known.get(size) or captured(size))
        except Exception:  # a model may accept only some batch sizes
            continue
        one, two = known[pair[0]], known[pair[1]]
        if grow_alike(one, two):
            workload = assembled(one, two)
            return workload.at_batch(own) if pair in close else workload
        differing = two, one
    return assembled(*differing) if differing is not None else assembled(first, None)


def workload_of(
    model: str, *, samples: int = 4, autocast: str | None = None, device: str = "cpu", real: bool = False
) -> Workload:
    """Capture a model on the meta device, without allocating its parameters.

    Args:
        real: build the model and run it, for models whose forward depends on values.
    """
    spec = load_model(model, torch.device("cpu" if real else "meta"), samples=samples)
    try:
        return capture_workload(
            spec.model,
            spec.batch,
            loss=spec.loss,
            autocast=autocast,
            device=None if real else device,
            real=real,
        )
    except TrimtabError as error:
        raise TrimtabError(f"{model}: {error}; on the command line: --real") from None


def capture_or_run(spec: ModelSpec, **options: Any) -> tuple[Workload, bool]:
    """The workload of a model, and whether the model had to run, because what it does depends on values.

    Raises:
        TrimtabError: the model does not run, with the cause and where it is.
    """
    try:
        return capture_workload(spec.model, spec.batch, loss=spec.loss, **options), False
    except TrimtabError as error:
        logger().debug("%s", error)
    try:
        return capture_workload(spec.model, spec.batch, loss=spec.loss, real=True, **options), True
    except Exception as error:
        if isinstance(error, TrimtabError) or is_out_of_memory(error):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise TrimtabError(
            f"{spec.name}: a forward pass of the model on its sample batch failed: {type(error).__name__}: "
            f"{_first_line(error)} ({last.filename}, line {last.lineno})"
        ) from error


def _fake_forward(
    model: nn.Module, batch: Any, size: int, loss: Loss | None, autocast: str | None, device: str
) -> list[Call]:
    old = batch_size(batch)
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        # One per tensor, so that shared parameters stay shared.
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
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
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


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs what fake tensors cannot do at length; the error that follows says it, too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


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
        stack.enter_context(tracer.tracing())
        result = functional_call(model, values, tuple(args), kwargs, tie_weights=False)
        if loss is not None:
            loss(result)
    return tracer.calls


def _has_values(tensor: torch.Tensor) -> bool:
    """Integers keep their values: see `trimtab.measure.capture.values`."""
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return (
        whole
        and tensor.device.type != "meta"
        and not isinstance(tensor, FakeTensor)
        and tensor.numel() <= MOST_VALUES
    )


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and copies of buffers, which a forward pass may change."""
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}


def _refuse_changed(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get("forward"), LowPrecisionForward):
            raise TrimtabError(
                f"capture: set_precision has changed {name or 'the model'}, but a workload describes the model before "
                "that; capture it first, or call trimtab.set_precision(model, {}) before"
            )


def _device_type(model: nn.Module, wanted: str | None) -> str:
    own = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")
    kind = wanted or own
    if kind == "cuda" and not torch.cuda.is_available():
        raise TrimtabError(
            "capture: torch finds no CUDA device here, which is needed to trace CUDA kernels; "
            "capture on a machine with one, or leave out device"
        )
    return kind


def _sized_meta(tensor: torch.Tensor, old: int, new: int) -> Meta:
    shape = tuple(tensor.shape)
    return ((new, *shape[1:]) if shape[:1] == (old,) else shape), DTYPES[tensor.dtype]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
