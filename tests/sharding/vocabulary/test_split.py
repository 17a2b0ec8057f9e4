"""Embedding and head divided by vocabulary: exact, movable, tied, in the checkpoint; logits that are never gathered."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.sharding.jobs import Pair, adamw, convert
from tests.sharding.models import VOCABULARY, WIDTH, loss_of, make
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trimtab.bench.scenarios.tp.families import family_gap
from trimtab.errors import TrimtabError
from trimtab.models.families import FAMILIES, Family
from trimtab.planning.tensor.balance import Balance
from trimtab.sharding import Checkpoint, assignment_for, clip_grad_norm_, lease, move
from trimtab.sharding.unit_block import sharded_model
from trimtab.sharding.vocabulary.logits import VocabularyLogits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool


@dataclass(frozen=True)
class InDouble(Family):
    """A family whose loss is not computed in fp32, as that of transformers is."""

    def make(self, seed: int = 0) -> nn.Module:
        model: Any = super().make(seed)
        if self.inputs == "text" and hasattr(model, "loss_function"):
            model.loss_function = _causal_loss
        return model  # type: ignore[no-any-return]


def _causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten())


def train(folder: Path) -> dict[str, Any]:
    """Three ranks, one of them without any entry at first; tied matrices; then a checkpoint."""
    pair = Pair.make("gpt", vocabulary=True, shares=[2, 3, 1])
    block = sharded_model(pair.spread, "test").blocks["vocabulary"]
    move(pair.spread, pair.spread_optimizer, assignment_for(pair.spread, {"vocabulary": [0, 12, 5]}))
    gathered = []
    whole = VocabularyLogits.whole

    def counted(self: VocabularyLogits) -> Tensor:
        gathered.append(self.shape)
        return whole(self)

    VocabularyLogits.whole = counted  # type: ignore[method-assign]
    try:
        worst = max(pair.step() for _ in range(2))
        move(pair.spread, pair.spread_optimizer, assignment_for(pair.spread, {"vocabulary": [9, 3, 5]}))
        worst = max(worst, pair.step(), pair.step())
        norms = [
            clip_grad_norm_(pair.spread, 0.1),
            torch.nn.utils.clip_grad_norm_(pair.alone.parameters(), 0.1),
        ]
    finally:
        VocabularyLogits.whole = whole  # type: ignore[method-assign]
    save({"app": Checkpoint(pair.spread, pair.spread_optimizer)}, checkpoint_id=folder)
    again = convert(make("gpt", seed=3), shares=[1, 1, 4])  # without dividing the vocabulary
    load({"app": Checkpoint(again, adamw(again))}, checkpoint_id=folder)
    alone: Any = pair.alone
    back: Any = again
    spread: Any = pair.spread
    return {
        "worst": max(worst, float((norms[0] - norms[1]).abs())),
        "gathered": len(gathered),
        "entries": block.count,
        "values": sum(p.numel() for n, p in pair.spread.named_parameters() if n == "token.weight"),
        "tied": spread.head.weight is spread.token.weight,
        "loaded": float((back.token.weight - alone.token.weight).abs().max()),
    }


def test_it_trains_as_a_single_device_and_never_gathers_the_logits(ranks: Pool, tmp_path: Path) -> None:
    results = ranks(3, train, tmp_path / "saved")
    assert [each["entries"] for each in results] == [9, 3, 5]
    for each in results:
        assert max(each["worst"], each["loaded"]) < 1e-10
        assert each["gathered"] == 0
        assert each["tied"]
        assert each["values"] == each["entries"] * WIDTH, "a rank keeps its entries only"


def families(names: list[str]) -> dict[str, float]:
    chosen = [family for family in FAMILIES if not names or family.name in names]
    gaps = {}
    for family in chosen:
        exact = InDouble(**{each.name: getattr(family, each.name) for each in fields(family)})
        try:
            gaps[family.name] = family_gap(exact, vocabulary=True)
        except TrimtabError as error:
            gaps[family.name] = -1.0 if "vocabulary" in str(error) else 1.0
    return gaps


def test_tied_and_untied_vocabularies_of_transformers(ranks: Pool) -> None:
    pytest.importorskip("transformers")
    gaps = ranks(2, families, ["GPT-2", "Llama"], timeout=110)[0]
    assert len(gaps) == 2
    assert all(0 <= gap < 1e-10 for gap in gaps.values()), gaps


@pytest.mark.soak
def test_every_family_is_exact_or_refused(ranks: Pool) -> None:
    pytest.importorskip("transformers")
    gaps = ranks(2, families, [], timeout=400)[0]
    assert all(gap < 1e-10 for gap in gaps.values()), gaps
    assert sum(gap >= 0 for gap in gaps.values()) >= 12, gaps


def uses() -> dict[str, float]:
    """Logits that are used in other ways than by a cross-entropy are whole, with their gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH, padding_idx=2), _Mlp(), nn.Linear(WIDTH, VOCABULARY)
    )
    plain.double()
    spread = convert(copy.deepcopy(plain), vocabulary=("0", "2"), shares=[1, 2])
    tokens = torch.arange(12).view(2, 6)
    targets = torch.arange(12) % VOCABULARY
    targets[3] = -100
    weight = torch.rand(VOCABULARY, dtype=torch.float64)

    def flat(logits: Tensor) -> Tensor:
        return logits.view(-1, VOCABULARY)

    ways: dict[str, Any] = {
        "mean": lambda y: F.cross_entropy(flat(y), targets),
        "sum of slices": lambda y: F.cross_entropy(y[:, 1:].flatten(0, 1), targets[:10], reduction="sum"),
        "each": lambda y: F.cross_entropy(flat(y), targets, reduction="none").square().sum(),
        "scaled": lambda y: nn.CrossEntropyLoss(ignore_index=5)(
            flat((y / 3).tanh() * 3), targets.clamp(min=0)
        ),
        "weighted": lambda y: F.cross_entropy(flat(y), targets, weight=weight),
        "smoothed": lambda y: F.cross_entropy(flat(y), targets, label_smoothing=0.1),
        "classes in the middle": lambda y: F.cross_entropy(y.transpose(1, 2), targets.view(2, 6)),
        "entropy": lambda y: -(y.softmax(-1) * y.log_softmax(-1)).sum(),
        "last": lambda y: y[:, -1, 3:7].exp().sum(),
    }
    gaps = {}
    for name, way in ways.items():
        values = []
        for model in (plain, spread):
            model.zero_grad()
            loss = way(model(tokens))
            loss.backward()
            values.append(loss.detach())
        head = sharded_model(spread, "test").blocks["vocabulary"]
        gradients: list[Any] = [
            [model.get_submodule(each).weight.grad for model in (plain, spread)] for each in ("0", "2")
        ]
        gaps[name] = max(
            float((values[0] - values[1]).abs()),
            *(float((full[head.owned] - own).abs().max()) for full, own in gradients),
        )
    logits = [model(tokens) for model in (plain, spread)]
    assert logits[1].shape == logits[0].shape
    assert logits[1].argmax(-1).equal(logits[0].argmax(-1))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = [float(F.cross_entropy(flat(model.float()(tokens)), targets)) for model in (plain, spread)]
    gaps["autocast"] = 1e-12 if abs(mixed[0] - mixed[1]) < 1e-2 else 1.0
    return gaps


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())  # type: ignore[no-any-return]


