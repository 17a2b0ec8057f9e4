"""Record what a model's operators compute in one step: operands, results and their gradients, with hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from trimtab.precision.half import is_product
from trimtab.precision.operators import operators
from trimtab.precision_names import ATTENTION, OperatorKind


@dataclass
class OperatorCall:
    """One call of an operator."""

    name: str
    kind: OperatorKind
    module: nn.Module | None
    """None for products of activations."""

    operands: list[torch.Tensor]
    """The input of a module; all operands of a product of activations."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    result: torch.Tensor
    operand_grads: list[torch.Tensor | None]
    """Through this call alone, even if the operands have other uses."""

    result_grad: torch.Tensor | None = None
    wanted: list[bool] = field(default_factory=list)
    """Whether the operand also has a gradient without the recorder."""


class Recorder:
    """Inside `with`, operator calls of the model's forward passes are recorded in `calls`.

    Args:
        every: also compute gradients that training does not need, such as that of the first layer's input. Pass
            `leaves`, the graph's leaves for them, to autograd.
        only: names of the operators to record; by default all of them.
        limit: bytes that are recorded at most, or else one operator. A large model is recorded in several passes.
        products: whether products of activations are recorded, too: then every function of torch is intercepted.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: bool = False,
        only: Collection[str] | None = None,
        limit: float = math.inf,
        products: bool = True,
    ) -> None:
        self.calls: list[OperatorCall] = []
        self.names: list[str] = []
        """Of all calls, recorded or not."""

        self.total_bytes = 0
        """Of all calls, recorded or not: their values and gradients."""

        self.recorded: set[str] = set()
        """Names of the operators of which all calls were recorded."""

        self._only, self._limit, self._products = only, limit, products
        self._recorded_bytes = 0
        self.leaves: list[torch.Tensor] = []
        self._model = model
        self._every = every
        self._modules: list[str] = []
        self._inside: list[tuple[torch.Tensor, bool]] = []
        self._running = False
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        kinds = operators(self._model)
        for name, module in self._model.named_modules():
            # Hooks of the modules, not global ones: another model may run at the same time.
            if name in kinds:
                self._hook(module, self._enter_operator, partial(self._leave_operator, name, kinds[name]))
            else:
                self._hook(module, partial(self._enter_module, name), self._leave_module)
        if self._products:
            self._stack.enter_context(_Products(self))
        return self

    def _hook(self, module: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        before = module.register_forward_pre_hook(enter, with_kwargs=True)
        after = module.register_forward_hook(leave, with_kwargs=True, always_call=True)
        self._stack.callback(before.remove)
        self._stack.callback(after.remove)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def finished(self) -> list[OperatorCall]:
        """The calls that a gradient reached."""
        return [call for call in self.calls if call.result_grad is not None]

    def product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A product of activations inside a module that has a name."""
        if not (self._modules and self._modules[-1] and torch.is_grad_enabled()):
            return func(*args, **kwargs)
        operands: list[tuple[torch.Tensor, bool]] = []

        def enter(value: Any) -> Any:
            if not _floating(value) or value is mask:
                return value
            operands.append(self._entered(value))
            return operands[-1][0]

        attention = func is F.scaled_dot_product_attention
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None) if attention else None
        result = func(*tree_map(enter, args), **tree_map(enter, kwargs))
        return self._add(self._modules[-1] + ATTENTION, "attention", None, operands, result)

    def _enter_module(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running = self._running or module is self._model
        self._modules.append(name)

    def _leave_module(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self._modules.pop()
        self._running = self._running and module is not self._model

    def _enter_operator(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._running = self._running or module is self._model
        self._modules.append("")
        key = next((k for k in ("input", "x") if k in kwargs), None)
        x = args[0] if args else kwargs.get(key)
        if not isinstance(x, torch.Tensor) or not torch.is_grad_enabled():
            return None
        entered = self._entered(x) if _floating(x) else (x, False)
        self._inside.append(entered)
        return ((entered[0], *args[1:]), kwargs) if args else (args, {**kwargs, key: entered[0]})

    def _leave_operator(
        self, name: str, kind: OperatorKind, module: nn.Module, args: Any, kwargs: Any, result: Any
    ) -> Any:
        self._modules.pop()
        if self._inside:
            entered = self._inside.pop()
            if isinstance(result, torch.Tensor):
                result = self._add(name, kind, module, [entered], result)
        self._running = self._running and module is not self._model
        return result

    def _entered(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """An alias of x, so that its gradient is that of one call; and whether x needs a gradient anyway."""
        if x.requires_grad:
            return x.view_as(x), True
        if not self._every:
            return x, False
        return self._leaf(x), False

    def _leaf(self, x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        if self._running:
            self.leaves.append(leaf)
        return leaf

    def _add(
        self,
        name: str,
        kind: OperatorKind,
        module: Any,
        operands: list[tuple[torch.Tensor, bool]],
        result: torch.Tensor,
    ) -> torch.Tensor:
        """Record a call; returns the result that the model continues with."""
        if not result.requires_grad:
            if not (self._every and torch.is_grad_enabled()):
                return result
            result = self._leaf(result)  # nothing before it is trained, but its errors still reach what is
        if self._running and not self._records(name, [*(alias for alias, _ in operands), result]):
            return result if result.grad_fn is not None else result.clone()
        # The model continues with a copy: an in-place operation (a ReLU) would lose the original's gradient.
        onward = result.clone()
        if not self._running:
            return onward  # in backward, activation checkpointing repeats recorded calls
        bias = None if module is None else getattr(module, "bias", None)
        call = OperatorCall(
            name=name,
            kind=kind,
            module=module,
            operands=[operand.detach() for operand, _ in operands],
            weight=None if module is None else module.weight.detach(),
            bias=None if bias is None else bias.detach(),
            result=result.detach(),
            operand_grads=[None] * len(operands),
            wanted=[wanted for _, wanted in operands],
        )
        self.calls.append(call)
        result.register_hook(partial(_keep_result, call))
        for place, (alias, _) in enumerate(operands):
            if alias.requires_grad:
                alias.register_hook(partial(_keep_operand, call, place))
        return onward

    def _records(self, name: str, tensors: list[torch.Tensor]) -> bool:
        """Whether this call is recorded: all calls of an operator are, or none."""
        size = sum(2 * tensor.numel() * tensor.element_size() for tensor in tensors)
        self.names.append(name)
        self.total_bytes += size
        if name not in self.recorded:
            full = self._recorded_bytes and self._recorded_bytes + size > self._limit
            if full or (self._only is not None and name not in self._only):
                return False
            self.recorded.add(name)
        self._recorded_bytes += size
        return True


class _Products(TorchFunctionMode):
    """Intercepts the products that `HalfProducts` would lower."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_product(func, args, kwargs):
            return self.recorder.product(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _keep_result(call: OperatorCall, grad: torch.Tensor) -> None:
    call.result_grad = grad.detach()


def _keep_operand(call: OperatorCall, place: int, grad: torch.Tensor) -> None:
    call.operand_grads[place] = grad.detach()
