"""The GPU's 8-bit operands: interpreted here, compiled ahead for real cards; tests/gpu runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.requirements import requires

pytestmark = requires(modules=["triton"])

ROOT = Path(__file__).parents[2]
POINTERS = {
    "values": "*bf16",
    "scales": "*fp32",
    "factor": "*fp32",
    "calls": "*i64",
    "keys": "*i64",
    "codes": "*i8",
    "transposed": "*i8",
    "largest": "*i32",
    "sums": "*i32",
    "out": "*fp32",
    "row_scale": "*fp32",
    "column_scale": "*fp32",
    "bias": "*fp32",
}


def test_interpreted_it_has_no_faults() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.precision.triton_cases"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == []


@pytest.mark.parametrize(("capability", "formats"), [(75, (0,)), (80, (0,)), (90, (0, 1, 2))])
def test_it_compiles_to_the_specified_arithmetic(
    capability: int, formats: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.precision import triton_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for form in formats:
        drawn = {"FORMAT": form, "STOCHASTIC": True}
        rows = drawn | {"OPERAND": 2, "FACTOR": True, "BLOCK": 1024, "CHUNKS": 1}
        tiles = drawn | {"DIRECT": True, "TRANSPOSED": True, "BM": 64, "BN": 64}
        for kernel, constants in ((kernels.quantize_rows, rows), (kernels.quantize_tiles, tiles)):
            assert "fma.rn.f32" not in _ptx(kernel, constants, capability)
    surveyed = {"OPERAND": 2, "STOCHASTIC": True, "ROWS": 16, "BLOCK": 1024}
    assert ".max" in _ptx(kernels.find_largest, surveyed, capability)
    scaled = {"ROW": True, "COLUMN": True, "BIAS": True, "BLOCK": 1024}
    assert "fma.rn.f32" not in _ptx(kernels.dequantize, scaled, capability)


def _ptx(kernel: Any, constants: dict[str, Any], capability: int) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i64" if name == "base" else "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return str(compiled.asm["ptx"])
