"""The last buckets of a backward pass are short, whatever the parameters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.planning.compression.bucket_caps import LAST_MB, short_last_buckets
from trimtab.workload.buckets import DEFAULT_MB, MIB

KIB = 1 << 10


@given(st.lists(st.integers(1, 40 * KIB).map(lambda kib: kib * KIB), max_size=60))
def test_buckets_hold_everything_and_shrink_towards_the_end(nbytes: list[int]) -> None:
    caps = short_last_buckets(nbytes)
    assert sum(caps) * MIB == sum(nbytes)
    least = [*LAST_MB, *[DEFAULT_MB] * len(caps)]
    largest = max(nbytes, default=0) / MIB
    for place, cap in enumerate(reversed(caps)):
        assert cap < least[place] + largest or cap == largest
        assert cap >= least[place] or place == len(caps) - 1


def test_a_transformer() -> None:
    layer = [size * MIB for size in (3, 1, 4, 4)]
    assert short_last_buckets([MIB // 2, *layer * 7]) == (4, 28, 20, 16, 8, 5, 3.5)


def test_a_small_model_is_one_bucket() -> None:
    assert short_last_buckets([MIB, MIB]) == (2,)
