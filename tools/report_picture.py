"""Make docs/assets/report.png, a picture of the report of a recorded run: python tools/report_picture.py

Needs Chromium (apt-get install chromium).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from trimtab.cli.report import report

ROOT = Path(__file__).parents[1]
RUN = ROOT / "tests" / "report" / "page" / "recorded"
TARGET = ROOT / "docs" / "assets" / "report.png"
WIDTH, HEIGHT = 1240, 900


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no browser: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        report([RUN], out=page)
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        size = f"--window-size={WIDTH},{HEIGHT}"
        subprocess.run(
            [browser, *flags, size, f"--screenshot={TARGET}", page.as_uri()],
            check=True,
            stderr=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    main()
