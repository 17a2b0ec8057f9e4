"""The directory of one emulation, with its lock and its list of resources.

A job is alive as long as its launcher holds the lock, which the kernel releases however the launcher ends. Every
resource outside the directory is recorded in `resources` *before* it is created, so that it can be removed later.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trimtab.environment import EMULATION
from trimtab.errors import TrimtabError

EMULATION_RUN = "TRIMTAB_EMULATION_RUN"
"""The same for every process of one run of a job; its value is the run's directory."""

_RESOURCES = "resources"
_LOCK = "lock"
_NAME = re.compile(r"\d+-[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A running emulation of this process."""

    path: Path
    lock: int
    """File descriptor of the lock; closing it releases the job."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def marked(self) -> dict[str, str]:
        """The environment variable that marks a process as part of this job."""
        return {EMULATION: str(self.path)}

    def record(self, kind: str, value: str | Path) -> None:
        """Record a resource that is about to be created outside the directory."""
        with (self.path / _RESOURCES).open("a") as file:
            file.write(f"{kind} {value}\n")


def create_job() -> Job:
    """Create and lock the directory of a new emulation."""
    home = jobs_home()
    with inspection(home):
        path = home / f"{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return Job(path=path, lock=lock)


def is_alive(path: Path) -> bool:
    """Whether the launcher of the job in `path` is running."""
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
    """The resources of the job in `path`, in the order of creation."""
    try:
        text = (path / _RESOURCES).read_text()
    except OSError:
        return []
    # A launcher killed while writing leaves an incomplete line: that resource was not created.
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [(kind, value) for kind, _, value in (line.partition(" ") for line in lines)]


def jobs_home() -> Path:
    """The folder of this user's jobs; a fixed one for root."""
    if os.geteuid() == 0:
        home = Path("/run/trimtab")
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        home = Path(runtime) / "trimtab"
    else:
        home = Path(tempfile.gettempdir()) / f"trimtab-{os.geteuid()}"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = home.lstat()
    except OSError as error:
        raise TrimtabError(
            f"emulate: cannot create {home}: {error.strerror}; make it writable for this user"
        ) from None
    # In a shared temporary folder anybody may have put something else there under this name: cleaning up there
    # would remove what is not ours.
    if stat.S_ISLNK(status.st_mode):
        raise TrimtabError(f"emulate: {home} is a symbolic link; remove it or set TMPDIR")
    if status.st_uid != os.geteuid():
        raise TrimtabError(
            f"emulate: {home} belongs to another user (uid {status.st_uid}); remove it or set TMPDIR"
        )
    return home


def job_directories(home: Path) -> list[Path]:
    """The directories in `home` that are jobs; whatever else lies there is not touched."""
    return [path for path in sorted(home.iterdir()) if _NAME.fullmatch(path.name) and _is_directory(path)]


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


@contextmanager
def inspection(home: Path) -> Iterator[None]:
    """Exclude other processes that create or inspect jobs: a job looks dead between its creation and its lock."""
    lock = os.open(home / ".inspection", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
