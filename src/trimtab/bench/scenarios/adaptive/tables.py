"""Error tables of real gradients, and what policies and families make of them. One process, no ranks."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from trimtab.codec import ErrorFeedback
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import Packing, Segment
from trimtab.planning.compression.bit_planner import LEAST_BITS
from trimtab.planning.compression.family import BITS, BITS_FEEDBACK, FAMILIES, Family
from trimtab.planning.compression.layer_options import (
    ALL_BITS,
    LayerOptions,
    total_error,
    uniform_cost,
    uniform_error,
)
from trimtab.planning.compression.policies import POLICIES, choose_bits
from trimtab.random_bits import OWN, name_hash, stream
from trimtab.wire_format import MIN_NUMEL, encoded_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trimtab.bench.scenarios.adaptive.tasks import Task

SOLVES = 5
MEMORY = 0.1
"""Weight of the newest gradient in the running mean that the tables are made of."""


class Gradients:
    """A task trained on one process, step by step; its compressible gradients, and their running mean."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        self._task = task
        self._model = task.build()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=task.lr, momentum=0.9)
        self._step = 0
        self.mean: dict[str, torch.Tensor] = {}

    def steps(self, count: int) -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(count):
            self._optimizer.zero_grad()
            self._model(*self._task.inputs(0, self._step, 0)).backward()
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


def error_table(
    gradients: Mapping[str, torch.Tensor], family: Family = FAMILIES[BITS], *, least: int = 1
) -> list[LayerOptions]:
    """Every layer's error and bytes at each number of bits from `least` up, made with the family's codec."""
    layers = []
    for name, gradient in gradients.items():
        options = tuple(bits for bits in ALL_BITS if bits >= least)
        decoded = [_through(family, bits, name, gradient, 0) for bits in options]
        layers.append(
            LayerOptions(
                name=name,
                numel=gradient.numel(),
                norm=float(gradient.norm()),
                options=options,
                errors=tuple(float((values - gradient).norm()) for values in decoded),
                costs=tuple(float(encoded_bytes(gradient.numel(), bits)) for bits in options),
            )
        )
    return layers


def policy_rows(model: str, layers: Sequence[LayerOptions]) -> list[dict[str, Any]]:
    """Every policy at the error of uniform 4 bits: what it saves, how long it takes, how far from exact it is."""
    budget, bytes4 = uniform_error(layers, 4), uniform_cost(layers, 4)
    exact = choose_bits(layers, budget=budget)
    rows = []
    for policy in POLICIES:
        taken = []
        for _ in range(SOLVES):
            start = time.perf_counter()
            found = choose_bits(layers, budget=budget, policy=policy)
            taken.append(time.perf_counter() - start)
        rows.append(
            {
                "part": "policy",
                "model": model,
                "method": policy,
                "bytes_over_uniform4": found.cost / bytes4,
                "error_over_uniform4": found.error / budget,
                "solve_ms": median(taken) * 1e3,
                "gap_to_exact": found.cost / exact.cost - 1,
            }
        )
    return rows


def many_layers(layers: Sequence[LayerOptions], count: int = 500) -> list[LayerOptions]:
    """As many layers, made of real ones over and over, each time with gradients of another size."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(count, generator=generator).exp().tolist()
    made = []
    for index, scale in enumerate(scales):
        one = layers[index % len(layers)]
        made.append(
            LayerOptions(
                name=f"{index}",
                numel=one.numel,
                norm=one.norm * scale,
                options=one.options,
                errors=tuple(error * scale for error in one.errors),
                costs=one.costs,
            )
        )
    return made


class Plan:
    """Bits for every layer as one family sends them, and the errors of its steps added up."""

    def __init__(self, bits: Mapping[str, int], family: Family) -> None:
        self.bits, self._family = bits, family
        self._memory = ErrorFeedback() if family.error_feedback else None
        self._added: dict[str, torch.Tensor] = {}

    def send(self, gradients: Mapping[str, torch.Tensor], step: int) -> None:
        for name, gradient in gradients.items():
            meant = gradient.clone()
            if self._memory is not None:
                self._memory.restore(name, meant)
            sent = _through(self._family, self.bits[name], name, meant, step)
            if self._memory is not None:
                self._memory.keep(name, meant, sent)
            self._added[name] = self._added.get(name, torch.zeros_like(gradient)) + sent - gradient

    @property
    def error(self) -> float:
        return total_error(float(error.norm()) for error in self._added.values())


def family_rows(model: str, source: Gradients, steps: int) -> list[dict[str, Any]]:
    """Plans of each family beside uniform bits: bytes, and errors of one step and of many steps added up.

    Noise grows as the square root of the steps; what feedback owes does not grow.
    """
    noisy, feedback = FAMILIES[BITS], FAMILIES[BITS_FEEDBACK]
    table = error_table(source.mean, noisy)
    owing = error_table(source.mean, feedback, least=LEAST_BITS)
    names = [layer.name for layer in table]
    budget = uniform_error(table, 4)
    plans = {
        "uniform 4": Plan(dict.fromkeys(names, 4), noisy),
        "uniform 3": Plan(dict.fromkeys(names, 3), noisy),
        "uniform 2": Plan(dict.fromkeys(names, 2), noisy),
        "uniform 2, bits-feedback": Plan(dict.fromkeys(names, 2), feedback),
        "dynamic, bits": Plan(
            choose_bits(table, budget=uniform_error(table, noisy.reference)).options, noisy
        ),
        "dynamic, bits-feedback": Plan(
            choose_bits(owing, budget=uniform_error(owing, feedback.reference)).options, feedback
        ),
        "dynamic, bits-feedback, error of uniform 4": Plan(
            choose_bits(owing, budget=budget).options, feedback
        ),
    }
    first: dict[str, float] = {}
    for step, gradients in enumerate(source.steps(steps)):
        for name, plan in plans.items():
            plan.send(gradients, step)
            first.setdefault(name, plan.error)
    sizes = {layer.name: layer.numel for layer in table}
    cost = {
        name: sum(encoded_bytes(sizes[n], b) for n, b in plan.bits.items()) for name, plan in plans.items()
    }
    return [
        {
            "part": "family",
            "model": model,
            "method": name,
            "bytes_over_uniform4": cost[name] / cost["uniform 4"],
            "error_over_uniform4": first[name] / first["uniform 4"],
            "error_over_uniform4_added_up": plan.error / plans["uniform 4"].error,
        }
        for name, plan in plans.items()
    ]


def _through(family: Family, bits: int, name: str, values: torch.Tensor, step: int) -> torch.Tensor:
    """What arrives of these values when the family sends them."""
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
