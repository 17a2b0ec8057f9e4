"""Events of a run, written by a background thread into `rank-N.jsonl` of the run folder (docs/run-folder.md).

`emit` costs the caller one append to a queue, and nothing where no run folder is set. An event may be a function that
is called on the writer's thread, for what is expensive to compute or not known yet on a GPU.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, TextIO

from trimtab.environment import EMULATED_HOST, RESTART, RUN_DIR, disabled, logger
from trimtab.report.run_info import VERSION, write_run_info
from trimtab.shutdown import close_at_exit

MOST_WAITING = 10_000
"""Events that may wait to be written; further ones are dropped and counted."""

EVERY_S, LIVE_EVERY_S = 0.25, 1.0
"""Seconds between two writes of events, and between two writes of the live status."""

NICENESS = 10
"""Added to the thread's niceness, so that training comes first."""

Event = dict[str, Any]
Later = Callable[[], "list[Event]"]
"""Makes events on the writer's thread."""

_ANCHOR = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since 1970 on a clock that is read once and never set back: `perf_counter` plus a constant."""
    return _ANCHOR + time.perf_counter()


def wall_time(counter: float) -> float:
    """A value of `time.perf_counter` as a time of `now`."""
    return _ANCHOR + counter


def yield_to_training() -> None:
    """Let this thread run at a low priority."""
    if sys.platform == "linux":  # elsewhere this would change the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class EventWriter:
    """Writes the events of one rank; never raises into the job."""

    def __init__(self, folder: Path, rank: int, *, every_s: float = EVERY_S) -> None:
        self.folder, self.rank = folder, rank
        self.dropped = 0
        self.cpu_seconds = 0.0
        """CPU time of the thread so far."""
        self.status: int | None = None
        """The process's exit status, once it is known."""
        self.live: Event | None = None
        """The latest state of the rank, for those who watch; replaced in its file about once a second."""
        self._every_s = every_s
        self._queue: SimpleQueue[Event | Later] = SimpleQueue()
        self._file: TextIO | None = None
        self._broken = False
        self._closing = threading.Event()
        self._live_at = 0.0
        self._began = now()
        self.put(self._start())
        self._thread = threading.Thread(target=self._serve, name="trimtab-events", daemon=True)
        self._thread.start()
        close_at_exit(self)

    def put(self, event: Event | Later) -> None:
        """Have an event written soon; drops it if too many are waiting."""
        if self._queue.qsize() >= MOST_WAITING:
            self.dropped += 1
        elif not self._broken:
            self._queue.put(event)

    @property
    def wants_live(self) -> bool:
        """Whether a new live status would be written soon."""
        return time.monotonic() >= self._live_at

    def close(self, timeout: float | None = 5.0) -> None:
        """Write what is waiting and the event `end`."""
        if not self._closing.is_set():
            for function in _Current.at_close:
                function()
        self._closing.set()
        self._thread.join(timeout)

    def _start(self) -> Event:
        names = ("WORLD_SIZE", "LOCAL_RANK")
        world_size, local_rank = (int(os.environ.get(name, "0") or 0) for name in names)
        return {
            "time": self._began,
            "kind": "start",
            "step": 0,
            "version": VERSION,
            "rank": self.rank,
            "world_size": max(world_size, 1),
            "local_rank": local_rank,
            "host": os.environ.get(EMULATED_HOST) or socket.gethostname(),
            "machine": socket.gethostname(),
            "pid": os.getpid(),
            "restart": os.environ.get(RESTART),
        }

    def _serve(self) -> None:
        yield_to_training()
        closing = False
        while not closing:
            closing = self._closing.wait(self._every_s)
            self._write_waiting()
            if closing:
                self._write([self._end()])
            self._write_live(at_once=closing)
            self.cpu_seconds = time.thread_time()
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _write_waiting(self) -> None:
        events: list[Event] = []
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            try:
                events += item() if callable(item) else [item]
            except Exception as error:  # the job goes on, whatever is wrong with its account
                lost = f"an event is lost: {type(error).__name__}: {error}"
                events.append({"time": now(), "kind": "warning", "step": None, "message": lost})
        self._write(events)

    def _write(self, events: list[Event]) -> None:
        if self._broken or not events:
            return
        try:
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                if self.rank == 0 and not (self.folder / "run.json").exists():
                    write_run_info(self.folder, command=sys.argv, script=sys.argv[0], world_size=None)
                self._file = (self.folder / f"rank-{self.rank}.jsonl").open("a", encoding="utf-8")
                if self._file.tell():  # a killed process may have left half a line
                    self._file.write("\n")
            self._file.writelines(to_json(event) + "\n" for event in events)
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _write_live(self, *, at_once: bool) -> None:
        live, due = self.live, time.monotonic() >= self._live_at
        if live is None or self._broken or not (due or at_once):
            return
        self.live, self._live_at = None, time.monotonic() + LIVE_EVERY_S
        path = self.folder / f"live-{self.rank}.json"
        try:
            path.with_suffix(".part").write_text(to_json(live), encoding="utf-8")
            path.with_suffix(".part").replace(path)
        except OSError as error:
            self._give_up(error)

    def _end(self) -> Event:
        return {
            "time": now(),
            "kind": "end",
            "step": None,
            "status": self.status,
            "seconds": round(now() - self._began, 3),
            "dropped": self.dropped,
            "writer_cpu_seconds": round(time.thread_time(), 4),
        }

    def _give_up(self, error: OSError) -> None:
        if not self._broken:
            self._broken = True
            logger().warning("no more events are written to %s: %s", self.folder, error.strerror or error)


