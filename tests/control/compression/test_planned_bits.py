"""A plan's bits are where adaptive bits start, or the end of compressing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from tests.control.plans.plan_cases import corpus, net, plan_for
from torch.nn.parallel import DistributedDataParallel as Ddp

from trimtab.api.explain import explain
from trimtab.control.compression.adaptive import Adaptive
from trimtab.control.compression.ddp import adaptive_of, compress_ddp, compression_of
from trimtab.control.plans.applying import apply_plan
from trimtab.planning.restrict import restricted

if TYPE_CHECKING:
    from tests.support.pool import Pool


def gradients(changes: dict[str, Any] | None, *, look: int = 20, steps: int = 1) -> dict[str, Any]:
    """A step after the plan; `look` is small where bits have adapted before it comes."""
    model = net()
    ddp = Ddp(model)
    bits: dict[str, int] = {}
    if changes is not None:
        compress_ddp(ddp, Adaptive(look=look, warmup=1))
        compression = compression_of(ddp)
        assert compression is not None
        compression.automatic = True  # as `trimtab run` does it
    (data,) = corpus(4).tensors
    for step in range(steps + 1):
        if changes is not None and step == steps:
            plan = restricted(plan_for(model, **changes), frozenset({"bits", "shares"}))
            apply_plan(ddp, plan, follow=None)
        ddp.zero_grad()
        F.mse_loss(ddp(data), data).backward()
    compression, controller = compression_of(ddp), adaptive_of(ddp)
    if compression is not None and controller is not None:
        bits = {name: compression.pieces[name][1] for name in controller.first}
    return {
        "bits": bits,
        "gradient": torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
        "explained": explain(ddp),
    }


def on_rank() -> dict[str, dict[str, Any]]:
    return {
        "plain": gradients(None),
        "planned": gradients({"bits": 8, "layer_bits": {"down.weight": 2}}),
        "off": gradients({"bits": None}),
        "adapted": gradients({"bits": 8}, look=2, steps=4),
    }


def test_bits_start_from_those_of_a_plan(ranks: Pool) -> None:
    found, other = ranks(2, on_rank)
    assert found["planned"]["bits"] == {"up.weight": 8, "middle.weight": 8, "down.weight": 2}
    assert "gradients start in 8 bits (1 parameters in others) and adapt" in found["planned"]["explained"]
    assert torch.equal(found["off"]["gradient"], found["plain"]["gradient"])
    assert "gradients are sent uncompressed" in found["off"]["explained"]
    assert set(found["adapted"]["bits"].values()) != {8}, "what was measured of the gradients stays"
    assert "gradients in adaptive bits" in found["adapted"]["explained"]
    for case in found:
        assert torch.equal(found[case]["gradient"], other[case]["gradient"])
