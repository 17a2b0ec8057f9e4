"""What `trimtab run` was told, as its ranks receive it: one argument of the bootstrap; and when steps are our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

FLAG = "--settings"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The launcher's own options. A new one is a field here, an option in `trimtab.cli.run` and a take-over."""

    plan: str | None = None
    """The file of the plan, as an absolute path."""

    local_steps: str | None = None
    """Steps of a round, or "auto"; None exchanges gradients in every step."""

    max_penalty: float = 0.01
    """With "auto": the expected relative increase of the loss that is allowed."""

    adjust: str = "bits,shares"
    """What may be adjusted; see `trimtab.selector`."""

    auto: bool = False
    """Whether the job makes its own plan."""

    batch_sizes: str = "auto"
    """How the script's batches are cut among the ranks: "auto", "equal", or sizes as in "24,11,11"."""

    in_force: ClassVar[RunSettings | None] = None
    """Those under which this process runs; None if nothing was taken over."""

    def arguments(self) -> list[str]:
        """For the bootstrap's command line; nothing where every option has its default."""
        told = {
            field.name: value
            for field in fields(self)
            if (value := asdict(self)[field.name]) != field.default
        }
        return [FLAG, json.dumps(told)] if told else []

    @classmethod
    def take_from(cls, arguments: list[str]) -> RunSettings:
        """The settings at the front of the bootstrap's arguments, from which they are removed."""
        if arguments[:1] != [FLAG]:
            return cls()
        told: dict[str, Any] = json.loads(arguments[1])
        del arguments[:2]
        for name, value in told.items():
            told[name] = tuple(value) if isinstance(value, list) else value
        return cls(**told)


class OwnSteps:
    """Whether this process runs training steps of trimtab's own, which no take-over may touch."""

    running = False


@contextmanager
def own_steps() -> Iterator[None]:
    """Around steps that measure a copy of the model."""
    before, OwnSteps.running = OwnSteps.running, True
    try:
        yield
    finally:
        OwnSteps.running = before
