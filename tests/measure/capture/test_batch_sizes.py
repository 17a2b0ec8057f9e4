"""Models that make other calls with other batches, or whose calls depend on values, at batches between the captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_workload
from trimtab.workload import Workload


class PerSample(nn.Module):
    """Calls its layers once for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.two(self.one(row.expand(4, 8))) for row in x]).sum()


class Pairs(nn.Module):
    """Accepts only even batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.view(2, len(x) // 2, 8)
        y: torch.Tensor = (self.layer(left) * right).sum()
        return y


class Chosen(nn.Module):
    """Computes only samples with a positive sum, as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x[x.sum(1) > 0]).sum()
        return y


def flops(workload: Workload, samples: int) -> int:
    return sum(o.flops for o in workload.at_batch(samples).operators if o.kind == "linear")


def test_calls_that_only_a_larger_batch_makes_grow_from_nothing() -> None:
    workload = capture_workload(PerSample(), torch.zeros(4, 8), sizes=(2, 6))
    assert workload.caveat is not None
    assert (
        "do not grow evenly with the batch: between 2 and 6 samples they are interpolated" in workload.caveat
    )
    each = 2 * 4 * 2 * 8 * 8
    assert flops(workload, 2) == 2 * each
    assert flops(workload, 6) == 6 * each
    assert flops(workload, 4) == 4 * each
    saved = [sum(o.saved_bytes for o in workload.at_batch(n).operators) for n in (2, 4, 6)]
    assert saved[0] < saved[1] < saved[2]


def test_batch_sizes_that_a_model_refuses_are_not_needed() -> None:
    workload = capture_workload(Pairs(), torch.zeros(4, 8), sizes=(2, 4, 6))
    assert workload.resizable
    for samples in (2, 4, 6):
        direct = capture_workload(Pairs(), torch.zeros(samples, 8), sizes=(samples, 2 * samples))
        assert flops(workload, samples) == flops(direct, samples)


def test_a_model_that_depends_on_values_is_interpolated() -> None:
    torch.manual_seed(0)
    batch = torch.randn(6, 8)
    with pytest.raises(TrimtabError, match="depends on values: use"):
        capture_workload(Chosen(), batch)
    workload = capture_workload(Chosen(), batch, real=True, sizes=(2, 6))
    rows = {n: int((batch[:n].sum(1) > 0).sum()) for n in (2, 6)}
    assert {n: flops(workload, n) for n in rows} == {n: 2 * count * 8 * 8 for n, count in rows.items()}
    between = flops(workload, 4)
    assert (
        min(flops(workload, 2), flops(workload, 6)) <= between <= max(flops(workload, 2), flops(workload, 6))
    )


def test_a_model_of_one_batch_size_cannot_be_resized() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x.view(4, 8)).sum()
            return y

    workload = capture_workload(Fixed(), torch.zeros(4, 8), sizes=(2, 6))
    assert not workload.resizable
    with pytest.raises(TrimtabError, match="capture it again with a batch of 3"):
        workload.at_batch(3)
