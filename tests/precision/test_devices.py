"""What devices offer, and how an unsupported request is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.errors import TrimtabError
from trimtab.precision import devices
from trimtab.precision.devices import cpu_features, cuda_precisions, offers, working_halves
from trimtab.precision.setting import match
from trimtab.precision_names import NOT_ON_GPUS, OPERATOR_PRECISIONS

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "offered"),
    [
        ((6, 1), {"fp32"}),
        ((7, 0), {"fp32", "fp16"}),
        ((7, 5), {"fp32", "fp16", "int8"}),
        ((8, 0), {"fp32", "fp16", "int8", "tf32", "bf16"}),
        ((8, 6), {"fp32", "fp16", "int8", "tf32", "bf16"}),
        ((8, 9), {"fp32", "fp16", "int8", "tf32", "bf16", "fp8"}),
        ((9, 0), {"fp32", "fp16", "int8", "tf32", "bf16", "fp8"}),
        ((12, 0), {"fp32", "fp16", "int8", "tf32", "bf16", "fp8"}),
    ],
)
def test_an_nvidia_gpu_offers_what_its_capability_does(
    capability: tuple[int, int], offered: set[str]
) -> None:
    assert set(cuda_precisions(capability)) == offered


def test_this_cpu_offers_int8_only_where_sums_cannot_saturate() -> None:
    exact = bool(cpu_features() & {"vnni", "i8mm"})
    assert ("int8" in offers(CPU)["linear"]) == exact
    assert offers(CPU)["embedding"] == offers(CPU)["attention"] == ("fp32", "bf16", "fp16")
    assert "fp8" not in offers(CPU)["linear"]


def test_a_device_nothing_is_known_of_is_tried() -> None:
    assert working_halves(CPU) == ("fp32", "bf16", "fp16")


@pytest.mark.parametrize(("name", "pattern"), [("fp8", "0"), ("tf32", "*"), ("fp8", "*")])
def test_a_refusal_lists_what_the_device_offers(name: str, pattern: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(
        TrimtabError, match=rf"0: this CPU .* does not offer {name} .*it offers fp32, bf16, fp16"
    ):
        set_precision(model, {pattern: name})
    assert "forward" not in model[0].__dict__


def test_bf16_is_refused_on_a_card_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_v100(device: torch.device) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(OPERATOR_PRECISIONS, cuda_precisions((7, 0)))

    monkeypatch.setattr(devices, "offers", as_v100)
    with pytest.raises(
        TrimtabError, match=r"does not offer bf16 for forward of this linear; it offers fp32, fp16$"
    ):
        set_precision(nn.Sequential(nn.Linear(4, 4)), {"0": "bf16"})


def test_a_wildcard_skips_what_the_device_offers_for_other_operators_only() -> None:
    on_gpu = {
        kind: tuple(name for name in names if name not in NOT_ON_GPUS.get(kind, ()))
        for kind, names in OPERATOR_PRECISIONS.items()
    }
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4))
    chosen = match(model, {"*": "int8", "?*": "bf16"}, on_gpu)
    assert {name: str(precision) for name, (_, precision) in chosen.items()} == {"0": "bf16", "1": "int8"}
    # A name is not a wildcard: it is refused later, with what the device offers.
    assert set(match(model, {"0": "int8"}, on_gpu)) == {"0"}
