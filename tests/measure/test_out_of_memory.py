"""Probing with too little memory: all ranks step down together, and what fits is recorded."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.measure.probes import CPU, task
from torch import nn

from trimtab.cluster import load_cluster
from trimtab.errors import TrimtabError
from trimtab.measure.cache import ProbeCache
from trimtab.measure.capture.capture import capture_workload
from trimtab.measure.device import DeviceProbe, smaller_batches
from trimtab.measure.operators import StepTrainer
from trimtab.measure.out_of_memory import (
    FailedOnRanksError,
    OutOfMemoryOnRanksError,
    allocations_fail_on_time,
    available_bytes,
    is_out_of_memory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.pool import Pool


@contextmanager
def little_memory(mebibytes: int) -> Iterator[None]:
    """Inside, this process can allocate so much more, and the next allocation really fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = pages * resource.getpagesize() + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def wide(rows: int = 1 << 15) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model and one sample, for which it keeps some 12 MiB and computes little."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    return model, (torch.ones(1, rows, 16),)


def _square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _probe_with(little: Sequence[int], batches: tuple[int, ...], rows: int = 1 << 15) -> Any:
    """The batches that this rank measured, and the one that was too large for it, or the error."""
    model, batch = wide(rows)
    of = task(model, batch, batches=batches, bits=())
    of = replace(of, spec=replace(of.spec, loss=_square))
    cache = ProbeCache("cpu", "x", torch="t", trimtab="v", keep=False)
    rank = dist.get_rank()
    _warm_up(of.spec.model)
    with little_memory(little[rank]):
        try:
            profile, left = DeviceProbe(of, CPU, cache).run(lambda done, total: None)
        except TrimtabError as error:
            return str(error)
    assert not left
    (sizes,) = profile.batches.values()
    return sizes, tuple(profile.too_large.values())


def _warm_up(model: nn.Module) -> None:
    """Libraries allocate when they are first used."""
    trainer = StepTrainer(
        model,
        capture_workload(model, (torch.ones(1, 32, 16),), loss=_square),
        CPU,
        batch_of=lambda samples: (torch.ones(samples, 32, 16),),
        loss_of=_square,
    )
    trainer.timed(1, {})
    trainer.close()


def test_one_rank_without_memory_lets_all_ranks_step_down(ranks: Pool) -> None:
    one, two = ranks(2, _probe_with, [4000, 200], (2, 4, 64))
    assert one == ((2, 4), ())
    assert two == ((2, 4), (64,))


def test_sizes_are_halved_until_they_fit(ranks: Pool) -> None:
    # The second rank starts a round with the largest size, the first ends it with that.
    one, two = ranks(2, _probe_with, [200, 200], (32, 64))
    assert one[0] == two[0]
    assert max(one[0]) <= 8
    assert len(one[0]) == 2
    assert one[1] or two[1]


def test_when_not_even_one_sample_fits_every_rank_says_whose_memory_is_too_small(ranks: Pool) -> None:
    messages = ranks(2, _probe_with, [4000, 50], (1, 2), 1 << 18)
    assert messages[0] == messages[1]
    assert messages[0].startswith("probe: rank 1 ran out of memory with a batch of one sample; use a smaller")


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")


