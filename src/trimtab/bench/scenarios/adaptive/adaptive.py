"""`trimtab bench adaptive`: what choosing the bits of every layer saves, and what it does to the loss.

Three parts. Policies: each against the exact one, on error tables of real gradients. Families: bytes and
errors of their plans beside uniform bits, for one step and added up over many. Training: a GPT from the same
start on the same data, on two ranks, with SGD and with AdamW, for which other families serve; each with the canary
of the loss bench; see there for how losses are compared.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA
from trimtab.bench.ranks import run_on_ranks, two_hosts
from trimtab.bench.result import Result
from trimtab.bench.scenarios.adaptive.tables import (
    Gradients,
    error_table,
    family_rows,
    many_layers,
    policy_rows,
)
from trimtab.bench.scenarios.adaptive.tasks import task
from trimtab.bench.scenarios.loss import CANARY, DIVERGED, compare
from trimtab.codec import Block, Codec, PowerSGD
from trimtab.control.compression.adaptive import Adaptive
from trimtab.control.compression.ddp import compression_of
from trimtab.planning.compression.family import ADAMW, SGD
from trimtab.wire_format import MIN_NUMEL, encoded_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MODELS = ("gpt", "resnet")
LEARNT = 40
"""Steps before the error tables: the first gradients of a model are unlike all later ones."""

ADDED_UP = 50
"""Steps over which the errors of a plan are added up."""

FEEDBACK, SCALED = "adaptive, bits-feedback", "adaptive, bits-scaled"
DEFAULT = {SGD: FEEDBACK, ADAMW: SCALED}
"""What `trimtab.compress(ddp)` does where the link is slow, by optimiser."""

SMALL_TOO = FEEDBACK + ", small in 8"
"""And what otherwise travels as it is (biases, norms, small matrices) in 8 bits, with feedback as the rest."""

UNIFORM = ("uniform 4", "uniform 3", "uniform 2", "uniform 2, feedback")
METHODS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "fp32" + AA: None,
    "uniform 4": {"codec": Block(bits=4)},
    "uniform 3": {"codec": Block(bits=3)},
    "uniform 2": {"codec": Block(bits=2)},
    "uniform 2, feedback": {"codec": Block(bits=2, stochastic=False), "error_feedback": True},
    "adaptive, bits": {"codec": Adaptive(family="bits")},
    FEEDBACK: {"codec": Adaptive(family="bits-feedback")},
    SCALED: {"codec": Adaptive(family="bits-scaled")},
    SMALL_TOO: {"codec": Adaptive(family="bits-feedback")},
    "powersgd 4": {"codec": PowerSGD(rank=4)},
    CANARY: {"codec": Block(bits=1, stochastic=False)},
}
TRAINED: dict[str, tuple[str, ...]] = {
    SGD: tuple(method for method in METHODS if method != SCALED),
    ADAMW: ("fp32", "fp32" + AA, "uniform 4", "uniform 3", "adaptive, bits", FEEDBACK, SCALED, CANARY),
}
"""Methods by optimiser; fp32 and its A/A first."""

LONGER, ADAM_LR = 2, 3e-3
"""AdamW has so many times the steps: what fewer bits do to it shows late."""


def adaptive(steps: int, seeds: int, progress: Callable[[int, int], None]) -> Result:
    """All three parts; training takes most of the time."""
    from trimtab.emulate import Emulation

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = _tables(min(steps, LEARNT), min(steps, ADDED_UP))
    finally:
        torch.set_num_threads(threads)
    with Emulation(two_hosts(None)) as emulation:
        spec = {"steps": steps, "seeds": seeds}
        trained = run_on_ranks(emulation, on_rank, spec, progress=progress)
    training = []
    for optimiser, methods in TRAINED.items():
        for row in compare({method: trained["finals"][optimiser][method] for method in methods}):
            own = trained["wire"][optimiser][row["method"]]
            training.append({"part": "training", "model": "gpt", "optimiser": optimiser, **row, **own})
    return Result(bench="adaptive", summary=_summary(rows, training), rows=rows + training)


def _tables(learnt: int, added_up: int) -> list[dict[str, Any]]:
    policies, families = [], []
    for model in MODELS:
        source = Gradients(task(model))
        for _ in source.steps(learnt):
            pass
        layers = error_table(source.mean)
        policies += policy_rows(model, layers)
        families += family_rows(model, source, added_up)
        if model == "gpt":
            policies += policy_rows("500 layers", many_layers(layers))
    return policies + families


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    """Per optimiser and method: the validation loss after the last step for each seed, the payload of a step."""
    torch.set_num_threads(1)
    every = [(optimiser, method) for optimiser, methods in TRAINED.items() for method in methods]
    runs = [(*one, seed) for seed in range(spec["seeds"]) for one in every]
    finals: dict[str, dict[str, list[float]]] = {
        optimiser: {method: [] for method in methods} for optimiser, methods in TRAINED.items()
    }
    wire: dict[str, dict[str, dict[str, float]]] = {optimiser: {} for optimiser in TRAINED}
    for done, (optimiser, method, seed) in enumerate(runs):
        final, payloads = _train(optimiser, method, seed, spec["steps"])
        finals[optimiser][method].append(final)
        # Those of the last seed: they differ by how soon the first plan was made, and hardly in that.
        wire[optimiser][method] = {
            "wire_mb": sum(payloads) / len(payloads) / 1e6,
            "wire_mb_at_end": payloads[-1] / 1e6,
        }
        report(done + 1, len(runs))
    return {"finals": finals, "wire": wire}


def _train(optimiser: str, method: str, seed: int, steps: int) -> tuple[float, list[int]]:
    torch.manual_seed(seed)
    gpt = task("gpt")
    ddp = DistributedDataParallel(gpt.build())
    settings = METHODS[method]
    if settings is not None:
        overrides = _in_eight_bits(ddp) if method == SMALL_TOO else None
        trimtab.compress(ddp, seed=seed, overrides=overrides, **settings)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), lr=gpt.lr, momentum=0.9)
    if optimiser == ADAMW:
        optimizer, steps = torch.optim.AdamW(ddp.parameters(), lr=ADAM_LR), LONGER * steps
    lr = optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, cycle_momentum=False)
    draw = seed + 1000 if method == "fp32" + AA else seed
    payloads = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = ddp(*gpt.inputs(draw, step, dist.get_rank()))
        loss.backward()
        trimtab.observe_loss(ddp, loss)
        optimizer.step()
        schedule.step()
        payloads.append(_payload(ddp))
    with torch.no_grad():
        final = float(torch.stack([ddp.module(*inputs) for inputs in gpt.held_out()]).mean())
    return final if isfinite(final) else DIVERGED, payloads


def _in_eight_bits(ddp: DistributedDataParallel) -> dict[str, Codec | None]:
    return {
        name: Block(bits=8, stochastic=False)
        for name, parameter in ddp.module.named_parameters()
        if parameter.dim() < 2 or parameter.numel() < MIN_NUMEL
    }


def _payload(ddp: DistributedDataParallel) -> int:
    """Bytes that a rank hands to the collectives in a step as it is now."""
    compression = compression_of(ddp)
    shapes = {name: parameter.shape for name, parameter in ddp.module.named_parameters()}
    if compression is None:
        return sum(4 * shape.numel() for shape in shapes.values())
    total = 0
    for name, (numel, bits, block) in compression.pieces.items():
        if bits and isinstance(compression.codec, PowerSGD):
            total += min(compression.codec.nbytes(shapes[name], torch.float32), 4 * numel)
        else:
            total += encoded_bytes(numel, bits, block)
    return total


def _summary(rows: list[dict[str, Any]], training: list[dict[str, Any]]) -> dict[str, Any]:
    trained = {row["method"]: row for row in training if row["optimiser"] == SGD}
    adam = {row["method"]: row for row in training if row["optimiser"] == ADAMW}
    default = trained[DEFAULT[SGD]]
    passing = [name for name in UNIFORM if not trained[name]["worse"]]
    cheapest = min(passing, key=lambda name: trained[name]["wire_mb_at_end"], default=None)
    family = {(row["model"], row["method"]): row for row in rows if row["part"] == "family"}
    dynamic = [row for row in rows if row["part"] == "policy" and row["method"] == "dynamic"]
    summary: dict[str, Any] = {
        "canary_flagged": trained[CANARY]["worse"],
        "aa_gap": trained["fp32" + AA]["gap"],
        "default_worse": default["worse"],
        "default_gap": default["gap"],
        "default_bytes_over_uniform4": default["wire_mb_at_end"] / trained["uniform 4"]["wire_mb_at_end"],
        "default_bytes_over_uniform4_with_warm_up": default["wire_mb"] / trained["uniform 4"]["wire_mb"],
        "cheapest_uniform_not_worse": cheapest or "none",
    }
    if cheapest is not None:
        summary["default_bytes_over_cheapest_uniform"] = (
            default["wire_mb_at_end"] / trained[cheapest]["wire_mb_at_end"]
        )
    scaled, four = adam[DEFAULT[ADAMW]], adam["uniform 4"]
    summary |= {
        "adamw_canary_flagged": adam[CANARY]["worse"],
        "adamw_default_worse": scaled["worse"],
        "adamw_default_gap": scaled["gap"],
        "adamw_default_bytes_over_uniform4": scaled["wire_mb_at_end"] / four["wire_mb_at_end"],
        "adamw_feedback_worse": adam[FEEDBACK]["worse"],
    }
    for model in MODELS:
        plan = family[model, "dynamic, bits-feedback"]
        summary[f"{model}_feedback_error_over_uniform4"] = plan["error_over_uniform4"]
        summary[f"{model}_feedback_error_added_up"] = plan["error_over_uniform4_added_up"]
        exact = family[model, "dynamic, bits-feedback, error of uniform 4"]
        summary[f"{model}_bytes_over_uniform4_at_its_error"] = exact["bytes_over_uniform4"]
    summary["dynamic_ms_500_layers"] = next(r["solve_ms"] for r in dynamic if r["model"] == "500 layers")
    summary["kmeans_worst_gap_to_exact"] = max(
        row["gap_to_exact"] for row in rows if row["part"] == "policy" and row["method"] == "kmeans"
    )
    return summary
