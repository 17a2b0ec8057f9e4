from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.predict.tables import table_of, workload_of

from trimtab.cluster.profile import Line
from trimtab.errors import TrimtabError
from trimtab.predict.operators.costs import (
    CostTable,
    DeviceCosts,
    OperatorKey,
    Times,
    key_of,
    load_costs,
    missing,
    plain_precision,
    save_costs,
)

if TYPE_CHECKING:
    from pathlib import Path


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


def test_file_is_read_back_equal_and_another_version_is_refused(tmp_path: Path) -> None:
    table, path = table_of("gpt"), tmp_path / "costs.json"
    save_costs(table, path)
    assert load_costs(path) == table
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | {"version": 2}))
    with pytest.raises(TrimtabError, match=r"version 2 of measured costs is not read.*trimtab probe"):
        load_costs(path)
    tree["devices"]["here"]["casts"]["fp32>bf16"]["a"] = -1.0
    path.write_text(json.dumps(tree))
    with pytest.raises(TrimtabError, match=r"costs\.json: devices.*greater than or equal to 0"):
        load_costs(path)
    with pytest.raises(TrimtabError, match=r"cannot be read.*trimtab probe"):
        load_costs(tmp_path / "none.json")
    with pytest.raises(TrimtabError, match="is no operator key"):
        OperatorKey.parse("linear")


def test_profiles_merge_and_an_estimate_replaces_nothing() -> None:
    def table(seconds: float, *, estimated: bool = False, device: str = "a", key: str = "k") -> CostTable:
        times = {key: Times(forward_s=seconds, backward_s=seconds)}
        casts = {"fp32>bf16": Line(a=seconds, c=0.0)}
        costs = DeviceCosts(operators=times, casts=casts, estimated=estimated)
        return CostTable(version=1, devices={device: costs})

    assert set(table(1.0).merged(table(2.0, device="b")).devices) == {"a", "b"}
    assert table(1.0).merged(table(2.0)).devices["a"].operators["k"].forward_s == 2.0
    assert set(table(1.0).merged(table(2.0, key="other")).devices["a"].operators) == {"k", "other"}
    assert table(1.0).merged(table(2.0, estimated=True)) == table(1.0)
    assert table(1.0, estimated=True).merged(table(2.0)) == table(2.0)


def test_what_is_missing_is_listed_once() -> None:
    workload = workload_of("gpt")
    keys = [key_of(o) for o in workload.operators]
    empty = CostTable(version=1, devices={})
    assert missing(empty, "here", keys) == list(dict.fromkeys(keys))
    assert missing(table_of("gpt"), "here", keys) == []
