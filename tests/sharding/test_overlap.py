"""Weights' gradients are computed while the gradient of a block's input travels: the same bits in another order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.sharding.jobs import adamw, convert
from tests.sharding.models import loss_of, make
from torch.utils.checkpoint import checkpoint

from trimtab.sharding import assignment_for, lease, move
from trimtab.sharding.group import TensorGroup
from trimtab.sharding.overlap import Late
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.pool import Pool

SHARES = {2: [1.0, 3.0], 3: [3.0, 1.0, 0.0]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"kind": "gpt"},
    "grouped heads": {"kind": "llama"},
    "empty slots": {"kind": "gpt", "options": {"headroom": 0.5}},
    "sequence": {"kind": "gpt2", "options": {"sequence": True}},
    "sequence and vocabulary": {"kind": "gpt", "options": {"sequence": True, "vocabulary": True}},
    "autocast": {"kind": "gpt", "autocast": True},
    "checkpointed": {"kind": "gpt", "reentrant": False},
    "checkpointed reentrantly": {"kind": "gpt", "reentrant": True},
    "frozen": {"kind": "gpt", "frozen": ("token", "up.weight", "projection.weight")},
}


def train(size: int, case: dict[str, Any], overlap: bool) -> dict[str, torch.Tensor]:
    """Three steps with uneven shares and a move and a lease between them."""
    model = make(case["kind"])
    model = model.float() if case.get("autocast") else model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.get("frozen", ())))
    convert(model, shares=SHARES[size], **case.get("options", {}))
    sharded = sharded_model(model, "test")
    sharded.group.overlap = overlap
    if "reentrant" in case:
        for layer in model.get_submodule("blocks").children():
            _checkpoint(layer, case["reentrant"])
    optimizer = adamw(model)
    seen: dict[str, torch.Tensor] = {}
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(case.get("autocast"))):
            loss = loss_of(case["kind"], model, step)
        loss.backward()
        seen |= {f"{step} loss": loss.detach()}
        seen |= {
            f"{step} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
        if step == 0:
            counts = {b.name: b.table.counts[::-1] for b in sharded.blocks.values() if not b.vocabulary}
            move(model, optimizer, assignment_for(model, counts))
        if step == 1:
            block = next(b for b in sharded.blocks.values() if not b.vocabulary)
            lease(model, {block.name: block.table.counts[::-1]})
    return seen


def _checkpoint(layer: torch.nn.Module, reentrant: bool) -> None:
    inner: Callable[..., Any] = layer.forward

    def forward(x: Any) -> Any:
        return checkpoint(inner, x, use_reentrant=reentrant)

    layer.forward = forward


def both(size: int, name: str) -> list[str]:
    """The values that differ between a job with overlap and one without."""
    one, other = (train(size, CASES[name], overlap) for overlap in (False, True))
    assert one.keys() == other.keys()
    assert any("weight" in key for key in one)
    return [key for key, value in one.items() if not torch.equal(value, other[key])]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_without_overlap(ranks: Pool, name: str, size: int) -> None:
    if CASES[name]["kind"] != "gpt":
        pytest.importorskip("transformers")
    assert ranks(size, both, size, name) == [[]] * size


def order() -> list[str]:
    """What the backward pass of one block does, in order."""
    seen: list[str] = []
    start, into = TensorGroup.start_all_reduce, Late.into

    def started(self: TensorGroup, tensor: torch.Tensor) -> Callable[[], None]:
        seen.append("start")
        wait = start(self, tensor)

        def waited() -> None:
            seen.append("wait")
            wait()

        return waited

    def computed(self: Late, gradients: list[torch.Tensor | None]) -> None:
        seen.append(f"{len(self._waiting)} products")
        into(self, gradients)

    TensorGroup.start_all_reduce, Late.into = started, computed  # type: ignore[method-assign]
    try:
        loss_of("shallow", convert(make("shallow")), 0).backward()
    finally:
        TensorGroup.start_all_reduce, Late.into = start, into  # type: ignore[method-assign]
    return seen


def test_weights_gradients_are_computed_between_start_and_wait(ranks: Pool) -> None:
    mlp_then_attention = ["start", "3 products", "wait"] * 2
    assert ranks(2, order) == [mlp_then_attention] * 2
