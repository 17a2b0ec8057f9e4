from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.measure.capture.models import Places
from tests.predict.tables import workload_of

from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_workload
from trimtab.predict.operators.costs import OperatorKey, key_of, plain_precision


def test_keys_say_what_a_time_depends_on() -> None:
    gpt, conv = workload_of("gpt").by_name, workload_of("conv").by_name
    assert str(key_of(gpt["blocks.0.up"], "int8")) == "linear|32x64x256,bias|fp32|int8"
    assert str(key_of(gpt["head"])) == "linear|32x64x256|fp32|fp32"
    assert key_of(conv["net.3"], "int8").shape == (
        "2x16x32x32,w32x8x3x3,w32,dilation=(1 1),groups=2,padding=(1 1),stride=(2 2)"
    )
    assert key_of(gpt["blocks.0/attention"]).shape == "2x4x16x16,2x4x16x16,2x4x16x16,causal=True,dropout=0"
    assert key_of(gpt["blocks.0/gelu"]).shape == "aten.gelu.default,2x16x256,approximate=tanh"
    lowered = workload_of("gpt", "bf16").by_name
    assert key_of(lowered["blocks.0.up"]).precision == "bf16"
    assert plain_precision(lowered["blocks.0.up"]) == "bf16"


def test_a_layer_may_be_applied_to_a_parameter() -> None:
    (layer, *_) = capture_workload(Places(), torch.randn(32, 1)).operators
    assert str(key_of(layer, "int8")) == "linear|32x64x128,bias|fp32|int8"


def test_equal_work_has_equal_keys_and_unequal_work_has_not() -> None:
    workload = workload_of("gpt")
    one, two = (workload.by_name[f"blocks.{i}.up"] for i in (0, 2))
    assert key_of(one, "bf16") == key_of(two, "bf16")
    keys = {key_of(one, "bf16"), key_of(one, "int8"), key_of(one, "bf16", "bf16"), key_of(one)}
    larger = workload.at_batch(3).by_name["blocks.0.up"]
    assert len(keys | {key_of(larger, "bf16"), key_of(workload.by_name["blocks.0.down"], "bf16")}) == 6


@given(st.sampled_from(["gpt", "conv", "gpt2"]), st.data())
def test_keys_are_read_back(name: str, data: st.DataObject) -> None:
    operator = data.draw(st.sampled_from(workload_of(name).operators))
    key = key_of(operator, data.draw(st.sampled_from([None, "int8", "int8/int8/bf16"])))
    assert OperatorKey.parse(str(key)) == key


def test_other_text_is_no_key() -> None:
    with pytest.raises(TrimtabError, match="is not an operator key"):
        OperatorKey.parse("linear")
