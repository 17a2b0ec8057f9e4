"""The size of buckets for a link: without a process group."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.planning.compression.buckets import PACES, bucket_cap_mb, caps_to_try
from trimtab.predict.links import Fit
from trimtab.predict.replay.build import exposed_seconds
from trimtab.workload.buckets import DEFAULT_MB, MIB, ddp_buckets
from trimtab.workload.tensor import Tensor
from trimtab.workload.workload import Parameter


def model(*sizes_mb: float) -> list[Parameter]:
    """Parameters of these sizes, in the order of their gradients."""
    return [
        Parameter(name=str(index), tensor=Tensor(shape=(int(size * MIB),), dtype="uint8"), operators=())
        for index, size in enumerate(sizes_mb)
    ]


LAYERS = model(*[0.5] * 200)


def link(per_bucket_s: float, per_byte_s: float) -> Fit:
    return Fit(per_message_s=per_bucket_s, per_byte_s=per_byte_s)


def test_a_long_fixed_time_keeps_ddps_buckets_or_larger_ones_and_a_short_one_cuts_the_tail() -> None:
    assert bucket_cap_mb(LAYERS, link(0.02, 1e-9)) >= DEFAULT_MB
    assert bucket_cap_mb(LAYERS, link(1e-3, 1e-9)) in (5.0, 12.5)
    assert bucket_cap_mb(LAYERS, link(1e-5, 1e-9)) <= 2.5
    assert bucket_cap_mb([], link(1e-5, 1e-9)) == DEFAULT_MB
    # One large tensor is a bucket by itself, whatever the size.
    assert bucket_cap_mb(model(500), link(1e-5, 1e-9)) == DEFAULT_MB


def test_what_is_exposed_is_the_last_bucket_or_all_that_a_slow_link_has_not_sent() -> None:
    quarters = [25 * MIB] * 4
    assert exposed_seconds(quarters, link(1e-3, 1e-9), 10.0) == pytest.approx(1e-3 + 25 * MIB * 1e-9)
    slow = exposed_seconds(quarters, link(1e-3, 1e-7), 0.1)
    assert slow == pytest.approx(0.1 / 4 + 4 * 1e-3 + 100 * MIB * 1e-7 - 0.1)


@settings(max_examples=25)
@given(
    st.lists(st.floats(0.001, 200.0), min_size=1, max_size=60),
    st.floats(1e-6, 1e-2),
    st.floats(1e-11, 1e-7),
)
def test_the_size_is_never_worse_than_ddps(
    sizes_mb: list[float], per_bucket_s: float, per_byte_s: float
) -> None:
    parameters, bucket = model(*sizes_mb), link(per_bucket_s, per_byte_s)
    cap = bucket_cap_mb(parameters, bucket)
    assert cap in (DEFAULT_MB, *caps_to_try(parameters))
    whole = sum(p.tensor.nbytes for p in parameters) * per_byte_s

    def exposed(size: float) -> float:
        buckets = [b.nbytes for b in ddp_buckets(parameters, (), size, first_mb=1.0)]
        return sum(exposed_seconds(buckets, bucket, pace * whole) for pace in PACES)

    assert exposed(cap) <= exposed(DEFAULT_MB) * (1 + 1e-9)
