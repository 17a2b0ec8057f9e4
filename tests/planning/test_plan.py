"""Plans as files: read back as written, refused by place, never half-written."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from trimtab.errors import TrimtabError
from trimtab.planning.plan import (
    PLAN_VERSION,
    Choice,
    Plan,
    Predicted,
    Role,
    load_plan,
    parse_plan,
    save_plan,
)
from trimtab.predict.collectives import Route

if TYPE_CHECKING:
    from pathlib import Path


def plan(**changes: Any) -> Plan:
    slow = Role(
        device="slow",
        samples=3,
        precisions={"blocks.0.fc": "int8"},
        compute_s=0.5,
        peak_bytes=1000,
        memory_bytes=2000,
        choices={
            "blocks.0.fc": {"own": Choice(seconds=0.2, damage=0.0), "int8": Choice(seconds=0.1, damage=1e-3)}
        },
    )
    fast = Role(device="fast", samples=5, precisions={}, compute_s=0.5, peak_bytes=1000)
    given: dict[str, Any] = {
        "version": PLAN_VERSION,
        "trimtab": "0.1.0",
        "model": "abc",
        "batch": "free",
        "bits": None,
        "roles": {"fast": fast, "slow": slow},
        "ranks": (("fast", 1), ("slow", 1)),
        "predicted": Predicted(step_s=0.6, plain_step_s=0.9, damage=1e-3, uniform_damage=2e-3),
        "reasons": ("because",),
    }
    return Plan(**{**given, **changes})


@pytest.mark.parametrize("bits", [None, 4, "adaptive"])
def test_a_plan_is_read_back_as_written(tmp_path: Path, bits: Any) -> None:
    written = plan(bits=bits)
    save_plan(written, tmp_path / "p.json")
    read = load_plan(tmp_path / "p.json")
    assert read == written
    assert read.hash == written.hash
    assert read.shares == (5, 3)


def test_a_plan_of_everything_is_read_back_as_written(tmp_path: Path) -> None:
    half = Role(device="fast", samples=4, precisions={}, compute_s=0.5, peak_bytes=1000, tensor_share=0.5)
    written = plan(
        roles={"half": half},
        ranks=(("half", 4),),
        tensor_groups=((0, 3), (1, 2)),
        wrapper="fsdp",
        accumulate=2,
        layer_bits={"head.weight": 2, "embed.weight": None},
        route=Route(method="halving", inside="shared_memory"),
        bucket_cap_mb=4.0,
    )
    save_plan(written, tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json") == written
    assert written.tensor_size == 2
    assert written.batch_size == 8, "ranks of a tensor group have the same samples"


def tree(**changes: Any) -> dict[str, Any]:
    import dataclasses

    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan())))
    found.update(changes)
    return found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"version": 1, "version": 1}', "key 'version' appears twice"),
        ("[]", r"holds \[\], not a plan"),
        ("{}", "version: missing"),
        (json.dumps(tree(version=1)), "version mismatch: found 1, expected 2; make the plan again"),
        (json.dumps(tree(wrapper="fsdp1")), "wrapper: should be 'ddp' or 'fsdp'"),
        (json.dumps(tree(route={"method": "star"})), "route.method"),
        (json.dumps(tree(route={"way": "ring"})), "route.way: unknown key"),
        (json.dumps(tree(route={"spared": [0, 1]})), r"route.spared: ranks \[0, 1\] must be some, not all"),
        (
            json.dumps(tree(route={"spared": [2]})),
            r"route.spared: ranks \[2\] must be some, not all, of 0 to 1",
        ),
        (json.dumps(tree(tensor_groups=[[0]])), "every rank from 0 to 1 must be in one group"),
        (json.dumps(tree(tensor_groups=[[0, 1, 1]])), "every rank from 0 to 1 must be in one group"),
        (json.dumps(tree(tensor_groups=[[0, 1]])), r"ranks \[0, 1\] must have the same samples"),
        (json.dumps(tree(layer_bits={"w": 9})), "layer_bits.w"),
        (json.dumps(tree(accumulate=0)), "accumulate.*greater than or equal to 1"),
        (json.dumps(tree(shares=[1])), "shares: unknown key"),
        (json.dumps({k: v for k, v in tree().items() if k != "bits"}), "bits: missing"),
        (json.dumps(tree(bits=9)), "bits.*less than or equal to 8"),
        (json.dumps(tree(bits="four")), "bits"),
        (json.dumps(tree(batch="half")), "batch: should be 'fixed' or 'free', not 'half'"),
        (json.dumps(tree(ranks=[["gpu", 1]])), "no role 'gpu'; there are fast, slow"),
        (json.dumps(tree(ranks=[["slow", 0]])), "greater than or equal to 1"),
        (
            json.dumps(tree(ranks=[["slow", 10**12]])),
            r"ranks\[0\]\[1\]: should be less than or equal to 1000000",
        ),
        (json.dumps(tree(bucket_cap_mb=1e308)), "bucket_cap_mb: should be less than or equal to"),
        (json.dumps(tree()).replace("2000", "2" * 400), "roles.slow.memory_bytes"),
        (json.dumps(tree()).replace("0.6", "1e300"), "predicted.step_s: should be less than or equal to"),
        (json.dumps(tree(roles={})), "roles"),
        (
            json.dumps(tree()).replace('"compute_s": 0.5', '"compute_s": 0'),
            "roles.fast.compute_s.*greater than 0",
        ),
        (json.dumps(tree()).replace("0.6", "NaN"), "predicted.step_s: should be a finite number"),
        (json.dumps(tree()).replace("0.6", "1e999"), "predicted.step_s"),
    ],
)
def test_a_damaged_plan_is_refused_by_place(text: str, words: str) -> None:
    with pytest.raises(TrimtabError, match=words) as caught:
        parse_plan(text, source="p.json")
    assert str(caught.value).startswith("p.json: ")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="cannot be read: No such file"):
        load_plan(tmp_path / "p.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(TrimtabError, match="not UTF-8"):
        load_plan(tmp_path / "b.json")
    with pytest.raises(TrimtabError, match="cannot be written: No such file"):
        save_plan(plan(), tmp_path / "none" / "p.json")


def test_a_plan_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.json"
    save_plan(plan(), path)
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(TrimtabError, match="No space left"):
        save_plan(plan(bits=4), path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_words_and_predictions_do_not_change_the_hash() -> None:
    base = plan()
    assert replace(base, reasons=("other",)).hash == base.hash
    for change in (
        {"bits": 4},
        {"layer_bits": {"w": 2}},
        {"route": Route(method="ring")},
        {"route": Route(spared=(1,))},
        {"wrapper": "fsdp"},
        {"accumulate": 2},
        {"bucket_cap_mb": 4.0},
    ):
        assert replace(base, **change).hash != base.hash, change
    roles = {**base.roles, "slow": replace(base.roles["slow"], samples=2)}
    assert replace(base, roles=roles).hash != base.hash
