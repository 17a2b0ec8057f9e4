"""Does this GPU multiply correctly? On some parts of a GPU (MPS) cuBLAS silently leaves out tiles of products."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from trimtab.errors import TrimtabError

SHAPES = ((512, 768, 2304), (2048, 768, 768), (8192, 768, 3072), (512, 4096, 4096))
"""Rows, inner size and columns of the products that are checked; they go wrong on the bad parts of an H200."""

_MPS_PIPES = Path("/tmp/nvidia-mps")
"""Where an MPS daemon of the whole machine listens."""


def refuse_wrong_products(device: torch.device) -> None:
    """Raise if this process has a part of a GPU whose products are wrong; a whole GPU and a CPU are not checked.

    Raises:
        TrimtabError: it names rank and GPU.
    """
    if device.type != "cuda" or not is_part_of_gpu():
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    problem = _checked(index)
    if problem is not None:
        raise TrimtabError(
            f"rank {os.environ.get('RANK', '0')} has {describe_gpu(index)}, which computes wrong products: {problem}. "
            "Training would go wrong silently; give it a whole GPU, or about 1/2, 1/4, 1/6 or 1/8 of one "
            "(docs/emulate.md)"
        )


def is_part_of_gpu(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process shares its GPU through NVIDIA's Multi-Process Service (MPS)."""
    environment = os.environ if environment is None else environment
    names = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PIPE_DIRECTORY")
    return any(environment.get(name) for name in names) or (_MPS_PIPES / "control").exists()


def describe_gpu(index: int) -> str:
    """The GPU's name, and how many multiprocessors this process sees of it."""
    properties = torch.cuda.get_device_properties(index)
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    part = f", {share} % by MPS" if share else ""
    return f"GPU {index} ({properties.name}: {properties.multi_processor_count} multiprocessors{part})"


@cache
def _checked(index: int) -> str | None:
    return wrong_product(torch.device("cuda", index))


def wrong_product(device: torch.device, shapes: tuple[tuple[int, int, int], ...] = SHAPES) -> str | None:
    """Describes the first wrong product of bf16 or fp32 matrices on the device; None if all are right."""
    generator = torch.Generator(device).manual_seed(0)
    for rows, inner, columns in shapes:
        a, b = (
            torch.randint(-2, 3, shape, generator=generator, device=device).float()
            for shape in ((rows, inner), (inner, columns))
        )
        for dtype in (torch.bfloat16, torch.float32):
            for left, right in ((a, b), (b.t(), a.t())):
                # With small integers the sums are exact in every dtype; the check compares the sum of each column.
                expected = left.double().sum(0) @ right.double()
                product = left.to(dtype).contiguous() @ right.to(dtype).contiguous()
                sums = product.sum(0, dtype=torch.float64)
                if not torch.allclose(sums, expected, rtol=0.05, atol=float(expected.abs().max()) * 0.05):
                    return f"{tuple(left.shape)} times {tuple(right.shape)} in {dtype}".replace("torch.", "")
    return None
