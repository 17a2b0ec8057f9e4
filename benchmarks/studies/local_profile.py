"""Where the time of a round of local steps goes: what the training waits for, and the CPU time of every thread.

Trains variants of one model by turns, each for whole rounds, beside the same model without any exchange, and prints a
JSON line for each variant: milliseconds of a step (on a GPU between events of the device), of what the training thread
spends in sending, waiting and taking, CPU milliseconds of each of the process's threads, and the exchanges themselves.

    PYTHONPATH=src:. python3 -m benchmarks.studies.local_profile gpt --link 100mbit
    PYTHONPATH=src:. python3 -m benchmarks.studies.local_profile vit --every 13,20
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import Progress
from trimtab.bench.ranks import hosts, run_on_cluster, slices
from trimtab.bench.scenarios.local.rows import GPT, SLICES
from trimtab.bench.scenarios.local.speed import task_of
from trimtab.control.rank_values import gather_numbers
from trimtab.control.running_local_steps import local_steps_of
from trimtab.local.agreement import AgreedFragment
from trimtab.local.worker import LocalWorker
from trimtab.measure.timing import meet

SWITCH_S = 0.0005
"""Another interval between switches of Python's threads, a tenth of the usual."""


class Profiled:
    """One variant: a model, its optimizer, and what was measured of it."""

    def __init__(self, name: str, spec: Mapping[str, Any]) -> None:
        """Variants: `ideal`; `wrapped` in a DDP that does not communicate; `local`, and with `-N` rounds of N steps.

        More words, joined by `+`, change one thing each: `counted` only counts steps and exchanges nothing, `switch`
        switches threads more often, `2bit` sends 2 bits, `plain` has no error feedback, `alone` neither encodes nor
        sends changes; on a GPU `resident` keeps the agreed weights there, and `ordinary` gives its streams no priority.
        """
        self.name, *self.words = name.split("+")
        task = task_of(spec)
        self.task, self.device = task, task.device
        cuda = task.device.type == "cuda"
        kind, _, every = self.name.partition("-")
        self.model: Any = task.model
        if cuda and kind != "ideal":
            self.model = DistributedDataParallel(task.model, init_sync=False)
            self.model.require_backward_grad_sync = self.model.require_forward_param_sync = False
        if kind == "local":
            more: dict[str, Any] = {"bits": 2} if "2bit" in self.words else {}
            trimtab.local_steps(self.model, every=int(every) if every else "auto", **more)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.step = 0
        self.spent: dict[str, float] = defaultdict(float)
        self.stages: list[tuple[int, int, float, float]] = []
        self.steps_ms: list[float] = []
        self.flying: list[bool] = []
        self.cpu_ms: dict[str, float] = defaultdict(float)
        self.late = self.taken = self.trained = 0
        self.walls_s = 0.0
        while kind == "local" and self.worker is None:
            self.train()
        worker = self.worker
        if worker is not None:
            self._watch(worker)
            for _ in range(worker.settings.every + worker.settings.delay):
                self.train()
        for _ in range(3):
            self.train()

    @property
    def worker(self) -> LocalWorker | None:
        own = local_steps_of(self.model)
        return None if own is None else own.worker

    def _watch(self, worker: LocalWorker) -> None:
        if "counted" in self.words:
            worker.step = lambda samples: None  # type: ignore[method-assign]
        for fragment in worker.fragments:
            if "resident" in self.words:
                for name in ("agreed", "momentum", "_next"):
                    setattr(fragment, name, getattr(fragment, name).to(self.device))
            if "ordinary" in self.words and self.device.type == "cuda":
                fragment._stream = torch.cuda.Stream(self.device)
            if "alone" in self.words:
                fragment._reduction = Nobody()
        if "plain" in self.words:
            worker.without_feedback()
        worker._runner.observe = self.stages.append

    def train(self) -> None:
        cuda = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss = self.model(*self.task.batch(step=self.step, rank=dist.get_rank()))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def block(self, steps: int) -> None:
        """Train for so many steps and keep what they took."""
        before = threads_cpu_s()
        self.stages.clear()
        cuda, worker = self.device.type == "cuda", self.worker
        marks: list[Any] = []

        def mark() -> None:
            if cuda:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
            else:
                marks.append(time.perf_counter())

        with TimedFragments(self):
            meet(self.device)
            start = time.perf_counter()
            mark()
            for _ in range(steps):
                self.train()
                mark()
                self.flying.append(worker is not None and any(one.in_flight for one in worker.fragments))
            meet(self.device)
            own = time.perf_counter() - start
        self.walls_s += max(row[0] for row in gather_numbers([own], None))
        self.trained += steps
        self.steps_ms += [a.elapsed_time(b) if cuda else (b - a) * 1e3 for a, b in pairwise(marks)]
        for name, seconds in threads_cpu_s().items():
            self.cpu_ms[name] += seconds - before.get(name, 0.0)

    def result(self) -> dict[str, Any]:
        worker, steps = self.worker, self.trained
        found: dict[str, Any] = {
            "variant": "+".join((self.name, *self.words)),
            "step_ms": round(self.walls_s / steps * 1e3, 3),
            "steps_ms_percentiles": [round(each, 1) for each in quantiles(self.steps_ms, n=10)],
            "cpu_ms_of_a_step": {
                name: round(seconds / steps * 1e3, 2)
                for name, seconds in sorted(self.cpu_ms.items(), key=lambda item: -item[1])
                if seconds / steps > 5e-5
            },
        }
        if worker is None:
            return found
        by = {
            flew: [t for t, f in zip(self.steps_ms, self.flying, strict=True) if f is flew]
            for flew in (True, False)
        }
        found["ms_of_steps_with_an_exchange"], found["without"] = (
            round(mean(by[flew]), 2) if by[flew] else None for flew in (True, False)
        )
        found["training_thread_ms_of_a_step"] = {
            name: round(seconds / steps * 1e3, 3) for name, seconds in self.spent.items()
        }
        found["late_of_taken"] = [self.late, self.taken]
        own: dict[int, list[float]] = defaultdict(list)
        ends: dict[int, list[float]] = defaultdict(list)
        for number, stage, start, end in self.stages:
            own[stage].append((end - start) * 1e3)
            ends[number] += [start, end]
        found["stage_ms"] = {stage: round(mean(times), 2) for stage, times in own.items()}
        if ends:
            found["exchange_ms"] = round(mean(max(t) - min(t) for t in ends.values()) * 1e3, 2)
        own_steps = local_steps_of(self.model)
        if own_steps is not None and own_steps.choice is not None:
            found["predicted_ms"], found["why"] = own_steps.choice.step_s * 1e3, own_steps.choice.reason
        settings = worker.settings
        found["settings"] = {key: getattr(settings, key) for key in ("every", "bits", "fragments", "delay")}
        return found


