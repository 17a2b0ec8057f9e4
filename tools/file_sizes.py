"""Print the longest source files: past about 400 lines, ask which two things a file is."""

from __future__ import annotations

import subprocess
from pathlib import Path

SUFFIXES = {".py", ".cpp", ".h"}
LONG = 400

names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
files = [Path(name) for name in names if Path(name).suffix in SUFFIXES and Path(name).exists()]
sizes = sorted(((len(f.read_text().splitlines()), f) for f in files), reverse=True)
code = sum(n for n, f in sizes if f.parts[0] in {"src", "csrc"})
test = sum(n for n, f in sizes if f.parts[0] == "tests")
print(f"{len(sizes)} files: {code} lines of code, {test} of tests; the longest:")
for lines, file in sizes[:8]:
    print(f"{lines:6d}  {file}{'   <- which two things is it?' if lines > LONG else ''}")
