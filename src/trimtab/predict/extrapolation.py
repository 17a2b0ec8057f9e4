"""Warns when a job's batch sizes are far from the probed ones: times are linear in samples only nearby."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.cluster.profile import Profile
from trimtab.predict.operators.costs import workload_key
from trimtab.workload import Workload

FAR = 2
"""Predictions are good up to this factor above the largest probed batch or below the smallest."""


def out_of_reach(profile: Profile, workload: Workload, samples: Sequence[tuple[str, int]]) -> str | None:
    """A warning, with what to do, when batch sizes are extrapolated too far; None otherwise.

    Args:
        workload: the model that was probed.
        samples: of each kind of rank in a micro-batch, with its device class in the profile.
    """
    far, key = [], workload_key(workload)
    for name, own in dict.fromkeys(samples):
        sizes = profile.devices[name].batches.get(key, ()) if name in profile.devices else ()
        if sizes and not (min(sizes) <= FAR * own and own <= FAR * max(sizes)):
            far.append((name, own, sizes))
    if not far:
        return None
    words = "; ".join(
        f"{name} has {own} samples and was probed at {', '.join(map(str, sizes))}" for name, own, sizes in far
    )
    return (
        f"{words}: times extrapolated so far are unreliable; probe nearer sizes: "
        f"trimtab probe --batch {','.join(map(str, nearby([own for _, own in samples])))}"
    )


def nearby(samples: Sequence[int]) -> tuple[int, ...]:
    """Batch sizes to probe for a job with these shares: the smallest, the largest, and one between them."""
    low, high = min(samples), max(samples)
    if 2 * low > high:  # almost even shares: leave room for others
        low, high = max(1, low // 2), high + low // 2
    return tuple(sorted({low, (low + high + 1) // 2, max(high, low + 1)}))
