"""Compare a split block with the unsplit one, on the activations that a trace recorded.

The block is computed as two ranks would, one after the other in this process: the outputs of its last projection must
add up to those of the unsplit block, and everything else that the module returns must be equal, or be the part of
this rank's heads. There is no communication, so every rank comes to its own verdict, the same on all.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.sharding.group import TensorGroup
from trimtab.sharding.structure.gradients import TOLERANCE, Shard, close, gradient_problem, plain_layers
from trimtab.sharding.structure.trace import Call, copied
from trimtab.sharding.unit_block import UnitBlock
from trimtab.sharding.unit_table import UnitTable

FAILS = "the unsplit module fails on example inputs"

_LOUD = 32
"""How many times larger weights are when the block is compared once more."""

_LOUD_TOLERANCE = 2e-3
"""Relative difference then: what rounding of large scores to fp32 becomes in a softmax."""


def split_problem(
    parent: nn.Module,
    out: str,
    bias: Tensor | None,
    units: int,
    call: Call,
    shard: Shard,
    *,
    heads_leave: bool = False,
) -> str:
    """How the split block differs from the unsplit one; empty if it does not.

    Args:
        out: name of the projection whose outputs are summed; empty if they are the module's own output.
        bias: is added to the sum.
        shard: splits a copy of the module for one of two ranks.
        heads_leave: whether something outside the module uses what it returns by head.
    """
    descending = list(range(units))[::-1]
    most = max(1, 2 * units // 3)
    table = UnitTable.of("check", units, [descending[:most], descending[most:]], 2)
    problem = _sum_problem(parent, out, bias, table, call, shard, heads_leave)
    problem = problem or gradient_problem(parent, out, bias, table, call, shard)
    if problem:
        return problem
    # A bound on all units together (their norm, their largest value) does nothing at the small values of an example.
    loud, given = _louder(parent, call)
    problem = _sum_problem(loud, out, bias, table, given, shard, heads_leave, _LOUD_TOLERANCE)
    return f"with larger values {problem}" if problem and not problem.startswith(FAILS) else ""


def _louder(parent: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """A copy with larger weights and its arguments: in fp64, since large scores round a lot."""
    loud = copy.deepcopy(parent).double()
    with torch.no_grad():
        for parameter in loud.parameters():
            if parameter.is_floating_point() and parameter.ndim > 1:
                parameter.mul_(_LOUD)

    def exact(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = tree_map(exact, (call.args, call.kwargs))
    return loud, replace(call, args=args, kwargs=kwargs)


def _sum_problem(
    parent: nn.Module,
    out: str,
    bias: Tensor | None,
    table: UnitTable,
    call: Call,
    shard: Shard,
    heads_leave: bool,
    tolerance: float = TOLERANCE,
) -> str:
    """How the forward pass differs."""
    expected, totals = _run(parent, out, call, None)
    if isinstance(expected, Exception):
        return f"{FAILS}: {expected}"
    if not totals:
        return "it does not call its last projection"
    summed = [torch.zeros_like(total) for total in totals]
    for rank in range(2):
        trial = copy.deepcopy(parent)
        group = TensorGroup(process_group=None, rank=rank, size=1)  # type: ignore[arg-type]
        block = shard(trial, table, group)
        outputs, partials = _run(trial, out, call, totals)
        if isinstance(outputs, Exception):
            return f"with some of its units it fails: {outputs}"
        if [each.shape for each in partials] != [each.shape for each in totals]:
            return "with some of its units its output has another shape"
        for each, partial in zip(summed, partials, strict=True):
            each += partial if bias is None or rank == 0 else partial - bias
        ids = _heads(block)
        if not all(
            _agrees(a, b, ids, tolerance)
            for a, b in zip(tree_leaves(outputs), tree_leaves(expected), strict=False)
        ):
            return "with some of its units it returns other values"
        if heads_leave and any(
            isinstance(a, Tensor) and a.shape != b.shape
            for a, b in zip(tree_leaves(outputs), tree_leaves(expected), strict=False)
        ):
            return "something outside of it uses values of its heads, of which a rank would have only its own"
    if not all(close(each, total, tolerance) for each, total in zip(summed, totals, strict=True)):
        return "the sum over its units is not its output"
    return ""


def _run(parent: nn.Module, out: str, call: Call, replace: list[Tensor] | None) -> tuple[Any, list[Tensor]]:
    """The outputs of the module, and those of every call of its last projection, which `replace` replaces."""
    seen: list[Tensor] = []

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        first, *rest = output if isinstance(output, tuple) else (output,)
        seen.append(first.clone())  # what follows may change it in place
        if replace is None:
            return None
        value = replace[len(seen) - 1].clone()
        return (value, *rest) if isinstance(output, tuple) else value

    modes = [(module, module.training) for module in parent.modules()]
    handle = (parent.get_submodule(out) if out else parent).register_forward_hook(hook)
    try:
        parent.eval()
        args, kwargs = tree_map(copied, (call.args, call.kwargs))
        with torch.no_grad(), plain_layers():
            outputs = parent(*args, **kwargs)
    except Exception as error:
        return error, []
    finally:
        handle.remove()
        for module, training in modes:
            module.training = training
    return outputs, seen


def _heads(block: UnitBlock) -> list[int]:
    heads = block.heads_per_unit
    return [unit * heads + head for unit in block.owned for head in range(heads)]


def _agrees(value: Any, expected: Any, heads: list[int], tolerance: float) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
        return True
    if value.shape != expected.shape and expected.ndim == value.ndim == 4:
        if value.shape[1] != len(heads):
            return False
        expected = expected[:, heads]
    return value.shape == expected.shape and close(value, expected, tolerance)
