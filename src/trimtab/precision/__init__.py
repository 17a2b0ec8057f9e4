"""Operators computed in lower precision, forward and backward."""

from trimtab.precision_names import Precision

__all__ = ["Precision"]
