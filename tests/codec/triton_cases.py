"""Random cases for the Triton kernels, and their comparison with the reference, bit by bit.

Run as a script, it checks cases with Triton's interpreter on the CPU and prints what differs as
JSON: the interpreter is chosen for a whole process, when triton is imported.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trimtab.codec.packing import RAW, Packing, Segment
from trimtab.codec.reference import ReferenceKernels
from trimtab.random_bits import block_keys, uniform16

if TYPE_CHECKING:
    from trimtab.codec.contract import Kernels

GUARD = 0xA5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One packing, its values, and how the buffers lie."""

    packing: Packing
    seed: int
    kind: str
    """What the values are: see `values` and `_put_on_edges`."""

    shift: int
    """Elements by which the flat buffer is out of alignment."""

    byte_shift: int
    """Bytes by which the payloads are."""

    scale: float
    stochastic: bool
    payloads: int
    layout: str
    """How the payloads of a reduction lie: "rows", "gap" or "scattered"."""

    def __str__(self) -> str:
        segments = " ".join(f"{s.bits}b/{s.block}x{s.numel}@{s.offset}" for s in self.packing.segments)
        return (
            f"{str(self.packing.dtype)[6:]} [{segments}] {self.kind} shift={self.shift}/{self.byte_shift} "
            f"scale={self.scale:g} {'stochastic' if self.stochastic else 'nearest'} "
            f"{self.payloads} {self.layout} seed={self.seed}"
        )


def cases(count: int, seed: int, largest: int, blocks: tuple[int, ...]) -> list[Case]:
    """`count` cases of at most about `largest` elements, which go round bits and block sizes, and one more."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        segments, at = [], rng.choice((0, 0, 3))
        for n in range(rng.choice((1, 1, 2, 5))):
            block = blocks[(i + n) % len(blocks)]
            numel = rng.choice((block * rng.randint(1, 4), rng.randint(1, 3 * block), rng.randint(0, 9)))
            segments.append(
                Segment(
                    offset=at,
                    numel=min(numel, largest),
                    bits=RAW if n == 1 else 1 + (i + n) % 8,
                    block=block,
                    name_hash=rng.getrandbits(64),
                    first_block=rng.choice((0, rng.getrandbits(40))),
                )
            )
            at += segments[-1].numel + rng.choice((0, 0, 5))
        rng.shuffle(segments)
        edge = i % 4 == 1  # these need values that arrive unrounded
        made.append(
            Case(
                packing=Packing(
                    segments=tuple(segments),
                    dtype=torch.float32
                    if edge
                    else rng.choice((torch.float32, torch.float16, torch.bfloat16)),
                ),
                seed=rng.getrandbits(30),
                kind="edge" if edge else rng.choice(("normal", "level", "special", "tiny", "huge")),
                shift=rng.choice((0, 0, 1)),
                byte_shift=rng.choice((0, 0, 8, 1)),
                scale=1.0 if edge else rng.choice((1.0, 1 / 3)),
                stochastic=edge or rng.random() < 0.7,
                payloads=rng.choice((1, 2, 3, 3, 4, 4)),
                layout=rng.choice(("rows", "gap", "scattered")),
            )
        )
    return [_clamped(), *made]


def _clamped() -> Case:
    """A block whose largest element would round past the largest code: its 16 random bits are all ones."""
    seed, name = 5, 3
    keys = block_keys(_stream(seed), name, 0, 2**19, torch.device("cpu"))
    first = int((uniform16(keys, 2)[:, 1] == 0xFFFF).nonzero()[0])
    segment = Segment(offset=0, numel=40, bits=8, block=40, name_hash=name, first_block=first)
    return Case(
        packing=Packing(segments=(segment,), dtype=torch.float32),
        seed=seed,
        kind="edge",
        shift=0,
        byte_shift=0,
        scale=1.0,
        stochastic=True,
        payloads=1,
        layout="rows",
    )


def _stream(seed: int) -> int:
    return random.Random(seed).getrandbits(64)


def values(kind: str, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values that are hard in the way `kind` says."""
    x = torch.randn(count, generator=generator)
    if kind == "level":
        x = torch.where(torch.rand(count, generator=generator) < 0.5, 0.0, -0.0) + x.sign()[:1] * 0.7
    elif kind == "tiny":
        x = x * torch.finfo(torch.float32).tiny
    elif kind == "huge":
        x = x * 3e38
    elif kind == "special":
        hard = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 3.4e38, -3.4e38, 1e-45])
        chosen = hard[torch.randint(8, (count,), generator=generator)]
        x = torch.where(torch.rand(count, generator=generator) < 0.01, chosen, x)
    return x.to(dtype)


