"""Check and tune the Triton kernels on a GPU, from the source tree:

    PYTHONPATH=src:. python3 tools/gpu_codec.py [--json FILE] [--skip-check] [--skip-tune]

Bit-exactness against the reference over random cases, then time over copying the same tensor for the
choices of tile and warps: 256 MB of fp32, 4 bits, blocks of 1024.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("src", "")]

from tests.codec.triton_cases import Case, cases, differences  # noqa: E402

from trimtab.codec import triton_device  # noqa: E402
from trimtab.codec.packing import Packing, Segment  # noqa: E402
from trimtab.codec.triton_kernels import TritonKernels  # noqa: E402
from trimtab.codec.triton_tables import groups  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BLOCKS = (1024, 8, 16, 64, 100, 9, 512, 77, 3000, 8200, 256, 1000, 2048)
SHARDS = 12
SECONDS = 60
"""How long each shard of the random check goes on."""

TUNINGS = ((1024, 1), (1024, 2), (1024, 4), (2048, 1), (2048, 2), (2048, 4), (4096, 4), (4096, 8))
ELEMENTS = 64 * 2**20


def check() -> dict[str, Any]:
    """Random cases against the reference. Compiling takes most of the time, so processes share them out."""
    command = [sys.executable, __file__, "--shard"]
    shards = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(SHARDS)]
    results: list[dict[str, Any]] = []
    for i, shard in enumerate(shards):
        lines = shard.communicate()[0].splitlines()
        if shard.returncode or not lines:
            print(f"shard {i} failed with {shard.returncode}")
            results.append({"cases": 0, "wrong": {f"shard {i}": [f"exit status {shard.returncode}"]}})
        else:
            results.append(json.loads(lines[-1]))
    wrong = {case: found for result in results for case, found in result["wrong"].items()}
    for case, found in list(wrong.items())[:20]:
        print("WRONG", case, *found, sep="\n      ")
    done = sum(result["cases"] for result in results)
    print(f"{done} cases, {len(wrong)} of them wrong")
    return {"cases": done, "wrong": wrong}


def check_shard(shard: int) -> dict[str, Any]:
    """Large cases against the reference on the GPU, then small ones against it on the CPU or GPU."""
    wrong: dict[str, list[str]] = {}
    done, shown, begin = 0, False, time.perf_counter()
    bits, dtype = 1 + shard % 8, (torch.float32, torch.bfloat16, torch.float16)[shard % 3]
    whole = Segment(offset=0, numel=2**23 + 3, bits=bits, name_hash=7)
    large = Case(
        packing=Packing(segments=(whole,), dtype=dtype),
        seed=shard,
        kind="normal",
        shift=0,
        byte_shift=0,
        scale=1 / 3,
        stochastic=True,
        payloads=3,
        layout="gap",
    )
    pairs = [(large, GPU)]
    for i, case in enumerate(cases(400, 100 + shard, largest=30_000, blocks=BLOCKS)):
        pairs.append((case, GPU if i % 4 == 3 else CPU))
    for case, oracle in pairs:
        if time.perf_counter() - begin > SECONDS:
            break
        done += 1
        try:
            found = differences(case, TritonKernels(), GPU, oracle)
        except Exception as error:
            found = [f"{type(error).__name__}: {str(error)[:300]}"]
            if not shown:
                traceback.print_exc()
            shown = True
        if found:
            wrong[f"{case} vs {oracle.type}"] = found
    return {"cases": done, "wrong": wrong}


def specialisations() -> dict[str, Any]:
    """Streams of any size must not compile anew."""
    packing = Packing(segments=(Segment(offset=0, numel=5000, bits=4),), dtype=torch.float32)
    flat = torch.randn(5000, device=GPU)
    out = torch.empty(packing.nbytes, dtype=torch.uint8, device=GPU)
    kernels = TritonKernels()
    seconds = []
    for stream in (0, 1, 16, 2**31, 2**32 + 1, 2**63 + 5, 2**64 - 1):
        begin = time.perf_counter()
        kernels.encode(flat, packing, out, stream=stream, scale=1.0 if stream % 2 else 0.5)
        seconds.append(time.perf_counter() - begin)
    compiled = len(triton_device.encode.device_caches[GPU.index][0])
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i in range(200):
        kernels.encode(flat, packing, out, stream=i)
    call_us = (time.perf_counter() - begin) / 200 * 1e6
    torch.cuda.synchronize()
    print(f"encode: first call {seconds[0]:.2f} s, later at most {max(seconds[1:]) * 1e6:.0f} us; "
          f"{compiled} variants in all; a call costs the host {call_us:.1f} us")  # fmt: skip
    return {"first_s": seconds[0], "later_us": max(seconds[1:]) * 1e6, "call_us": call_us}


def tune() -> list[dict[str, Any]]:
    """Time over copy of each operation, for each tuning and type."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        packing = Packing(segments=(Segment(offset=0, numel=ELEMENTS, bits=4),), dtype=dtype)
        flats = [torch.randn(ELEMENTS, device=GPU, dtype=dtype) for _ in range(3)]
        outs = [torch.zeros(packing.nbytes, dtype=torch.uint8, device=GPU) for _ in range(3)]
        received = torch.zeros(4, packing.nbytes, dtype=torch.uint8, device=GPU)
        payloads = [received[0], received[2], received[3]]
        kernels = TritonKernels()

        def operations(
            kernels: TritonKernels = kernels,
            packing: Packing = packing,
            flats: list[torch.Tensor] = flats,
            outs: list[torch.Tensor] = outs,
            payloads: list[torch.Tensor] = payloads,
        ) -> dict[str, Callable[[int], object]]:
            return {
                "copy": lambda i: flats[i % 3].copy_(flats[(i + 1) % 3]),
                "encode": lambda i: kernels.encode(flats[i % 3], packing, outs[i % 3], stream=i),
                "encode_nearest": lambda i: kernels.encode(
                    flats[i % 3], packing, outs[i % 3], stream=i, stochastic=False
                ),
                "decode": lambda i: kernels.decode(outs[i % 3], packing, flats[(i + 1) % 3]),
                "decode_add": lambda i: kernels.decode(outs[i % 3], packing, flats[(i + 1) % 3], add=True),
                "reduce_encode3": lambda i: kernels.reduce_encode(
                    flats[i % 3], payloads, packing, outs[i % 3], stream=i, scale=0.25
                ),
            }

        for tile, warps in TUNINGS if dtype == torch.float32 else TUNINGS[:4]:
            row: dict[str, Any] = {"dtype": str(dtype)[6:], "tile": tile, "warps": warps}
            try:
                packing.prepared.clear()
                packing.prepared[(TritonKernels, GPU)] = groups(packing, GPU, tile, warps)
                row |= times(operations())
            except Exception as error:
                traceback.print_exc()
                row["error"] = str(error)[:300]
            for flat in flats:
                flat.normal_()
            rows.append(row)
            print(" ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
    return rows


def times(operations: dict[str, Callable[[int], object]], repeats: int = 21) -> dict[str, float]:
    """Copy in microseconds, and the median of each other operation over copy's; interleaved."""
    taken: dict[str, list[float]] = {name: [] for name in operations}
    for i in range(repeats + 3):
        for name, operation in operations.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400_000)  # the host runs ahead, so that no launch is timed
            start.record()
            operation(i)
            end.record()
            end.synchronize()
            if i >= 3:
                taken[name].append(start.elapsed_time(end) * 1e3)
    median = {name: statistics.median(t) for name, t in taken.items()}
    copy = median.pop("copy")
    return {"copy_us": copy} | {name: t / copy for name, t in median.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--skip-tune", action="store_true")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.shard is not None:
        torch.set_num_threads(1)
        print(json.dumps(check_shard(arguments.shard)))
        return
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    print(result)
    stages: dict[str, Callable[[], object]] = {"specialisations": specialisations}
    if not arguments.skip_tune:
        stages["tune"] = tune
    if not arguments.skip_check:
        stages["check"] = check
    for name, stage in stages.items():
        try:
            result[name] = stage()
        except Exception:
            traceback.print_exc()
            result[name] = traceback.format_exc()[-2000:]
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
