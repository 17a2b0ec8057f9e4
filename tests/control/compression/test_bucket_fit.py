"""Buckets of another size: DDP trains as with its own, whatever its options, and a resumed job has them again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import trimtab
from trimtab._compat import rebuild_reducer
from trimtab.codec import Block, Codec, Uncompressed
from trimtab.collectives import Piece
from trimtab.control.compression.bucket_fit import SMALLEST_BYTES
from trimtab.doors.ddp import DdpCompression

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.pool import Pool

CAP = 1 << 20
WIDTH = 512  # a weight fills a bucket of CAP bytes


class Net(nn.Module):
    """Layers of which one is sometimes unused."""

    def __init__(self, layers: int = 5, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if not (self.skip and index == 1):
                x = x + torch.tanh(layer(x))
        return x.square().mean()


def batch(step: int, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, width, generator=generator)


def attach(ddp: Ddp, codec: Codec, **options: Any) -> DdpCompression:
    compression = DdpCompression(ddp, codec, **options)
    ddp.register_comm_hook(None, compression.reduce)
    return compression


def train(ddp: Ddp, run: Any, steps: range, *, skip: bool = False) -> None:
    """Steps of two micro-batches, of which only the second one is exchanged."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in steps:
        ddp.module.skip = skip and step % 2 == 1
        for micro in range(2):
            with ddp.no_sync() if micro == 0 and not ddp.static_graph else nullcontext():
                run(batch(2 * step + micro)).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(ddp: Ddp) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in ddp.module.parameters()])


def trained(
    options: dict[str, Any], when: int, compiled: bool
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The parameters after training in DDP's own buckets and in others; how many buckets a step has then."""
    plain, ours = Ddp(Net(), **options), Ddp(Net(), **options)
    skip = options.get("find_unused_parameters", False)
    run: Any = torch.compile(ours, backend="aot_eager") if compiled else ours
    train(plain, plain, range(4), skip=skip)
    train(ours, run, range(when), skip=skip)
    rebuild_reducer(ours, CAP)
    seen: dict[int, list[str]] = {}

    def observe(step: int, pieces: Sequence[Piece], _flat: torch.Tensor) -> None:
        seen.setdefault(step, []).append(",".join(piece.name for piece in pieces))

    compression = attach(ours, Uncompressed(), observe=observe)
    train(ours, run, range(when, 4), skip=skip)
    names = sorted(name for name, _ in ours.module.named_parameters())
    for step, buckets in seen.items():
        assert sorted(",".join(buckets).split(",")) == names, f"step {step}: {buckets}"
    compression.close()
    return values(plain), values(ours), [len(buckets) for buckets in seen.values()]


@pytest.mark.parametrize(
    ("options", "when", "compiled"),
    [
        ({}, 0, False),
        ({}, 0, True),
        ({"gradient_as_bucket_view": True}, 2, False),
        ({"find_unused_parameters": True}, 0, False),
        ({"static_graph": True}, 0, False),
    ],
    ids=["plain", "compiled", "views, rebuilt amid training", "unused", "static graph"],
)
def test_ddp_trains_in_rebuilt_buckets_as_in_its_own(
    ranks: Pool, options: dict[str, Any], when: int, compiled: bool
) -> None:
    for plain, ours, counts in ranks(2, trained, options, when, compiled, allow_groups=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
        assert counts[-1] >= 4


def resumed() -> tuple[bool, bool, list[int]]:
    """Whether a resumed job reaches the bits of one that was not interrupted; and the sizes of both one's buckets."""
    first = Ddp(Net())
    rebuild_reducer(first, CAP)
    compression = attach(first, Block(bits=2), error_feedback=True)
    train(first, first, range(3))
    saved, weights = compression.state_dict(), {k: v.clone() for k, v in first.module.state_dict().items()}
    train(first, first, range(3, 6))

    second = Ddp(Net())
    second.module.load_state_dict(weights)
    again = attach(second, Block(bits=2), error_feedback=True)
    again.load_state_dict(saved)
    train(second, second, range(3, 6))
    given = Ddp(Net(), bucket_cap_mb=2)
    own = attach(given, Block(bits=2), error_feedback=True)
    own.load_state_dict(saved)  # the script chose the size
    equal = torch.equal(values(first), values(second))
    owed = all(
        torch.equal(a, again.state_dict()["residuals"][n])
        for n, a in compression.state_dict()["residuals"].items()
    )
    for each in (compression, again, own):
        each.close()
    return equal, owed, [ddp.bucket_bytes_cap for ddp in (first, second, given)]


def test_a_resumed_job_has_the_saved_buckets_and_continues_to_the_same_bits(ranks: Pool) -> None:
    for equal, owed, sizes in ranks(3, resumed, allow_groups=True):
        assert equal
        assert owed
        assert sizes == [CAP, CAP, 2 << 20]


def fitted(codec: trimtab.Adaptive) -> tuple[int, int, str, torch.Tensor]:
    """The buckets' sizes of a model that is large enough to fit them, and of one whose script chose; what is said."""
    width = 640
    layers = SMALLEST_BYTES // (4 * width * width) + 1
    given = Ddp(Net(layers, width), bucket_cap_mb=20)
    trimtab.compress(given, codec)
    ddp = Ddp(Net(layers, width))
    trimtab.compress(ddp, codec)
    for step in range(2):
        ddp.zero_grad()
        ddp(batch(step, width)).backward()
    weight = next(ddp.parameters()).grad
    assert weight is not None
    return given.bucket_bytes_cap, ddp.bucket_bytes_cap, trimtab.explain(ddp), weight


def test_all_ranks_fit_their_buckets_alike_and_a_chosen_size_stays(ranks: Pool) -> None:
    outcomes = ranks(2, fitted, trimtab.Adaptive(), allow_groups=True)
    (chosen, cap, words, weight), other = outcomes
    assert chosen == other[0] == 20 << 20
    assert other[1:3] == (cap, words)
    assert torch.equal(weight, other[3])
    assert ("DDP's buckets have" in words) == (cap != 25 << 20)
