"""What trimtab decided about a model's gradients, in words."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from trimtab.control.step_recorder import record_steps
from trimtab.environment import logger
from trimtab.model_state import attach_state


def record_explanation(model: nn.Module, text: str) -> None:
    """Keep it for `trimtab.explain`; rank 0 also logs it, unless `trimtab run` decided the same before the script."""
    state = attach_state(model)
    is_known, state.explanation = state.explanation == text, text
    record_steps(model)
    if is_known:
        return
    if not dist.is_initialized() or dist.get_rank(getattr(model, "process_group", None)) == 0:
        logger().info(text)
