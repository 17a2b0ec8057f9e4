"""The codec on CPU tensors in C++, loaded with ctypes: no link to Python or torch, no GIL held.

`python -m trimtab.codec.native` prints one line that says whether this installation has it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.codec.contract import Kernels, Rounding
from trimtab.codec.packing import DTYPES, Packing, check_buffers
from trimtab.errors import TrimtabError

LIBRARY = Path(__file__).with_name("libtrimtab.so")
VERSION = 2
"""The `TRIMTAB_ABI_VERSION` of csrc/trimtab.h this file is written for."""

INSTRUCTION_SETS = ("best", "portable", "avx2", "avx512")
_STATUS = (
    "",
    "a segment, type or number of threads that is out of range",
    "a segment that reaches past the flat buffer, or a flat buffer not aligned to its elements",
    "a payload whose size is not that of its segments",
    "an instruction set that this processor or this build lacks",
)


class _Segment(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64 if name == "name_hash" else ctypes.c_int64)
        for name in ("offset", "numel", "bits", "block", "name_hash", "first_block")
    ]


class _Packing(ctypes.Structure):
    _fields_ = [
        ("segments", ctypes.POINTER(_Segment)),
        *((name, ctypes.c_int64) for name in ("count", "type", "instruction_set", "threads")),
    ]


class NativeKernels(Kernels):
    """The C++ library beside this file.

    Args:
        instruction_set: One of `INSTRUCTION_SETS`; "best" is the best this processor has.
        threads: How many threads may share a call. Small work always uses one.
    """

    name = "native"

    def __init__(self, *, instruction_set: str = "best", threads: int = 1) -> None:
        if instruction_set not in INSTRUCTION_SETS:
            raise ValueError(f"instruction_set must be one of {INSTRUCTION_SETS}; got {instruction_set!r}")
        if threads < 1:
            raise ValueError(f"threads must be at least 1; got {threads}")
        self._library = load()
        best = INSTRUCTION_SETS[self._library.trimtab_best_instruction_set()]
        self.instruction_set = best if instruction_set == "best" else instruction_set
        self.threads = threads
        self._key = (type(self), self.instruction_set, threads)

    def decode_sum(self, payloads: Sequence[Tensor], packing: Packing, flat: Tensor) -> None:
        """In one pass: a bucket is larger than a core's cache, and would be read and written once for each payload."""
        check_buffers(packing, flat, *payloads)
        if payloads:
            encoded = (_addresses(payloads), len(payloads), payloads[0].numel())
            values = (flat.data_ptr(), flat.numel())
            _check(self._library.trimtab_decode_sum(self._description(packing, flat), *encoded, *values))

    def _encode(
        self,
        flat: Tensor,
        payloads: Sequence[Tensor] | None,
        packing: Packing,
        out: Tensor,
        rounding: Rounding,
    ) -> None:
        values = (self._description(packing, flat), flat.data_ptr(), flat.numel())
        encoded = (out.data_ptr(), out.numel(), *rounding)
        if payloads is None:
            _check(self._library.trimtab_encode(*values, *encoded))
        else:
            peers = (_addresses(payloads), len(payloads))
            _check(self._library.trimtab_reduce_encode(*values, *peers, *encoded))

    def _decode(self, payload: Tensor, packing: Packing, flat: Tensor, add: bool) -> None:
        description, encoded = self._description(packing, flat), (payload.data_ptr(), payload.numel())
        _check(self._library.trimtab_decode(description, *encoded, flat.data_ptr(), flat.numel(), add))

    def _description(self, packing: Packing, flat: Tensor) -> int:
        """The address of the packing's description, made once and kept with it."""
        if flat.device.type != "cpu":
            raise ValueError(f"the native kernels work on CPU tensors; got one on {flat.device}")
        prepared = packing.prepared.get(self._key)
        if prepared is None:
            rows = [
                _Segment(*(getattr(s, field[0]) for field in _Segment._fields_)) for s in packing.segments
            ]
            # The structure keeps the array it points to alive.
            description = _Packing(
                (_Segment * len(rows))(*rows),
                len(rows),
                DTYPES.index(packing.dtype),
                INSTRUCTION_SETS.index(self.instruction_set),
                self.threads,
            )
            prepared = packing.prepared[self._key] = (ctypes.addressof(description), description)
        return int(prepared[0])


def _addresses(payloads: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(payloads))(*[payload.data_ptr() for payload in payloads])


def _check(status: int) -> None:
    if status:
        raise ValueError(f"the native kernels refused {_STATUS[status]}")


def available() -> bool:
    """Whether this installation has the library, in the version this code was written for."""
    try:
        load()
    except TrimtabError:
        return False
    return True


@cache
def load() -> ctypes.CDLL:
    """The library; where it is missing or has another version, the TrimtabError says what to install."""
    remedy = (
        "Install a C++ compiler, e.g. g++, then run make venv again, "
        "or pip install --force-reinstall --no-deps trimtab"
    )
    if not LIBRARY.exists():
        raise TrimtabError(
            f"{LIBRARY.name} is missing beside {__name__}: the fast kernels were not built. {remedy}"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
        version = library.trimtab_version()
    except (OSError, AttributeError) as error:
        raise TrimtabError(f"{LIBRARY.name} does not load ({error}). {remedy}") from error
    if version != VERSION:
        raise TrimtabError(
            f"{LIBRARY.name} has the wrong version: found {version}, expected {VERSION}. {remedy}"
        )
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    keyed = [ctypes.c_uint64, ctypes.c_float, integer]
    declare(
        library,
        trimtab_best_instruction_set=[],
        trimtab_encode=[pointer, pointer, integer, pointer, integer, *keyed],
        trimtab_decode=[pointer, pointer, integer, pointer, integer, integer],
        trimtab_decode_sum=[pointer, pointer, integer, integer, pointer, integer],
        trimtab_reduce_encode=[pointer, pointer, integer, pointer, integer, pointer, integer, *keyed],
    )
    return library


def declare(library: ctypes.CDLL, **signatures: Sequence[Any]) -> None:
    """Tell ctypes the argument types of functions that return an int64."""
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int64


def main() -> None:
    try:
        print(f"fast CPU kernels: {NativeKernels().instruction_set} ({LIBRARY.name})")
    except TrimtabError as error:
        print(f"fast CPU kernels: none, falling back to the PyTorch reference. {error}")


if __name__ == "__main__":
    main()
