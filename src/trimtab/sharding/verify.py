"""Check that a module computes its units independently of how many a rank has: one that is declared, or found by name.

A forward pass that splits heads by their number, orders a fused projection differently, or mixes hidden units gives
other outputs when the units are sharded, often without an error. So the hidden values of this rank's units are
computed twice, in evaluation mode and without a gradient: from these units alone, and with all units of all ranks, as
the unsharded module would.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.model_state import JobBound
from trimtab.sharding.find_units import FoundBlock, head_width
from trimtab.sharding.projection import HiddenReached
from trimtab.sharding.structure.trace import copied
from trimtab.sharding.unit_block import UnitBlock
from trimtab.sharding.unit_kinds import Attention, Units

_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD
_TOLERANCE = 1e-2
"""Relative difference of the hidden values: far above rounding, and far below that of wrong heads."""


def verify_example(found: FoundBlock, block: UnitBlock) -> None:
    """Raise if a sharded block differs from the unsharded one on hidden states of its own. Every rank calls it.

    Nothing is learned about a module that needs more than hidden states and position embeddings.
    """
    parameter = block.tensors[0].parameter
    if block.group.size == 1 or parameter.device.type == "meta":
        return
    width = parameter.shape[1]
    values = torch.arange(2 * 4 * width, device=parameter.device).sin().view(2, 4, width).to(parameter.dtype)
    parameters = inspect.signature(found.parent.forward).parameters
    args = dict.fromkeys(
        (name for name, p in parameters.items() if p.default is p.empty and p.kind == _NAMED), None
    )
    if isinstance(found.kind, Attention) and "position_embeddings" in parameters:  # cosine and sine
        angles = values.new_zeros((1, 4, head_width(found.parent, found.kind)))
        args["position_embeddings"] = (angles.cos(), angles)
    args[next(iter(parameters), "")] = values
    _verify(found, block, (), args)


def verify_at_first_forward(found: FoundBlock, block: UnitBlock) -> None:
    """As `verify_example`, with the inputs of the block's first forward pass."""
    if block.group.size == 1:
        return
    hook = _FirstForward(found, block)
    hook.handle = found.parent.register_forward_pre_hook(hook, with_kwargs=True)


def verify_other_arguments(found: FoundBlock, block: UnitBlock) -> None:
    """As `verify_at_first_forward`, if that pass has tensors where the example had none: a mask, a bias."""
    if block.group.size == 1 or found.call is None:
        return
    known = _tensors(found.parent, found.call.args, found.call.kwargs)
    hook = _FirstForward(found, block, known)
    hook.handle = found.parent.register_forward_pre_hook(hook, with_kwargs=True)


class _FirstForward(JobBound):
    """A forward pre-hook that checks the block once, with the inputs of the job."""

    handle: Any = None

    def __init__(self, found: FoundBlock, block: UnitBlock, known: set[str] | None = None) -> None:
        """
        Args:
            known: the arguments that need no check.
        """
        self._found, self._block, self._known = found, block, known

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.handle.remove()
        others: set[str] = set()
        if self._known is not None:
            others = _tensors(module, args, kwargs) - self._known
            if not others:
                return
        if not _verify(self._found, self._block, args, kwargs, sorted(others)):
            logger().warning(
                "tensor_parallel: %s could not be compared with the unsharded module; compare some outputs yourself",
                self._block.name,
            )


def _tensors(module: nn.Module, args: Any, kwargs: Any) -> set[str]:
    """Names of the arguments that have tensors."""
    # The forward pass of the module's own class, not that of what is mixed into it.
    kinds = (kind for kind in type(module).__mro__ if "forward" in vars(kind))
    own = next(kind for kind in kinds if not kind.__module__.startswith("trimtab.sharding."))
    try:
        given = inspect.signature(vars(own)["forward"]).bind(module, *args, **kwargs).arguments
    except TypeError:  # the pass itself will say what is wrong
        return set()
    return {name for name, value in given.items() if any(isinstance(t, Tensor) for t in tree_leaves(value))}


