"""What a script itself exchanges between ranks: tensors of its batch fit together only while batches are equal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist

from trimtab.control.rank_values import gather_numbers
from trimtab.environment import listed_by_rank
from trimtab.errors import TrimtabError

OWN_TENSOR = {
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "all_to_all_single": "input",
    "broadcast": "tensor",
    "gather": "tensor",
}
"""Collectives that need the same shape on all ranks, and which argument has it. A sum over ranks is not among them:
what is summed is a count or a mean, whose size may be that of the batch by chance."""

SUM = "all_reduce"
SUMMED = "the script sums values of its batch over the ranks (all_reduce) before it uses them"
_LOGGED = 16
"""A vector of no more numbers that is summed over ranks is logged: losses, hits, samples."""

Check = Callable[[str, torch.Tensor, Any], None]


def watch_collectives(check: Check) -> Callable[[], None]:
    """Call `check` with name, tensor and group before each of the script's own; returns what ends that."""
    arguments = {**OWN_TENSOR, SUM: "tensor"}
    originals = {name: getattr(dist, name) for name in arguments if hasattr(dist, name)}
    for name, original in originals.items():
        setattr(dist, name, _checked(name, arguments[name], original, check))

    def give_back() -> None:
        for name, original in originals.items():
            setattr(dist, name, original)

    return give_back


def require_equal_rows(name: str, tensor: torch.Tensor, group: Any) -> None:
    """Refuse what would end in a hang or in wrong values. Collective.

    Raises:
        TrimtabError: the tensor has another first axis on other ranks, because their batches have other sizes.
    """
    rows = [int(count) for (count,) in gather_numbers([float(len(tensor))], group)]
    if len(set(rows)) > 1:
        raise TrimtabError(
            f"run: the script calls torch.distributed.{name} with tensors of its batch, which have "
            f"{listed_by_rank(rows)} rows on the ranks now that batches are uneven; use --batch-sizes equal"
        )


def problem_of_exchange(name: str, tensor: torch.Tensor, samples: int, *, unused: bool) -> str | None:
    """Why a script needs equal batches that exchanges this tensor, while its batches are equal.

    Args:
        samples: of this rank's batch.
        unused: the batch has had no backward pass. What is summed over ranks before that is not for the log: centers
            and prototypes of self-supervised methods are, and are then divided by the number of samples that all ranks
            would have if each had as many.
    """
    if name == SUM:
        logged = tensor.dim() < 2 and tensor.numel() <= _LOGGED
        statistic = tensor.dtype.is_floating_point and not logged
        return SUMMED if unused and statistic else None
    # Not the loss, repeated for every sample: scripts gather that to log it, with their own batch size.
    if len(tensor) == samples > 1 and not bool((tensor == tensor[:1]).all()):
        return f"the script exchanges tensors of its batch with other ranks ({name})"
    return None


def _checked(name: str, argument: str, original: Callable[..., Any], check: Check) -> Callable[..., Any]:
    takes = signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the graph has torch's own, and can have nothing else
            return original(*args, **kwargs)
        if is_of_script(sys._getframe(1).f_globals.get("__name__", "")):
            try:
                given = takes.bind(*args, **kwargs).arguments
            except TypeError:  # which torch itself says better
                given = {}
            tensor, group = given.get(argument), given.get("group")
            if isinstance(tensor, torch.Tensor) and dist.get_rank(group) >= 0:
                check(name, tensor, group)
        return original(*args, **kwargs)

    return collective


def is_of_script(caller: str) -> bool:
    """Not what torch does by itself, as in FSDP2 and SyncBatchNorm, nor trimtab."""
    if caller.startswith("torch.distributed.nn"):
        return True
    return caller.split(".")[0] not in ("torch", "trimtab")
