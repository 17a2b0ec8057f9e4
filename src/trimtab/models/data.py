"""Data for models by name: text, classes and noise in the place of a sample's zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trimtab.models.spec import ModelSpec


def filled(spec: ModelSpec, step: int) -> tuple[Any, ...]:
    """The batch of a model by name with values in it; every step has others."""
    from trimtab.models.gpt import batch_of, text_bytes

    generator = torch.Generator().manual_seed(step)

    def values(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            found = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        elif x.dim() > 1:
            found = batch_of(text_bytes(1 << 20), step, x.shape[0], x.shape[1] - 1)
        else:
            found = torch.arange(x.shape[0]) % 2
        return found.to(x.device)

    return tuple(values(x) for x in spec.batch)
