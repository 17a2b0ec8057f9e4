"""The workload of a model that is given by name, as `--model` takes it."""

from __future__ import annotations

import torch

from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_workload
from trimtab.models.spec import load_model
from trimtab.workload import Workload


def workload_of(
    model: str, *, samples: int = 4, autocast: str | None = None, device: str = "cpu", real: bool = False
) -> Workload:
    """Capture a model on the meta device, without allocating its parameters.

    Args:
        real: build the model and run it once, for models whose forward depends on values. The workload then has
            this batch size only.
    """
    spec = load_model(model, torch.device("cpu" if real else "meta"), samples=samples)
    try:
        return capture_workload(
            spec.model,
            spec.batch,
            loss=spec.loss,
            autocast=autocast,
            device=None if real else device,
            real=real,
        )
    except TrimtabError as error:
        raise TrimtabError(f"{model}: {error}; on the command line: --real") from None
