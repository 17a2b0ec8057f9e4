"""The error that trimtab raises when the user can fix the cause."""

from __future__ import annotations


class TrimtabError(ValueError):
    """Invalid input, or something that this machine lacks.

    The message says what is wrong, where, and what to do. The command line prints it
    without a traceback and exits with status 2.
    """
