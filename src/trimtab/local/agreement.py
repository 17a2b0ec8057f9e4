"""The agreed weights of one fragment: the outer gradient, its exchange, and the outer step.

After a round every worker has changed its weights in its own way. The outer gradient is what a worker took off the
weights that all agreed on. Its average over the workers, weighted by their samples, is the gradient of an outer SGD
with Nesterov momentum, whose result all agree on next. All workers compute it from the same decoded bytes, so it is
the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trimtab.codec import Block, ErrorFeedback
from trimtab.codec.packing import RAW
from trimtab.collectives import Piece, reduction_for
from trimtab.collectives.reduction import PlainReduction, Reduction, started
from trimtab.local_settings import LocalSettings
from trimtab.wire_format import MIN_NUMEL


class AgreedFragment:
    """Some parameters: what all workers agreed on, the outer momentum, and the exchange that is under way."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        groups: Sequence[dist.ProcessGroup],
        settings: LocalSettings,
        *,
        seed: int,
    ) -> None:
        """`groups`: one for the numbers of samples, and one for each stage of the reduction."""
        self.parameters = dict(parameters)
        self.settings = settings
        first = next(iter(self.parameters.values()))
        self.device = first.device
        numel = sum(p.numel() for p in self.parameters.values())
        self.agreed = torch.empty(numel, dtype=torch.float32, device=self.device)
        self.momentum = torch.zeros_like(self.agreed)
        self._sent = torch.empty_like(self.agreed)
        self._change = torch.empty_like(self.agreed)
        self._groups, self._seed = groups, seed
        self.feedback = None if settings.bits is None else ErrorFeedback()
        self._reduction = self._plan(seed)
        self._future: Any = None
        self.read(self.agreed)

    def drop_feedback(self) -> None:
        """From now on what rounding leaves out is lost."""
        self.feedback = None
        self._reduction = self._plan(self._seed)

    def _plan(self, seed: int) -> Reduction:
        bits, stages = self.settings.bits, self._groups[1:]
        if bits is None:
            return PlainReduction(stages)
        pieces, offset = [], 0
        for name, p in self.parameters.items():
            own = bits if p.dim() > 1 and p.numel() >= MIN_NUMEL else RAW
            piece = Piece(name=name, offset=offset, numel=p.numel(), bits=own, block=self.settings.block)
            pieces.append((piece, p.shape))
            offset += p.numel()
        codec = Block(bits=bits, block=self.settings.block, stochastic=False)
        return reduction_for(
            pieces, torch.float32, self.device, stages, codec, seed=seed, feedback=self.feedback
        )

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a flat buffer that belong to each parameter, in its shape."""
        parts = flat.split([p.numel() for p in self.parameters.values()])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters.values(), strict=True)]

    @torch.no_grad()
    def read(self, flat: torch.Tensor) -> None:
        """Copy the parameters into a flat buffer."""
        torch._foreach_copy_(self.views(flat), [p.detach() for p in self.parameters.values()])

    @torch.no_grad()
    def write(self, flat: torch.Tensor) -> None:
        """Copy a flat buffer into the parameters."""
        torch._foreach_copy_([p.detach() for p in self.parameters.values()], self.views(flat))

    @property
    def in_flight(self) -> bool:
        return self._future is not None

    def send(self, runner: Any, round_: int, samples: int) -> None:
        """Start the exchange of what this worker took off the agreed weights in its last `samples` samples.

        A worker whose weights are not finite counts for nothing, and takes those of the others.
        """
        assert self._future is None, "a fragment is taken before it is sent again"
        self.read(self._sent)
        torch.sub(self.agreed, self._sent, out=self._change)
        if not bool(torch.isfinite(self._change.sum())):
            self._change.zero_()
            self._sent.fill_(torch.nan)
            samples = 0
        self._future = runner.submit(self._exchange(round_, samples), self._change)

    def _exchange(self, round_: int, samples: int) -> Iterator[dist.Work]:
        total = torch.tensor([samples], dtype=torch.float32, device=self.device)
        yield started(dist.all_reduce(total, group=self._groups[0], async_op=True))
        everyone = float(total)
        yield from self._reduction.steps(
            self._change, step=round_, scale=samples / everyone if everyone else 0.0
        )

    def wait(self) -> None:
        """Wait until the average has arrived."""
        if self._future is not None:
            self._future.wait()

    @torch.no_grad()
    def take(self) -> None:
        """The outer step; then this worker continues from the new weights and what it changed since it sent."""
        self.wait()
        self._future = None
        settings = self.settings
        outer_step(self.agreed, self.momentum, self._change, settings.outer_lr, settings.outer_momentum)
        now = self._change  # no longer needed
        self.read(now)
        now.sub_(self._sent)
        if not bool(torch.isfinite(now.sum())):
            now.zero_()
        self.write(now.mul_(settings.keep).add_(self.agreed))

    def state_dict(self) -> dict[str, Any]:
        """What all workers have alike, and this worker's residuals and exchange under way."""
        self.wait()
        names = list(self.parameters)
        own: dict[str, Any] = {"residuals": {} if self.feedback is None else self.feedback.state_dict()}
        if self._future is not None:
            own["flight"] = {"change": self._change.clone(), "sent": self._sent.clone()}
        return {
            "agreed": dict(zip(names, (v.clone() for v in self.views(self.agreed)), strict=True)),
            "momentum": dict(zip(names, (v.clone() for v in self.views(self.momentum)), strict=True)),
            "own": own,
        }

    def set_agreed(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take these weights as those that all workers agreed on last."""
        self._fill(self.agreed, values)

    def _fill(self, flat: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        torch._foreach_copy_(self.views(flat), [values[name].to(self.device) for name in self.parameters])

    def load_state_dict(self, agreed: Mapping[str, Any], momentum: Mapping[str, Any]) -> None:
        """Continue from the weights and the momentum of all workers."""
        self._fill(self.agreed, agreed)
        self._fill(self.momentum, momentum)
        self._future = None

    def load_own(self, own: Mapping[str, Any]) -> None:
        """Continue with this worker's own residuals and exchange."""
        if self.feedback is not None:
            residuals = {name: value.to(self.device) for name, value in own["residuals"].items()}
            self.feedback.load_state_dict(residuals)
        if "flight" in own:
            self._change.copy_(own["flight"]["change"])
            self._sent.copy_(own["flight"]["sent"])
            self._future = torch.futures.Future()
            self._future.set_result(self._change)


class AveragedBuffers:
    """Running statistics, as of batch norm: once a round they become their mean over the workers."""

    def __init__(self, buffers: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._buffers, self._group = buffers, group
        self._flat: torch.Tensor | None = None
        self._future: Any = None

    @property
    def in_flight(self) -> bool:
        return self._future is not None

    def send(self, runner: Any) -> None:
        self._flat = torch.cat([b.reshape(-1).float() for b in self._buffers])
        plain = PlainReduction([self._group])
        self._future = runner.submit(
            plain.steps(self._flat, step=0, scale=1 / self._group.size()), self._flat
        )

    def take(self) -> None:
        assert self._flat is not None
        self._future.wait()
        self._future = None
        for b, mean in zip(self._buffers, self._flat.split([b.numel() for b in self._buffers]), strict=True):
            b.copy_(mean.view_as(b))


def outer_step(
    agreed: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, lr: float, factor: float
) -> None:
    """SGD with Nesterov momentum, in place."""
    momentum.mul_(factor).add_(gradient)
    agreed.add_(gradient, alpha=-lr).add_(momentum, alpha=-lr * factor)
