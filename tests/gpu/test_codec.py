"""The codec's Triton kernels, compiled: the reference's bits, one compilation for any stream, and their speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch
from tests.gpu.timing import over_copy
from tests.support.requirements import requires

from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import Packing, Segment

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = requires(cuda=1, modules=["triton"])

GPU = torch.device("cuda", 0)
SHARDS, SECONDS = min(12, os.cpu_count() or 1), 25
ELEMENTS = 64 * 2**20


def test_cuda_has_the_triton_kernels() -> None:
    assert kernels_for(torch.device("cuda")).name == "triton"


def test_random_cases_give_the_reference_bits(record_property: Callable[[str, object], None]) -> None:
    """Compiling takes most of the time, so processes share the cases, each for some seconds."""
    command = [sys.executable, "-m", "tests.gpu.codec_cases"]
    shards = [
        subprocess.Popen(
            [*command, str(i), str(SECONDS)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(SHARDS)
    ]
    outputs = [shard.communicate(timeout=240) for shard in shards]
    for shard, (_, errors) in zip(shards, outputs, strict=True):
        assert shard.returncode == 0, errors[-3000:]
    results = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    record_property("cases", sum(result["cases"] for result in results))
    assert {case: wrong for result in results for case, wrong in result["wrong"].items()} == {}
    assert all(result["cases"] > 1 for result in results), "no shard got beyond its first case"


def test_streams_of_any_size_compile_nothing_new(record_property: Callable[[str, object], None]) -> None:
    from trimtab.codec import triton_device
    from trimtab.codec.triton_kernels import TritonKernels

    packing = Packing(segments=(Segment(offset=0, numel=5000, bits=4),), dtype=torch.float32)
    flat = torch.randn(5000, device=GPU)
    out = torch.empty(packing.nbytes, dtype=torch.uint8, device=GPU)
    kernels = TritonKernels()

    def variants() -> int:
        return len(triton_device.encode.device_caches[GPU.index][0])

    begin = time.perf_counter()
    kernels.encode(flat, packing, out, stream=12345, scale=0.5)
    record_property("first_call_s", round(time.perf_counter() - begin, 3))
    compiled = variants()
    assert compiled > 0
    for stream in (0, 1, 16, 2**31, 2**32 + 1, 2**63 + 5, 2**64 - 1):
        kernels.encode(flat, packing, out, stream=stream, scale=1.0 if stream % 2 else 0.5)
    assert variants() == compiled
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for stream in range(200):
        kernels.encode(flat, packing, out, stream=stream)
    record_property("host_us_per_call", round((time.perf_counter() - begin) / 200 * 1e6, 1))
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_time_over_copying(dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    """64 Mi values in 4 bits and blocks of 1024; what comes back is as near as 4 bits allow."""
    packing = Packing(segments=(Segment(offset=0, numel=ELEMENTS, bits=4),), dtype=dtype)
    flat, other = (torch.randn(ELEMENTS, device=GPU, dtype=dtype) for _ in range(2))
    out = torch.zeros(packing.nbytes, dtype=torch.uint8, device=GPU)
    received = torch.zeros(4, packing.nbytes, dtype=torch.uint8, device=GPU)
    kernels = kernels_for(GPU)
    kernels.encode(flat, packing, out, stream=1)
    back = torch.empty_like(flat)
    kernels.decode(out, packing, back)
    assert 0.05 < float((back - flat).float().norm() / flat.float().norm()) < 0.2
    payloads = [received[0], received[2], received[3]]
    times = over_copy(
        {
            "copy": lambda: other.copy_(flat),
            "encode": lambda: kernels.encode(flat, packing, out, stream=1),
            "encode_nearest": lambda: kernels.encode(flat, packing, out, stream=1, stochastic=False),
            "decode": lambda: kernels.decode(out, packing, other),
            "decode_add": lambda: kernels.decode(received[0], packing, other, add=True),
            "reduce_encode3": lambda: kernels.reduce_encode(
                flat, payloads, packing, out, stream=1, scale=0.25
            ),
        }
    )
    record_property("time_over_copy", times)
