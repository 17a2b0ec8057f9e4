"""`trimtab bench tp`: tensor-parallel training with a slow rank, beside torch's own on equal ranks.

Rows: `even` shares, `shares` by measured speed, `ideal` (water-filling of the times that the even run's ranks needed,
plus the time its collectives take when nobody waits); `torch` is `parallelize_module` on equal ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.bench.harness import AA, Timing, interleave
from trimtab.bench.ranks import run_on_ranks
from trimtab.bench.result import Result
from trimtab.models.tasks import tokens
from trimtab.planning.tensor.shares import water_level
from trimtab.sharding import Attention, Clock, LocalTimes, Mlp, assignment, assignment_for, move
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trimtab.cluster import Cluster
    from trimtab.sharding.unit_kinds import UnitKind

SIZES: dict[str, dict[str, int]] = {
    "cpu": {"width": 512, "heads": 16, "layers": 3, "batch": 4, "length": 128},
    # Wide and short: over sockets an all-reduce must not hide the products.
    "cuda": {"width": 6144, "heads": 48, "layers": 2, "batch": 4, "length": 512},
}
_MOVED = 0.1
"""Part of the units that change their rank in the row `move`."""


def tp(speeds: Sequence[float], device: str, repeats: int, progress: Callable[[int, int], None]) -> Result:
    """Two ranks, the second at each of `speeds` in turn and at 1: on CPU by repeated products, on a GPU by slices."""
    from trimtab.emulate import Emulation

    every = [*speeds, 1.0]
    rows: list[dict[str, Any]] = []
    for index, speed in enumerate(every):

        def moved(done: int, total: int, index: int = index) -> None:
            progress(index * total + done, len(every) * total)

        spec = {"speed": speed, "device": device, "repeats": repeats, **SIZES[device]}
        with Emulation(two_ranks(speed, device), throttle="gemm") as emulation:
            rows += run_on_ranks(emulation, on_rank, spec, progress=moved)
    found = {(row["method"], row["speed"]): row for row in rows}
    summary: dict[str, Any] = {"device": device}
    for speed in speeds:
        summary[f"shares_over_ideal_at_{speed:g}"] = found["shares", speed]["over_ideal"]
        summary[f"even_over_ideal_at_{speed:g}"] = found["even", speed]["over_ideal"]
        summary[f"speedup_at_{speed:g}"] = found["even", speed]["step_ms"] / found["shares", speed]["step_ms"]
    summary["even_over_torch"] = found["even", 1.0]["over_torch"]
    summary["aa_ratio"] = found["torch" + AA, 1.0]["over_torch"]
    summary["move_in_steps"] = found["move", 1.0]["step_ms"] / found["even", 1.0]["step_ms"]
    return Result(bench="tp", summary=summary, rows=rows)


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """All methods at one speed of the second rank, interleaved."""
    torch.set_num_threads(1)
    equal = spec["speed"] == 1
    shares: dict[str, Any] = {"even": None, "even" + AA: None}
    shares |= {"torch": "torch", "torch" + AA: "torch"} if equal else {"shares": "measured"}
    trainers = {method: Trainer(spec, share) for method, share in shares.items()}
    cases: dict[str, Callable[[], float]] = {method: trainer.step for method, trainer in trainers.items()}
    if equal:
        cases["move"] = trainers["even" + AA].move
    timings = interleave(cases, warmup=3, repeats=spec["repeats"], progress=report)
    timings["ideal"] = ideal(trainers["even"], spec["repeats"])
    return [
        {
            "method": method,
            "speed": spec["speed"],
            "step_ms": timing.median_ms,
            "spread": timing.spread,
            "over_ideal": timing.ratio(timings["ideal"]) if method != "move" else None,
            "over_torch": timing.ratio(timings["torch"]) if equal and method in trainers else None,
            "units": trainers[method].units if method in trainers else None,
            "loss": trainers[method].loss if method in trainers else None,
        }
        for method, timing in timings.items()
    ]


class Trainer:
    """One way to spread the model, with its optimiser."""

    def __init__(self, spec: Mapping[str, Any], share: Any) -> None:
        self._spec, self._device = spec, torch.device(spec["device"])
        torch.manual_seed(0)
        with self._device:
            self.model: nn.Module = Gpt(spec["width"], spec["heads"], spec["layers"], spec["length"])
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        self.units: dict[str, Any] | None = None
        self._clock: Clock | None = None
        if share == "torch":
            _spread_by_torch(self.model, mesh)
        else:
            tensor_parallel(self.model, mesh, shares=share, kinds=KINDS)
            sharded = sharded_model(self.model, "bench")
            self._clock = sharded.group.clock = Clock(self._device)
            first = list(sharded.blocks.values())[:2]
            self.units = {block.name: list(block.table.counts) for block in first}
        spread = [
            p for name, p in self.model.named_parameters() if name.startswith("layers.") and p.ndim == 2
        ]
        rest = [p for p in self.model.parameters() if not any(p is other for other in spread)]
        # Groups apart: torch's own parameters and plain ones cannot be updated by one kernel.
        self.optimizer = torch.optim.AdamW([{"params": spread}, {"params": rest}], lr=3e-4)
        self._steps, self.loss = 0, float("nan")
        self.local_times: list[tuple[float, LocalTimes]] = []

    def step(self) -> float:
        """One training step; gives the seconds until the last rank has finished it."""
        batch = tokens(self._spec["batch"], self._spec["length"], seed=0, step=self._steps, rank=0)
        batch = batch.to(self._device)
        self._steps += 1
        self._together()
        start = time.perf_counter()
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        own = time.perf_counter() - start
        self._together()
        taken = time.perf_counter() - start
        if self._clock is not None:
            self.local_times.append((own, self._clock.read()))
        self.loss = float(loss.detach())
        return taken

    def move(self) -> float:
        """Move a tenth of all units and back; gives the seconds of the way there."""
        here = assignment(self.model)
        counts = {}
        for name, (first, second) in here.items():
            moving = max(1, round((len(first) + len(second)) * _MOVED))
            counts[name] = [len(first) - moving, len(second) + moving]
        there = assignment_for(self.model, counts)
        self._together()
        start = time.perf_counter()
        move(self.model, self.optimizer, there)
        self._together()
        taken = time.perf_counter() - start
        move(self.model, self.optimizer, here)
        return taken

    def _together(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def ideal(even: Trainer, rounds: int) -> Timing:
    """What water-filling would have reached, round by round.

    The level of the ranks' own times in the even run, plus what its collectives took where nobody waited: on the rank
    that was last.
    """
    counted = [
        (each.compute, each.collectives, own - each.compute - each.collectives)
        for own, each in even.local_times[-rounds:]
    ]
    mine = torch.tensor(counted, dtype=torch.float64, device=next(even.model.parameters()).device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    samples = []
    for blocks, meetings, rest in torch.stack(every, dim=-1).tolist():
        per_share = [seconds * len(every) for seconds in blocks]
        samples.append(water_level(1, per_share, rest) + min(meetings))
    return Timing(samples=tuple(samples))


class Attend(nn.Module):
    """Causal attention that takes any number of heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Hidden(nn.Module):
    """The hidden units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attend(width, heads)
        self.norm2, self.hidden = nn.LayerNorm(width), Hidden(width)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.hidden(self.norm2(x))


class Gpt(nn.Module):
    """A decoder over bytes; gives the mean loss of the next byte."""

    def __init__(self, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        x = self.token(inputs) + self.position.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


KINDS: dict[type[nn.Module], UnitKind | Sequence[UnitKind]] = {
    Attend: Attention(query="query", key="key", value="value", out="out"),
    Hidden: Mlp(ins=("up",), out="down"),
}


def _spread_by_torch(model: nn.Module, mesh: Any) -> None:
    """As torch's documentation advises, with one conversion of the input for q, k and v."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    columns = ("attention.query", "attention.key", "attention.value", "hidden.up")
    plan: dict[str, Any] = {"attention": whole, "hidden": whole}
    plan |= {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.out", "hidden.down")}
    for layer in model.get_submodule("layers").children():
        parallelize_module(layer, mesh, plan)


def two_ranks(speed: float, device: str) -> Cluster:
    from trimtab.cluster import Cluster, Device, Host

    kind: Any = device
    classes = {"full": Device(kind=kind, speed=1.0), "slow": Device(kind=kind, speed=speed)}
    hosts = (Host(name="a", devices={"full": 1}), Host(name="b", devices={"slow": 1}))
    return Cluster(version=1, devices=classes, hosts=hosts)
