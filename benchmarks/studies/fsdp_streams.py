"""Does FSDP2 overlap computing with compressed collectives on a GPU, and on which streams?

    PYTHONPATH=src:. python3 -m benchmarks.studies.fsdp_streams OUT.json

Two ranks on unequal parts of one GPU train a GPT sharded by FSDP2, exactly and in 8 bits, with the collectives on

- `group`: the process group's own stream, which gathers and all-to-alls share (`async_op=True`),
- `fsdp`: the streams on which FSDP2 runs its own collectives,
- `apart`: these streams, and a communicator of its own for the gathers.

All of it with the GPU's default number of work queues for a client of MPS, and again with 32. Blocks and collectives
are timed by events on their streams; rows give milliseconds of a step (medians) on each rank: `step`, `computing`
(blocks alone), `gathers` and `scatters` (with the codec, and with waiting for the other rank), and `beside`, the
computing during which a collective was under way. `host` is when the host has queued the step.

Rows with `all_reduce` compare, for activations of so many bytes, what `trimtab probe` would measure (the host's clock,
one by one) with what one takes in a stream of products, on the rank that waits least: what tensor groups do.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import trimtab
from trimtab.bench.harness import Progress, environment
from trimtab.bench.ranks import run_on_cluster
from trimtab.bench.scenarios.predict.ranks import make_task, two_hosts
from trimtab.bench.trainer import Trainer
from trimtab.codec import Block
from trimtab.doors import fsdp_group, fsdp_shards
from trimtab.measure.timing import meet, repeated_seconds

WARMUP, STEPS = 3, 6
SUMS = (1 << 14, 1 << 24, 1 << 25, 1 << 26)
JOBS: tuple[tuple[int | None, int | None, str], ...] = (
    (None, None, "fsdp"),
    (8, None, "group"),
    (8, None, "fsdp"),
    (8, 8, "group"),
    (8, 8, "fsdp"),
    (8, 8, "apart"),
)
"""Bits of gradients and weights, and the streams."""

Interval = tuple[float, float]
doors: Any = fsdp_group
shards: Any = fsdp_shards


class Marks:
    """Begin and end of what runs on the device in a step."""

    def __init__(self) -> None:
        self.start: Any = None
        self.open: dict[str, list[Any]] = {}
        self.pairs: dict[str, list[tuple[Any, Any]]] = {}

    def begin_step(self) -> None:
        self.open, self.pairs = {}, {}
        self.start = event()

    def begin(self, kind: str) -> None:
        if self.start is None:  # on a CPU
            return
        self.open.setdefault(kind, []).append(event())

    def end(self, kind: str) -> None:
        if self.open.get(kind):
            self.pairs.setdefault(kind, []).append((self.open[kind].pop(), event()))

    def intervals(self, kind: str) -> list[Interval]:
        """In milliseconds since the step began."""
        pairs = self.pairs.get(kind, ())
        return sorted((self.start.elapsed_time(a), self.start.elapsed_time(b)) for a, b in pairs)


MARKS = Marks()


def event() -> Any:
    made: Any = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


class Passed(torch.autograd.Function):
    """Hands a value on, and says when its gradient passes."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mark: Callable[[], None]) -> torch.Tensor:
        ctx.mark = mark
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.mark()
        return gradients[0], None


def timed_block(forward: Callable[..., torch.Tensor], value: torch.Tensor, *rest: Any) -> torch.Tensor:
    """A block's forward whose passes are timed."""
    entered: torch.Tensor = Passed.apply(value, partial(MARKS.end, "computing"))  # type: ignore[no-untyped-call]
    MARKS.begin("computing")
    out = forward(entered, *rest)
    MARKS.end("computing")
    left: torch.Tensor = Passed.apply(out, partial(MARKS.begin, "computing"))  # type: ignore[no-untyped-call]
    return left


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    device = torch.device(spec["device"])
    task = make_task("gpt", device)
    samples = (5 if dist.get_rank() == 0 else 3) * task.samples
    own_group: Any = dist.new_group()
    exact = shards.all_gather, shards.all_to_all, shards.WeightGather.wait, doors.reduce_scatter
    rows: list[dict[str, Any]] = []
    if device.type == "cuda":
        rows += [sums(nbytes, device) for nbytes in SUMS]
    for index, (bits, weight_bits, streams) in enumerate(JOBS):
        shards.all_gather, shards.all_to_all, shards.WeightGather.wait, doors.reduce_scatter = exact
        place_collectives(streams, own_group)
        rows += [{"bits": bits, "weight_bits": weight_bits, "streams": streams, **row}
                 for row in measured(task.model, task.batch, samples, bits, weight_bits, device)]  # fmt: skip
        if dist.get_rank() == 0:  # should a later one hang
            Path(spec["partial"]).write_text(json.dumps(rows, indent=1))
        report(index + 1, len(JOBS))
    return rows


