"""8-bit operands on a GPU: launches the kernels of `triton_kernels`, without host synchronization."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from trimtab.precision import triton_kernels as kernels
from trimtab.precision.draw import Draw, Operand
from trimtab.precision.triton_launch import ceil_div, launch, power_of_2

PAD = 16
"""Tensor-core products need every axis to be a multiple of this."""

LONGEST_ROW_IN_REGISTERS = 16384
"""Longer rows are read twice: once for their scale and once for their codes."""

VALUES_PER_WARP = 2048
"""Of a row, in quantization by row."""

TILE = (64, 128, 4)
"""Rows and columns of the tile that one program quantizes and transposes, and its number of warps."""

COLUMN_TILE = (32, 128, 4)
"""Rows and columns of the tiles in which columns' largest magnitudes are found, and the number of warps."""

_FORMATS = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


def padded(n: int) -> int:
    """n rounded up to a multiple of `PAD`."""
    return -(-n // PAD) * PAD


def quantize_by_row(
    values: Tensor,
    dtype: torch.dtype,
    draw: Draw,
    operand: Operand,
    *,
    column_factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes padded with zeros on both axes, and a scale for each of the (unpadded) rows."""
    values = values.contiguous()
    rows, columns = values.shape
    codes = _empty(padded(rows), padded(columns), dtype, values.device, zero=rows % PAD != 0)
    scales = torch.empty(rows, dtype=torch.float32, device=values.device)
    if rows == 0 or columns == 0:
        return codes.zero_(), scales.zero_()
    block = max(16, power_of_2(padded(columns))) if columns <= LONGEST_ROW_IN_REGISTERS else 4096
    chunks = ceil_div(padded(columns), block)
    factor = values if column_factor is None else column_factor
    launch(
        kernels.quantize_rows, (rows, 1, 1),
        (values, _bytes(codes), scales, factor, draw.calls, draw.base, columns, padded(columns)),
        {
            "OPERAND": int(operand), "FORMAT": _FORMATS[dtype], "STOCHASTIC": draw.stochastic,
            "FACTOR": column_factor is not None, "BLOCK": block, "CHUNKS": chunks,
        },
        num_warps=min(16, max(1, block // VALUES_PER_WARP)), enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scales


def quantize_by_column(
    values: Tensor,
    draw: Draw,
    operand: Operand,
    *,
    row_factor: Tensor | None = None,
    direct: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes (if requested) and transposed codes, both padded with zeros, and a scale for each column."""
    values = values.contiguous()
    rows, columns = values.shape
    codes, transposed = _codes_of(rows, columns, torch.int8, values.device, direct, True)
    scales = torch.empty(columns, dtype=torch.float32, device=values.device)
    if rows == 0 or columns == 0:
        return codes.zero_(), transposed.zero_(), scales.zero_()
    largest = torch.zeros(columns, dtype=torch.int32, device=values.device)
    keys = _keys(rows, draw, values.device)
    bm, bn, warps = COLUMN_TILE
    across = ceil_div(columns, bn)
    # As many rows for each program as still give every processor several programs.
    chunks = max(1, min(64, rows * across // (bm * 8 * processors(values.device))))
    chunks = power_of_2(chunks)
    factor = values if row_factor is None else row_factor
    launch(
        kernels.find_largest_of_columns, (ceil_div(rows, bm * chunks), across, 1),
        (values, factor, largest, keys, draw.calls, draw.base, rows, columns),
        {
            "OPERAND": int(operand), "STOCHASTIC": draw.stochastic, "FACTOR": row_factor is not None, "BM": bm,
            "BN": bn, "CHUNKS": chunks,
        },
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    _quantize_tiles(values, row_factor, largest, keys, codes, transposed, scales, draw, by_column=True)
    return codes, transposed, scales


def quantize_whole(
    values: Tensor,
    dtype: torch.dtype,
    draw: Draw,
    operand: Operand,
    *,
    direct: bool = True,
    transposed: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and transposed codes (each if requested, both padded with zeros), and their single scale."""
    values = values.contiguous()
    rows, columns = values.shape
    largest = torch.zeros((), dtype=torch.int32, device=values.device)
    scale = torch.empty((), dtype=torch.float32, device=values.device)
    codes, transposed_codes = _codes_of(rows, columns, dtype, values.device, direct, transposed)
    if rows == 0 or columns == 0:
        return codes, transposed_codes, scale.zero_()
    block = 8192
    programs = min(ceil_div(values.numel(), block), 8 * processors(values.device))
    keys = _keys(rows, draw, values.device)
    launch(
        kernels.find_largest, (programs, 1, 1),
        (values, largest, keys, draw.calls, draw.base, values.numel(), rows),
        {
            "OPERAND": int(operand), "STOCHASTIC": draw.stochastic,
            "ROWS": power_of_2(ceil_div(rows, programs)), "BLOCK": block,
        },
        num_warps=8,
    )  # fmt: skip
    _quantize_tiles(values, None, largest, keys, codes, transposed_codes, scale, draw, by_column=False)
    return codes, transposed_codes, scale


def _quantize_tiles(
    values: Tensor,
    row_factor: Tensor | None,
    largest: Tensor,
    keys: Tensor,
    codes: Tensor,
    transposed: Tensor,
    scales: Tensor,
    draw: Draw,
    *,
    by_column: bool,
) -> None:
    rows, columns = values.shape
    m, n = padded(rows), padded(columns)
    bm, bn, warps = TILE
    factor = values if row_factor is None else row_factor
    launch(
        kernels.quantize_tiles, (ceil_div(m, bm) * ceil_div(n, bn), 1, 1),
        (values, factor, largest, keys, _bytes(codes), _bytes(transposed), scales, rows, columns, m, n),
        {
            "FORMAT": _FORMATS[codes.dtype], "STOCHASTIC": draw.stochastic, "FACTOR": row_factor is not None,
            "BY_COLUMN": by_column, "DIRECT": len(codes) > 0, "TRANSPOSED": len(transposed) > 0, "BM": bm, "BN": bn,
        },
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def _empty(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, zero: bool = False
) -> Tensor:
    # As bytes: torch cannot fill every 8-bit float type.
    codes = (torch.zeros if zero else torch.empty)((rows, columns), dtype=torch.int8, device=device)
    return codes if dtype == torch.int8 else codes.view(dtype)


def _bytes(codes: Tensor) -> Tensor:
    return codes if codes.dtype == torch.int8 else codes.view(torch.int8)


def _codes_of(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, direct: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Room for codes and for transposed codes; none where they are not requested."""
    m, n = padded(rows), padded(columns)
    codes = _empty(m if direct else 0, n, dtype, device)
    return codes, _empty(n if transposed else 0, m, dtype, device)


def _keys(rows: int, draw: Draw, device: torch.device) -> Tensor:
    return torch.empty(rows if draw.stochastic else 1, dtype=torch.int64, device=device)


@cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
