"""The codec in plain PyTorch, on any device: the fast kernels are checked against it.

It follows docs/wire-format.md step by step. Unlike the fast kernels it cannot protect itself from
`torch.set_flush_denormal(True)`, which changes the values of blocks near the smallest floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trimtab.codec.contract import Kernels, Rounding
from trimtab.codec.packing import RAW, Packing, Segment
from trimtab.random_bits import block_keys, uniform16

_SMALLEST_UNIT = 2.0**-126
_RUN = 2**20
"""Elements worked on at a time, so that the intermediate tensors stay small."""


class ReferenceKernels(Kernels):
    name = "reference"

    def _encode(
        self,
        flat: Tensor,
        payloads: Sequence[Tensor] | None,
        packing: Packing,
        out: Tensor,
        rounding: Rounding,
    ) -> None:
        for i, (segment, part) in enumerate(_parts(packing, out)):
            values = flat[segment.span]
            total = values.float() * _fp32(rounding.scale, flat.device)
            for payload in payloads or ():
                start = packing.starts[i]
                theirs = payload[start : start + part.numel()]
                total = total + _decode_segment(theirs, segment, packing.dtype)
            _encode_segment(total, segment, packing.dtype, part, rounding)
            if payloads is not None:
                values.copy_(_decode_segment(part, segment, packing.dtype))

    def _decode(self, payload: Tensor, packing: Packing, flat: Tensor, add: bool) -> None:
        for segment, part in _parts(packing, payload):
            y = flat[segment.span]
            values = _decode_segment(part, segment, packing.dtype)
            y.copy_(y.float() + values if add else values)


def quantize(t: Tensor, bits: int, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(low, unit, codes) of each row of `t`, given the rounding offsets `r`; codes are int64."""
    top = 2**bits - 1
    low = t.amin(dim=1) + 0.0
    extent = t.amax(dim=1) - low
    # amin and amax give NaN for a row that holds one, so one test of the range covers every case.
    finite = extent.isfinite()
    unit = extent * _fp32(1 / top, t.device)
    flat = ~(unit >= _SMALLEST_UNIT)
    unit = unit.masked_fill(flat, 0.0)
    inv = (1.0 / unit).masked_fill(flat, 0.0)

    q = (t - low.unsqueeze(1)) * inv.unsqueeze(1)
    q = q + r
    codes = q.masked_fill(~finite.unsqueeze(1), 0.0).long().clamp(max=top)
    return low.masked_fill(~finite, torch.nan), unit.masked_fill(~finite, torch.nan), codes


def pack(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes as rows of bytes: code `i` is bits [i·b, (i+1)·b) of a little-endian string."""
    rows, length = codes.shape
    string = (codes.unsqueeze(2) >> torch.arange(bits, device=codes.device)) & 1
    string = torch.nn.functional.pad(string.reshape(rows, -1), (0, -length * bits % 8))
    weights = 2 ** torch.arange(8, device=codes.device)
    return (string.view(rows, -1, 8) * weights).sum(dim=2).to(torch.uint8)


def unpack(data: Tensor, bits: int, length: int) -> Tensor:
    """The `length` codes, int64, in each row of bytes: the inverse of `pack`."""
    rows = data.shape[0]
    string = (data.long().unsqueeze(2) >> torch.arange(8, device=data.device)) & 1
    string = string.reshape(rows, -1)[:, : length * bits].view(rows, length, bits)
    return (string * 2 ** torch.arange(bits, device=data.device)).sum(dim=2)


def _encode_segment(
    t: Tensor, segment: Segment, dtype: torch.dtype, part: Tensor, rounding: Rounding
) -> None:
    part.zero_()
    if segment.bits == RAW:
        data = t.to(dtype).view(torch.uint8)
        part[: data.numel()] = data
        return
    for first, rows, length in _runs(segment):
        begin = first * segment.block
        run = t[begin : begin + rows * length].view(rows, length)
        if rounding.stochastic:
            keys = block_keys(rounding.stream, segment.name_hash, segment.first_block + first, rows, t.device)
            r = uniform16(keys, length).float() * 2.0**-16 + 2.0**-17
        else:
            r = torch.full_like(run, 0.5)
        low, unit, codes = quantize(run, segment.bits, r)
        pairs, body = _regions(part, segment, first, rows, length)
        pairs.copy_(torch.stack((low, unit), dim=1).view(torch.uint8).flatten())
        body.copy_(pack(codes, segment.bits).flatten())


def _decode_segment(part: Tensor, segment: Segment, dtype: torch.dtype) -> Tensor:
    """The segment's values, fp32."""
    if segment.bits == RAW:
        return part[: segment.numel * dtype.itemsize].clone().view(dtype).float()
    values = torch.empty(segment.numel, dtype=torch.float32, device=part.device)
    for first, rows, length in _runs(segment):
        pairs, body = _regions(part, segment, first, rows, length)
        low, unit = pairs.clone().view(torch.float32).view(rows, 2).unsqueeze(2).unbind(1)
        codes = unpack(body.view(rows, -1), segment.bits, length)
        scaled = unit * codes.float()
        begin = first * segment.block
        values[begin : begin + rows * length] = (low + scaled).flatten()
    return values


def _runs(segment: Segment) -> Iterator[tuple[int, int, int]]:
    """(first block, number of blocks, length of each): runs of full blocks, then the shorter last one."""
    full, rest = divmod(segment.numel, segment.block)
    step = max(1, _RUN // segment.block)
    for first in range(0, full, step):
        yield first, min(step, full - first), segment.block
    if rest:
        yield full, 1, rest


def _regions(part: Tensor, segment: Segment, first: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Where a run's (low, unit) pairs and its codes lie in the segment's encoding."""
    pairs = part[8 * first : 8 * (first + rows)]
    begin = 8 * segment.blocks + first * _code_bytes(segment.block, segment.bits)
    return pairs, part[begin : begin + rows * _code_bytes(length, segment.bits)]


def _parts(packing: Packing, payload: Tensor) -> Iterator[tuple[Segment, Tensor]]:
    """Each segment with its bytes in the payload."""
    for segment, start in zip(packing.segments, packing.starts, strict=True):
        yield segment, payload[start : start + segment.nbytes(packing.dtype.itemsize)]


def _code_bytes(length: int, bits: int) -> int:
    return -(-length * bits // 8)


def _fp32(value: float, device: torch.device) -> Tensor:
    """`value` rounded to fp32, so that no operation sees its double."""
    return torch.tensor(value, dtype=torch.float32, device=device)