def to_json(event: Event) -> str:
    """One line; numbers that JSON does not have become the strings "nan", "inf" and "-inf"."""
    try:
        return json.dumps(event, allow_nan=False, default=str, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(event), default=str, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


class _Current:
    """The writer of this process, made at the first event."""

    writer: EventWriter | None = None
    step = 0
    """Steps of training so far, for events whose sender does not count them."""

    closed = False
    at_close: ClassVar[list[Callable[[], None]]] = []
    lock = threading.Lock()


class _Warnings(logging.Handler):
    """Warnings of the logger are events, too."""

    def emit(self, record: logging.LogRecord) -> None:
        emit("warning", message=record.getMessage(), level=record.levelname.lower())


def active() -> bool:
    """Whether events of this process are written."""
    return bool(os.environ.get(RUN_DIR)) and not _Current.closed and not disabled()


def writer() -> EventWriter | None:
    """The writer of this process; None without a run folder."""
    if _Current.writer is None and active():
        with _Current.lock:
            if _Current.writer is None:
                rank = int(os.environ.get("RANK", "0") or 0)
                _Current.writer = EventWriter(Path(os.environ[RUN_DIR]).absolute(), rank)
                logger().addHandler(_Warnings(logging.WARNING))
    return _Current.writer


def emit(kind: str, *, step: int | None = None, **fields: Any) -> None:
    """Record an event of this rank; does nothing where no run folder is set."""
    sink = writer()
    if sink is not None:
        at_step = _Current.step if step is None else step
        sink.put({"time": round(now(), 6), "kind": kind, "step": at_step, **fields})


def count_step(step: int) -> None:
    """The number of finished steps, for events that do not say theirs."""
    _Current.step = step


def at_close(function: Callable[[], None]) -> None:
    """Call `function` before the last events are written."""
    _Current.at_close.append(function)


def is_first_rank() -> bool:
    """Whether this process is rank 0 of the job, which writes what concerns all."""
    return int(os.environ.get("RANK", "0") or 0) == 0


def close(status: int | None = None) -> None:
    """Write the last events of this process, with its exit status."""
    sink = _Current.writer
    if sink is not None:
        sink.status = status
        sink.close()
    _Current.writer, _Current.closed = None, True
