"""The operators of a model whose precision can be set, and the forward that computes each in that precision.

A `forward` is set on the module instance. Its class, parameters, buffers, hooks and state_dict do not change, so
wrappers work as before, and deleting that `forward` restores the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from trimtab.precision.conv import Geometry, conv
from trimtab.precision.draw import Draw
from trimtab.precision.half import HalfProducts, rounded
from trimtab.precision.linear import Late, draw_of, linear, no_autocast
from trimtab.precision.products import DTYPES
from trimtab.precision.results import RECURRENT, CallCounter, remove_hooks
from trimtab.precision.weight_codes import WeightCodes
from trimtab.precision_names import ATTENTION, OperatorKind, Precision


@dataclass
class LowPrecisionForward:
    """The `forward` of a module in a given precision."""

    module: nn.Module
    precision: Precision
    base: int
    calls: CallCounter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def draw(self, x: Tensor) -> Draw:
        """The random stream of this operator's rounding."""
        return draw_of(self.precision, self.base, self.calls.on(x.device))

    def result_dtype(self, x: Tensor) -> torch.dtype:
        """The type of this operator's result."""
        return self.calls.result_dtype(x, self.precision)


@dataclass
class LinearForward(LowPrecisionForward):
    codes: WeightCodes = field(default_factory=WeightCodes)

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.run(input, transposed=False)

    def run(self, x: Tensor, *, transposed: bool) -> Tensor:
        """The layer, with its weight in either order."""
        module: Any = self.module
        return linear(
            x, module.weight, module.bias, self.precision, self.draw(x),
            transposed=transposed, dtype=self.result_dtype(x), codes=self.codes,
        )  # fmt: skip


class TransposedLinearForward(LinearForward):
    """transformers' `Conv1D`: a linear layer whose weight is stored inputs × outputs."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x, transposed=True)


class ProjectionForward(LowPrecisionForward):
    """A projection of a block that `trimtab.tensor_parallel` has divided; it knows its units and takes the product.

    Its result has the type that the model's own precision would give it: ranks sum it, whatever each has lowered.
    """

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = type(self.module).forward(self.module, x, self._multiply)
        return result

    def _multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool, late: Late | None
    ) -> Tensor:
        return linear(x, weight, bias, self.precision, self.draw(x), transposed=transposed, late=late)


class ConvForward(LowPrecisionForward):
    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002
        module: Any = self.module
        x, weight = input, module.weight
        batched = x.dim() == weight.dim()
        x = x if batched else x.unsqueeze(0)
        padding: tuple[int, int] = (0, *_padding(module))[-2:]  # type: ignore[assignment]
        if module.padding_mode != "zeros":
            with no_autocast(x.device.type):  # which would lift it to fp32 on a CPU
                x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
            padding = 0, 0
        elif module.padding == "same":
            twice = module._reversed_padding_repeated_twice  # before and after, the last axis first
            padding = (0, *twice[::2][::-1])[-2:]
            # An even kernel needs one more element after than before. As torch does, no more than that is copied.
            after = [n for at in range(0, len(twice), 2) for n in (0, twice[at + 1] - twice[at])]
            x = F.pad(x, after) if any(after) else x
        one_dimensional = weight.dim() == 3
        if one_dimensional:
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        # A 1-D kernel moves along the last axis; the first has length 1.
        stride, dilation = (1, *module.stride)[-2:], (1, *module.dilation)[-2:]
        geometry = Geometry(stride, padding, dilation, module.groups, x.shape, weight.shape)
        y = conv(x, weight, module.bias, geometry, self.precision, self.draw(x), self.result_dtype(x))
        if one_dimensional or not batched:
            shape = tuple(y.shape if batched else y.shape[1:])
            shape = (*shape[:-2], shape[-1]) if one_dimensional else shape
            # Not a view: autograd forbids to change a view of an autograd function's result in place.
            y = torch.ops.aten._unsafe_view.default(y, shape)
        return y


class EmbeddingForward(LowPrecisionForward):
    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002
        module: Any = self.module
        y = F.embedding(input, module.weight, module.padding_idx)
        return rounded(y, DTYPES[self.precision.forward])


@dataclass
class AttentionForward(LowPrecisionForward):
    """The products of activations inside the forward of any module."""

    own: Callable[..., Any] | None = None
    """The module's forward, if it is not that of its class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.precision.forward == "fp16" and torch.compiler.is_compiling():
            return self._break_graph(*args, **kwargs)  # the scale of its gradient depends on the data
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with HalfProducts(DTYPES[self.precision.forward], self.result_dtype):
            if self.own is not None:
                return self.own(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)

    @_disable_dynamo  # unlike torch.compiler.disable, imports the compiler only when called
    def _break_graph(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


FORWARDS: dict[OperatorKind, type[LowPrecisionForward]] = {
    "linear": LinearForward,
    "conv": ConvForward,
    "embedding": EmbeddingForward,
    "attention": AttentionForward,
}


def operators(model: nn.Module) -> dict[str, OperatorKind]:
    """Every operator of a model by its name; attention (any module, with `ATTENTION`) is not listed."""
    kinds: dict[str, OperatorKind] = {}
    hidden = {
        id(child)
        for module in model.modules()
        # It reads the weights of its projections and never calls them.
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
    }
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and id(module) not in hidden:
            kinds[name] = kind
    return kinds


def refusals(model: nn.Module) -> dict[str, str]:
    """Modules that compute products in a way that no precision can be set for, and why."""
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = f"{name or 'the model'} is a torch.nn.{type(module).__name__}, "
        if isinstance(module, nn.MultiheadAttention):
            reason = kind + "which computes its products in one call that cannot be divided"
            reasons |= dict.fromkeys((name, f"{name}.out_proj", name + ATTENTION), reason)
        elif isinstance(module, nn.modules.conv._ConvTransposeNd):
            reasons[name] = kind + "and transposed convolutions are not supported"
        elif isinstance(module, nn.Conv3d):
            reasons[name] = kind + "and convolutions are supported in one and two dimensions"
        elif isinstance(module, RECURRENT):
            reasons[name] = kind + "which computes all its steps in one call that cannot be divided"
        elif isinstance(module, (nn.Bilinear, nn.EmbeddingBag)):
            reasons[name] = kind + "which is not supported"
        elif isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)) and kind_of(module) is None:
            reasons[name] = (
                f"{name or 'the model'} is of class {type(module).__name__}, {_other_forward(module)}"
            )
    return reasons


