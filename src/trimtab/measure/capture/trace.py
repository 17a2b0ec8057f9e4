"""Trace a model's forward pass: every kernel, the module that calls it, its tensors, and what autograd saves.

It works below autograd, on real or fake tensors, so it needs no cooperation from the model. Modules that
`trimtab.set_precision` treats as operators, and calls of attention, are one operator each, whatever they call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.measure.capture.call import DTYPES, Call, Meta, meta_of, tensors_in, whole_meta
from trimtab.measure.capture.kinds import kind_of_target
from trimtab.measure.capture.values import run_kernel
from trimtab.precision.half import is_product
from trimtab.precision.operators import LowPrecisionForward, operators
from trimtab.precision_names import ATTENTION
from trimtab.workload.operator import Kind

KEEP_OUTPUT = frozenset(
    {"softmax", "log_softmax", "safe_softmax", "logsumexp", "tanh", "sigmoid", "relu", "exp", "sqrt", "rsqrt"}
    | {"reciprocal", "elu", "threshold", "hardtanh"}
)
"""Operators whose derivative torch computes from their result."""


@dataclass
class _Memory:
    """One storage: its last writer, its original shape and dtype, and the parameter that it is or was cast from."""

    number: int
    meta: Meta
    writer: int = -1
    parameter: str | None = None
    cast_of: int | None = None
    """The storage that it is a copy of, in another dtype."""


class Tracer:
    """Collects `calls` inside `tracing`."""

    def __init__(self, model: nn.Module, parameters: dict[str, torch.Tensor]) -> None:
        self.calls: list[Call] = []
        self._names = {id(module): name for name, module in reversed(list(model.named_modules()))}
        self._kinds = operators(model)
        self._operators = [module for name, module in model.named_modules() if name in self._kinds]
        self._attention_modules = {id(m) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
        self._stack: list[nn.Module] = []
        self._memory: dict[StorageWeakRef, _Memory] = {}
        self._numbers: dict[int, _Memory] = {}
        self._used: dict[str, int] = {}
        self._whole: Call | None = None
        self._whole_index = -1
        self._pending: list[torch.Tensor] = []
        self._function: Callable[..., Any] | None = None
        self._product = False
        self._views = 0
        for name, tensor in parameters.items():
            memory = self._of(tensor)
            memory.parameter = memory.parameter or name

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Inside, everything that runs on this thread is traced."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            for module in self._operators:
                stack.callback(module.register_forward_pre_hook(self._enter_named, with_kwargs=True).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x))
            stack.enter_context(_Functions(self))
            stack.enter_context(_Kernels(self))
            yield
        self._settle()

    # Modules

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._settle()
        self._stack.append(module)
        name = self._names.get(id(module))
        kind = self._kinds.get(name) if name is not None else None
        if name is None or kind is None or self._whole is not None:
            return
        call = self.begin(kind, target=kind, name=name, setting=name)
        for tensor in args:
            self._add_input(call, tensor)
        call.arguments = _module_arguments(module)
        for parameter in module.parameters():
            self._add_input(call, parameter)

    def _enter_named(self, module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """An operator may be given its input by name, which hooks of all modules are not told."""
        if self._whole is not None and self._whole.setting == self._names[id(module)]:
            self._add_input(self._whole, kwargs.get("input"))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._whole is not None and self._whole.setting == self._names.get(id(module)):
            self.end(result)
        self._settle()
        self._stack.pop()

    @property
    def module(self) -> str:
        """The innermost module whose forward is running and which is part of the model."""
        return next((self._names[id(m)] for m in reversed(self._stack) if id(m) in self._names), "")

    # Operators that count as one, whatever runs inside

    def begin(self, kind: Kind, *, target: str, name: str, setting: str | None) -> Call:
        """From here to `end`, kernels belong to this operator."""
        self._settle()
        self._whole = Call(self._unique(name), kind, self.module, target, setting, views=self._views)
        self._whole_index, self._views = len(self.calls), 0
        self.calls.append(self._whole)
        return self._whole

    def end(self, result: Any) -> None:
        call, self._whole = self._whole, None
        assert call is not None
        for tensor in tensors_in(result):
            self._add_output(call, self._whole_index, tensor)
        self._pending.clear()

    # Kernels

    def kernel(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One call below autograd."""
        results = tensors_in(result)
        if not results:
            return
        operands = tensors_in((args, kwargs))
        packet = func._schema.name.split("::")[-1]
        sources = {self._of(tensor).number for tensor in operands}
        mutable = func._schema.is_mutable
        aliases = not mutable and all(self._of(t).number in sources for t in results)
        if aliases or packet == "lift_fresh":
            self._views += 1
            return
        call, index = self._whole, self._whole_index
        if call is None:
            call, index = self._recorded(func, packet, args, kwargs, operands), len(self.calls) - 1
        call.differentiable |= torch.is_grad_enabled() and any(t.requires_grad for t in operands)
        for tensor in results:
            memory = self._of(tensor)
            memory.writer = index
            if packet == "_to_copy":
                memory.cast_of = self._of(operands[0]).number
            if self._whole is None:
                self._add_output(call, index, tensor)

    def _recorded(self, func: Any, packet: str, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> Call:
        """A kernel that is an operator of its own."""
        kind: Kind = "cast" if packet == "_to_copy" else kind_of_target(packet)
        target = "attention" if kind == "attention" else str(func)
        setting = self._setting() if kind in ("attention", "matmul") else None
        name = f"{self.module}/{packet.strip('_')}" if self.module else packet.strip("_")
        call = Call(self._unique(name), kind, self.module, target, setting, views=self._views)
        self._views = 0
        call.arguments = self._arguments(call, func._schema.arguments, args, kwargs)
        call.keeps_output = packet.strip("_") in KEEP_OUTPUT
        self._attribute(call, len(self.calls), operands)
        self.calls.append(call)
        return call

    def _arguments(self, call: Call, schema: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        """Arguments by name; tensors as ``$i`` (the i-th input) or ``%i`` (the i-th parameter)."""
        arguments: dict[str, Any] = {}
        for place, argument in enumerate(schema):
            value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            written = self._written(call, value)
            if written is not None:
                arguments[argument.name] = written
        return arguments

    def _written(self, call: Call, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._add_input(call, value)
        if isinstance(value, (list, tuple)):
            return [self._written(call, v) for v in value]
        if isinstance(value, torch.dtype):
            return DTYPES[value]
        if isinstance(value, float) and not isfinite(value):
            return str(value)  # JSON has no such number
        return value if isinstance(value, (bool, int, float, str)) else None

    # Functions, above autograd

    def function(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of torch's Python API."""
        if self._whole is not None or self._function is not None:
            return func(*args, **kwargs)
        self._settle()
        # Without gradients a model computes constants, such as rotary angles, which nothing should round.
        self._product = torch.is_grad_enabled() and is_product(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(func, args, kwargs)
        self._function = func
        try:
            return func(*args, **kwargs)
        finally:
            self._function, self._product = None, False
            self._settle()

    def _attention(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        self._function = func
        setting = self._setting()
        call = self.begin("attention", target="attention", name=f"{self.module}{ATTENTION}", setting=setting)
        call.arguments = {
            "causal": bool(arguments.get("is_causal", False)),
            "dropout": float(arguments.get("dropout_p", 0.0)),
        }
        for name in names[:4]:
            self._add_input(call, arguments.get(name))
        try:
            result = func(*args, **kwargs)
            self.end(result)
            return result
        finally:
            self._function, self._whole, self._product = None, None, False

    def _setting(self) -> str | None:
        """The name that sets the precision of the current product: its innermost module's, if it can be set there."""
        return self.module + ATTENTION if self.module and self._product else None

    # What autograd saves

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._whole is not None:
            self._keep(self._whole, self._whole_index, tensor)
        else:
            self._pending.append(tensor)
        return tensor

    def _attribute(self, call: Call, index: int, operands: list[torch.Tensor]) -> None:
        """Assign tensors saved between two kernels: inputs are saved before their kernel runs, outputs after it."""
        before = self.calls[-1] if self.calls else None
        own = {self._of(tensor).number for tensor in operands}
        results = set(before.output_storages) if before is not None and before.keeps_output else set()
        for tensor in self._pending:
            number = self._of(tensor).number
            if before is not None and (number not in own or number in results):
                results.discard(number)  # the second time, it is the current kernel's input
                self._keep(before, index - 1, tensor)
            else:
                self._keep(call, index, tensor)
        self._pending.clear()

    def _settle(self) -> None:
        """At the end of a call, tensors that are still pending were saved by its last kernel."""
        if self._pending and self.calls:
            for tensor in self._pending:
                self._keep(self.calls[-1], len(self.calls) - 1, tensor)
        self._pending.clear()

    def _keep(self, call: Call, index: int, tensor: torch.Tensor) -> None:
        memory = self._of(tensor)
        if memory.parameter is not None:
            return
        origin = self._numbers[memory.cast_of] if memory.cast_of is not None else None
        if origin is not None and origin.parameter is not None:
            role = "weight"
        elif memory.number in call.input_storages or (
            origin is not None and memory.writer == index and origin.number in call.input_storages
        ):
            role = "input"
        else:
            # Outputs are distinguished later, once they are known.
            role = "other"
        call.saved[memory.number] = (role, memory.meta)

    # Tensors and their memory

    def _of(self, tensor: torch.Tensor) -> _Memory:
        key = StorageWeakRef(tensor.untyped_storage())
        if key not in self._memory:
            self._memory[key] = _Memory(len(self._memory), whole_meta(tensor))
            self._numbers[len(self._numbers)] = self._memory[key]
        return self._memory[key]

    def _add_input(self, call: Call, tensor: Any) -> str | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        memory = self._of(tensor)
        if memory.parameter is not None:
            call.parameters.append(memory.parameter)
            call.parameter_tensors.append(meta_of(tensor))
            return f"%{len(call.parameters) - 1}"
        call.inputs.append(memory.writer)
        call.input_tensors.append(meta_of(tensor))
        call.input_storages.append(memory.number)
        return f"${len(call.inputs) - 1}"

    def _add_output(self, call: Call, index: int, tensor: torch.Tensor) -> None:
        memory = self._of(tensor)
        memory.writer = index
        call.outputs.append(meta_of(tensor))
        call.output_storages.append(memory.number)

    def _unique(self, name: str) -> str:
        count = self._used.get(name, 0)
        self._used[name] = count + 1
        return name if not count else f"{name}.{count}"


class _Functions(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracer.function(func, args, kwargs or {})


class _Kernels(TorchDispatchMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = run_kernel(func, args, kwargs)
        self.tracer.kernel(func, args, kwargs, result)
        return result


def _module_arguments(module: Any) -> dict[str, Any]:
    own = module.__dict__.get("forward")
    assert own is None or isinstance(own, LowPrecisionForward)
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        padding = module.padding if isinstance(module.padding, str) else list(module.padding)
        return {
            "stride": list(module.stride),
            "padding": padding,
            "dilation": list(module.dilation),
            "groups": module.groups,
        }
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        return {"turned": True}
    return {}
