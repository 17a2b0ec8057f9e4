"""`trimtab run`: torchrun's flags, an unchanged script, compression by its bootstrap."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab.cli import agent, bootstrap, take_overs
from trimtab.cli.run import BOOTSTRAP, torchrun_command
from trimtab.errors import TrimtabError
from trimtab.run_settings import RunSettings

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(128, 128))
if "--fail" in sys.argv and dist.get_rank() == 1:
    raise KeyError("the script's own mistake")
torch.manual_seed(dist.get_rank())
ddp(torch.randn(4, 128)).square().mean().backward()
gradient = ddp.module.weight.grad
if dist.get_rank() == 0:
    values = len(set(gradient.flatten().tolist()))
    print(json.dumps({"argv": sys.argv, "name": __name__, "values": values, "file": __file__}))
dist.barrier()  # ranks that leave apart now and then abort at exit
dist.destroy_process_group()
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab.cli", "run", "--nproc-per-node", "2", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_an_unchanged_script_runs_as_main_and_is_explained(script: Path) -> None:
    done = run(str(script), "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["argv"] == [str(script), "--lr", "0.1"]
    assert said["name"] == "__main__"
    assert said["file"] == str(script)
    explained = [line for line in done.stderr.splitlines() if line.startswith("trimtab: ")]
    assert len(explained) == 1, "one line per run, from rank 0"
    decisions = "all ranks are on one host", "bottleneck", "compressing"
    assert any(words in explained[0] for words in decisions), "what was decided, by the link as measured"


OWN_WAYS = """
import torch, torch.distributed as dist, trimtab
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from trimtab.codec import Block

dist.init_process_group("gloo")
hooked, compressed = (DistributedDataParallel(torch.nn.Linear(128, 128)) for _ in range(2))
hooked.register_comm_hook(None, fp16_compress_hook)
trimtab.compress(compressed, Block(bits=1, block=128 * 128))
DistributedDataParallel(torch.nn.Linear(128, 128), mixed_precision=_MixedPrecision(reduce_dtype=torch.float32))
for ddp in (hooked, compressed):
    ddp(torch.randn(4, 128)).square().mean().backward()
if dist.get_rank() == 0:
    print(len(compressed.module.weight.grad.unique()))
dist.barrier()  # ranks that leave apart now and then abort at exit
dist.destroy_process_group()
"""


def test_a_script_gets_its_own_way(tmp_path: Path) -> None:
    """With a hook of its own, a call of compress, and a DDP that cannot be compressed."""
    script = tmp_path / "train.py"
    script.write_text(OWN_WAYS)
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    # One block of one bit from each of two ranks: each value is one of four sums.
    assert int(done.stdout) <= 4
    assert "plain DDP" in done.stderr


def test_disabled_is_plain_torchrun(script: Path) -> None:
    done = run(str(script), TRIMTAB_DISABLE="1")
    assert done.returncode == 0, done.stderr
    assert "trimtab:" not in done.stderr


def test_only_the_traceback_of_the_failing_rank_is_shown(script: Path) -> None:
    done = run(str(script), "--fail")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "rank 1 failed" in done.stderr
    assert 'KeyError: "the script\'s own mistake"' in done.stderr
    assert "bootstrap.py" not in done.stderr
    assert len(done.stderr.splitlines()) <= 12


def test_a_script_without_ddp_is_told_that_nothing_was_adjusted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunSettings, "in_force", RunSettings())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    bootstrap._say_if_unused(RunSettings())
    assert (
        "trained no DistributedDataParallel or FSDP2 module, so `trimtab run` has adjusted"
        in capsys.readouterr().err
    )
    bootstrap._say_if_unused(RunSettings(adjust="none"))
    bootstrap._say_if_unused(RunSettings(batch_sizes="24,11"))  # the take-over of the batches names them
    monkeypatch.setattr(take_overs.Script, "is_wrapped", True)
    bootstrap._say_if_unused(RunSettings())
    assert capsys.readouterr().err == ""


FAULTS = """
import os, signal, sys, time, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    if sys.argv[1] == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "signal": os.kill(os.getpid(), 40)  # without a name in Python
    if sys.argv[1] == "exit": sys.exit(7)
    if sys.argv[1] == "words": sys.exit("no data here")
