"""`trimtab run`: torchrun, with trimtab's bootstrap in front of the script."""

from __future__ import annotations

import os
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
    # With the store shared between restarts, Gloo finds the dead workers' addresses in it (torch 2.13).
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **os.environ}
    process = subprocess.Popen(command, env=environment)
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
    parser.prog = "trimtab run"
    parser.description = (
        "Train a script, unchanged, as torchrun does; the gradients of its DistributedDataParallel travel "
        "in 4 bits where that pays. The flags are torchrun's. TRIMTAB_DISABLE=1 makes it plain torchrun."
    )
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
