"""Scripts that set torch's default type: what trimtab makes for itself is fp32 all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

from trimtab.codec import Block
from trimtab.collectives import reduction_for
from trimtab.control.compression.adaptive import Adaptive
from trimtab.control.compression.ddp import compress_ddp
from trimtab.measure import exchange
from trimtab.measure.kernels import cast, codec_times
from trimtab.precision.reference import quantize, quantize_fp8

if TYPE_CHECKING:
    from tests.support.pool import Pool


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_kernels_are_timed_with_fp32() -> None:
    with default_type(torch.float64):
        assert codec_times(4, torch.device("cpu"), rounds=1)
        assert cast("int8>fp32", 8, torch.device("cpu"))().dtype == torch.float32


def test_codes_and_scales_are_those_of_fp32() -> None:
    values = torch.randn(16, 8, dtype=torch.float32, generator=torch.Generator().manual_seed(0))

    def coded() -> list[torch.Tensor]:
        eight = quantize_fp8(values, torch.float8_e4m3fn, key=0, stochastic=False)
        codes, scales = quantize(values, "rows", key=0, stochastic=False)
        return [codes, scales, eight[0].float(), eight[1]]

    expected = coded()
    for dtype in (torch.float64, torch.bfloat16):
        with default_type(dtype):
            for own, other in zip(coded(), expected, strict=True):
                assert own.dtype == other.dtype
                assert torch.equal(own, other)


def on_rank() -> None:
    with default_type(torch.float64):
        inputs = torch.ones(4, 256, dtype=torch.float32)
        ddp = Ddp(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 64)).float())
        compress_ddp(ddp, Adaptive(), min_numel=1)
        for _ in range(6):
            ddp(inputs).square().mean().backward()
        assert all(bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None)
        reason = compress_ddp(Ddp(nn.Linear(256, 256)), None, min_numel=1)
        assert reason == "not compressing: gradients in float64 are sent as they are"
        types = []

        def noted(pieces: Any, dtype: torch.dtype, *args: Any, **options: Any) -> Any:
            types.append(dtype)
            return reduction_for(pieces, dtype, *args, **options)

        world = dist.group.WORLD
        assert world is not None
        with patch.object(exchange, "reduction_for", noted):
            exchange.measure_exchanges(
                {"bits": (Block(bits=2), False)}, [world], torch.device("cpu"), 1 << 10, repeats=1
            )
        assert set(types) == {torch.float32}, "doubles are sent as they are: no codec would be timed"


def test_a_script_in_double_precision(ranks: Pool) -> None:
    ranks(2, on_rank)
