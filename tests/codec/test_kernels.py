from __future__ import annotations

import logging
from logging.handlers import BufferingHandler

import pytest
import torch

from trimtab.codec import kernels, native
from trimtab.codec.kernels import kernels_for
from trimtab.environment import logger


def test_cpu_has_the_native_kernels() -> None:
    if not native.available():
        pytest.skip("the C++ kernels are not built")
    assert kernels_for(torch.device("cpu")).name == "native"
    assert kernels_for(torch.device("cpu")) is kernels_for(torch.device("cpu"))


def test_any_other_device_has_the_reference() -> None:
    assert kernels_for(torch.device("meta")).name == "reference"


def test_without_the_library_one_warning_and_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = BufferingHandler(100)
    monkeypatch.setattr(native, "LIBRARY", native.LIBRARY.with_name("absent.so"))
    native.load.cache_clear()
    kernels._cpu.cache_clear()
    log = logger()
    log.addHandler(handler)
    try:
        assert [kernels_for(torch.device("cpu")).name for _ in range(3)] == ["reference"] * 3
    finally:
        log.removeHandler(handler)
        native.load.cache_clear()
        kernels._cpu.cache_clear()
    (record,) = handler.buffer
    assert record.levelno == logging.WARNING
    assert "C++ compiler" in record.getMessage()
