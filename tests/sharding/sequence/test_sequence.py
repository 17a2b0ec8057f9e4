"""Activations divided along the sequence: exact for any shares, with moves, leases, dropout and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.sharding.jobs import Pair, adamw, convert
from tests.sharding.models import WIDTH, loss_of, make
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trimtab.bench.scenarios.tp.families import EXACT, family_gap
from trimtab.errors import TrimtabError
from trimtab.models.families import FAMILIES
from trimtab.sharding import Checkpoint, assignment_for, clip_grad_norm_, end_leases, lease, move
from trimtab.sharding.sequence.exchange import Sequence
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool

COMMON = ("BERT", "GPT-2", "Llama", "ViT")
BLOCKS = ("blocks.0.attention", "blocks.0.mlp", "blocks.1.attention", "blocks.1.mlp")


def train(folder: Path) -> dict[str, Any]:
    """Three ranks with uneven slices; one loses all its units, and with them its places; then a lease."""
    pair = Pair.make("gpt", sequence=True, vocabulary=True, shares=[2, 3, 1])
    sequence = sharded_model(pair.spread, "test").sequence
    assert isinstance(sequence, Sequence)
    counts = [sequence.counts(12)]
    worst = pair.step()
    sizes = dict(zip(BLOCKS, [[4, 0, 2], [60, 0, 36]] * 2, strict=True))
    move(pair.spread, pair.spread_optimizer, assignment_for(pair.spread, sizes))
    counts.append(sequence.counts(12))
    worst = max(worst, pair.step(), pair.step())
    lease(pair.spread, {"blocks.0.mlp": [40, 20, 36], "blocks.1.attention": [3, 1, 2]})
    worst = max(worst, pair.step())
    end_leases(pair.spread)
    worst = max(worst, pair.step())
    norms = [clip_grad_norm_(pair.spread, 0.1), nn.utils.clip_grad_norm_(pair.alone.parameters(), 0.1)]
    pair.alone.eval()
    with torch.no_grad():
        losses = [loss_of("gpt", model, 9) for model in (pair.alone, pair.spread.eval())]
    save({"app": Checkpoint(pair.spread, pair.spread_optimizer)}, checkpoint_id=folder)
    again = convert(make("gpt", seed=3), sequence=True, shares=[1, 1, 4])
    load({"app": Checkpoint(again, adamw(again))}, checkpoint_id=folder)
    norm, expected = (dict(m.named_parameters())["blocks.1.norm2.weight"] for m in (again, pair.alone))
    gaps = [norms[0] - norms[1], losses[0] - losses[1], norm - expected]
    return {"counts": counts, "worst": max(worst, *(float(gap.detach().abs().max()) for gap in gaps))}


@pytest.mark.timeout(300)
def test_training_is_that_of_a_single_device(ranks: Pool, tmp_path: Path) -> None:
    for result in ranks(3, train, tmp_path, timeout=150):
        assert result["worst"] < EXACT
        assert result["counts"] == [[4, 6, 2], [8, 0, 4]]


def gaps(names: tuple[str, ...]) -> dict[str, float]:
    families = [family for family in FAMILIES if not names or family.name in names]
    return {family.name: family_gap(family, sequence=True) for family in families}


@pytest.mark.timeout(300)
def test_common_families_train_as_on_a_single_device(ranks: Pool) -> None:
    pytest.importorskip("transformers")
    for found in ranks(2, gaps, COMMON, timeout=150):
        assert found.keys() == set(COMMON)
        assert max(found.values()) < EXACT, found


@pytest.mark.soak
@pytest.mark.timeout(500)
@pytest.mark.parametrize("size", [2, 3])
def test_every_family_trains_as_on_a_single_device(ranks: Pool, size: int) -> None:
    for found in ranks(size, gaps, (), timeout=400):
        assert found.pop("Gemma2") < 1e-6  # its norms compute in fp32
        assert max(found.values()) < EXACT, found


class Mixing(nn.Module):
    """A layer that mixes places outside its block of units."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) + self.down(self.up(x).relu())  # type: ignore[no-any-return]


def dropout_and_refusals() -> dict[str, Any]:
    family = next(family for family in FAMILIES if family.name == "GPT-2")
    drops = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    family = replace(family, config={**family.config, **drops})
    results: dict[str, Any] = {"losses": [], "gradients": []}
    for shares, recompute in (([1, 2], False), ([2, 1], True), ([1, 0], False)):
        model: Any = convert(family.make(), shares=shares, sequence=True)
        torch.manual_seed(10 * dist.get_rank() + shares[0])
        if recompute:
            model.gradient_checkpointing_enable()
        loss = family.loss(model, 0)
        loss.backward()
        results["losses"].append(float(loss.detach()))
        results["gradients"].append(float(model.transformer.h[0].ln_1.weight.grad.norm()))
    evaluated = family.loss(model.eval(), 0)
    results["evaluated"] = float(evaluated.detach())
    hidden = model.transformer(input_ids=torch.arange(6).view(1, 6), output_hidden_states=True).hidden_states
    results["hidden"] = [tuple(states.shape) for states in hidden]
    try:
        convert(nn.Sequential(Mixing(), Mixing()).double(), sequence=True)
    except TrimtabError as error:
        results["refusal"] = str(error)
    return results


@pytest.mark.timeout(300)
def test_dropout_belongs_to_places_and_mixing_layers_are_refused(ranks: Pool) -> None:
    pytest.importorskip("transformers")
    first, second = ranks(2, dropout_and_refusals, timeout=150)
    for name in ("losses", "gradients"):
        assert first[name] == pytest.approx([first[name][0]] * 3, abs=EXACT)
        assert second[name] == pytest.approx(first[name], abs=EXACT)
    assert abs(first["losses"][0] - first["evaluated"]) > 1e-4, "dropout did nothing"
    assert first["hidden"] == [(1, 6, WIDTH)] * 3
    assert "0 (Mixing) cannot work on parts of the sequence: its output" in first["refusal"]
