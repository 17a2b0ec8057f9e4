"""An operator call as it was traced, before it becomes an operator of a workload."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trimtab.workload.operator import Kind

DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}

Meta = tuple[tuple[int, ...], str]
"""Shape and dtype."""


@dataclass
class Call:
    """One traced operator call."""

    name: str
    kind: Kind
    module: str
    target: str
    setting: str | None
    inputs: list[int] = field(default_factory=list)
    input_tensors: list[Meta] = field(default_factory=list)
    input_storages: list[int] = field(default_factory=list)
    outputs: list[Meta] = field(default_factory=list)
    output_storages: list[int] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    parameter_tensors: list[Meta] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    saved: dict[int, tuple[str, Meta]] = field(default_factory=dict)
    """By storage: role, and its original shape and dtype."""

    differentiable: bool = False
    views: int = 0
    keeps_output: bool = False
    """Whether backward is computed from the result."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def meta_of(tensor: torch.Tensor) -> Meta:
    return tuple(tensor.shape), DTYPES[tensor.dtype]


def whole_meta(tensor: torch.Tensor) -> Meta:
    """Shape and dtype of a tensor's whole storage; the tensor's own unless it is part of a larger one."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return meta_of(tensor) if tensor.numel() == size else ((int(size),), DTYPES[tensor.dtype])
