"""Print the shape of the code: how many files, how long, how they spread over folders, and the longest ones.

With a revision (`python tools/file_sizes.py HEAD~3`) the shape of that revision, for a table of before and after.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePath

SUFFIXES = {".py", ".cpp", ".h"}
LONG = 400


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def lengths(revision: str | None) -> dict[PurePath, int]:
    """Lines of every tracked source file, of the working tree or of a revision."""
    names = git("ls-tree", "-r", "--name-only", revision) if revision else git("ls-files")
    files = [PurePath(name) for name in names.splitlines() if PurePath(name).suffix in SUFFIXES]
    if revision:
        return {file: git("show", f"{revision}:{file}").count("\n") for file in files}
    return {file: Path(file).read_text().count("\n") for file in files if Path(file).exists()}


def row(name: str, sizes: list[int]) -> str:
    """Files, lines, median, nine in ten at most, longest."""
    p90 = statistics.quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else max(sizes)
    return (
        f"{name:<12}{len(sizes):>6}{sum(sizes):>8}{statistics.median(sizes):>8.0f}{p90:>6.0f}{max(sizes):>6}"
    )


def main(revision: str | None = None) -> None:
    sizes = lengths(revision)
    under = {
        top: {file: lines for file, lines in sizes.items() if file.is_relative_to(top)}
        for top in ("src/trimtab", "csrc", "tests", "benchmarks", "examples", "tools")
    }
    print(f"{'':<12}{'files':>6}{'lines':>8}{'median':>8}{'p90':>6}{'max':>6}")
    for top, files in under.items():
        if files:
            print(row(top, list(files.values())))
    package, tests = under["src/trimtab"], under["tests"]
    print(f"lines of test over lines of src/trimtab: {sum(tests.values()) / sum(package.values()):.2f}")
    folders = Counter(str(file.parent.relative_to("src/trimtab")) for file in package)
    print("files per folder of src/trimtab: " + ", ".join(f"{name} {n}" for name, n in folders.most_common()))
    print("the longest:")
    for file, lines in sorted(sizes.items(), key=lambda item: -item[1])[:8]:
        print(f"{lines:>6}  {file}{'   <- which two things is it?' if lines > LONG else ''}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
