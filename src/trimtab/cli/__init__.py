"""The command line: one file per command, `app` joins them."""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> None:
    """The entry point of the console script `trimtab`."""
    from trimtab.cli.app import main as run

    run(arguments)
