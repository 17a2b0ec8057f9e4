"""`trimtab.explain` and `trimtab.observe_loss`: what trimtab decided, and what it should know."""

from __future__ import annotations

from collections import Counter
from html import escape

import torch
import torch.distributed as dist

from trimtab.control.compression.ddp import adaptive_of
from trimtab.control.plans.active_plan import active_plan_of
from trimtab.control.plans.applying import explain_plan
from trimtab.control.running_local_steps import local_steps_of
from trimtab.control.step_recorder import recorder_of
from trimtab.doors.backend import TrimtabGroup
from trimtab.errors import TrimtabError
from trimtab.model_state import find_state, state_of
from trimtab.precision.setting import precisions_of


class Explanation(str):
    """An explanation in words; a notebook shows it as a list."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape(part)}</li>" for part in self.split("; "))
        return f"<b>trimtab</b><ul>{items}</ul>"


def explain(model: torch.nn.Module) -> str:
    """What trimtab decided for this module and its process group, and why; a notebook shows it as a list."""
    if not isinstance(model, torch.nn.Module):
        raise TrimtabError(f"explain: expected an nn.Module, got {type(model).__name__}")
    parts = [explain_plan(model), state_of(model).explanation]
    if active_plan_of(model) is None and (
        lowered := Counter(p.forward for p in precisions_of(model).values())
    ):
        parts.append(
            "operators by precision: " + ", ".join(f"{n} in {name}" for name, n in lowered.most_common())
        )
    if left_alone := find_state(model, "left_alone"):
        name, reason = next(iter(left_alone.items()))
        others = f" ({len(left_alone) - 1} more like it)" if len(left_alone) > 1 else ""
        parts.append(f"{name} keeps its precision{others}: {reason}")
    controller = adaptive_of(model)
    if controller is not None and controller.history:
        last = controller.history[-1]
        parts.append(f"since step {last.step}: {last.reasons[0]}")
    local = local_steps_of(model)
    if local is not None:
        parts.append(local.explain())
    group = getattr(model, "process_group", dist.group.WORLD if dist.is_available() else None)
    if isinstance(group, TrimtabGroup):
        parts.append(group.describe())
    return Explanation("; ".join(filter(None, parts)) or "trimtab was not asked to adjust this module")


def observe_loss(model: torch.nn.Module, loss: torch.Tensor | float) -> None:
    """Tell trimtab the loss of a step, so that its guard notices when fewer bits do harm. Optional.

    The value is read later, beside the training, so this does not synchronize the GPU. It is also recorded in the
    run folder, if there is one.
    """
    controller, recorder = adaptive_of(model), recorder_of(model)
    if controller is not None:
        controller.observe_loss(loss)
    if recorder is not None:
        recorder.observe_loss(loss, by_script=True)
