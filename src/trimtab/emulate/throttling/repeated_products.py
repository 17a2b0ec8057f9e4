"""Speed by repetition: every matrix product of a rank is computed several times.

This slows down compute where a slower device would, however short the step and whatever happens between steps, as
tensor parallelism needs. Operators other than matrix products keep their speed.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from trimtab.emulate.throttling.rank_state import RankState

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mm.out", "addmm.out", "bmm.out", "baddbmm.out", "_int_mm")
_CONVOLUTIONS = ("convolution", "convolution_backward")
_ATTENTION_CPU = ("_scaled_dot_product_flash_attention_for_cpu",)
_ATTENTION_CUDA = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_OPERATORS = {
    "CPU": _PRODUCTS + _CONVOLUTIONS + _ATTENTION_CPU,
    "CUDA": (*_PRODUCTS, *_CONVOLUTIONS, *_ATTENTION_CUDA, "_scaled_mm", "_addmm_activation"),
}


class RepeatedProducts:
    """Replaces the kernels of matrix products in this process by kernels that repeat them.

    A speed of 0.4 means 2.5 times the work: two and three computations alternately. Results do not change.
    """

    def __init__(self, state: RankState, kind: str) -> None:
        self._state = state
        self._owed = 0.0
        self._thread = threading.local()
        self._library = torch.library.Library("aten", "IMPL")
        key = kind.upper()
        backward = tuple(f"{name}_backward" for name in _OPERATORS[key] if "attention" in name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name in _OPERATORS[key] + backward:
                kernel = self._repeating(name, key)
                self._library.impl(name, kernel, key, with_keyset=True)

    def _repeating(self, name: str, key: str) -> Any:
        kernel = torch.library.get_kernel(f"aten::{name}", key)

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            # A kernel may call other kernels of these: only the outermost repeats.
            if getattr(self._thread, "inside", False):
                return kernel.call_boxed(keys, *args, **kwargs)
            self._thread.inside = True
            try:
                for _ in range(self._extra()):
                    kernel.call_boxed(keys, *args, **kwargs)
                return kernel.call_boxed(keys, *args, **kwargs)
            finally:
                self._thread.inside = False

        return run

    def _extra(self) -> int:
        """Number of extra computations of the next product; fractions carry over."""
        self._owed += 1 / self._state.speed - 1
        extra = int(self._owed)
        self._owed -= extra
        return extra
