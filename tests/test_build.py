"""Building the kernels: with a compiler they are there; without one the build still succeeds and says so."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.requirements import requires

ROOT = Path(__file__).parent.parent


@requires(tools=["cmake", "make"])
def test_without_a_compiler_the_build_succeeds_and_names_what_is_missing(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("cmake", "make", "sh", "uname"):
        found = shutil.which(tool)
        assert found is not None
        (tools / tool).symlink_to(Path(found).resolve())
    hidden = {"CC", "CXX", "PATH"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [tools / "cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Unix Makefiles"],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PATH": str(tools)},
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "No C++ compiler was found" in said
    assert "Install one (for example g++)" in said
