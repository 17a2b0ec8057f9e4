"""How far a job's batch sizes are from those that were probed: times are linear in samples nearby, not everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.cluster.profile import Profile

FAR = 2
"""Times the largest probed batch, or below the smallest, that a prediction is good for."""


def out_of_reach(profile: Profile, model: str, samples: Sequence[tuple[str, int]]) -> str | None:
    """What to say where a job has batches far from those probed, and what to do; None where it has none.

    Args:
        model: of the workload.
        samples: of a rank, with its device class in the profile.
    """
    far = []
    for name, own in samples:
        sizes = profile.devices[name].batches.get(model, ()) if name in profile.devices else ()
        if sizes and not (min(sizes) <= FAR * own and own <= FAR * max(sizes)):
            far.append((name, own, sizes))
    if not far:
        return None
    words = "; ".join(
        f"{name} has {own} samples and was probed at {', '.join(map(str, sizes))}" for name, own, sizes in far
    )
    return (
        f"{words}: times so far from what was measured are poor guesses; probe nearer: "
        f"trimtab probe --batch {','.join(map(str, nearby([own for _, own in samples])))}"
    )


def nearby(samples: Sequence[int]) -> tuple[int, ...]:
    """Batch sizes to probe for a job whose ranks have so many: from the smallest to the largest, and one between."""
    low, high = min(samples), max(samples)
    if 2 * low > high:  # about even shares: leave room for others
        low, high = max(1, low // 2), high + low // 2
    return tuple(sorted({low, (low + high + 1) // 2, max(high, low + 1)}))
