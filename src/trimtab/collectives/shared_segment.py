"""A segment of memory that the ranks of one host share: made together, nameless as soon as all have it.

The file is unlinked when every rank has mapped it, so that no end of a job, however sudden, leaves it
behind; what a job leaves that is killed in the moment before is removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.collectives.topology import tell
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

FOLDER = Path("/dev/shm")
PREFIX = "trimtab-shared-"
_STALE_S = 600.0
"""Age from which a segment that still has a name belongs to a job that died while it was made."""


class SharedSegment:
    """The mapped memory, all zeros at first, and its open file, with this rank's lock on it.

    The lock, on the byte with the rank's index, is how the others see that this process lives. The kernel
    lets go of it when the process ends; a forked child does not inherit it.
    """

    def __init__(self, path: Path, nbytes: int, index: int) -> None:
        self._file = path.open("r+b")
        try:
            size = os.fstat(self._file.fileno()).st_size
            if size != nbytes:
                raise TrimtabError(
                    f"the shared segment has {size} bytes where {nbytes} are due: the ranks of a host must run "
                    "the same trimtab with the same settings"
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
        """Let go of the lock; the memory goes when nothing refers to it any more."""
        self._file.close()


def share(
    nbytes: int,
    members: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    folder: Path = FOLDER,
    failure: str = "",
) -> SharedSegment:
    """A segment for the `members` (ranks of the group, this one among them) of this host.

    Collective over the whole group: every rank calls it, each with the members on its own host. When it
    fails on any rank it fails on all, with the reason; so it does where a rank comes with a `failure`.
    """
    rank = group.rank()
    leader = min(members)
    path: Path | None = None
    try:
        said = f"!{failure}" if failure else ""
        if rank == leader and not failure:
            try:
                path = _create(nbytes, folder)
                said = path.name
            except (OSError, TrimtabError) as error:
                said = f"!{error}"
        names = tell(said, group, device)
        _raise_failures(names)
        path = folder / names[leader]
        segment, said = None, ""
        try:
            segment = SharedSegment(path, nbytes, sorted(members).index(rank))
        except FileNotFoundError:
            said = f"!{path} of rank {leader} is not there: are they on one host, with one /dev/shm?"
        except (OSError, TrimtabError) as error:
            said = f"!{error}"
        try:
            _raise_failures(tell(said, group, device))
        except BaseException:
            if segment is not None:
                segment.close()
            raise
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    assert segment is not None
    return segment


def _create(nbytes: int, folder: Path) -> Path:
    _remove_stale(folder)
    path = folder / f"{PREFIX}{os.getuid()}-{secrets.token_hex(12)}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Pages are taken now: a full file system would otherwise kill whoever touches one later.
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        path.unlink()
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        room = os.statvfs(folder)
        raise TrimtabError(
            f"{folder} has room for {room.f_bavail * room.f_frsize / 1e6:.1f} MB and a shared segment takes "
            f"{nbytes / 1e6:.1f} MB; enlarge it (docker: --shm-size), ask for a smaller segment, or go "
            "without shared memory"
        ) from error
    finally:
        os.close(file)
    return path


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(f"{PREFIX}{os.getuid()}-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


def _raise_failures(said: Sequence[str]) -> None:
    failures = [f"rank {rank}: {text[1:]}" for rank, text in enumerate(said) if text.startswith("!")]
    if failures:
        raise TrimtabError(f"shared memory: {failures[0]}")
