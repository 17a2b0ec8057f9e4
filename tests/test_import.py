"""Importing trimtab is lean: no torch, no GPU, and no more time than torch itself."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "100"}
    )


def seconds(code: str) -> float:
    """Processor time of a fresh process: what importing costs, whatever else the machine does meanwhile."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_costs_at_most_a_fifth_more_than_torch() -> None:
    """With the first verb of the README looked up, so that nothing hides behind the lazy imports."""
    used = "import trimtab; trimtab.compress"
    seconds(used)  # fills the file cache for both
    pairs = [(seconds("import torch"), seconds(used)) for _ in range(2)]
    torch, trimtab = (min(column) for column in zip(*pairs, strict=True))  # other work only ever adds
    assert trimtab <= 1.2 * torch, (
        f"import trimtab takes {trimtab:.2f} s, import torch {torch:.2f} s: {pairs}"
    )


def test_import_brings_neither_torch_nor_a_process() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'yaml', 'rich', 'typer'}"
    run(f"import sys, trimtab; assert not {heavy} & sys.modules.keys(), {heavy} & sys.modules.keys()")


def test_public_names_initialise_no_gpu() -> None:
    run(
        "import torch, trimtab\n"
        "for name in trimtab.__all__: getattr(trimtab, name)\n"
        "assert not torch.cuda.is_initialized()"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["emulate", "--help"], ["bench", "--help"]])
def test_help_answers_without_torch(arguments: list[str]) -> None:
    outcome = run(
        "import json, sys\n"
        "from trimtab.cli import main\n"
        "sys.argv[0] = 'trimtab'\n"
        "try: main()\n"
        "finally: print(json.dumps(sorted(sys.modules)), file=sys.stderr)",
        *arguments,
    )
    assert "Usage" in outcome.stdout
    assert "torch" not in json.loads(outcome.stderr.splitlines()[-1])
