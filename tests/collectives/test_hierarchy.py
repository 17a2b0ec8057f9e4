"""Reductions in two levels, and by ring and tree, on real ranks: the bits of a simulation in one process."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives import simulate
from tests.collectives.simulate import SEED, mixed_pieces, residual_norm, values_of

from trimtab.codec import Block, Codec, ErrorFeedback, Uncompressed
from trimtab.collectives import (
    Hierarchy,
    Hosts,
    Method,
    Piece,
    all_reduce,
    find_hosts,
    finish,
    reduction_for,
    runner_for,
)
from trimtab.collectives.hierarchy import shards
from trimtab.collectives.topology import hosts_of
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from tests.support.pool import Pool

TWO_BY_TWO = Hosts(ranks=((0, 1), (2, 3)))
CROSSED = Hosts(ranks=((0, 3), (1, 2)))
ONE_AND_THREE = Hosts(ranks=((0,), (1, 2, 3)))
TWO_ONE_ONE = Hosts(ranks=((0, 2), (1,), (3,)))
FOUR_AND_FOUR = Hosts(ranks=((0, 1, 2, 3), (4, 5, 6, 7)))
FOUR_HOSTS = Hosts(ranks=((0, 1), (2, 3), (4, 5), (6, 7)))
CPU = torch.device("cpu")
KINDS: list[Method] = ["all_gather", "scatter_reduce", "ring", "tree", "halving"]


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def bucket(numel: int) -> list[tuple[Piece, torch.Size]]:
    return [(piece, torch.Size([piece.numel])) for piece in mixed_pieces(numel)]


def reduce_flat(
    numels: list[int], dtype: torch.dtype, scale: float, methods: list[Method]
) -> list[torch.Tensor]:
    results = []
    for numel in numels:
        for method in methods:
            flat = values_of(dist.get_rank(), numel, dtype)
            reduction = reduction_for(
                bucket(numel), dtype, CPU, (world_group(),) * 2, Block(), seed=SEED, method=method
            )
            finish(reduction.steps(flat, step=3, scale=scale))
            results.append(flat)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ring_tree_and_halving_give_exactly_the_simulated_bits(
    ranks: Pool, world: int, dtype: torch.dtype
) -> None:
    numels, methods = [20_003, 150, 1], ["ring", "tree", "halving"]
    reduced = ranks(world, reduce_flat, numels, dtype, 1 / world, methods)
    for index, (numel, method) in enumerate((n, m) for n in numels for m in methods):
        values = [values_of(rank, numel, dtype) for rank in range(world)]
        expected = simulate.METHODS[method](values, mixed_pieces(numel), 3, 1 / world)
        for rank in range(world):
            assert torch.equal(reduced[rank][index], expected), (numel, method, rank)


def reduce_by_host(
    hosts: Hosts, shared: bool, numel: int, dtype: torch.dtype, scales: list[float], methods: list[Method]
) -> list[torch.Tensor]:
    hierarchy = Hierarchy(world_group(), CPU, hosts=hosts, shared_memory=shared)
    results = []
    for method in methods:
        flat = values_of(dist.get_rank(), numel, dtype)
        reduction = reduction_for(
            bucket(numel),
            dtype,
            CPU,
            (world_group(),) * 2,
            Block(),
            seed=SEED,
            hierarchy=hierarchy,
            method=method,
        )
        finish(reduction.steps(flat, step=3, scale=scales[dist.get_rank()]))
        results.append(flat)
    dist.barrier()
    hierarchy.close()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
def test_a_hierarchy_gives_exactly_the_simulated_bits(ranks: Pool, shared: bool, dtype: torch.dtype) -> None:
    cases = [
        (TWO_BY_TWO, 20_003),
        (CROSSED, 150),
        (TWO_BY_TWO, 1),
        (ONE_AND_THREE, 5_003),
        (TWO_ONE_ONE, 5_003),
    ]
    for hosts, numel in cases:
        reduced = ranks(4, reduce_by_host, hosts, shared, numel, dtype, [0.25] * 4, KINDS, allow_groups=True)
        values = [values_of(rank, numel, dtype) for rank in range(4)]
        for index, method in enumerate(KINDS):
            expected = simulate.hierarchy(values, hosts, mixed_pieces(numel), method, 3, 0.25)
            for rank in range(4):
                assert torch.equal(reduced[rank][index], expected), (hosts, numel, method, rank)


@pytest.mark.parametrize("hosts", [FOUR_AND_FOUR, FOUR_HOSTS])
def test_eight_ranks_hold_exactly_the_simulated_bits(ranks: Pool, hosts: Hosts) -> None:
    values, dtype = [values_of(rank, 5_003) for rank in range(8)], torch.float32
    flat = ranks(8, reduce_flat, [5_003], dtype, 0.125, KINDS)
    levels = ranks(8, reduce_by_host, hosts, True, 5_003, dtype, [0.125] * 8, KINDS, allow_groups=True)
    for index, method in enumerate(KINDS):
        expected = simulate.METHODS[method](values, mixed_pieces(5_003), 3, 0.125)
        in_levels = simulate.hierarchy(values, hosts, mixed_pieces(5_003), method, 3, 0.125)
        for rank in range(8):
            assert torch.equal(flat[rank][index], expected), (method, rank)
            assert torch.equal(levels[rank][index], in_levels), (method, rank)


@pytest.mark.parametrize("shared", [False, True])
def test_on_one_host_sums_are_exact(ranks: Pool, shared: bool) -> None:
    hosts = Hosts(ranks=((0, 1, 2),))
    scales = [0.5, 0.25, 0.125]
    reduced = ranks(
        3, reduce_by_host, hosts, shared, 5000, torch.float32, scales, ["all_gather"], allow_groups=True
    )
    exact = simulate.local_sum([values_of(rank, 5000) * scales[rank] for rank in range(3)], 1.0)
    for (result,) in reduced:
        assert torch.equal(result, exact)


def weighted(codec: Codec, shared: bool) -> torch.Tensor:
    hierarchy = Hierarchy(world_group(), CPU, hosts=CROSSED, shared_memory=shared)
    tensor = values_of(dist.get_rank(), 4096)
    all_reduce(tensor, codec, weight=[3.0, 0.0, 1.0, 4.0][dist.get_rank()], name="w", hierarchy=hierarchy)
    dist.barrier()
    hierarchy.close()
    return tensor


@pytest.mark.parametrize(("codec", "within"), [(Block(bits=8), 0.1), (Uncompressed(), 1e-5)])
def test_a_weighted_average_over_two_levels(ranks: Pool, codec: Codec, within: float) -> None:
    exact = sum(w * values_of(rank, 4096) for rank, w in enumerate([3.0, 0.0, 1.0, 4.0])) / 8.0
    assert isinstance(exact, torch.Tensor)
    reduced = ranks(4, weighted, codec, True, allow_groups=True)
    for result in reduced:
        assert torch.equal(result, reduced[0])
        torch.testing.assert_close(result, exact, rtol=0, atol=within)


def with_an_overflow(value: float, method: Method | None, hierarchical: bool) -> torch.Tensor:
    hierarchy = Hierarchy(world_group(), CPU, hosts=TWO_BY_TWO) if hierarchical else None
    tensor = torch.ones(5000)
    if dist.get_rank() == 1:
        tensor[1234] = value
    all_reduce(tensor, Block(block=100), hierarchy=hierarchy, method=method)
    dist.barrier()
    if hierarchy is not None:
        hierarchy.close()
    return tensor


@pytest.mark.parametrize(
    ("method", "hierarchical"), [("ring", False), ("tree", False), ("halving", False), (None, True)]
)
def test_an_overflow_on_one_rank_reaches_all_as_nan(
    ranks: Pool, method: Method | None, hierarchical: bool
) -> None:
    for result in ranks(4, with_an_overflow, math.inf, method, hierarchical, allow_groups=True):
        assert bool(result[1234].isnan())
        assert bool((result[:1000] == 4).all()), "other blocks are untouched"


def reduce_repeatedly(method: Method | None, hosts: Hosts | None, steps: int) -> tuple[torch.Tensor, float]:
    """The running sum of reductions of the same values, and the norm of what is still owed.

    Half-way the bucket is rebuilt with another parameter before this one, which moves the cuts.
    """
    hierarchy = Hierarchy(world_group(), CPU, hosts=hosts) if hosts is not None else None
    values, memory = values_of(dist.get_rank(), 6000), ErrorFeedback()
    codec = Block(bits=2, block=128, stochastic=False)
    total = torch.zeros_like(values)
    for before in (0, 4000):
        pieces = [Piece(name="w", offset=before, numel=6000, bits=2, block=128)]
        if before:
            pieces.insert(0, Piece(name="b", offset=0, numel=before, bits=0, block=128))
        reduction = reduction_for(
            [(piece, torch.Size([piece.numel])) for piece in pieces],
            torch.float32,
            CPU,
            (world_group(),) * 2,
            codec,
            seed=1,
            feedback=memory,
            hierarchy=hierarchy,
            method=method,
        )
        for step in range(steps // 2):
            flat = torch.cat([torch.zeros(before), values])
            finish(reduction.steps(flat, step=step, scale=0.25))
            total += flat[before:]
    dist.barrier()
    if hierarchy is not None:
        hierarchy.close()
    return total, residual_norm(memory)


@pytest.mark.parametrize(
    ("method", "hosts"),
    [
        ("ring", None),
        ("tree", None),
        ("halving", None),
        ("all_gather", TWO_BY_TWO),
        ("scatter_reduce", TWO_BY_TWO),
        ("halving", TWO_BY_TWO),
        ("all_gather", ONE_AND_THREE),
        ("scatter_reduce", TWO_ONE_ONE),
    ],
)
def test_error_feedback_sends_in_the_end_everything_that_was_meant(
    ranks: Pool, method: Method, hosts: Hosts | None
) -> None:
    steps = 40
    exact = sum(values_of(rank, 6000) for rank in range(4)) / 4 * steps
    assert isinstance(exact, torch.Tensor)
    reduced = ranks(4, reduce_repeatedly, method, hosts, steps, allow_groups=True)
    owed = sum(norm for _, norm in reduced)
    for total, _ in reduced:
        assert torch.equal(total, reduced[0][0])
    missing = float((reduced[0][0] - exact).norm())
    assert missing <= owed * 1.001 + 1e-3
    assert missing < 0.25 * float(exact.norm())


def many_buckets(shared: bool) -> list[torch.Tensor]:
    """Through the pipeline of threads: buckets overlap, and some take one collective between hosts, some two."""
    hierarchy = Hierarchy(world_group(), CPU, hosts=TWO_BY_TWO, shared_memory=shared)
    runner = runner_for(CPU)
    groups = [dist.new_group() for _ in range(2)]
    flats, futures = [], []
    for index in range(12):
        numel = 2_000 + 3_000 * index
        method: Method = KINDS[index % len(KINDS)]
        reduction = reduction_for(
            bucket(numel), torch.float32, CPU, groups, Block(), seed=SEED, hierarchy=hierarchy, method=method
        )
        flats.append(values_of(dist.get_rank(), numel))
        futures.append(runner.submit(reduction.steps(flats[-1], step=index, scale=0.25), flats[-1]))
    for future in futures:
        future.wait()
    runner.close()
    dist.barrier()
    hierarchy.close()
    return flats


@pytest.mark.parametrize("shared", [False, True])
def test_overlapping_buckets_do_not_mix(ranks: Pool, shared: bool) -> None:
    reduced = ranks(4, many_buckets, shared, allow_groups=True)
    for index in range(12):
        numel = 2_000 + 3_000 * index
        values = [values_of(rank, numel) for rank in range(4)]
        expected = simulate.hierarchy(
            values, TWO_BY_TWO, mixed_pieces(numel), KINDS[index % len(KINDS)], index, 0.25
        )
        for rank in range(4):
            assert torch.equal(reduced[rank][index], expected), (index, rank)


def shard_noise() -> tuple[torch.Tensor, torch.Tensor]:
    """A constant half-way between two codes: each value's rounding shows its random bit."""
    hierarchy = Hierarchy(world_group(), CPU, hosts=TWO_BY_TWO)
    flat = torch.full((4096,), 0.5)
    flat[::1024], flat[1::1024] = 0.0, 1.0
    piece = Piece(name="w", offset=0, numel=4096, bits=1, block=1024)
    reduction = reduction_for(
        [(piece, torch.Size([4096]))],
        torch.float32,
        CPU,
        (world_group(),) * 2,
        Block(bits=1),
        seed=0,
        hierarchy=hierarchy,
    )
    finish(reduction.steps(flat, step=0, scale=1.0))
    dist.barrier()
    hierarchy.close()
    return flat[2:1024], flat[2050:3072]


