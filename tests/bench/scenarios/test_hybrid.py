"""The bench of hybrid ranks: every method trains what it says, and the figures are read rightly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.control.plans.plan_cases import net, plan_for

from trimtab.bench.harness import AA
from trimtab.bench.losses import judged
from trimtab.bench.scenarios.hybrid import loss as hybrid_loss
from trimtab.bench.scenarios.hybrid import plan as hybrid_plan
from trimtab.bench.scenarios.hybrid.hybrid import _allocator, figures
from trimtab.bench.scenarios.hybrid.loss import CANARY, runs
from trimtab.bench.scenarios.hybrid.plan import make_task
from trimtab.bench.scenarios.hybrid.ranks import METHODS, Way, gradient_errors, make_trainer, on_rank
from trimtab.codec import Block
from trimtab.control.compression.ddp import compression_of
from trimtab.control.plans.active_plan import plan_text

if TYPE_CHECKING:
    from tests.support.pool import Pool

SIZE = (64, 1, 16, 4)
SPEC: dict[str, Any] = {
    "device": "cpu",
    "speeds": (1.0, 0.5),
    "memory": None,
    "repeats": 1,
    "warmup": 1,
    "block": 2,
    "size": SIZE,
}


def measured(changes: dict[str, Any]) -> dict[str, Any]:
    """With bf16 to choose from, also on CPUs where it is too slow to be probed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_plan, "usual_precisions", lambda *_: ("bf16",))
        return on_rank({**SPEC, **changes}, lambda done, total: None)


def lost(spec: dict[str, Any]) -> dict[str, list[float]]:
    return hybrid_loss.on_rank(spec, lambda done, total: None)


def test_every_method_trains_as_it_says_and_on_to_its_loss(ranks: Pool) -> None:
    result = ranks(2, measured, {}, allow_groups=True)[0]
    rows = {row["method"]: row for row in result["rows"]}
    assert tuple(rows) == METHODS
    assert all(row["fits"] for row in rows.values())
    assert {row["bits"] for row in rows.values()} == {None}
    assert rows["ideal-plan"]["fraction_of_ideal"] == rows["ddp"]["over_ddp"] == 1
    parts = [value for key, value in rows["trimtab"].items() if key.startswith("lost_to_")]
    assert len(parts) == 3
    assert sum(parts) < 1, "balance, variation and exchange: what the step takes beyond the ideal one"
    lowered = result["ways"]["uniform-low"]["precisions"]
    assert lowered[0] == {}, "only the slow rank is lowered, in what was fastest there on this machine"
    assert rows["uniform-low"]["operators_lowered"] == len(lowered[1])
    for method in ("ddp", "shares"):
        assert rows[method]["operators_lowered"] == 0
        assert rows[method]["gradient_error"] < 1e-5
    assert figures(rows, result)["free_over_ddp"] == pytest.approx(
        rows["trimtab"]["samples_per_s"] / rows["ddp"]["samples_per_s"]
    )
    # Whatever the shares came to on this machine, they are uneven in the runs for the losses.
    result["ways"]["shares"]["samples"] = [6, 2]
    todo, names = runs({"pair": result})
    spec = {"device": "cpu", "runs": todo, "seeds": 2, "steps": 2, "size": SIZE}
    verdicts = judged(ranks(2, lost, spec, allow_groups=True)[0])
    assert set(names["pair"]) == {"ddp", "uniform-low", "shares", "trimtab-fixed", "trimtab"}
    # A model that knows nothing has a loss of ln 256 = 5.5.
    assert all(4 < verdicts[name]["final_loss"] < 6 for name in (*names["pair"].values(), CANARY, "ddp" + AA))
    assert verdicts[names["pair"]["shares"]]["gap"] == pytest.approx(0, abs=1e-3)
    assert abs(verdicts["ddp" + AA]["gap"]) > 1e-3, "other draws of the data"


def errors_of(lowered: dict[str, str]) -> dict[str, float]:
    task = make_task(torch.device("cpu"), size=SIZE)
    plain = Way(precisions=({}, {}), samples=(4, 4))
    every = {
        "ddp": plain,
        "low": replace(plain, precisions=({}, lowered)),
        "uneven": replace(plain, samples=(6, 2)),
    }
    return gradient_errors({method: make_trainer(task, way) for method, way in every.items()}, every, task)


def sent_in(bits: int | None) -> object:
    way = Way(precisions=({}, {}), samples=(4, 4), bits=bits)
    compression = compression_of(make_trainer(make_task(torch.device("cpu"), size=SIZE), way).model)
    return compression and compression.codec


def test_methods_without_a_plan_send_in_as_many_bits(ranks: Pool) -> None:
    assert ranks(2, sent_in, None)[0] is None
    assert ranks(2, sent_in, 4)[0] == Block(bits=4)


def test_gradient_errors_see_what_is_lowered_and_nothing_else(ranks: Pool) -> None:
    errors, other = ranks(2, errors_of, {"blocks.0.up": "bf16"})
    assert errors == other
    assert errors["ddp"] == 0
    assert errors["uneven"] < 1e-5, "the same samples, dealt otherwise"
    assert 1e-4 < errors["low"] < 0.1
    more = ranks(2, errors_of, {"blocks.0.up": "bf16", "blocks.0.down": "bf16"})[0]
    assert more["low"] > errors["low"]


def test_what_does_not_fit_is_not_run(ranks: Pool) -> None:
    """A model whose activations outweigh its parameters, on a rank that has too little memory for them."""
    result = ranks(2, measured, {"memory": 0.3, "size": (64, 1, 64, 16)}, allow_groups=True)[0]
    rows = {row["method"]: row for row in result["rows"]}
    assert not rows["ddp"]["fits"]
    assert rows["ddp"]["samples_per_s"] is None
    for method in ("trimtab-fixed", "trimtab"):
        assert rows[method]["fits"]
        assert rows[method]["samples_per_s"] > 0


def test_equal_runs_are_trained_once() -> None:
    text = plan_text(plan_for(net()))
    ways = {
        "ddp": {"precisions": [{}, {}], "samples": [24, 24], "bits": None},
        "uniform-low": {"precisions": [{}, {"up": "int8"}], "samples": [24, 24], "bits": None},
        "shares": {"precisions": [{}, {}], "samples": [30, 18], "bits": None},
    }
    of_cluster = {"ways": ways, "plans": {"trimtab": text}}
    todo, names = runs({"a": of_cluster, "b": of_cluster})
    assert list(todo) == ["ddp", "ddp" + AA, "a uniform-low", "a shares", CANARY]
    assert names["a"] == names["b"] == {"ddp": "ddp", "uniform-low": "a uniform-low", "shares": "a shares"}


def test_the_allocator_is_graded_on_what_was_measured() -> None:
    several = {"own": [4.0, 0.0], "bf16": [2.5, 1.0], "int8": [1.0, 6.0]}
    choices = {f"layer{i}": {p: [s, d * (i + 1)] for p, (s, d) in several.items()} for i in range(6)}
    figures_of = _allocator({"a": {"choices": {"slow": choices}}})
    assert figures_of["allocator_gaps"] == 5
    assert 0 <= figures_of["allocator_worst_gap"] <= 0.02
