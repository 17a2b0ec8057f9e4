"""A plan: what each rank of a job does, what was predicted of that, and why. A file, made anywhere, applied anywhere.

A plan speaks of *roles*: ranks that are alike share one entry, so a thousand of them cost what one costs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from trimtab.strict_files import STRICT

PLAN_VERSION = 1

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Choice:
    """One operator in one precision on one role, as it was predicted: what a later plan may choose among."""

    seconds: NotNegative
    """Forward and backward of a step with the role's samples."""

    damage: NotNegative
    """Of one rank of the role with its share of the batch; 0 in the model's own precision."""

    memory: int = 0
    """Bytes of the rank's peak beyond what it is with this operator in the precision that the plan chose."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Role:
    """What ranks that are alike do."""

    device: str
    """Their device class in the cluster."""

    kind: Literal["cpu", "cuda"] | None = None
    """What torch calls it; a rank whose model is elsewhere refuses the plan. None where it is not known."""

    samples: Count
    """Of every step's batch, for each such rank."""

    precisions: dict[str, str]
    """By the operator's own name; those that are not named stay as the model has them."""

    compute_s: NotNegative
    """Predicted seconds of a step that each such rank computes, waiting and communication left out."""

    peak_bytes: Annotated[int, Field(ge=0)]
    """Predicted peak of its memory."""

    memory_bytes: Annotated[int, Field(ge=0)] | None = None
    """What its device offers; None for no limit."""

    fixed_s: NotNegative = 0.0
    """The part of `compute_s` that does not grow with samples."""

    after_s: NotNegative = 0.0
    """The part of `fixed_s` that comes after the ranks have met: the optimizer."""

    bytes_per_sample: NotNegative = 0.0
    """How its peak grows with a sample."""

    choices: dict[str, dict[str, Choice]] = Field(default_factory=dict)
    """By operator and precision (`OWN` is the model's): what plans made while training runs choose among."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Predicted:
    """What the plan is expected to bring."""

    step_s: NotNegative
    plain_step_s: NotNegative
    """Of plain DDP on the same cluster with the same batch: equal shares, nothing lowered, nothing compressed."""

    damage: NotNegative
    """Of all lowered operators of all ranks."""

    uniform_damage: NotNegative
    """Of the slow ranks wholly at their fastest precisions: what a user would do instead."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Plan:
    """What every rank of a job does."""

    version: int
    trimtab: str
    """Version that made it."""

    model: str
    """Fingerprint of the model: its parameters and operators."""

    batch: Literal["fixed", "free"]
    """Equal shares, or shares that follow speed."""

    bits: Annotated[int, Field(ge=1, le=8)] | Literal["adaptive"] | None
    """Of compressed gradients; None leaves them as they are."""

    roles: Annotated[dict[str, Role], Field(min_length=1)]
    ranks: Annotated[tuple[tuple[str, Count], ...], Field(min_length=1, strict=False)]
    """Roles in rank order, each with how many ranks in a row have it."""

    predicted: Predicted
    budget: NotNegative = 0.0
    """The damage that was allowed, with free shares."""

    reasons: tuple[str, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _refer_only_to_what_exists(self) -> Plan:
        unknown = sorted({name for name, _ in self.ranks} - self.roles.keys())
        if unknown:
            raise ValueError(f"ranks: no role {unknown[0]!r}; there are {', '.join(self.roles)}")
        return self

    @property
    def world_size(self) -> int:
        return sum(count for _, count in self.ranks)

    @property
    def batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return sum(self.roles[name].samples * count for name, count in self.ranks)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples by rank."""
        return tuple(self.roles[name].samples for name, count in self.ranks for _ in range(count))

    @property
    def hash(self) -> str:
        """Of what the ranks must agree on: everything but the words and predictions."""
        said = {
            "version": self.version,
            "model": self.model,
            "bits": self.bits,
            "ranks": self.ranks,
            "roles": {name: (role.samples, role.precisions) for name, role in self.roles.items()},
        }
        return sha256(json.dumps(said, sort_keys=True, default=asdict).encode()).hexdigest()[:16]

    def role_of(self, rank: int) -> str:
        """The name of a rank's role."""
        last = 0
        for name, count in self.ranks:
            last += count
            if rank < last:
                return name
        raise IndexError(f"rank {rank} of {last}")
