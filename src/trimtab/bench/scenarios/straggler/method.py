"""One way to deal with a slow rank, with its model and optimizer: what the straggler bench compares."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab.bench.trainer import TensorTrainer
from trimtab.control import decisions, set_resize
from trimtab.control.tensor.balancer import Record, balancer_of
from trimtab.models import tasks
from trimtab.models.data import NoisyPatches
from trimtab.planning.tensor.balance import Balance
from trimtab.sharding import lease

GAMMA_MAX = 0.5
SIZES: dict[str, dict[str, int]] = {
    "cpu": {"width": 320, "heads": 16, "layers": 2, "batch": 4, "length": 128},
    # Wide and short: over sockets an all-reduce must not hide the products.
    "cuda": {"width": 4096, "heads": 32, "layers": 2, "batch": 2, "length": 512},
}
_RATE = {"cpu": 3e-4, "cuda": 1e-4}
_EPSILON = 1e-6
"""AdamW's: gradients that are nothing but rounding must not become full-sized steps."""


class Method(TensorTrainer):
    """A method's model on this rank."""

    def __init__(
        self, spec: Mapping[str, Any], method: str, leased: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        def prepare(model: nn.Module) -> None:
            missing = 1 - spec["speeds"][dist.get_rank()] / max(spec["speeds"])
            if method.startswith("resize-") and missing > 0:
                selection: Any = method.removeprefix("resize-")
                set_resize(model, min(0.75, missing), selection=selection)
            if leased is not None:
                lease(model, leased)

        balance = None
        if method.startswith("semi") or method in ("own", "lease"):
            balance = Balance(
                own=method != "lease",
                lease=method != "own",
                resize=GAMMA_MAX if method == "semi-resize" else 0.0,
                **spec.get("balance", {}),
            )
        super().__init__(
            make_task(spec),
            balance=balance,
            shares="measured" if method == "shares" else None,
            clock=method == "even",
            prepare=prepare,
            optimizer=lambda model: torch.optim.AdamW(
                model.parameters(), lr=_RATE[spec["device"]], eps=_EPSILON
            ),
        )

    def records(self) -> list[Record]:
        return decisions(self.model)

    def watching(self) -> float:
        """CPU seconds a step that watching took: between the steps, and for the marks of its clock."""
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


def make_task(spec: Mapping[str, Any]) -> tasks.Task:
    """A GPT, a Llama or BERT of `transformers`, or a small ViT on as many patches as the GPT has tokens."""
    device = torch.device(spec["device"])
    size = {name: spec[name] for name in ("width", "layers", "heads")}
    if spec["model"] == "gpt":
        return tasks.gpt(**size, context=spec["length"], samples=spec["batch"], device=device)
    if spec["model"] == "llama":
        hidden = 4 * spec["width"]
        return tasks.llama(spec["batch"], device, **size, hidden=hidden, length=spec["length"])
    if spec["model"] == "bert":
        return tasks.bert(spec["batch"], device, **size, length=spec["length"], dropout=0.0)
    samples = spec["batch"] * spec["length"] // NoisyPatches.patches
    return tasks.patches(**size, samples=samples, device=device)
