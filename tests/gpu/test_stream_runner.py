"""`StreamRunner`: reductions queued on CUDA streams, and what happens after one of them fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.requirements import requires
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.collectives.pipeline import StreamRunner
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.pool import Pool

pytestmark = requires(cuda=1)


class Queued:
    """Stands for a collective that was started: waiting for it orders streams, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self._queued = torch.cuda.Event()
        self._queued.record()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._queued.wait()


def doubled(tensor: torch.Tensor, stages: int, error: Exception | None = None) -> Iterator[Any]:
    """A reduction that doubles the tensor in each stage."""
    for _ in range(stages - 1):
        tensor.mul_(2)
        yield Queued(error)
    tensor.mul_(2)


def failing(error: Exception) -> Iterator[Any]:
    yield Queued()
    raise error


@pytest.fixture
def runner() -> Iterator[StreamRunner]:
    runner = StreamRunner(torch.device("cuda"))
    yield runner
    runner.close()  # returns although a reduction failed


def test_stages_run_in_order_after_what_filled_the_tensor(runner: StreamRunner) -> None:
    for _ in range(20):
        tensor = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(2_000_000)
        tensor.fill_(1.0)  # still to be run when the reduction is submitted
        result = runner.submit(doubled(tensor, 3), tensor).wait()
        assert result.data_ptr() == tensor.data_ptr()
        assert bool((result == 8).all())


@pytest.mark.parametrize("kind", [RuntimeError, TrimtabError])
def test_a_failed_stage_is_raised_by_its_future(runner: StreamRunner, kind: type[Exception]) -> None:
    """As a RuntimeError that names the first: that is what a future makes of an error in a callback."""
    with pytest.raises(RuntimeError, match=f"{kind.__name__}: (.|\n)*the wire was cut"):
        runner.submit(failing(kind("the wire was cut")), torch.ones(8, device="cuda")).wait()


def test_a_failed_collective_is_raised_too(runner: StreamRunner) -> None:
    tensor = torch.ones(8, device="cuda")
    broken = doubled(tensor, 2, RuntimeError("a peer left"))
    with pytest.raises(RuntimeError, match="a peer left"):
        runner.submit(broken, tensor).wait()


def test_after_a_failure_everything_fails_instead_of_hanging(runner: StreamRunner) -> None:
    """The ranks no longer start their collectives in one order: what follows would wait for ever, or mix buckets."""
    tensor = torch.ones(8, device="cuda")
    with pytest.raises(RuntimeError, match="the wire was cut"):
        runner.submit(failing(RuntimeError("the wire was cut")), tensor).wait()
    for _ in range(2):
        later = torch.ones(8, device="cuda")
        with pytest.raises(RuntimeError, match="the wire was cut"):
            runner.submit(doubled(later, 2), later).wait()
        torch.cuda.synchronize()
        assert bool((later == 1).all()), "a reduction was started after the failure"


def _message_of_backward() -> str:
    """What DDP's backward raises when the reduction of a bucket fails."""
    model = DistributedDataParallel(nn.Linear(64, 64).cuda())
    runner = StreamRunner(torch.device("cuda"))
    model.register_comm_hook(
        None, lambda _, bucket: runner.submit(failing(RuntimeError("the wire was cut")), bucket.buffer())
    )
    try:
        model(torch.ones(2, 64, device="cuda")).sum().backward()
    except Exception as error:
        return str(error)
    finally:
        runner.close()
    return "nothing"


def test_backward_raises_what_failed(ranks: Pool) -> None:
    (message,) = ranks(1, _message_of_backward)
    assert "the wire was cut" in message
