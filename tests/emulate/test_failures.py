"""A rank that fails is named, with its own traceback, and takes the others with it."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest
from tests.emulate.machines import jobs_of, pair, resources_of, traces
from tests.support.requirements import requires

from trimtab.emulate import Emulation, emulate
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from pathlib import Path

_FAILING = """
import sys, torch
from torch import distributed

def work():
    if distributed.get_rank() == 1:
        print("about to fail")
        raise ValueError("this is rank 1's own mistake")
    distributed.all_reduce(torch.ones(1))

distributed.init_process_group("gloo")
work()
"""
_HUNGRY = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], __name__, os.path.basename(__file__))
if os.environ["RANK"] == "1":
    kept = [b"x" * (1 << 20) for _ in range(2048)]
"""


def _script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_shows_the_failing_ranks_own_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert emulate(pair(), [_script(tmp_path, _FAILING)]) == 1
    out, err = capfd.readouterr()
    assert out == "[b:1] about to fail\n"
    assert err.startswith("trimtab: rank 1 (host b) failed:\nTraceback (most recent call last):\n")
    assert err.endswith("ValueError: this is rank 1's own mistake\n")
    assert err.count("Traceback") == 1  # neither rank 0's loss of its peer nor torchrun's own
    assert "worker.py" not in err
    assert "in work" in err
    assert not jobs_of(os.getpid())


@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_memory_limit_and_links_hold(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank past its memory is killed and named; the next run on the same hosts is not disturbed."""
    with Emulation(pair(memory_gib=1.0, gbit_per_s=1.0)) as emulation:
        (job,) = jobs_of(os.getpid())
        resources = resources_of(job)
        outcome = emulation.run([_script(tmp_path, _HUNGRY), "--flag", "x"], capture=True, timeout=100)
        assert outcome.stdout == "rank 0 of 2 ['--flag', 'x'] __main__ script.py\n"
        assert outcome.status == 128 + 9
        assert outcome.failure is not None
        assert outcome.failure.rank == 1
        assert "more than the 1 GiB of device class 'two'" in outcome.failure.text
        module = ["-m", "timeit", "-n", "1", "-r", "1", "-s", "import os", "print(os.environ['EXTRA'])"]
        again = emulation.run(module, env={"EXTRA": "given"}, capture=True, timeout=100)
        assert again.status == 0
        assert again.stdout.startswith("given\n1 loop")
    assert traces(job, resources) == []


def test_refuses_before_anything_starts(tmp_path: Path) -> None:
    with Emulation(pair()) as emulation:
        with pytest.raises(TrimtabError, match=r"no script .*nothing\.py; check the path"):
            emulation.run([str(tmp_path / "nothing.py")])
        with pytest.raises(TrimtabError, match="no script to run"):
            emulation.run([])
        with pytest.raises(TrimtabError, match="no host 'z'"):
            emulation.start("z", ["true"])
    with pytest.raises(TrimtabError, match="not running"):
        emulation.run(["script.py"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(TrimtabError, match=f"port {port} cannot be used: .*in use"),
            Emulation(pair(), port=port),
        ):
            pass