def _verify(found: FoundBlock, block: UnitBlock, args: Any, kwargs: Any, others: Sequence[str] = ()) -> bool:
    """Raise on every rank if the block is wrong on any; False if the unsharded module rejects these inputs.

    Args:
        others: names of arguments that were not there when the module was compared before.
    """
    device = block.tensors[0].parameter.device
    full, own = (_hidden(block, args, kwargs, whole=whole) for whole in (True, False))
    passing = _passes_by(block, args, kwargs)
    worst = torch.tensor(-1.0, device=device)  # unknown
    if isinstance(full, Tensor):
        worst.fill_(math.inf)
        owned = torch.tensor(block.owned, device=device)
        expected = full.unflatten(-1, (block.units, -1))[..., owned, :].flatten(-2).double()
        if isinstance(own, Tensor) and own.shape == expected.shape:
            error = (own.double() - expected).norm() / expected.norm().clamp_min(1e-30)
            worst = error.nan_to_num(0.0).float()  # without own units, or with invalid inputs: nothing to see
    if passing:
        worst.fill_(math.inf)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=block.group.process_group)
    dtype = full.dtype if isinstance(full, Tensor) else torch.float32
    if float(worst) > max(_TOLERANCE, torch.finfo(dtype).eps ** 0.5):
        what = f" ({own})" if isinstance(own, Exception) else ""
        differs = passing or (
            "on a rank with some of its units these get other values than in the unsharded module"
        )
        if others:
            differs = (
                f"with the arguments {', '.join(others)}, which it did not have on example inputs, {differs}"
            )
        raise refusal(found, differs + what) from (own if isinstance(own, Exception) else None)
    return float(worst) >= 0


def refusal(found: FoundBlock, problem: str) -> TrimtabError:
    """The error for a module that cannot be split as it is declared, or as its names suggest."""
    what = f"{type(found.parent).__name__} ({found.path or 'the model'})"
    if found.declared:
        how = "as kinds= declares it"
    elif isinstance(found.kind, Units):
        how = f"at {found.kind.out}"
    else:
        how = f"as the names of its projections suggest ({found.kind})"
    return TrimtabError(
        f"tensor_parallel: {what} cannot be sharded {how}: {problem}. Its forward pass must split heads by their "
        "width, view(..., -1, head_dim), order a fused projection as all queries, all keys, all values, and not mix "
        f"units. Change that, or replicate the module with replicate=[{found.path!r}]"
    )


def _passes_by(block: UnitBlock, args: Any, kwargs: Any) -> str:
    """What needs a gradient and reaches the hidden values beside the projections: a rank would have part of it only."""
    inputs: list[Tensor] = []

    def leaf(value: Any) -> Any:
        own = copied(value)
        if isinstance(value, Tensor) and value.requires_grad:
            inputs.append(own.requires_grad_())
            own = own.clone()  # it may be changed in place
        return own

    with torch.enable_grad():
        args, kwargs = tree_map(leaf, (args, kwargs))
        values = _hidden(block, args, kwargs, whole=False, graph=True)
    if not isinstance(values, Tensor):
        return ""
    reached = {id(each) for each in _leaves(values)}
    names = [name for name, p in block.parent.named_parameters() if id(p) in reached]
    if any(id(each) in reached for each in inputs):
        names.append("its input")
    if not names:
        return ""
    return f"{' and '.join(names)} is used between its projections, so its gradient would be that of one rank's units"


def _leaves(values: Tensor) -> Iterator[Tensor]:
    """The leaves of the graph of some values; what enters a block with the sum of its gradients is none."""
    waiting, seen = [values.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or "_Enter" in node.name():
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def _hidden(
    block: UnitBlock, args: Any, kwargs: Any, *, whole: bool, graph: bool = False
) -> Tensor | Exception:
    """The values that reach the block's last projection, or the error before that.

    Args:
        graph: record the graph of the values from the outputs of the projections on.
    """
    modes = [(module, module.training) for module in block.parent.modules()]
    block.verifying = "all units" if whole else "own units"
    block.set_widths(block.units if whole else block.count)
    sequence = block.sharded.sequence
    try:
        block.parent.eval()
        if not graph:
            args, kwargs = tree_map(copied, (args, kwargs))
        with torch.set_grad_enabled(graph), nullcontext() if sequence is None else sequence.unchanged():
            block.parent.forward(*args, **kwargs)
    except HiddenReached as reached:
        return reached.values
    except Exception as error:
        return error
    finally:
        for module, training in modes:
            module.training = training
        block.verifying = None
        block.leave()
    return RuntimeError("the forward pass does not call the last projection")
