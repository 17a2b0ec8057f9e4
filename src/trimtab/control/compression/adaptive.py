"""Bits that change while training runs: when to check, who decides, and how all ranks switch together.

Every `look` steps rank 0 reads its statistics (they are of reduced gradients, so those of any rank would be
the same), asks the guard and, when one is due, makes a new plan. It publishes the decision in the job's
store; every rank applies it at the same later step, known beforehand. No collective is involved, and
a low-priority thread does the work. A decision depends on the training alone, never on a
clock, so the same run makes the same decisions, also after it was interrupted and resumed.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from trimtab.codec import Block
from trimtab.collectives import Piece
from trimtab.control.background import FAILED, Background
from trimtab.control.compression.optimizer_kind import OptimizerKind
from trimtab.control.compression.statistics import Statistics
from trimtab.doors.changing_bits import ChangingBits
from trimtab.environment import logger
from trimtab.planning.compression.bit_planner import BitPlanner, PlannerSettings
from trimtab.planning.compression.family import ADAMW, FAMILIES, Family
from trimtab.planning.compression.policies import POLICIES
from trimtab.report import events
from trimtab.wire_format import encoded_bytes

SAMPLE_EVERY, SAMPLE_EVERY_EARLY = 5, 2
"""Steps between two gradients that go into the averages, after the warm-up and during it."""

SAMPLED = 1024
"""Adjacent values that are sampled together: whole blocks of every family."""

MOST_DELAY = 5
"""Steps from a look to the switch; half the steps between looks if that is less."""


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Choose the bits of every layer repeatedly while training runs. The defaults suit any job."""

    family: str | None = None
    """A name in `trimtab.planning.compression.family.FAMILIES`; None chooses the fastest on this
    link among those that suit the optimizer."""

    policy: str = "dynamic"
    """How bits are chosen: a name in `trimtab.planning.compression.policies.POLICIES`."""

    start_bits: int = 4
    """Bits of every layer until the first plan."""

    warmup: int = 20
    """Steps before the first plan."""

    period: int = 100
    """Steps between plans; when gradients drift, the next plan is made earlier."""

    look: int = 20
    """Steps between two looks of the guard; plans are made at looks."""

    guard: bool = True
    """Raise the bits of layers whose error grows or whose loss rises."""

    def __post_init__(self) -> None:
        if self.look < 2:
            raise ValueError(f"Adaptive: look must be at least 2 steps, got {self.look}")
        if self.policy not in POLICIES:
            raise ValueError(f"Adaptive: there is no policy {self.policy!r}; choose {', '.join(POLICIES)}")
        if self.family is not None and self.family not in FAMILIES:
            raise ValueError(f"Adaptive: there is no family {self.family!r}; choose {', '.join(FAMILIES)}")
        if not 1 <= self.start_bits <= 8:
            raise ValueError(f"Adaptive: start_bits must be 1 to 8, got {self.start_bits}")
        if self.warmup < 1 or self.period < 1:
            raise ValueError(f"Adaptive: warmup and period must be at least 1 step, got {self}")

    @property
    def delay(self) -> int:
        """Steps from a look to the switch."""
        return min(self.look // 2, MOST_DELAY)


def family_codec(family: Family, bits: int) -> Block:
    """The codec of a family of compression settings, as plans name it."""
    return Block(bits=bits, block=family.block, stochastic=family.stochastic)


@dataclass(frozen=True, kw_only=True)
class Change:
    """New bits of some layers from a step on, and why."""

    step: int
    bits: dict[str, int]
    reasons: tuple[str, ...]


def mean_bits(pieces: Mapping[str, tuple[int, int, int]]) -> float:
    """Bits a value of what is compressed."""
    coded = [(numel, bits) for numel, bits, _ in pieces.values() if bits]
    return round(sum(n * bits for n, bits in coded) / max(sum(n for n, _ in coded), 1), 3)


def emit_bits(
    compression: ChangingBits,
    changes: Mapping[str, int] | None = None,
    *,
    family: str | None = None,
    step: int | None = None,
) -> None:
    """Record the bits of every parameter, once some of them change."""
    if events.active() and events.is_first_rank():
        pieces = compression.pieces
        bits = {name: bits for name, (_, bits, _) in pieces.items()} | dict(changes or {})
        sizes = [
            (numel, encoded_bytes(numel, bits[name], block)) for name, (numel, _, block) in pieces.items()
        ]
        events.emit(
            "bits",
            step=step,
            bits=bits,
            family=family,
            payload_bytes=sum(encoded for _, encoded in sizes),
            plain_bytes=4 * sum(numel for numel, _ in sizes),
        )


class Controller:
    """Changes the bits of one compression; every rank makes the same calls."""

    def __init__(
        self,
        compression: ChangingBits,
        config: Adaptive,
        settings: PlannerSettings,
        *,
        group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`tensor_group` has the ranks over which the model's units are sharded: what they replicate needs the same
        bits on all of them."""
        self._compression, self._config = compression, config
        self._decides = dist.get_rank(group) == 0 and (tensor_group is None or tensor_group.rank() == 0)
        layers = {
            name: piece
            for name, piece in compression.pieces.items()
            if piece[1] and name not in compression.fixed
        }
        self.first = {name: bits for name, (_, bits, _) in layers.items()}
        """Initial bits of every layer whose bits are chosen here."""
        self.history: list[Change] = []
        self.planned_at: int | None = None
        """The step at which the last plan took effect, even if it changed nothing."""
        sizes = {name: (compression.local_numel(name), SAMPLED) for name in layers}
        self._statistics = Statistics(sizes, compression.device) if self._decides else None
        self._family = settings.name
        """The current family; the planner's may be ahead of it by a few steps."""
        self.planner = BitPlanner(config.policy, settings, guard=config.guard)
        self._losses: list[Any] = []
        self._pending: tuple[int, Future[dict[str, Any]]] | None = None
        self._optimizer_kind = OptimizerKind(compression.parameter_ids) if self._decides else None
        self._background = Background(group, tensor_group)
        self._failed = False
        """Whether a decision failed, which is logged once."""
        self._own_cpu = 0.0

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._compression.step

    @property
    def adapts(self) -> bool:
        """Whether bits were chosen by what the gradients are, or are about to be."""
        return self.planned_at is not None or self._pending is not None

    @property
    def cpu_seconds(self) -> float:
        """CPU time of sampling, checking and planning so far."""
        return self._own_cpu + self._background.cpu_seconds

    def begin(self, step: int) -> None:
        """Called by the compression, in step order, before anything of a step is encoded."""
        if self._statistics is not None:
            start = time.thread_time()
            self._statistics.fold()
            self._own_cpu += time.thread_time() - start
        if self._pending is not None and self._pending[0] == step:
            self._apply(step)
        if step and step % self._config.look == 0:
            start = time.thread_time()
            self._pending = (step + self._config.delay, self._look(step))
            self._own_cpu += time.thread_time() - start

    def local(self, step: int, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        """Called by the compression with every bucket before it is encoded."""
        if self._statistics is not None and self._config.guard and (step + 1) % self._config.look == 0:
            start = time.thread_time()
            self._statistics.keep(pieces, flat)
            self._own_cpu += time.thread_time() - start

    def reduced(self, step: int, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        """Called by the compression with every reduced bucket."""
        every = SAMPLE_EVERY if step >= self._config.warmup else SAMPLE_EVERY_EARLY
        if self._statistics is not None and step % every == 0:
            start = time.thread_time()
            self._statistics.add(pieces, flat)
            self._own_cpu += time.thread_time() - start

    def observe_loss(self, loss: torch.Tensor | float) -> None:
        """Record the loss of this rank's step; only that of rank 0 is used."""
        if self._decides:
            self._losses.append(loss if isinstance(loss, int | float) else loss.detach())

    @property
    def closers(self) -> list[Callable[[], None]]:
        """What ends it; none of them refers to the compression, which may refer to the model."""
        watching = [] if self._optimizer_kind is None else [self._optimizer_kind.close]
        return [self._background.close, *watching]

    def close(self) -> None:
        for close in self.closers:
            close()

    def state_dict(self) -> dict[str, Any]:
        """Waits for a pending decision."""
        pending = None
        if self._pending is not None:
            pending = {"at_step": self._pending[0], "decision": self._background.wait(self._pending[1])}
        return {
            "config": vars(self._config).copy(),
            "settings": vars(replace(self.planner.settings, name=self._family)).copy(),
            "first": dict(self.first),
            "planned_at": self.planned_at,
            "history": [vars(change).copy() for change in self.history],
            "pending": pending,
            "losses": [float(loss) for loss in self._losses],
            "optimiser": None if self._optimizer_kind is None else self._optimizer_kind.kind,
            "planner": self.planner.state_dict(),
            "statistics": None if self._statistics is None else self._statistics.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the saved run would have, with its schedule and its family."""
        self._config = Adaptive(**state["config"])
        self._switch_family(PlannerSettings(**state["settings"]))
        self.first = dict(state["first"])
        self.planned_at = state["planned_at"]
        self.history = [Change(**change) for change in state["history"]]
        self._pending = None
        if state["pending"] is not None:
            self._pending = state["pending"]["at_step"], self._background.done(state["pending"]["decision"])
        self._losses = list(state["losses"])
        if self._optimizer_kind is not None:
            self._optimizer_kind.kind = state["optimiser"]
        self.planner.load_state_dict(state["planner"])
        if self._statistics is not None and state["statistics"] is not None:
            self._statistics.load_state_dict(state["statistics"])

    def _look(self, step: int) -> Future[dict[str, Any]]:
        key = f"look-{step}"
        if self._statistics is None:
            return self._background.fetch(key)
        current = {name: self._compression.pieces[name][1] for name in self.first}
        losses, self._losses = self._losses, []
        tensors = [loss.double().reshape(()) for loss in losses if isinstance(loss, torch.Tensor)]
        stacked = torch.stack([loss.to(tensors[0].device) for loss in tensors]) if tensors else None
        snapshot = self._statistics.snapshot(self._compression.feedback, current)
        warm = step >= self._config.warmup
        optimizer = self._optimizer_kind.kind if self._optimizer_kind is not None else None

        def decide() -> dict[str, Any]:
            values = [float(loss) for loss in losses if not isinstance(loss, torch.Tensor)]
            if stacked is not None:  # one wait that sleeps, not one for each loss that spins
                values += snapshot.on_host(stacked)
            return self.planner.decide(
                step,
                snapshot.layers(),
                current,
                loss=math.fsum(values) / len(values) if values else None,
                may_plan=warm,
                period=self._config.period,
                optimizer=optimizer or ADAMW,
            )

        return self._background.decide(key, decide)

    def _switch_family(self, settings: PlannerSettings) -> None:
        """Switch to another family; the error feedback of the previous one is dropped."""
        self.planner.settings, self._family = settings, settings.name
        family = settings.family
        codec = family_codec(family, self._config.start_bits)
        self._compression.switch_codec(codec, error_feedback=family.error_feedback)

    def _emit(self, step: int, decision: Mapping[str, Any]) -> None:
        if not events.active():
            return
        raised = [reason for reason in decision["reasons"] if re.search(r" from \d+ to \d+ bits: ", reason)]
        if raised:
            events.emit("guard", step=step, reason="; ".join(raised), bits=decision["bits"])
        pieces = self._compression.pieces
        before = mean_bits(pieces)
        after = mean_bits(
            {n: (size, decision["bits"].get(n, bits), block) for n, (size, bits, block) in pieces.items()}
        )
        events.emit(
            "decision",
            step=step,
            what="bits",
            noticed="; ".join(raised) or None,
            decided=f"{after:.2f} bits a value instead of {before:.2f}",
            why="; ".join(decision["reasons"]),
            expected={"bits": after},
            before=before,
            after=after,
        )
        emit_bits(self._compression, decision["bits"], family=self._family, step=step)

    def _apply(self, step: int) -> None:
        assert self._pending is not None
        decision = self._background.wait(self._pending[1])
        self._pending = None
        if FAILED in decision:
            if self._decides and not self._failed:
                logger().warning(
                    "step %d: bits stay as they are; planning them failed: %s", step, decision[FAILED]
                )
            self._failed = True
            return
        if decision["planned"]:
            self.planned_at = step
        if decision["family"] != self._family:
            self._switch_family(replace(self.planner.settings, name=decision["family"]))
        if decision["bits"]:
            # Of a sharded layer another rank may have so little that it is sent uncompressed there.
            bits = {name: bits for name, bits in decision["bits"].items() if name in self.first}
            self._compression.set_bits(bits, at_step=step)
        if self._decides:
            known = {**{name: self._compression.pieces[name][1] for name in self.first}, **decision["bits"]}
            listed = ", ".join(f"{name} {value}" for name, value in known.items())
            logger().debug(
                f"step {step}: family {self._family}, bits {'change' if decision['bits'] else 'stay'}: {listed}"
            )
        if decision["reasons"]:
            self.history.append(Change(step=step, bits=decision["bits"], reasons=tuple(decision["reasons"])))
            if self._decides:
                for reason in decision["reasons"]:
                    logger().info("step %d: %s", step, reason)
                self._emit(step, decision)
