"""What the choice of local steps is made from."""

from __future__ import annotations

import pytest

from trimtab.control.local_choice import STREAM, codec_work_s, of_given_bits, stream_s
from trimtab.planning.local_steps import MOST_FRAGMENTS
from trimtab.predict.exchange import Exchange


def test_work_that_does_not_grow_with_size_counts_once_for_each_fragment() -> None:
    fixed, per_byte = 2e-3, 1e-9

    def exchange(numel: int) -> Exchange:
        work_s = fixed + per_byte * 4 * numel
        return Exchange(nbytes=4 * numel, plain_s=1.0, compressed_s=1.0, bits=4, work_s=work_s)

    numel = 25_000_000
    expected = pytest.approx(MOST_FRAGMENTS * fixed + per_byte * 4 * numel, rel=0.01)
    assert codec_work_s(exchange(1 << 18), exchange(1 << 12), numel) == expected
    assert codec_work_s(exchange(1 << 12), exchange(1 << 12), 1 << 13) == pytest.approx(
        2 * exchange(1 << 12).work_s
    )


def test_exchanges_that_follow_each_other() -> None:
    wire, latency, codec = 1.0, 0.2, 0.1
    alone = latency + codec + wire
    assert stream_s(alone, latency + codec + STREAM * wire) == pytest.approx(wire), (
        "the wire is busy all the time"
    )
    assert stream_s(4.0, 4.0 + (STREAM - 1) * 1.0) == 2.0, "four stages at once, but two turns to arrive in"
    assert stream_s(3.0, 3.0 + (STREAM - 1) * 1.0, on_gpu=True) == 2.0


def test_rounds_are_chosen_for_the_bits_that_are_given() -> None:
    measured = {4: 4.25, 2: 2.25}
    assert of_given_bits(measured, 2) == {2: 2.25}
    assert of_given_bits(measured, 8) == {4: pytest.approx(8.25)}
    assert of_given_bits(measured, None) == {4: pytest.approx(32.25)}
    assert of_given_bits(measured, 1) == {2: pytest.approx(1.25)}