dist.barrier()
"""


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("kill", 137, "SIGKILL"),
        pytest.param("signal", 168, "rank 1 failed", marks=pytest.mark.soak),
        pytest.param("words", 1, "no data here", marks=pytest.mark.soak),
        pytest.param("exit", 7, "exited with status 7", marks=pytest.mark.soak),
    ],
)
def test_how_a_rank_ended_is_said(tmp_path: Path, fault: str, status: int, words: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAULTS)
    done = run(str(script), fault)
    assert done.returncode == status
    assert words in done.stderr
    assert len(done.stderr.splitlines()) <= 12, done.stderr


def test_ctrl_c_ends_all_ranks_with_130(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, sys, time\npathlib.Path(sys.argv[1], os.environ['RANK']).touch()\ntime.sleep(60)"
    )
    command = [
        sys.executable,
        "-m",
        "trimtab.cli",
        "run",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not all((tmp_path / rank).exists() for rank in "01"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors, errors


def test_a_script_that_is_not_there_is_refused_before_anything_starts() -> None:
    done = run("nofile.py")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "nofile.py" in done.stderr


def test_the_script_starts_where_torchrun_says_its_flags_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    command = torchrun_command(["--nproc-per-node", "2", "--standalone", "train.py", "--nproc-per-node", "9"])
    assert command[1:] == [
        *("-m", "trimtab.cli.agent", "--nproc-per-node", "2", "--standalone"),
        *("-m", BOOTSTRAP, "train.py", "--nproc-per-node", "9"),
    ]
    module = torchrun_command(["--nnodes=1", "-m", "package.train", "-m", "x"])
    assert module[1:] == [
        *("-m", "trimtab.cli.agent", "--nnodes=1"),
        *("-m", BOOTSTRAP, "-m", "package.train", "-m", "x"),
    ]


def test_options_of_ours_may_be_abbreviated_as_those_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    ours = ["--batch-size", "3,5", "--adj=shares", "--quie"]
    command = torchrun_command(["--nproc-per", "2", *ours, "--standalone", "train.py", "--batch-size", "8"])
    assert command[1:6] == ["-m", "trimtab.cli.agent", "--nproc-per", "2", "--standalone"]
    assert command[-3:] == ["train.py", "--batch-size", "8"]
    assert '"batch_sizes": "3,5"' in " ".join(command)


def test_no_script_is_a_mistake_in_words() -> None:
    with pytest.raises(TrimtabError, match="no script"):
        torchrun_command([])
    with pytest.raises(TrimtabError, match="no script"):
        torchrun_command(["--nproc-per-node", "2"])
    with pytest.raises(TrimtabError, match="--no-python"):
        torchrun_command(["--no-python", "train.sh"])


def test_a_signal_without_a_name_is_said_by_its_number(tmp_path: Path) -> None:
    class Failure:
        exitcode = -40

    rank, text, status = agent._first_failure({1: Failure()}, tmp_path)
    assert (rank, status) == (1, 168)
    assert text.startswith("ended by signal 40 (")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc-per-node", "two"], "--nproc-per-node two: give a number of ranks of at least 1"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0: give"),
        (["--nproc-per-node=-1"], "--nproc-per-node -1: give"),
        (["--nnodes", "0"], "--nnodes 0: give a number of nodes"),
        (["--nnodes", "3:2"], "--nnodes 3:2: give"),
        (["--nnodes", "a:b:c"], "--nnodes a:b:c: give"),
        (["--nnodes", "some", "--batch-sizes", "1,2"], "--nnodes some: give"),
        (["--batch-sizes", "²,1"], "--batch-sizes ²,1: give auto, equal"),
        (["--local-steps", "²"], "--local-steps ²: give a number"),
        (
            ["--batchsizes", "1,2"],
            "unrecognized arguments: --batchsizes (did you mean --batch-sizes?); write",
        ),
        (["--batch_sizes=1,2"], "(did you mean --batch-sizes?)"),
        (["--frobnicate", "1"], "unrecognized arguments: --frobnicate; write"),
        (["--max-penalty", "0.1"], "--max-penalty says how --local-steps auto chooses"),
    ],
)
def test_numbers_that_torchrun_would_end_on_with_a_traceback_are_refused(
    tmp_path: Path, flags: list[str], words: str
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(TrimtabError) as refused:
        torchrun_command([*flags, str(script)])
    assert words in str(refused.value)
