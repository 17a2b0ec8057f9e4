"""`trimtab bench adaptive`: what choosing the bits of every layer saves, and what it does to the loss.

Rows of part `training`: a GPT is trained on two ranks, with SGD and with AdamW, for which different families of
settings serve; `bench.losses` says how losses are compared (`benchmarks/studies/bit_verdicts.py` has more models).
Rows of part `frontier`: the fewest bytes at the error of uniform 4 bits, on gradients of three models. The policies by
themselves are compared in `benchmarks/studies/bit_policies.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, Progress, Result
from trimtab.bench.losses import compare, final_losses, fit
from trimtab.bench.ranks import run_on_cluster, two_hosts
from trimtab.bench.scenarios.bit_frontier import frontier
from trimtab.bench.scenarios.loss import CANARY, sgd_trainer, small_gpt
from trimtab.codec import Block, Codec, PowerSGD
from trimtab.control.compression.adaptive import Adaptive
from trimtab.control.compression.ddp import compression_of
from trimtab.planning.compression.family import ADAMW, SGD
from trimtab.wire_format import MIN_NUMEL, encoded_bytes

FEEDBACK, SCALED = "adaptive, bits-feedback", "adaptive, bits-scaled"
DEFAULT = {SGD: FEEDBACK, ADAMW: SCALED}
"""What `trimtab.compress(ddp)` does where the link is slow, by optimizer."""

SMALL_TOO = FEEDBACK + ", small in 8"
"""And what otherwise is sent as it is (biases, norms, small matrices) in 8 bits, with feedback like the rest."""

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
"""Methods by optimizer; fp32 and its A/A row first."""

LONGER, ADAM_LR = 2, 3e-3
"""AdamW trains for this many times the steps: what fewer bits do to it shows late."""


def adaptive(steps: int, seeds: int, progress: Progress) -> Result:
    """Train every method with both optimizers; then what bits per layer can save on three models."""
    trained = run_on_cluster(two_hosts(), on_rank, {"steps": steps, "seeds": seeds}, progress)
    rows = []
    for optimizer, methods in TRAINED.items():
        for row in compare({method: trained["finals"][_run(optimizer, method)] for method in methods}):
            own = trained["wire"][_run(optimizer, row["method"])]
            rows.append({"part": "training", "model": "gpt", "optimiser": optimizer, **row, **own})
    saved = frontier()
    summary = _summary(rows)
    for row in saved:
        summary[f"{row['model']}: {row['method']}, bytes over uniform 4"] = row["bytes_over_uniform4"]
    return Result(bench="adaptive", summary=summary, rows=[*rows, *saved])


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """By optimizer and method: the loss on held-out text for each seed, and the payload of a step."""
    runs = {
        _run(optimizer, method): (optimizer, method) for optimizer in TRAINED for method in TRAINED[optimizer]
    }
    wire: dict[str, dict[str, float]] = {}

    def train(run: str, seed: int, data_seed: int) -> float:
        optimizer, method = runs[run]
        task = small_gpt(seed)
        ddp = DistributedDataParallel(task.model)
        if (settings := METHODS[method]) is not None:
            overrides = _in_eight_bits(ddp) if method == SMALL_TOO else None
            trimtab.compress(ddp, seed=seed, overrides=overrides, **settings)
        trainer, steps = sgd_trainer(ddp, task, data_seed), spec["steps"]
        if optimizer == ADAMW:
            trainer.optimizer = torch.optim.AdamW(ddp.parameters(), lr=ADAM_LR)
            steps *= LONGER
        payloads = []

        def after_step(step: int, loss: torch.Tensor) -> None:
            trimtab.observe_loss(ddp, loss)
            payloads.append(_payload(ddp))

        final = fit(trainer, task, steps, after_step)
        # Of the last seed: seeds differ only in how soon the first plan was made, and hardly in that.
        wire[run] = {"wire_mb": sum(payloads) / len(payloads) / 1e6, "wire_mb_at_end": payloads[-1] / 1e6}
        return final

    finals = final_losses(runs, range(spec["seeds"]), train, report)
    return {"finals": finals, "wire": wire}


def _run(optimizer: str, method: str) -> str:
    return f"{optimizer}: {method}"


def _in_eight_bits(ddp: DistributedDataParallel) -> dict[str, Codec | None]:
    return {
        name: Block(bits=8, stochastic=False)
        for name, parameter in ddp.module.named_parameters()
        if parameter.dim() < 2 or parameter.numel() < MIN_NUMEL
    }


def _payload(ddp: DistributedDataParallel) -> int:
    """Bytes that a rank hands to the collectives in a step, with the present bits."""
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


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    trained = {row["method"]: row for row in rows if row["optimiser"] == SGD}
    adam = {row["method"]: row for row in rows if row["optimiser"] == ADAMW}
    default = trained[DEFAULT[SGD]]
    passing = [name for name in UNIFORM if not trained[name]["worse"]]
    cheapest = min(passing, key=lambda name: trained[name]["wire_mb_at_end"], default=None)
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
    return summary
