"""Top-k: sends only the entries of largest magnitude, with their indices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.codec.codec import check_size


@dataclass(frozen=True)
class TopK:
    """The `density` share of entries with the largest magnitude, exactly; zero elsewhere.

    Biased: use it with error feedback. Payload: k indices (int64 above 2³¹ entries, else int32), then
    k values in the tensor's type.
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"TopK: density must be above 0 and at most 1, got {self.density}")

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self._k(shape.numel()) * (_index_type(shape.numel()).itemsize + dtype.itemsize)

    def encode(self, values: torch.Tensor, *, name: str = "", stream: int = 0) -> torch.Tensor:
        flat = values.reshape(-1)
        # NaN counts as largest in torch's ordering, so an overflow is always sent.
        indices = flat.abs().topk(self._k(flat.numel()), sorted=False).indices.sort().values
        kept = flat[indices]
        return torch.cat([indices.to(_index_type(flat.numel())).view(torch.uint8), kept.view(torch.uint8)])

    def decode(self, payload: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        check_size(self, payload, shape, dtype)
        numel, k = shape.numel(), self._k(shape.numel())
        cut = k * _index_type(numel).itemsize
        # Cloning gives the views below the alignment they need.
        indices = payload[:cut].clone().view(_index_type(numel)).long()
        if k and not bool(((indices >= 0) & (indices < numel)).all()):
            raise ValueError(f"{self}: the payload names an entry outside the tensor's {numel}")
        flat = torch.zeros(numel, dtype=dtype, device=payload.device)
        flat[indices] = payload[cut:].clone().view(dtype)
        return flat.view(shape)

    def _k(self, numel: int) -> int:
        return min(numel, max(1, round(numel * self.density))) if numel else 0


def _index_type(numel: int) -> torch.dtype:
    return torch.int32 if numel <= 2**31 else torch.int64
