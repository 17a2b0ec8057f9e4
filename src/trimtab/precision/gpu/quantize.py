"""8-bit operands on a GPU: launches the kernels of `quantize_kernels`, without host synchronization."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.precision.draw import Draw, Operand
from trimtab.precision.gpu import quantize_kernels as kernels
from trimtab.precision.products import ColumnTotals
from trimtab.triton_launch import Launch, ceil_div, power_of_2, zeros

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
LAUNCHES = 1024
"""Sizes of each kind that are remembered."""


def padded(n: int) -> int:
    """n rounded up to a multiple of `PAD`."""
    return -(-n // PAD) * PAD


def quantize_by_row(
    values: Tensor, draw: Draw, operand: Operand, *, column_factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """int8 codes padded with zeros on both axes, and a scale for each of the (unpadded) rows."""
    values = values.contiguous()
    rows, columns = values.shape
    codes = _empty(padded(rows), padded(columns), values.device, zero=rows % PAD != 0)
    scales = torch.empty(rows, dtype=torch.float32, device=values.device)
    if rows == 0 or columns == 0:
        return codes.zero_(), scales.zero_()
    factor = values if column_factor is None else column_factor
    launch = rows_launch(
        values.device, values.dtype, rows, columns, operand, draw.stochastic, column_factor is not None
    )
    launch((values, codes, scales, factor, draw.calls), draw.base)
    return codes, scales


def quantize_by_column(
    values: Tensor,
    draw: Draw,
    operand: Operand,
    *,
    row_factor: Tensor | None = None,
    direct: bool = False,
    totals: ColumnTotals | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes (if requested) and transposed codes, both padded with zeros, and a scale for each column."""
    values = values.contiguous()
    rows, columns = values.shape
    device = values.device
    codes, transposed = _codes_of(rows, columns, device, direct, True)
    scales = torch.empty(columns, dtype=torch.float32, device=device)
    if rows == 0 or columns == 0:
        return codes.zero_(), transposed.zero_(), scales.zero_()
    largest, keys = zeros(columns, device), _keys(rows, draw, device)
    factor = values if row_factor is None else row_factor
    given = row_factor is not None
    survey = survey_of_columns(device, values.dtype, rows, columns, operand, draw.stochastic, given, False)
    survey((values, factor, largest, keys), survey.parts(columns, device, totals), draw.calls, draw.base)
    launch = tiles_launch(device, values.dtype, rows, columns, 0, draw.stochastic, given, True, direct, True)
    launch((values, factor, largest, keys, codes, transposed, scales))
    return codes, transposed, scales


