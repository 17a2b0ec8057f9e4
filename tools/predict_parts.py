"""Where a predicted step parts from the measured one: computing, transfers, codec, or all together.

PYTHONPATH=src:. python3 tools/predict_parts.py --device cuda --model vit --rounds 3 --json parts.json

First the bench itself, its rows under `rows`. Then seconds, [fast rank, slow rank], medians: for each plan its
computing alone (`own`) and its whole step; each way's transfers alone (`sequences`); with --uniform also steps
without communication: `hooked` with every operator timed, `bare` with only their beginning and end, `alone` with
the other rank idle.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.bench.predict import LINKS, PLANS, PROBED, _row, summary, two_ranks
from trimtab.bench.predict_ranks import SLOW, Job
from trimtab.bench.predict_trainers import PROBE, _update
from trimtab.bench.ranks import run_on_ranks
from trimtab.emulate import Emulation
from trimtab.predict.job import payloads
from trimtab.predict.measured import Measured
from trimtab.predict.replay import replay
from trimtab.predict.step import build_step, predict_step
from trimtab.runtime.compress import compression_of
from trimtab.runtime.set_precision import set_precision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REPEATS = 3
RANKS = ("fast", SLOW)


class Parts(Job):
    """A job of the bench, taken apart."""

    def bare(self, precisions: Mapping[str, str], size: int, way: Any = PROBE) -> tuple[float, ...]:
        """Forward, backward, optimiser, all, and the host's part of one step with nothing timed inside."""
        module, ddp, optimiser = self.trainers._made[way]
        set_precision(module, precisions)
        batch = self.trainers._task.batch(size)
        self._together()
        marks = [self._now()]
        start = time.perf_counter()
        with self.trainers._half():
            loss = ddp(*batch)
        marks.append(self._now())
        loss.backward()
        marks.append(self._now())
        _update(optimiser)
        marks.append(self._now())
        host = time.perf_counter() - start
        self._wait()
        wall = time.perf_counter() - start
        return (*(self._between(a, b) for a, b in pairwise(marks)), wall, host)

    def _together(self) -> None:
        self.trainers.together()

    def sequence(self, bits: int | None) -> float:
        """All buckets of a step one after another, with nothing to compute."""
        if bits is None:
            buckets = [torch.zeros(b.nbytes // 4, device=self.device) for b in self.workload.buckets]
            self._together()
            start = time.perf_counter()
            works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
            for work in works:
                work.wait()
            self._wait()
            return time.perf_counter() - start
        compression = compression_of(self.trainers._made[bits][1])
        seen: set[str] = set()
        chosen = []
        for reduction, pieces in reversed(list(compression._reductions.values())):
            if pieces[0].name not in seen:
                seen |= {piece.name for piece in pieces}
                flat = torch.randn(max(p.offset + p.numel for p in pieces), device=self.device)
                chosen.append((reduction, flat))
        self._together()
        start = time.perf_counter()
        futures = [
            compression._runner.submit(reduction.steps(flat, step=1, scale=0.5), flat)
            for reduction, flat in reversed(chosen)
        ]
        for future in futures:
            future.wait()
        self._wait()
        return time.perf_counter() - start

    def gathers(self, bits: int, group: Any) -> float:
        """The all-gathers of a step one after another, without the codec."""
        sizes = payloads(self.workload, bits)
        mine = [torch.zeros(n, dtype=torch.uint8, device=self.device) for n in sizes]
        all_ = [torch.zeros(2 * n, dtype=torch.uint8, device=self.device) for n in sizes]
        self._together()
        start = time.perf_counter()
        of = group or dist.group.WORLD
        works = [all_gather_single(b, a, of, async_op=True) for a, b in zip(mine, all_, strict=True)]
        for work in works:
            work.wait()
        self._wait()
        return time.perf_counter() - start

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, a: Any, b: Any) -> float:
        if self.device.type == "cpu":
            return b - a
        torch.cuda.synchronize()
        return a.elapsed_time(b) / 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def both(self, value: Any) -> list[Any]:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, value)
        return found

    def repeated(self, run: Callable[[], Any]) -> list[Any]:
        taken = [run() for _ in range(REPEATS)]
        if isinstance(taken[0], tuple):
            return self.both([round(median(column), 5) for column in zip(*taken, strict=True)])
        return self.both(round(median(taken), 5))


