"""The output of the ranks, forwarded to the launcher through named pipes.

The output of rank 0 is unchanged, so that a run prints what the script prints; the lines of other ranks are prefixed
with `[host:rank]`.
"""

from __future__ import annotations

import codecs
import os
import select
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from trimtab.emulate.placement import Placement

STREAMS = ("stdout", "stderr")
_CHUNK = 1 << 16


def pipe_path(run: Path, rank: int, stream: str) -> Path:
    """The named pipe of one stream of a rank."""
    return run / f"{stream}-{rank}"


class RankOutput:
    """Reads the ranks' pipes in a thread, from construction to `finish`."""

    def __init__(self, run: Path, placements: Sequence[Placement], *, capture: bool) -> None:
        self._capture = capture
        self._captured = bytearray()
        self._sources: dict[int, tuple[Placement, str]] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._partial: dict[int, str] = {}
        self.broken = False
        """Whether the output of this process was closed, as by `| head`."""
        for placement in placements:
            for stream in STREAMS:
                path = pipe_path(run, placement.rank, stream)
                os.mkfifo(path)
                # Opened for writing too, so that reading does not end before the rank has opened it.
                source = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                self._sources[source] = (placement, stream)
                self._decoders[source] = codecs.getincrementaldecoder("utf-8")("replace")
                self._partial[source] = ""
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._read, name="trimtab-output", daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Forward the remaining output after the ranks have ended; returns the captured output."""
        os.close(self._stop)
        self._thread.join()
        for source in [*self._sources, self._wake]:
            os.close(source)
        return self._captured.decode(errors="replace")

    def _read(self) -> None:
        poll = select.poll()
        for source in [*self._sources, self._wake]:
            poll.register(source, select.POLLIN | select.POLLHUP)
        running = True
        while running:
            ready = [source for source, _ in poll.poll()]
            running = self._wake not in ready
            for source in list(self._sources) if not running else ready:
                while chunk := _available(source):
                    self._forward(source, chunk)
        for source, rest in self._partial.items():
            if rest:
                self._forward(source, b"\n")

    def _forward(self, source: int, chunk: bytes) -> None:
        placement, stream = self._sources[source]
        if placement.rank == 0 and stream == "stdout" and self._capture:
            self._captured += chunk
            return
        text = self._decoders[source].decode(chunk)
        if placement.rank != 0:
            *lines, self._partial[source] = (self._partial[source] + text).split("\n")
            text = "".join(f"[{placement.host}:{placement.rank}] {line}\n" for line in lines)
        target = sys.stdout if stream == "stdout" else sys.stderr
        try:
            target.write(text)
            target.flush()
        except BrokenPipeError:
            self.broken = True


def _available(source: int) -> bytes:
    try:
        return os.read(source, _CHUNK)
    except BlockingIOError:
        return b""
