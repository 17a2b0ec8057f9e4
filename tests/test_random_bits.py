"""The random bits: exactly the documented ones, and random enough for what they do."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.codec import scalar
from trimtab.random_bits import block_keys, name_hash, stream, uniform16

CPU = torch.device("cpu")


def sequence(
    *,
    seed: int = 1,
    step: int = 2,
    rank: int = 3,
    stage: int = 0,
    name: str = "w",
    first: int = 0,
    blocks: int = 256,
) -> torch.Tensor:
    """The 16-bit numbers of a run of blocks of 1024, as float64."""
    keys = block_keys(stream(seed, step, rank, stage), name_hash(name), first, blocks, CPU)
    return uniform16(keys, 1024).flatten().double()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


def test_is_the_documented_generator() -> None:
    for seed, step, rank, stage in itertools.product((0, 7, 2**63), (0, 10**6), (0, 5), (0, 1)):
        expected = 0
        for value in (seed, step, rank, stage):
            expected = scalar.absorb(expected, value)
        assert stream(seed, step, rank, stage) == expected
        keys = block_keys(expected, name_hash("layer.weight"), 2**40, 3, CPU)
        for k in range(3):
            key = scalar.absorb(scalar.absorb(expected, name_hash("layer.weight")), 2**40 + k)
            assert int(keys[k]) % 2**64 == key
            assert uniform16(keys, 9)[k].tolist() == [scalar.u16(key, i) for i in range(9)]


def test_never_changes() -> None:
    """Frozen numbers: a change here breaks every resumed run."""
    assert stream(0, 0, 0, 0) == 0x2130748AAAC80268
    keys = block_keys(stream(1, 2, 3, 1), name_hash("transformer.wte.weight"), 5, 1, CPU)
    assert uniform16(keys, 6).tolist() == [[19840, 20000, 32033, 14865, 51266, 36919]]


def test_negative_and_large_seeds_have_streams_of_their_own() -> None:
    seeds = (-1, 0, 1, 2**31, 2**63, 2**64 - 2)
    assert len({stream(seed, 0, 0, 0) for seed in seeds}) == len(seeds)


def test_order_of_seed_step_rank_matters() -> None:
    values = list(itertools.permutations((0, 1, 2, 3)))
    assert len({stream(*value) for value in values}) == len(values)


@pytest.mark.parametrize(
    "part", ["high byte", "low byte", "even elements", "odd elements", "place in a block"]
)
def test_uniform(part: str) -> None:
    """Chi-square over 256 bins: mean 255, deviation 22.6; five deviations off is chance in a million."""
    numbers = sequence(blocks=1024).long()
    bins = {
        "high byte": numbers >> 8,
        "low byte": numbers & 255,
        "even elements": numbers[::2] >> 8,
        "odd elements": numbers[1::2] >> 8,
        "place in a block": (numbers.view(-1, 1024)[:, :16] >> 8).flatten(),
    }[part]
    expected = bins.numel() / 256
    chi2 = float(((torch.bincount(bins, minlength=256) - expected) ** 2 / expected).sum())
    assert 255 - 5 * 22.6 < chi2 < 255 + 5 * 22.6


OTHERS = {
    "seed": {"seed": 2},
    "step": {"step": 3},
    "rank": {"rank": 4},
    "stage": {"stage": 1},
    "name": {"name": "v"},
    "next block": {"first": 1},
}


@pytest.mark.parametrize("what", OTHERS)
def test_independent_of_every_neighbor(what: str) -> None:
    """No correlation, at any small shift, with the sequence one step aside: its deviation is 1 / sqrt(n)."""
    a, b = sequence(), sequence(**OTHERS[what])  # type: ignore[arg-type]
    for lag in (0, 1, 2, 3, 16):
        assert abs(correlation(a[lag:], b[: b.numel() - lag])) < 5 / b.numel() ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 32, 512, 1024])
def test_no_serial_correlation(lag: int) -> None:
    a = sequence()
    assert abs(correlation(a[lag:], a[:-lag])) < 5 / a.numel() ** 0.5


def test_no_shared_subsequences() -> None:
    """Every window of 4 numbers (64 bits), over ranks, steps, stages, names and blocks, is met once."""
    runs = [
        uniform16(block_keys(stream(0, step, rank, stage), name_hash(name), 0, 4, CPU), 512)
        for step, rank, stage, name in itertools.product((0, 1, 2), (0, 1, 2), (0, 1), ("a", "b"))
    ]
    windows = torch.cat(runs).unfold(1, 4, 1).reshape(-1, 4)
    joined = (windows * torch.tensor([1, 2**16, 2**32, 2**48])).sum(1)
    assert joined.unique().numel() == joined.numel()
