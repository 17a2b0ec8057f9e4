"""The bits of a plan, as the starting point of bits that adapt to the gradients while training runs."""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from trimtab.control.compression.adaptive import emit_bits
from trimtab.control.compression.ddp import adaptive_of, compression_of
from trimtab.control.compression.explanation import record_explanation
from trimtab.planning.plan import Plan


def start_from_plan(ddp: DistributedDataParallel, plan: Plan) -> str:
    """Send gradients in a plan's bits until those that adapt are known; returns what becomes of them.

    For a module that `trimtab run` compresses by itself. Every rank calls it between the same two steps.
    """
    compression, controller = compression_of(ddp), adaptive_of(ddp)
    assert compression is not None
    if compression.deferred:
        return "gradients are sent by the module's own communication hook, not as in the plan"
    if plan.bits is None:
        compression.defer_to(ddp.process_group, allreduce_hook)
        text = "gradients are sent uncompressed: as planned, fewer bits would gain too little beside the computation"
        record_explanation(ddp, text)
        return text
    if plan.bits == "adaptive" or controller is None or controller.adapts:
        return "gradients in adaptive bits"
    bits = {name: plan.layer_bits.get(name) or plan.bits for name in controller.first}
    compression.set_bits(bits, at_step=compression.step)
    emit_bits(compression, bits)
    others = sum(value != plan.bits for value in bits.values())
    return f"gradients start in {plan.bits} bits{f' ({others} parameters in others)' if others else ''} and adapt"
