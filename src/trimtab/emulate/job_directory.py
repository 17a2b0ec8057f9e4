"""The directory of one emulation: its lock, its list of resources, its mark on processes.

A job is alive exactly as long as its launcher holds the lock, which the kernel lets go
of however the launcher ends. Everything outside the directory is written into
`resources` *before* it is made, so that whoever comes after can remove it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.environment import EMULATION
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Iterator

EMULATION_RUN = "TRIMTAB_EMULATION_RUN"
"""The same for every process of one run of a job; its value is the run's directory."""

_RESOURCES = "resources"
_LOCK = "lock"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A live emulation of this process."""

    path: Path
    lock: int
    """Descriptor of the held lock; closing it gives the job up."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def marked(self) -> dict[str, str]:
        """The environment variable that makes a process part of this job."""
        return {EMULATION: str(self.path)}

    def record(self, kind: str, value: str | Path) -> None:
        """Note a resource that is about to be made outside the directory."""
        with (self.path / _RESOURCES).open("a") as file:
            file.write(f"{kind} {value}\n")


def create_job() -> Job:
    """Make and lock the directory of a new emulation."""
    home = jobs_home()
    with inspection(home):
        path = home / f"{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return Job(path=path, lock=lock)


def is_alive(path: Path) -> bool:
    """Whether the launcher of the job in `path` still runs."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def recorded(path: Path) -> list[tuple[str, str]]:
    """The resources of the job in `path`, in the order they were made."""
    try:
        text = (path / _RESOURCES).read_text()
    except OSError:
        return []
    # A launcher killed while writing leaves a line without its end: that resource was not made.
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [(kind, value) for kind, _, value in (line.partition(" ") for line in lines)]


def jobs_home() -> Path:
    """Where this user's jobs live: one fixed place for root, whose leftovers are seen by everyone."""
    if os.geteuid() == 0:
        home = Path("/run/trimtab")
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        home = Path(runtime) / "trimtab"
    else:
        home = Path(tempfile.gettempdir()) / f"trimtab-{os.geteuid()}"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = home.stat().st_uid
    except OSError as error:
        raise TrimtabError(
            f"emulate: cannot make {home}: {error.strerror}; make it writable for this user"
        ) from None
    if owner != os.geteuid():
        raise TrimtabError(f"emulate: {home} belongs to another user (uid {owner}); remove it or set TMPDIR")
    return home


@contextmanager
def inspection(home: Path) -> Iterator[None]:
    """Hold off others that make or judge jobs: between its making and its lock a job looks dead."""
    lock = os.open(home / ".inspection", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
