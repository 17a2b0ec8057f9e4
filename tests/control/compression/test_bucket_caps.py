"""DDP fills the buckets that `trimtab run` asks for, and predictions know them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.control.compression.bucket_caps import bucket_caps_mb, bucket_options
from trimtab.control.compression.ddp import compression_of
from trimtab.measure.capture.capture import capture_workload
from trimtab.workload.buckets import ddp_buckets

if TYPE_CHECKING:
    from tests.support.pool import Pool

WIDTH = 1024


def network() -> nn.Sequential:
    """Layers of 4 MiB."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))


def buckets(find_unused: bool) -> tuple[list[list[str]], list[list[str]]]:
    """The parameters of each bucket after some steps, and as predicted."""
    model = network()
    given: dict[str, Any] = {"module": model, "find_unused_parameters": find_unused}
    ddp = DistributedDataParallel(**given, **bucket_options(given))
    names = {id(p): name for name, p in model.named_parameters()}
    seen: list[list[str]] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        seen.append([names[id(p)] for p in bucket.parameters()])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        seen.clear()
        ddp(torch.ones(1, WIDTH)).sum().backward()
    workload = capture_workload(model, torch.ones(1, WIDTH), loss=torch.sum)
    predicted = ddp_buckets(workload.parameters, workload.operators, bucket_caps_mb(ddp))
    return [sorted(b) for b in seen], [sorted(b.parameters) for b in predicted]


@pytest.mark.parametrize("find_unused", [False, True])
def test_the_last_buckets_of_a_backward_pass_are_short(ranks: Pool, find_unused: bool) -> None:
    if not bucket_options({"module": network()}):
        pytest.skip("this torch takes one size for all buckets")
    seen, predicted = ranks(1, buckets, find_unused)[0]
    assert seen == [[f"{i}.weight" for i in group] for group in ([5, 6, 7], [3, 4], [1, 2], [0])]
    assert predicted == seen


def compressed(options: dict[str, Any]) -> tuple[list[list[str]], float, str]:
    """The buckets of a module that a script has constructed and compressed; how far its gradients are off."""
    torch.manual_seed(0)
    model, plain = network(), DistributedDataParallel(network())
    model.load_state_dict(plain.module.state_dict())
    ddp = DistributedDataParallel(model, **options)
    trimtab.compress(ddp, trimtab.Adaptive(), min_numel=1 << 30)  # so that all are sent exactly
    compression = compression_of(ddp)
    assert compression is not None
    seen: list[list[str]] = []
    compression._observe = lambda step, pieces, flat: seen.append(sorted(piece.name for piece in pieces))
    off = 0.0
    for step in range(3):
        seen.clear()
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for each in (ddp, plain):
            each.zero_grad()
            each(x).square().mean().backward()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            off = max(off, float((ours.grad - theirs.grad).norm() / theirs.grad.norm()))
    return list(seen), off, trimtab.explain(ddp)


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ids=["plain", "unused", "static graph", "views"],
)
def test_buckets_of_a_script_are_rebuilt_once_and_train_alike(ranks: Pool, options: dict[str, Any]) -> None:
    if not bucket_options({"module": network()}):
        pytest.skip("this torch takes one size for all buckets")
    for seen, off, words in ranks(2, compressed, options, allow_groups=True):
        assert seen == [[f"{i}.weight" for i in group] for group in ([5, 6, 7], [3, 4], [1, 2], [0])]
        assert off < 1e-6
        assert "last buckets are short" in words


def test_buckets_that_a_script_has_chosen_are_not_rebuilt(ranks: Pool) -> None:
    for seen, off, words in ranks(2, compressed, {"bucket_cap_mb": 20}, allow_groups=True):
        assert max(map(len, seen)) == 5
        assert off < 1e-6
        assert "last buckets are short" not in words


class Unordered(nn.Module):
    """Layers whose norms come first among the parameters and last in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(8))
        self.layers = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(norm(x))
        return x


def sizes() -> list[float]:
    """Sizes of the buckets in MiB."""
    model = Unordered()
    ddp = DistributedDataParallel(model, **bucket_options({"module": model}))
    seen: list[float] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        seen.append(bucket.buffer().nbytes / (1 << 20))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        seen.clear()
        ddp(torch.ones(1, WIDTH)).sum().backward()
    return seen


def test_a_small_parameter_in_another_order_leaves_the_last_bucket_short(ranks: Pool) -> None:
    if not bucket_options({"module": network()}):
        pytest.skip("this torch takes one size for all buckets")
    assert [round(size) for size in ranks(1, sizes)[0]] == [12, 8, 8, 4]


def test_sizes_of_the_script_stay() -> None:
    assert bucket_options({"module": network(), "bucket_cap_mb": 25}) == {}
    assert bucket_options({"module": network(), "bucket_cap_mb_list": [1]}) == {}
    assert bucket_options({"module": nn.Linear(2, 2)}) == {}
    mixed = network()
    mixed[0].double()
    assert bucket_options({"module": mixed}) == {}
