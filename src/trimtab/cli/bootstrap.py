"""What `trimtab run` starts on each rank: wraps DDP's constructor, then runs the unchanged script.

It also registers the backend "trimtab", so that the script may use it by name.

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
    """From here on every new DistributedDataParallel is compressed where that pays, or runs as the plan says.

    A communication hook that the script registers takes precedence: trimtab's hook then passes every bucket to it.
    """
    from torch.nn.parallel import DistributedDataParallel

    from trimtab.api.compress import compress
    from trimtab.control.compression.ddp import compression_of
    from trimtab.control.plans.active_plan import LaunchPlan
    from trimtab.control.plans.applying import apply_launch_plan

    construct = DistributedDataParallel.__init__

    @functools.wraps(construct)
    def construct_and_compress(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if LaunchPlan.path is None:
            compress(self)
        else:
            apply_launch_plan(self)
        compression = compression_of(self)
        if compression is not None:
            compression.automatic = True
            self.register_comm_hook = compression.defer_to  # type: ignore[method-assign]

    DistributedDataParallel.__init__ = construct_and_compress  # type: ignore[method-assign]


def main() -> None:
    """Run the script named on the command line as `__main__`."""
    backend.register()
    if sys.argv[1] == "--plan":
        from trimtab.control.plans.active_plan import LaunchPlan

        LaunchPlan.path = Path(sys.argv[2])
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
