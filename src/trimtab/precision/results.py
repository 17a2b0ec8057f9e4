"""What a lowered operator hands on: bf16, as long as its model's forward runs.

A model in fp32 without autocast would lift the result of every lowered operator to fp32 and keep it for backward in
that type. So operators in bf16, int8 and fp8 hand on bf16 instead, and whatever was not lowered follows torch's rules
for mixed types: those of autocast, with fp32 in the place of its half type. Products and losses (on a GPU norms and
softmax too) lift what arrives to fp32, element-wise operations take the type of their inputs, different types are
promoted. The model's outputs are lifted to fp32.

Where everything was lowered ("*"), the rules are those of autocast to bf16 itself: products of activations, as in
attention, take bf16 too. Modules that keep their precision then compute by the rules above.

fp16 is not handed on: gradients would then travel in fp16, where they underflow without a loss scale.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.precision.devices import autocasts, offers
from trimtab.precision.lift import lifted
from trimtab.precision_names import LOW, Precision

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
"""Modules that autocast would lower to its half type on a GPU, whatever that is: they run without it, in fp32."""

ISOLATED = (*RECURRENT, nn.AdaptiveLogSoftmaxWithLoss, nn.Bilinear)
"""Modules that run without mixed types: recurrent ones, one that writes fp32 into a tensor of its input's type, and one
that wants both inputs and its weight in one type."""


@dataclass
class CallCounter:
    """How often a model was called: the step of every random stream. It is kept on the model's device."""

    count: Tensor
    hands_on: str | None = None
    """The type of device on which operators handed on bf16 in the last call: a recomputation in backward repeats it."""

    def on(self, device: torch.device) -> Tensor:
        """The counter, moved to the device if the model has moved."""
        if self.count.is_meta and device.type != "meta":
            self.count = torch.zeros_like(self.count, device=device)
        elif self.count.device != device:
            self.count = self.count.to(device)
        return self.count

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Count, as a forward pre-hook of the model. Not in place: backward needs the value of its forward pass.

        Activation checkpointing may repeat the whole model in backward, with the bits of its forward pass.
        """
        if torch.compiler.is_compiling() or not _in_backward():
            self.count = self.count + 1

    def result_dtype(self, x: Tensor, precision: Precision) -> torch.dtype:
        """The type of an operator's result: autocast's half type if that is enabled; else the input's, or bf16."""
        kind = x.device.type
        if not torch.compiler.is_compiling() and self.mixes(kind):
            return torch.bfloat16 if precision.forward in LOW else torch.float32
        return torch.get_autocast_dtype(kind) if autocasts(kind) else x.dtype

    def mixes(self, kind: str) -> bool:
        """Whether operators on such a device hand on bf16 now: in the model's forward, or where it is repeated."""
        states = _entered.__dict__.get("states")
        if states and isinstance(states[-1][0], ISOLATED):
            return False
        return _mixing(kind) or (self.hands_on == kind and _in_backward())


@dataclass
class MixedTypes:
    """Hooks around a module's forward, inside which lowered operators hand on bf16."""

    calls: CallCounter
    is_model: bool
    """The model itself. A module inside it needs the hooks where activation checkpointing repeats it in backward, also
    one without lowered operators: torch restores autocast's type there, but on a CPU only if that is a half type."""

    products: torch.dtype
    """In which products of activations are computed."""

    removed: bool = False
    """A hook that another removes in the same forward is still called."""

    def before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self.removed:
            return  # the compiler decides by itself what it keeps for backward
        if not self.is_model:
            repeated = self.calls.hands_on
            if repeated is not None and _in_backward() and not autocasts(repeated):
                _enter(module, repeated, enabled=True, dtype=self.products)
            return
        first = _first_parameter(module)
        if first is None:  # a replica of nn.DataParallel
            return
        kind = first.device.type
        # A model that calls itself is entered once more, because each call will leave.
        enters = _inside(module) or (not autocasts(kind) and _takes_bf16(module, first))
        self.calls.hands_on = kind if enters or _mixing(kind) else None
        if enters:
            _enter(module, kind, enabled=True, dtype=self.products)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not _leave(module) or not self.is_model:
            return None
        return lifted(output)


@dataclass
class Unlowered:
    """Hooks around a module that keeps its precision where everything else is lowered."""

    calls: CallCounter
    removed: bool = False

    def before(self, module: nn.Module, args: Any) -> None:
        first = _first_parameter(module)
        if self.removed or first is None or torch.compiler.is_compiling():
            return
        if self.calls.mixes(kind := first.device.type):
            _enter(module, kind, enabled=True, dtype=torch.float32)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            _leave(module)


