"""How far the changes of workers agree, measured at every exchange from norms that travel with it.

The change of a worker is a part that all have in common, and noise of its own: d_i = s + n_i. The squared norm of the
weighted mean Σ w_i d_i is expected to be |s|² + |n|² Σ w_i², and the mean of the squared norms |s|² + |n|². So both
parts are known from two numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

MEMORY = 4
"""Rounds over which agreement is averaged."""


@dataclass(kw_only=True)
class MeasuredAgreement:
    """The part of workers' changes that all have in common, over the last rounds.

    With equal weights and norms it is the mean cosine between the changes of two workers.
    """

    fragments: int
    mean: float = 0.0
    each: float = 0.0
    alone: float = 0.0
    """Decaying sums: of squared norms of means, of workers' changes, and of what of these would remain in the mean
    if the changes had nothing in common."""

    exchanges: int = 0

    def add(self, mean: float, norms: Sequence[float], weights: Sequence[float]) -> None:
        """Count an exchange of one fragment.

        Args:
            mean: squared norm of the weighted mean of the changes.
            norms: squared norms of the changes.
            weights: of the workers; they sum to 1, or to 0 where there is nothing to average.
        """
        each = sum(weight * norm for weight, norm in zip(weights, norms, strict=True))
        if not each > 0:
            return
        kept = 1 - 1 / (MEMORY * self.fragments)
        self.mean = kept * self.mean + mean
        self.each = kept * self.each + each
        self.alone = kept * self.alone + each * sum(weight * weight for weight in weights)
        self.exchanges += 1

    @property
    def value(self) -> float | None:
        """From 0 to 1; None until every fragment was exchanged, and where only one worker counts."""
        if self.exchanges < self.fragments or self.each <= self.alone:
            return None
        return min(1.0, max(0.0, (self.mean - self.alone) / (self.each - self.alone)))

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a state with the same number of fragments."""
        for name, value in state.items():
            setattr(self, name, value)
