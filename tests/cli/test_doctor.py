"""`trimtab doctor` on this machine and on real groups, one of them with a rank of another version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import trimtab

SOURCE = Path(trimtab.__file__).parent


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return command(sys.executable, "-m", "trimtab.cli", "doctor", *arguments, **environment)


def by_check(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in tree["findings"]}


def test_one_machine_with_something_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = doctor("--json", XDG_CACHE_HOME=str(tmp_path / "file"), TRIMTAB_DISABLE="1")
    tree = json.loads(done.stdout)
    assert (done.returncode, tree["usable"], tree["world_size"]) == (0, True, 1), done.stderr
    checks = by_check(tree)
    assert checks["versions"]["status"] == "ok"
    assert f"trimtab {trimtab.__version__}" in checks["versions"]["found"]
    assert checks["cache"]["status"] == "limited"
    assert checks["cache"]["change"] == "make it writable, or set XDG_CACHE_HOME"
    assert checks["environment"]["found"] == "TRIMTAB_DISABLE is set"
    assert {"CPU kernels", "backends", "shared memory", "processor", "emulate: links"} <= checks.keys()
    assert not any(finding["status"] == "limited" and not finding["change"] for finding in tree["findings"])


def test_a_group_on_this_machine_as_a_table() -> None:
    done = doctor("--nproc", "2", COLUMNS="200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, all alike" in done.stdout
    assert "2 ranks on 1 host, gloo:" in done.stdout
    assert done.stdout.splitlines()[-1] == "Everything that trimtab needs works."


def test_a_rank_of_another_version_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other" / "trimtab"
    shutil.copytree(SOURCE, other, ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "__init__.py"
    init.write_text(
        init.read_text().replace(f'__version__ = "{trimtab.__version__}"', '__version__ = "9.9.9"')
    )
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    # An editable install has a finder of its own, which comes before sys.path.\n"
        "    sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
        f"    sys.path.insert(0, {str(other.parent)!r})\n"
        "from trimtab.cli import main\n"
        "sys.argv = ['trimtab', 'doctor', '--json']\n"
        "main()\n"
    )
    done = command(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    )
    assert done.returncode == 1
    tree = json.loads(done.stdout)
    assert not tree["usable"]
    assert [rank["versions"]["trimtab"] for rank in tree["ranks"]] == [trimtab.__version__, "9.9.9"]
    finding = by_check(tree)["same versions"]
    assert finding["status"] == "broken"
    host = tree["ranks"][1]["host"]
    assert finding["found"] == f"trimtab: rank 0 has {trimtab.__version__}, rank 1 ({host}) has 9.9.9"
    assert finding["change"] == "install the same versions on every host"