class Failing(nn.Module):
    """A linear layer that runs out of memory in one phase of a step, on one rank."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.linear, self.phase = nn.Linear(4, 4), phase

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.phase == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        y: torch.Tensor = self.linear(x)
        if self.phase == "backward":
            y = _Fails.apply(y)  # type: ignore[no-untyped-call]
        return y.sum()


def _step_fails(phase: str) -> dict[int, int]:
    mine = phase if dist.get_rank() == 1 else ""
    model = Failing("")
    workload = capture_workload(model, (torch.ones(2, 4),))

    def batch_of(samples: int) -> tuple[torch.Tensor, ...]:
        if mine == "batch":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return (torch.ones(samples, 4),)

    trainer = StepTrainer(model, workload, CPU, batch_of=batch_of)
    model.phase = mine
    if mine == "update":
        trainer._optimizer.register_step_pre_hook(_fail)
    with pytest.raises(OutOfMemoryOnRanksError) as raised:
        trainer.timed(2 + dist.get_rank(), {})
    trainer.close()
    return raised.value.samples


def _fail(*_: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("phase", ["batch", "forward", "backward", "update"])
def test_in_every_phase_of_a_step_all_ranks_fail_together(ranks: Pool, phase: str) -> None:
    assert ranks(2, _step_fails, phase) == [{1: 3}, {1: 3}]


def _divide(*_: Any) -> None:
    raise ZeroDivisionError


def _step_fails_otherwise() -> list[str]:
    messages = []
    for phase in ("batch", "forward", "update"):
        mine = phase if dist.get_rank() == 1 else ""
        model = Failing("")
        workload = capture_workload(model, (torch.ones(2, 4),))

        def batch_of(samples: int, mine: str = mine) -> tuple[torch.Tensor, ...]:
            return (torch.ones(samples, 5 if mine == "forward" else 4) if mine != "batch" else [][samples],)

        trainer = StepTrainer(model, workload, CPU, batch_of=batch_of)
        if mine == "update":
            trainer._optimizer.register_step_pre_hook(_divide)
        with pytest.raises((FailedOnRanksError, IndexError, RuntimeError, ZeroDivisionError)) as raised:
            trainer.timed(2, {})
        trainer.close()
        messages.append(f"{raised.type.__name__}: {raised.value}".partition("\n")[0])
    return messages


def test_any_failure_is_that_of_all_ranks_and_says_whose_it_was(ranks: Pool) -> None:
    others, own = ranks(2, _step_fails_otherwise)
    for other, mine, kind in zip(
        others, own, ("IndexError", "RuntimeError", "ZeroDivisionError"), strict=True
    ):
        assert mine.startswith(f"{kind}: ")
        assert other.startswith(f"FailedOnRanksError: rank 1: {kind}: ")


def test_only_a_lack_of_memory_counts() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(
    ("sizes", "too_large", "expected"),
    [
        ((2, 4, 6), 6, (2, 4)),
        ((2, 4, 6), 4, (1, 2)),
        ((2, 4, 6), 2, (1,)),
        ((16, 64), 16, (4, 8)),
        ((1, 2), 1, ()),
    ],
)
def test_the_sizes_after_a_step_down(
    sizes: tuple[int, ...], too_large: int, expected: tuple[int, ...]
) -> None:
    assert smaller_batches(sizes, too_large) == expected


def _allocate_everything() -> str:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with allocations_fail_on_time(CPU):
        torch.empty(1 << 20)
        with pytest.raises(RuntimeError) as raised:
            torch.empty(available_bytes(), dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert is_out_of_memory(raised.value)
    return str(raised.value)


def test_memory_that_the_machine_does_not_have_cannot_be_allocated(ranks: Pool) -> None:
    (message,) = ranks(1, _allocate_everything)
    assert "can't allocate memory" in message


def test_probe_writes_what_fits(tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(
        "import os, resource, torch\n"
        "from tests.measure.test_out_of_memory import wide, _square\n"
        "def make():\n"
        "    if os.environ['RANK'] == '1':\n"
        "        pages = int(open('/proc/self/statm').read().split()[5])\n"
        "        limit = pages * resource.getpagesize() + (600 << 20)\n"
        "        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))\n"
        "    return *wide(), _square\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "trimtab.cli", "probe", "--model", "own_model:make", "--batch", "2,4,256"),
            *("--precision", "", "--bits", "4", "--seconds", "8", "--out", "cluster.json"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 ran out of memory with a batch of 256; measuring 2, 4 instead" in done.stderr
    profile = load_cluster(tmp_path / "cluster.json").profile
    assert profile is not None
    (measured, *_) = profile.devices.values()
    (key,) = measured.batches
    assert key.startswith("Sequential-")
    assert measured.batches == {key: (2, 4)}
    assert any(device.too_large == {key: 256} for device in profile.devices.values())