def sums(nbytes: int, device: torch.device) -> dict[str, Any]:
    values = torch.zeros(nbytes // 2, device=device, dtype=torch.bfloat16)
    product = torch.zeros(2048, 2048, device=device, dtype=torch.bfloat16)
    probed = repeated_seconds(lambda: dist.all_reduce(values), device, repeats=8)
    meet(device)
    pairs = []
    for _ in range(12):
        torch.mm(product, product)
        begin = event()
        dist.all_reduce(values)
        pairs.append((begin, event()))
    torch.cuda.synchronize()
    taken = torch.tensor([a.elapsed_time(b) for a, b in pairs][2:], device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MIN)
    return {
        "all_reduce": nbytes,
        "probed": round(1e3 * probed, 3),
        "in_stream": round(float(taken.median()), 3),
    }


def place_collectives(streams: str, own_group: Any) -> None:
    """Put the compressed collectives on these streams, and time them."""
    gather, scatter = shards.all_gather, shards.all_to_all
    wait, reduce = shards.WeightGather.wait, doors.reduce_scatter

    def gathered(output: Any, values: Any, group: Any, *, in_stream: bool, **how: Any) -> Any:
        chosen = own_group if streams == "apart" else group
        return gather(output, values, chosen, in_stream=in_stream and streams != "group", **how)

    def scattered(*arguments: Any, in_stream: bool = False) -> Any:
        return scatter(*arguments, in_stream=in_stream and streams != "group")

    def waited(self: Any, timeout: Any = None) -> bool:
        done: bool = wait(self, timeout)
        MARKS.end("gathers")
        return done

    def reduced(*arguments: Any, **named: Any) -> None:
        MARKS.begin("scatters")
        reduce(*arguments, **named)
        MARKS.end("scatters")

    def encoded(self: Any, *arguments: Any, **named: Any) -> None:
        MARKS.begin("gathers")
        made(self, *arguments, **named)

    made = INIT
    shards.all_gather, shards.all_to_all = gathered, scattered
    shards.WeightGather.__init__, shards.WeightGather.wait = encoded, waited
    doors.reduce_scatter = reduced


INIT: Any = fsdp_shards.WeightGather.__init__


def measured(
    bare: Any, batch_of: Any, samples: int, bits: int | None, weight_bits: int | None, device: torch.device
) -> list[dict[str, Any]]:
    """A row for each rank."""
    model: Any = copy.deepcopy(bare)
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    for block in blocks:
        if device.type == "cuda":
            block.forward = partial(timed_block, block.forward)
        fully_shard(block)
    fully_shard(model)
    if bits is not None:
        trimtab.compress(model, Block(bits=bits), weight_bits=weight_bits)
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-4),
                      lambda step: batch_of(samples, step=step), device, half=True)  # fmt: skip
    found: list[dict[str, float]] = []
    for step in range(WARMUP + STEPS):
        batch = trainer.batch(step)
        meet(device)
        start = time.perf_counter()
        if device.type == "cuda":
            MARKS.begin_step()
        trainer.train(batch)
        queued = time.perf_counter() - start
        meet(device)
        seconds = time.perf_counter() - start
        if step >= WARMUP:
            found.append({"step": 1e3 * seconds, "host": 1e3 * queued, **where(device)})
    own = {key: round(median(row[key] for row in found), 2) for key in found[0]}
    both: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(both, own)
    return [{"rank": rank, **row} for rank, row in enumerate(both)]


def where(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    computing, gathers, scatters = (MARKS.intervals(kind) for kind in ("computing", "gathers", "scatters"))
    under_way = union([*gathers, *scatters])
    return {
        "computing": length(computing),
        "gathers": length(gathers),
        "scatters": length(scatters),
        "beside": sum(max(0.0, min(b, d) - max(a, c)) for a, b in computing for c, d in under_way),
    }


def union(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def main(path: Path, device: str = "cuda") -> None:
    # By its own name: ranks import it.
    from benchmarks.studies.fsdp_streams import on_rank as run

    rows: list[dict[str, Any]] = []
    for queues in ("", "32") if device == "cuda" else ("",):
        if queues:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = queues
        found = run_on_cluster(
            two_hosts(device, "none"), run, {"device": device, "partial": f"{path.absolute()}.partial"}
        )
        rows += [{"queues": queues or "default", **row} for row in found]
        path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
        for row in found:
            print(queues or "default", row, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
