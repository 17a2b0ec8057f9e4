"""torch's own distributed test cases, which ship inside the wheel, run on ranks of the pool."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import types
import unittest
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from tests.doors.trimtab_default import default_store, trimtab_default
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Outcome = tuple[str, str]
"""What became of a case ("passed", "skipped", "failed"), and why."""


def run_cases(
    patterns: Sequence[str],
    excluded: Sequence[str],
    options: Mapping[str, Any],
    environment: Mapping[str, str],
) -> dict[str, Outcome]:
    """Run the cases whose names match, each in a fresh default group of the backend "trimtab"."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        ready = {"BACKEND": "trimtab", "TEMP_DIR": folder, "MASTER_ADDR": "127.0.0.1", **environment}
        os.environ.update(ready)
        cases, store = _cases(), default_store()
        outcomes: dict[str, Outcome] = {}
        used = True
        for name in unittest.TestLoader().getTestCaseNames(cases):
            if not _matches(name, patterns) or _matches(name, excluded):
                continue
            if used:
                trimtab_default(PrefixStore(name, store), **options)
            outcomes[name] = _run(cases, name)
            used = outcomes[name][0] != "skipped"
            # Some cases change the environment, and with it how much torch checks, for good.
            os.environ.clear()
            os.environ.update({**before, **ready})
            dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(before)
    return outcomes


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _cases() -> type[unittest.TestCase]:
    # torch's test tools build on this package, which its wheel does not ask for; the cases run here use
    # nothing of it beyond its being a TestCase.
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal import common_distributed

    # The decorators of the cases look the backend up in these sets of names when the module is imported.
    for feature in ("ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add("trimtab")
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    class Cases(DistributedTest._DistTestBase, TestCase):
        rank = property(lambda self: dist.get_rank())
        world_size = property(lambda self: dist.get_world_size())

        def _barrier(self, *_arguments: Any, **_options: Any) -> None:
            dist.barrier()

    return Cases


def _run(cases: type[unittest.TestCase], name: str) -> Outcome:
    case = cases(name)
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:  # how torch's multi-process cases skip
        return "skipped", _reason(end.code)
    except Exception:
        return "failed", traceback.format_exc()
    return "passed", ""


def _reason(code: Any) -> str:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return next((skip.message for skip in TEST_SKIPS.values() if skip.exit_code == code), f"exit {code}")
