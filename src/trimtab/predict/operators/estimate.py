"""Devices that are not available: a measured device's times, scaled by the datasheet of another.

Products scale with the rate of their precision, everything else with memory bandwidth. Where the measured device is a
GPU of the catalog too, both rates are those of the datasheets: the two are assumed to reach the same fraction of them.
Otherwise its own rates are derived from its operators, the fastest product in each precision and the bytes that its
optimizer moves, and the other device is assumed to reach a usual fraction of its datasheet's rates. Results are marked
as estimates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Literal

from trimtab.cluster import Cluster, Device
from trimtab.cluster.catalog import CATALOG, KnownDevice, lookup, lookup_typed
from trimtab.cluster.profile import CodecTime, DeviceProfile, Line, OperatorTime, Profile
from trimtab.errors import TrimtabError
from trimtab.predict.operators.costs import OperatorKey
from trimtab.predict.operators.low_precision import passes
from trimtab.workload.operator import PRODUCTS

REACHED = 0.7
"""Fraction of a datasheet's rate that a large product reaches."""

REACHED_BANDWIDTH = 0.85
ADAM_BYTES = 28
"""Bytes that Adam reads and writes per parameter: itself and two averages twice, its gradient once."""


def with_estimates(cluster: Cluster, profile: Profile) -> Profile:
    """The profile with an estimate for every device class that was not measured.

    Raises:
        TrimtabError: a class is not in the catalog, or there is no measured device to scale from.
    """
    devices = dict(profile.devices)
    for name, device in cluster.devices.items():
        if name not in devices:
            devices[name] = estimated(name, device, profile.devices)
    return replace(profile, devices=devices)


def measured_kinds(cluster: Cluster, profile: Profile) -> set[Literal["cpu", "cuda"]]:
    """The kinds of devices on which a cluster's times were measured; estimates count as what they were scaled from."""
    kinds = set()
    for name in {device for host in cluster.hosts for device in host.devices}:
        measured = profile.devices.get(name)
        source = measured.estimated_from if measured is not None else None
        kinds.add(cluster.devices[source if source in cluster.devices else name].kind)
    return kinds


def estimated(name: str, device: Device, measured: Mapping[str, DeviceProfile]) -> DeviceProfile:
    """The times of a device class of the catalog, scaled from a measured one."""
    known = known_as(name, device)
    if known is None:
        raise TrimtabError(
            f"device class {name!r} was not measured, and its `model` ({device.model or 'none'}) is not in the "
            f"catalog; run `trimtab probe` on one, or give it a model such as "
            f"{', '.join(d.model for d in CATALOG[:4])}"
        )
    for title, profile in measured.items():
        if not profile.estimated and rates(profile).keys() & known.tflops and profile.optimiser is not None:
            sheet = lookup(profile.called)
            same_kind = (
                sheet is not None and sheet.kind == known.kind == "cuda"
            )  # a CPU's sheet is that of one core
            return scaled_profile(title, profile, known, sheet if same_kind else None)
    raise TrimtabError(
        f"device class {name!r} ({known.model}) can only be estimated from a measured device; run `trimtab probe` "
        "on one, with a model that has linear layers or convolutions"
    )


def rates(profile: DeviceProfile) -> dict[str, float]:
    """Operations per second of the fastest linear layer or convolution in each precision."""
    best: dict[str, float] = {}
    for text, times in profile.operators.items():
        key = OperatorKey.parse(text)
        flops = _linear_flops(key.shape) if key.kind == "linear" else _conv_flops(key.shape)
        if key.kind in ("linear", "conv") and times.forward_s > 0:
            best[key.precision] = max(best.get(key.precision, 0.0), flops / times.forward_s)
    return {precision: rate for precision, rate in best.items() if rate}


def _linear_flops(shape: str) -> float:
    sizes = re.match(r"(\d+)x(\d+)x(\d+)", shape)
    return 2.0 * prod(map(int, sizes.groups())) if sizes is not None else 0.0


