"""How sensitive a training job's operators are to rounding, sampled from its own steps.

A calibration needs passes of its own; this needs none. In one step the operators are recorded that fit a few
megabytes, by hooks that are removed after it, and of what was recorded a few rows are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from trimtab.measure.damage.noise_sources import as_matrices, errors
from trimtab.measure.damage.recorder import OperatorCall, Recorder
from trimtab.precision_names import ATTENTION, OPERATOR_PRECISIONS
from trimtab.predict.damage import Sensitivity

MOST_BYTES = 16 << 20
"""Recorded in a step, or else one operator."""

MOST_VALUES = 1 << 15
"""Of each tensor of a call that are looked at."""


class SampledStep:
    """Records one training step of a model, from `begin` to `end`.

    Args:
        precisions: by operator, those whose errors are wanted. Products of activations are left out: they can only be
            recorded by intercepting every function of torch.
    """

    def __init__(self, model: nn.Module, precisions: Mapping[str, Collection[str]]) -> None:
        self._model = model
        self._precisions = {name: p for name, p in precisions.items() if not name.endswith(ATTENTION)}
        self._left: set[str] = set(self._precisions)
        self._recorder: Recorder | None = None

    @property
    def open(self) -> bool:
        """Whether a step is being recorded."""
        return self._recorder is not None

    def begin(self) -> None:
        """Record the step that follows: operators that were not recorded lately."""
        self._left = self._left or set(self._precisions)
        self._recorder = Recorder(self._model, only=self._left, limit=MOST_BYTES, products=False)
        self._recorder.__enter__()

    def end(self) -> dict[str, Sensitivity]:
        """The sensitivities of the operators that were recorded; the model has its own hooks again."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return {}
        recorder.__exit__(None, None, None)
        self._left -= recorder.recorded
        if not recorder.recorded:
            self._left = set()  # the rest is not called
        found: dict[str, Sensitivity] = {}
        for call in recorder.finished:
            if call.name not in found:  # of several calls the first stands for all
                found[call.name] = sensitivity(call, self._precisions[call.name])
        return {name: own for name, own in found.items() if math.isfinite(own.size)}


def sensitivity(call: OperatorCall, precisions: Collection[str]) -> Sensitivity:
    """From some rows of a recorded call."""
    matrices = as_matrices(_some_rows(call))
    applicable = [p for p in precisions if p in OPERATOR_PRECISIONS[call.kind] and p != "fp32"]
    totals = {
        precision: torch.stack(
            [
                error.sum() / matrices.tensors[rounded].square().sum().clamp_min(1e-30)
                for _, rounded, error in errors(matrices, precision)
            ]
        ).sum()
        for precision in applicable
    }
    gradient = matrices.tensors["gy"]
    values = matrices.tensors.get("x", matrices.tensors["y"])
    size = values.square().mean() * gradient.square().mean() * values.shape[-1] * gradient.shape[-1]
    numbers = torch.stack([size, *totals.values()]).tolist()  # one transfer from the device
    return Sensitivity(size=numbers[0], errors=dict(zip(totals, numbers[1:], strict=True)))


def _some_rows(call: OperatorCall) -> OperatorCall:
    """The call with as many rows (samples of a convolution) as are looked at."""
    tensors = [*call.operands, call.result]
    linear = call.kind == "linear"
    widths = [t.shape[-1] if linear else t.numel() // max(1, len(t)) for t in tensors]
    rows = max(1, MOST_VALUES // max(1, *widths))

    def some(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.reshape(-1, tensor.shape[-1]) if linear else tensor)[:rows]

    return replace(
        call,
        operands=[some(operand) for operand in call.operands],
        result=some(call.result),
        operand_grads=[None if grad is None else some(grad) for grad in call.operand_grads],
        result_grad=None if call.result_grad is None else some(call.result_grad),
    )
