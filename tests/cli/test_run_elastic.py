"""`trimtab run` with restarts and with nodes that come and go: training continues, and what happened is said."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.control.plans.plan_cases import net, plan_for, role

from trimtab.planning.plan import save_plan

SCRIPT = '''
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.control.plans.plan_cases import corpus, net
import trimtab
from trimtab.codec import Block

folder, steps, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()

def wait_until_enough():
    """Where nodes come and go: until the test has seen all that it wants to see."""
    flag = torch.zeros(1)
    while not flag:
        flag.fill_(os.path.exists(f"{folder}/enough"))
        dist.broadcast(flag, 0)
        time.sleep(0.05)

def train(path, steps, die_at=None):
    data = trimtab.loader(corpus(48), 12, adjust=None)
    ddp = DistributedDataParallel(net())
    if mode != "plan":
        trimtab.compress(ddp, Block(bits=3), error_feedback=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0)
    step = 0
    if path is not None and os.path.exists(path):
        saved = torch.load(path)
        step = saved["step"]
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        trimtab.load_state_dict(ddp, saved["trimtab"])
        data.load_state_dict(saved["data"])
    os.write(1, f"rank {rank} of {world} from step {step}\\n".encode())
    while step < steps:
        for (batch,) in data:
            if mode != "own" and step == steps // 2:
                wait_until_enough()
            data.weigh((ddp(batch) - batch).square().mean()).backward()
            if step == die_at and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if path is not None:
                dist.barrier()
                state = {"step": step, "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(),
                         "trimtab": trimtab.state_dict(ddp), "data": data.state_dict()}
                if mode == "own" or rank == 0:
                    torch.save(state, f"{path}.part")
                    os.replace(f"{path}.part", path)
                dist.barrier()
            if step == steps:
                break
    weights = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    inputs = corpus(48).tensors[0]
    with torch.no_grad():
        return weights, (ddp.module(inputs) - inputs).square().mean().item()

if mode == "own":
    whole = train(None, steps)[0] if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else None
    if whole is not None and rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    weights, _ = train(f"{folder}/rank-{rank}.pt", steps, steps // 2 if first else None)
    same = torch.equal(weights, torch.load(f"{folder}/whole.pt"))
    os.write(1, f"rank {rank} same {same}\\n".encode())
else:
    _, loss = train(f"{folder}/checkpoint.pt", steps)
    os.write(1, f"rank {rank} of {world} loss {loss:.4f}\\n".encode())
dist.barrier()
dist.destroy_process_group()
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def command(folder: Path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "trimtab.cli",
        "run",
        *arguments[:-2],
        "train.py",
        str(folder),
        *arguments[-2:],
    ]


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": str(temporary)}


@pytest.mark.timeout(300)
def test_a_killed_rank_is_started_again_and_training_ends_with_the_same_bits(folder: Path) -> None:
    done = subprocess.run(
        command(folder, "--max-restarts", "2", "--nproc-per-node", "2", "8", "own"),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d same \w+", done.stdout)) == ["rank 0 same True", "rank 1 same True"]
    assert re.findall(r"rank 1 of 2 from step (\d)", done.stdout) == ["0", "0", "4"], "whole, killed, resumed"
    (lost,) = [line for line in done.stderr.splitlines() if line.startswith("trimtab: restart")]
    assert "restart 1 of 2 after rank 1 was lost: ended by signal 9 (SIGKILL)" in lost
    resumed = "".join(line for line in done.stderr.splitlines() if line.startswith("trimtab: resumed"))
    assert "bits and random streams continue" in resumed
    assert "error feedback continues on ranks that load their own state" in resumed
    assert list((folder / "tmp").glob("trimtab*")) == [], "nothing is left behind"


class Nodes:
    """Launchers of one rank each that meet over loopback; all of them write into one file."""

    def __init__(self, folder: Path, most: int, *arguments: str) -> None:
        self._folder, self._most, self._arguments = folder, most, arguments
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = int(free.getsockname()[1])
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._log = folder / "log"
        self._log.touch()

    def join(self) -> subprocess.Popen[bytes]:
        """Start one more node; the first hosts the rendezvous."""
        conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
        nodes = ("--nnodes", f"1:{self._most}", "--nproc-per-node", "1", "--max-restarts", "3")
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "job")
        with self._log.open("ab") as log:
            launcher = subprocess.Popen(
                command(self._folder, *nodes, *meeting, "--rdzv-conf", conf, *self._arguments),
                cwd=self._folder,
                env=environment(self._folder),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.launchers.append(launcher)
        self._until(lambda: bool(self._listening()), "the rendezvous")
        return launcher

    def wait_for(self, pattern: str) -> re.Match[str]:
        self._until(lambda: re.search(pattern, self.text) is not None, pattern)
        match = re.search(pattern, self.text)
        assert match is not None
        return match

    @property
    def text(self) -> str:
        return self._log.read_text()

    def _listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def _until(self, condition: object, what: str) -> None:
        deadline = time.monotonic() + 240
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.text}"
            time.sleep(0.1)


@contextmanager
def nodes(folder: Path, most: int, *arguments: str) -> Iterator[Nodes]:
    made = Nodes(folder, most, *arguments)
    try:
        yield made
    finally:
        for launcher in made.launchers:
            launcher.kill()  # its ranks end with it
            launcher.wait()


def finish(job: Nodes, folder: Path, left: list[subprocess.Popen[bytes]]) -> None:
    """Let the job end, well, and see that it left nothing behind."""
    (folder / "enough").touch()
    assert [launcher.wait(240) for launcher in left] == [0] * len(left), job.text
    losses = re.findall(r"of (\d) loss ([\d.]+)", job.text)
    assert len(losses) == len(left)
    assert all(int(world) == len(left) and float(loss) < 0.98 for world, loss in losses), losses


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_others_go_on_without_a_node_that_was_killed_and_with_a_new_plan(folder: Path) -> None:
    plan = plan_for(net(), bits=4, roles={"fast": role("A", 8), "slow": role("B", 4)})
    save_plan(plan, folder / "plan.json")
    with nodes(folder, 2, "--plan", "plan.json", "8", "plan") as job:
        first, second = job.join(), job.join()
        job.wait_for(r"rank \d of 2 from step \d+")
        while not (folder / "checkpoint.pt").exists():
            time.sleep(0.1)
        second.send_signal(signal.SIGKILL)
        job.wait_for(r"rank 0 of 1 from step [1-9]")
        finish(job, folder, [first])
        assert "the plan is for 2 ranks (A, B), and here are 1 (" in job.text
        assert "1 ranks now, 2 before" in job.text
        assert "batch shares" in job.text, "those of two ranks are dropped"


@pytest.mark.timeout(300)
@pytest.mark.soak
def test_a_node_that_joins_takes_part(folder: Path) -> None:
    with nodes(folder, 2, "8", "one-file") as job:
        first = job.join()
        job.wait_for(r"rank 0 of 1 from step 0")
        while not (folder / "checkpoint.pt").exists():
            time.sleep(0.1)
        second = job.join()
        job.wait_for(r"rank 1 of 2 from step [1-9]")
        finish(job, folder, [first, second])
        assert "restart after nodes joined" in job.text
        assert "2 ranks now, 1 before" in job.text


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_nodes_leave_and_join_and_the_loss_is_that_of_a_job_that_was_left_alone(folder: Path) -> None:
    losses = []
    for disturbed in (False, True):
        own = folder / str(disturbed)
        own.mkdir()
        (own / "train.py").write_text(SCRIPT)
        with nodes(own, 3, "60", "one-file") as job:
            left = [job.join(), job.join(), job.join()]
            job.wait_for(r"rank 2 of 3 from step")
            if disturbed:
                while not (own / "checkpoint.pt").exists():
                    time.sleep(0.1)
                left.pop().kill()
                job.wait_for(r"rank 1 of 2 from step [1-9]")
                left.append(job.join())
                job.wait_for(r"rank 2 of 3 from step [1-9]")
            finish(job, own, left)
            losses.append(float(re.findall(r"loss ([\d.]+)", job.text)[0]))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_temporary_folders_of_killed_launchers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.cli.agent import _make_folder

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    live, dead, other = _make_folder(), tmp_path / "trimtab-run-dead", tmp_path / "trimtab-other"
    target = tmp_path / "not-ours"
    for path in (dead, other, target):
        path.mkdir()
        (path / "file").touch()
    (tmp_path / "trimtab-run-link").symlink_to(target)
    for path in (live, dead, target):
        os.utime(path, (time.time() - 3600,) * 2)
    _make_folder()
    assert live.exists()
    assert not dead.exists()
    assert (other / "file").exists()
    assert (target / "file").exists()
