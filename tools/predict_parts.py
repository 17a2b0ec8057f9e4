"""Where a predicted step parts from the measured one: computing, transfers, codec, or all together.

PYTHONPATH=src:. python3 tools/predict_parts.py --device cuda --model vit --json parts.json

Every figure is seconds, [fast rank, slow rank], medians. `hooked` are steps without communication with every
operator timed, `bare` the same steps with only their beginning and end timed, `alone` with the other rank idle.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trimtab.bench.predict import LINKS, PLANS, PROBED, two_ranks
from trimtab.bench.predict_ranks import SLOW, Job
from trimtab.bench.predict_trainers import PROBE, _update
from trimtab.bench.ranks import run_on_ranks
from trimtab.emulate import Emulation
from trimtab.predict.measured import Measured
from trimtab.predict.replay import replay
from trimtab.predict.step import build_step, predict_step
from trimtab.runtime.compress import compression_of
from trimtab.runtime.set_precision import set_precision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REPEATS = 7
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
            return self.both([round(median(column), 5) for column in zip(*taken)])
        return self.both(round(median(taken), 5))


def parts(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    torch.set_num_threads(1)
    job = Parts(spec)
    job.settle()
    slow = dist.get_rank() == 1
    found: dict[str, Any] = {"buckets": [b.nbytes for b in job.workload.buckets]}
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
    profiles = [p for _ in range(3) for p in job.probe()]
    measured = [Measured(job.workload, profile) for profile in profiles]
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
    for plan, words in zip(job.plans, spec["plans"]):
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
        row["measured"] = job.repeated(lambda plan=plan: job.measure(plan))
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
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", action="append")
    parser.add_argument("--link")
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
            "rounds": 1,
        }
        with Emulation(two_ranks(given.device, link)) as emulation:
            found[model] = run_on_ranks(emulation, on_rank, spec)
        print(model, json.dumps(found[model], indent=1), flush=True)
        if given.json:
            with open(given.json, "w") as file:  # noqa: PTH123
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
