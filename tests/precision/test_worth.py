"""The pattern ``*`` leaves operators alone that would be slower."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.requirements import requires
from torch import nn

import trimtab
from trimtab.errors import TrimtabError
from trimtab.precision.setting import precisions_of
from trimtab.precision.worth import LEAST_WIDTH, passed_over, width
from trimtab.precision_names import Precision

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, device="meta")


@given(st.integers(1, 1 << 15), st.integers(1, 1 << 15))
def test_width_is_between_inputs_and_outputs(inputs: int, outputs: int) -> None:
    own = width(linear(inputs, outputs), "linear")
    assert min(inputs, outputs) <= own + 1
    assert own <= max(inputs, outputs)
    assert own == width(linear(outputs, inputs), "linear")
    assert width(linear(inputs, inputs), "linear") == inputs


@pytest.mark.parametrize(
    ("conv", "expected"),
    [
        (nn.Conv2d(128, 128, 3, device="meta"), 2 * 1152 * 128 // 1280),
        (nn.Conv2d(64, 64, 3, groups=64, device="meta"), 1),
        (nn.Conv1d(16, 32, 5, device="meta"), 2 * 80 * 32 // 112),
    ],
)
def test_width_of_a_convolution_is_that_of_one_group(conv: nn.Module, expected: int) -> None:
    assert width(conv, "conv") == expected


def test_narrow_layers_keep_their_precision_on_a_gpu() -> None:
    for name in ("int8", "fp8"):
        precision = Precision.of(name)
        assert passed_over(linear(4096, 16384), "linear", precision, CUDA) is None
        assert name in str(passed_over(linear(1024, 4096), "linear", precision, CUDA))
        assert name in str(passed_over(linear(4096, 4096), "linear", precision, CUDA))
    assert passed_over(linear(16, 16), "linear", Precision.of("bf16"), CUDA) is None
    mixed = Precision(forward="bf16", grad_input="int8", grad_weight="bf16")
    assert passed_over(linear(16, 16), "linear", mixed, CUDA) is not None


@requires(int8=True)
def test_what_a_star_leaves_alone_is_explained_and_can_be_named() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 256), nn.Linear(256, 10))
    trimtab.set_precision(model, {"*": "int8"})
    assert list(precisions_of(model)) == ["2"]
    assert "0 keeps its precision (1 more like it): int8 is slower" in trimtab.explain(model)
    trimtab.set_precision(model, {"*": "int8", "?*": "bf16"})
    assert [p.forward for p in precisions_of(model).values()] == ["bf16", "int8", "bf16"]
    assert "keeps" not in trimtab.explain(model)
    for pattern in ("?*", "[0-9]"):
        trimtab.set_precision(model, {pattern: "int8"})
        assert list(precisions_of(model)) == ["0", "2", "3"]


@requires(int8=True)
def test_a_star_that_lowers_nothing_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(TrimtabError, match=r"'\*' lowers nothing .* below 128, and it has 8 .*'\?\*'"):
        trimtab.set_precision(model, {"*": "int8"})
    assert precisions_of(model) == {}


def test_rules_name_what_exists() -> None:
    for device, kind, name in LEAST_WIDTH:
        assert device in ("cpu", "cuda")
        assert kind in ("linear", "conv")
        assert Precision.of(name)
