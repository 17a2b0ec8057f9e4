"""Workloads in cluster files: small, equal when restored, and refused when damaged."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from tests.measure.capture.models import MODELS, batch_for

from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_workload, workload_of
from trimtab.strict_files import FileFormat
from trimtab.workload import StoredWorkload, Workload

ADAPTER = TypeAdapter(StoredWorkload)


def text_of(workload: Workload) -> str:
    return ADAPTER.dump_json(StoredWorkload.of(workload), exclude_defaults=True).decode()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_restored_is_equal(name: str) -> None:
    with torch.device("meta"):
        workload = capture_workload(MODELS[name](), batch_for(name, 2))
    assert ADAPTER.validate_json(text_of(workload)).workload == workload


def test_repeated_layers_are_written_twice_at_most() -> None:
    workload = workload_of("gpt2", samples=2)
    stored = StoredWorkload.of(workload)
    assert len(workload.operators) > 300
    assert len(stored.operators) < 80
    assert len(text_of(workload)) < 100_000
    assert stored.workload == workload


def test_a_run_that_differs_is_written() -> None:
    workload = workload_of("gpt", samples=2)
    block = workload.blocks[0]
    odd = block.starts[2] + 1
    operators = list(workload.operators)
    operators[odd] = replace(operators[odd], views=7)
    changed = replace(workload, operators=tuple(operators))
    stored = StoredWorkload.of(changed)
    assert stored.storage_shifts[0][0] is None
    assert stored.storage_shifts[0][1] is not None
    assert stored.workload == changed


def test_every_field_of_a_workload_is_stored_or_follows() -> None:
    assert {f.name for f in fields(Workload)} - {f.name for f in fields(StoredWorkload)} == {
        "version",
        "buckets",
    }


TENSORS: dict[str, dict[str, Any]] = {
    "type": {"dtype": "fp7"},
    "axes": {"growth": [1, 0, 0, 0, 0, 0]},
    "size": {"shape": [-2]},
}


def damaged(change: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(text_of(workload_of("gpt", samples=2)))
    if change == "missing":
        del tree["operators"][0]
    elif change == "pattern":
        tree["operators"] = [o for o in tree["operators"] if o["index"] != tree["blocks"][0]["starts"][1]]
    elif change == "shifts":
        tree["storage_shifts"] = [[1]]
    elif change == "edge":
        tree["operators"][2]["inputs"] = [9999]
    elif change == "storages":
        tree["operators"][2]["output_storages"] = []
    elif change == "edges":
        tree["operators"][2]["inputs"].append(0)
    elif change in TENSORS:
        tree["operators"][2]["outputs"][0] |= TENSORS[change]
    else:
        tree["operators"][2]["surprise"] = 1
    return tree


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", "operators are numbered from 0 in order"),
        ("pattern", "the first two runs of a block are written"),
        ("shifts", "storage_shifts must fit its starts"),
        ("edge", "must be operators before it"),
        ("unknown", "surprise: unknown key"),
        ("type", r"operators\[2\].outputs\[0\].dtype: should be 'fp64', .*, not 'fp7'"),
        ("storages", "must list as many storages as inputs and outputs"),
        ("edges", "must list as many storages as inputs and outputs"),
        ("axes", r"operators\[2\].outputs\[0\]: growth of 6 axes, and shape has 3"),
        ("size", r"operators\[2\].outputs\[0\].shape\[0\]: should be greater than or equal to 0"),
    ],
)
def test_a_damaged_form_is_refused_by_place(change: str, words: str) -> None:
    form = FileFormat(adapter=ADAPTER, noun="a workload", version=1, remedy="probe again", max_bytes=1 << 20)
    with pytest.raises(TrimtabError, match=words):
        form.parse(json.dumps(damaged(change)), source="here")