class Nobody:
    """A reduction with nobody."""

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        return iter(())


class TimedFragments:
    """Within it, what the training thread does with fragments is timed."""

    def __init__(self, profiled: Profiled) -> None:
        self._profiled = profiled
        self._before = AgreedFragment.send, AgreedFragment.take, AgreedFragment.wait

    def __enter__(self) -> None:
        profiled, (send, take, wait) = self._profiled, self._before

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(fragment: AgreedFragment, *args: Any) -> Any:
                if name == "wait":
                    profiled.taken += 1
                    profiled.late += fragment.in_flight and not fragment.arrived
                start = time.perf_counter()
                try:
                    return call(fragment, *args)
                finally:
                    profiled.spent[name] += time.perf_counter() - start

            return run

        AgreedFragment.send = timed("send", send)  # type: ignore[method-assign]
        AgreedFragment.take = timed("take and wait", take)  # type: ignore[method-assign]
        AgreedFragment.wait = timed("wait", wait)  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        AgreedFragment.send, AgreedFragment.take, AgreedFragment.wait = self._before  # type: ignore[method-assign]


def threads_cpu_s() -> dict[str, float]:
    """CPU seconds of this process's threads so far, summed by name."""
    named = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    found: dict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        try:
            name = named.get(task.name) or (task / "comm").read_text().strip()
            found[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
        except (OSError, IndexError, ValueError):
            continue  # a thread that has ended
    return dict(found)


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Every variant in turn, `spec["repeats"]` times."""
    variants = {name: Profiled(name, spec) for name in spec["variants"]}
    usual = sys.getswitchinterval()
    for repeat in range(spec["repeats"]):
        for variant in variants.values():
            sys.setswitchinterval(SWITCH_S if "switch" in variant.words else usual)
            worker = variant.worker
            every = 1 if worker is None else worker.settings.every
            variant.block(every * max(1, round(spec["steps"] / every)))
            if dist.get_rank() == 0:
                print(json.dumps(variant.result()), file=sys.stderr, flush=True)
        report(repeat + 1, spec["repeats"])
    return [variant.result() for variant in variants.values()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("gpt", "gpt2", "vit"))
    parser.add_argument("--link", default="100mbit", help="of the two hosts that train the GPT on the CPU")
    parser.add_argument("--every", default="", help="rounds of other lengths, comma-separated")
    parser.add_argument("--variants", default="ideal,local")
    parser.add_argument("--steps", type=int, default=32, help="of a block, about")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    variants = [*args.variants.split(","), *(f"local-{every}" for every in args.every.split(",") if every)]
    spec: dict[str, Any] = {"variants": variants, "steps": args.steps, "repeats": args.repeats}
    if args.model == "gpt":
        cluster, spec["model"] = hosts((1.0, 1.0), link=args.link), GPT
    else:
        cluster, spec["model"], spec["device"] = slices(SLICES), args.model, "cuda"
    for row in run_on_cluster(cluster, on_rank, spec):
        print(json.dumps(row))


if __name__ == "__main__":
    from benchmarks.studies import local_profile  # by this name the ranks find `on_rank`

    local_profile.main()
