"""`trimtab bench ddp`: a training step over a slow link, by every way to send the gradients."""

from __future__ import annotations

import time
from contextlib import nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, interleave
from trimtab.bench.ranks import run_on_ranks, slices, two_hosts, wire_bytes
from trimtab.bench.result import Result
from trimtab.codec import Block, PowerSGD
from trimtab.control.compression.ddp import adaptive_of
from trimtab.doors.ddp import DdpCompression
from trimtab.models.tasks import require_model, workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trimtab.codec.packing import Packing

SGD = ", sgd"
"""Marks what is trained with SGD. The default chooses other bits for it; all else is trained with AdamW."""

METHODS = (
    "ddp",
    "ddp" + AA,
    "half",
    "powersgd4",
    "payload4",
    "trimtab4",
    "trimtab",
    "ddp" + SGD,
    "trimtab" + SGD,
    "ideal",
)


def ddp(link: str, device: str, model: str, repeats: int, progress: Callable[[int, int], None]) -> Result:
    """All methods in one job, interleaved: on two emulated hosts, or on four slices of one GPU."""
    from trimtab.emulate import Emulation

    require_model(model)
    shaped = None if link == "none" or device == "cuda" else link
    cluster = slices(4) if device == "cuda" else two_hosts(shaped)
    spec = {"model": model, "device": device, "repeats": repeats}
    with Emulation(cluster) as emulation:
        measured = run_on_ranks(emulation, on_rank, spec, progress=progress)
    rows = measured["rows"]
    ms = {row["method"]: row["step_ms"] for row in rows}
    summary: dict[str, Any] = {
        "link": link if device == "cpu" else "nccl sockets",
        "model": model,
        "trimtab4_of_payload4": ms["payload4"] / ms["trimtab4"],
        "trimtab4_of_ideal": ms["ideal"] / ms["trimtab4"],
        "trimtab4_over_ddp": ms["ddp"] / ms["trimtab4"],
        "trimtab_over_ddp": ms["ddp"] / ms["trimtab"],
        "trimtab_over_ddp_sgd": ms["ddp" + SGD] / ms["trimtab" + SGD],
        "adaptive_cpu_of_step": measured["adaptive_cpu_ms"] / ms["trimtab"],
        "aa_ratio": ms["ddp" + AA] / ms["ddp"],
        "explain": measured["explain"],
        "explain_sgd": measured["explain_sgd"],
    }
    return Result(bench="ddp", summary=summary, rows=rows)


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    """One copy of the model for each method, on the same data, all from where the default has settled.

    So losses are after as many steps, and what is timed of the default is not its warm-up.
    """
    torch.set_num_threads(1)
    device = torch.device(spec["device"])
    trainers = {method: Trainer(method, spec["model"], device) for method in METHODS}
    for suffix in ("", SGD):
        default = trainers["trimtab" + suffix]
        default.settle()
        for method, trainer in trainers.items():
            if method.endswith(SGD) == bool(suffix) and trainer is not default:
                trainer.follow(default)
    cases = {method: trainer.step for method, trainer in trainers.items()}
    timings = interleave(cases, warmup=4, repeats=spec["repeats"], progress=report)
    ideal = timings["ideal"]
    rows = [
        {
            "method": trainers[method].name,
            "step_ms": timing.median_ms,
            "spread": timing.spread,
            "fraction_of_ideal": 1 / timing.ratio(ideal),
            "wire_mb_per_step": trainers[method].wire_mb,
            "loss": trainers[method].loss,
        }
        for method, timing in timings.items()
    ]
    controller = adaptive_of(trainers["trimtab"].ddp)
    cpu_ms = controller.cpu_seconds / controller.steps * 1e3 if controller is not None else 0.0
    return {
        "rows": rows,
        "explain": trimtab.explain(trainers["trimtab"].ddp),
        "explain_sgd": trimtab.explain(trainers["trimtab" + SGD].ddp),
        "adaptive_cpu_ms": cpu_ms,
    }


class Trainer:
    """One method's model, optimiser and communication."""

    def __init__(self, method: str, model: str, device: torch.device) -> None:
        torch.manual_seed(0)
        module, self._inputs = workload(model, device)
        self.name, self._device = method, device
        self._method = method.removesuffix(AA).removesuffix(SGD)
        self.ddp = DistributedDataParallel(module)
        self._attach()
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4)
        if method.endswith(SGD):
            self._optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
        self._steps = 0
        self.wire_mb = 0.0
        self.loss = float("nan")

    def step(self) -> float:
        """One training step; gives the seconds until the last rank has finished it."""
        inputs = self._inputs(self._steps, dist.get_rank())
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        self._steps += 1
        self._together()
        sent = wire_bytes()
        start = time.perf_counter()
        quiet = self.ddp.no_sync() if self._method == "ideal" else nullcontext()
        half = torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else nullcontext()
        with quiet:
            with half:
                loss = self.ddp(*arguments)
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._together()
        taken = time.perf_counter() - start
        self.wire_mb = (wire_bytes() - sent) / 1e6
        self.loss = float(loss.detach())
        return taken

    def settle(self) -> None:
        """Train until the bits of every layer are planned: the state in which a job spends its life."""
        controller = adaptive_of(self.ddp)
        while controller is not None and controller.planned_at is None:
            self.step()

    def follow(self, other: Trainer) -> None:
        """Go on from where another has come to: same weights, same optimiser, same data next."""
        self.ddp.module.load_state_dict(other.ddp.module.state_dict())
        if other._steps:
            self._optimizer.load_state_dict(deepcopy(other._optimizer.state_dict()))
        self._steps = other._steps

    def _attach(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self._method == "half":
            # Gloo refuses bf16; on CUDA it is what users take.
            cuda = self._device.type == "cuda"
            self.name = "bf16" if cuda else "fp16"
            self.ddp.register_comm_hook(
                None, default_hooks.bf16_compress_hook if cuda else default_hooks.fp16_compress_hook
            )
        elif self._method == "powersgd4" and self._device.type == "cuda":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self._method == "powersgd4":
            trimtab.compress(self.ddp, PowerSGD(rank=4))
        elif self._method == "payload4":
            self._floor = DdpCompression(self.ddp, Block(bits=4), kernels=NoCodec())
            self.ddp.register_comm_hook(None, self._floor.reduce)
        elif self._method == "trimtab4":
            trimtab.compress(self.ddp, Block(bits=4))
        elif self._method == "trimtab":
            trimtab.compress(self.ddp)

    def _together(self) -> None:
        dist.barrier()
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class NoCodec:
    """Kernels that do nothing: the same collectives carry the same number of bytes. The floor."""

    name = "none"

    def encode(
        self,
        flat: torch.Tensor,
        packing: Packing,
        out: torch.Tensor,
        *,
        stream: int,
        scale: float = 1.0,
        stochastic: bool = True,
    ) -> None:
        pass

    def decode(
        self, payload: torch.Tensor, packing: Packing, flat: torch.Tensor, *, add: bool = False
    ) -> None:
        pass

    def reduce_encode(
        self,
        flat: torch.Tensor,
        payloads: Sequence[torch.Tensor],
        packing: Packing,
        out: torch.Tensor,
        *,
        stream: int,
        scale: float = 1.0,
        stochastic: bool = True,
    ) -> None:
        pass