def differences(case: Case, kernels: Kernels, device: torch.device, oracle: torch.device) -> list[str]:
    """What `kernels` on `device` do otherwise than the reference on the device `oracle`."""
    packing, reference = case.packing, ReferenceKernels()
    generator = torch.Generator().manual_seed(case.seed)
    stream = _stream(case.seed)
    count = packing.extent + 7
    x = values(case.kind, count, packing.dtype, generator)
    if case.kind == "edge":
        _put_on_edges(x, packing, stream, generator)
    others = [values(case.kind, count, packing.dtype, generator) for _ in range(case.payloads)]
    noise = torch.randint(0, 256, (packing.nbytes,), generator=generator, dtype=torch.uint8)
    mismatches: list[str] = []

    def compare(what: str, ours: torch.Tensor, theirs: torch.Tensor, *, payload: bool = False) -> None:
        wrong = _unequal_payloads(packing, ours.cpu(), theirs.cpu()) if payload else _unequal(ours, theirs)
        if len(wrong):
            mismatches.append(f"{what}: {len(wrong)} differ, first at {int(wrong[0])}")

    def buffer(source: torch.Tensor, shift: int) -> torch.Tensor:
        whole = torch.empty(source.numel() + shift + 16, dtype=source.dtype, device=device)
        whole.view(torch.uint8).fill_(GUARD)
        part = whole[shift : shift + source.numel()]
        part.copy_(source)
        return part

    def blank() -> torch.Tensor:
        return buffer(torch.full((packing.nbytes,), GUARD, dtype=torch.uint8), case.byte_shift)

    settings: dict[str, Any] = {"stream": stream, "scale": case.scale, "stochastic": case.stochastic}
    expected = torch.empty(packing.nbytes, dtype=torch.uint8, device=oracle)
    flat, out = buffer(x, case.shift), blank()
    reference.encode(x.to(oracle), packing, expected, **settings)
    kernels.encode(flat, packing, out, **settings)
    compare("encode", out, expected, payload=True)
    compare("encode touched the values", flat, x)

    for add in (False, True):
        for what, payload in (("", expected), (" of noise", noise.to(oracle))):
            y = x.to(oracle).clone()
            flat = buffer(x, case.shift)
            reference.decode(payload, packing, y, add=add)
            kernels.decode(buffer(payload, case.byte_shift), packing, flat, add=add)
            compare(f"decode{' and add' if add else ''}{what}", flat, y)

    sent = []
    for i, other in enumerate(others):
        sent.append(torch.empty_like(expected))
        reference.encode(other.to(oracle), packing, sent[-1], stream=stream + i + 1 & (1 << 64) - 1)
    y, flat, out = x.to(oracle).clone(), buffer(x, case.shift), blank()
    reference.reduce_encode(y, sent, packing, expected, **settings)
    kernels.reduce_encode(flat, _laid_out(case, sent, buffer), packing, out, **settings)
    compare("reduce_encode's payload", out, expected, payload=True)
    compare("reduce_encode's values", flat, y)
    for guarded in (flat, out):
        around = guarded.untyped_storage().tolist() if guarded.numel() < 64 else None
        if around is not None:
            begin = guarded.storage_offset() * guarded.itemsize
            inside = range(begin, begin + guarded.numel() * guarded.itemsize)
            if any(b != GUARD for i, b in enumerate(around) if i not in inside):
                mismatches.append("wrote outside the buffer")
    return mismatches


def _put_on_edges(x: torch.Tensor, packing: Packing, stream: int, generator: torch.Generator) -> None:
    """Values that the random bits bring exactly to a whole code: one unit in the last place of r decides."""
    for segment in packing.segments:
        if segment.bits == RAW or segment.numel == 0:
            continue
        keys = block_keys(stream, segment.name_hash, segment.first_block, segment.blocks, torch.device("cpu"))
        r = (uniform16(keys, segment.block).double() + 0.5) * 2.0**-16
        top = 2**segment.bits - 1
        t = torch.randint(0, top, r.shape, generator=generator) + 1 - r
        t[:, 0], t[:, 1] = 0, top  # so that a code is 1.0
        x[segment.offset : segment.offset + segment.numel] = t.flatten()[: segment.numel].to(x.dtype)


