"""The option `--device`, refused before any work where there is no such device."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.errors import TrimtabError


def _present(device: str) -> str:
    if device not in ("cpu", "cuda"):
        raise TrimtabError(f"--device {device!r} is unknown; use cpu or cuda")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise TrimtabError(
                "--device cuda: torch finds no CUDA device here; use --device cpu, or install a driver and "
                "a CUDA build of torch"
            )
    return device


Device = Annotated[str, typer.Option(help="cpu or cuda.", callback=_present)]
