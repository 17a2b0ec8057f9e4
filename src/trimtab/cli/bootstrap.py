"""What `trimtab run` starts on each rank: wraps DDP's constructor, then runs the script as it is.

The backend "trimtab" is known there too, so that the script may ask for it by name.

python -m trimtab.cli.bootstrap [--plan FILE] SCRIPT ARGS
python -m trimtab.cli.bootstrap [--plan FILE] -m MODULE ARGS
"""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path
from typing import Any

from trimtab import backend, environment


def wrap_ddp() -> None:
    """From here on every DistributedDataParallel is compressed as it is made, where that pays.

    With a plan, it runs as that says. A script that registers a communication hook of its own gets its
    way: trimtab's hook then hands every bucket to it.
    """
    from torch.nn.parallel import DistributedDataParallel

    from trimtab.api.apply import apply_launched
    from trimtab.api.compress import compress, compression_of
    from trimtab.control.plans.active_plan import Launch

    construct = DistributedDataParallel.__init__

    @functools.wraps(construct)
    def construct_and_compress(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if Launch.path is None:
            compress(self)
        else:
            apply_launched(self)
        compression = compression_of(self)
        if compression is not None:
            compression.automatic = True
            self.register_comm_hook = compression.give_way  # type: ignore[method-assign]

    DistributedDataParallel.__init__ = construct_and_compress  # type: ignore[method-assign]


def main() -> None:
    """Run the script named on the command line as `__main__`."""
    backend.register()
    if sys.argv[1] == "--plan":
        from trimtab.control.plans.active_plan import Launch

        Launch.path = Path(sys.argv[2])
        sys.argv = [sys.argv[0], *sys.argv[3:]]
    if not environment.disabled():
        wrap_ddp()
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
