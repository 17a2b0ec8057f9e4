"""torchrun for one node of a run; failures of its ranks are written to a file.

Runs as ``python -m trimtab.emulate.torchrun_agent NODE TORCHRUN_ARGUMENTS``. The launcher reads the file from the
run's directory.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from trimtab.emulate.job_directory import EMULATION_RUN
from trimtab.emulate.outcome import exit_codes_path


def main() -> None:
    try:
        run(parse_args(sys.argv[2:]))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        path = exit_codes_path(Path(os.environ[EMULATION_RUN]), int(sys.argv[1]))
        path.with_suffix(".tmp").write_text(json.dumps(codes))
        path.with_suffix(".tmp").rename(path)
        sys.exit(1)


if __name__ == "__main__":
    main()