@dataclass
class Isolated:
    """Hooks around a module that must neither be lowered nor see bf16."""

    calls: CallCounter
    removed: bool = False

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        first = _first_parameter(module)
        if self.removed or torch.compiler.is_compiling():
            return None
        if first is None or not self.calls.mixes(kind := first.device.type):
            return None
        _enter(module, kind, enabled=False, dtype=torch.get_autocast_dtype(kind))
        return lifted(args), lifted(kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            _leave(module)


def hand_on_low_results(
    root: nn.Module, calls: CallCounter, lowered: set[nn.Module], unlowered: set[nn.Module] | None = None
) -> None:
    """Let the operators of a model hand on bf16 while its forward runs, if it is a model in fp32.

    Args:
        unlowered: if products of activations are lowered too, the modules whose products keep their precision.
    """
    alone = isinstance(root, ISOLATED) or (root in lowered and next(root.children(), None) is None)
    if alone or any(p.is_floating_point() and p.dtype != torch.float32 for p in root.parameters()):
        return
    products = torch.float32 if unlowered is None else torch.bfloat16
    restores_no_type = products == torch.float32 and calls.count.device.type != "cuda"
    leaves = {module for module in lowered if next(module.children(), None) is None}
    isolated = {
        child for module in root.modules() if isinstance(module, ISOLATED) for child in module.modules()
    }
    for module in root.modules():
        hooks: MixedTypes | Unlowered
        if module in isolated:
            if isinstance(module, ISOLATED):
                without = Isolated(calls)
                module.register_forward_pre_hook(without.before, with_kwargs=True)
                module.register_forward_hook(without.after, always_call=True)
            continue
        if unlowered is not None and module in unlowered:
            hooks = Unlowered(calls)
        elif module is root or (
            module not in leaves and (restores_no_type or not lowered.isdisjoint(module.modules()))
        ):
            hooks = MixedTypes(calls, is_model=module is root, products=products)
        else:
            continue
        module.register_forward_pre_hook(hooks.before)
        # Before hooks that were there already, which see what they would see without these.
        module.register_forward_hook(hooks.after, always_call=True, prepend=True)


def remove_hooks(model: nn.Module) -> None:
    """Remove what `hand_on_low_results` registered, and stop counting calls.

    Inside the model's forward (where a plan is switched) this also ends what its hooks have begun: nothing else would.
    """
    states = _entered.__dict__.get("states", [])
    inside = set(model.modules())
    while states and states[-1][0] in inside:
        _leave(states[-1][0])
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                own = getattr(hook, "__self__", hook)
                if isinstance(own, (CallCounter, MixedTypes, Unlowered, Isolated)):
                    if not isinstance(own, CallCounter):
                        own.removed = True
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


_entered = threading.local()


def _enter(module: nn.Module, kind: str, *, enabled: bool, dtype: torch.dtype) -> None:
    if kind == "cpu":
        # Activation checkpointing restores the type with torch.autocast, which accepts fp32 on a GPU only.
        warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype is not supported")
    before = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    _entered.__dict__.setdefault("states", []).append((module, before))
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_enabled(kind, enabled)
    torch.autocast_increment_nesting()


def _leave(module: nn.Module) -> bool:
    """Restore the state from before the module's forward; False if it was not changed."""
    states = _entered.__dict__.get("states")
    if not states or states[-1][0] is not module:
        return False
    kind, enabled, dtype = states.pop()[1]
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()  # of weights that were cast, which will change
    return True


def _mixing(kind: str) -> bool:
    """Whether this thread is inside the forward of a model whose operators hand on bf16."""
    states = _entered.__dict__.get("states")
    return bool(states and states[-1][1][0] == kind and torch.is_autocast_enabled(kind))


def _inside(module: nn.Module) -> bool:
    """Whether this thread is inside a forward of this module that its hooks have entered last."""
    states = _entered.__dict__.get("states")
    return bool(states and states[-1][0] is module)


def _takes_bf16(model: Any, parameter: Tensor) -> bool:
    """Whether a device computes in bf16, the model is in fp32, and FSDP2 does not decide about its types."""
    if parameter.is_floating_point() and parameter.dtype != torch.float32:
        return False  # it was converted after its precision was set
    if hasattr(model, "_get_fsdp_state"):
        policy = getattr(model._get_fsdp_state(), "_mp_policy", None)
        if getattr(policy, "param_dtype", None) not in (None, torch.float32):
            return False
    device = parameter.device
    return device.type in ("cpu", "cuda") and "bf16" in offers(device)["linear"]


def _first_parameter(module: nn.Module) -> nn.Parameter | None:
    """As `next(module.parameters())`, without its walk through the whole model."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        if child is not None and (parameter := _first_parameter(child)) is not None:
            return parameter
    return None


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
