"""Fixtures for every test: the pool of ranks, and a check that a test leaves its process as it found it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.leaks import MARK, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.pool import Pool


try:
    from hypothesis import settings
except ImportError:  # the tests of tests/gpu run where only torch and pytest are installed
    pass
else:
    # No deadline: shared machines stall. On CI the same examples every time, so that a change is judged by itself.
    settings.register_profile("trimtab", max_examples=50, deadline=None, derandomize="CI" in os.environ)
    settings.load_profile("trimtab")


# A shell starts what it runs in the background with Ctrl-C ignored, and processes under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


_RUNS = Path.cwd() / "trimtab-runs"
_HAD_RUNS = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[_HAD_RUNS] = _RUNS.exists()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the run folders of jobs that were started in the current folder."""
    if not session.stash[_HAD_RUNS] and not hasattr(session.config, "workerinput"):
        shutil.rmtree(_RUNS, ignore_errors=True)


@pytest.fixture(scope="session")
def _environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment before any test changed it, for ranks that are forked later."""
    os.environ["XDG_CACHE_HOME"] = str(
        tmp_path_factory.mktemp("cache")
    )  # what a user's own jobs decided stays out
    os.environ[MARK] = f"session-{os.getpid()}"
    return dict(os.environ)


@pytest.fixture(scope="session")
def ranks(_environment: dict[str, str]) -> Iterator[Pool]:
    """`ranks(world_size, function, *arguments)` runs a module-level function on so many ranks; see `Pool`."""
    from tests.support.pool import Pool

    pool = Pool(_environment)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(_environment: dict[str, str], request: pytest.FixtureRequest) -> Iterator[None]:
    before = Snapshot.take()
    yield
    if leaks := before.leaks():
        pytest.fail(f"{request.node.nodeid} left behind:\n" + "\n".join(leaks), pytrace=False)
