from __future__ import annotations

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.cases import payload, same, values

from trimtab.codec.frame import HEADER, decode_frame, encode_frame
from trimtab.codec.packing import DTYPES
from trimtab.errors import TrimtabError


def sealed(head: bytes, body: bytes) -> torch.Tensor:
    """A frame whose checksum is right, whatever else it says."""
    crc = zlib.crc32(body, zlib.crc32(head[:12] + bytes(4) + head[16:]))
    return torch.frombuffer(
        bytearray(head[:12] + struct.pack("<I", crc) + head[16:] + body), dtype=torch.uint8
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [0, 1, 4, 7])
@pytest.mark.parametrize("numel", [0, 1, 1000, 2049])
def test_carries_all_that_decoding_needs(dtype: torch.dtype, bits: int, numel: int) -> None:
    x = values("normal", numel, dtype, 1)
    frame = encode_frame(x, bits=bits, block=100, stream=3)
    y = decode_frame(frame)
    assert y.dtype == dtype
    assert y.shape == (numel,)
    if bits == 0:
        assert torch.equal(x, y)
    elif numel:
        assert (x - y).abs().max() <= 1.01 * (x.max() - x.min()) / (2**bits - 1)
    assert torch.equal(frame, encode_frame(x, bits=bits, block=100, stream=3))


def test_flattens_any_tensor() -> None:
    x = torch.randn(6, 5, 4, requires_grad=True).permute(2, 0, 1)
    assert torch.equal(decode_frame(encode_frame(x, bits=0)), x.detach().flatten())


def test_layout_is_the_documented_one() -> None:
    frame = bytes(encode_frame(torch.tensor([1.0, 2.0, 3.0]).bfloat16(), bits=2, block=8, stochastic=False))
    assert frame[:12] == b"TRIM\x01\x02\x02\x00\x08\x00\x00\x00"
    assert frame[16:32] == struct.pack("<QQ", 3, 0)
    # (low, unit) = (1, 2 / 3), codes 0, 2 (of 1.5: halves go up) and 3
    assert frame[32:] == struct.pack("<fI", 1.0, 0x3F2AAAAB) + bytes([0b111000]) + bytes(7)


def test_every_flipped_bit_is_noticed() -> None:
    frame = encode_frame(torch.linspace(-1, 1, 50), bits=3, block=16)
    for i in range(frame.numel()):
        for bit in range(8):
            bad = frame.clone()
            bad[i] ^= 1 << bit
            with pytest.raises(TrimtabError):
                decode_frame(bad)


def test_every_cut_is_noticed() -> None:
    frame = encode_frame(torch.linspace(-1, 1, 50), bits=3, block=16)
    for length in range(frame.numel()):
        with pytest.raises(TrimtabError):
            decode_frame(frame[:length])
    with pytest.raises(TrimtabError, match="cut, joined or altered"):
        decode_frame(torch.cat((frame, frame)))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (0, b"GRIM", "no frame"),
        (1, 2, "version 2"),
        (2, 9, "9 bits"),
        (3, 3, "type of values is 3"),
        (4, 1, "zero is due"),
        (5, 7, "blocks of 7"),
        (5, 2**31, "blocks of 2147483648"),
        (6, 0, "checksum"),
        (7, 2**64 - 1, "18446744073709551615 values"),
        (8, 1, "zero is due"),
    ],
)
def test_says_what_is_wrong(field: int, value: object, reason: str) -> None:
    frame = encode_frame(torch.ones(20), bits=4)
    fields: list[object] = list(HEADER.unpack(bytes(frame[: HEADER.size])))
    fields[field] = value
    head, body = HEADER.pack(*fields), bytes(frame[HEADER.size :])
    bad = torch.frombuffer(bytearray(head + body), dtype=torch.uint8) if field == 6 else sealed(head, body)
    with pytest.raises(TrimtabError, match=reason):
        decode_frame(bad)


@pytest.mark.parametrize("bad", [torch.zeros(40), torch.zeros(8, 8, dtype=torch.uint8)])
def test_only_bytes_in_a_row(bad: torch.Tensor) -> None:
    with pytest.raises(TrimtabError, match="1-D uint8"):
        decode_frame(bad)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    bits=st.integers(0, 10),
    kind=st.integers(0, 3),
    block=st.integers(0, 40) | st.integers(0, 2**32 - 1),
    numel=st.integers(0, 300) | st.integers(0, 2**64 - 1),
    size=st.integers(0, 80).map(lambda n: 8 * n),
    seed=st.integers(0, 1000),
)
def test_forged_frames_decode_or_are_refused(
    bits: int, kind: int, block: int, numel: int, size: int, seed: int
) -> None:
    head = HEADER.pack(b"TRIM", 1, bits, kind, 0, block, 0, numel, 0)
    try:
        y = decode_frame(sealed(head, bytes(payload(size, seed))))
    except TrimtabError:
        return
    assert y.numel() == numel
    assert y.dtype == DTYPES[kind]


def test_any_payload_of_the_right_length_decodes() -> None:
    for seed in range(50):
        frame = encode_frame(torch.zeros(333), bits=5, block=50)
        body = bytes(payload(frame.numel() - HEADER.size, seed))
        first, second = (decode_frame(sealed(bytes(frame[: HEADER.size]), body)) for _ in range(2))
        assert same(first, second)
