"""Devices that are not available: rates are read from measured operators, and times are scaled by datasheets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.predict.profiles import FAST, cluster, profile

from trimtab.cluster import Device
from trimtab.cluster.catalog import lookup_typed
from trimtab.cluster.profile import DeviceProfile, Line, OperatorTime
from trimtab.errors import TrimtabError
from trimtab.predict.operators.estimate import (
    REACHED,
    estimated,
    measured_kinds,
    rates,
    scaled_profile,
    with_estimates,
)

LINEAR = "linear|1000x100x200,bias|bf16|bf16"
CONV = "conv|4x3x32x32,w8x3x3x3,w8,dilation=(1 1),groups=1,padding=(1 1),stride=(2 2)|fp32|fp32"
NORM = "norm|aten.native_layer_norm.default,4x8|bf16|bf16"


def measured(*keys: str) -> DeviceProfile:
    time = OperatorTime(forward_s=1e-3, backward_s=2e-3)
    return DeviceProfile(called="x", operators=dict.fromkeys(keys, time), optimiser=Line(a=1e-9, c=0.0))


def test_rates_are_those_of_products() -> None:
    assert rates(measured(LINEAR, NORM)) == {"bf16": pytest.approx(2 * 1000 * 100 * 200 / 1e-3)}
    assert rates(measured(CONV)) == {"fp32": pytest.approx(2 * 4 * 8 * 16 * 16 * 27 / 1e-3)}


def test_a_profile_under_autocast_is_scaled_by_its_own_precision() -> None:
    card = lookup_typed("T4")
    assert card is not None
    with pytest.raises(TrimtabError, match="can only be estimated from a measured device"):
        estimated("T4", Device(kind="cuda", speed=1.0), {"a": measured(LINEAR)})  # a T4 has no bf16
    a10 = lookup_typed("A10")
    assert a10 is not None
    found = scaled_profile("a", measured(LINEAR, NORM), a10)
    slower = 4e10 / (a10.tflops["bf16"] * 1e12 * REACHED)
    assert found.operators[LINEAR].forward_s == pytest.approx(1e-3 * slower)
    assert found.estimated_from == "a"
    assert found.operators[NORM].forward_s != found.operators[LINEAR].forward_s
    line = Line(a=1e-12, c=0.0)
    own = replace(measured(CONV), casts={"fp32>bf16": line, "fp32>int8": line})
    assert scaled_profile("a", own, card).casts.keys() == {"fp32>int8"}
    assert scaled_profile("a", own, a10).casts.keys() == own.casts.keys()


def test_a_card_of_the_catalog_is_scaled_by_the_ratio_of_the_datasheets() -> None:
    fast, slow = lookup_typed("L40S"), lookup_typed("L4")
    assert fast is not None
    assert slow is not None
    own = replace(measured(LINEAR, NORM), called="NVIDIA L40S")
    found = estimated("L4", Device(kind="cuda", speed=1.0), {"a": own})
    assert found.operators[LINEAR].forward_s == pytest.approx(
        1e-3 * fast.tflops["bf16"] / slow.tflops["bf16"]
    )
    assert found.operators[NORM].backward_s == pytest.approx(2e-3 * fast.gb_per_s / slow.gb_per_s)
    itself = estimated("L40S", Device(kind="cuda", speed=1.0), {"a": own})
    assert itself.operators == own.operators, "a card estimated from itself takes its own times"


def test_an_estimate_is_of_the_kind_that_it_was_scaled_from() -> None:
    grown = replace(
        cluster(),
        devices={**cluster().devices, "T4": Device(kind="cuda", speed=1.0)},
        hosts=(replace(cluster().hosts[0], devices={FAST: 1, "T4": 1}),),
    )
    assert measured_kinds(grown, with_estimates(grown, profile())) == {"cpu"}
    assert measured_kinds(grown, profile()) == {"cpu", "cuda"}
