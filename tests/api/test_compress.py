"""The default of `trimtab.compress`: measures, decides, explains; and the log of layers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.support.faults import Throttle
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import trimtab
from trimtab.codec import Block, PowerSGD
from trimtab.control.compression.ddp import compression_of
from trimtab.errors import TrimtabError
from trimtab.measure.exchange import measure_exchange

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool


def default_on_this_link(width: int = 256) -> tuple[str, bool]:
    ddp = trimtab.compress(Ddp(nn.Linear(width, width)))
    ddp(torch.randn(4, width)).square().mean().backward()
    return trimtab.explain(ddp), compression_of(ddp) is not None


def test_one_rank_has_nothing_to_compress(ranks: Pool) -> None:
    assert ranks(1, default_on_this_link, allow_groups=True) == [
        ("one rank: there is nothing to send, so nothing to compress", False)
    ]


def test_a_slow_link_is_compressed_and_explained(ranks: Pool) -> None:
    slow = Throttle(bytes_per_s=20e6)
    for words, compressed in ranks(2, default_on_this_link, faults=[slow], allow_groups=True):
        assert compressed
        assert "the link is the bottleneck" in words


def test_a_model_of_small_parameters_is_left_alone(ranks: Pool) -> None:
    slow = Throttle(bytes_per_s=20e6)
    for words, compressed in ranks(2, default_on_this_link, 16, faults=[slow], allow_groups=True):
        assert not compressed
        assert "no parameter is large enough" in words


def test_every_rank_decides_alike(ranks: Pool) -> None:
    decisions = ranks(3, default_on_this_link, allow_groups=True)
    assert len({compressed for _, compressed in decisions}) == 1
    assert len({words for words, _ in decisions}) == 1


def in_two_levels() -> tuple[str, list[float]]:
    """What compress says on two hosts of two ranks, and the reduced gradients."""
    import gc
    import os

    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    try:
        torch.manual_seed(0)
        ddp = trimtab.compress(Ddp(nn.Linear(256, 256)), Block(bits=4))
    finally:
        del os.environ["GROUP_RANK"]
    ddp(torch.full((4, 256), dist.get_rank() + 1.0)).square().mean().backward()
    gradients = [float(p.grad.double().norm()) for p in ddp.parameters() if p.grad is not None]
    said = trimtab.explain(ddp)
    dist.barrier()
    del ddp
    gc.collect()
    return said, gradients


def test_hosts_of_several_ranks_are_gone_through_in_two_levels(ranks: Pool) -> None:
    answers = ranks(4, in_two_levels, faults=[Throttle(2e7)], allow_groups=True)
    assert answers == [answers[0]] * 4
    assert "2 hosts of 2 ranks" in answers[0][0]


ROUTES: list[tuple[str, Block | None, str, str]] = [
    ("000", None, "two-level", "summed exactly, through shared memory, as requested"),
    ("000", Block(bits=8), "ring", "flat ring, as requested"),
    ("000", Block(bits=8), "tree", "flat tree, as requested"),
    ("011", Block(bits=8), "two-level", "two levels, default, as requested"),
]
"""The host of each rank, the codec, the route, and what is said of it."""


def wrapped() -> Ddp:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.LayerNorm(96)) for _ in range(4)]
    return Ddp(nn.Sequential(*layers), bucket_cap_mb=0.08)


def trained(ddp: Ddp) -> torch.Tensor:
    """The gradients of the third step: DDP has rebuilt its buckets."""
    for step in range(3):
        ddp.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp(torch.randn(4, 96, generator=generator)).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def by_every_route() -> list[tuple[float, bool, bool, str]]:
    """Of each route: distance from plain DDP, whether ranks agree, whether there is a state, and the explanation."""
    import gc
    import os

    exact = trained(wrapped())
    outcomes = []
    for hosts, codec, route, _ in ROUTES:
        os.environ["GROUP_RANK"] = hosts[dist.get_rank()]
        try:
            ddp = trimtab.compress(wrapped(), codec, route=route)
        finally:
            del os.environ["GROUP_RANK"]
        own = trained(ddp)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        agree = all(torch.equal(other, own) for other in everyone)
        apart = float((own - exact).norm() / exact.norm())
        outcomes.append((apart, agree, "compression" in trimtab.state_dict(ddp), trimtab.explain(ddp)))
        dist.barrier()
        del ddp
        gc.collect()
    return outcomes


def test_routes_can_be_requested(ranks: Pool) -> None:
    for outcomes in ranks(3, by_every_route, allow_groups=True):
        for (_, codec, route, words), (apart, agree, has_state, explained) in zip(
            ROUTES, outcomes, strict=True
        ):
            assert agree, route
            assert words in explained
            assert has_state == (codec is not None), "exact sums have no state"
            assert (apart < 1e-6) if codec is None else (1e-6 < apart < 0.05), (route, apart)


def refused_routes() -> list[str]:
    messages = []
    for codec, route in ((None, "star"), (PowerSGD(rank=1), "ring")):
        with pytest.raises(TrimtabError) as refusal:
            trimtab.compress(wrapped(), codec, route=route)
        messages.append(str(refusal.value))
    return messages


def test_routes_that_do_not_exist_are_refused(ranks: Pool) -> None:
    for unknown, other_codec in ranks(2, refused_routes, allow_groups=True):
        assert "route='star': there is no such route" in unknown
        assert "PowerSGD(rank=1) has its own way" in other_codec


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_numel": "a"}, "min_numel='a': give a number of values"),
        ({"seed": "a"}, "seed='a': give a whole number"),
        ({"log_every": 0}, "log_every=0: give a number of steps"),
    ],
)
def test_what_is_no_number_is_refused_before_ranks_meet(
    ranks: Pool, settings: dict[str, Any], words: str
) -> None:
    assert words in ranks(1, refused_numbers, settings)[0]


def refused_numbers(settings: dict[str, Any]) -> str:
    with pytest.raises(TrimtabError) as refusal:
        trimtab.compress(Ddp(nn.Linear(8, 8)), Block(), **settings)
    return str(refusal.value)


def measured() -> tuple[float, float]:
    assert dist.group.WORLD is not None
    exchange = measure_exchange(Block(), (dist.group.WORLD,) * 2, torch.device("cpu"))
    return exchange.plain_s, exchange.compressed_s


def test_the_figures_are_the_same_on_every_rank(ranks: Pool) -> None:
    first, second = ranks(2, measured)
    assert first == second
    assert min(first) > 0


def logged(path: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = trimtab.compress(
        Ddp(model), Block(bits=4), overrides={"1.weight": Block(bits=8)}, log=path, log_every=2
    )
    for _ in range(3):
        ddp(torch.randn(4, 64)).square().mean().backward()


def test_the_layer_log_tells_bits_bytes_and_error(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    ranks(2, logged, str(path), allow_groups=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["step"] for line in lines} == {0, 2}
    last = {line["name"]: line for line in lines if line["step"] == 2}
    assert last["0.weight"]["bits"] == 4
    assert last["0.weight"]["bytes"] == 4 * 8 + 64 * 64 // 2
    assert 0.01 < last["0.weight"]["relative_error"] < 0.3
    assert last["1.weight"]["relative_error"] < last["0.weight"]["relative_error"] / 4
    assert last["0.bias"] == {"step": 2, "name": "0.bias", "bits": 0, "bytes": 256, "relative_error": 0.0}


def threads_of(count: int) -> int:
    import gc
    import threading

    before = set(threading.enumerate())  # an earlier test of this process may have left some
    for _ in range(count):
        ddp = trimtab.compress(Ddp(nn.Linear(64, 64)), Block())
        ddp(torch.randn(4, 64)).sum().backward()
        del ddp
        gc.collect()
    return sum(thread.name.startswith("trimtab-stage") for thread in set(threading.enumerate()) - before)


def test_threads_end_with_their_module(ranks: Pool) -> None:
    assert ranks(2, threads_of, 3, allow_groups=True) == [0, 0]


def memory_beyond_payload() -> tuple[int, int, int]:
    """Bytes of every tensor the compression keeps, of one bucket, and of the gradients."""
    ddp = trimtab.compress(Ddp(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))), Block(bits=4))
    ddp(torch.randn(4, 512)).sum().backward()
    compression = compression_of(ddp)
    assert compression is not None
    kept = 0
    for reduction, _ in compression._reductions.values():
        kept += sum(value.nbytes for value in vars(reduction).values() if isinstance(value, torch.Tensor))
    return kept, len(compression._reductions), sum(p.numel() * 4 for p in ddp.parameters())


@pytest.mark.parametrize("world", [2, 3])
def test_only_compressed_buffers_are_kept(ranks: Pool, world: int) -> None:
    """The documented bound: no extra copy of a bucket, and payloads for (world + 1) of them at most."""
    for kept, _, gradients in ranks(world, memory_beyond_payload, allow_groups=True):
        assert kept <= (world + 1) * gradients * (4 / 32) * 1.1