def parts(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    torch.set_num_threads(1)
    job = Parts(spec)
    job.settle()
    slow = dist.get_rank() == 1
    found: dict[str, Any] = {"buckets": [b.nbytes for b in job.workload.buckets]}
    profiles = []
    rows: list[dict[str, Any]] = [
        {"predicted": [], "naive": [], "measured": [], "again": [], "bottleneck": ""} for _ in job.plans
    ]
    for _ in range(spec["rounds"]):
        profiles += (now := job.probe())
        ones = [Measured(job.workload, profile) for profile in now]
        for plan, of in zip(job.plans, rows, strict=True):
            of["predicted"].append(mean(predict_step(one, job.cluster, plan).step_s for one in ones))
            of["naive"].append(of["predicted"][-1])
        for which in ("measured", "again"):
            for plan, of in zip(job.plans, rows, strict=True):
                of[which].append(job.measure(plan))
    if job.device.type == "cuda":
        for plan, of in zip(job.plans, rows, strict=True):
            of["memory"] = job.memory(plan)
    found["rounds"] = rows
    if spec["uniform"]:
        _uniform(job, slow, found)
    measured = [Measured(job.workload, profile) for profile in profiles]
    return _parts(job, slow, found, profiles, measured, spec)


def _uniform(job: Parts, slow: bool, found: dict[str, Any]) -> None:
    uniform = found["uniform: fwd, bwd, opt, wall, host (hooked: fwd, bwd, opt)"] = {}
    for low in (False, True):
        for size in [share * job.unit for share in PROBED]:
            name = f"{'low' if low else 'plain'} {size}"
            set_ = job.low if low else {}

            def hooked(set_: Any = set_, size: int = size) -> tuple[float, ...]:
                step = job.trainers.timed(job.workload, size, set_)
                return sum(step.forward), sum(step.backward), step.optimiser

            uniform[f"{name} hooked"] = job.repeated(hooked)
            uniform[f"{name} bare"] = job.repeated(lambda set_=set_, size=size: job.bare(set_, size))
            for rank in (0, 1):
                mine = rank == int(slow)

                def alone(set_: Any = set_, size: int = size, mine: bool = mine) -> tuple[float, ...]:
                    if mine:
                        return job.bare(set_, size)
                    job._together()
                    return (0.0,) * 5

                uniform[f"{name} alone {RANKS[rank]}"] = job.repeated(alone)[rank]


def _parts(
    job: Parts, slow: bool, found: dict[str, Any], profiles: Any, measured: Any, spec: Mapping[str, Any]
) -> dict[str, Any]:
    last = profiles[-1]
    found["links"] = {
        k: {c: [v.per_message_s, v.per_byte_s, v.drag] for c, v in of.items()} for k, of in last.links.items()
    }
    found["codec"] = {
        n: {b: [[line.a, line.c] for line in (c.encode, c.decode, c.add)] for b, c in d.codec.items()}
        for n, d in last.devices.items()
    }
    found["casts"] = {
        n: {k: [line.a, line.c] for k, line in d.casts.items()} for n, d in last.devices.items()
    }
    found["optimiser"] = {
        n: median(p.devices[n].optimiser.a for p in profiles)
        * sum(p.tensor.numel for p in job.workload.parameters if p.trainable)
        for n in RANKS
    }
    whole = found["plans"] = {}
    for plan, words in zip(job.plans, spec["plans"], strict=True):
        own = plan.ranks[RANKS[int(slow)]]
        row: dict[str, Any] = {}
        steps = [predict_step(one, job.cluster, plan) for one in measured]
        row["own predicted"] = [median(s.roles[r].own_s for s in steps) for r in (0, 1)]
        row["own bare"] = job.repeated(lambda own=own: job.bare(own.precisions, own.samples))
        row["predicted"] = median(s.step_s for s in steps)
        row["breakdown"] = {k: median(s.breakdown()[k] for s in steps) for k in steps[0].breakdown()}
        row["measured, in the real trainer"] = job.repeated(
            lambda own=own, plan=plan: job.bare(own.precisions, own.samples, plan.bits)
        )
        whole[str(words)] = row
    sequences = found["sequences"] = {}
    for bits in (None, *job.bits):
        plan = next(p for p in job.plans if p.bits == bits)
        totals = []
        for one in measured:
            roles, buckets = build_step(one, job.cluster, plan)
            idle = [
                replace(
                    role,
                    optimiser_s=0.0,
                    segments=tuple(replace(s, seconds=0.0, launch_s=0.0) for s in role.segments),
                )
                for role in roles
            ]
            totals.append(replay(idle, buckets).step_s)
        sequences[str(bits)] = {
            "predicted": median(totals),
            "measured": job.repeated(lambda bits=bits: job.sequence(bits)),
        }
        if bits is not None:
            group = compression_of(job.trainers._made[bits][1]).groups[0]
            for name, of_group in (("default group", None), ("compression's group", group)):
                sequences[str(bits)][f"gathers alone, {name}"] = job.repeated(
                    lambda bits=bits, of=of_group: job.gathers(bits, of)
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", action="append")
    parser.add_argument("--link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--uniform", action="store_true")
    parser.add_argument("--json")
    given = parser.parse_args()
    from tools.predict_parts import parts as on_rank

    found = {}
    link = given.link or LINKS[given.device][-1]
    for model in given.model or ["gpt"]:
        spec = {
            "device": given.device,
            "model": model,
            "link": link,
            "plans": [[list(p.shares), p.low, p.bits] for p in PLANS[link]],
            "rounds": given.rounds,
            "uniform": given.uniform,
        }
        with Emulation(two_ranks(given.device, link)) as emulation:
            found[model] = run_on_ranks(emulation, on_rank, spec)
        of_plans = zip(PLANS[link], found[model]["rounds"], strict=True)
        found[model]["rows"] = [{"model": model, "link": link, **_row(plan, of)} for plan, of in of_plans]
        found[model]["summary"] = summary(found[model]["rows"])
        print(model, json.dumps(found[model]["summary"]), flush=True)
        if given.json:
            with open(given.json, "w") as file:  # noqa: PTH123
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
