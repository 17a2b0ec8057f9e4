"""What one training step of a model needs: operators, parameters and gradient buckets."""

from trimtab.workload.file import load_workload, save_workload
from trimtab.workload.operator import OUTSIDE, Category, Kind, Operator, Saved
from trimtab.workload.stored import StoredWorkload
from trimtab.workload.tensor import Tensor
from trimtab.workload.workload import SCHEMA_VERSION, Bucket, Parameter, RepeatedBlock, UnitSpan, Workload

__all__ = [
    "OUTSIDE",
    "SCHEMA_VERSION",
    "Bucket",
    "Category",
    "Kind",
    "Operator",
    "Parameter",
    "RepeatedBlock",
    "Saved",
    "StoredWorkload",
    "Tensor",
    "UnitSpan",
    "Workload",
    "load_workload",
    "save_workload",
]