def quantize_whole(
    values: Tensor,
    dtype: torch.dtype,
    draw: Draw,
    operand: Operand,
    *,
    direct: bool = True,
    transposed: bool = True,
    totals: ColumnTotals | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and transposed codes (each if requested, both padded with zeros), and their single scale."""
    values = values.contiguous()
    rows, columns = values.shape
    device = values.device
    scale = torch.empty((), dtype=torch.float32, device=device)
    codes, flipped = _codes_of(rows, columns, device, direct, transposed)
    if rows and columns:
        largest, keys = zeros(1, device), _keys(rows, draw, device)
        if totals is None:
            launch = _largest(device, values.dtype, rows, columns, operand, draw.stochastic)
            launch((values, largest, keys, draw.calls), draw.base)
        else:
            survey = survey_of_columns(
                device, values.dtype, rows, columns, operand, draw.stochastic, False, True
            )
            parts = survey.parts(columns, device, totals)
            survey((values, values, largest, keys), parts, draw.calls, draw.base)
        form = _FORMATS[dtype]
        launch = tiles_launch(
            device, values.dtype, rows, columns, form, draw.stochastic, False, False, direct, transposed
        )
        launch((values, values, largest, keys, codes, flipped, scale))
    else:
        scale.zero_()
    if dtype == torch.int8:
        return codes, flipped, scale
    return codes.view(dtype), flipped.view(dtype), scale


@lru_cache(LAUNCHES)
def rows_launch(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    operand: int,
    stochastic: bool,
    factor: bool,
) -> Launch:
    block = max(16, power_of_2(padded(columns))) if columns <= LONGEST_ROW_IN_REGISTERS else 4096
    constants: dict[str, int | bool] = {
        "OPERAND": int(operand), "FORMAT": 0, "STOCHASTIC": stochastic, "FACTOR": factor, "BLOCK": block,
        "CHUNKS": ceil_div(padded(columns), block),
    }  # fmt: skip
    warps = min(16, max(1, block // VALUES_PER_WARP))
    return Launch(
        kernels.quantize_rows, (rows, 1, 1), (columns, padded(columns)), constants,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


class Survey(NamedTuple):
    """Finds the largest magnitudes of columns, or of all, and on request the columns' totals."""

    with_totals: Launch
    without: Launch
    bands: int
    """Of rows, each of which gives one row of totals."""

    def parts(self, columns: int, device: torch.device, totals: ColumnTotals | None) -> Tensor | None:
        """Room for the columns' totals, if they are requested."""
        if totals is None:
            return None
        totals.parts = torch.empty((self.bands, columns), dtype=torch.float32, device=device)
        return totals.parts

    def __call__(self, places: Sequence[Any], parts: Any, calls: Any, base: int) -> None:
        """Run with values, factor, largest and keys; everything as tensors or as addresses."""
        if parts is None:
            self.without((*places, places[-1], calls), base)
        else:
            self.with_totals((*places, parts, calls), base)


@lru_cache(LAUNCHES)
def survey_of_columns(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    operand: int,
    stochastic: bool,
    factor: bool,
    whole: bool,
) -> Survey:
    bm, bn, warps = COLUMN_TILE
    across = ceil_div(columns, bn)
    # As many rows for each program as still give every processor several programs.
    chunks = power_of_2(max(1, min(64, rows * across // (bm * 8 * processors(device)))))
    bands = ceil_div(rows, bm * chunks)
    with_totals, without = (
        Launch(
            kernels.find_largest_of_columns, (across, bands, 1), (rows, columns),
            {
                "OPERAND": int(operand), "STOCHASTIC": stochastic, "FACTOR": factor, "WHOLE": whole, "TOTALS": totals,
                "BM": bm, "BN": bn, "CHUNKS": chunks,
            },
            num_warps=warps, enable_fp_fusion=False,
        )
        for totals in (True, False)
    )  # fmt: skip
    return Survey(with_totals, without, bands)


@lru_cache(LAUNCHES)
def _largest(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, operand: int, stochastic: bool
) -> Launch:
    block = 8192
    programs = min(ceil_div(rows * columns, block), 8 * processors(device))
    constants: dict[str, int | bool] = {
        "OPERAND": int(operand), "STOCHASTIC": stochastic, "ROWS": power_of_2(ceil_div(rows, programs)),
        "BLOCK": block,
    }  # fmt: skip
    return Launch(kernels.find_largest, (programs, 1, 1), (rows * columns, rows), constants, num_warps=8)


@lru_cache(LAUNCHES)
def tiles_launch(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    form: int,
    stochastic: bool,
    factor: bool,
    by_column: bool,
    direct: bool,
    transposed: bool,
) -> Launch:
    m, n = padded(rows), padded(columns)
    bm, bn, warps = TILE
    constants: dict[str, int | bool] = {
        "FORMAT": form, "STOCHASTIC": stochastic, "FACTOR": factor, "BY_COLUMN": by_column, "DIRECT": direct,
        "TRANSPOSED": transposed, "BM": bm, "BN": bn,
    }  # fmt: skip
    return Launch(
        kernels.quantize_tiles, (ceil_div(m, bm) * ceil_div(n, bn), 1, 1), (rows, columns, m, n), constants,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def _empty(rows: int, columns: int, device: torch.device, *, zero: bool = False) -> Tensor:
    # As bytes: torch cannot fill every 8-bit float type.
    return (torch.zeros if zero else torch.empty)((rows, columns), dtype=torch.int8, device=device)


def _codes_of(
    rows: int, columns: int, device: torch.device, direct: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Room for codes and for transposed codes; none where they are not requested."""
    m, n = padded(rows), padded(columns)
    return _empty(m if direct else 0, n, device), _empty(n if transposed else 0, m, device)


def _keys(rows: int, draw: Draw, device: torch.device) -> Tensor:
    return torch.empty(rows if draw.stochastic else 1, dtype=torch.int64, device=device)


@cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
