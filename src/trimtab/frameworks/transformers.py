"""Transformers: a callback for its `Trainer`."""

from __future__ import annotations

from typing import Any

from trimtab.frameworks import enable, needs_extra

with needs_extra("transformers"):
    from transformers import TrainerCallback


class TrimtabCallback(TrainerCallback):
    """``Trainer(..., callbacks=[TrimtabCallback()])``: the same as to start the script with `trimtab run`.

    Made before `train`, which builds DDP and the data loader. The options are those of `trimtab.frameworks.enable`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        enable(**options)
