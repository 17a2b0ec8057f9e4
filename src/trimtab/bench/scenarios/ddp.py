"""`trimtab bench ddp`: a training step over a slow link, by every way to send the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, Progress, Result, interleave, part
from trimtab.bench.ranks import hosts as hosts_of
from trimtab.bench.ranks import run_on_cluster, slices
from trimtab.bench.trainer import Trainer
from trimtab.cluster import Cluster
from trimtab.codec import Block, PowerSGD
from trimtab.codec.contract import Kernels
from trimtab.control.compression.ddp import adaptive_of
from trimtab.doors.ddp import DdpCompression
from trimtab.errors import TrimtabError
from trimtab.models import tasks

MODELS = ("gpt25m", "gpt2", "vit")
SGD = ", sgd"
"""Suffix of what is trained with SGD, for which the default chooses other bits; all else is trained with AdamW."""

HALF = {"cpu": "fp16", "cuda": "bf16"}
"""What the row of torch's own hook is called: Gloo refuses bf16, which users take on CUDA."""

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
    "ideal" + SGD,
)

CURVE = ("ddp", "ddp" + AA, "trimtab", "ideal")
"""What is compared over numbers of ranks."""

STEPS_PER_PLAN = trimtab.Adaptive().period
"""Over as many steps the cost of adapting is measured on a GPU: every part of it occurs, as often as in a long job."""


def ddp(
    link: str, hosts: int, ranks: Sequence[int], device: str, model: str, repeats: int, progress: Progress
) -> Result:
    """All methods in one job, interleaved, on the ranks of emulated hosts or on slices of one GPU.

    With several numbers of ranks, a job for each, and only the methods of `CURVE`.
    """
    if model not in MODELS:
        raise TrimtabError(f"there is no model {model!r}; choose {', '.join(MODELS)}")
    counts = ranks or ((4,) if device == "cuda" else (2,))
    clusters = [_cluster(link, hosts, count, device) for count in counts]
    methods = METHODS if len(counts) == 1 else CURVE
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {
        "link": "nccl sockets" if device == "cuda" else "inside a host" if hosts == 1 else link,
        "hosts": len(clusters[0].hosts) if len(counts) == 1 else hosts if device == "cpu" else "one a rank",
        "ranks": ", ".join(map(str, counts)),
        "model": model,
    }
    for index, (count, cluster) in enumerate(zip(counts, clusters, strict=True)):
        spec = {"model": model, "device": device, "repeats": repeats, "methods": methods}
        measured = run_on_cluster(cluster, on_rank, spec, part(progress, index, len(counts)))
        rows += [{"ranks": count, **row} for row in measured["rows"]]
        if len(counts) == 1:
            summary |= _ratios(measured)
        else:
            ms = {row["method"]: row["step_ms"] for row in measured["rows"]}
            summary |= {
                f"trimtab_over_ddp_{count}": ms["ddp"] / ms["trimtab"],
                f"trimtab_of_ideal_{count}": ms["ideal"] / ms["trimtab"],
                f"aa_ratio_{count}": ms["ddp" + AA] / ms["ddp"],
                f"explain_{count}": measured["explain"],
            }
    return Result(bench="ddp", summary=summary, rows=rows)


