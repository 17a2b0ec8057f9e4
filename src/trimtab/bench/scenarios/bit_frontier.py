"""What choosing bits (and blocks, and shorter ranges) for every layer can save, on gradients of three real models.

No ranks and no training with compressed gradients: tables of every layer's error are made with the real codec from the
gradients of a GPT, a ResNet and a Llama that have trained for a while, and the exact policy chooses from them. Needs
`transformers` and `scikit-learn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import Packing, Segment
from trimtab.models import tasks
from trimtab.models.tasks import Task
from trimtab.planning.compression.family import BITS, FAMILIES, Family
from trimtab.planning.compression.layer_options import ALL_BITS, LayerOptions, total_error
from trimtab.planning.compression.policies import choose_bits
from trimtab.random_bits import OWN, name_hash, stream
from trimtab.wire_format import MIN_NUMEL, encoded_bytes

MODELS = ("gpt", "resnet", "llama")
LEARNED = 40
"""Steps before the error tables: the first gradients of a model are unlike all later ones."""

BLOCKS = (64, 128, 256, 512, 1024)
"""Blocks that a layer may choose from; uniform bits are in the last."""

MEMORY = 0.1
"""Weight of the newest gradient in the running mean that the tables are made of."""


def frontier() -> list[dict[str, Any]]:
    """The rows of every model."""
    rows = []
    for model in MODELS:
        source = gradients_of(model)
        for _ in source.steps(LEARNED):
            pass
        rows += frontier_rows(model, source.mean)
    return rows


class Gradients:
    """A task trained on one process, step by step; its compressible gradients, and their running mean."""

    def __init__(self, task: Task, lr: float) -> None:
        self._task, self._model = task, task.model
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=lr, momentum=0.9)
        self._step = 0
        self.mean: dict[str, torch.Tensor] = {}

    def steps(self, count: int) -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(count):
            self._optimizer.zero_grad()
            self._model(*self._task.batch(step=self._step)).backward()
            now = {
                name: parameter.grad.clone()
                for name, parameter in self._model.named_parameters()
                if parameter.grad is not None and parameter.dim() > 1 and parameter.numel() >= MIN_NUMEL
            }
            for name, gradient in now.items():
                self.mean[name] = torch.lerp(self.mean.get(name, gradient), gradient, MEMORY)
            self._optimizer.step()
            self._step += 1
            yield now


def frontier_rows(model: str, gradients: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The fewest bytes at the error of uniform 4 bits: choosing bits, blocks too, and with short ranges."""
    wide = BLOCKS[-1]
    choices = {
        "dynamic": [(bits, wide, False) for bits in ALL_BITS],
        "dynamic, bits and blocks": [(bits, block, False) for bits in ALL_BITS for block in BLOCKS],
        "dynamic, bits and blocks, 16-bit ranges": [
            (bits, block, True) for bits in ALL_BITS for block in BLOCKS
        ],
    }
    every = list(dict.fromkeys(choice for some in choices.values() for choice in some))
    decoded = {
        (name, choice): rounded(name, gradient, *choice)
        for name, gradient in gradients.items()
        for choice in every
    }
    reference = (4, wide, False)
    budget = total_error(float((decoded[name, reference] - g).norm()) for name, g in gradients.items())
    bytes4 = sum(_bytes(gradient.numel(), *reference) for gradient in gradients.values())
    rows = []
    for method, some in choices.items():
        layers = [
            LayerOptions(
                name=name,
                numel=gradient.numel(),
                norm=float(gradient.norm()),
                options=tuple(every.index(choice) for choice in some),
                errors=tuple(float((decoded[name, choice] - gradient).norm()) for choice in some),
                costs=tuple(float(_bytes(gradient.numel(), *choice)) for choice in some),
            )
            for name, gradient in gradients.items()
        ]
        chosen = choose_bits(layers, budget=budget)
        picked = [(layer.numel, *every[chosen.options[layer.name]]) for layer in layers]
        values = sum(numel for numel, *_ in picked)
        rows.append(
            {
                "part": "frontier",
                "model": model,
                "method": method,
                "bytes_over_uniform4": chosen.cost / bytes4,
                "error_over_uniform4": chosen.error / budget,
                "mean_bits": sum(numel * bits for numel, bits, *_ in picked) / values,
                "values_in_short_blocks": sum(n for n, _, block, _ in picked if block < wide) / values,
            }
        )
    return rows


def _bytes(numel: int, bits: int, block: int, short_ranges: bool) -> int:
    return encoded_bytes(numel, bits, block) - (4 * -(-numel // block) if short_ranges else 0)


def rounded(name: str, values: torch.Tensor, bits: int, block: int, short_ranges: bool) -> torch.Tensor:
    """What arrives of values that are rounded stochastically."""
    if not short_ranges:
        return sent(replace(FAMILIES[BITS], block=block), bits, name, values, 0)
    generator = torch.Generator().manual_seed(name_hash(name) % (1 << 31))
    flat, levels = values.reshape(-1), (1 << bits) - 1
    padded = torch.cat([flat, flat[-1:].expand(-flat.numel() % block)]).view(-1, block)
    # Rounded outward, so that every value stays inside the range.
    low = _bf16(padded.amin(1, keepdim=True), down=True)
    unit = _bf16((padded.amax(1, keepdim=True) - low) / levels, down=False)
    steps = torch.where(unit > 0, (padded - low) / unit, torch.zeros(()))
    codes = (steps + torch.rand(steps.shape, generator=generator)).floor().clamp(0, levels)
    return (low + codes * unit).view(-1)[: flat.numel()].view_as(values)


def _bf16(values: torch.Tensor, *, down: bool) -> torch.Tensor:
    """The next value of 16 bits that is not above, or not below."""
    near = values.to(torch.bfloat16)
    beyond = near.float() > values if down else near.float() < values
    towards = torch.full_like(near, float("-inf") if down else float("inf"))
    return torch.where(beyond, torch.nextafter(near, towards), near).float()


def sent(family: Family, bits: int, name: str, values: torch.Tensor, step: int) -> torch.Tensor:
    """The values that arrive when the family sends these."""
    kernels = kernels_for(values.device)
    segment = Segment(
        offset=0, numel=values.numel(), bits=bits, block=family.block, name_hash=name_hash(name)
    )
    packing = Packing(segments=(segment,), dtype=values.dtype)
    payload = torch.empty(packing.nbytes, dtype=torch.uint8)
    key = stream(0, step, 0, OWN)
    kernels.encode(values.reshape(-1), packing, payload, stream=key, stochastic=family.stochastic)
    arrived = torch.empty(values.numel(), dtype=values.dtype)
    kernels.decode(payload, packing, arrived)
    return arrived.view_as(values)


def gradients_of(model: str) -> Gradients:
    """One of `MODELS` and its data, untrained."""
    if model == "gpt":
        return Gradients(tasks.gpt(width=96, layers=2, heads=4, context=64, samples=8), lr=0.1)
    if model == "llama":
        return Gradients(tasks.llama(8), lr=0.1)
    return Gradients(tasks.resnet(16), lr=0.02)
