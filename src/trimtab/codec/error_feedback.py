"""Error feedback: what a codec left out of one step is added to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class ErrorFeedback:
    """Per parameter name, the residual: the fp32 difference between the exact values and what was sent.

    Works with any codec: call `restore` before encoding and `keep` after it. A residual that is
    not finite (an overflow under loss scaling) is reset to zero.
    """

    loss_scale: torch.Tensor | None = None
    """By how much a GradScaler scales the gradients of the current step; None if it does not."""

    def __init__(self, *, hold_unused: bool = False) -> None:
        """`hold_unused`: in steps where a parameter's values are all zero, keep its residual.

        DDP with `find_unused_parameters` discards the result of a step for parameters that no rank used in it:
        what is sent then is lost.
        """
        self._residuals: dict[str, torch.Tensor] = {}
        self._scales: dict[str, torch.Tensor | None] = {}
        """The loss scale of each residual."""
        self._hold_unused = hold_unused
        self._used: dict[str, torch.Tensor] = {}

    def restore(self, name: str, values: torch.Tensor) -> None:
        """Add, in place, what earlier steps left out."""
        residual = self._residuals.get(name)
        if residual is None:
            return
        before, now = self._scales.get(name), self.loss_scale
        if before is not now:
            residual.mul_((1.0 if now is None else now) / (1.0 if before is None else before))
            self._scales[name] = now
        missing = residual.view_as(values)
        if self._hold_unused:
            self._used[name] = used = values.any()
            missing = missing * used
        values.add_(missing)

    def keep(self, name: str, target: torch.Tensor, sent: torch.Tensor) -> None:
        """Keep `target - sent` for the next step."""
        residual = self._residuals.get(name)
        if residual is None:
            residual = self._residuals[name] = torch.zeros(
                target.numel(), dtype=torch.float32, device=target.device
            )
        self._scales[name] = self.loss_scale
        used = self._used.pop(name, None)
        if used is None:
            torch.sub(target.reshape(-1).float(), sent.reshape(-1).float(), out=residual)
        else:  # keep what was not added to the values
            residual.mul_(~used).add_(target.reshape(-1).float()).sub_(sent.reshape(-1).float())
        # One pass: a single NaN or Inf makes the sum one. (A sum that overflows resets too; no gradient is so large.)
        finite = torch.isfinite(residual.sum())
        if residual.device.type == "cpu":
            if not finite:
                residual.zero_()
        else:  # a branch would make the host wait for the device
            residual.masked_fill_(~finite, 0.0)

    def residual(self, name: str) -> torch.Tensor | None:
        """The residual of a parameter, flat; None before its first step."""
        return self._residuals.get(name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The residuals, without a loss scale."""
        scales = {name: 1.0 if scale is None else scale for name, scale in self._scales.items()}
        return {name: residual / scales.get(name, 1.0) for name, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._scales.clear()
        self._residuals = {name: residual.float().clone() for name, residual in state.items()}