def _conv_flops(shape: str) -> float:
    """Of a convolution whose sizes are known by its key; 0 if they are not."""
    sizes = re.match(r"([\dx]+)[^,]*,w([\dx]+)", shape)
    options = {name: [*map(int, values.split())] for name, values in re.findall(r"(\w+)=\(([\d ]+)\)", shape)}
    if sizes is None or not {"stride", "padding", "dilation"} <= options.keys():
        return 0.0
    (count, _, *inputs), (outputs, *kernel) = ([*map(int, text.split("x"))] for text in sizes.groups())
    steps = zip(inputs, kernel[1:], options["stride"], options["padding"], options["dilation"], strict=True)
    places = [
        (size + 2 * pad - reach * (width - 1) - 1) // stride + 1 for size, width, stride, pad, reach in steps
    ]
    return 2.0 * count * outputs * prod(places) * prod(kernel)


def known_as(name: str, device: Device) -> KnownDevice | None:
    """The catalog's entry of a device class: by its model, or else by the class's own name."""
    return lookup(device.model) if device.model else lookup_typed(name)


def scaled_profile(
    title: str, profile: DeviceProfile, known: KnownDevice, sheet: KnownDevice | None = None
) -> DeviceProfile:
    """The measured times of class `title`, scaled to what another device should reach.

    Args:
        sheet: the measured device's own datasheet; None derives its rates from its times.
    """
    assert profile.optimiser is not None
    if sheet is not None:
        bandwidth = sheet.gb_per_s / known.gb_per_s
        slowdown = {p: rate / known.tflops[p] for p, rate in sheet.tflops.items() if p in known.tflops}
    else:
        bandwidth = ADAM_BYTES / profile.optimiser.a / (known.gb_per_s * 1e9 * REACHED_BANDWIDTH)
        slowdown = {
            p: rate / (known.tflops[p] * 1e12 * REACHED)
            for p, rate in rates(profile).items()
            if p in known.tflops
        }
    operators = {}
    for text, times in profile.operators.items():
        slower = _factor(OperatorKey.parse(text), slowdown, known, bandwidth)
        if slower is not None:
            operators[text] = OperatorTime(
                forward_s=times.forward_s * slower, backward_s=times.backward_s * slower
            )
    return DeviceProfile(
        called=known.model,
        operators=operators,
        # Without those of bf16 its operators are not predicted to hand on bf16.
        casts={
            direction: _scaled(line, bandwidth)
            for direction, line in profile.casts.items()
            if "bf16" not in direction or "bf16" in known.tflops
        },
        codec={bits: _scaled_codec(codec, bandwidth) for bits, codec in profile.codec.items()},
        adaptive_codec=profile.adaptive_codec and _scaled_codec(profile.adaptive_codec, bandwidth),
        batches=profile.batches,
        optimiser=_scaled(profile.optimiser, bandwidth),
        launch_s=profile.launch_s,
        estimated_from=title,
    )


def _factor(
    key: OperatorKey, slowdown: Mapping[str, float], known: KnownDevice, bandwidth: float
) -> float | None:
    """How many times longer an operator takes; None if the device does not support its precision.

    Args:
        slowdown: of products, by precision.
    """
    if key.kind not in PRODUCTS:
        return bandwidth
    names = passes(key.precision)
    if any(name not in known.tflops for name in names):
        return None
    usual = slowdown.get("fp32", next(iter(slowdown.values())))  # of what is not known
    return sum(slowdown.get(name, usual) for name in names) / len(names)


def _scaled_codec(codec: CodecTime, factor: float) -> CodecTime:
    return CodecTime(
        encode=_scaled(codec.encode, factor),
        decode=_scaled(codec.decode, factor),
        add=_scaled(codec.add, factor),
        feedback=_scaled(codec.feedback, factor),
    )


def _scaled(line: Line, factor: float) -> Line:
    return Line(a=line.a * factor, c=line.c * factor)
