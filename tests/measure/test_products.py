"""A device that leaves out part of a product is noticed, and a rank that has it is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.measure.probes import CPU
from torch.overrides import TorchFunctionMode

from trimtab.errors import TrimtabError
from trimtab.measure import products
from trimtab.measure.products import is_part_of_gpu, refuse_wrong_products, wrong_product

SMALL = ((96, 64, 128),)
RESULTS = {"the output": (96, 128), "the input's gradient": (96, 64), "the weight's gradient": (128, 64)}
"""Of a linear layer of that shape."""


class _TileLeftOut(TorchFunctionMode):
    """Products of one type and shape lack a tile, as cuBLAS has it on a bad part of a GPU."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        super().__init__()
        self.dtype, self.shape = dtype, shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "matmul" in func.__name__ and (result.dtype, result.shape) == (self.dtype, self.shape):
            result[-32:, -32:] = 0
        return result


def test_right_products_are_right() -> None:
    assert wrong_product(CPU, SMALL) is None


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_missing_tile_is_noticed(dtype: torch.dtype, result: str) -> None:
    with _TileLeftOut(dtype, RESULTS[result]):
        problem = wrong_product(CPU, SMALL)
    kind = str(dtype).removeprefix("torch.")
    assert problem == f"{result} of a linear layer of 64 x 128, 96 rows, in {kind}"


def test_a_missing_tile_among_many_rows_is_noticed() -> None:
    with _TileLeftOut(torch.float32, (4096, 128)):
        assert wrong_product(CPU, ((4096, 64, 128),)) is not None


def test_only_a_shared_gpu_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_MPS_PIPES", tmp_path)
    assert not is_part_of_gpu({})
    assert not is_part_of_gpu({"CUDA_VISIBLE_DEVICES": "0"})
    assert is_part_of_gpu({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "70"})
    assert is_part_of_gpu({"CUDA_MPS_PIPE_DIRECTORY": "/somewhere"})
    (tmp_path / "control").touch()
    assert is_part_of_gpu({})


def test_a_rank_with_a_wrong_part_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "70")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(products, "_checked", lambda index: "(8, 8) times (8, 8) in bfloat16")
    monkeypatch.setattr(products, "describe_gpu", lambda index: f"GPU {index} (H200: 92 multiprocessors)")
    refuse_wrong_products(CPU)
    message = r"rank 3 has GPU 1 \(H200: 92 multi.*\(8, 8\) times \(8, 8\) in bfloat16.*1/2, 1/4"
    with pytest.raises(TrimtabError, match=message):
        refuse_wrong_products(torch.device("cuda", 1))
