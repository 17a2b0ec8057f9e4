from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.predict.tables import costs_of, workload_of

from trimtab.errors import TrimtabError
from trimtab.predict.operators.cost_mapper import CostMapper
from trimtab.predict.operators.costs import key_of
from trimtab.predict.operators.low_precision import backward_casts, forward_casts
from trimtab.predict.precision_patterns import settable

NAMES = ("gpt", "conv")


def mapper_of(name: str, autocast: str | None = None, **options: Any) -> CostMapper:
    return CostMapper(workload_of(name, autocast), costs_of(name, autocast), **options)


def snapshot(mapper: CostMapper) -> tuple[Any, ...]:
    graph = mapper.graph
    return (
        list(graph.precision), list(graph.leaving), list(graph.arriving), list(mapper.forward_s),
        list(mapper.backward_s), mapper.total_s,
    )  # fmt: skip


def afresh(mapper: CostMapper) -> CostMapper:
    """All costs again, from the precisions alone."""
    return CostMapper(
        mapper.workload, mapper.costs, results=mapper.graph.results, naive=mapper.naive,
        precisions=mapper.precisions,
    )  # fmt: skip


@st.composite
def sequences(draw: st.DrawFn) -> tuple[str, str | None, Any, bool, list[tuple[str, str | None, bool]]]:
    name = draw(st.sampled_from(NAMES))
    autocast = draw(st.sampled_from((None, "bf16")))
    workload = workload_of(name, autocast)
    steps = []
    for setting in draw(st.lists(st.sampled_from(sorted(workload.settings)), min_size=1, max_size=12)):
        kind = workload.operators[workload.settings[setting][0]].kind
        precision = draw(st.sampled_from((None, *settable(kind))))
        steps.append((setting, precision, draw(st.booleans())))
    return name, autocast, draw(st.sampled_from(("input", "own"))), draw(st.booleans()), steps


@settings(max_examples=40)
@given(sequences())
def test_changes_agree_with_costing_all_anew_and_can_be_taken_back(case: Any) -> None:
    name, autocast, results, naive, steps = case
    mapper = mapper_of(name, autocast, results=results, naive=naive)
    for setting, precision, keep in steps:
        before = snapshot(mapper)
        change = mapper.change(setting, precision)
        assert change.delta_s == pytest.approx(mapper.total_s - before[-1], abs=1e-12)
        if not keep:
            mapper.undo(change)  # a rejected trial leaves nothing behind
            assert snapshot(mapper) == before
    assert snapshot(mapper) == snapshot(afresh(mapper))


def test_many_changes_are_taken_back_in_reverse() -> None:
    mapper = mapper_of("gpt")
    before = snapshot(mapper)
    changes = [mapper.change(name, "bf16") for name in mapper.workload.settings]
    with pytest.raises(AssertionError, match="reverse order"):
        mapper.undo(changes[0])
    for change in reversed(changes):
        mapper.undo(change)
    assert snapshot(mapper) == before


def test_where_results_have_the_type_of_inputs_no_neighbor_changes() -> None:
    mapper = mapper_of("gpt", results="input")
    up = mapper.workload.by_name["blocks.0.up"]
    change = mapper.change("blocks.0.up", "int8")
    assert change.touched == (up.index,)
    measured = costs_of("gpt").times(key_of(up, "int8"), up.name)
    assert (mapper.forward_s[up.index], mapper.backward_s[up.index]) == (
        measured.forward_s,
        measured.backward_s,
    )


def test_a_half_that_stays_half_is_followed_to_whoever_is_fixed() -> None:
    mapper = mapper_of("gpt")
    assert mapper.graph.results == "own"
    operators, costs = mapper.workload.by_name, mapper.costs
    up, gelu, down = (operators[f"blocks.0{n}"] for n in (".up", "/gelu", ".down"))
    change = mapper.change("blocks.0.up", "bf16")
    assert change.touched == (up.index, gelu.index, down.index)
    assert mapper.graph.computes_in(gelu.index) == "bf16"
    followed = costs.times(key_of(gelu, dtype="bf16"), gelu.name)
    assert mapper.forward_s[gelu.index] == followed.forward_s
    n = down.input_tensors[0].numel
    plain = costs.times(key_of(down), down.name)
    there, back = costs.cast("bf16", "fp32"), costs.cast("fp32", "bf16")
    assert mapper.forward_s[down.index] == pytest.approx(plain.forward_s + there.seconds(n), rel=1e-12)
    assert mapper.backward_s[down.index] == pytest.approx(plain.backward_s + back.seconds(n), rel=1e-12)
    # It was measured in a step in which everything is lowered, where an fp32 stream arrives at it, too.
    alone = costs.times(key_of(up, "bf16"), up.name)
    assert mapper.forward_s[up.index] == alone.forward_s
    second = mapper.change("blocks.0.down", "bf16")
    measured = costs.times(key_of(down, "bf16"), down.name)
    assert mapper.forward_s[down.index] == measured.forward_s
    assert mapper.backward_s[down.index] == measured.backward_s
    add = operators["blocks.0/add.1"]
    assert add.index in second.touched
    # One input of the sum is still fp32: it promotes, and what follows it is as before.
    assert mapper.graph.leaving[add.index] == "fp32"
    assert max(second.touched) == add.index
    # Without the operator before it, it is dearer than it was measured by the cast of its input.
    mapper.change("blocks.0.up", None)
    assert mapper.forward_s[down.index] == pytest.approx(measured.forward_s + back.seconds(n), rel=1e-12)
    assert mapper.backward_s[down.index] == pytest.approx(measured.backward_s + there.seconds(n), rel=1e-12)