def _laid_out(case: Case, sent: list[torch.Tensor], buffer: object) -> list[torch.Tensor]:
    assert callable(buffer)
    width = case.packing.nbytes
    if case.layout == "scattered":
        return [buffer(s, case.byte_shift + (8 * i * i) % 40) for i, s in enumerate(sent)]
    rows = buffer(torch.zeros(width * (len(sent) + 1), dtype=torch.uint8), case.byte_shift)
    skipped = case.seed % (len(sent) + 1) if case.layout == "gap" else len(sent)
    places = [rows[i * width : (i + 1) * width] for i in range(len(sent) + 1) if i != skipped]
    for place, s in zip(places, sent, strict=True):
        place.copy_(s)
    return places


def _unequal(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Indices at which floats differ in their bits; one NaN is as good as another."""
    integer = torch.int32 if ours.itemsize == 4 else torch.int16
    a, b = ours.cpu(), theirs.cpu()
    # A view would need the alignment that these buffers may lack.
    same = a.clone().view(integer) == b.clone().view(integer)
    return (~(same | (a.isnan() & b.isnan()))).nonzero().flatten()


def _unequal_payloads(packing: Packing, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    wrong = ours != theirs
    for segment, start in zip(packing.segments, packing.starts, strict=True):
        if segment.bits == RAW:
            end = start + segment.numel * packing.dtype.itemsize
            a, b = (p[start:end].clone().view(packing.dtype) for p in (ours, theirs))
            nan = (a.isnan() & b.isnan()).repeat_interleave(packing.dtype.itemsize)
            wrong[start:end] &= ~nan
    return wrong.nonzero().flatten()


def mend_interpreter() -> None:
    """Give the interpreter what it lacks.

    Rounding to bf16, loops whose bound is a tensor (with numpy ≥ 2.4), and speed in reductions that keep NaN.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    from trimtab.codec import triton_device

    patch = interpreter._patch_lang_tensor
    cast, reduce = interpreter.InterpreterBuilder.cast_impl, interpreter.ReduceOps.apply_impl

    def cast_impl(self: object, src: object, dst_type: object) -> object:
        kinds = (src.dtype.scalar, dst_type.scalar)  # type: ignore[attr-defined]
        if kinds == (tl.float32, tl.bfloat16):
            data = torch.from_numpy(np.array(src.data)).to(torch.bfloat16)  # type: ignore[attr-defined]
            return interpreter.TensorHandle(data.view(torch.uint16).numpy(), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            data = (src.data.astype(np.uint32) << 16).view(np.float32)  # type: ignore[attr-defined]
            return interpreter.TensorHandle(data, tl.float32)
        return cast(self, src, dst_type)

    def apply_impl(self: object, input: object) -> object:  # noqa: A002
        quick = {triton_device.least: np.min, triton_device.most: np.max}.get(self.combine_fn)  # type: ignore[attr-defined]
        if quick:
            return self.min_max(input[0], val_reduce_op=quick)  # type: ignore[attr-defined, index]
        return reduce(self, input)

    def patch_tensor(tensor: object, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patch_tensor
    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter.ReduceOps.apply_impl = apply_impl


def main() -> None:
    """Arguments: how many cases, and the seed."""
    import warnings

    from trimtab.codec.triton_kernels import TritonKernels

    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, where IEEE arithmetic overflows by design
    torch.set_num_threads(1)
    mend_interpreter()
    cpu = torch.device("cpu")
    count, seed = (int(a) for a in sys.argv[1:3])
    blocks = (8, 16, 64, 100, 9, 512, 77, 1024, 3000, 8200)
    report = {}
    for case in cases(count, seed, largest=9000, blocks=blocks):
        mismatches = differences(case, TritonKernels(), cpu, cpu)
        if mismatches:
            report[str(case)] = mismatches
    print(json.dumps(report))


if __name__ == "__main__":
    main()
