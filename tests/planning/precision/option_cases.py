"""Operators whose seconds and damages are made up: what allocators are tried on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from trimtab.planning.precision.options import Option, Options
from trimtab.precision_names import OWN

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def options(**operators: dict[str, tuple[float, float]] | dict[str, tuple[float, float, int]]) -> Options:
    """By operator and precision: seconds, damage, and bytes if any."""
    return {
        name: tuple(
            Option(precision=precision, seconds=f[0], damage=f[1], memory=f[2] if len(f) > 2 else 0)
            for precision, f in by.items()
        )
        for name, by in operators.items()
    }


@st.composite
def random_options(draw: st.DrawFn, *, most: int = 10, memory: bool = False) -> Options:
    """Operators of very unlike sizes; lower precisions are usually faster, and always more damaging."""
    found: Options = {}
    for index in range(draw(st.integers(1, most))):
        seconds = draw(st.floats(1e-4, 1e-1))
        damage = draw(st.floats(1e-7, 1e-2))
        size = draw(st.integers(0, 1000)) if memory else 0
        several = [Option(precision=OWN, seconds=seconds, damage=0.0, memory=size)]
        for precision, part in (("bf16", 0.1), ("int8", 1.0)):
            if draw(st.booleans()):
                several.append(
                    Option(
                        precision=precision,
                        seconds=seconds * draw(st.floats(0.2, 1.2)),
                        damage=damage * part,
                        memory=size // (2 if precision == "bf16" else 4),
                    )
                )
        found[f"o{index}"] = tuple(several)
    return found


def between(options: Options, part: float) -> float:
    """Seconds between all at their fastest (0) and all at their own (1)."""
    low = sum(min(o.seconds for o in several) for several in options.values())
    high = sum(several[0].seconds for several in options.values())
    return low + part * (high - low)


parts: SearchStrategy[float] = st.floats(0.0, 1.0)
