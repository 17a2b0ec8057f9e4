"""The environment variables trimtab listens to, and its logger.

``TRIMTAB_DISABLE=1`` turns every adjustment off: the job runs as if trimtab were not there.
``TRIMTAB_LOG`` sets the level of the ``trimtab`` logger (debug, info, warning, error).
"""

from __future__ import annotations

import logging
import os

from trimtab.errors import TrimtabError

_LEVELS = ("debug", "info", "warning", "error")


def disabled() -> bool:
    """Whether the user switched every adjustment off."""
    value = os.environ.get("TRIMTAB_DISABLE", "").strip().lower()
    return value not in ("", "0", "false", "no", "off")


def logger() -> logging.Logger:
    """The one logger, writing to stderr at the level of ``TRIMTAB_LOG`` (default info)."""
    log = logging.getLogger("trimtab")
    if not log.handlers:
        level = os.environ.get("TRIMTAB_LOG", "info").strip().lower()
        if level not in _LEVELS:
            raise TrimtabError(f"TRIMTAB_LOG={level!r} is not a level; use one of {', '.join(_LEVELS)}")
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("trimtab: %(message)s"))
        log.addHandler(handler)
        log.setLevel(level.upper())
        log.propagate = False
    return log