def _other_forward(module: nn.Module) -> str:
    """Why the forward of a module that looks like an operator cannot be replaced."""
    if "forward" in module.__dict__:
        return "whose forward was replaced after it was made, so that nobody knows what it computes"
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        return "and its max_norm, sparse and scale_grad_by_freq are not supported"
    return "whose class has a forward of its own, so that nobody knows what it computes"


def unlowered(model: nn.Module) -> set[nn.Module]:
    """Modules that compute products with parameters of their own, and whose precision was not set."""
    kinds = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.modules.conv._ConvNd)
    return {
        module
        for module in model.modules()
        if isinstance(module, kinds) or _is_transposed_linear(module) or is_projection(module)
        if not isinstance(module.__dict__.get("forward"), LowPrecisionForward)
    }


def kind_of(module: nn.Module) -> OperatorKind | None:
    """The kind of operator that a module is; None if its forward cannot be replaced."""
    own = module.__dict__.get("forward")
    if own is not None and not isinstance(own, LowPrecisionForward):
        return None
    if isinstance(module, nn.Linear):
        return "linear" if type(module).forward is nn.Linear.forward else None
    if _is_transposed_linear(module) or is_projection(module):
        return "linear"
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return "conv" if type(module).forward in (nn.Conv1d.forward, nn.Conv2d.forward) else None
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return "embedding" if plain else None
    return None


def install(
    module: nn.Module, kind: OperatorKind, precision: Precision, base: int, calls: CallCounter
) -> None:
    """Make the module compute in the given precision."""
    forward = FORWARDS[kind]
    if kind == "linear" and not isinstance(module, nn.Linear):
        forward = ProjectionForward if is_projection(module) else TransposedLinearForward
    own = module.__dict__.get("forward")
    low = forward(module, precision, base, calls)
    if isinstance(low, AttentionForward):
        low.own = own
    module.__dict__["forward"] = low


def restore(model: nn.Module) -> None:
    """Restore the forward of every module, and remove all hooks."""
    for module in model.modules():
        low = module.__dict__.get("forward")
        if isinstance(low, LowPrecisionForward):
            del module.__dict__["forward"]
        if isinstance(low, AttentionForward) and low.own is not None:
            module.__dict__["forward"] = low.own
    remove_hooks(model)


def is_projection(module: nn.Module) -> bool:
    """Whether it is a projection of a divided block (`trimtab.sharding.projection`): its forward takes the product."""
    return getattr(type(module), "takes_product", False)


def _is_transposed_linear(module: nn.Module) -> bool:
    # Does not import transformers: a model with such a module has imported it.
    transposed = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return (
        transposed is not None
        and isinstance(module, transposed)
        and type(module).forward is transposed.forward
    )


def _padding(module: Any) -> tuple[int, ...]:
    return (0,) * len(module.kernel_size) if isinstance(module.padding, str) else module.padding
