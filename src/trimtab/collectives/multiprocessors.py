"""Multiprocessors of a GPU that the backward pass leaves to communication.

A kernel of NCCL occupies a multiprocessor for as long as it waits for other ranks. cuBLAS starts as many blocks as the
GPU has multiprocessors and gives each an equal part of a product; while one is occupied, one block starts only when
the others have finished, and the product takes twice as long. So collectives that overlap with the backward pass are
given `COMMUNICATION` multiprocessors, and its products are told that there are so many fewer.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from typing import Any

import torch

COMMUNICATION = 1
"""Multiprocessors for the collectives of compressed gradients. One moves several GB/s of payload, more than any link on
which compression pays."""

_lock = threading.Lock()
_held: dict[int, int] = {}
"""How many `Reserve`s limit a cuBLAS handle."""


class Reserve:
    """While open, matrix products of the backward pass leave `COMMUNICATION` multiprocessors free.

    A script that has set a limit of its own (`cublasSetSmCountTarget`) keeps it. Products may be rounded
    differently with and without, as on GPUs of different size.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle: int | None = None
        if _cublas() is None:
            return
        # cuBLAS is told for each thread, and autograd has a thread for each device: tell it in a backward pass.
        with torch.enable_grad():
            probe = torch.zeros((), device=device, requires_grad=True)
            probe.register_hook(self._open)
            probe.clone().backward()

    def close(self) -> None:
        """Let products use all multiprocessors again, unless another reserve is open. May be called again."""
        with _lock:
            handle, self._handle = self._handle, None
            if handle is None:
                return
            _held[handle] -= 1
            if _held[handle] == 0:
                del _held[handle]
                _cublas().cublasSetSmCountTarget(handle, 0)

    def _open(self, gradient: torch.Tensor) -> None:
        gradient.clone()  # a new thread has no CUDA context before its first kernel, and cuBLAS would warn
        handle = torch.cuda.current_blas_handle()
        count = torch.cuda.get_device_properties(self._device).multi_processor_count
        with _lock:
            if handle in _held or multiprocessor_limit(handle) == 0:
                self._handle = handle
                _held[handle] = _held.get(handle, 0) + 1
                _cublas().cublasSetSmCountTarget(handle, max(count - COMMUNICATION, 1))


def multiprocessor_limit(handle: int) -> int:
    """How many multiprocessors the products of a cuBLAS handle use; 0 for all."""
    limit = ctypes.c_int(0)
    _cublas().cublasGetSmCountTarget(handle, ctypes.byref(limit))
    return limit.value


@cache
def _cublas() -> Any:
    """The library that torch itself has loaded, or None: another copy of it would not know torch's handles."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}", mode=os.RTLD_NOLOAD)
        library.cublasSetSmCountTarget.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.cublasGetSmCountTarget.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return library
