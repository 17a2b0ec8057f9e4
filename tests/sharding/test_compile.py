"""A compiled model goes on being exact after a move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tests.sharding.jobs import Pair, difference
from tests.sharding.models import loss_of

from trimtab.sharding import assignment_for, move

if TYPE_CHECKING:
    from tests.support.pool import Pool


def compiled() -> float:
    torch._dynamo.reset()
    pair = Pair.make("shallow", headroom=0.2)
    model: Any = torch.compile(pair.spread, backend="aot_eager", fullgraph=True)
    worst = 0.0
    for counts in ([48, 48], [40, 56], [30, 66]):  # the last is more than there is room for
        expected = assignment_for(pair.spread, {"blocks.0.mlp": counts, "blocks.0.attention": [3, 3]})
        move(pair.spread, pair.spread_optimizer, expected)
        for alone, optimizer in ((pair.alone, pair.alone_optimizer), (model, pair.spread_optimizer)):
            optimizer.zero_grad()
            loss_of("shallow", alone, 0).backward()
            optimizer.step()
        worst = max(worst, difference(pair.alone, pair.spread, lambda p: p.data))
    return worst


def test_a_compiled_model_follows_moves(ranks: Pool) -> None:
    assert max(ranks(2, compiled)) < 1e-10
