"""The GPU's 8-bit operands: interpreted here, compiled ahead for real cards; tests/gpu runs them."""

from __future__ import annotations

import json
import os
import re
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
    "a": "*i8",
    "b": "*i8",
    "out": "*bf16",
    "row_scale": "*fp32",
    "column_scale": "*fp32",
    "bias": "*fp32",
    "sums": "*i32",
    "totals": "*fp32",
}
ALIGNED = {*POINTERS, "columns", "length", "stride_a", "stride_b"}
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes that one program may use, by compute capability."""


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
    from trimtab.precision.gpu import product_kernels as int8_kernels
    from trimtab.precision.gpu import quantize_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for form in formats:
        drawn = {"FORMAT": form, "STOCHASTIC": True, "FACTOR": True}
        rows = drawn | {"OPERAND": 2, "BLOCK": 1024, "CHUNKS": 1}
        tiles = drawn | {"BY_COLUMN": True, "DIRECT": True, "TRANSPOSED": True, "BM": 64, "BN": 64}
        for kernel, constants in ((kernels.quantize_rows, rows), (kernels.quantize_tiles, tiles)):
            assert "fma.rn.f32" not in _compiled(kernel, constants, capability)["ptx"]
    surveyed = {"OPERAND": 2, "STOCHASTIC": True}
    whole = surveyed | {"ROWS": 16, "BLOCK": 1024}
    columns = surveyed | {"FACTOR": True, "WHOLE": False, "TOTALS": True, "BM": 32, "BN": 64, "CHUNKS": 4}
    assert ".max" in _compiled(kernels.find_largest, whole, capability)["ptx"]
    scaled = {"ROW": True, "COLUMN": True, "BIAS": True, "ADD": True, "BLOCK": 1024}
    assert "fma.rn.f32" not in _compiled(int8_kernels.scale_sums, scaled, capability)["ptx"]
    assert _compiled(int8_kernels.transpose, {"BM": 128, "BN": 128}, capability)["cubin"]
    assert ".max" in _compiled(kernels.find_largest_of_columns, columns, capability)["ptx"]


@pytest.mark.parametrize("capability", [80, 86, 89, 90])
def test_the_int8_product_compiles_for_real_cards(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code, with integer tensor-core instructions and no more shared memory than the card has."""
    from trimtab.precision.gpu import product_kernels as kernels
    from trimtab.precision.gpu.products import TILES

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for tile in TILES[max(known for known in TILES if known <= capability)]:
        chosen = {"ROW": True, "COLUMN": True, "BIAS": True, "ADD": False, "EVEN": True, "GROUP": 8}
        sizes = {"BM": tile.rows, "BN": tile.columns, "BK": tile.length}
        compiled = _compiled(
            kernels.multiply, chosen | sizes, capability, warps=tile.warps, stages=tile.stages
        )
        assert re.search(r"mma.*\.s8\.s8", compiled["ptx"])
        assert "fma.rn.f32" not in compiled["ptx"]
        assert len(compiled["cubin"]) > 0
        assert (tile.rows + tile.columns) * tile.length * tile.stages <= SHARED_MEMORY[capability]


def _compiled(
    kernel: Any, constants: dict[str, Any], capability: int, *, warps: int = 4, stages: int = 3
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i64" if name == "base" else "i32")
        for name in kernel.arg_names
    }
    # As in a launch: pointers and strides are multiples of 16.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in ALIGNED}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
