"""`trimtab bench fsdp`: FSDP2 over a slow link, by what travels in fewer bits, and what that does to the loss.

FSDP2 gathers the weights before forward and, unless they were kept, once more before backward, and scatters the sums
of the gradients. A perfect reduce-scatter moves as much as one gathering; Gloo's moves twice that (it is an all-reduce
of which each rank keeps a part), NCCL's does not. So with Gloo half of the bytes are gradients (two thirds where the
weights are kept), with NCCL a third (half), and fewer bits for the gradients alone can save no more: the rows show
both, and what the weights in 8 bits add.
"""

from __future__ import annotations

import time
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import trimtab
from trimtab.bench.harness import AA, interleave
from trimtab.bench.ranks import run_on_ranks, slices, two_hosts, wire_bytes
from trimtab.bench.result import Result
from trimtab.bench.scenarios.loss import DIVERGED, HELD_OUT, compare
from trimtab.codec import Block
from trimtab.models.tasks import Gpt, tokens, workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

BOTH = "gradients 4, weights 8"
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "plain" + AA: None,
    "gradients 4": {"codec": Block(bits=4)},
    BOTH: {"codec": Block(bits=4), "weight_bits": 8},
}
GRADIENT_CANARY, WEIGHT_CANARY = "gradients 1 (canary)", "weights 2 (canary)"
CANARIES: dict[str, dict[str, Any]] = {
    GRADIENT_CANARY: {"codec": Block(bits=1)},
    WEIGHT_CANARY: {"codec": Block(bits=4), "weight_bits": 2},
}
KEPT = ", weights kept"
"""After the methods whose weights stay gathered between forward and backward."""


def fsdp(
    link: str,
    device: str,
    layers: int,
    repeats: int,
    steps: int,
    seeds: int,
    progress: Callable[[int, int], None],
) -> Result:
    """Step times of every method, interleaved, on two emulated hosts (or slices of a GPU); then their losses.

    On the CPU the model is the GPT of the other benches with so many layers (8: 25 million parameters), on a GPU
    GPT-2 small.
    """
    from trimtab.emulate import Emulation

    shaped = None if link == "none" or device == "cuda" else link
    timed = slices(2) if device == "cuda" else two_hosts(shaped)
    spec = {"layers": layers, "device": device, "repeats": repeats, "steps": steps, "seeds": seeds}
    with Emulation(timed) as emulation:
        rows = run_on_ranks(emulation, time_methods, spec, progress=lambda d, t: progress(d, 2 * t))
    with Emulation(two_hosts(None)) as emulation:
        losses = run_on_ranks(
            emulation, train_methods, {**spec, "device": "cpu"}, progress=lambda d, t: progress(t + d, 2 * t)
        )
    ms = {row["method"]: row["step_ms"] for row in rows}
    judged = compare(losses)
    by_method = {row["method"]: row for row in judged}
    for row in rows:
        row.update(_loss_columns(by_method.get(row["method"].removesuffix(KEPT))))
    rows += [{"method": method, **_loss_columns(by_method[method])} for method in CANARIES]
    summary: dict[str, Any] = {
        "link": link if device == "cpu" else "nccl sockets",
        "model": f"GPT of {layers} layers" if device == "cpu" else "gpt2",
        "gradients4_over_plain": ms["plain"] / ms["gradients 4"],
        "both_over_plain": ms["plain"] / ms[BOTH],
        "gradients4_over_plain_weights_kept": ms["plain" + KEPT] / ms["gradients 4" + KEPT],
        "both_over_plain_weights_kept": ms["plain" + KEPT] / ms[BOTH + KEPT],
        "aa_ratio": ms["plain" + AA] / ms["plain"],
        "gradients4_worse": by_method["gradients 4"]["worse"],
        "both_worse": by_method[BOTH]["worse"],
        "canaries_flagged": all(by_method[method]["worse"] for method in CANARIES),
    }
    return Result(bench="fsdp", summary=summary, rows=rows)


