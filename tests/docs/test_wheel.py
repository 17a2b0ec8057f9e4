"""What a wheel installs beside the code."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.docs.code_blocks import ROOT
from tests.support.requirements import requires


@requires(tools=["cmake", "make"])
def test_a_wheel_has_the_docs_and_the_examples(tmp_path: Path) -> None:
    """Configured as for a wheel and with no compiler in sight, so that nothing has to be built."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("cmake", "make", "sh", "uname"):
        (tools / tool).symlink_to(Path(shutil.which(tool) or "").resolve())
    hidden = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "PATH")}
    build = str(tmp_path / "build")
    configure = ["-S", str(ROOT), "-B", build, "-G", "Unix Makefiles", "-DSKBUILD=2", "-DSKBUILD_STATE=wheel"]
    for arguments in (configure, ["--install", build, "--prefix", str(tmp_path / "site")]):
        subprocess.run(
            [str(tools / "cmake"), *arguments],
            check=True,
            capture_output=True,
            env={**hidden, "PATH": str(tools)},
        )
    package = tmp_path / "site" / "trimtab"
    assert (package / "_docs" / "index.md").is_file()
    assert (package / "_docs" / "get-started.md").is_file()
    assert (package / "_docs" / "assets" / "speedups.svg").is_file()
    assert (package / "_examples" / "gpt.py").is_file()
    assert (package / "_examples" / "clusters" / "uneven.yaml").is_file()
