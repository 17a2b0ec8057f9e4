"""A compiled model goes on being exact after a move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tests.tensor_parallel.jobs import Pair, difference
from tests.tensor_parallel.models import loss_of

from trimtab.tensor_parallel import assignment_for, move

if TYPE_CHECKING:
    from tests.support.pool import Pool


def compiled(headroom: float) -> float:
    torch._dynamo.reset()
    pair = Pair.make("shallow", headroom=headroom)
    model: Any = torch.compile(pair.spread, backend="aot_eager", fullgraph=True)
    worst = 0.0
    for counts in ([48, 48], [40, 56], [56, 40]):
        wanted = assignment_for(pair.spread, {"blocks.0.mlp": counts, "blocks.0.attention": [3, 3]})
        move(pair.spread, pair.spread_optimizer, wanted)
        for alone, optimizer in ((pair.alone, pair.alone_optimizer), (model, pair.spread_optimizer)):
            optimizer.zero_grad()
            loss_of("shallow", alone, 0).backward()
            optimizer.step()
        worst = max(worst, difference(pair.alone, pair.spread, lambda p: p.data))
    return worst


def test_a_compiled_model_follows_moves(ranks: Pool) -> None:
    for headroom in (0.5, 0.0):
        assert max(ranks(2, compiled, headroom)) < 1e-10