def _cluster(link: str, count: int, ranks: int, device: str) -> Cluster:
    """So many ranks on so many hosts, as evenly as possible; parts of a GPU are a host each."""
    if device == "cuda":
        return slices(ranks)
    if not 1 <= count <= ranks:
        raise TrimtabError(f"{ranks} ranks cannot be placed on {count} hosts; every host has at least one")
    per_host = [ranks // count + (index < ranks % count) for index in range(count)]
    return hosts_of((1.0,) * count, link=link if count > 1 else None, per_host=per_host)


def _ratios(measured: Mapping[str, Any]) -> dict[str, Any]:
    rows = measured["rows"]
    ms = {row["method"]: row["step_ms"] for row in rows}
    of_ideal = {row["method"]: row["fraction_of_ideal"] for row in rows}
    return {
        "trimtab4_of_payload4": ms["payload4"] / ms["trimtab4"],
        "trimtab4_of_ideal": ms["ideal"] / ms["trimtab4"],
        "trimtab4_over_ddp": ms["ddp"] / ms["trimtab4"],
        "trimtab_over_ddp": ms["ddp"] / ms["trimtab"],
        "ddp_of_ideal": of_ideal["ddp"],
        "trimtab_of_ideal": of_ideal["trimtab"],
        "trimtab_of_ideal_sgd": of_ideal["trimtab" + SGD],
        "trimtab_over_trimtab4": ms["trimtab4"] / ms["trimtab"],
        "trimtab_over_ddp_sgd": ms["ddp" + SGD] / ms["trimtab" + SGD],
        "adaptive_cpu_of_step": measured["adaptive_cpu_ms"] / ms["trimtab"],
        "aa_ratio": ms["ddp" + AA] / ms["ddp"],
        "explain": measured["explain"],
        "explain_sgd": measured["explain_sgd"],
    }


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """One copy of the model for each method, on the same data, all from where the default has settled.

    So all losses are after the same number of steps, and the default is not timed during its warm-up.
    """
    device = torch.device(spec["device"])
    trainers = {method: Method(method, spec["model"], device) for method in spec["methods"]}
    suffixes = [suffix for suffix in ("", SGD) if "ideal" + suffix in trainers]
    for suffix in suffixes:
        default = trainers["trimtab" + suffix]
        default.settle()
        for method, trainer in trainers.items():
            if method.endswith(SGD) == bool(suffix) and trainer is not default:
                trainer.follow(default)
    cases = {method: trainer.step for method, trainer in trainers.items()}
    timings = interleave(cases, warmup=4, repeats=spec["repeats"], progress=report)
    ideals = {suffix: timings["ideal" + suffix] for suffix in suffixes}
    rows = [
        {
            "method": trainers[method].name,
            **timing.step,
            "fraction_of_ideal": 1 / timing.ratio(ideals[SGD if method.endswith(SGD) else ""]),
            "wire_mb_per_step": trainers[method].wire_mb,
            "loss": trainers[method].loss,
        }
        for method, timing in timings.items()
    ]
    cpu_ms = trainers["trimtab"].adaptive_cpu_ms(STEPS_PER_PLAN if device.type == "cuda" else 0)
    return {
        "rows": rows,
        **{f"explain{'_sgd' if s else ''}": trimtab.explain(trainers["trimtab" + s].model) for s in suffixes},
        "adaptive_cpu_ms": cpu_ms,
    }


class Method(Trainer):
    """One method's model, optimizer and communication."""

    def __init__(self, method: str, model: str, device: torch.device) -> None:
        task = make_task(model, device)
        kind = method.removesuffix(AA).removesuffix(SGD)
        ddp = DistributedDataParallel(task.model)
        self.name = HALF[device.type] if kind == "half" else method
        _attach(ddp, kind, device)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-4)
        if method.endswith(SGD):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.005, momentum=0.9)
        super().__init__(
            ddp,
            optimizer,
            lambda step: task.batch(step=step, rank=dist.get_rank()),
            device,
            half=True,
            silent=kind == "ideal",
        )

    def settle(self) -> None:
        """Train until the bits of every layer are planned: the state in which a job spends its life."""
        controller = adaptive_of(self.model)
        while controller is not None and controller.planned_at is None:
            self.step()

    def adaptive_cpu_ms(self, steps: int) -> float:
        """CPU time of adapting, a step: over so many steps more, or over all so far."""
        controller = adaptive_of(self.model)
        if controller is None:
            return 0.0
        cpu, first = (controller.cpu_seconds, controller.steps) if steps else (0.0, 0)
        for _ in range(steps):
            self.step()
        return (controller.cpu_seconds - cpu) / (controller.steps - first) * 1e3

    def follow(self, other: Method) -> None:
        """Continue from where another method is: same weights, same optimizer, same data next."""
        self.module.load_state_dict(other.module.state_dict())
        if other.losses:
            self.optimizer.load_state_dict(deepcopy(other.optimizer.state_dict()))
        self.losses = list(other.losses)


def make_task(model: str, device: torch.device) -> tasks.Task:
    """The model that is trained, by name."""
    if model == "gpt25m":
        return tasks.gpt(width=512, layers=8, heads=8, context=128, samples=1, device=device)
    return tasks.gpt2(8, device) if model == "gpt2" else tasks.vit(32, device)


def _attach(ddp: DistributedDataParallel, kind: str, device: torch.device) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    cuda = device.type == "cuda"
    if kind == "half":
        ddp.register_comm_hook(
            None, default_hooks.bf16_compress_hook if cuda else default_hooks.fp16_compress_hook
        )
    elif kind == "powersgd4" and cuda:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif kind == "powersgd4":
        trimtab.compress(ddp, PowerSGD(rank=4))
    elif kind == "payload4":
        ddp.register_comm_hook(None, DdpCompression(ddp, Block(bits=4), kernels=NoCodec()).reduce)
    elif kind == "trimtab4":
        trimtab.compress(ddp, Block(bits=4))
    elif kind == "trimtab":
        trimtab.compress(ddp)


class NoCodec(Kernels):
    """Kernels that do nothing: the same collectives carry the same number of bytes. The floor."""

    def _encode(self, *arguments: Any) -> None:
        pass

    def _decode(self, *arguments: Any) -> None:
        pass