def time_methods(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """One copy of the model for each method, all from the same start and on the same data."""
    torch.set_num_threads(1)
    device = torch.device(spec["device"])
    trainers = {method: Trainer(method, spec["layers"], device, reshard=True) for method in METHODS}
    trainers.update(
        {
            method + KEPT: Trainer(method, spec["layers"], device, reshard=False)
            for method in METHODS
            if not method.endswith(AA)
        }
    )
    cases = {method: trainer.step for method, trainer in trainers.items()}
    timings = interleave(cases, warmup=2, repeats=spec["repeats"], progress=report)
    rows = []
    for method, timing in timings.items():
        trainer = trainers[method]
        base = trainers["plain" + KEPT if method.endswith(KEPT) else "plain"]
        rows.append(
            {
                "method": method,
                "step_ms": timing.median_ms,
                "spread": timing.spread,
                "wire_mb_per_step": trainer.wire_mb,
                "of_plain_bytes": trainer.wire_mb / base.wire_mb,
                "weights_mb": trainer.sent["forward"] + trainer.weights_in_backward,
                "gradients_mb": trainer.sent["backward"] - trainer.weights_in_backward,
            }
        )
    return rows


class Trainer:
    """One method's sharded model and optimiser."""

    def __init__(self, method: str, layers: int, device: torch.device, *, reshard: bool) -> None:
        torch.manual_seed(0)
        module, self._inputs = _workload(layers, device)
        self._model = shard(module, reshard=reshard)
        settings = METHODS[method]
        if settings is not None:
            trimtab.compress(self._model, **settings)  # type: ignore[arg-type]
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4)
        self._device, self._reshard, self._steps = device, reshard, 0
        self.sent = {"forward": 0.0, "backward": 0.0}
        """Megabytes this rank's interface sent in each pass of the last step."""

    @property
    def wire_mb(self) -> float:
        return sum(self.sent.values())

    @property
    def weights_in_backward(self) -> float:
        """Megabytes of weights gathered once more: what forward sent, unless they were kept."""
        return self.sent["forward"] if self._reshard else 0.0

    def step(self) -> float:
        """One training step; gives the seconds until the last rank has finished it."""
        inputs = self._inputs(self._steps, dist.get_rank())
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        self._steps += 1
        self._together()
        marks, start = [wire_bytes()], time.perf_counter()
        loss = self._model(*arguments)
        marks.append(wire_bytes())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._together()
        taken = time.perf_counter() - start
        marks.append(wire_bytes())
        self.sent = {"forward": (marks[1] - marks[0]) / 1e6, "backward": (marks[2] - marks[1]) / 1e6}
        return taken

    def _together(self) -> None:
        dist.barrier()
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def train_methods(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, list[float]]:
    """The loss on held-out text after the last step, per method and seed, of a small GPT."""
    torch.set_num_threads(1)
    settings = {**METHODS, **CANARIES}
    runs = [(method, seed) for seed in range(spec["seeds"]) for method in settings]
    finals: dict[str, list[float]] = {method: [] for method in settings}
    for done, (method, seed) in enumerate(runs):
        finals[method].append(_train(settings[method], seed, spec["steps"], again=method.endswith(AA)))
        report(done + 1, len(runs))
    return finals


def shard(model: nn.Module, *, reshard: bool = True) -> nn.Module:
    """The model under `fully_shard`: each of its repeated layers, then the rest; in place."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            for layer in module:
                fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)  # type: ignore[return-value]


def _workload(layers: int, device: torch.device) -> tuple[nn.Module, Callable[[int, int], Any]]:
    if device.type == "cuda":
        return workload("gpt2", device)
    model = Gpt(width=512, layers=layers, heads=8, context=128)
    return model, lambda step, rank: tokens(1, 128, seed=0, step=step, rank=rank)


def _train(settings: dict[str, Any] | None, seed: int, steps: int, *, again: bool) -> float:
    torch.manual_seed(seed)
    model = shard(Gpt(width=96, layers=2, heads=4, context=64))
    if settings is not None:
        trimtab.compress(model, seed=seed, **settings)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, cycle_momentum=False)
    draw = seed + 1000 if again else seed
    for step in range(steps):
        optimizer.zero_grad()
        model(tokens(8, 64, seed=draw, step=step, rank=dist.get_rank())).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        held_out = [model(tokens(32, 64, seed=HELD_OUT, step=i, rank=0)) for i in range(8)]
    final = float(torch.stack(held_out).mean())
    return final if isfinite(final) else DIVERGED


def _loss_columns(judged: Mapping[str, Any] | None) -> dict[str, Any]:
    columns = ("final_loss", "gap", "gap_over_noise", "worse")
    return {column: judged[column] for column in columns} if judged is not None else {}
