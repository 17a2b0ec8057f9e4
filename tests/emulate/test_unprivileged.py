"""Without root: what needs it is refused by name, and the rest works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_NOBODY = 65534

_REFUSALS = """
from tests.emulate.machines import pair
from trimtab.emulate import Emulation
from trimtab.errors import TrimtabError

def refused(**options):
    throttle = options.pop("throttle", "auto")
    try:
        with Emulation(pair(**options), throttle=throttle):
            print("not refused")
    except TrimtabError as error:
        print(error)

refused(gbit_per_s=1.0)
refused(memory_gib=1.0)
refused(speed=0.4, throttle="quota")
with Emulation(pair(speed=0.4)) as emulation:
    print(emulation.throttle)
    print(emulation.run(["-m", "platform"], capture=True, timeout=100).status)
"""


def _as_nobody() -> list[str]:
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("running as another user needs setpriv (util-linux)")
    # Of what root may do only reading: this Python or this checkout may lie where others cannot look.
    reading = "-all,+dac_read_search"
    prefix = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    return [*prefix, f"--inh-caps={reading}", f"--ambient-caps={reading}", f"--bounding-set={reading}"]


def test_without_root() -> None:
    prefix = _as_nobody()
    env = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    done = subprocess.run(
        [*prefix, sys.executable, "-B", "-c", _REFUSALS],
        cwd=_ROOT,
        env={**env, "TMPDIR": "/tmp", "HOME": "/tmp"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[b:1]")]
    assert len(lines) == 5, done.stderr
    link, memory, quota, throttle, status = lines
    assert "links need root" in link
    assert "remove `link` from the hosts" in link
    assert "memory control groups need root" in memory
    assert "remove memory_gib from device class 'two'" in memory
    assert "cpu control groups need root" in quota
    assert "use throttle duty" in quota
    assert (throttle, status) == ("duty", "0")
    assert "falls back to duty cycles: quotas are not available" in done.stderr
