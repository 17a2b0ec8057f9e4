"""Forward and backward passes of a model that leave the model exactly as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from trimtab.errors import TrimtabError
from trimtab.precision.operators import LowPrecisionForward, restore
from trimtab.precision.products import DTYPES
from trimtab.precision_names import ATTENTION
from trimtab.random_bits import stream

Loss = Callable[[Any], torch.Tensor]


class DryRun:
    """A model and the batches to run it on. Inside `with` the model computes in its own precision."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], loss: Loss | None, seed: int) -> None:
        if hasattr(model, "_orig_mod"):
            raise TrimtabError("damage: this model is compiled; pass the model before torch.compile")
        if not batches:
            raise TrimtabError(
                "damage: there are no batches; pass at least one, as the model is called with it"
            )
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise TrimtabError("damage: no parameter of this model needs a gradient")
        self.device = next(iter(self.parameters.values())).device
        if self.device.type == "meta" or any(hasattr(p, "device_mesh") for p in self.parameters.values()):
            raise TrimtabError(
                "damage: not all parameters of this model are on this rank (meta device, or sharded); pass the whole "
                "model before it is sharded"
            )
        self.batches = list(batches)
        self.seed = seed
        self._loss = loss

    def gradient(
        self,
        batch: int,
        *,
        moved: Mapping[str, torch.Tensor] | None = None,
        leaves: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a batch and the gradient by parameter, with the same dropout every time.

        Args:
            moved: values to use instead of the parameters' own.
            leaves: further tensors that need gradients; hooks fill it during forward.
        """
        values = {n: (moved or {}).get(n, p).detach().requires_grad_() for n, p in self.parameters.items()}
        with self._same_random_numbers(batch), self._swapped(values), torch.enable_grad():
            loss = self._forward(self.batches[batch])
            results = torch.autograd.grad(loss, [*values.values(), *leaves], allow_unused=True)
        torch.clear_autocast_cache()
        grads = {
            n: torch.zeros_like(v) if g is None else g
            for (n, v), g in zip(values.items(), results, strict=False)
        }
        return loss.detach(), grads

    def own_precision(self, name: str) -> str:
        """The current precision of an operator: its parameters' dtype, or autocast's."""
        module = self.model.get_submodule(name.removesuffix(ATTENTION))
        dtype = next((p.dtype for p in module.parameters()), torch.float32)
        lowers = torch.is_autocast_enabled(self.device.type) and not isinstance(module, torch.nn.Embedding)
        if dtype == torch.float32 and lowers:
            dtype = torch.get_autocast_dtype(self.device.type)
        return next((n for n, d in DTYPES.items() if d == dtype), "fp32")

    def _forward(self, batch: Any) -> torch.Tensor:
        batch = tree_map(self._here, batch)
        if isinstance(batch, dict):
            result = self.model(**batch)
        else:
            result = self.model(*(batch if isinstance(batch, (tuple, list)) else (batch,)))
        if self._loss is not None:
            result = self._loss(result)
        loss = getattr(result, "loss", result)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TrimtabError(
                f"damage: the model returns {type(result).__name__}, not a scalar loss; pass loss=, which computes "
                "one from it"
            )
        if not loss.requires_grad:
            raise TrimtabError("damage: the loss does not depend on any parameter that needs a gradient")
        return loss.reshape(())

    def _here(self, value: Any) -> Any:
        return value.detach().to(self.device) if isinstance(value, torch.Tensor) else value

    @contextmanager
    def _same_random_numbers(self, batch: int) -> Iterator[None]:
        seed = stream(self.seed, batch, 0, 0) & 0x7FFFFFFF
        kind = self.device.type
        with torch.random.fork_rng(
            [] if kind == "cpu" else [self.device], device_type="cuda" if kind == "cpu" else kind
        ):
            # Not torch.manual_seed, which would seed every device of the process.
            torch.default_generator.manual_seed(seed)
            if kind != "cpu":
                module: Any = torch.get_device_module(kind)
                with module.device(self.device):
                    module.manual_seed(seed)
            yield

    @contextmanager
    def _swapped(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """The model with these parameters and copies of its buffers, also while backward recomputes activations."""
        by_id: dict[int, torch.Tensor] = {id(p): values[n] for n, p in self.parameters.items()}
        by_id |= {id(b): b.clone() for b in self.model.buffers()}
        kept: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for module in self.model.modules():
                both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for held in both:
                    for name, tensor in held.items():
                        if tensor is not None and id(tensor) in by_id:
                            kept.append((held, name, tensor))
            for held, name, tensor in kept:
                held[name] = by_id[id(tensor)]
            yield
        finally:
            for held, name, tensor in kept:
                held[name] = tensor

    def __enter__(self) -> DryRun:
        self._lowered = [
            (m, m.__dict__["forward"])
            for m in self.model.modules()
            if isinstance(m.__dict__.get("forward"), LowPrecisionForward)
        ]
        self._hooks = [
            (hooks, dict(hooks))
            for m in self.model.modules()
            for hooks in (m._forward_pre_hooks, m._forward_hooks, m._forward_hooks_always_called)
        ]
        restore(self.model)
        return self

    def __exit__(self, *error: object) -> None:
        for module, forward in self._lowered:
            module.__dict__["forward"] = forward
        for hooks, before in self._hooks:
            hooks.clear()
            hooks.update(before)
