"""Record the run folder that the page's tests and the README's picture show: python tools/record_demo.py [RUN]

1. Runs `trimtab demo` (two minutes; leave the machine alone, or the figures are those of a busy one). With RUN, the
   run folder of an earlier demo is taken instead.
2. Copies its events to tests/report/page/recorded, without the names of this machine and its user.
3. Makes docs/assets/report.png of it (needs Chromium: apt-get install chromium).

Then run the page's tests: pytest tests/report/page
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "tests" / "report" / "page" / "recorded"
MACHINE, DIRECTORY, PLATFORM = "vm", "/home/user", "Linux-x86_64"
"""What stands for the machine that the run was recorded on."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", type=Path, help="run folder of an earlier demo")
    run = parser.parse_args().run
    with tempfile.TemporaryDirectory() as folder:
        if run is None:
            subprocess.run([sys.executable, "-m", "trimtab.cli", "demo"], cwd=folder, check=True)
            (run,) = Path(folder, "trimtab-runs").iterdir()
        shutil.rmtree(TARGET, ignore_errors=True)
        TARGET.mkdir()
        for file in sorted(run.glob("rank-*.jsonl")):
            lines = file.read_text(encoding="utf-8").splitlines()
            events = [anonymous_event(json.loads(line)) for line in lines if line]
            text = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events)
            (TARGET / file.name).write_text(text, encoding="utf-8")
        info = anonymous_info(json.loads((run / "run.json").read_text(encoding="utf-8")))
        (TARGET / "run.json").write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
    subprocess.run([sys.executable, str(ROOT / "tools" / "report_picture.py")], check=True)
    print(f"recorded: {TARGET.relative_to(ROOT)}, docs/assets/report.png")


def anonymous_event(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "machine": MACHINE} if "machine" in event else event


def anonymous_info(info: dict[str, Any]) -> dict[str, Any]:
    environment = {**info["environment"], "host": MACHINE, "platform": PLATFORM, "variables": {}}
    return {**info, "directory": DIRECTORY, "environment": environment}


if __name__ == "__main__":
    main()
