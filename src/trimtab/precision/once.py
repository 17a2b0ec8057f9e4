"""What lower precision does not do: second derivatives and torch.func. It says so instead of computing without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import TrimtabError

_ADVICE = "leave its operators out, or restore the model with set_precision(model, {})"
_TWICE = (
    "set_precision: operators in low precision cannot be differentiated twice (a gradient penalty, a Hessian): "
    + _ADVICE
)


def differentiable_once(
    gradients: Callable[[Any, Tensor], tuple[Tensor | None, ...]], ctx: Any, g: Tensor
) -> Any:
    """The gradients of an autograd function, for its `backward`.

    Where the graph of gradients is recorded (create_graph=True), to differentiate them is an error. torch's
    `once_differentiable` returns constants if the output's gradient is one, so that a penalty on the gradient of a
    single layer would be left out without an error; and it costs time in every backward pass.
    """
    if not torch.is_grad_enabled():
        return gradients(ctx, g)
    with torch.no_grad():
        outputs = gradients(ctx, g)
    refuse: Any = torch._C._functions.DelayedError(_TWICE.encode(), len(outputs))
    return refuse(*(None if y is None else y.detach().requires_grad_() for y in outputs))


def refuse_transforms() -> None:
    """
    Raises:
        TrimtabError: inside a transform of torch.func, for which these autograd functions have no rules.
    """
    if torch._C._are_functorch_transforms_active():
        raise TrimtabError(
            "set_precision: operators in low precision do not run inside torch.func's transforms (grad, vmap, jvp, "
            f"...): {_ADVICE}"
        )
