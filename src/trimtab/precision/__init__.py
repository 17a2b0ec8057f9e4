"""Operators computed in lower precision, forward and backward."""

from trimtab.precision.precision import NAMES, Name, Precision

__all__ = ["NAMES", "Name", "Precision"]
