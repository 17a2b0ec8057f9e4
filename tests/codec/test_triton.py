"""The Triton kernels give the reference's bits: interpreted anywhere; tests/gpu has them compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.requirements import requires

from trimtab.codec.packing import RAW, Packing, Segment

pytestmark = requires(modules=["triton"])

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("cases", "seed"), [(6, 0), *(pytest.param(100, seed, marks=pytest.mark.soak) for seed in (0, 1))]
)
def test_interpreted_kernels_give_the_reference_bits(cases: int, seed: int) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.codec.triton_cases", str(cases), str(seed)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {}


@pytest.mark.parametrize(("bits", "capability"), [(RAW, 90), (3, 75), (3, 80), (3, 90), (4, 90)])
def test_compiled_code_is_the_specified_arithmetic(
    bits: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for ptx in _compiled(bits, capability):
        assert "fma.rn.f32" not in ptx
        assert ".ftz" not in ptx
        assert "div.approx" not in ptx
        assert "div.full" not in ptx
        assert "ld.global.v4.b32" in ptx, "values are not read 16 bytes at a time"


def test_rows_of_one_buffer_are_reduced_where_they_lie() -> None:
    from trimtab.codec.triton_kernels import spacing

    assert spacing([1000]) == (0, 1)
    assert spacing([1000, 1064, 1128]) == (64, 3)
    assert spacing([1000, 1064, 1192, 1256]) == (64, 2)
    assert spacing([1000, 1128, 1192]) == (64, 1)
    assert spacing([1128, 1064, 1000]) == (-64, 3)
    assert spacing([1000, 1064, 1200]) is None
    assert spacing([1000, 1128, 1256, 1320]) is None


def _compiled(bits: int, capability: int) -> list[str]:
    """PTX of the kernels of a group, for a GPU that need not be here."""
    from trimtab.codec import triton_device, triton_raw
    from trimtab.codec.triton_kernels import groups

    segment = Segment(offset=0, numel=5000, bits=bits)
    packing = Packing(segments=(segment,), dtype=torch.float32)
    (group,) = groups(packing, torch.device("cpu"))
    constants = group.constants(packing.dtype, wide=True)
    kernels: list[tuple[Any, dict[str, Any]]]
    if bits == RAW:
        kernels = [(triton_raw.encode_raw, {"COUNT": 2}), (triton_raw.decode_raw, {"ADD": True})]
    else:
        kernels = [
            (triton_device.encode, {"COUNT": 0, "STOCHASTIC": True}),
            (triton_device.encode, {"COUNT": 2, "STOCHASTIC": False}),
            (triton_device.decode, {"ADD": True}),
        ]
    return [_ptx(kernel, constants | own, capability, group.warps) for kernel, own in kernels]


def _ptx(kernel: Any, constants: dict[str, Any], capability: int, warps: int) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = dict.fromkeys(("payload", "payloads", "out"), "*u8")
    pointers |= {"flat": "*fp32", "owners": "*i32", "table": "*i64"}
    types = {"stream": "u64", "scale": "fp32", "stride": "i64", "gap": "i32"} | pointers
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in pointers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return str(compiled.asm["ptx"])
