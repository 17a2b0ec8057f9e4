"""`trimtab compare A.yaml B.yaml`: the same model and seed under two settings, side by side."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, Any

from trimtab.bench.ranks import parse_rate, run_on_ranks, wire_bytes
from trimtab.bench.result import Result
from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.errors import TrimtabError
from trimtab.runtime.compare_settings import (
    AdaptiveCodec,
    BlockCodec,
    Default,
    NoCodec,
    PowerSGDCodec,
    Settings,
    load_settings,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch
    from torch import nn

HELD_OUT = 999_999
"""Seed of the batches that both sides are judged on."""

POINTS = 10
"""Rows of the table: steps at which both sides are looked at."""

UNTIMED = 2
"""First steps, which open connections and plan: not in the median of step times."""


def compare(first: Path, second: Path, progress: Callable[[int, int], None] | None = None) -> Result:
    """Train under both settings on emulated hosts, step by step in turn; losses, bytes and time.

    Raises:
        TrimtabError: when a file is wrong, or the two differ in more than how gradients travel.
    """
    from trimtab.emulate import Emulation

    sides = [load_settings(first), load_settings(second)]
    for name in Settings.model_fields:
        values = [getattr(side, name) for side in sides]
        if name != "codec" and values[0] != values[1]:
            raise TrimtabError(
                f"compare: {first} has {name} {values[0]} and {second} {values[1]}; "
                "two settings can be compared when only the codec differs: make the two equal"
            )
    link = sides[0].link
    spec = {"sides": [side.model_dump_json() for side in sides]}
    with ExitStack() as stack:
        try:
            emulation = stack.enter_context(Emulation(_hosts(sides[0].world, link)))
        except TrimtabError as error:
            if link is None:
                raise
            print(f"trimtab: the link cannot be shaped here, so it is not: {error}", file=sys.stderr)
            link = None
            emulation = stack.enter_context(Emulation(_hosts(sides[0].world, None)))
        measured = run_on_ranks(emulation, on_rank, spec, progress=progress)
    a, b = measured["sides"]
    summary = {
        "a": str(first),
        "b": str(second),
        "a_explained": a["explained"],
        "b_explained": b["explained"],
        "link": link or "unshaped",
        "a_final_loss": a["final_loss"],
        "b_final_loss": b["final_loss"],
        "a_wire_mb_per_step": a["wire_mb_per_step"],
        "b_wire_mb_per_step": b["wire_mb_per_step"],
        "a_step_ms": a["step_ms"],
        "b_step_ms": b["step_ms"],
        "b_loss_minus_a": b["final_loss"] - a["final_loss"],
        "b_bytes_over_a": b["wire_mb_per_step"] / a["wire_mb_per_step"],
        "b_time_over_a": b["step_ms"] / a["step_ms"],
    }
    return Result(bench="compare", summary=summary, rows=measured["rows"])


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    """Both sides in turn, step by step, so that what slows the machine slows both."""
    import torch

    torch.set_num_threads(1)
    sides = [Side(Settings.model_validate_json(text)) for text in spec["sides"]]
    steps = sides[0].settings.steps
    shown = {round((i + 1) * steps / POINTS) for i in range(POINTS)}
    rows = []
    for step in range(steps):
        for side in sides if step % 2 == 0 else reversed(sides):
            side.step(step)
        if step + 1 in shown:
            row: dict[str, Any] = {"step": step + 1}
            for key in ("loss", "wire_mb", "seconds"):
                row |= {f"{key}_{name}": getattr(side, key) for name, side in zip("ab", sides, strict=True)}
            rows.append(row)
        report(step + 1, steps)
    return {"rows": rows, "sides": [side.outcome() for side in sides]}


class Side:
    """One setting's model, optimiser and communication, and what they have come to."""

    def __init__(self, settings: Settings) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(settings.seed)
        self.settings = settings
        model, self._batch, self._context = _model(settings.model)
        self.ddp = DistributedDataParallel(model)
        attach(self.ddp, settings)
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[settings.optimizer]
        momentum: dict[str, float] = {"momentum": 0.9} if settings.optimizer == "sgd" else {}
        self._optimizer = kind(self.ddp.parameters(), lr=settings.lr, **momentum)
        self._rank = dist.get_rank()
        self.loss, self.wire_mb, self.times = float("nan"), 0.0, list[float]()

    @property
    def seconds(self) -> float:
        return sum(self.times)

    def step(self, step: int) -> None:
        """One training step, until the last rank has finished it."""
        import torch.distributed as dist

        import trimtab

        batch = self._tokens(self._batch, self.settings.seed, step, self._rank)
        dist.barrier()
        sent, start = wire_bytes(), time.perf_counter()
        loss = self.ddp(batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        trimtab.observe_loss(self.ddp, loss)
        dist.barrier()
        self.times.append(time.perf_counter() - start)
        self.wire_mb += (wire_bytes() - sent) / 1e6
        self.loss = float(loss.detach())

    def outcome(self) -> dict[str, Any]:
        import torch

        import trimtab

        with torch.no_grad():
            held_out = [self.ddp.module(self._tokens(16, HELD_OUT, i, 0)) for i in range(8)]
        explained = "plain DDP" if self.settings.codec.kind == "none" else trimtab.explain(self.ddp)
        return {
            "final_loss": float(torch.stack(held_out).mean()),
            "wire_mb_per_step": self.wire_mb / len(self.times),
            "step_ms": median(self.times[UNTIMED:] or self.times) * 1e3,
            "explained": explained,
        }

    def _tokens(self, batch: int, seed: int, step: int, rank: int) -> torch.Tensor:
        from trimtab.bench.models import tokens

        return tokens(batch, self._context, seed=seed, step=step, rank=rank)


def attach(ddp: Any, settings: Settings) -> None:
    """Have the gradients of a DDP module travel as the settings say."""
    import trimtab
    from trimtab.codec import Block, PowerSGD, TopK
    from trimtab.runtime.adaptive import Adaptive

    codec, seed = settings.codec, settings.seed
    if isinstance(codec, NoCodec):
        return
    if isinstance(codec, Default):
        trimtab.compress(ddp, seed=seed)
    elif isinstance(codec, AdaptiveCodec):
        config = Adaptive(family=codec.family, policy=codec.policy, warmup=codec.warmup, period=codec.period)
        trimtab.compress(ddp, config, seed=seed)
    elif isinstance(codec, BlockCodec):
        block = Block(bits=codec.bits, block=codec.block, stochastic=codec.stochastic)
        trimtab.compress(ddp, block, error_feedback=codec.error_feedback, seed=seed)
    elif isinstance(codec, PowerSGDCodec):
        trimtab.compress(ddp, PowerSGD(rank=codec.rank), seed=seed)
    else:
        trimtab.compress(ddp, TopK(density=codec.density), error_feedback=codec.error_feedback, seed=seed)


def _model(name: str) -> tuple[nn.Module, int, int]:
    """A model, its batch for each rank, and its context."""
    from trimtab.bench.models import Gpt

    if name == "gpt-small":
        return Gpt(width=96, layers=2, heads=4, context=64), 8, 64
    if name == "gpt5m":
        return Gpt(width=256, layers=6, heads=8, context=128), 4, 128
    return Gpt(width=512, layers=8, heads=8, context=128), 1, 128


def _hosts(world: int, link: str | None) -> Cluster:
    """As many hosts of one rank each, at a given link rate or unshaped."""
    hosts = tuple(Host(name=f"h{i}", devices={"cpu": 1}, link="link" if link else None) for i in range(world))
    return Cluster(
        version=1,
        devices={"cpu": Device(kind="cpu", speed=1.0)},
        links={"link": Link(gbit_per_s=parse_rate(link))} if link else {},
        hosts=hosts,
    )
