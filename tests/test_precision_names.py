"""The small typed object that says which precision each product has."""

from __future__ import annotations

import pytest

from trimtab.precision_names import PRECISIONS, Precision


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_string_stands_for_all_three_products(name: str) -> None:
    precision = Precision.of(name)
    assert precision.names == (name, name, name)
    assert str(precision) == name
    assert Precision.of(precision) is precision


def test_it_survives_its_encoding() -> None:
    precision = Precision(
        forward="int8", grad_input="bf16", grad_weight="fp32", scales="tensor", rounding="nearest"
    )
    assert Precision.decode(precision.encode()) == precision
    assert Precision.decode(Precision.of("fp8").encode()) == Precision.of("fp8")
    assert str(precision) == "int8/bf16/fp32"


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward": "int4"},
        {"grad_weight": "half"},
        {"scales": "column"},
        {"rounding": "up"},
        {"forward": "fp8", "scales": "row"},
    ],
)
def test_what_there_is_not_is_refused(wrong: dict[str, str]) -> None:
    known = {"forward": "int8", "grad_input": "int8", "grad_weight": "int8"}
    with pytest.raises(ValueError, match=r"choose from|must be|whole tensor"):
        Precision(**(known | wrong))  # type: ignore[arg-type]


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="choose from fp32, tf32, bf16, fp16, fp8, int8"):
        Precision.of("int4")
