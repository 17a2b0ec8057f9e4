"""The environment variables that trimtab reads, and its logger.

``TRIMTAB_DISABLE=1`` turns every adjustment off: the job runs as if trimtab were not installed.
``TRIMTAB_LOG`` sets the level of the ``trimtab`` logger (debug, info, warning, error).
``TRIMTAB_RUN_DIR`` is the run folder of a job that is not started by ``trimtab run``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trimtab.errors import TrimtabError

EMULATION = "TRIMTAB_EMULATION"
"""Set in every process of an emulated cluster, to the emulation's directory."""

EMULATED_HOST = "TRIMTAB_EMULATED_HOST"
"""Set in the ranks of an emulated cluster, to the name of their host."""

DEVICE_CLASS = "TRIMTAB_DEVICE_CLASS"
"""Set in every rank of an emulated cluster, to its device class in the cluster's file."""

RUN_FOLDER = "TRIMTAB_RUN_FOLDER"
"""Set by `trimtab run` on each node, to a folder of its ranks: how they failed, and which device class each is."""

RUN_DIR = "TRIMTAB_RUN_DIR"
"""Set by `trimtab run` to the run folder, where ranks write their events; without the launcher, by the user."""

RESTART = "TRIMTAB_RUN_RESTART"
"""Set by `trimtab run` in ranks that it started again: which restart this is, and why."""

ELASTIC = "TRIMTAB_RUN_ELASTIC"
"""Set to 1 by `trimtab run --nnodes MIN:MAX`: the number of ranks may change whenever they are started again."""

MOST_IN_A_LINE = 120
"""Characters of a line of information on standard error."""

MOST_LISTED = 16
"""Characters of a list with an entry for each rank; three of them and what is said about them make a line."""

_LEVELS = ("debug", "info", "warning", "error")


def disabled() -> bool:
    """Whether the user switched every adjustment off."""
    value = os.environ.get("TRIMTAB_DISABLE", "").strip().lower()
    return value not in ("", "0", "false", "no", "off")


def elastic() -> bool:
    """Whether ranks may come and go, as `trimtab run --nnodes MIN:MAX` lets them."""
    return os.environ.get(ELASTIC) == "1"


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg]  # not generic before Python 3.11
    """Writes to the current `sys.stderr`, not to the one at the time of the first message."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _ShortLines(logging.Formatter):
    """Information takes at most 120 characters; all of it is shown at the level debug."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno != logging.INFO or logging.getLogger(record.name).level <= logging.DEBUG:
            return text
        return shorten(text)


def shorten(text: str, most: int = MOST_IN_A_LINE) -> str:
    """At most so many characters of a text, which ends with a clause or at least with a word."""
    if len(text) <= most:
        return text
    room = text[: most - len(" ...")]
    clause = max(room.rfind(mark) for mark in ("; ", ". "))
    return room[:clause] if clause > most // 4 else f"{room[: max(room.rfind(' '), most // 2)]} ..."


def logger() -> logging.Logger:
    """The one logger, writing to stderr at the level of ``TRIMTAB_LOG`` (default info)."""
    log = logging.getLogger("trimtab")
    if not log.handlers:
        level = os.environ.get("TRIMTAB_LOG", "info").strip().lower()
        if level not in _LEVELS:
            raise TrimtabError(f"TRIMTAB_LOG={level!r} is not a log level; use one of {', '.join(_LEVELS)}")
        handler = _StandardError()
        handler.setFormatter(_ShortLines("trimtab: %(message)s"))
        log.addHandler(handler)
        log.setLevel(level.upper())
        log.propagate = False
    return log


def cache_folder() -> Path:
    """Where measurements and decisions are kept between runs: in the user's cache folder, as XDG says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "trimtab")


def listed_by_rank(values: Sequence[float]) -> str:
    """Numbers of all ranks for a log line: ``11/5``; the smallest and the largest where there are many ranks."""
    text = "/".join(f"{value:.0f}" for value in values)
    return text if len(text) <= MOST_LISTED else f"{min(values):.0f} to {max(values):.0f}"
