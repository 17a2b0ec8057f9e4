"""One training step of a running job, as the autopilot needs it: what the model was called with, and what came back.

A script computes its loss where nobody else can call it. Its gradient with respect to the model's output is enough:
Σ output · gradient has the same gradients of all parameters, so it stands for the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.control.autopilot.lightning_step import called_method
from trimtab.errors import TrimtabError
from trimtab.models.spec import ModelSpec, resized
from trimtab.precision.products import DTYPES

MOST_GRADIENT_BYTES = 64 << 20
"""Rows of a large output's gradient beyond this are left out; the first ones are repeated for them."""


LENGTHS = 1.25
"""Samples whose sizes differ by at most this factor are alike: lengths of texts vary from batch to batch."""


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """What distinguishes steps of one model: a plan is valid for those of its kind."""

    autocast: str | None
    elements: tuple[int, ...]
    """Of a sample, in each argument."""

    def like(self, other: StepKind) -> bool:
        """Whether a plan for one fits the other."""
        if self.autocast != other.autocast or len(self.elements) != len(other.elements):
            return False
        pairs = zip(self.elements, other.elements, strict=True)
        return all(max(pair) <= LENGTHS * min(pair) for pair in pairs)


@dataclass(eq=False)
class ObservedStep:
    """The first forward and backward pass of a step."""

    batch: dict[str, Any]
    """The model's arguments by name."""

    autocast: str | None
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """By position among the tensors of the output: the gradient of the loss."""

    followed: bool = False
    """Whether its output was seen; a step may have several forward passes."""

    @classmethod
    def of_call(cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ObservedStep:
        """Before a forward pass; tensors are kept as they are, without their graph.

        Raises:
            TrimtabError: the arguments cannot be given by name, or the call cannot be repeated.
        """
        called = called_method(model)
        signature = inspect.signature(called)
        by_position = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
        bound = signature.bind(*args, **kwargs)
        batch: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind in by_position:
                raise TrimtabError(f"{type(model).__name__}.{called.__name__} takes {name} by position only")
            batch |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        device = next((p.device.type for p in model.parameters()), "cpu")
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        halves = {known: name for name, known in DTYPES.items()}
        return cls(batch=tree_map(_detached, batch), autocast=None if dtype is None else halves[dtype])

    @property
    def samples(self) -> int:
        """Rows of the batch: of its first tensor with an axis."""
        for tensor in tree_leaves(self.batch):
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                return len(tensor)
        raise TrimtabError("the model is called without a tensor whose axis 0 could be the batch")

    @property
    def shapes(self) -> list[Any]:
        """The same on ranks whose steps compute alike."""
        leaves = [self.batch[name] for name in sorted(self.batch)]
        return [tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in tree_leaves(leaves)]

    @property
    def kind(self) -> StepKind:
        """What a sample of it costs, besides its model."""
        elements = [0 if shape is None else prod(shape[1:]) for shape in self.shapes]
        return StepKind(autocast=self.autocast, elements=tuple(elements))

    def follow_output(self, output: Any) -> None:
        """After the forward pass: keep the gradient of each tensor when the backward pass has it."""
        self.followed = True
        for position, tensor in enumerate(_differentiable(output)):

            def keep(gradient: torch.Tensor | None, position: int = position) -> None:
                if gradient is None:
                    return  # of an output that the loss does not use
                rows = max(1, MOST_GRADIENT_BYTES * len(gradient) // gradient.nbytes) if gradient.dim() else 1
                few = gradient.dim() and rows < len(gradient)
                self.gradients.setdefault(position, (gradient[:rows] if few else gradient).detach().clone())

            tensor.register_hook(keep)

    def to(self, device: torch.device) -> None:
        """Move everything there."""

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, torch.Tensor) else value

        self.batch, self.gradients = tree_map(moved, self.batch), tree_map(moved, self.gradients)

    def loss_of(self, output: Any) -> torch.Tensor:
        """A scalar with the gradient of the script's loss."""
        terms = []
        for position, tensor in enumerate(_differentiable(output)):
            gradient = self.gradients.get(position)
            if gradient is None:
                continue
            if gradient.shape != tensor.shape:
                if not tensor.dim() or gradient.shape[1:] != tensor.shape[1:]:
                    raise TrimtabError(
                        f"an output of shape {tuple(gradient.shape)} became {tuple(tensor.shape)} with another batch"
                    )
                gradient = gradient[torch.arange(len(tensor), device=tensor.device) % len(gradient)]
            terms.append((tensor.float() * gradient.float()).sum())
        if not terms:
            raise TrimtabError("no output of the model had a gradient in the observed step")
        return torch.stack(terms).sum()


@dataclass(frozen=True, kw_only=True)
class JobSpec(ModelSpec):
    """A copy of the job's model, with the batch and the loss of an observed step."""

    step: ObservedStep

    def loss_of(self, output: Any) -> torch.Tensor:
        return self.step.loss_of(output)

    def batch_of(self, samples: int) -> Any:
        return resized(self.step.batch, samples)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _differentiable(output: Any) -> list[torch.Tensor]:
    """The tensors of an output that a loss can depend on, in order."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
