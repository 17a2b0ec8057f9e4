"""Plans that jobs made for themselves, kept by model and cluster."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.control.autopilot.observed_step import StepKind
from trimtab.control.plans.active_plan import plan_text
from trimtab.environment import EMULATION, cache_folder, logger
from trimtab.errors import TrimtabError
from trimtab.measure.device import called
from trimtab.measure.fingerprint import fingerprint
from trimtab.planning.plan import Plan, parse_plan
from trimtab.strict_files import replace_file


@dataclass(frozen=True, kw_only=True)
class KnownPlan:
    """A plan of an earlier start."""

    plan: Plan
    samples: tuple[int, ...]
    """Of each rank in a step of the script, before the plan divided them."""

    kind: StepKind
    """Of the steps for which it was made."""


class PlanCache:
    """The plan of one model on one cluster; rank 0's file counts."""

    def __init__(self, key: str, rank: int, *, folder: Path | None = None, keep: bool = True) -> None:
        """`keep`: whether anything is read or written; an emulated cluster ends with its emulation."""
        self.path = (folder or cache_folder() / "autopilot") / f"{key}.json"
        self._rank, self._keep = rank, keep

    @classmethod
    def of_job(cls, ddp: DistributedDataParallel, adjust: frozenset[str], budget: float) -> PlanCache:
        """By everything that is known before the first step. Collective."""
        device = next(ddp.parameters()).device
        here = (called(device), torch.get_num_threads(), os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"))
        everyone: list[Any] = [None] * ddp.process_group.size()
        dist.all_gather_object(everyone, here)
        parts = [
            *(fingerprint(ddp), _how_it_runs(ddp), everyone, sorted(adjust), budget),
            *(torch.__version__, trimtab.__version__),
        ]
        key = sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return cls(key, ddp.process_group.rank(), keep=EMULATION not in os.environ)

    def load(self) -> KnownPlan | None:
        """The plan of an earlier start, the same on every rank; None if none can be read. Collective."""
        text: list[str | None] = [None]
        if self._rank == 0 and self._keep and self.path.exists():
            try:
                text = [self.path.read_text()]
                _parsed(str(text[0]), self.path)
            except (OSError, ValueError, KeyError, TypeError, TrimtabError) as error:
                logger().warning("%s cannot be read (%s); planning again", self.path, type(error).__name__)
                text = [None]
        dist.broadcast_object_list(text)
        return None if text[0] is None else _parsed(text[0], self.path)

    def save(self, plan: Plan, samples: tuple[int, ...], kind: StepKind) -> None:
        """Keep a plan for the next start; a folder that cannot be written is said, and no more."""
        if not self._keep:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(
                self.path, json.dumps({"samples": samples, "kind": asdict(kind), "plan": plan_text(plan)})
            )
        except (OSError, TrimtabError) as error:
            logger().warning("autopilot: the plan is not kept for the next start: %s", error)


def _how_it_runs(ddp: DistributedDataParallel) -> list[Any]:
    """What else a plan depends on: whose code is called, whether that can be repeated, and how products are rounded."""
    model = ddp.module
    return [
        *(type(model).__module__, type(model).__qualname__, getattr(model, "automatic_optimization", None)),
        *(torch.get_float32_matmul_precision(), [p.requires_grad for p in model.parameters()]),
    ]


def _parsed(text: str, path: Path) -> KnownPlan:
    content = json.loads(text)
    return KnownPlan(
        plan=parse_plan(content["plan"], source=str(path)),
        samples=tuple(map(int, content["samples"])),
        kind=StepKind(
            autocast=content["kind"]["autocast"], elements=tuple(map(int, content["kind"]["elements"]))
        ),
    )
