"""The codec contract: exact sizes, faithful decoding, refusals; for every codec."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.codec import Block, Codec, ErrorFeedback, PowerSGD, TopK, Uncompressed
from trimtab.codec.powersgd import orthonormal
from trimtab.random_bits import stream

CODECS: list[Codec] = [Uncompressed(), Block(), Block(bits=3, block=100), TopK(0.1), TopK(1.0), PowerSGD(2)]
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(torch.Size)
types = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@given(shapes, types, st.sampled_from(CODECS))
def test_the_size_is_the_one_predicted_and_the_shape_comes_back(
    shape: torch.Size, dtype: torch.dtype, codec: Codec
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    payload = codec.encode(values, name="w", stream=stream(1, 2, 3, 0))
    assert isinstance(codec, Codec)
    assert payload.dtype == torch.uint8
    assert payload.numel() == codec.nbytes(shape, dtype)
    decoded = codec.decode(payload, shape, dtype)
    assert decoded.shape == shape
    assert decoded.dtype == dtype


@given(shapes, types, st.sampled_from(CODECS), st.integers(-9, 9).filter(bool))
def test_a_payload_of_another_size_is_refused(
    shape: torch.Size, dtype: torch.dtype, codec: Codec, change: int
) -> None:
    payload = codec.encode(torch.ones(shape, dtype=dtype))
    wrong = torch.zeros(max(0, payload.numel() + change), dtype=torch.uint8)
    if wrong.numel() != payload.numel():
        with pytest.raises(ValueError, match="wrong payload"):
            codec.decode(wrong, shape, dtype)


def test_uncompressed_is_exact() -> None:
    values = torch.tensor([[1.5, -0.0], [math.inf, math.nan]])
    codec = Uncompressed()
    decoded = codec.decode(codec.encode(values), values.shape, values.dtype)
    assert torch.equal(decoded.view(torch.int32), values.view(torch.int32))


def test_the_name_and_the_stream_key_the_rounding() -> None:
    values = torch.randn(4096)
    first, same, name, later = (
        Block().encode(values, name=name, stream=key)
        for name, key in (("a", 1), ("a", 1), ("b", 1), ("a", 2))
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, name)
    assert not torch.equal(first, later)


def test_top_k_keeps_the_largest_exactly() -> None:
    values = torch.randn(50, 20)
    codec = TopK(0.05)
    decoded = codec.decode(codec.encode(values), values.shape, values.dtype)
    kept = decoded != 0
    assert int(kept.sum()) == 50
    assert torch.equal(decoded[kept], values[kept])
    assert float(values[~kept].abs().max()) <= float(values[kept].abs().min())


def test_top_k_always_sends_an_overflow() -> None:
    values = torch.randn(1000)
    values[77] = math.nan
    codec = TopK(0.001)
    assert bool(codec.decode(codec.encode(values), values.shape, values.dtype)[77].isnan())


def test_top_k_refuses_places_outside_the_tensor() -> None:
    codec = TopK(0.1)
    payload = codec.encode(torch.randn(100))
    payload[:4] = torch.tensor([255, 255, 255, 127], dtype=torch.uint8)
    with pytest.raises(ValueError, match="outside the tensor's 100"):
        codec.decode(payload, torch.Size([100]), torch.float32)


def test_powersgd_is_exact_on_a_matrix_of_its_rank() -> None:
    matrix = torch.randn(30, 3) @ torch.randn(3, 20)
    codec = PowerSGD(3)
    decoded = codec.decode(codec.encode(matrix, stream=5), matrix.shape, matrix.dtype)
    torch.testing.assert_close(decoded, matrix, rtol=1e-3, atol=1e-3)


@given(st.integers(1, 30), st.integers(1, 8))
def test_orthonormal_columns_are_so_or_zero(rows: int, columns: int) -> None:
    basis = orthonormal(
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 10 + columns))
    )
    gram = basis.T @ basis
    off = gram - torch.diag(gram.diag())
    assert float(off.abs().max()) < 1e-3
    assert all(abs(x - 1) < 1e-4 or x < 1e-4 for x in gram.diag().tolist())


def test_an_overflow_passes_through_powersgd() -> None:
    matrix = torch.randn(8, 8)
    matrix[2, 2] = math.inf
    codec = PowerSGD(2)
    assert not bool(codec.decode(codec.encode(matrix), matrix.shape, matrix.dtype).isfinite().all())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Block(bits=0),
        lambda: Block(bits=4.5),  # type: ignore[arg-type]
        lambda: Block(bits="4"),  # type: ignore[arg-type]
        lambda: Block(block=7),
        lambda: TopK(0),
        lambda: PowerSGD(0),
    ],
)
def test_settings_that_make_no_codec_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        wrong()  # type: ignore[operator]


def test_error_feedback_owes_what_was_not_sent() -> None:
    memory = ErrorFeedback()
    meant, sent = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 2.5])
    memory.keep("w", meant, sent)
    following = torch.zeros(2)
    memory.restore("w", following)
    assert following.tolist() == [0.5, -0.5]
    untouched = torch.zeros(2)
    memory.restore("other", untouched)
    assert untouched.tolist() == [0.0, 0.0]


def test_error_feedback_survives_a_checkpoint_and_an_overflow() -> None:
    memory, resumed = ErrorFeedback(), ErrorFeedback()
    memory.keep("w", torch.tensor([1.0]), torch.tensor([0.25]))
    resumed.load_state_dict(memory.state_dict())
    assert resumed.residual("w") == torch.tensor([0.75])
    resumed.keep("w", torch.tensor([math.nan]), torch.tensor([0.0]))
    assert resumed.residual("w") == torch.tensor([0.0])
    assert memory.residual("w") == torch.tensor([0.75]), "a checkpoint is a copy"
