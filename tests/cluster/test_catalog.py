"""Names as drivers give them, and what the catalog says of them."""

from __future__ import annotations

import pytest

from trimtab.cluster.catalog import CATALOG, lookup, lookup_typed
from trimtab.precision.devices import cuda_precisions


@pytest.mark.parametrize(
    ("name", "model", "memory"),
    [
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB", 16),
        ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB", 32),
        ("Tesla T4", "T4", 16),
        ("NVIDIA A10", "A10", 24),
        ("NVIDIA A10G", "A10", 24),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 40),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 80),
        ("NVIDIA L4", "L4", 24),
        ("NVIDIA L40S", "L40S", 48),
        ("NVIDIA GeForce RTX 3090", "RTX 3090", 24),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 80),
        ("NVIDIA H100 PCIe", "H100 PCIe", 80),
        ("NVIDIA H200", "H200 SXM", 141),
        ("AMD Instinct MI300X", "MI300X", 192),
        ("AMD EPYC 9654 96-Core Processor", "EPYC 9004 (Zen 4)", None),
        ("AMD EPYC 7R32", "EPYC 7002 (Zen 2)", None),
        ("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", "Xeon 3rd generation (Ice Lake)", None),
        ("13th Gen Intel(R) Core(TM) i7-13700K", "Core 12th to 14th generation", None),
    ],
)
def test_a_drivers_name_is_found(name: str, model: str, memory: float | None) -> None:
    found = lookup(name)
    assert found is not None
    assert (found.model, found.memory_gib, found.estimated) == (model, memory, True)


@pytest.mark.parametrize("name", ["", "NVIDIA B300", "Radeon Vega", "A1000", "T400", "AMD EPYC"])
def test_an_unknown_device_is_no_error(name: str) -> None:
    assert lookup(name) is None


def test_rates_are_those_of_the_devices_own_precisions() -> None:
    for device in CATALOG:
        if device.capability is not None:
            assert set(device.precisions) == set(cuda_precisions(device.capability)), device.model


def test_lower_precision_is_never_listed_as_slower() -> None:
    for device in CATALOG:
        assert min(device.tflops.values()) == device.tflops["fp32"], device.model


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("rtx3090", "RTX 3090"),
        ("RTX-4090", "RTX 4090"),
        ("t4", "T4"),
        ("a100-80gb", "A100 80GB"),
        ("A100", "A100 40GB"),
        ("h100_pcie", "H100 PCIe"),
        ("l40s", "L40S"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("two T4", None),
        ("T4 or so", None),
        ("", None),
    ],
)
def test_a_typed_name_is_found(name: str, model: str | None) -> None:
    device = lookup_typed(name)
    assert (device.model if device is not None else None) == model


def test_every_card_is_found_by_its_own_name() -> None:
    for device in CATALOG:
        if device.kind == "cuda":
            assert lookup_typed(device.model) == device
