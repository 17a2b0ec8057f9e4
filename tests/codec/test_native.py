"""The C++ kernels against the reference, bit by bit, on every instruction set of this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from tests.codec.cases import Case, cases, payload, same, values

from trimtab.codec import native
from trimtab.codec.native import INSTRUCTION_SETS, NativeKernels
from trimtab.codec.packing import DTYPES, Packing, Segment
from trimtab.codec.reference import ReferenceKernels
from trimtab.errors import TrimtabError

if not native.available():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

BEST = INSTRUCTION_SETS.index(NativeKernels().instruction_set)
HERE = INSTRUCTION_SETS[1 : BEST + 1]
REFERENCE = ReferenceKernels()


def check(case: Case, kernels: NativeKernels) -> None:
    packing = case.packing
    raw = [s for s in packing.segments if s.bits == 0]
    expected, actual = case.out(), case.out()
    REFERENCE.encode(case.flat, packing, expected, **case.keywords)
    kernels.encode(case.flat, packing, actual, **case.keywords)
    # The bytes of a raw NaN are open (docs/wire-format.md): then its decoded values are compared, below.
    if not (raw and case.flat.isnan().any()):
        assert torch.equal(expected, actual)

    for data in (expected, actual, *case.peers):
        for add in (False, True):
            y, z = case.flat.clone(), case.flat.clone()
            REFERENCE.decode(data, packing, y, add=add)
            kernels.decode(data, packing, z, add=add)
            assert same(y, z), f"decode, add={add}"

    y, z = case.flat.clone(), case.flat.clone()
    REFERENCE.decode_sum([expected, *case.peers], packing, y)
    kernels.decode_sum([expected, *case.peers], packing, z)
    assert same(y, z), "decode_sum"

    y, z = case.flat.clone(), case.flat.clone()
    REFERENCE.reduce_encode(y, case.peers, packing, expected, **case.keywords)
    kernels.reduce_encode(z, case.peers, packing, actual, **case.keywords)
    assert same(y, z)
    if not raw:
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("instruction_set", HERE)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases())
def test_same_bits_as_the_reference(instruction_set: str, case: Case) -> None:
    check(case, NativeKernels(instruction_set=instruction_set))


@pytest.mark.parametrize("instruction_set", HERE)
@pytest.mark.parametrize("bits", range(9))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width_and_type(instruction_set: str, bits: int, dtype: torch.dtype) -> None:
    segments = (
        Segment(offset=1, numel=5000, bits=bits, block=1024, first_block=3),
        Segment(offset=5001, numel=9999, bits=bits, block=9000, name_hash=2**63),
    )
    packing = Packing(segments=segments, dtype=dtype)
    flat = values("normal", packing.extent, dtype, bits)
    peers = (payload(packing.nbytes, 1), payload(packing.nbytes, 2, 3))
    for stochastic in (False, True):
        check(
            Case(packing, flat, peers, 1, 7, 0.5, stochastic), NativeKernels(instruction_set=instruction_set)
        )


@pytest.mark.parametrize("bits", [0, 3, 4])
def test_threads_change_no_bit(bits: int) -> None:
    """Enough work for three threads, in segments whose blocks the shares cut across."""
    sizes = (10, 900_000, 33, 1_500_001)
    segments, at = [], 0
    for size in sizes:
        segments.append(Segment(offset=at, numel=size, bits=bits, block=1000, name_hash=size))
        at += size
    packing = Packing(segments=tuple(segments), dtype=torch.float32)
    flat = values("normal", packing.extent, torch.float32, 0)
    results = []
    for threads in (1, 3):
        kernels, out, y = NativeKernels(threads=threads), payload(packing.nbytes, 5), flat.clone()
        kernels.encode(flat, packing, out, stream=5)
        kernels.decode(out, packing, y, add=True)
        kernels.reduce_encode(y, [out], packing, total := payload(packing.nbytes, 6), stream=6)
        results.append((out, total, y))
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)


def test_threads_after_a_fork() -> None:
    packing = Packing(segments=(Segment(offset=0, numel=3_000_000, bits=4),), dtype=torch.float32)
    flat, out = torch.ones(packing.extent), torch.empty(packing.nbytes, dtype=torch.uint8)
    kernels = NativeKernels(threads=3)
    kernels.encode(flat, packing, out, stream=1)
    child = os.fork()
    if child == 0:
        kernels.encode(flat, packing, out, stream=1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("instruction_set", HERE)
def test_flushing_denormals_changes_no_bit(instruction_set: str) -> None:
    packing = Packing(segments=(Segment(offset=0, numel=3000, bits=4, block=100),), dtype=torch.float32)
    flat = values("subnormal", 3000, torch.float32, 3)
    flat[500:1000] *= 1e3
    case = Case(packing, flat, (), 0, 1, 1.0, True)
    expected, actual, y, z = case.out(), case.out(), flat.clone(), flat.clone()
    REFERENCE.encode(flat, packing, expected, stream=1)
    REFERENCE.decode(expected, packing, y, add=True)
    assert torch.set_flush_denormal(True)
    try:
        kernels = NativeKernels(instruction_set=instruction_set)
        kernels.encode(flat, packing, actual, stream=1)
        kernels.decode(expected, packing, z, add=True)
        still = (torch.tensor([1e-40]) * 1.0).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(expected, actual)
    assert torch.equal(y, z)
    assert still, "the caller's own mode must come back"


def test_sizes_that_do_not_fit_are_refused() -> None:
    packing = Packing(segments=(Segment(offset=4, numel=100, bits=4, block=16),), dtype=torch.float32)
    kernels, flat = NativeKernels(), torch.zeros(104)
    out = torch.zeros(packing.nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="wrong payload size"):
        kernels.decode(out[:-1], packing, flat)
    with pytest.raises(ValueError, match="reaches element 104"):
        kernels.encode(flat[:-1], packing, out, stream=0)
    with pytest.raises(ValueError, match="wrong payload size"):
        kernels.reduce_encode(flat, [out, out[:-8]], packing, out, stream=0)
    with pytest.raises(ValueError, match="wrong payload size"):
        kernels.decode_sum([out, out[:-8]], packing, flat)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        kernels.encode(flat.half(), packing, out, stream=0)
    with pytest.raises(ValueError, match="CPU"):
        kernels.encode(flat.to("meta"), packing, out.to("meta"), stream=0)


def test_the_library_checks_for_itself() -> None:
    """Python's checks aside: a plan that disagrees with the sizes comes back as a status, untouched."""
    packing = Packing(segments=(Segment(offset=0, numel=100, bits=4, block=16),), dtype=torch.float32)
    kernels, flat = NativeKernels(), torch.zeros(100)
    kernels.encode(flat, packing, out := torch.zeros(packing.nbytes, dtype=torch.uint8), stream=0)
    address = packing.prepared[kernels._key][0]
    library = native.load()
    for numel, nbytes in ((99, out.numel()), (100, out.numel() - 8), (100, out.numel() + 8), (-1, 0)):
        arguments = address, flat.data_ptr(), numel, out.data_ptr(), nbytes, 0, 1.0, 0
        assert library.trimtab_encode(*arguments) in (2, 3)
    assert (
        library.trimtab_encode(address, flat.data_ptr() + 1, 99, out.data_ptr(), out.numel(), 0, 1.0, 0) == 2
    )


