"""Which bits for which layer? Policies against the exact one, and families against uniform bits, on real gradients.

    python benchmarks/studies/bit_policies.py

Tables of every layer's error at each number of bits are made with the real codec from the gradients of a GPT, a
ResNet and a Llama that have trained for a while. Rows of part `policy` show what each policy saves at the error of
uniform 4 bits and how far from exact it is; rows of part `family` show bytes and errors of the families' plans, for
one step and added up over many; rows of part `frontier` (`trimtab bench adaptive` has them, too) the fewest bytes at
the error of uniform 4 bits when every layer may choose its block, too, and when a block's range takes 16 bits a number
instead of 32 (simulated: the wire format has no such ranges). One process, no ranks. Needs `transformers` and
`scikit-learn`.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from trimtab.bench.harness import Result
from trimtab.bench.scenarios.bit_frontier import LEARNED, MODELS, Gradients, frontier_rows, gradients_of, sent
from trimtab.codec import ErrorFeedback
from trimtab.planning.compression.family import BITS, BITS_FEEDBACK, FAMILIES, LEAST_BITS, Family
from trimtab.planning.compression.layer_options import (
    ALL_BITS,
    LayerOptions,
    total_error,
    uniform_cost,
    uniform_error,
)
from trimtab.planning.compression.policies import POLICIES, choose_bits
from trimtab.wire_format import encoded_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ADDED_UP = 50
"""Steps over which the errors of a plan are added up."""

SOLVES = 5


def error_table(
    gradients: Mapping[str, torch.Tensor], family: Family = FAMILIES[BITS], *, least: int = 1
) -> list[LayerOptions]:
    """Every layer's error and bytes at each number of bits from `least` up, made with the family's codec."""
    layers = []
    for name, gradient in gradients.items():
        options = tuple(bits for bits in ALL_BITS if bits >= least)
        decoded = [sent(family, bits, name, gradient, 0) for bits in options]
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
            arrived = sent(self._family, self.bits[name], name, intended, step)
            if self._memory is not None:
                self._memory.keep(name, intended, arrived)
            self._added[name] = self._added.get(name, torch.zeros_like(gradient)) + arrived - gradient

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


def study(learned: int = LEARNED, added_up: int = ADDED_UP) -> Result:
    """Both parts, for every model."""
    torch.set_num_threads(1)
    policies, families, frontier = [], [], []
    for model in MODELS:
        source = gradients_of(model)
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


if __name__ == "__main__":
    print(study().to_json())
