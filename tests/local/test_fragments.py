"""Fragments: every parameter in exactly one, in order, of about equal size; turns spread over a round."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.local.agreement import AgreedFragment
from trimtab.local.fragments import Part, split, turns
from trimtab.planning.local_steps import local_settings


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 50))
def test_every_parameter_is_in_one_fragment_in_order(sizes: list[int], count: int) -> None:
    named = {f"p{i}": (size,) for i, size in enumerate(sizes)}
    fragments = split(named, count)
    assert [part.label for fragment in fragments for part in fragment] == list(named)
    assert 1 <= len(fragments) <= count
    assert all(fragments)


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 300)), min_size=1, max_size=20),
    st.integers(1, 20),
)
def test_large_parameters_are_cut_between_rows(shapes: list[tuple[int, int]], count: int) -> None:
    named = {f"p{i}": shape for i, shape in enumerate(shapes)}
    fragments = split(named, count)
    assert 1 <= len(fragments) <= count
    assert all(fragments)
    rows: dict[str, list[int]] = {name: [] for name in named}
    for part in (part for fragment in fragments for part in fragment):
        rows[part.name] += range(*slice(part.first, part.last).indices(named[part.name][0]))
    assert rows == {name: list(range(shape[0])) for name, shape in named.items()}, "every row once, in order"


def test_fragments_of_a_gpt_with_a_large_embedding_are_even() -> None:
    layers = {f"{i}.{j}": (rows, 768) for i in range(12) for j, rows in enumerate((2304, 768, 3072, 3072))}
    shapes = {"embedding": (50257, 768), **layers}
    fragments = split(shapes, 16)
    rows = [
        sum(len(part.of(torch.empty(shapes[part.name][0]))) for part in fragment) for fragment in fragments
    ]
    assert len(rows) == 16
    assert max(rows) < 1.05 * sum(rows) / 16


def test_fragments_are_of_about_equal_size() -> None:
    fragments = split({f"p{i}": (10,) for i in range(12)}, 4)
    assert [len(fragment) for fragment in fragments] == [3, 3, 3, 3]
    assert split({"a": (1,), "b": (1,), "large": (100,)}, 2) == ((Part("a"), Part("b")), (Part("large"),))


@given(st.integers(1, 200), st.integers(1, 200))
def test_turns_are_different_steps_of_a_round(every: int, count: int) -> None:
    if count <= every:
        steps = turns(every, count)
        assert len(set(steps)) == count
        assert steps[-1] == every
        assert min(steps) >= 1
        gaps = [after - before for before, after in zip((0, *steps), steps, strict=False)]
        assert min(gaps) >= every // count, "a delay of every // count ends before the next fragment is sent"


def test_what_is_exchanged_is_fp32_whatever_the_default_is() -> None:
    settings = local_settings(4, None, 2, 1)
    weight = torch.nn.Parameter(torch.randn(3, 5))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        fragment = AgreedFragment({Part("weight"): weight}, SimpleNamespace(stages=(None,)), settings, seed=0)  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(fragment.agreed, weight.detach().view(-1))
    assert {buffer.dtype for buffer in (fragment.momentum, fragment._next)} == {torch.float32}
