from __future__ import annotations

import pytest
import torch
from tests.measure.capture.models import MODELS
from tests.predict.tables import workload_of

from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_workload
from trimtab.precision.setting import match
from trimtab.predict.precision_patterns import matched, with_products

PATTERNS: list[dict[str, str]] = [
    {"*": "bf16"},
    {"*": "int8"},
    {"*norm*": "fp16", "*.0.*": "int8", "*": "bf16"},
    {"*/attention": "bf16"},
    {"*/attention": "bf16", "*": "fp16"},
]


@pytest.mark.parametrize("name", ["gpt", "gpt2", "conv", "llama"])
@pytest.mark.parametrize("patterns", PATTERNS)
def test_a_plan_sets_the_same_operators_here_and_in_the_model(name: str, patterns: dict[str, str]) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    workload = workload_of(name)
    try:
        theirs = match(model, patterns)
    except TrimtabError:
        with pytest.raises(TrimtabError):
            matched(workload, patterns)
        return
    if name == "conv" and "*/attention" in patterns:
        return  # any module may be set; none of these multiplies activations
    mine = matched(workload, patterns)
    # There, every module counts as a place for attention; here only those that compute some.
    assert mine == {n: str(p) for n, (_, p) in theirs.items() if n in workload.settings}


@pytest.mark.parametrize("name", ["gpt", "conv", "llama"])
def test_names_set_what_they_name_as_patterns_do(name: str) -> None:
    workload = workload_of(name)
    some = dict.fromkeys(list(workload.settings)[::2], "bf16")
    assert matched(workload, some) == some
    # A class of one character makes it a pattern that matches nothing else.
    assert matched(workload, {f"[{n[0]}]{n[1:]}": p for n, p in some.items()}) == some
    with pytest.raises(TrimtabError, match="'nobody' matches no operator"):
        matched(workload, {**some, "nobody": "bf16"})


@pytest.mark.parametrize("pattern", ["*", "?*", ""])
def test_a_model_that_is_one_operator_is_matched_too(pattern: str) -> None:
    workload = capture_workload(torch.nn.Linear(8, 8), torch.randn(2, 8))
    assert matched(workload, {pattern: "bf16"}) == {"": "bf16"}


def test_everything_includes_products_of_activations_in_bf16() -> None:
    workload = workload_of("gpt")
    attention = {name for name in workload.settings if name.endswith("/attention")}
    assert attention
    for low in ("bf16", "int8"):
        chosen = with_products(workload, {"*": low})
        assert {chosen[name] for name in attention} == {"bf16"}
        assert {name: p for name, p in chosen.items() if name not in attention} == matched(
            workload, {"*": low}
        )
    assert set(with_products(workload, {"*/attention": "fp32", "?*": "bf16"}).values()) == {"fp32", "bf16"}
    for patterns in ({"*": "fp16"}, {"blocks.*": "bf16"}):
        assert attention.isdisjoint(with_products(workload, patterns))


def test_attention_is_also_set_from_outside() -> None:
    workload = workload_of("gpt2")
    mine = matched(workload, {"model.transformer.h.0/attention": "bf16"})
    assert mine == {"model.transformer.h.0.attn/attention": "bf16"}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"nobody.*": "bf16"}, "'nobody.*' matches no operator of Gpt.*its operators are tokens"),
        (
            {"*": "bf16", "blocks.*": "int8"},
            "'blocks.*' matches no operator of Gpt, or only ones that an earlier",
        ),
        ({"*": "int3"}, "there is no precision 'int3'"),
    ],
)
def test_bad_patterns_are_named(patterns: dict[str, str], message: str) -> None:
    with pytest.raises(TrimtabError, match=message.replace("*'", r"\*'").replace("'nobody.", r"'nobody\.")):
        matched(workload_of("gpt"), patterns)
