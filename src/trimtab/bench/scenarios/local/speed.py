"""How fast local steps are: hosts with slow links, hosts of unequal speed, and parts of one GPU over sockets.

Each method trains for a block of steps, without a barrier in between, over whole rounds; blocks take turns. A block of
local steps is timed from the middle of a round, when fragments are under way, to the same place of a later one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import ceil
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, Progress
from trimtab.bench.ranks import wire_bytes
from trimtab.bench.scenarios.ddp import make_task
from trimtab.bench.trainer import LoaderTrainer, Trainer, take_turns
from trimtab.control.compression.ddp import adaptive_of
from trimtab.control.local_steps import LocalSteps
from trimtab.control.rank_values import gather_numbers
from trimtab.control.running_local_steps import local_steps_of
from trimtab.measure.timing import meet, synchronize
from trimtab.models import tasks

SPEED = ("ddp", "ddp" + AA, "trimtab", "local", "local2bit", "ideal")
ALWAYS = ("local", "ideal")
"""What is timed whatever is asked for."""

UNEVEN, BATCH, ROUND, FEW = (1.0, 0.4), 14, 16, 1
"""Speeds of unequal hosts, their global batch and round, and how many steps of plain DDP are enough."""

LOCAL_BY_SPEED: dict[str, tuple[str, dict[str, Any]]] = {
    "batches": ("local", {}),
    "steps": ("local, unequal steps", {"uneven": "steps"}),
}
"""The method and its loader's options, by what follows the hosts' speeds."""

SETTLING = 2
"""Rounds before times count, while shares settle."""

LONG_S = 15.0
"""A method whose step takes longer has one step in all: at 10 Mbit/s one of plain DDP takes a minute and a half."""

BLOCK_S = {"cpu": 4.0, "cuda": 2.0}
"""About how long a block takes where nothing else says how many steps it has."""

MOST_STEPS = 48


class Method(Trainer):
    """One method's model, with its rounds where it has any."""

    def __init__(self, method: str, task: tasks.Task) -> None:
        self.name = method
        kind, _, every = method.removesuffix(AA).partition(" ")
        cuda = task.device.type == "cuda"
        model: nn.Module = task.model
        if kind in ("ddp", "trimtab") or (cuda and kind != "ideal"):
            # Every rank has the same weights; at 10 Mbit/s sending them would take a minute and a half.
            model = DistributedDataParallel(model, init_sync=False)
        if kind == "trimtab":
            trimtab.compress(model)  # type: ignore[arg-type]
        elif kind == "local":
            trimtab.local_steps(model, every=int(every) if every else "auto")
        elif kind == "local2bit":
            trimtab.local_steps(model, bits=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        super().__init__(
            model, optimizer, lambda step: task.batch(step=step, rank=dist.get_rank()), task.device, half=cuda
        )
        self.samples = task.samples
        self.seconds_of_steps: list[float] = []
        self.took_s = 0.0
        """In all, with what was not timed."""
        self.wire: list[float] = []

    @property
    def local_steps(self) -> LocalSteps | None:
        return local_steps_of(self.model)

    @property
    def every(self) -> int:
        """Steps of a round; 1 where gradients are exchanged in every step."""
        own = self.local_steps
        return 1 if own is None or own.worker is None else own.worker.settings.every

    def settle(self) -> None:
        """Train until local steps have chosen their settings and two fragments have been exchanged.

        On a GPU, where steps are short, until the bits of every-step compression are planned too.
        """
        own, steps = self.local_steps, 0
        while own is not None and own.worker is None and own.choice is None:
            self._train(1, steps)
            steps += 1
        if own is not None and own.worker is not None:
            own.keep_rounds()  # a bench's few steps say nothing about the loss
            self._train(2 * own.worker.settings.delay, steps)
        elif self.device.type == "cuda":
            controller = adaptive_of(self.model) if isinstance(self.model, DistributedDataParallel) else None
            while steps < 4 or (controller is not None and controller.planned_at is None):
                self._train(1, steps)
                steps += 1
        self._drain()

    def block(self, step_s: float) -> float:
        """Train for a block of steps; returns the seconds of one."""
        before = self.seconds_of_steps[-1] if self.seconds_of_steps else None
        if before is not None and before > LONG_S:
            return before
        if self.every > 1:
            wanted = max(12, self._fill(step_s)) if self.device.type == "cuda" else 12
            steps = self.every * ceil(wanted / self.every)
        elif self.name == "ideal":
            steps = max(4, min(self._fill(step_s), MOST_STEPS // 2))
        elif before is None and self.device.type == "cpu":
            steps = 1  # how long it takes is not known yet
        else:
            steps = max(1, self._fill(before or step_s))
        own = self.local_steps
        if own is not None and own.worker is not None:
            self._train(own.worker.settings.delay, 0)
        meet(self.device)
        sent, start = wire_bytes(), time.perf_counter()
        self._train(steps, 0)
        meet(self.device)
        # All ranks go on from the same number: they must take the same number of steps.
        seconds = max(row[0] for row in gather_numbers([(time.perf_counter() - start) / steps], None))
        self.wire.append((wire_bytes() - sent) / 1e6 / steps)
        self.seconds_of_steps.append(seconds)
        self._drain()
        return seconds

    def _fill(self, step_s: float) -> int:
        """Steps of about a block's time."""
        return min(MOST_STEPS, round(BLOCK_S[self.device.type] / step_s))

    def _train(self, steps: int, first: int) -> None:
        for step in range(first, first + steps):
            self.train(self.batch(step))

    def _drain(self) -> None:
        own = self.local_steps
        if own is not None:
            own.finish_step()
            if own.worker is not None:
                for fragment in own.worker.fragments:
                    fragment.wait()
        synchronize(self.device)


def task_of(spec: Mapping[str, Any]) -> tasks.Task:
    """What is trained: on a GPU a model by name."""
    if isinstance(spec["model"], str):
        return make_task(spec["model"], torch.device(spec["device"]))
    return tasks.gpt(**spec["model"], samples=1)


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """Seconds of a step of every method, or of some. The second look at a method is at the same model."""
    chosen = {*(spec.get("methods") or SPEED), *ALWAYS}
    if spec.get("device") == "cuda":
        chosen.discard("local2bit")  # its links are fast, and time on them is short
    names = [name for name in SPEED if name.removesuffix(AA) in chosen]
    names += [f"local {every}" for every in spec.get("every", ())]
    kinds = [name for name in names if not name.endswith(AA)]
    methods: dict[str, Method] = {}
    again: list[float] = []
    rounds = len(kinds) + spec["repeats"]
    for done, name in enumerate(kinds):
        start = time.monotonic()
        methods[name] = Method(name, task_of(spec))
        methods[name].settle()
        methods[name].took_s += time.monotonic() - start
        report(done + 1, rounds)
    step_s = 0.3
    for round_ in range(spec["repeats"]):
        for name in ("ideal", *(name for name in reversed(kinds) if name != "ideal")):
            start = time.monotonic()
            seconds = methods[name].block(step_s)
            methods[name].took_s += time.monotonic() - start
            if name == "ideal":
                step_s = seconds
        ddp = methods.get("ddp")
        if ddp is not None and (not again or again[-1] <= LONG_S):
            timed, ddp.seconds_of_steps = ddp.seconds_of_steps, []
            ddp.block(step_s)
            again.append(ddp.seconds_of_steps[-1])
            ddp.seconds_of_steps = timed
        report(len(kinds) + round_ + 1, rounds)
    times = {name: median(method.seconds_of_steps) for name, method in methods.items()}
    if again:
        times["ddp" + AA] = median(again)
    auto = methods["local"].local_steps
    worker, choice = (None, None) if auto is None else (auto.worker, auto.choice)
    samples = dist.get_world_size() * methods["ideal"].samples
    return {
        "rows": [
            {
                "method": name,
                "samples_per_s": samples / times[name],
                "over_ddp": times["ddp"] / times[name] if "ddp" in times else None,
                "fraction_of_ideal": times["ideal"] / times[name],
                "step_s": times[name],
                "wire_mb_per_step": median(methods[name.removesuffix(AA)].wire),
                "every": methods[name.removesuffix(AA)].every if name != "ideal" else None,
                "took_s": methods[name.removesuffix(AA)].took_s,
            }
            for name in names
        ],
        "every": methods["local"].every,
        "predicted_s": None if choice is None else choice.step_s,
        "every2": methods["local2bit"].every if "local2bit" in methods else None,
        "bits": None if worker is None else worker.settings.bits,
        "explain": trimtab.explain(methods["local"].model),
    }


def uneven_on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Hosts of unequal speed: equal batches in every step, and local steps by speed, beside each host by itself.

    `spec["uneven"]` says what follows speed: "batches", or "steps" of a round.
    """
    shares = [round(BATCH * speed / sum(UNEVEN)) for speed in UNEVEN]
    own = shares[dist.get_rank()]
    method, options = LOCAL_BY_SPEED[spec["uneven"]]

    def trainer(name: str) -> LoaderTrainer:
        task = tasks.gpt(**{**spec["model"], "context": 64}, samples=BATCH // len(UNEVEN))
        ddp = DistributedDataParallel(task.model, init_sync=False)
        if name != method:
            return LoaderTrainer(ddp, task, lr=3e-4, samples=own, adjust=None)
        trimtab.local_steps(ddp, every=ROUND)
        return LoaderTrainer(ddp, task, lr=3e-4, shares=UNEVEN, **options)

    names = ("ddp", method, "ideal") if spec["uneven"] == "batches" else (method, "ideal")
    trainers = {name: trainer(name) for name in names}
    timings = take_turns(
        trainers,
        ("ideal",),
        ("ddp", "ideal"),
        warmup=SETTLING,
        repeats=spec["repeats"],
        steps=ROUND,
        report=report,
        few={"ddp": FEW},
    )
    return [
        {
            "method": name,
            "samples_per_s": 1e3 / timing.median_ms,
            "over_ddp": 1 / timing.ratio(timings["ddp"]) if "ddp" in timings else None,
            "fraction_of_ideal": 1 / timing.ratio(timings["ideal"]),
            "wire_mb_per_step": trainers[name].wire_mb,
            "every": ROUND if name == method else None,
            "shares": None if name == "ideal" else "/".join(map(str, trainers[name].data.shares)),
        }
        for name, timing in timings.items()
    ]
