"""Decisions made beside the training: what a rank does when none comes."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from trimtab.control.background import Background
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from tests.support.pool import Pool


def _wait_for_a_store_that_does_not_answer() -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    assert isinstance(group, dist.ProcessGroup)
    background = Background(group)
    answers = threading.Event()

    def stuck() -> dict[str, Any]:
        answers.wait()
        return {"bits": 4}

    decision = background.decide("first", stuck)
    with pytest.raises(TrimtabError, match=r"store has not answered within 0.5 s"):
        background.wait(decision)
    answers.set()
    assert background.wait(decision) == {"bits": 4}
    background.close()
    dist.destroy_process_group(group)


def test_a_decision_is_not_awaited_beyond_the_groups_timeout(ranks: Pool) -> None:
    ranks(1, _wait_for_a_store_that_does_not_answer)
