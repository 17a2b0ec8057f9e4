"""Keep the values of integer tensors while all others are fake.

The control flow of models depends on lengths, positions and masks. These are small integers: they are computed
with values among the fake tensors, so that the control flow is that of training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

from trimtab.measure.capture.call import tensors_in

_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default

MOST_VALUES = 1 << 22
"""Larger integer tensors (a mask of a long context) are fake too."""


def run_kernel(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator, with values if its arguments have them and its results are integers."""
    operands = tensors_in((args, kwargs))
    if func is _RECURRENT and _fakes_wanted():
        return _with_workspace(func, args, kwargs)
    if not _fakes_wanted() or any(isinstance(t, FakeTensor) or _floating(t) for t in operands):
        return func(*args, **kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return func(*args, **kwargs)
    if not operands or _returns_tensors(func):
        outline = func(*args, **kwargs)
        results = tensors_in(outline)
        if not results or any(_floating(t) or t.numel() > MOST_VALUES for t in results):
            return outline
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _with_workspace(func: Any, args: Any, kwargs: Any) -> Any:
    """The fake results of a recurrent layer, with the size of the workspace that backward needs.

    Only oneDNN knows that size, which is most of what the layer keeps: it is asked by a call on zeros.
    """

    def zeros(value: Any) -> Any:
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

    *results, _ = func(*args, **kwargs)
    with unset_fake_temporarily():
        workspace = func(*tree_map(zeros, args), **tree_map(zeros, kwargs))[-1]
    return (*results, torch.empty(workspace.shape, dtype=workspace.dtype))


def _fakes_wanted() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _returns_tensors(func: Any) -> bool:
    return any("Tensor" in str(result.type) for result in func._schema.returns)
