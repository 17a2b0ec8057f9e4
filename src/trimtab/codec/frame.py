"""One encoded tensor with all that is needed to decode it: for files and for strangers.

Inside a collective no frame is sent; there, ranks agree on a plan beforehand.
"""

from __future__ import annotations

import struct
import zlib

import torch

from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import DTYPES, MAX_BLOCK, MIN_BLOCK, Packing, Segment
from trimtab.errors import TrimtabError

MAGIC = b"TRIM"
VERSION = 1
HEADER = struct.Struct("<4sBBBBIIQQ")
"""magic, version, bits, type, zero, block, CRC-32, numel, zero"""


def encode_frame(
    tensor: torch.Tensor, *, bits: int, block: int = 1024, stream: int = 0, stochastic: bool = True
) -> torch.Tensor:
    """The tensor's values, flattened, as a frame: a 1-D uint8 tensor on the same device."""
    flat = tensor.detach().contiguous().view(-1)
    packing = _packing(flat.numel(), bits, block, flat.dtype)
    frame = torch.empty(HEADER.size + packing.nbytes, dtype=torch.uint8, device=flat.device)
    payload = frame[HEADER.size :]
    kernels_for(flat.device).encode(flat, packing, payload, stream=stream, stochastic=stochastic)
    fields = MAGIC, VERSION, bits, DTYPES.index(flat.dtype), 0, block
    header = HEADER.pack(*fields, _crc(HEADER.pack(*fields, 0, flat.numel(), 0), payload), flat.numel(), 0)
    frame[: HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return frame


def decode_frame(frame: torch.Tensor) -> torch.Tensor:
    """The values of a frame, 1-D (shapes are not stored). Raises TrimtabError for anything that is not one."""
    if frame.dtype != torch.uint8 or frame.dim() != 1:
        raise TrimtabError(f"a frame is a 1-D uint8 tensor; got {frame.dtype} {tuple(frame.shape)}")
    if frame.numel() < HEADER.size:
        raise TrimtabError(
            f"the frame is cut short: {frame.numel()} bytes where its header has {HEADER.size}"
        )
    header = bytes(frame[: HEADER.size].tolist())
    magic, version, bits, kind, zero, block, crc, numel, zeros = HEADER.unpack(header)
    if magic != MAGIC:
        raise TrimtabError(f"this is no frame: it starts with {magic!r} where {MAGIC!r} is due")
    if version != VERSION:
        raise TrimtabError(f"the frame is of version {version}; this trimtab reads version {VERSION}")
    if zero or zeros:
        raise TrimtabError("the frame has bits set where zero is due (bytes 7 and 24 to 31)")
    if kind >= len(DTYPES):
        raise TrimtabError(f"the frame's type of values is {kind}; 0 to {len(DTYPES) - 1} are known")
    if bits > 8 or not MIN_BLOCK <= block <= MAX_BLOCK:
        raise TrimtabError(f"the frame claims {bits} bits in blocks of {block}: not a setting of this codec")
    packing = _packing(numel, bits, block, DTYPES[kind])
    payload = frame[HEADER.size :].contiguous()
    if payload.numel() != packing.nbytes:
        raise TrimtabError(
            f"the frame holds {payload.numel()} bytes of payload where its header's {numel} values "
            f"take {packing.nbytes}: it was cut, joined or altered"
        )
    if _crc(header[:12] + bytes(4) + header[16:], payload) != crc:
        raise TrimtabError("the frame's checksum does not match: it was altered on the way")
    # Only now: a header that lies about its size must not make us reserve it.
    flat = torch.empty(numel, dtype=packing.dtype, device=frame.device)
    kernels_for(frame.device).decode(payload, packing, flat)
    return flat


def _packing(numel: int, bits: int, block: int, dtype: torch.dtype) -> Packing:
    return Packing(segments=(Segment(offset=0, numel=numel, bits=bits, block=block),), dtype=dtype)


def _crc(header: bytes, payload: torch.Tensor) -> int:
    return zlib.crc32(payload.cpu().numpy().data, zlib.crc32(header))