def test_what_follows_takes_its_own_time_where_it_was_not_measured_in_bf16() -> None:
    costs, gelu = costs_of("gpt"), workload_of("gpt").by_name["blocks.0/gelu"]
    rest = {k: v for k, v in costs.operators.items() if k != str(key_of(gelu, dtype="bf16"))}
    mapper = CostMapper(workload_of("gpt"), replace(costs, operators=rest))
    mapper.change("blocks.0.up", "bf16")
    assert mapper.forward_s[gelu.index] == costs.times(key_of(gelu), gelu.name).forward_s


def test_results_are_as_without_bf16_under_autocast_and_where_its_casts_were_not_measured() -> None:
    costs = costs_of("gpt")
    assert mapper_of("gpt", "bf16").graph.results == "input"
    casts = {direction: line for direction, line in costs.casts.items() if "bf16" not in direction}
    mapper = CostMapper(workload_of("gpt"), replace(costs, casts=casts))
    assert mapper.graph.results == "input"
    # Another cast of bf16 that was not measured takes as long as that of fp32.
    assert replace(costs, casts=casts).cast("bf16", "int8") == costs.cast("fp32", "int8")


def test_unlike_halves_meet_in_fp32() -> None:
    from trimtab.predict.operators.precision_graph import promoted

    assert promoted(["bf16", "fp16"]) == "fp32"
    assert promoted(["bf16", "bf16"]) == "bf16"
    assert promoted(["fp16", "fp32", "bf16"]) == "fp32"
    assert promoted([]) is None


def test_naive_leaves_out_casts() -> None:
    full, naive = (mapper_of("gpt", results="input", naive=naive) for naive in (False, True))
    assert full.total_s == naive.total_s
    up = full.workload.by_name["blocks.0.up"]
    one, two = full.change("blocks.0.up", "bf16"), naive.change("blocks.0.up", "bf16")
    casts = [*forward_casts(up, "bf16", "fp32", "fp32"), *backward_casts(up, "bf16", "fp32", "fp32", "cpu")]
    seconds = sum(full.costs.cast(source, to).seconds(n) for source, to, n in casts)
    assert seconds > 0
    assert one.delta_s - two.delta_s == pytest.approx(seconds, rel=1e-9)


def test_all_calls_of_a_module_change_together() -> None:
    mapper = mapper_of("gpt2")
    tied = mapper.workload.settings["model.lm_head"]
    change = mapper.change(tied[0], "bf16")
    assert set(tied) <= set(change.touched)
    assert mapper.precisions == {"model.lm_head": "bf16"}


@pytest.mark.parametrize("gone", ["bf16", None])
def test_what_was_not_measured_is_named_and_changes_nothing(gone: str | None) -> None:
    workload, costs = workload_of("gpt"), costs_of("gpt")
    up = workload.by_name["blocks.0.up"]
    key = str(key_of(up, gone))
    rest = {k: v for k, v in costs.operators.items() if k != key}
    poorer = replace(costs, operators=rest)
    message = (
        r"blocks\.0\.up: linear \(.*\) in .* was not measured on device class 'here'; run `trimtab probe`"
    )
    if gone is None:
        with pytest.raises(TrimtabError, match=message):
            CostMapper(workload, poorer)
        return
    mapper = CostMapper(workload, poorer)
    before = snapshot(mapper)
    with pytest.raises(TrimtabError, match=message):
        mapper.change("blocks.0.up", gone)
    assert snapshot(mapper) == before
    mapper.undo(mapper.change("blocks.0.up", "int8"))
    assert snapshot(mapper) == before


def test_a_missing_cast_is_named() -> None:
    mapper = CostMapper(workload_of("gpt"), replace(costs_of("gpt"), casts={}), naive=True)
    with pytest.raises(TrimtabError, match=r"the cast fp32 to bf16 was not measured.*trimtab probe"):
        mapper.change("blocks.0.up", "bf16")


def test_only_what_can_be_set_is_set() -> None:
    mapper = mapper_of("gpt")
    gelu = mapper.workload.by_name["blocks.0/gelu"].index
    with pytest.raises(TrimtabError, match=r"blocks\.0/gelu: its precision cannot be set; it is dependent"):
        mapper.change(gelu, "bf16")
    with pytest.raises(TrimtabError, match="'nobody' is not an operator of Gpt; there are tokens"):
        mapper.change("nobody", "bf16")
