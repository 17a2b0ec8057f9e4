"""What trimtab raises when a user can put it right."""

from __future__ import annotations


class TrimtabError(ValueError):
    """A mistake in what was asked, or a thing this machine lacks.

    The message says what is wrong, where, and what to do. The command line prints it
    without a traceback and exits with status 2.
    """
