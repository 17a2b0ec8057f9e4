"""The decision to compress: a pure function of two measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.planning.compression.payoff import MAX_TIME_RATIO, decide, decide_family, decide_shared_memory
from trimtab.predict.exchange import Exchange


def exchange(plain_s: float, compressed_s: float) -> Exchange:
    return Exchange(nbytes=4_000_000, plain_s=plain_s, compressed_s=compressed_s, bits=4)


def test_a_slow_link_is_compressed() -> None:
    decision = decide(exchange(0.4, 0.05), gradient_bytes=100_000_000)
    assert decision.compress
    assert decision.gain == pytest.approx(8)
    assert "the link is the bottleneck: 100 MB of gradients a step take 10000 ms" in decision.reason
    assert "0.08 Gbit/s" in decision.reason
    assert "1250 ms in 4 bits" in decision.reason


def test_a_fast_link_is_left_alone() -> None:
    decision = decide(exchange(0.010, 0.012), gradient_bytes=100_000_000)
    assert not decision.compress
    assert "would not pay" in decision.reason


def test_a_gain_within_the_noise_is_not_taken() -> None:
    assert not decide(exchange(1.0, MAX_TIME_RATIO + 0.01), gradient_bytes=4_000_000).compress
    assert decide(exchange(1.0, MAX_TIME_RATIO - 0.01), gradient_bytes=4_000_000).compress


def test_a_saving_too_small_to_matter_is_not_taken() -> None:
    assert not decide(exchange(8e-4, 4e-4), gradient_bytes=4_000_000).compress
    assert decide(exchange(8e-4, 4e-4), gradient_bytes=40_000_000).compress


def test_the_fastest_family_is_taken_and_the_others_are_told() -> None:
    exchanges = {"bits": exchange(0.4, 0.05), "bits-feedback": exchange(0.4, 0.04)}
    name, decision = decide_family(exchanges, gradient_bytes=100_000_000)
    assert name == "bits-feedback"
    assert decision.compress
    assert "bits-feedback takes least time on this link, 1e+03 ms a step" in decision.reason
    assert "1e+03 ms a step (measured in 4 bits)" in decision.reason
    assert "bits 1.25e+03 ms" in decision.reason


def test_work_that_no_computation_hides_counts() -> None:
    """Error feedback takes fewer bytes and more passes over the gradients: over a fast link bits alone are better."""

    def both(wire_of_a_bit: float) -> dict[str, Exchange]:
        bits = Exchange(
            nbytes=1, plain_s=32 * wire_of_a_bit, compressed_s=0.024 + 3 * wire_of_a_bit, bits=3, work_s=0.024
        )
        fewer = replace(bits, compressed_s=0.058 + 2 * wire_of_a_bit, bits=2, work_s=0.058)
        return {"bits": bits, "bits-feedback": fewer}

    assert decide_family(both(0.025), gradient_bytes=1)[0] == "bits"
    assert decide_family(both(0.250), gradient_bytes=1)[0] == "bits-feedback"


def test_where_no_family_pays_none_is_named() -> None:
    _, decision = decide_family({"bits": exchange(0.010, 0.012)}, gradient_bytes=100_000_000)
    assert not decision.compress
    assert "would not pay" in decision.reason
    assert "chosen per layer" not in decision.reason


def test_ranks_of_one_host_take_the_faster_of_shared_memory_and_sockets() -> None:
    shared = decide_shared_memory(exchange(0.4, 0.1), gradient_bytes=100_000_000)
    assert shared.compress
    assert "summed exactly, through shared memory" in shared.reason
    assert "10000 ms by plain all-reduce and 2500 ms through shared memory" in shared.reason
    sockets = decide_shared_memory(exchange(0.1, 0.4), gradient_bytes=100_000_000)
    assert not sockets.compress
    assert "summed exactly, over sockets" in sockets.reason
