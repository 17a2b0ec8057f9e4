"""Products of int8 codes on a GPU: launches the kernels of `product_kernels`, without host synchronization.

Both operands are contiguous along the summed axis, because tensor cores read 8-bit operands in that order only.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.precision.gpu import product_kernels as kernels
from trimtab.precision.gpu.quantize import LAUNCHES, PAD, processors
from trimtab.precision.int8 import LONGEST_SUM
from trimtab.triton_launch import Launch, ceil_div


class Tile(NamedTuple):
    """What one program of the product computes."""

    rows: int
    columns: int
    length: int
    """Of the part of the sum that is in shared memory at a time."""

    warps: int
    stages: int
    """Parts in shared memory at the same time: (rows + columns) · length · stages bytes."""


TILES: dict[int, tuple[Tile, ...]] = {
    # From the largest to the smallest. Measured on sm_90; the others fit the shared memory of their cards.
    80: (Tile(128, 256, 128, 8, 3), Tile(128, 128, 128, 8, 3), Tile(64, 64, 128, 4, 4)),
    86: (Tile(128, 128, 128, 8, 3), Tile(64, 64, 128, 4, 4)),
    90: (Tile(128, 256, 128, 8, 3), Tile(128, 128, 128, 8, 3), Tile(64, 64, 128, 4, 4)),
}
"""The tiles by compute capability: those of the newest one that is not newer than the card's.

Triton has no int8 tensor-core products before sm_80. There cuBLAS multiplies, and a kernel scales its sums.
"""

MIN_ROWS = 32
"""cuBLAS needs more than 16 rows."""

GROUP = 8
"""Rows of tiles computed together."""

TRANSPOSED_TILE = (128, 128, 8)
"""Rows and columns of the tile that one program transposes, and its number of warps."""


def product(
    a: Tensor,
    b: Tensor,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    *,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """a bᵀ · (row scale · column scale) + bias in `dtype`, from padded codes, without the padding."""
    length = a.shape[1]
    assert length == b.shape[1]
    assert length % PAD == 0
    out = torch.empty((rows, columns), dtype=dtype, device=a.device)
    if rows == 0 or columns == 0:
        return out
    if length > LONGEST_SUM and dtype != torch.float32:
        wide = product(
            a, b, rows, columns, torch.float32, row_scale=row_scale, column_scale=column_scale, bias=bias
        )
        return wide.to(dtype)
    scales = (
        out if row_scale is None else row_scale,
        out if column_scale is None else column_scale,
        out if bias is None else bias,
    )
    given = row_scale is not None, column_scale is not None
    if length <= LONGEST_SUM:
        _add_product(a, b, out, scales, (*given, bias is not None, False))
        return out
    for start in range(0, length, LONGEST_SUM):
        end = min(length, start + LONGEST_SUM)
        added = (*given, bias is not None and start == 0, start > 0)
        _add_product(a[:, start:end], b[:, start:end], out, scales, added)
    return out


def transpose(codes: Tensor) -> Tensor:
    """The transpose of int8 codes, in memory."""
    rows, columns = codes.shape
    out = torch.empty((columns, rows), dtype=codes.dtype, device=codes.device)
    if out.numel():
        transpose_launch(codes.device, rows, columns)((codes, out))
    return out


Given = tuple[bool, bool, bool, bool]
"""Whether there is a row scale, a column scale, a bias, and something to add to."""


def _add_product(
    a: Tensor, b: Tensor, out: Tensor, scales: tuple[Tensor, Tensor, Tensor], given: Given
) -> None:
    rows, columns = out.shape
    device = a.device
    if tiles_of(device):
        launch = multiply_launch(
            device, rows, columns, a.shape[1], a.stride(0), b.stride(0), out.dtype, scales[2].dtype, given
        )
        launch((a, b, out, *scales))
        return
    sums = _sums(a.contiguous(), b.contiguous())
    launch = _scale_sums(device, rows, columns, sums.stride(0), out.dtype, scales[2].dtype, given)
    launch((sums, out, *scales))


@lru_cache(LAUNCHES)
def multiply_launch(
    device: torch.device,
    rows: int,
    columns: int,
    length: int,
    stride_a: int,
    stride_b: int,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
    given: Given,
) -> Launch:
    tile = _tile(rows, columns, device)
    constants = _constants(given) | {
        "EVEN": length % tile.length == 0,
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.length,
        "GROUP": GROUP,
    }
    return Launch(
        kernels.multiply, (ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns), 1, 1),
        (rows, columns, length, stride_a, stride_b), constants,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


@lru_cache(LAUNCHES)
def _scale_sums(
    device: torch.device,
    rows: int,
    columns: int,
    stride: int,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
    given: Given,
) -> Launch:
    block = 1024
    grid = (rows, ceil_div(columns, block), 1)
    constants = _constants(given) | {"BLOCK": block}
    return Launch(kernels.scale_sums, grid, (columns, stride), constants, enable_fp_fusion=False)


@lru_cache(LAUNCHES)
def transpose_launch(device: torch.device, rows: int, columns: int) -> Launch:
    bm, bn, warps = TRANSPOSED_TILE
    grid = (ceil_div(rows, bm) * ceil_div(columns, bn), 1, 1)
    return Launch(kernels.transpose, grid, (rows, columns), {"BM": bm, "BN": bn}, num_warps=warps)


def _constants(given: Given) -> dict[str, int | bool]:
    return dict(zip(("ROW", "COLUMN", "BIAS", "ADD"), given, strict=True))


def _sums(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ in int32."""
    if a.numel() == 0:
        return torch.zeros((len(a), len(b)), dtype=torch.int32, device=a.device)
    if len(a) < MIN_ROWS:
        a = torch.nn.functional.pad(a, (0, 0, 0, MIN_ROWS - len(a)))
    return torch._int_mm(a, b.t())


def _tile(rows: int, columns: int, device: torch.device) -> Tile:
    """The largest tile of which there are enough for all processors, from sm_80 on."""
    tiles = tiles_of(device)
    for tile in tiles:
        enough = (16 if tile.columns > 128 else 0.8) * processors(device)
        if ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns) >= enough:
            return tile
    return tiles[-1]


@cache
def tiles_of(device: torch.device) -> tuple[Tile, ...]:
    if device.type != "cuda":
        return TILES[86]  # interpreted
    major, minor = torch.cuda.get_device_capability(device)
    return next((TILES[known] for known in sorted(TILES, reverse=True) if known <= 10 * major + minor), ())
