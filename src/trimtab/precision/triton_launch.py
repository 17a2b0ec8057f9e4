"""Launches of Triton kernels that cost the host less than Triton's own.

Triton looks at every argument and option of every launch to find the compiled kernel. A small layer in 8 bits has ten
launches, which took the host longer than they took an H200. So compiled kernels are remembered here by what Triton
compiles for: the constants, the types of the arguments, and which of them are multiples of 16.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Tensor | int, ...],
    constants: dict[str, int | bool],
    **options: Any,
) -> None:
    """Run a kernel on the current stream.

    Args:
        arguments: a tensor first, then all others that are no constants, in the order of the kernel's signature.
        constants: those after them, in that order.
        options: of the compiler; always the same for the same constants.
    """
    first = arguments[0]
    assert isinstance(first, Tensor)
    key = (kernel, first.get_device(), *constants.values(), *map(_kind, arguments))
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments, *constants.values())
        return
    compiled = kernel[grid](*arguments, **constants, **options)
    if compiled is not None:  # interpreted, there is none
        _compiled[key] = compiled


def ceil_div(n: int, by: int) -> int:
    """n / by, rounded up; triton.cdiv wraps every number that it is given."""
    return -(-n // by)


def power_of_2(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(0, n - 1).bit_length()


def _kind(argument: Tensor | int) -> Any:
    """What Triton compiles for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument % 16 == 0, argument == 1, -(1 << 31) <= argument < 1 << 31
