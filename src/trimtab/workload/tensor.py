"""Tensors as a workload describes them: shape, type, and how the shape grows with the batch."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from trimtab.strict_files import STRICT

BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by the short name of its type."""

if TYPE_CHECKING:
    Dtype = str
else:
    Dtype = Literal[tuple(BYTES)]

FLOATS = ("fp64", "fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tensor:
    """Shape and type of a tensor that need not exist."""

    shape: tuple[Annotated[int, Field(ge=0, le=1 << 40)], ...]

    dtype: Dtype
    """Short name: fp32, bf16, fp16, int64, bool..."""

    growth: tuple[int | float, ...] = ()
    """Growth of each axis with one more sample; empty if none grows. Fractions where sizes depend on values."""

    @model_validator(mode="after")
    def _grows_along_its_axes(self) -> Tensor:
        if self.growth and len(self.growth) != len(self.shape):
            raise ValueError(f"growth of {len(self.growth)} axes, and shape has {len(self.shape)}")
        return self

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * BYTES[self.dtype]

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATS

    def grown(self, samples: int) -> Tensor:
        """The same tensor for a batch with so many more samples (or fewer, if negative)."""
        if not self.growth or not samples:
            return self
        shape = tuple(
            max(0, round(size + step * samples)) for size, step in zip(self.shape, self.growth, strict=True)
        )
        return Tensor(shape=shape, dtype=self.dtype, growth=self.growth)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"
