"""A segment of memory that the ranks of one host share.

The file is unlinked as soon as every rank has mapped it, so that a job leaves nothing behind however suddenly it
ends. Until then the rank that created it holds a lock on it: a file without one belongs to a job that was killed, and
the next job, or the restarted one, removes it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from trimtab.collectives.topology import gather_texts
from trimtab.errors import TrimtabError

FOLDER = Path("/dev/shm")
PREFIX = "trimtab-shared-"
_NEW_S = 2.0
"""A file of this age may not be locked yet by the rank that creates it."""


class SharedSegment:
    """The mapped memory, all zeros at first, and its open file, with this rank's lock on it.

    The lock, on the byte with the rank's index, tells the others that this process is alive. The kernel
    releases it when the process ends; a forked child does not inherit it.
    """

    def __init__(self, path: Path, nbytes: int, index: int, *, creator_lock: int | None = None) -> None:
        # Kept open: closing any descriptor of the file would release this process's lock on its byte.
        self._creator_lock = creator_lock
        self._file = path.open("r+b")
        try:
            size = os.fstat(self._file.fileno()).st_size
            if size != nbytes:
                raise TrimtabError(
                    f"the shared segment has the wrong size: found {size} bytes, expected {nbytes}; the ranks of a "
                    "host must run the same trimtab with the same settings"
                )
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
            self.memory = mmap.mmap(self._file.fileno(), nbytes)
        except BaseException:
            self._file.close()
            raise
        self.nbytes = nbytes

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Release the lock; the memory is freed when nothing refers to it any more."""
        self._file.close()
        if self._creator_lock is not None:
            os.close(self._creator_lock)
            self._creator_lock = None


def share(
    nbytes: int,
    members: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    folder: Path = FOLDER,
    failure: str = "",
) -> SharedSegment:
    """Create a segment for the `members` of this host: ranks of the group, this one included.

    Collective over the whole group: every rank calls it with the members on its own host. When it fails on one
    rank it fails on all, with the reason; a rank that has already failed passes its `failure`.
    """
    rank = group.rank()
    leader = min(members)
    path: Path | None = None
    lock: int | None = None
    segment: SharedSegment | None = None
    try:
        message = f"!{failure}" if failure else ""
        if rank == leader and not failure:
            try:
                path, lock = _create(nbytes, folder)
                message = path.name
            except (OSError, TrimtabError) as error:
                message = f"!{error}"
        names = gather_texts(message, group, device)
        _raise_failures(names)
        path = folder / names[leader]
        message = ""
        try:
            segment = SharedSegment(path, nbytes, sorted(members).index(rank), creator_lock=lock)
        except FileNotFoundError:
            message = (
                f"!{path} of rank {leader} does not exist here: are the ranks on one host, with one /dev/shm?"
            )
        except (OSError, TrimtabError) as error:
            message = f"!{error}"
        try:
            _raise_failures(gather_texts(message, group, device))
        except BaseException:
            if segment is not None:
                segment.close()
            raise
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
        if lock is not None and segment is None:
            os.close(lock)
    assert segment is not None
    return segment


def remove_abandoned(folder: Path = FOLDER) -> None:
    """Remove the segments of this user whose job was killed while creating them."""
    for path in folder.glob(f"{PREFIX}{os.getuid()}-*"):
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its creator lives
                if time.time() - os.fstat(file).st_mtime > _NEW_S:
                    path.unlink()
            finally:
                os.close(file)


def _create(nbytes: int, folder: Path) -> tuple[Path, int]:
    """A new segment, and the open file that holds the lock on it."""
    remove_abandoned(folder)
    path = folder / f"{PREFIX}{os.getuid()}-{secrets.token_hex(12)}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        # Allocate the pages now: with a full file system, touching one later would kill the process.
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        path.unlink()
        os.close(file)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        space = os.statvfs(folder)
        raise TrimtabError(
            f"{folder} has {space.f_bavail * space.f_frsize / 1e6:.1f} MB left and a shared segment needs "
            f"{nbytes / 1e6:.1f} MB; enlarge it (docker: --shm-size), request a smaller segment, or disable "
            "shared memory"
        ) from error
    return path, file


def _raise_failures(messages: Sequence[str]) -> None:
    failures = [f"rank {rank}: {text[1:]}" for rank, text in enumerate(messages) if text.startswith("!")]
    if failures:
        raise TrimtabError(f"shared memory: {failures[0]}")
