"""`trimtab.compress` on real DDP jobs: what DDP does around a hook must not disturb it."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import trimtab
from trimtab.codec import Block, Codec, PowerSGD, TopK
from trimtab.control.compression.ddp import compression_of

if TYPE_CHECKING:
    from tests.support.pool import Pool


class Net(nn.Module):
    """Two large layers, a norm, and a branch that may stay unused."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.up = nn.Linear(32, width)
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, 32)
        self.spare = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.norm(self.up(x))))
        return y + self.spare(x).mean() if spare else y


def make(codec: Codec | None, *, width: int = 96, **arguments: Any) -> Ddp:
    torch.manual_seed(0)
    keys = ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    ddp = Ddp(Net(width), **{key: arguments.pop(key) for key in keys if key in arguments})
    return trimtab.compress(ddp, codec, **arguments) if codec is not None else ddp


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step * 100 + rank))


def loss_of(ddp: Any, step: int, **arguments: Any) -> torch.Tensor:
    x = batch(step)
    return F.mse_loss(ddp(x, **arguments), x.flip(1))


def gradients(ddp: Ddp) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None}


def train(ddp: Ddp, steps: range, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in steps:
        optimizer.zero_grad()
        loss_of(ddp, step, spare=True).backward()
        optimizer.step()
    return optimizer


def same_everywhere(tensors: dict[str, torch.Tensor]) -> bool:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(other, flat) for other in everyone)


def two_hundred_steps() -> tuple[bool, bool, float, float]:
    ddp = make(Block(), bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    agree = True
    losses = []
    for step in range(200):
        optimizer.zero_grad()
        loss = loss_of(ddp, step, spare=True)
        loss.backward()
        agree = agree and same_everywhere(gradients(ddp))
        optimizer.step()
        losses.append(float(loss))
    return agree, same_everywhere(dict(ddp.module.named_parameters())), losses[0], losses[-1]


@pytest.mark.parametrize("world", [2, 3])
def test_replicas_agree_to_the_bit_over_200_steps(ranks: Pool, world: int) -> None:
    for gradients_agree, parameters_agree, first, last in ranks(world, two_hundred_steps, allow_groups=True):
        assert gradients_agree
        assert parameters_agree
        assert last < 0.7 * first


def gradients_with_buckets_of(cap_mb: float, steps: int) -> dict[str, torch.Tensor]:
    ddp = make(Block(), bucket_cap_mb=cap_mb)
    for step in range(steps):
        ddp.zero_grad()
        loss_of(ddp, step, spare=True).backward()
    return gradients(ddp)


def test_the_bucket_a_parameter_travels_in_changes_nothing(ranks: Pool) -> None:
    """DDP rebuilds its buckets after the first backward: other sizes, other order."""
    many = ranks(2, gradients_with_buckets_of, 0.01, 3, allow_groups=True)[0]
    one = ranks(2, gradients_with_buckets_of, 100, 3, allow_groups=True)[0]
    for name in one:
        assert torch.equal(many[name], one[name]), name


def all_against_exact(world_codec: Codec) -> list[tuple[str, float]]:
    errors = []
    plain, compressed = make(None), make(world_codec, bucket_cap_mb=0.02)
    for ddp in (plain, compressed):
        loss_of(ddp, 0, spare=True).backward()
    for name, exact in gradients(plain).items():
        got = gradients(compressed)[name]
        errors.append((name, float((got - exact).norm() / exact.norm())))
    return errors


@pytest.mark.parametrize("codec", [Block(bits=8), Block(bits=4), PowerSGD(rank=32)])
def test_every_gradient_is_reduced_and_small_ones_exactly(ranks: Pool, codec: Codec) -> None:
    bound = {Block(bits=8): 0.03, Block(bits=4): 0.35, PowerSGD(rank=32): 1e-4}[codec]
    for errors in ranks(3, all_against_exact, codec, allow_groups=True):
        for name, error in errors:
            assert error < (1e-5 if name.endswith("bias") or "norm" in name else bound), name


def accumulate(compressed: bool) -> dict[str, torch.Tensor]:
    ddp = make(Block(bits=8) if compressed else None)
    for step in range(4):
        with ddp.no_sync() if step < 3 else contextlib.nullcontext():
            loss_of(ddp, step, spare=True).backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    return gradients(ddp)


def test_accumulation_and_clipping(ranks: Pool) -> None:
    plain = ranks(2, accumulate, False, allow_groups=True)
    compressed = ranks(2, accumulate, True, allow_groups=True)
    for name, exact in plain[0].items():
        assert torch.equal(compressed[0][name], compressed[1][name])
        torch.testing.assert_close(compressed[0][name], exact, rtol=0, atol=0.05 * float(exact.abs().max()))


def unused_on_some() -> tuple[bool, int]:
    ddp = make(Block(), find_unused_parameters=True)
    agree = True
    for step in range(4):
        ddp.zero_grad()
        loss_of(ddp, step, spare=bool(dist.get_rank() == 0 and step % 2)).backward()
        agree = agree and same_everywhere(gradients(ddp))
    return agree, len(gradients(ddp))


def test_unused_parameters(ranks: Pool) -> None:
    for agree, count in ranks(2, unused_on_some, allow_groups=True):
        assert agree
        assert count == 8


def uneven_inputs() -> tuple[bool, int]:
    ddp = make(Block())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            loss_of(ddp, step, spare=True).backward()
            optimizer.step()
    return same_everywhere(dict(ddp.module.named_parameters())), trimtab.state_dict(ddp)["compression"][
        "step"
    ]


def test_join_with_uneven_inputs(ranks: Pool) -> None:
    assert ranks(2, uneven_inputs, allow_groups=True) == [(True, 5), (True, 5)]


def overflow_on_one_rank() -> tuple[float, float, bool]:
    ddp = make(Block())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = ddp.module.down.weight.detach().clone()
    loss = loss_of(ddp, 0, spare=True)
    if dist.get_rank() == 1:
        loss = loss * math.inf
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale_before = scaler.get_scale()
    scaler.update()
    return scale_before, scaler.get_scale(), torch.equal(before, ddp.module.down.weight)


def test_grad_scaler_sees_an_overflow_and_skips_the_step(ranks: Pool) -> None:
    for before, after, untouched in ranks(2, overflow_on_one_rank, allow_groups=True):
        assert after < before
        assert untouched


def mixed_types() -> bool:
    torch.manual_seed(0)
    net = Net()
    net.down.to(torch.bfloat16)
    net.spare.double()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.gelu(self.net.norm(self.net.up(x))).bfloat16()
            out: torch.Tensor = self.net.down(hidden).double() + self.net.spare(x.double()).mean()
            return out

    ddp = trimtab.compress(Ddp(Mixed()), Block())
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(step)).square().mean().backward()
    by_type = gradients(ddp)
    assert {gradient.dtype for gradient in by_type.values()} == {torch.float32, torch.bfloat16, torch.float64}
    return same_everywhere({name: gradient.double() for name, gradient in by_type.items()})


