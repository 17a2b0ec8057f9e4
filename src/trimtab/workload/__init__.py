"""What the model asks for."""

from trimtab.workload.tensor import Tensor
from trimtab.workload.workload import (
    OUTSIDE,
    SCHEMA_VERSION,
    Block,
    Bucket,
    Category,
    Kind,
    Operator,
    Parameter,
    Saved,
    Workload,
)

__all__ = [
    "OUTSIDE",
    "SCHEMA_VERSION",
    "Block",
    "Bucket",
    "Category",
    "Kind",
    "Operator",
    "Parameter",
    "Saved",
    "Tensor",
    "Workload",
]
