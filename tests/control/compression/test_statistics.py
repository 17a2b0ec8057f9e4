"""Statistics of reduced gradients: bounded, honest about errors, and not fooled by NaN or by the codec itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.codec import Block, ErrorFeedback
from trimtab.collectives import Piece
from trimtab.control.compression.sampled_layers import Layer
from trimtab.control.compression.statistics import MOST_IN_ALL, MOST_VALUES, Statistics, sample_of
from trimtab.planning.compression.layer_options import ALL_BITS

CPU = torch.device("cpu")


def layer_of(values: torch.Tensor, block: int = 1024) -> Layer:
    statistics = Statistics({"w": (values.numel(), block)}, CPU)
    statistics.add([piece(values.numel(), block)], values)
    (layer,) = statistics.snapshot().layers()
    return layer


def piece(numel: int, block: int = 1024, offset: int = 0, name: str = "w") -> Piece:
    return Piece(name=name, offset=offset, numel=numel, bits=4, block=block)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(numel=st.integers(1, 10**9), block=st.integers(8, 5000), most=st.integers(1, 1 << 15))
def test_a_sample_is_whole_blocks_inside_the_layer_and_bounded(numel: int, block: int, most: int) -> None:
    sample = sample_of(numel, block, most)
    blocks, length = sample.shape
    assert blocks >= 1
    assert length == min(block, numel)
    assert math.prod(sample.shape) <= max(most, block)
    assert sample.gap % block == 0
    assert (blocks - 1) * sample.gap + length <= numel


def test_memory_is_bounded_for_any_model() -> None:
    one = Statistics({"w": (10**9, 1024)}, CPU)
    assert sum(v.numel() for v in one.averages.values()) <= MOST_VALUES
    many = Statistics({str(i): (10**6, 1024) for i in range(1000)}, CPU)
    assert sum(v.numel() for v in many.averages.values()) <= MOST_IN_ALL


def test_norms_and_averages_are_those_of_the_layer() -> None:
    values = normal(300_000) * 3
    flat = torch.cat([torch.full((17,), 100.0), values])
    statistics = Statistics({"w": (values.numel(), 1024)}, CPU)
    for _ in range(3):
        statistics.add([piece(values.numel(), offset=17)], flat)
    (layer,) = statistics.snapshot().layers()
    assert layer.norm == pytest.approx(float(values.norm()), rel=0.05)
    assert layer.latest == pytest.approx(layer.norm)
    view = statistics.samples["w"].of(values, 0).reshape(-1)
    torch.testing.assert_close(layer.average, view)


def test_the_average_forgets() -> None:
    statistics = Statistics({"w": (2048, 1024)}, CPU)
    for value in [1.0] * 30 + [3.0] * 60:
        statistics.add([piece(2048)], torch.full((2048,), value))
    (layer,) = statistics.snapshot().layers()
    torch.testing.assert_close(layer.average, torch.full((2048,), 3.0), atol=0.02, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_overflow_is_told_but_not_averaged(bad: float) -> None:
    statistics = Statistics({"a": (2048, 1024), "b": (2048, 1024)}, CPU)
    pieces = [piece(2048, name="a"), piece(2048, offset=2048, name="b")]
    statistics.add(pieces, torch.ones(4096))
    broken = torch.ones(4096)
    broken[5] = bad
    statistics.add(pieces, broken)
    a, b = statistics.snapshot().layers()
    assert not math.isfinite(a.latest)
    assert math.isfinite(b.latest)
    torch.testing.assert_close(a.average, torch.ones(2048))
    assert a.norm == pytest.approx(math.sqrt(2048))


def test_the_table_is_the_real_codecs() -> None:
    values = normal(8192)
    table = layer_of(values).relative_errors(ALL_BITS, stochastic=False)
    for bits in ALL_BITS:
        codec = Block(bits=bits, stochastic=False)
        decoded = codec.decode(codec.encode(values), values.shape, values.dtype)
        assert table[bits] == pytest.approx(float((decoded - values).norm() / values.norm()), rel=1e-4)
    assert all(table[b] > 1.5 * table[b + 1] for b in range(1, 8))
    expected = layer_of(values).relative_errors(ALL_BITS, stochastic=True, block=128)
    for bits in ALL_BITS:
        decoded = Block(bits=bits, block=128).decode(
            Block(bits=bits, block=128).encode(values), values.shape, values.dtype
        )
        assert expected[bits] == pytest.approx(float((decoded - values).norm() / values.norm()), rel=0.03)


def test_layers_of_a_step_may_come_in_parts_and_not_all() -> None:
    """Buckets come one by one, and a layer that was not used has no gradient: it keeps its average and its weight."""
    pieces = [piece(2048, name="a"), piece(2048, offset=2048, name="b")]
    together, parts = (Statistics({"a": (2048, 1024), "b": (2048, 1024)}, CPU) for _ in range(2))
    for step in range(3):
        values = normal(4096, seed=step)
        together.add(pieces, values)
        for one in pieces:
            parts.add([one], values)
        for statistics in (together, parts):
            statistics.add(pieces[:1], values * 2)
            statistics.fold()
    for layer, other in zip(together.snapshot().layers(), parts.snapshot().layers(), strict=True):
        assert torch.equal(layer.average, other.average)
    assert together.counts == {"a": 6, "b": 3}
    expected = torch.stack([normal(4096, seed=step)[2048:] for step in range(3)]).mean(0)
    torch.testing.assert_close(together.averages["b"].view(-1), expected)


def test_a_table_of_values_that_went_through_the_codec_is_not_fooled() -> None:
    """A reduced gradient lies on the codec's own grid: encoding it again at those bits would lose nothing."""
    codec = Block(bits=3)
    meant = normal(16384)
    statistics = Statistics({"w": (16384, 1024)}, CPU)
    for step in range(10):
        # What steps have in common, and each one's own noise.
        values = meant + normal(16384, seed=step + 1)
        sent = codec.decode(codec.encode(values, stream=step), values.shape, values.dtype)
        again = codec.decode(codec.encode(sent, stream=99), values.shape, values.dtype)
        assert float((again - sent).norm() / sent.norm()) < 1e-3
        statistics.add([piece(16384)], sent)
    (layer,) = statistics.snapshot().layers()
    table = layer.relative_errors(ALL_BITS, stochastic=True)
    exact = layer_of(meant).relative_errors(ALL_BITS, stochastic=True)
    for bits in ALL_BITS:
        assert table[bits] == pytest.approx(exact[bits], rel=0.35), bits


