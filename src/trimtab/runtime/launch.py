"""`trimtab run`: torchrun, with trimtab's bootstrap in front of the script."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Sequence

BOOTSTRAP = "trimtab.runtime.bootstrap"


def launch(arguments: Sequence[str]) -> int:
    """Run torchrun with the same arguments, the script started through the bootstrap; gives its exit status."""
    command = torchrun_command(arguments)
    process = subprocess.Popen(command)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # torchrun had the same Ctrl-C and is ending its workers: wait for it to finish that.
            continue


def torchrun_command(arguments: Sequence[str]) -> list[str]:
    """The torchrun command for these arguments: its own flags, then SCRIPT (or -m MODULE) and the script's.

    torchrun's own parser tells where its flags end.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    if any(flag in arguments for flag in ("-h", "--help")) and not any(a.endswith(".py") for a in arguments):
        parser.prog = "trimtab run"
        parser.print_help()
        sys.exit(0)
    parser.error = _refuse  # type: ignore[method-assign]
    parsed = parser.parse_args(list(arguments))
    if parsed.no_python:
        raise TrimtabError(
            "run: --no-python starts no Python script, so there is nothing to adjust; use torchrun"
        )
    rest = len(parsed.training_script_args)
    flags = list(arguments[: len(arguments) - rest - 1])
    script = [parsed.training_script]
    if parsed.module:
        flags = [flag for flag in flags if flag not in ("-m", "--module")]
        script = ["-m", *script]
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *flags,
        *("-m", BOOTSTRAP),
        *script,
        *parsed.training_script_args,
    ]


def _refuse(message: str) -> NoReturn:
    if "training_script" in message:
        message = "no script"
    raise TrimtabError(
        f"run: {message}; write: trimtab run --nproc-per-node 4 SCRIPT ARGS (see trimtab run --help)"
    )
