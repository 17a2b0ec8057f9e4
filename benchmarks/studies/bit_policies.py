"""Which bits for which layer? Policies against the exact one, and families against uniform bits, on real gradients.

    python benchmarks/studies/bit_policies.py

Tables of every layer's error at each number of bits are made with the real codec from the gradients of a GPT, a
ResNet and a Llama that have trained for a while. Rows of part `policy` show what each policy saves at the error of
uniform 4 bits and how far from exact it is; rows of part `family` show bytes and errors of the families' plans, for
one step and added up over many; rows of part `frontier` the fewest bytes at the error of uniform 4 bits when every
layer may choose its block, too, and when a block's range takes 16 bits a number instead of 32 (simulated: the wire
format has no such ranges). One process, no ranks. Needs `transformers` and `scikit-learn`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from trimtab.bench.harness import Result
from trimtab.codec import ErrorFeedback
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import Packing, Segment
from trimtab.models import tasks
from trimtab.planning.compression.family import BITS, BITS_FEEDBACK, FAMILIES, LEAST_BITS, Family
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

    from trimtab.models.tasks import Task

MODELS = ("gpt", "resnet", "llama")
LEARNED = 40
"""Steps before the error tables: the first gradients of a model are unlike all later ones."""

ADDED_UP = 50
"""Steps over which the errors of a plan are added up."""

BLOCKS = (64, 128, 256, 512, 1024)
"""Blocks that a layer may choose from; uniform bits are in the last."""

SOLVES = 5
MEMORY = 0.1
"""Weight of the newest gradient in the running mean that the tables are made of."""


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
        seconds = []
        for _ in range(SOLVES):
            start = time.perf_counter()
            chosen = choose_bits(layers, budget=budget, policy=policy)
            seconds.append(time.perf_counter() - start)
        rows.append(
            {
                "part": "policy",
                "model": model,
                "method": policy,
                "bytes_over_uniform4": chosen.cost / bytes4,
                "error_over_uniform4": chosen.error / budget,
                "solve_ms": median(seconds) * 1e3,
                "gap_to_exact": chosen.cost / exact.cost - 1,
            }
        )
    return rows


def many_layers(layers: Sequence[LayerOptions], count: int = 500) -> list[LayerOptions]:
    """As many layers as asked for: the real ones repeated, each time with gradients of another size."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(count, generator=generator).exp().tolist()
    repeated = []
    for index, scale in enumerate(scales):
        one = layers[index % len(layers)]
        repeated.append(
            LayerOptions(
                name=f"{index}",
                numel=one.numel,
                norm=one.norm * scale,
                options=one.options,
                errors=tuple(error * scale for error in one.errors),
                costs=one.costs,
            )
        )
    return repeated


class SentBits:
    """Bits for every layer as one family sends them, and the errors of its steps added up."""

    def __init__(self, bits: Mapping[str, int], family: Family) -> None:
        self.bits, self._family = bits, family
        self._memory = ErrorFeedback() if family.error_feedback else None
        self._added: dict[str, torch.Tensor] = {}

    def send(self, gradients: Mapping[str, torch.Tensor], step: int) -> None:
        for name, gradient in gradients.items():
            intended = gradient.clone()
            if self._memory is not None:
                self._memory.restore(name, intended)
            sent = _through(self._family, self.bits[name], name, intended, step)
            if self._memory is not None:
                self._memory.keep(name, intended, sent)
            self._added[name] = self._added.get(name, torch.zeros_like(gradient)) + sent - gradient

    @property
    def error(self) -> float:
        return total_error(float(error.norm()) for error in self._added.values())


def family_rows(model: str, source: Gradients, steps: int) -> list[dict[str, Any]]:
    """Plans of each family compared with uniform bits: bytes, and errors of one step and of many steps added up.

    Noise grows as the square root of the steps; what error feedback still owes does not grow.
    """
    noisy, feedback = FAMILIES[BITS], FAMILIES[BITS_FEEDBACK]
    table = error_table(source.mean, noisy)
    owing = error_table(source.mean, feedback, least=LEAST_BITS)
    names = [layer.name for layer in table]
    budget = uniform_error(table, 4)
    plans = {
        "uniform 4": SentBits(dict.fromkeys(names, 4), noisy),
        "uniform 3": SentBits(dict.fromkeys(names, 3), noisy),
        "uniform 2": SentBits(dict.fromkeys(names, 2), noisy),
        "uniform 2, bits-feedback": SentBits(dict.fromkeys(names, 2), feedback),
        "dynamic, bits": SentBits(
            choose_bits(table, budget=uniform_error(table, noisy.reference)).options, noisy
        ),
        "dynamic, bits-feedback": SentBits(
            choose_bits(owing, budget=uniform_error(owing, feedback.reference)).options, feedback
        ),
        "dynamic, bits-feedback, error of uniform 4": SentBits(
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
        (name, choice): _rounded(name, gradient, *choice)
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


def _rounded(name: str, values: torch.Tensor, bits: int, block: int, short_ranges: bool) -> torch.Tensor:
    """What arrives of values that are rounded stochastically."""
    if not short_ranges:
        return _through(replace(FAMILIES[BITS], block=block), bits, name, values, 0)
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


def _through(family: Family, bits: int, name: str, values: torch.Tensor, step: int) -> torch.Tensor:
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


def study(learned: int = LEARNED, added_up: int = ADDED_UP) -> Result:
    """Both parts, for every model."""
    torch.set_num_threads(1)
    policies, families, frontier = [], [], []
    for model in MODELS:
        source = _gradients(model)
        for _ in source.steps(learned):
            pass
        layers = error_table(source.mean)
        policies += policy_rows(model, layers)
        frontier += frontier_rows(model, source.mean)
        families += family_rows(model, source, added_up)
        if model == "gpt":
            policies += policy_rows("500 layers", many_layers(layers))
    figures = summary(policies, families)
    for row in frontier:
        figures[f"{row['model']}: {row['method']}"] = row["bytes_over_uniform4"]
    return Result(bench="bit_policies", summary=figures, rows=policies + families + frontier)


def summary(policies: Sequence[Mapping[str, Any]], families: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_method = {(row["model"], row["method"]): row for row in (*policies, *families)}
    figures: dict[str, Any] = {}
    for model in MODELS:
        plan = by_method[model, "dynamic, bits-feedback"]
        figures[f"{model}_feedback_error_over_uniform4"] = plan["error_over_uniform4"]
        figures[f"{model}_feedback_error_added_up"] = plan["error_over_uniform4_added_up"]
        exact = by_method[model, "dynamic, bits-feedback, error of uniform 4"]
        figures[f"{model}_bytes_over_uniform4_at_its_error"] = exact["bytes_over_uniform4"]
    figures["dynamic_ms_500_layers"] = by_method["500 layers", "dynamic"]["solve_ms"]
    figures["kmeans_worst_gap_to_exact"] = max(
        row["gap_to_exact"] for row in policies if row["method"] == "kmeans"
    )
    return figures


def _gradients(model: str) -> Gradients:
    if model == "gpt":
        return Gradients(tasks.gpt(width=96, layers=2, heads=4, context=64, samples=8), lr=0.1)
    if model == "llama":
        return Gradients(tasks.llama(8), lr=0.1)
    return Gradients(tasks.resnet(16), lr=0.02)


if __name__ == "__main__":
    print(study().to_json())
