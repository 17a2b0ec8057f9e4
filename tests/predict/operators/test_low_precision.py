"""What `predict.backend` says of the operators, held against the operators."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.api.set_precision import set_precision
from trimtab.measure.capture.call import DTYPES
from trimtab.measure.capture.capture import capture_workload
from trimtab.precision.devices import cpu_precisions
from trimtab.predict.operators import low_precision as backend
from trimtab.predict.operators.low_precision import Cast

if TYPE_CHECKING:
    from trimtab.workload import Operator


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Mixing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x * 1.0, x * 1.0)


CASES: dict[str, tuple[nn.Module, torch.Tensor, str]] = {
    "linear": (nn.Sequential(nn.Linear(24, 40)), torch.randn(4, 5, 24), "0"),
    "conv": (nn.Sequential(nn.Conv2d(8, 12, 3, padding=1)), torch.randn(3, 8, 6, 6), "0"),
    "attention": (Attention(), torch.randn(2, 3, 8, 16), "inner/attention"),
    "embedding": (nn.Sequential(nn.Embedding(11, 16)), torch.randint(11, (4, 5)), "0"),
}
HALVES = ("bf16", "fp16")


def operator_of(case: str) -> Operator:
    model, x, setting = CASES[case]
    set_precision(model, {})
    workload = capture_workload(model, x.requires_grad_(x.is_floating_point()))
    return workload.operators[workload.settings[setting][0]]


class Casts(TorchDispatchMode):
    """Every cast of more than a scalar."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[Cast] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::_to_copy" and args[0].numel() > 64:
            self.seen[Cast(DTYPES[args[0].dtype], DTYPES[result.dtype], args[0].numel())] += 1
        return result


def merged(casts: Any) -> Counter[tuple[str, str]]:
    """Elements by direction: q, k and v may be cast one by one."""
    total: Counter[tuple[str, str]] = Counter()
    for cast in casts:
        total[cast.source, cast.target] += cast.elements
    return total


@pytest.mark.parametrize("case", CASES)
def test_casts_of_bf16_are_those_that_run(case: str) -> None:
    model, x, setting = CASES[case]
    operator = operator_of(case)
    set_precision(model, {setting: "bf16"})
    try:
        with Casts() as forward:
            y = model(x)
        g = torch.randn_like(y)
        with Casts() as backward:
            y.backward(g)
    finally:
        set_precision(model, {})
    leaving = "fp32" if case == "embedding" else "bf16"
    lifted = [] if case == "embedding" else [y.numel()]  # the model's output
    casts = [*backend.forward_casts(operator, "bf16", "fp32", leaving)]
    assert merged(forward.seen.elements()) == merged([*casts, *(Cast("bf16", "fp32", n) for n in lifted)])
    casts = [*backend.backward_casts(operator, "bf16", "fp32", leaving, "cpu")]
    assert merged(backward.seen.elements()) == merged([*casts, *(Cast("fp32", "bf16", n) for n in lifted)])


def test_int8_quantizes_as_often_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    if "int8" not in cpu_precisions():
        pytest.skip("this CPU offers no int8")
    from trimtab.precision import int8

    seen: list[int] = []
    original = int8.quantize

    def counted(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(values.numel())
        return original(values, *args, **kwargs)

    monkeypatch.setattr(int8, "quantize", counted)
    model, x, setting = CASES["linear"]
    operator = operator_of("linear")
    set_precision(model, {setting: "int8"})
    try:
        y = model(x)
        assert sorted(seen) == sorted(
            c.elements for c in backend.forward_casts(operator, "int8", "fp32", "fp32")
        )
        seen.clear()
        y.backward(torch.randn_like(y))
    finally:
        set_precision(model, {})
    expected = sorted(c.elements for c in backend.backward_casts(operator, "int8", "fp32", "fp32", "cpu"))
    assert sorted(seen) == expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8", "int8/int8/bf16"])
def test_saved_bytes_are_those_that_autograd_keeps(case: str, precision: str) -> None:
    from trimtab.precision_names import Precision
    from trimtab.predict.precision_patterns import settable

    model, x, setting = CASES[case]
    operator = operator_of(case)
    names = precision.split("/")
    if not set(names) <= set(settable(operator.kind)) or not set(names) <= set(cpu_precisions()):
        return
    wanted: Any = precision
    if len(names) == 3:
        wanted = Precision(forward=names[0], grad_input=names[1], grad_weight=names[2])  # type: ignore[arg-type]
    set_precision(model, {setting: wanted})
    shared = {t.untyped_storage().data_ptr() for t in (*model.parameters(), x)}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = model(x)
        del y
    finally:
        set_precision(model, {})
    # Of attention also the row sums, which the workload lists as they are.
    others = sum(s.tensor.nbytes for s in operator.saved if s.role == "other")
    assert backend.saved_bytes(operator, precision, "fp32", "cpu") + others == sum(kept.values())


def test_weight_operands_are_saved_on_a_gpu_only() -> None:
    operator = operator_of("linear")
    here = backend.saved_bytes(operator, "int8", "fp32", "cpu")
    there = backend.saved_bytes(operator, "int8", "fp32", "cuda")
    assert here == 20 * 24 + 20 * 4
    assert there == 32 * 32 + 20 * 4 + 48 * 32 + 40 * 4  # rows and columns padded to 16
    again = [
        c for c in backend.backward_casts(operator, "int8", "fp32", "fp32", "cuda") if c.elements == 24 * 40
    ]
    assert not again
    assert backend.passes("int8/bf16/fp32") == ("int8", "bf16", "fp32")
