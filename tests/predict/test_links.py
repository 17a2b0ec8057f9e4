"""What was measured of a link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.predict.links import fit, nominal


@given(message=st.floats(1e-6, 1e-2), byte=st.floats(1e-11, 1e-7))
def test_a_fit_finds_the_line_it_was_made_of(message: float, byte: float) -> None:
    points = [(2, float(v), 2 * message + byte * v) for v in (1 << 14, 1 << 18, 1 << 22)]
    found = fit(points)
    assert found.per_message_s * 2 + found.per_byte_s * 1e6 == pytest.approx(
        2 * message + byte * 1e6, rel=1e-3
    )


def test_a_fit_is_never_negative() -> None:
    falling = fit([(2, 1e4, 1.0), (2, 1e6, 0.5)])
    assert falling.per_byte_s >= 0
    assert falling.per_message_s > 0
    convex = fit([(2, 1e4, 1e-5), (2, 1e6, 1.0)])
    assert convex.per_message_s >= 0
    assert convex.per_byte_s > 0


def test_one_size_cannot_tell_latency_from_bandwidth() -> None:
    with pytest.raises(TrimtabError, match="take two sizes"):
        fit([(2, 1e6, 0.1)])


def test_a_link_of_given_rate_is_marked_estimated() -> None:
    found = nominal(1.0, 20.0)
    assert found.estimated
    assert found.per_message_s == pytest.approx(20e-6)
    assert 8e-9 < found.per_byte_s < 9e-9
