"""A share of the random cases of the codec on a GPU: `python -m tests.gpu.codec_cases SHARD SECONDS` prints JSON."""

from __future__ import annotations

import json
import sys
import time

import torch
from tests.codec.triton_cases import Case, cases, differences

from trimtab.codec.packing import Packing, Segment

BLOCKS = (1024, 8, 16, 64, 100, 9, 512, 77, 3000, 8200, 256, 1000, 2048)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(shard: int, seconds: float) -> dict[str, object]:
    """A large case against the reference on the GPU, then small ones against it on the CPU or GPU."""
    from trimtab.codec.triton_kernels import TritonKernels

    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    whole = Segment(offset=0, numel=2**23 + 3, bits=1 + shard % 8, name_hash=7)
    large = Case(
        packing=Packing(segments=(whole,), dtype=DTYPES[shard % 3]),
        seed=shard,
        kind="normal",
        shift=0,
        byte_shift=0,
        scale=1 / 3,
        stochastic=True,
        payloads=3,
        layout="gap",
    )
    pairs = [(large, gpu)]
    for i, case in enumerate(cases(400, 100 + shard, largest=30_000, blocks=BLOCKS)):
        pairs.append((case, gpu if i % 4 == 3 else cpu))
    wrong: dict[str, list[str]] = {}
    done, begin = 0, time.perf_counter()
    for case, oracle in pairs:
        if time.perf_counter() - begin > seconds:
            break
        done += 1
        if differing := differences(case, TritonKernels(), gpu, oracle):
            wrong[f"{case} vs {oracle.type}"] = differing
    return {"cases": done, "wrong": wrong}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(check(int(sys.argv[1]), float(sys.argv[2]))))
