"""A plan: what each rank of a job does, what is predicted for it, and why. It can be made on any machine.

Plans are about *roles*: identical ranks share one entry, so a thousand of them cost as much as one.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from dataclasses import asdict
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass

from trimtab.predict.collectives import Route
from trimtab.strict_files import STRICT, FileFormat, replace_file

PLAN_VERSION = 2

Bits = Annotated[int, Field(ge=1, le=8)]
# Bounds are far beyond what exists; without them a damaged file ends in an overflow, or in a list of all its ranks.
Count = Annotated[int, Field(ge=1, le=1 << 40)]
RankCount = Annotated[int, Field(ge=1, le=1_000_000)]
Bytes = Annotated[int, Field(ge=0, le=1 << 63)]
NotNegative = Annotated[float, Field(ge=0, le=1e30)]
Positive = Annotated[float, Field(gt=0, le=1e30)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Choice:
    """One operator in one precision on one role, as predicted; later plans choose among these."""

    seconds: NotNegative
    """Forward and backward of a step with the role's samples."""

    damage: NotNegative
    """Damage of one rank of the role with its share of the batch; 0 in the model's own precision."""

    memory: Annotated[int, Field(ge=-(1 << 63), le=1 << 63)] = 0
    """Change of the rank's peak memory in bytes, relative to the precision that the plan chose."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Role:
    """What identical ranks do."""

    device: str
    """Their device class in the cluster."""

    kind: Literal["cpu", "cuda"] | None = None
    """Its torch device type; a rank whose model is elsewhere refuses the plan. None when unknown."""

    samples: Count
    """Samples of every step for each such rank, over all micro-batches. Ranks of a tensor group have the same ones."""

    precisions: dict[str, str]
    """By operator name; operators that are missing keep the model's precision."""

    compute_s: Positive
    """Predicted compute seconds of a step on each such rank, without waiting and communication. What is measured
    while the job runs is divided by it."""

    peak_bytes: Bytes
    """Predicted peak memory."""

    memory_bytes: Bytes | None = None
    """Memory of its device; None for no limit."""

    tensor_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The part of every block's units that each such rank holds; 1 without tensor groups."""

    fixed_s: NotNegative = 0.0
    """The part of `compute_s` that does not depend on samples."""

    after_s: NotNegative = 0.0
    """The part of `fixed_s` after the gradients are reduced: the optimizer."""

    bytes_per_sample: NotNegative = 0.0
    """Growth of its peak memory with each sample."""

    choices: dict[str, dict[str, Choice]] = Field(default_factory=dict)
    """By operator and precision (`OWN` is the model's): what plans made during training choose among."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Predicted:
    """What is expected of the plan."""

    step_s: NotNegative
    plain_step_s: NotNegative
    """Step time of plain DDP on the same cluster and batch: equal shares, nothing lowered or compressed."""

    damage: NotNegative
    """Damage of all lowered operators of all ranks."""

    uniform_damage: NotNegative
    """Damage with the slow ranks entirely at their fastest precisions, as a user would set them by hand."""

    alone: dict[str, NotNegative] = Field(default_factory=dict)
    """By adjustment ("shares", "precision", "bits", ...): the step with this one alone, at best."""

    without: dict[str, NotNegative] = Field(default_factory=dict)
    """By adjustment, or some ranks: the step without it, all else as planned."""

    tradeoff: Annotated[
        tuple[Annotated[tuple[NotNegative, NotNegative], Field(strict=False)], ...], Field(strict=False)
    ] = ()
    """(step, damage) of other damage budgets, from no damage to the fastest step; the plan's own is among them."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LocalRounds:
    """What local steps would do, as predicted; settings as in `trimtab.local_steps`."""

    every: Count
    bits: Bits
    fragments: Count
    outer_lr: Positive
    outer_momentum: NotNegative
    workers: Count
    step_s: Positive
    penalty: NotNegative
    """Expected relative increase of the loss over exchanging gradients in every step."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Plan:
    """What every rank of a job does."""

    version: int
    trimtab: str
    """Version of trimtab that made it."""

    model: str
    """Fingerprint of the model: its parameters and operators."""

    batch: Literal["fixed", "free"]
    """Equal shares, or shares that follow speed."""

    bits: Bits | Literal["adaptive"] | None
    """Bits of gradients; None sends them uncompressed."""

    roles: Annotated[dict[str, Role], Field(min_length=1)]
    ranks: Annotated[tuple[tuple[str, RankCount], ...], Field(min_length=1, strict=False)]
    """Roles in rank order, each with how many ranks in a row have it."""

    predicted: Predicted
    budget: NotNegative = 0.0
    """The damage allowed, with free shares."""

    wrapper: Literal["ddp", "fsdp"] = "ddp"
    """What the script wraps the model in: DDP, or FSDP2 where a whole copy does not fit a rank."""

    shard_ranks: Count | None = None
    """With FSDP2: how many ranks in a row share a copy of the model (HSDP); None for all."""

    weight_bits: Bits | None = None
    """With FSDP2: bits in which weights are gathered; None gathers them exactly."""

    tensor_groups: Annotated[tuple[tuple[int, ...], ...], Field(strict=False)] = ()
    """Ranks that hold one copy of the model together, by tensor parallelism, in ascending order, as torch's groups
    are; empty if every rank holds a copy."""

    accumulate: Count = 1
    """Micro-batches of a step."""

    layer_bits: dict[str, Bits | None] = Field(default_factory=dict)
    """By parameter, where other bits are used than `bits`; None sends it uncompressed."""

    route: Route | None = None
    """How compressed buckets are reduced; None leaves it to `trimtab.compress`."""

    bucket_cap_mb: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """The `bucket_cap_mb` that the script should pass to DDP; None for its default."""

    local_steps: LocalRounds | None = None
    """What `trimtab run --local-steps` would do instead, where that is predicted to be much faster than the plan, which
    exchanges gradients in every step."""

    reasons: tuple[str, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _refer_only_to_what_exists(self) -> Plan:
        unknown = sorted({name for name, _ in self.ranks} - self.roles.keys())
        if unknown:
            raise ValueError(f"ranks: no role {unknown[0]!r}; there are {', '.join(self.roles)}")
        if self.shard_ranks is not None and (self.wrapper != "fsdp" or self.world_size % self.shard_ranks):
            raise ValueError(
                f"shard_ranks: {self.shard_ranks} ranks share a copy under FSDP2, and divide {self.world_size} ranks"
            )
        if self.weight_bits is not None and (self.wrapper != "fsdp" or self.bits is None):
            raise ValueError(
                "weight_bits: weights are gathered in fewer bits only under FSDP2, where gradients are"
            )
        spared = () if self.route is None else self.route.spared
        if not (all(0 <= rank < self.world_size for rank in spared) and len(set(spared)) < self.world_size):
            raise ValueError(
                f"route.spared: ranks {list(spared)[:8]} must be some, not all, of 0 to {self.world_size - 1}"
            )
        grouped = sorted(rank for group in self.tensor_groups for rank in group)
        if grouped and grouped != list(range(self.world_size)):
            raise ValueError(
                f"tensor_groups: every rank from 0 to {self.world_size - 1} must be in one group"
            )
        if len({len(group) for group in self.tensor_groups}) > 1:
            raise ValueError("tensor_groups: all groups must have the same number of ranks")
        for group in self.tensor_groups:
            if list(group) != sorted(group):
                raise ValueError(f"tensor_groups: ranks {list(group)} must be in ascending order")
            if len({self.roles[self.role_of(rank)].samples for rank in group}) > 1:
                raise ValueError(f"tensor_groups: ranks {list(group)} must have the same samples")
        for place in zip(*self.tensor_groups, strict=True):
            if len({self.roles[self.role_of(rank)].tensor_share for rank in place}) > 1:
                raise ValueError(
                    f"tensor_groups: ranks {list(place)[:8]} are in the same place of their groups and must have the "
                    "same tensor_share"
                )
        return self

    @property
    def world_size(self) -> int:
        return self._ends[-1]

    @property
    def batch_size(self) -> int:
        """Samples of a step on all ranks together."""
        if self.tensor_groups:
            return sum(self.roles[self.role_of(group[0])].samples for group in self.tensor_groups)
        return sum(self.roles[name].samples * count for name, count in self.ranks)

    @property
    def tensor_size(self) -> int:
        """Ranks that hold one copy of the model together."""
        return len(self.tensor_groups[0]) if self.tensor_groups else 1

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples by rank, or by tensor group if there are any."""
        if self.tensor_groups:
            return tuple(self.roles[self.role_of(group[0])].samples for group in self.tensor_groups)
        return tuple(self.roles[name].samples for name, count in self.ranks for _ in range(count))

    @property
    def hash(self) -> str:
        """Hash of what the ranks must agree on: everything but reasons and predictions."""
        agreed = {
            "version": self.version,
            "model": self.model,
            "batch": self.batch,
            "bits": self.bits,
            "layer_bits": self.layer_bits,
            "route": self.route,
            "wrapper": self.wrapper,
            "shard_ranks": self.shard_ranks,
            "weight_bits": self.weight_bits,
            "tensor_groups": self.tensor_groups,
            "accumulate": self.accumulate,
            "bucket_cap_mb": self.bucket_cap_mb,
            "ranks": self.ranks,
            "roles": {
                name: (role.samples, role.precisions, role.tensor_share) for name, role in self.roles.items()
            },
        }
        return sha256(json.dumps(agreed, sort_keys=True, default=asdict).encode()).hexdigest()[:16]

    def role_of(self, rank: int) -> str:
        """The name of a rank's role."""
        if not 0 <= rank < self._ends[-1]:
            raise IndexError(f"rank {rank} of {self._ends[-1]}")
        return self.ranks[bisect_right(self._ends, rank)][0]

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """For each entry of `ranks`, the rank after its last: of tensor groups there are as many entries as ranks."""
        return tuple(itertools.accumulate(count for _, count in self.ranks))


_FORMAT = FileFormat(
    adapter=TypeAdapter(Plan),
    noun="a plan",
    version=PLAN_VERSION,
    remedy="make the plan again with `trimtab plan`",
    max_bytes=64 << 20,
)


def load_plan(path: str | Path) -> Plan:
    """Read a plan file, refusing anything that is not exactly in the form of `Plan`.

    Raises:
        TrimtabError: naming the file, the place inside it, and the remedy.
    """
    return _FORMAT.load(path)


def parse_plan(text: str, *, source: str) -> Plan:
    """Read a plan from text; `source` is what errors call it."""
    return _FORMAT.parse(text, source=source)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan that `load_plan` reads back as an equal one.

    Raises:
        TrimtabError: a folder that does not exist or cannot be written to.
    """
    replace_file(path, json.dumps(_FORMAT.adapter.dump_python(plan, mode="json"), indent=1) + "\n")