def test_shards_of_one_parameter_do_not_repeat_each_others_noise(ranks: Pool) -> None:
    first, second = ranks(4, shard_noise, allow_groups=True)[0]
    assert 0.3 < float((first != second).float().mean()) < 0.8


sizes = st.tuples(st.integers(0, 20_000), st.sampled_from([0, 1, 4, 8]), st.sampled_from([8, 100, 1024]))


@given(st.lists(sizes, max_size=6), st.integers(1, 6))
def test_shards_cover_the_bucket_once(choices: list[tuple[int, int, int]], count: int) -> None:
    pieces, offset = [], 0
    for index, (numel, bits, block) in enumerate(choices):
        pieces.append(Piece(name=f"p{index}", offset=offset, numel=numel, bits=bits, block=block))
        offset += numel
    covered = torch.zeros(offset, dtype=torch.int64)
    by_name = {piece.name: piece for piece in pieces}
    for index, shard in enumerate(shards(pieces, torch.float32, count)):
        start, end = shard.cuts[index : index + 2]
        for part in shard.pieces:
            whole = by_name[part.name]
            assert start <= part.offset
            assert part.offset + part.numel <= end
            assert part.offset - whole.offset == part.first_block * whole.block
            covered[part.offset : part.offset + part.numel] += 1
        assert shard.cuts[0] == 0
        assert shard.cuts[-1] == offset
    assert bool((covered == 1).all())


