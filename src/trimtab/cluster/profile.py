"""Measurements of a cluster's devices and links, and the models they were made with: part of the cluster file.

Times are in seconds. A profile belongs to one version of trimtab and torch, because their operators differ
between versions; a profile from another version is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from trimtab.errors import TrimtabError
from trimtab.strict_files import STRICT
from trimtab.workload import StoredWorkload, Workload

PROFILE_VERSION = 3

LOCAL = "local"
"""In place of a link class: the link between ranks of one host."""

Seconds = Annotated[float, Field(ge=0, le=1e12)]


def _ascending(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if list(sizes) != sorted(set(sizes)):
        raise ValueError(f"batch sizes {list(sizes)[:8]} must be in ascending order, each once")
    return sizes


Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], AfterValidator(_ascending)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OperatorTime:
    """Times of one call of an operator."""

    forward_s: Seconds
    backward_s: Seconds


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Line:
    """Seconds as a·n + c for n elements."""

    a: Seconds
    c: Seconds

    def seconds(self, elements: float) -> float:
        return self.a * elements + self.c


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CodecTime:
    """Times of the codec."""

    encode: Line
    decode: Line
    add: Line
    """Decode and add to a sum."""

    feedback: Line = Line(a=0.0, c=0.0)  # frozen
    """With error feedback, beside encoding: add what is owed, copy the sum, and keep what was not sent."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CollectiveTime:
    """per_message_s for each sequential message, per_byte_s for each byte that the busiest host sends."""

    per_message_s: Seconds
    per_byte_s: Seconds
    drag: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """By device class: fraction of the device that a transfer uses while it flows."""

    busy_message_s: Seconds = 0.0
    """As `per_message_s`, while the ranks compute: what passes a message on waits for its turn on the core. 0 where it
    makes no difference."""

    awaited_message_s: Seconds = 0.0
    awaited_byte_s: Seconds = 0.0
    """As `per_message_s` and `per_byte_s`, of single transfers that ranks start when they have just computed, and wait
    for: one with a CPU quota has none left just then. Both 0 where that was not measured."""

    per_bucket_s: Seconds = 0.0
    """Of the all-gather: what each compressed bucket takes beyond its messages, bytes and codec."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ShardedTime:
    """What FSDP2 adds to a rank's work, besides its collectives."""

    copy: Line
    """Of values into or out of the flat buffer that is sent."""

    unit_s: Seconds
    """Of torch's own code, for each collective of a unit."""

    unit_parameter_s: Seconds = 0.0
    """The same, for each parameter of the unit."""

    parameter_s: Seconds
    """Of the optimizer, for each parameter: operators on sharded tensors go through Python."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeviceProfile:
    """Times of one device of a class."""

    called: str
    """Its name from the driver or the operating system."""

    operators: dict[str, OperatorTime] = Field(default_factory=dict)
    """By operator key: kind, shape, type and precision (see `trimtab.predict.operators.costs.OperatorKey`)."""

    casts: dict[str, Line] = Field(default_factory=dict)
    """By direction, such as ``fp32>int8``."""

    codec: dict[str, CodecTime] = Field(default_factory=dict)
    """By bits."""

    adaptive_codec: CodecTime | None = None
    """With the bits and blocks that `trimtab.wire_format` expects of adaptive bits."""

    batches: dict[str, Sizes] = Field(default_factory=dict)
    """By model, as `trimtab.predict.operators.costs.workload_key` names it: the batch sizes at which its operators were
    measured."""

    too_large: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """By model: the smallest batch for which there was not enough memory; absent if all fit."""

    optimiser: Line | None = None
    """Time of the optimizer, by number of parameter elements."""

    sharded: ShardedTime | None = None
    """Under FSDP2; None where it was not measured."""

    launch_s: Seconds = 0.0
    """Time of the host to launch a kernel."""

    estimated_from: str | None = None
    """The measured class whose times were scaled by datasheet rates; None if it was measured itself."""

    @property
    def estimated(self) -> bool:
        return self.estimated_from is not None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProbedModel:
    """A model whose operators were measured: all that planning needs of it."""

    fingerprint: str
    """As in plans."""

    workloads: dict[Literal["cpu", "cuda"], StoredWorkload]
    """By kind of device: kernels differ between them."""

    indicator: str | None = None
    """How `damages` were estimated; None if they were not."""

    damages: dict[str, dict[str, Annotated[float, Field(ge=0)]]] = Field(default_factory=dict)
    """By operator and precision, for a rank that computes the whole batch."""

    def workload(self, kinds: Collection[str], autocast: str | None = None) -> Workload | None:
        """The workload on a kind of device; None if it was not captured there, or with another autocast than this.

        Without `autocast` it may be any.
        """
        stored = next((self.workloads[kind] for kind in sorted(self.workloads) if kind in kinds), None)
        if stored is None or autocast not in (None, stored.autocast):
            return None
        return stored.workload


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Profile:
    """Measurements of a cluster."""

    version: int
    trimtab: str
    torch: str
    devices: dict[str, DeviceProfile] = Field(default_factory=dict)
    """By device class."""

    links: dict[str, dict[str, CollectiveTime]] = Field(default_factory=dict)
    """By link class (`LOCAL` inside a host), then by collective: all_reduce, all_gather, all_to_all."""

    models: dict[str, ProbedModel] = Field(default_factory=dict)
    """By the name that `trimtab probe --model` was called with."""

    @model_validator(mode="after")
    def _is_of_this_form(self) -> Profile:
        if self.version != PROFILE_VERSION:
            raise ValueError(
                f"version mismatch: found {self.version}, expected {PROFILE_VERSION}; measure again "
                "with `trimtab probe`"
            )
        return self


def check_profile(profile: Profile, *, trimtab: str, torch: str | None = None) -> None:
    """Refuse a profile from another version of trimtab or torch; without `torch`, only of trimtab."""
    for what, measured, here in (("trimtab", profile.trimtab, trimtab), ("torch", profile.torch, torch)):
        if here is not None and measured != here:
            raise TrimtabError(
                f"the profile was measured with {what} {measured}, and this is {what} {here}, whose operators may "
                "have other times; measure again with `trimtab probe`"
            )


def smallest(ours: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
    """By key, the smaller value of the two."""
    return {key: min(ours.get(key, n), theirs.get(key, n)) for key, n in {**ours, **theirs}.items()}


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """One profile from several hosts' measurements. Later ones replace earlier ones of the same thing, but an
    estimate never replaces a measurement."""
    if not profiles:
        raise TrimtabError("no profiles to merge")
    first = profiles[0]
    devices: dict[str, DeviceProfile] = {}
    links: dict[str, dict[str, CollectiveTime]] = {}
    models: dict[str, ProbedModel] = {}
    for profile in profiles:
        check_profile(profile, trimtab=first.trimtab, torch=first.torch)
        for name, theirs in profile.devices.items():
            ours = devices.get(name)
            if ours is None or (ours.estimated and not theirs.estimated):
                devices[name] = theirs
            elif ours.estimated == theirs.estimated:
                devices[name] = _merged(ours, theirs, name)
        for name, collectives in profile.links.items():
            links[name] = {**links.get(name, {}), **collectives}
        for name, model in profile.models.items():
            models[name] = _merged_model(models.get(name, model), model, name)
    return Profile(
        version=PROFILE_VERSION,
        trimtab=first.trimtab,
        torch=first.torch,
        devices=devices,
        links=links,
        models=models,
    )


def _merged_model(ours: ProbedModel, theirs: ProbedModel, name: str) -> ProbedModel:
    if ours.fingerprint != theirs.fingerprint:
        raise TrimtabError(
            f"model {name!r} differs between the profiles (fingerprints {ours.fingerprint} and {theirs.fingerprint}); "
            "probe the same model on every host"
        )
    newest = theirs if theirs.indicator is not None else ours
    return replace(newest, workloads={**ours.workloads, **theirs.workloads})


def _merged(ours: DeviceProfile, theirs: DeviceProfile, name: str) -> DeviceProfile:
    if ours.called != theirs.called:
        raise TrimtabError(
            f"device class {name!r} is {ours.called!r} in one profile and {theirs.called!r} in another; "
            "give different devices their own classes"
        )
    batches = {model: ours.batches.get(model, ()) for model in {**ours.batches, **theirs.batches}}
    return DeviceProfile(
        called=ours.called,
        operators={**ours.operators, **theirs.operators},
        casts={**ours.casts, **theirs.casts},
        codec={**ours.codec, **theirs.codec},
        adaptive_codec=theirs.adaptive_codec or ours.adaptive_codec,
        batches={m: tuple(sorted({*sizes, *theirs.batches.get(m, ())})) for m, sizes in batches.items()},
        too_large=smallest(ours.too_large, theirs.too_large),
        optimiser=theirs.optimiser or ours.optimiser,
        sharded=theirs.sharded or ours.sharded,
        launch_s=theirs.launch_s or ours.launch_s,
        estimated_from=ours.estimated_from,
    )
