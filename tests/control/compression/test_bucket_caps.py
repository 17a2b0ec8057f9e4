"""DDP fills the buckets that `trimtab run` asks for, and predictions know them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.control.compression.bucket_caps import bucket_caps_mb, bucket_options
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
    assert seen == [[f"{i}.weight" for i in group] for group in ([6, 7], [3, 4, 5], [1, 2], [0])]
    assert predicted == seen


def test_sizes_of_the_script_stay() -> None:
    assert bucket_options({"module": network(), "bucket_cap_mb": 25}) == {}
    assert bucket_options({"module": network(), "bucket_cap_mb_list": [1]}) == {}
    assert bucket_options({"module": nn.Linear(2, 2)}) == {}
    mixed = network()
    mixed[0].double()
    assert bucket_options({"module": mixed}) == {}
