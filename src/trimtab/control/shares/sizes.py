"""Batch sizes as a user writes them: ``auto``, ``equal`` or ``24,11,11``."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.errors import TrimtabError


def parse_sizes(text: str) -> tuple[int, ...] | None:
    """The sizes by rank; None for `auto` and `equal`."""
    if text in ("auto", "equal"):
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise TrimtabError(
            f"run: --batch-sizes {text}: give auto, equal, or one whole number above 0 for each rank, as in 24,11,11"
        )
    return tuple(map(int, parts))


class RequestedSizes:
    """The batches that the user wants, by rank, and whether a loader of the script has had them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._fitted = False

    def problem(self, batch_size: int, world_size: int, beside: str | None) -> str | None:
        """Why the batches of a loader stay equal; None if they have these sizes.

        Args:
            beside: a problem that the script's other loaders make, if there is one.

        Raises:
            TrimtabError: no loader of the script has a step of so many samples.
        """
        whole = batch_size * world_size
        if len(self.sizes) == world_size and sum(self.sizes) == whole:
            self._fitted = True
            return None
        if beside is not None:
            return beside
        if self._fitted:
            given = ",".join(map(str, self.sizes))
            return f"a step of this loader has {whole} samples, not the {sum(self.sizes)} of {given}"
        raise TrimtabError(refused(self.sizes, batch_size, world_size))


def refused(sizes: Sequence[int], batch_size: int, world_size: int) -> str:
    """Why a script with so many samples on each rank cannot have these."""
    whole = batch_size * world_size
    return (
        f"run: --batch-sizes {','.join(map(str, sizes))}: the script trains on {whole} samples in a step, "
        f"{batch_size} on each of {world_size} ranks, and these are {sum(sizes)} on {len(sizes)}, so the training "
        f"would change; give {world_size} numbers that add up to {whole}"
    )