def test_logits_can_be_used_in_any_way(ranks: Pool) -> None:
    for gaps in ranks(2, uses):
        assert max(gaps.values()) < 1e-10, gaps


def mistakes() -> list[str]:
    messages = []
    for options in (
        {"vocabulary": ("tokens", "head")},
        {"vocabulary": True, "balance": Balance(resize=0.5)},
    ):
        try:
            convert(make("gpt"), **options)
        except TrimtabError as error:
            messages.append(str(error))
    model: Any = make("gpt")
    model.token.max_norm = 1.0
    for change in (
        lambda: convert(model, vocabulary=True),
        lambda: convert(make("sequential"), vocabulary=True),
        lambda: lease(convert(make("gpt"), vocabulary=True), {"vocabulary": [8, 9]}),
    ):
        try:
            change()
        except TrimtabError as error:
            messages.append(str(error))
    assert dist.get_world_size() == 2
    assert loss_of("gpt", convert(make("gpt")), 0).isfinite()
    return messages


def test_mistakes_are_named(ranks: Pool) -> None:
    expected = ["no such module", "cannot be pruned", "max_norm", "no vocabulary in this", "cannot be leased"]
    for messages in ranks(2, mistakes):
        assert [part in message for part, message in zip(expected, messages, strict=True)] == [True] * 5
