"""What the model asks for."""

from trimtab.workload.file import load_workload, save_workload
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
    "load_workload",
    "save_workload",
]
