"""Which parameters are exchanged together, and when."""

from __future__ import annotations

from collections.abc import Mapping


def split(sizes: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """Parameters in order, cut into at most `count` runs of about equal size; none is empty.

    Args:
        sizes: values of each parameter, by name.
    """
    assert count >= 1
    total, done = sum(sizes.values()), 0
    fragments: list[list[str]] = [[]]
    for name, size in sizes.items():
        # The middle of a parameter decides to which run it belongs.
        wanted = min(count - 1, int((done + size / 2) * count / max(total, 1)))
        if fragments[-1] and wanted >= len(fragments):
            fragments.append([])
        fragments[-1].append(name)
        done += size
    return tuple(map(tuple, fragments))


def turns(steps: int, count: int) -> tuple[int, ...]:
    """For each of `count` fragments, the step of a round (1 to `steps`) after which it is sent; evenly spaced."""
    assert steps >= 1
    return tuple(max(1, (index + 1) * steps // count) for index in range(count))
