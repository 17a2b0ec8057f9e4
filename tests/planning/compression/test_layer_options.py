"""Options of layers: tables that make no sense are refused."""

from __future__ import annotations

import pytest

from trimtab.planning.compression.layer_options import LayerOptions


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"errors": (1.0,)}, "one error and one cost"),
        ({"options": (2, 2)}, "appears twice"),
        ({"errors": (1.0, float("nan"))}, "finite"),
        ({"costs": (-1.0, 2.0)}, "at least 0"),
        ({"norm": float("inf")}, "finite"),
    ],
)
def test_refuses_tables_that_make_no_sense(change: dict[str, object], said: str) -> None:
    good: dict[str, object] = {
        "name": "a",
        "numel": 8,
        "norm": 1.0,
        "options": (1, 2),
        "errors": (1.0, 0.5),
        "costs": (1.0, 2.0),
    }
    with pytest.raises(ValueError, match=said):
        LayerOptions(**{**good, **change})  # type: ignore[arg-type]
