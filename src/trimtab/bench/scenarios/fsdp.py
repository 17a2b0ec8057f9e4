"""`trimtab bench fsdp`: FSDP2 over a slow link, by what travels in fewer bits, and what that does to the loss.

FSDP2 all-gathers the weights before forward and, unless they were kept, again before backward, and reduce-scatters
the gradients. A perfect reduce-scatter moves as much as one all-gather. Gloo's moves twice that, because it is an
all-reduce of which each rank keeps a part; NCCL's does not. So with Gloo half of the bytes are gradients (two thirds
where the weights are kept), with NCCL a third (half), and fewer bits for the gradients alone can save no more: the
rows show both, what the weights in 8 bits add, and what trimtab chooses by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import trimtab
from trimtab.bench.harness import AA, Progress, Result, interleave, part
from trimtab.bench.losses import final_losses, fit, judged
from trimtab.bench.ranks import run_on_cluster, slices, two_hosts, wire_bytes
from trimtab.bench.scenarios.loss import sgd_trainer, small_gpt
from trimtab.bench.trainer import Trainer
from trimtab.codec import Block
from trimtab.control.compression.ddp import adaptive_of
from trimtab.models import tasks
from trimtab.wire_format import WEIGHT_BITS

DEFAULT, BOTH = "trimtab", "gradients 4, weights 8"
IDEAL = "ideal"
"""Every rank has the whole model and exchanges nothing: it updates all parameters, not only its shard."""

METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "plain" + AA: None,
    DEFAULT: {},
    "gradients 4": {"codec": Block(bits=4)},
    BOTH: {"codec": Block(bits=4), "weight_bits": 8},
}
GRADIENT_CANARY, WEIGHT_CANARY = "gradients 1 (canary)", "weights 2 (canary)"
CANARIES: dict[str, dict[str, Any]] = {
    GRADIENT_CANARY: {"codec": Block(bits=1)},
    WEIGHT_CANARY: {"codec": Block(bits=4), "weight_bits": 2},
}
CHOSEN: dict[str, Any] = {"codec": trimtab.Adaptive(), "weight_bits": WEIGHT_BITS}
"""What the default comes to on a slow link: losses are compared where there is none."""

KEPT = ", weights kept"
"""Suffix of the methods whose weights stay gathered between forward and backward."""


def fsdp(
    link: str, device: str, layers: int, repeats: int, steps: int, seeds: int, progress: Progress
) -> Result:
    """Step times of every method, interleaved, on two emulated hosts (or slices of a GPU); on the CPU losses as well.

    On the CPU the model is the GPT of the other benches with the given number of layers (8: 25 million parameters), on
    a GPU it is GPT-2 small, which computes and gathers its weights in bf16 and reduces its gradients in fp32.
    """
    timed = slices(2) if device == "cuda" else two_hosts(link)
    spec = {"layers": layers, "device": device, "repeats": repeats, "steps": steps, "seeds": seeds}
    rows = run_on_cluster(timed, time_methods, spec, part(progress, 0, 2))
    explained = [row.pop("explain") for row in rows]
    ms = {row["method"]: row["step_ms"] for row in rows}
    by_method: dict[str, dict[str, Any]] = {}
    if device == "cpu":
        by_method = judged(run_on_cluster(two_hosts(), train_methods, spec, part(progress, 1, 2)))
    for row in rows:
        row.update(_loss_columns(by_method.get(row["method"].removesuffix(KEPT))))
    rows += [{"method": method, **_loss_columns(by_method[method])} for method in CANARIES if by_method]
    summary: dict[str, Any] = {
        "link": link if device == "cpu" else "nccl sockets",
        "model": f"GPT of {layers} layers" if device == "cpu" else "gpt2",
        "trimtab_over_plain": ms["plain"] / ms[DEFAULT],
        "trimtab_over_plain_weights_kept": ms["plain" + KEPT] / ms[DEFAULT + KEPT],
        "gradients4_over_plain": ms["plain"] / ms["gradients 4"],
        "both_over_plain": ms["plain"] / ms[BOTH],
        "gradients4_over_plain_weights_kept": ms["plain" + KEPT] / ms["gradients 4" + KEPT],
        "both_over_plain_weights_kept": ms["plain" + KEPT] / ms[BOTH + KEPT],
        "plain_of_ideal": ms[IDEAL] / ms["plain"],
        "trimtab_of_ideal": ms[IDEAL] / ms[DEFAULT],
        "aa_ratio": ms["plain" + AA] / ms["plain"],
        "explain": explained[list(ms).index(DEFAULT)],
    }
    if by_method:
        summary |= {
            "trimtab_worse": by_method[DEFAULT]["worse"],
            "gradients4_worse": by_method["gradients 4"]["worse"],
            "both_worse": by_method[BOTH]["worse"],
            "canaries_flagged": all(by_method[method]["worse"] for method in CANARIES),
        }
    return Result(bench="fsdp", summary=summary, rows=rows)


def time_methods(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """One copy of the model for each method, all from the same start and on the same data."""
    device = torch.device(spec["device"])
    kept = [method + KEPT for method in METHODS if not method.endswith(AA)]
    trainers = {method: Method(method, spec["layers"], device) for method in (*METHODS, *kept, IDEAL)}
    for trainer in trainers.values():
        trainer.settle()
    cases = {method: trainer.step for method, trainer in trainers.items()}
    timings = interleave(cases, warmup=2, repeats=spec["repeats"], progress=report)
    rows = []
    for method, timing in timings.items():
        trainer = trainers[method]
        base = trainers["plain" + KEPT if method.endswith(KEPT) else "plain"]
        rows.append(
            {
                "method": method,
                **timing.step,
                "wire_mb_per_step": trainer.wire_mb,
                "of_plain_bytes": trainer.wire_mb / base.wire_mb,
                "weights_mb": trainer.weights_mb,
                "gradients_mb": trainer.wire_mb - trainer.weights_mb,
                "explain": trimtab.explain(trainer.model),
            }
        )
    return rows


class Method(Trainer):
    """One method's sharded model and optimizer, and the bytes of the weights apart from those of the gradients."""

    def __init__(self, method: str, layers: int, device: torch.device) -> None:
        if device.type == "cuda":
            task = tasks.gpt2(8, device)
        else:
            task = tasks.gpt(width=512, layers=layers, heads=8, context=128, samples=1)
        self._reshard = not method.endswith(KEPT)
        mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("ranks", "alone"))
        alone = mesh["alone"] if method == IDEAL else None
        model = shard(task.model, reshard=self._reshard, mesh=alone, half=device.type == "cuda")
        settings = METHODS.get(method.removesuffix(KEPT))
        if settings is not None:
            trimtab.compress(model, **settings)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        super().__init__(model, optimizer, lambda step: task.batch(step=step, rank=dist.get_rank()), device)
        self._forward_mb = 0.0

    def settle(self) -> None:
        """Train until the bits of every layer are planned, where they adapt."""
        controller = adaptive_of(self.model)
        while controller is not None and controller.planned_at is None:
            self.step()

    def forward(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss = super().forward(batch)
        self._forward_mb = (wire_bytes() - self.sent_before) / 1e6
        return loss

    @property
    def weights_mb(self) -> float:
        """What forward sent, and unless the weights were kept the same again in backward."""
        return self._forward_mb * (2 if self._reshard else 1)


def train_methods(spec: Mapping[str, Any], report: Progress) -> dict[str, list[float]]:
    """The loss on held-out text after the last step, by method and seed, of a small GPT."""
    methods = {**METHODS, DEFAULT: CHOSEN, **CANARIES}

    def train(method: str, seed: int, data_seed: int) -> float:
        task = small_gpt(seed)
        model = shard(task.model)
        if (settings := methods[method]) is not None:
            trimtab.compress(model, seed=seed, **settings)  # type: ignore[arg-type]
        return fit(sgd_trainer(model, task, data_seed), task, spec["steps"])

    return final_losses(methods, range(spec["seeds"]), train, report)


def shard(
    model: nn.Module, *, reshard: bool = True, mesh: DeviceMesh | None = None, half: bool = False
) -> nn.Module:
    """Apply `fully_shard` to each repeated layer, then to the rest; in place.

    Args:
        half: compute in bf16, and reduce gradients in fp32.
    """
    types = (torch.bfloat16, torch.float32) if half else (None, None)
    options: dict[str, Any] = {
        "reshard_after_forward": reshard,
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(*types),
    }
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            for layer in module:
                fully_shard(layer, **options)
    return fully_shard(model, **options)  # type: ignore[return-value]


def _loss_columns(row: Mapping[str, Any] | None) -> dict[str, Any]:
    columns = ("final_loss", "gap", "gap_over_noise", "worse")
    return {column: row[column] for column in columns} if row is not None else {}