def own_hosts(agents: list[str | None]) -> Hosts:
    agent = agents[dist.get_rank()]
    if agent is not None:
        os.environ["GROUP_RANK"] = agent
    try:
        return find_hosts(world_group(), CPU)
    finally:
        os.environ.pop("GROUP_RANK", None)


def test_hosts_are_torchruns_agents_and_else_machines(ranks: Pool) -> None:
    assert ranks(4, own_hosts, ["0", "1", "0", "1"]) == [Hosts(ranks=((0, 2), (1, 3)))] * 4
    assert ranks(3, own_hosts, [None] * 3) == [Hosts(ranks=((0, 1, 2),))] * 3


def alone() -> str:
    try:
        Hierarchy(world_group(), CPU, hosts=Hosts(ranks=((0,), (1,))))
    except TrimtabError as error:
        return str(error)
    return "not refused"


def test_hosts_of_one_rank_are_refused_with_the_reason(ranks: Pool) -> None:
    for message in ranks(2, alone):
        assert "every host has one rank" in message
        assert "reduce flat" in message
    assert hosts_of(["a", "b"]).flat_reason() is not None
    assert hosts_of(["a", "b", "a", "b"]).flat_reason() is None
    assert hosts_of(["a", "b", "a"]).flat_reason() is None


def test_the_smallest_host_sets_the_number_of_shards() -> None:
    assert (TWO_BY_TWO.shards, ONE_AND_THREE.shards, TWO_ONE_ONE.shards) == (2, 1, 1)
    assert [ONE_AND_THREE.peers(rank) for rank in range(4)] == [(0, 1), (0, 1), (), ()]
    assert [TWO_BY_TWO.peers(rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
