"""int8 operands on CPU in C++ (csrc/quantize.h), called through ctypes in the codec's library."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.codec import native

if TYPE_CHECKING:
    from trimtab.precision.int8 import Axis

_AXES = ("rows", "columns", "whole")


class _Task(ctypes.Structure):
    _fields_ = [
        ("values", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_factor", ctypes.c_void_p),
        ("column_factor", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("axis", ctypes.c_int64),
        ("key", ctypes.c_uint64),
        ("stochastic", ctypes.c_int64),
        ("instruction_set", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    ]


@cache
def _library() -> ctypes.CDLL:
    library = native.load()
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    native.declare(
        library,
        trimtab_quantize=[ctypes.POINTER(_Task)],
        trimtab_dequantize=[pointer, integer, integer, *[pointer] * 3, integer, integer],
    )
    return library


def quantize(
    values: Tensor,
    axis: Axis,
    *,
    key: int,
    stochastic: bool,
    row_factor: Tensor | None = None,
    column_factor: Tensor | None = None,
    instruction_set: str = "best",
) -> tuple[Tensor, Tensor]:
    """`trimtab.precision.reference.quantize` of a contiguous fp32 matrix, with the same bits."""
    rows, columns = values.shape
    codes = torch.empty((rows, columns), dtype=torch.int8)
    scales = torch.empty((rows, columns, 1)[_AXES.index(axis)], dtype=torch.float32)
    task = _Task(
        _pointer(values, rows * columns),
        rows,
        columns,
        _pointer(row_factor, rows),
        _pointer(column_factor, columns),
        codes.data_ptr(),
        scales.data_ptr(),
        _AXES.index(axis),
        key,
        stochastic,
        native.INSTRUCTION_SETS.index(instruction_set),
        torch.get_num_threads(),
    )
    _check(_library().trimtab_quantize(ctypes.byref(task)))
    return codes, scales


def dequantize(
    sums: Tensor,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    bias: Tensor | None,
    *,
    instruction_set: str = "best",
) -> Tensor:
    """`trimtab.precision.reference.dequantize`, with the same bits; overwrites `sums` (int32, contiguous)."""
    rows, columns = sums.shape
    assert sums.dtype == torch.int32
    assert sums.is_contiguous()
    status = _library().trimtab_dequantize(
        sums.data_ptr(),
        rows,
        columns,
        _pointer(row_scale, rows),
        _pointer(column_scale, columns),
        _pointer(bias, columns),
        native.INSTRUCTION_SETS.index(instruction_set),
        torch.get_num_threads(),
    )
    _check(status)
    return sums.view(torch.float32)


def _pointer(tensor: Tensor | None, numel: int) -> int | None:
    if tensor is None:
        return None
    assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu")
    assert tensor.is_contiguous()
    assert tensor.numel() == numel, f"{tensor.numel()} numbers, expected {numel}"
    return tensor.data_ptr()


def _check(status: int) -> None:
    if status:
        raise ValueError(f"the native kernels rejected the operand (status {status})")
