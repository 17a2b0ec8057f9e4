"""The int8 gradients of a linear layer: kernels and memory put together once for each size.

The same kernels as in `quantize` and `products`, one call after another, would make an allocation and look up a launch
for each: at 8192 × 4096 × 4096 that takes the host longer than an H200 computes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trimtab.precision.draw import Draw, Operand
from trimtab.precision.gpu.products import Given, multiply_launch, tiles_of, transpose_launch
from trimtab.precision.gpu.quantize import (
    LAUNCHES,
    padded,
    rows_launch,
    survey_of_columns,
    tiles_launch,
)
from trimtab.precision.int8 import LONGEST_SUM
from trimtab.precision.products import ColumnTotals, Sizes
from trimtab.triton_launch import Launch, Room, take, zeros

_BY_ROW: Given = (True, False, False, False)
_BY_COLUMN: Given = (False, True, False, False)


class _Passes:
    """Kernels that run one after another, and the room for what they hand on."""

    def __init__(self, device: torch.device, room: Room) -> None:
        self._device, self._room = device, room

    def _memory(self) -> Tensor:
        return torch.empty(self._room.nbytes, dtype=torch.int8, device=self._device)

    def _places(self, launches: tuple[Launch, ...], given: tuple[Tensor, ...], memory: Tensor) -> list[Any]:
        """These tensors and the parts of the room: as addresses, if the launches take them."""
        addresses = [tensor.data_ptr() for tensor in given]
        if take(launches, addresses):
            return addresses + self._room.addresses(memory)
        return [*given, *self._room.tensors(memory)]


class InputGradient(_Passes):
    """g w from g and w's codes: g's codes, w's transpose, and their product."""

    def __init__(
        self, device: torch.device, values: torch.dtype, sizes: Sizes, dtype: torch.dtype, stochastic: bool
    ) -> None:
        m, n, k = sizes
        length = padded(n)
        operand = Operand.GRAD_FOR_INPUT
        self._rows = rows_launch(device, values, m, n, operand, stochastic, True)
        self._transpose = transpose_launch(device, length, padded(k))
        self._multiply = multiply_launch(device, m, k, length, length, length, dtype, dtype, _BY_ROW)
        self._shape, self._dtype = (m, k), dtype
        # A product reads rows of codes only as far as there are rows of values.
        room = Room((torch.int8, m * length), (torch.float32, m), (torch.int8, padded(k) * length))
        super().__init__(device, room)
        self._launches = self._rows, self._transpose, self._multiply

    def __call__(self, g: Tensor, codes: Tensor, scales: Tensor, draw: Draw) -> Tensor:
        y = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        memory = self._memory()
        given = g.contiguous(), codes, scales, draw.calls, y
        places = self._places(self._launches, given, memory)
        values, w, factor, calls, out, g_codes, g_scales, w_transposed = places
        self._rows((values, g_codes, g_scales, factor, calls), draw.base)
        self._transpose((w, w_transposed))
        self._multiply((g_codes, w_transposed, out, g_scales, out, out))
        return y


class WeightGradient(_Passes):
    """gᵀ x in fp32 from g and x's codes, or xᵀ g: g's transposed codes, x's transpose, and their product."""

    def __init__(
        self,
        device: torch.device,
        values: torch.dtype,
        sizes: Sizes,
        stochastic: bool,
        transposed: bool,
    ) -> None:
        m, n, k = sizes
        length = padded(m)
        operand = Operand.GRAD_FOR_WEIGHT
        self._survey = survey_of_columns(device, values, m, n, operand, stochastic, True, False)
        self._tiles = tiles_launch(device, values, m, n, 0, stochastic, True, True, False, True)
        self._transpose = transpose_launch(device, length, padded(k))
        self._shape, given = ((k, n), _BY_COLUMN) if transposed else ((n, k), _BY_ROW)
        float32 = torch.float32
        self._multiply = multiply_launch(
            device, *self._shape, length, length, length, float32, float32, given
        )
        self._columns, self._transposed = n, transposed
        room = Room(
            (torch.int64, m if stochastic else 1),
            (torch.float32, n),
            (torch.int8, padded(n) * length),
            (torch.int8, padded(k) * length),
        )
        super().__init__(device, room)
        others = self._tiles, self._transpose, self._multiply
        self._with_totals, self._without = (
            (survey, *others) for survey in (self._survey.with_totals, self._survey.without)
        )

    def __call__(
        self, g: Tensor, codes: Tensor, scales: Tensor, draw: Draw, totals: ColumnTotals | None
    ) -> Tensor:
        gw = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        memory, largest = self._memory(), zeros(self._columns, self._device)
        parts = self._survey.parts(self._columns, self._device, totals)
        launches = self._without if parts is None else self._with_totals
        given = (g.contiguous(), codes, scales, draw.calls, gw, largest, gw if parts is None else parts)
        values, x, factor, calls, out, most, sums, keys, g_scales, g_codes, x_transposed = self._places(
            launches, given, memory
        )
        self._survey((values, factor, most, keys), None if parts is None else sums, calls, draw.base)
        self._tiles((values, factor, most, keys, g_codes, g_codes, g_scales))
        self._transpose((x, x_transposed))
        if self._transposed:
            self._multiply((x_transposed, g_codes, out, out, g_scales, out))
        else:
            self._multiply((g_codes, x_transposed, out, g_scales, out, out))
        return gw


@lru_cache(LAUNCHES)
def input_gradient(
    device: torch.device, values: torch.dtype, sizes: Sizes, dtype: torch.dtype, stochastic: bool
) -> InputGradient | None:
    """For output gradients of type `values`; None if the sizes or the device need more kernels."""
    return InputGradient(device, values, sizes, dtype, stochastic) if _plain(device, sizes, sizes.n) else None


@lru_cache(LAUNCHES)
def weight_gradient(
    device: torch.device, values: torch.dtype, sizes: Sizes, stochastic: bool, transposed: bool
) -> WeightGradient | None:
    """For output gradients of type `values`; None if the sizes or the device need more kernels."""
    if not _plain(device, sizes, sizes.m):
        return None
    return WeightGradient(device, values, sizes, stochastic, transposed)


def _plain(device: torch.device, sizes: Sizes, length: int) -> bool:
    """Whether a sum of this length is one product of the Triton kernel."""
    return min(sizes) > 0 and length <= LONGEST_SUM and bool(tiles_of(device))
