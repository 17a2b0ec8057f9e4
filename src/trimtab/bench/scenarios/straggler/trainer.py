"""One way to treat a slow rank, with its model and optimiser: what the bench of stragglers compares."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.bench.scenarios.straggler.models import KINDS, make_batch, make_model
from trimtab.control.tensor.balancer import balance, balancer_of, decisions
from trimtab.control.tensor.resizing import set_resize
from trimtab.planning.tensor.rebalance import Rules
from trimtab.sharding import Clock, LocalTimes
from trimtab.sharding.lease import lease
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.control.tensor.balancer import Record

GAMMA_MAX = 0.5
_RATE = {"cpu": 3e-4, "cuda": 1e-4}
_EPSILON = 1e-6
"""Of AdamW: gradients that are nothing but rounding must not become steps of full length."""


class Trainer:
    """A method's model on this rank."""

    def __init__(
        self, spec: Mapping[str, Any], method: str, leased: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        self._spec, self._device = spec, torch.device(spec["device"])
        torch.manual_seed(0)
        with self._device:
            self.model = make_model(spec)
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        options: dict[str, Any] = {"shares": "measured"} if method == "shares" else {}
        tensor_parallel(self.model, mesh, kinds=KINDS, **options)
        if method.startswith("semi"):
            horizon = spec.get("horizon", Rules.horizon)
            balance(
                self.model, Rules(gamma_max=GAMMA_MAX if method == "semi-resize" else 0.0, horizon=horizon)
            )
        self.sharded = sharded_model(self.model, "bench")
        self._clock = None
        if method == "even":
            self._clock = self.sharded.group.clock = Clock(self._device)
        part = 1 - spec["speeds"][dist.get_rank()] / max(spec["speeds"])
        if method.startswith("resize-") and part > 0:
            chosen: Any = method.removeprefix("resize-")
            set_resize(self.model, min(0.75, part), selection=chosen)
        if leased is not None:
            lease(self.model, leased)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_RATE[self._device.type], eps=_EPSILON)
        self.losses: list[float] = []
        self.taken: list[float] = []
        self.local_times: list[tuple[float, LocalTimes]] = []

    def step(self) -> float:
        """One training step; gives the seconds until the last rank has finished it."""
        batch = make_batch(self._spec, len(self.losses), self._device)
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
        self.losses.append(float(loss.detach()))
        self.taken.append(taken)
        return taken

    @property
    def counts(self) -> dict[str, tuple[int, ...]]:
        return {block.name: block.table.counts for block in self.sharded.blocks.values()}

    @property
    def units(self) -> dict[str, list[int]]:
        """What each rank computes of the first blocks."""
        return {
            block.name: list(block.table.counts) if block.lease is None else block.lease.counts
            for block in list(self.sharded.blocks.values())[:2]
        }

    def records(self) -> list[Record]:
        return decisions(self.model)

    def watching(self) -> float:
        """CPU seconds that watching took a step: between the steps, and the marks of its clock."""
        balancer = balancer_of(self.model)
        marks = len(self.sharded.blocks) * 2
        repeats = 50
        clock = balancer.fresh_clock()
        start = time.thread_time()
        for _ in range(repeats):
            clock.begin()
            for _ in range(marks):
                clock.compute_starts()
                clock.compute_ends()
                with clock.collective():
                    pass
            clock.end()
            clock.samples()
        marked = (time.thread_time() - start) / repeats / balancer.every
        return marked + balancer.spent / max(1, len(self.losses))

    def _together(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
