"""PowerSGD: sends a matrix as the product of two thin ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.codec.codec import check_size


@dataclass(frozen=True)
class PowerSGD:
    """One power iteration of rank `rank` on the tensor seen as a matrix (first axis × the rest).

    Biased: use it with error feedback. This class encodes the tensor of one rank; a reduction over ranks
    sums the thin factors themselves, as `trimtab.collectives.whole_tensors` does with the three functions below.
    Payload: left factor, then right factor, fp32.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"PowerSGD: rank must be at least 1, got {self.rank}")

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        rows, columns = matrix_shape(shape)
        return 4 * self.rank_for(shape) * (rows + columns)

    def rank_for(self, shape: torch.Size) -> int:
        """The rank used for this shape: at most the matrix's own."""
        return min(self.rank, *matrix_shape(shape))

    def encode(self, values: torch.Tensor, *, name: str = "", stream: int = 0) -> torch.Tensor:
        matrix = values.reshape(matrix_shape(values.shape)).float()
        left = orthonormal(
            matrix @ start(matrix.shape[1], self.rank_for(values.shape), stream, matrix.device)
        )
        right = matrix.T @ left
        return torch.cat([left.reshape(-1), right.reshape(-1)]).view(torch.uint8)

    def decode(self, payload: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        check_size(self, payload, shape, dtype)
        rows, columns = matrix_shape(shape)
        rank = self.rank_for(shape)
        factors = payload.clone().view(torch.float32)
        left, right = factors[: rows * rank].view(rows, rank), factors[rows * rank :].view(columns, rank)
        return (left @ right.T).to(dtype).view(shape)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """The shape as a matrix: first axis × all others."""
    if len(shape) == 0:
        return 1, 1
    return shape[0], shape[1:].numel()


def start(columns: int, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    """The first right factor: the same on every rank with the same seed."""
    generator = torch.Generator().manual_seed(seed & (2**63 - 1))
    return torch.randn(columns, rank, dtype=torch.float32, generator=generator).to(device)


def orthonormal(factor: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the factor's columns; a dependent column becomes zero.

    Modified Gram-Schmidt, in fp32: deterministic for the same input on devices of one kind, and,
    unlike a QR routine, it propagates NaN and Inf instead of failing.
    """
    basis = factor.clone()
    # A dependent column is only rounding error after projection: normalized, it would be noise.
    floor = 100 * torch.finfo(basis.dtype).eps * basis.norm()
    for i in range(basis.shape[1]):
        column = basis[:, i]
        norm = column.norm()
        column.copy_(torch.where(norm <= floor, torch.zeros_like(column), column / norm))
        if i + 1 < basis.shape[1]:
            rest = basis[:, i + 1 :]
            rest.sub_(torch.outer(column, column @ rest))
    return basis