def test_a_ranks_own_values_are_told_once() -> None:
    statistics = Statistics({"a": (4096, 1024), "b": (4096, 1024)}, CPU)
    pieces = [piece(4096, name="a"), piece(4096, offset=4096, name="b")]
    statistics.add(pieces, torch.ones(8192))
    statistics.keep(pieces[1:], normal(8192))
    a, b = statistics.snapshot().layers()
    assert a.own is None
    assert b.own is not None
    assert torch.equal(b.own, normal(8192)[4096:])
    assert a.relative_errors((1,), stochastic=True, own=True) == {1: 0.0}
    assert b.relative_errors((1,), stochastic=True, own=True)[1] > 2.5
    assert statistics.snapshot().layers()[1].own is None


def test_what_is_owed_is_told() -> None:
    memory = ErrorFeedback()
    statistics = Statistics({"w": (300_000, 1024)}, CPU)
    statistics.add([piece(300_000)], normal(300_000))
    assert statistics.snapshot(memory).layers()[0].owed == 0
    memory.keep("w", normal(300_000) * 2, torch.zeros(300_000))
    assert statistics.snapshot(memory).layers()[0].owed == pytest.approx(2 * math.sqrt(300_000), rel=0.05)


def test_values_that_drown_beside_large_ones_are_a_strain() -> None:
    values = normal(64, 1024)
    assert layer_of(values.view(-1)).strain() < 0.6
    uneven = values.clone()
    uneven[:, 768:] *= 1e-3  # rows of an embedding of very unequal frequency share their blocks
    uneven[:, :700] *= 1e-3
    found = layer_of(uneven.view(-1)).strain()
    assert found > 5
    assert layer_of(uneven.view(-1)).relative_errors((4,), stochastic=True)[4] < 1
    assert layer_of(torch.zeros(4096)).strain() == 0
    one_hot = torch.zeros(16, 1024)
    one_hot[:, 3] = 1
    assert layer_of(one_hot.view(-1)).strain() == 8


def test_half_precision_and_an_empty_look() -> None:
    statistics = Statistics({"w": (4096, 1024)}, CPU)
    assert statistics.snapshot().layers() == []
    statistics.add([piece(4096)], normal(4096).bfloat16())
    (layer,) = statistics.snapshot().layers()
    assert layer.average.dtype == torch.float32


def test_the_state_is_all_there_is() -> None:
    first, second = (Statistics({"w": (4096, 1024)}, CPU) for _ in range(2))
    for step in range(3):
        first.add([piece(4096)], normal(4096, seed=step))
    second.load_state_dict(first.state_dict())
    for statistics in (first, second):
        statistics.add([piece(4096)], normal(4096, seed=9))
    a, b = first.snapshot().layers()[0], second.snapshot().layers()[0]
    assert torch.equal(a.average, b.average)
    assert (a.norm, a.latest) == (b.norm, b.latest)
