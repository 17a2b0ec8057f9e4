"""How each parameter travels: uncompressed, or in how many bits."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from trimtab.codec import Block, Codec, Uncompressed
from trimtab.codec.packing import RAW
from trimtab.errors import TrimtabError

_DEFAULT_BLOCK = 1024


def choose_bits(
    sizes: Mapping[str, tuple[int, int]],
    codec: Codec,
    overrides: Mapping[str, Codec | None],
    min_numel: int,
) -> tuple[dict[str, tuple[int, int, int]], set[str]]:
    """By parameter name: numel, bits (0: uncompressed) and block; and the names that an override matches.

    `sizes` gives each parameter's (numel, number of axes). `overrides` maps name patterns (as in a shell) to a
    codec, or to None: uncompressed. The first pattern that matches counts.
    """
    unused = set(overrides)
    chosen: dict[str, tuple[int, int, int]] = {}
    overridden = set()
    for name, (numel, axes) in sizes.items():
        own: Codec | None = codec if axes > 1 and numel >= min_numel else None
        for pattern, override in overrides.items():
            if fnmatchcase(name, pattern):
                unused.discard(pattern)
                overridden.add(name)
                own = override
                break
        chosen[name] = numel, *_bits_and_block(codec, own, name)
    if unused:
        some = ", ".join(list(chosen)[:4])
        raise TrimtabError(
            f"no parameter matches the pattern {sorted(unused)[0]!r}; parameters are called {some}, ..."
        )
    return chosen, overridden


def _bits_and_block(codec: Codec, own: Codec | None, name: str) -> tuple[int, int]:
    if own is None or isinstance(codec, Uncompressed):
        return RAW, _DEFAULT_BLOCK
    if isinstance(codec, Block):
        if not isinstance(own, Block) or own.stochastic != codec.stochastic:
            raise TrimtabError(
                f"{name}: {own} cannot be combined with {codec}; all parameters share one codec and one rounding"
            )
        return own.bits, own.block
    if own != codec:
        raise TrimtabError(
            f"{name}: {own} cannot be combined with {codec}; an override here can only be None"
        )
    return 1, _DEFAULT_BLOCK
