"""The agreed weights of one fragment: the outer gradient, its exchange, and the outer step.

After a round every worker has changed its weights in its own way. The outer gradient is what a worker took off the
weights that all agreed on. Its average over the workers, weighted by their samples, is the gradient of an outer SGD
with Nesterov momentum, whose result all agree on next. All workers compute it from the same decoded bytes, so it is
the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist

from trimtab.codec import Block, ErrorFeedback
from trimtab.codec.host_payloads import sleep_until_done
from trimtab.codec.packing import RAW
from trimtab.collectives import Piece
from trimtab.collectives.reduction import PlainReduction, Reduction, started
from trimtab.local.device import host_reduction, in_stream
from trimtab.local.fragments import Part
from trimtab.local.workers import HOST, Workers
from trimtab.local_settings import LocalSettings
from trimtab.wire_format import MIN_NUMEL


class AgreedFragment:
    """Some parameters: what all workers agreed on, the outer momentum, and the exchange that is under way.

    A worker's own thread only copies its weights when they are sent, and adds one tensor when the average is taken:
    everything else happens beside the training, with the collectives, which are between the hosts' memories. Of a
    model on a GPU too: an NCCL kernel that waits for a late worker would hold up all that synchronizes the device. So
    there payloads are copied, and arithmetic and codec run on the device, in a stream of their own. The agreed weights
    and the momentum stay in the host's memory meanwhile; residuals are on the device.
    """

    def __init__(
        self,
        parameters: Mapping[Part, torch.nn.Parameter],
        workers: Workers,
        settings: LocalSettings,
        *,
        seed: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`stream`: of a model on a GPU, where exchanges are computed; several fragments may share one."""
        self.settings = settings
        # What is encoded comes first: one piece, however many parameters there are.
        self.parameters = dict(sorted(parameters.items(), key=lambda item: not self._is_encoded(item[1])))
        weights = self._weights()
        self.device = weights[0].device
        self._shapes = [weight.shape for weight in weights]
        self._numel = sum(weight.numel() for weight in weights)
        self._stream = stream
        self.agreed, self.momentum, self._next = (
            torch.zeros(self._numel, dtype=torch.float32, device=HOST, pin_memory=stream is not None)
            for _ in range(3)
        )
        """`_next`, when an exchange has ended: the weights that are agreed on from when they are taken."""
        self._shift: torch.Tensor | None = None
        """On the parameters' device, while an exchange is under way: this worker's weights when it began, then what to
        add to the present ones."""
        self._workers, self._seed = workers, seed
        self.feedback = None if settings.bits is None else ErrorFeedback()
        self._reduction = self._plan(seed)
        self._future: Any = None
        self._lost = False
        self._shares: list[float] = []
        self._norms: list[float] = []
        """Of the last exchange, from all workers: their parts of the samples, and squared norms of their changes."""
        self._mean_norm = 0.0
        """Of the last exchange: the squared norm of the mean change, as this worker computed it."""
        self.measured: tuple[float, list[float], list[float]] | None = None
        """Of the exchange before the last, the same on all workers: what `MeasuredAgreement` is told."""
        self.read(self.agreed)

    def drop_feedback(self) -> None:
        """From now on what rounding leaves out is lost."""
        self.feedback = None
        self._reduction = self._plan(self._seed)

    def _plan(self, seed: int) -> Reduction:
        bits, stages = self.settings.bits, self._workers.stages
        if bits is None and self._stream is None:
            return PlainReduction(stages)
        whole = zip(self.parameters.values(), self._shapes, strict=True)
        encoded = sum(shape.numel() for p, shape in whole if self._is_encoded(p))
        pieces = [
            (
                Piece(name=name, offset=offset, numel=numel, bits=own, block=self.settings.block),
                torch.Size([numel]),
            )
            for name, offset, numel, own in (
                ("encoded", 0, encoded, bits or RAW),
                ("exact", encoded, self._numel - encoded, RAW),
            )
            if numel
        ]
        codec = Block(bits=bits or 8, block=self.settings.block, stochastic=False)
        return host_reduction(pieces, self.device, stages, codec, seed=seed, feedback=self.feedback)

    def _is_encoded(self, p: torch.nn.Parameter) -> bool:
        return self.settings.bits is not None and p.dim() > 1 and p.numel() >= MIN_NUMEL

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The values of a flat buffer that belong to each part of a parameter, in its shape."""
        parts = flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _weights(self) -> list[torch.Tensor]:
        return [part.of(p.detach()) for part, p in self.parameters.items()]

    @torch.no_grad()
    def read(self, flat: torch.Tensor, *, wait: bool = True) -> None:
        """Copy the parameters into a flat buffer; without `wait` it is filled when the device's stream gets there."""
        torch._foreach_copy_(self.views(flat), self._weights(), non_blocking=not wait)

    @torch.no_grad()
    def write(self, flat: torch.Tensor) -> None:
        """Copy a flat buffer into the parameters."""
        torch._foreach_copy_(self._weights(), self.views(flat))

    @property
    def in_flight(self) -> bool:
        return self._future is not None

    @property
    def arrived(self) -> bool:
        """Whether `take` would not wait."""
        return self._future is not None and bool(self._future.done())

    def send(self, runner: Any, round_: int, samples: int) -> None:
        """Start the exchange of what this worker took off the agreed weights in its last `samples` samples.

        A worker whose weights are not finite counts for nothing, and takes those of the others.
        """
        assert self._future is None, "a fragment is taken before it is sent again"
        if self._shift is None:
            self._shift = torch.empty(self._numel, dtype=torch.float32, device=self.device)
        self.read(self._shift, wait=False)
        steps = self._exchange(self._shift, round_, samples)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self._shift.record_stream(self._stream)
            steps = in_stream(steps, self._stream)
        self._future = runner.submit(steps, self._next)

    def _exchange(self, shift: torch.Tensor, round_: int, samples: int) -> Iterator[dist.Work]:
        """1. sum the numbers of samples over all ranks, and norms with them. Of the mean change each worker may compute
           another last bit, so the first worker's counts, which arrives with the next exchange.
        2. average the changes over the workers' leaders, weighted by samples.
        3. each leader hands the average to its worker's other ranks; all take the outer step.
        """
        on_gpu, workers, settings = self._stream is not None, self._workers, self.settings
        change = torch.empty_like(shift) if on_gpu else self._next
        agreed = self.agreed.to(self.device, non_blocking=True)  # on a CPU itself
        torch.sub(agreed, shift, out=change)
        norm = torch.dot(change, change)
        sleep_until_done(self.device)
        own = float(norm)
        self._lost = not isfinite(own)
        if self._lost:
            change.zero_()
            own = 0.0
        report = workers.report(0 if self._lost else samples, own, self._mean_norm)
        yield started(dist.all_reduce(report, group=workers.everyone, async_op=True))
        self.measured = (float(report[0, 2]), self._norms, self._shares) if self._shares else None
        self._shares, self._norms = workers.shares(report), report[:, 1].tolist()
        scale = self._shares[workers.index]
        if workers.leads:
            yield from self._reduction.steps(change, step=round_, scale=scale)
        if workers.inside is not None:
            here = self._next
            if on_gpu:
                here.copy_(change, non_blocking=True)
                sleep_until_done(self.device)
            yield started(dist.broadcast(here, group=workers.inside, group_src=0, async_op=True))
            if on_gpu:
                change.copy_(here, non_blocking=True)
        mean_norm = torch.dot(change, change)
        momentum = self.momentum.to(self.device, non_blocking=True)
        outer_step(agreed, momentum, change, settings.outer_lr, settings.outer_momentum)
        torch.sub(change, shift, alpha=settings.keep, out=shift)
        if on_gpu:
            self.momentum.copy_(momentum, non_blocking=True)
            self._next.copy_(change, non_blocking=True)
            sleep_until_done(self.device)
        self._mean_norm = float(mean_norm)

    def wait(self) -> None:
        """Wait until the average has arrived."""
        if self._future is not None:
            self._future.wait()

    @torch.no_grad()
    def take(self) -> bool:
        """Agree on the new weights; this worker continues from them and what it changed since it sent.

        Returns whether its own weights were not finite: it then continues from the agreed ones.
        """
        self.wait()
        self._future = None
        self.agreed, self._next = self._next, self.agreed
        shift = self._shift
        assert shift is not None
        if self._stream is not None:
            self._shift = None  # no memory of the device between exchanges
        if self._lost or not self.settings.delay:
            self.write(self.agreed)
            return self._lost
        if self.settings.keep != 1:
            torch._foreach_mul_(self._weights(), self.settings.keep)
        torch._foreach_add_(self._weights(), self.views(shift))
        return False

    def restore(self) -> None:
        """Continue from the agreed weights: this worker's own are lost, those that it sends now included."""
        self.wait()
        self._lost = self._future is not None
        self.write(self.agreed)

    def state_dict(self) -> dict[str, Any]:
        """What all workers have alike, and this worker's residuals and exchange under way."""
        self.wait()
        agreed = self.agreed if self._future is None else self._next
        own: dict[str, Any] = {
            "residuals": {} if self.feedback is None else self.feedback.state_dict(),
            "norms": [self._mean_norm, self._norms, self._shares, self.measured],
        }
        if self._future is not None and self._shift is not None:
            own["flight"] = {
                "before": self.agreed.clone(),
                "shift": self._shift.cpu().clone(),
                "lost": self._lost,
            }
        return {"agreed": self._named(agreed), "momentum": self._named(self.momentum), "own": own}

    def _named(self, flat: torch.Tensor) -> dict[Part, torch.Tensor]:
        return dict(zip(self.parameters, (view.clone() for view in self.views(flat)), strict=True))

    def set_agreed(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take these weights as those that all workers agreed on last."""
        self._fill(self.agreed, values)

    def _fill(self, flat: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        torch._foreach_copy_(self.views(flat), [part.of(values[part.name]).cpu() for part in self.parameters])

    def load_state_dict(self, agreed: Mapping[str, Any], momentum: Mapping[str, Any]) -> None:
        """Continue from the agreed weights and the momentum of all workers."""
        self._fill(self.agreed, agreed)
        self._fill(self.momentum, momentum)
        self._future = None

    def load_own(self, own: Mapping[str, Any]) -> None:
        """Continue with this worker's own residuals and exchange."""
        if self.feedback is not None:
            residuals = {name: value.to(self.device) for name, value in own["residuals"].items()}
            self.feedback.load_state_dict(residuals)
        self._mean_norm, self._norms, self._shares, self.measured = own["norms"]
        if "flight" in own:
            self.agreed, self._next = self._next, self.agreed
            self.agreed.copy_(own["flight"]["before"])
            self._shift = own["flight"]["shift"].to(self.device, copy=True)
            self._lost = own["flight"]["lost"]
            self._future = torch.futures.Future()
            self._future.set_result(self._next)

    def restart(self) -> None:
        """Begin anew from the present weights, which all workers have alike. Nothing may be under way."""
        self.read(self.agreed)
        self.momentum.zero_()
        if self.feedback is not None:
            self.feedback.load_state_dict({})
        self._mean_norm, self._norms, self._shares, self.measured = 0.0, [], [], None

    def differs(self) -> bool:
        """Whether this worker's weights are others than those agreed on."""
        pairs = zip(self._weights(), self.views(self.agreed), strict=True)
        return any(not torch.equal(own.float().cpu(), agreed) for own, agreed in pairs)


def outer_step(
    agreed: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, lr: float, factor: float
) -> None:
    """SGD with Nesterov momentum: the new weights replace the gradient."""
    torch.add(gradient, momentum, alpha=factor, out=momentum)
    gradient.add_(momentum, alpha=factor)
    torch.sub(agreed, gradient, alpha=lr, out=gradient)
