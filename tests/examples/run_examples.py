"""Runs examples one after the other on the same ranks: python run_examples.py NAME...

The first one makes the process group and the others find it, so its destruction is left out.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"


def main() -> None:
    init, destroy = dist.init_process_group, dist.destroy_process_group

    def init_once(*args: Any, **options: Any) -> None:
        if not dist.is_initialized():
            init(*args, **options)

    def destroy_others(group: dist.ProcessGroup | None = None) -> None:
        if group is not None:
            destroy(group)

    warnings.filterwarnings("ignore")
    dist.init_process_group, dist.destroy_process_group = init_once, destroy_others
    for text in sys.argv[1:]:
        name, *arguments = text.split()
        if os.environ["RANK"] == "0":
            print(f"== {text}", flush=True)
        sys.argv = [str(EXAMPLES / f"{name}.py"), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
        dist.barrier()


if __name__ == "__main__":
    main()
