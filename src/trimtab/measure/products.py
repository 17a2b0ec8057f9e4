"""Does this device multiply correctly, and in which types fast enough to be worth a measurement?

On some parts of a GPU (MPS) cuBLAS silently leaves out tiles of products.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from pathlib import Path

import torch

from trimtab.errors import TrimtabError
from trimtab.measure.timing import call_seconds
from trimtab.precision.devices import offers

SHAPES = (
    (512, 768, 2304),
    (2048, 768, 768),
    (8192, 768, 3072),
    (512, 4096, 4096),
    (16384, 1536, 6144),
    (16384, 6144, 1536),
)
"""Rows, inner size and columns of the linear layers that are checked; they go wrong on the bad parts of an H200."""

_TILE = 128
"""Rows that are summed. Of more rows, one tile that was left out would make too small a difference."""

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
    """Describes the first wrong product of bf16 or fp32 matrices on the device; None if all are right.

    Each shape is a linear layer whose three products are checked, since each has a layout and so a kernel of its own.
    """
    generator = torch.Generator(device).manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator, device=device).float()

    for rows, inner, columns in shapes:
        x, weight, gradient = integers(rows, inner), integers(columns, inner), integers(rows, columns)
        for dtype in (torch.bfloat16, torch.float32):
            factors = {
                "the output": (x, weight.t()),
                "the input's gradient": (gradient, weight),
                "the weight's gradient": (gradient.t(), x),
            }
            for name, (left, right) in factors.items():
                if not _multiplies(left.to(dtype), right.to(dtype)):
                    kind = str(dtype).removeprefix("torch.")
                    return f"{name} of a linear layer of {inner} x {columns}, {rows} rows, in {kind}"
    return None


def _multiplies(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether a product of small integers is right, judged by the sums of every `_TILE` rows, which are exact."""
    tiles = max(1, left.shape[0] // _TILE)
    expected = left.double().unflatten(0, (tiles, -1)).sum(1) @ right.double()
    # What was in memory must not look like a result where nothing is written.
    unwritten = torch.full(
        (left.shape[0], right.shape[1]), float("nan"), dtype=left.dtype, device=left.device
    )
    del unwritten
    sums = (left @ right).unflatten(0, (tiles, -1)).sum(1, dtype=torch.float64)
    return torch.allclose(sums, expected, rtol=0.05, atol=float(expected.abs().max()) * 0.05)


_TRIAL_SIZE, _HOPELESS = 256, 8.0
"""Rows of the square matrices that are multiplied, and how many times longer than in fp32 is hopeless."""


def usual_precisions(device: torch.device, autocast: str | None = None) -> tuple[str, ...]:
    """The precisions that are probed by default besides the model's own: all that may pay off on the device.

    These are tf32 and a half type for a model in fp32, and fp8 or else int8. A half type in which the device is
    hopelessly slow (CPUs without instructions for it) is left out.
    """
    offered = tuple(name for name in offers(device)["linear"] if not is_hopeless(name, device))
    own = () if autocast else tuple(name for name in ("tf32",) if name in offered)
    half = () if autocast else tuple(name for name in ("bf16", "fp16") if name in offered)[:1]
    return own + half + tuple(name for name in ("fp8", "int8") if name in offered)[:1]


@lru_cache
def is_hopeless(precision: str, device: torch.device) -> bool:
    """Whether a product in this half type takes so much longer than in fp32 that no operator could gain by it."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if dtype is None or device.type != "cpu":
        return False
    plain = torch.randn(_TRIAL_SIZE, _TRIAL_SIZE, dtype=torch.float32)
    half = plain.to(dtype)
    times: list[tuple[float, float]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a thread that waits for a busy core would be timed otherwise
    try:
        for _ in range(5):
            low, own = (call_seconds(partial(torch.mm, m, m), device) for m in (half, plain))
            times.append((low, own))
    finally:
        torch.set_num_threads(threads)
    low, own = (min(column) for column in zip(*times, strict=True))
    return bool(low > _HOPELESS * own)