def test_a_model_of_several_types(ranks: Pool) -> None:
    assert ranks(3, mixed_types, allow_groups=True) == [True] * 3


def with_overrides() -> dict[str, tuple[int, int, int]]:

    ddp = make(
        Block(), overrides={"up.*": Block(bits=8, block=64), "down.weight": None, "spare.bias": Block(bits=2)}
    )
    loss_of(ddp, 0, spare=True).backward()
    compression = compression_of(ddp)
    assert compression is not None
    return compression.pieces


def test_overrides_by_name(ranks: Pool) -> None:
    pieces = ranks(2, with_overrides, allow_groups=True)[0]
    assert pieces["up.weight"] == (32 * 96, 8, 64)
    assert pieces["up.bias"] == (96, 8, 64)
    assert pieces["down.weight"][1] == 0
    assert pieces["spare.weight"] == (32 * 96, 4, 1024)
    assert pieces["spare.bias"][1] == 2
    assert pieces["norm.weight"][1] == 0


def refused(case: str) -> str:
    try:
        if case == "not ddp":
            trimtab.compress(Net())  # type: ignore[arg-type]
        elif case == "no module":
            trimtab.compress(None)  # type: ignore[arg-type]
        elif case == "pattern":
            make(Block(), overrides={"typo.*": None})
        elif case == "twice":
            trimtab.compress(make(Block()), Block())
        elif case == "family":
            make(PowerSGD(), overrides={"up.weight": Block()})
        elif case == "own hook":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            ddp = make(None)
            ddp.register_comm_hook(None, fp16_compress_hook)
            trimtab.compress(ddp, Block())
        elif case == "bits":
            Block(bits=9)
    except ValueError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("not ddp", "wrap the model first"),
        ("no module", "got NoneType"),
        ("pattern", "no parameter matches the pattern 'typo.*'; parameters are called up.weight"),
        ("twice", "already compressed"),
        ("family", "cannot be combined with"),
        ("own hook", "hook of its own"),
        ("bits", "bits must be 1 to 8"),
    ],
)
def test_mistakes_are_refused_in_words(ranks: Pool, case: str, words: str) -> None:
    for message in ranks(2, refused, case, allow_groups=True):
        assert words in message


def other_settings_on_rank_one() -> str:
    try:
        ddp = make(Block(bits=4 + dist.get_rank()))
        loss_of(ddp, 0, spare=True).backward()
    except Exception as error:
        return str(error)
    return "not refused"


def test_ranks_with_other_settings_end_with_an_error_not_a_hang(ranks: Pool) -> None:
    for message in ranks(2, other_settings_on_rank_one, allow_groups=True):
        assert "compress gradients with other settings" in message


def disabled() -> tuple[str, bool]:
    import os

    os.environ["TRIMTAB_DISABLE"] = "1"
    try:
        ddp = make(Block())
    finally:
        del os.environ["TRIMTAB_DISABLE"]
    plain = make(None)
    for model in (ddp, plain):
        loss_of(model, 0, spare=True).backward()
    return trimtab.explain(ddp), all(torch.equal(gradients(ddp)[n], g) for n, g in gradients(plain).items())


def test_disabling_leaves_ddp_exactly_as_it_is(ranks: Pool) -> None:
    for words, exact in ranks(2, disabled, allow_groups=True):
        assert "TRIMTAB_DISABLE" in words
        assert exact


def top_k_trains() -> tuple[float, float]:
    ddp = make(TopK(0.05))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_of(ddp, 0, spare=True)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses[0], losses[-1]


def test_top_k_with_its_memory_trains(ranks: Pool) -> None:
    for first, last in ranks(2, top_k_trains, allow_groups=True):
        assert last < 0.8 * first


def compiled() -> tuple[bool, str]:
    torch._dynamo.reset()
    ddp = make(Block())
    model = torch.compile(ddp, backend="aot_eager")
    for step in range(3):
        ddp.zero_grad()
        loss_of(model, step, spare=True).backward()
    agree = same_everywhere(gradients(ddp))
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        make(Block())
    except trimtab.TrimtabError as error:
        return agree, str(error)
    finally:
        torch._dynamo.config.optimize_ddp = True
    return agree, "not refused"


def test_torch_compile(ranks: Pool) -> None:
    for agree, message in ranks(2, compiled, allow_groups=True):
        assert agree
        assert "python_reducer" in message
