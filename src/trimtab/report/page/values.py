"""Values from files that anybody may have written: each is what it should be, or it is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

MOST_TEXT = 400
"""Characters of the longest name or sentence on the page."""


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None


def text(value: Any, longest: int = MOST_TEXT) -> str:
    """A name or sentence: printable, of bounded length."""
    if isinstance(value, int) and not isinstance(value, bool):
        number_ = number(value)
        value = value if number_ is not None and abs(number_) < 1e15 else number_
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in str(value)[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def mean(values: Iterable[Any], weights: Sequence[float] | None = None) -> float | None:
    """The mean of those that are numbers; None if none is."""
    pairs = [(number(value), 1.0 if weights is None else weights[at]) for at, value in enumerate(values)]
    known = [(value, weight) for value, weight in pairs if value is not None and weight > 0]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if known else None


def duration(seconds: float | None) -> str:
    """A time for people: "48.2 ms"."""
    if seconds is None:
        return "unknown"
    if seconds <= 0:
        return "0 s"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (180, 1, "s"), (7200, 1 / 60, "min")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def size(count: float | None) -> str:
    """Bytes for people, in powers of ten as on the wire."""
    if count is None:
        return "unknown"
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def embeddable(value: Any) -> Any:
    """The same data with five significant digits, bounded text, and nothing that JSON or a browser cannot hold."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        known = number(value)
        if known is None:
            return None
        return int(known) if known.is_integer() and abs(known) < 2**53 else float(f"{known:.5g}")
    if isinstance(value, dict):
        return {text(key): embeddable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [embeddable(item) for item in value]
    return text(value, 4000)
