"""The pool of ranks: right results, and every way a rank can go wrong is reported and survived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.pool import RanksError

if TYPE_CHECKING:
    from tests.support.pool import Pool


def who() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def total(values: torch.Tensor) -> torch.Tensor:
    values = values + dist.get_rank()
    dist.all_reduce(values)
    return values


def train_a_step() -> list[float]:
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    return [float(value) for value in gradient.flatten()]


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("this rank's own mistake")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()


def print_and_fail() -> None:
    print(f"words of rank {dist.get_rank()}", flush=True)
    raise ValueError


def leave_variable() -> None:
    os.environ["LEFT_BEHIND"] = "1"


def leave_process() -> None:
    subprocess.Popen(["sleep", "300"])


def leave_orphan() -> None:
    subprocess.run("sleep 300 >/dev/null 2>&1 &", shell=True, check=True)


def leave_thread() -> None:
    threading.Thread(target=time.sleep, args=(300,), name="straggler").start()


def leave_group() -> None:
    dist.new_group()


def leave_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def leave_gradients_off() -> None:
    torch.set_grad_enabled(False)


def destroy_own_group() -> None:
    group = dist.new_group()
    dist.barrier(group)
    dist.destroy_process_group(group)


def destroy_everything() -> None:
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_group_has_exactly_the_ranks_asked_for(ranks: Pool, world_size: int) -> None:
    found = ranks(world_size, who)
    assert [(rank, size) for rank, size, _ in found] == [(rank, world_size) for rank in range(world_size)]


def test_ranks_are_processes_that_persist(ranks: Pool) -> None:
    first, second = ranks(2, who), ranks(2, who)
    assert first == second
    assert len({pid for *_, pid in first} | {os.getpid()}) == 3


def test_arguments_and_results_travel(ranks: Pool) -> None:
    for result in ranks(3, total, torch.tensor([1.0, 2.0])):
        torch.testing.assert_close(result, torch.tensor([6.0, 9.0]))


def test_data_parallel_works_as_in_a_job(ranks: Pool) -> None:
    assert ranks(2, train_a_step) == [[1.0] * 4] * 2


def test_exception_shows_the_failing_rank_first_with_its_traceback(ranks: Pool) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(3, fail_on, 1)
    message = str(caught.value)
    assert "this rank's own mistake" in message
    assert "in fail_on" in message
    assert message.index("rank 1 of 3") < message.index("this rank's own mistake")
    assert message.find("rank 0 of 3") not in range(message.index("this rank's own mistake"))
    assert [rank for rank, *_ in ranks(3, who)] == [0, 1, 2]


def test_what_a_failing_rank_printed_is_shown(ranks: Pool) -> None:
    with pytest.raises(RanksError, match="words of rank 0"):
        ranks(1, print_and_fail)


def test_dead_rank_is_reported_with_its_exit_code(ranks: Pool) -> None:
    with pytest.raises(RanksError, match="rank 1 of 2 died with exit code -9"):
        ranks(2, die_on, 1)
    assert [rank for rank, *_ in ranks(2, who)] == [0, 1]


def test_hang_is_cut_with_the_stack_of_each_rank(ranks: Pool) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(2, hang_on, 1, timeout=2)
    message = str(caught.value)
    assert "rank 0 of 2" in message
    assert "rank 1 of 2" in message
    assert message.count("in hang_on") == 2
    assert [rank for rank, *_ in ranks(2, who)] == [0, 1]


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (leave_variable, "LEFT_BEHIND was None and is '1'"),
        (leave_process, "still running: sleep 300"),
        (leave_orphan, "still running: sleep 300"),
        (leave_thread, "thread still running: straggler"),
        (leave_group, "process groups .* still registered"),
        (leave_dtype, r"default dtype: torch\.float32 became torch\.float64"),
        (leave_gradients_off, "gradient mode: True became False"),
    ],
)
def test_leaks_of_a_rank_are_failures(ranks: Pool, function: object, complaint: str) -> None:
    with pytest.raises(RanksError, match=complaint):
        ranks(1, function)  # type: ignore[arg-type]


def test_groups_may_be_left_to_the_end_of_the_job_when_said_so(ranks: Pool) -> None:
    ranks(2, leave_group, allow_groups=True)
    ranks(2, destroy_own_group)
    ranks(2, destroy_everything)


def test_local_function_is_refused_before_it_reaches_a_rank(ranks: Pool) -> None:
    def local() -> None: ...

    with pytest.raises((AttributeError, TypeError), match="local"):
        ranks(1, local)
    ranks(1, who)


def test_ranks_do_not_see_what_a_test_sets_for_itself(ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONLY_HERE", "1")
    ranks.discard()
    assert ranks(1, os.getenv, "ONLY_HERE") == [None]


@pytest.mark.soak
def test_ranks_end_when_the_session_is_killed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import _environment, ranks\n")
    (tmp_path / "test_it.py").write_text(
        "from tests.test_pool import say_and_hang\n"
        f"def test_it(ranks): ranks(2, say_and_hang, {str(tmp_path)!r})\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    session = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        pids = [wait_for(tmp_path / f"pid-{rank}") for rank in range(2)]
    finally:
        session.kill()
        session.wait()
    for pid in pids:
        while running(pid):
            time.sleep(0.02)


def say_and_hang(directory: str) -> None:
    part = Path(directory, f"part-{dist.get_rank()}")
    part.write_text(str(os.getpid()))
    part.rename(Path(directory, f"pid-{dist.get_rank()}"))
    time.sleep(600)


def wait_for(path: Path) -> int:
    while not path.exists():
        time.sleep(0.02)
    return int(path.read_text())


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