def test_a_processor_without_the_set_is_refused() -> None:
    if len(HERE) == len(INSTRUCTION_SETS) - 1:
        pytest.skip("this processor has every instruction set")
    packing = Packing(segments=(), dtype=torch.float32)
    kernels = NativeKernels(instruction_set=INSTRUCTION_SETS[-1])
    with pytest.raises(ValueError, match="lacks"):
        kernels.encode(torch.empty(0), packing, torch.empty(0, dtype=torch.uint8), stream=0)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="avx2"):
        NativeKernels(instruction_set="sse9")
    with pytest.raises(ValueError, match="threads"):
        NativeKernels(threads=0)


def test_command_names_the_instruction_set() -> None:
    actual = subprocess.run(
        [sys.executable, "-m", "trimtab.codec.native"], capture_output=True, text=True, check=True
    )
    assert actual.stdout == f"fast CPU kernels: {INSTRUCTION_SETS[BEST]} (libtrimtab.so)\n"
    assert actual.stderr == ""


def test_missing_or_of_another_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    native.load.cache_clear()
    try:
        monkeypatch.setattr(native, "VERSION", 3)
        with pytest.raises(TrimtabError, match="found 2, expected 3"):
            native.load()
        monkeypatch.setattr(native, "LIBRARY", native.LIBRARY.with_name("absent.so"))
        assert not native.available()
        native.main()
        printed = capsys.readouterr().out
        assert "C++ compiler" in printed
        assert "make venv" in printed
        monkeypatch.setattr(native, "LIBRARY", native.LIBRARY.with_name("native.py"))
        with pytest.raises(TrimtabError, match="does not load"):
            native.load()
    finally:
        native.load.cache_clear()
