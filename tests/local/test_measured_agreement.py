"""Agreement from norms is what the changes themselves say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.local.measured_agreement import MeasuredAgreement


def measured(changes: torch.Tensor, weights: list[float]) -> float | None:
    own = MeasuredAgreement(fragments=1)
    mean = (changes * torch.tensor(weights, dtype=torch.float64)[:, None]).sum(0)
    own.add(float(mean @ mean), changes.square().sum(1).tolist(), weights)
    return own.value


@given(st.integers(2, 8), st.floats(0, 3), st.integers(0, 1000))
def test_with_equal_norms_it_is_the_mean_cosine(workers: int, common: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    changes = torch.randn(workers, 64, generator=generator, dtype=torch.float64)
    changes += common * torch.randn(64, generator=generator, dtype=torch.float64)
    changes /= changes.norm(dim=1, keepdim=True)
    cosines = changes @ changes.T
    mean = float(cosines.sum() - cosines.trace()) / (workers * (workers - 1))
    assert measured(changes, [1 / workers] * workers) == pytest.approx(max(0.0, mean), abs=1e-9)


@pytest.mark.parametrize("weights", [[0.25] * 4, [0.7, 0.1, 0.1, 0.1]])
@pytest.mark.parametrize("common", [0.0, 0.5, 2.0])
def test_the_common_part_is_found_whatever_the_weights(weights: list[float], common: float) -> None:
    generator = torch.Generator().manual_seed(0)
    changes = torch.randn(4, 100_000, generator=generator, dtype=torch.float64)
    changes += common * torch.randn(100_000, generator=generator, dtype=torch.float64)
    assert measured(changes, weights) == pytest.approx(common**2 / (1 + common**2), abs=0.02)


def test_it_is_unknown_until_every_fragment_was_exchanged() -> None:
    own = MeasuredAgreement(fragments=2)
    own.add(1.0, [1.0, 1.0], [0.5, 0.5])
    assert own.value is None
    own.add(0.0, [0.0, 0.0], [0.0, 0.0])
    assert own.value is None, "nobody changed anything"
    own.add(1.0, [1.0, 1.0], [0.5, 0.5])
    assert own.value == 1.0
    alone = MeasuredAgreement(fragments=1)
    alone.add(1.0, [1.0, 0.0], [1.0, 0.0])
    assert alone.value is None, "one worker has nobody to agree with"


def test_it_follows_the_last_rounds_and_continues_from_a_state() -> None:
    own = MeasuredAgreement(fragments=1)
    for _ in range(30):
        own.add(1.0, [1.0, 1.0], [0.5, 0.5])
    for _ in range(30):
        own.add(0.5, [1.0, 1.0], [0.5, 0.5])
    assert own.value == pytest.approx(0.0, abs=0.01)
    other = MeasuredAgreement(fragments=1)
    other.load_state_dict(own.state_dict())
    assert other == own
