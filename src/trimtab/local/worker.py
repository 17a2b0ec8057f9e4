"""One worker of a job with local steps: its fragments, their turns, and the model's buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab.collectives import runner_for
from trimtab.collectives.layout import fingerprint
from trimtab.doors.agreement import check_state_version, require_agreement
from trimtab.errors import TrimtabError
from trimtab.local.agreement import AgreedFragment
from trimtab.local.buffers import AveragedBuffers
from trimtab.local.device import streams_for
from trimtab.local.fragments import Part, split, turns
from trimtab.local.measured_agreement import MeasuredAgreement
from trimtab.local.workers import HOST, Workers, start_alike
from trimtab.local_settings import LocalSettings
from trimtab.model_state import JobBound

STATE_VERSION = 3
STREAMS = 2
"""On a GPU fragments compute in so many streams by turns: one that is sent waits there for the training's last kernels,
and the one before, which arrives meanwhile, should not. Memory of the device is kept for so many fragments."""


class LocalWorker(JobBound):
    """Exchanges the weights of a module with the other workers, fragment after fragment, while it trains.

    Collectives run beside the training, on groups of their own; `step` waits only for a fragment whose delay is over.
    A round is `settings.every` steps of a worker, or another number where the worker is slower or faster
    (`begin_round`): every worker sends every fragment once in a round.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        settings: LocalSettings,
        *,
        workers: Workers | None = None,
        seed: int = 0,
        start: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Collective. All workers start from the weights and buffers of the group's first rank.

        Args:
            workers: which ranks are one worker; by default every rank is one.
            start: weights that all workers agreed on some steps ago; the present ones are then each worker's own.
        """
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise TrimtabError("local_steps: the model has no parameter that is trained")
        self.settings, self.group = settings, group
        self.device = next(iter(trained.values())).device
        self.workers = workers or Workers(group, self.device)
        everyone = self.workers.everyone
        shapes = {name: tuple(p.shape) for name, p in trained.items()}
        require_agreement(
            fingerprint([], str(settings), *shapes.items(), seed),
            HOST,
            everyone,
            what="changes of weights",
            remedy="give trimtab.local_steps the same model and arguments on every rank",
        )
        buffers = [b for b in module.buffers() if b.is_floating_point()]
        weights = [p.detach() for p in trained.values()] if start is None else []
        start_alike(weights + buffers, group, self.device)
        streams = streams_for(self.device, STREAMS)
        self.fragments = [
            AgreedFragment(
                {part: trained[part.name] for part in parts},
                self.workers,
                settings,
                seed=seed,
                stream=streams[index % STREAMS],
            )
            for index, parts in enumerate(split(shapes, settings.fragments))
        ]
        if start is not None:
            for fragment in self.fragments:
                fragment.set_agreed(start)
        self._buffers = AveragedBuffers(buffers, everyone) if buffers else None
        self._runner = runner_for(HOST)
        self.agreement = MeasuredAgreement(fragments=len(self.fragments))
        self._samples = [0] * len(self.fragments)
        self._ages = [0] * len(self.fragments)
        """Steps since each fragment was sent."""
        self.restored: Callable[[], None] = lambda: None
        """Is called when this worker's weights were not finite, and have been replaced by the agreed ones."""
        self.steps = self._round = self._place = 0
        self.late = 0
        """How often a fragment was taken later than after its delay."""
        self.begin_round(settings.every)

    @property
    def between_rounds(self) -> bool:
        """Whether the last round has ended, and no step has followed."""
        return not self._place

    def begin_round(self, length: int) -> None:
        """Take so many steps in this round. Called before its first step; other workers may take other numbers."""
        if self._place:
            raise TrimtabError(
                f'local_steps: a round cannot begin {self._place} steps after the last one did; with uneven="steps" '
                "train one step on every batch of the loader, and on no others"
            )
        self._length = length
        self._turns = turns(length, len(self.fragments))
        # A delay in time is the same for all workers: one with fewer steps in a round waits for fewer.
        self._delay = -(-self.settings.delay * length // self.settings.every)

    def step(self, samples: int) -> None:
        """Tell that a step of so many samples has ended: fragments whose turn it is are taken and sent."""
        self.steps += 1
        self._place += 1
        self._samples = [before + samples for before in self._samples]
        self._ages = [age + 1 for age in self._ages]
        for index, fragment in enumerate(self.fragments):
            turn = self._turns[index] == self._place
            if fragment.in_flight and (turn or self._is_due(index)):
                self._take(index)
            if turn:
                fragment.send(self._runner, self._round, self._samples[index])
                self._samples[index] = self._ages[index] = 0
                if not self.settings.delay:
                    self._take(index)
        ends = self._place == self._length
        if self._buffers is not None:  # with the last fragment
            if self._buffers.in_flight and (ends or self._place == self._delay):
                self._buffers.take()
            if ends:
                self._buffers.send(self._runner)
                if not self.settings.delay:
                    self._buffers.take()
        if ends:
            self._round, self._place = self._round + 1, 0

    def _is_due(self, index: int) -> bool:
        """Whether a fragment is taken now: after its delay, or up to `patience` steps later if it has not arrived."""
        over = self._ages[index] - self._delay
        if over < 0:
            return False
        late = self.settings.patience > over and not self.fragments[index].arrived
        self.late += late and over == 0
        return not late

    def _take(self, index: int) -> None:
        lost = self.fragments[index].take()
        if (measured := self.fragments[index].measured) is not None:
            self.agreement.add(*measured)
        if lost:
            # One fragment that is not finite soon makes the others so: all begin anew.
            for fragment in self.fragments:
                fragment.restore()
            self.restored()

    @property
    def rounds(self) -> int:
        """Rounds that have ended."""
        return self._round

    @property
    def at_round_end(self) -> bool:
        """Whether the last step ended a round."""
        return self._place == 0

    @property
    def sends_next(self) -> bool:
        """Whether the end of the next step sends something."""
        place = self._place + 1
        return place in self._turns or (self._buffers is not None and place == self._length)

    def finish(self) -> None:
        """Take all that is under way, waiting for it."""
        for index, fragment in enumerate(self.fragments):
            if fragment.in_flight:
                self._take(index)
        if self._buffers is not None and self._buffers.in_flight:
            self._buffers.take()

    def agree_now(self) -> None:
        """Agree on everything that workers did until now, between two turns, and wait for it. Collective."""
        self.finish()
        for index, fragment in enumerate(self.fragments):
            fragment.send(self._runner, self._round, self._samples[index])
            self._samples[index] = self._ages[index] = 0
        if self._buffers is not None:
            self._buffers.send(self._runner)
        self.finish()

    def differs(self) -> bool:
        """Whether this worker's weights are others than those agreed on."""
        return any(fragment.differs() for fragment in self.fragments)

    def restart(self) -> None:
        """Begin anew from the present weights, which all workers have alike. Nothing may be under way."""
        for fragment in self.fragments:
            fragment.restart()
        if self._buffers is not None:
            self._buffers.restart()

    def without_feedback(self) -> None:
        """Drop what rounding leaves out, instead of sending it next time; for comparisons."""
        for fragment in self.fragments:
            fragment.drop_feedback()

    @property
    def samples(self) -> int:
        """Samples since the fragment that was sent first in this round."""
        return max(self._samples)

    def missed(self, steps: int, samples: int) -> None:
        """What the worker did before this was made belongs to its first round."""
        self.steps += steps
        self._samples = [samples] * len(self.fragments)

    @contextmanager
    def agreed_weights(self) -> Iterator[None]:
        """Within it the parameters are those that all workers agreed on last; the worker's own come back after it."""
        own = [torch.empty_like(fragment.agreed) for fragment in self.fragments]
        for fragment, before in zip(self.fragments, own, strict=True):
            fragment.read(before)
            fragment.write(fragment.agreed)
        try:
            yield
        finally:
            for fragment, before in zip(self.fragments, own, strict=True):
                fragment.write(before)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed job needs. Agreed weights and momentum are the same on every worker."""
        states = [fragment.state_dict() for fragment in self.fragments]
        return {
            "version": STATE_VERSION,
            "steps": self.steps,
            "place": [self._round, self._place, self._length],
            "rank": self.group.rank(),
            "world_size": self.group.size(),
            "workers": self.workers.count,
            "settings": asdict(self.settings),
            "agreed": _joined(state["agreed"] for state in states),
            "momentum": _joined(state["momentum"] for state in states),
            "parts": self._parts(),
            "own": [state["own"] for state in states],
            "samples": list(self._samples),
            "ages": list(self._ages),
            "agreement": self.agreement.state_dict(),
            "buffers": None if self._buffers is None else self._buffers.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue where the ranks stopped, if each loads its own state; else from the last agreement. Collective.

        Returns whether they continue where they stopped.
        """
        check_state_version("local steps", state, STATE_VERSION)
        names = {part.name for fragment in self.fragments for part in fragment.parameters}
        if missing := sorted(names ^ state["agreed"].keys()):
            raise TrimtabError(
                f"the state of local steps belongs to another model: it differs in {missing[0]}"
            )
        every = self.settings.every
        before = state["rank"], state["world_size"], state["workers"], state["settings"]["every"]
        now = self.group.rank(), self.group.size(), self.workers.count, every
        own = torch.tensor([float(before == now and state.get("parts") == self._parts())])
        own = own.to(self.device)
        dist.all_reduce(own, op=dist.ReduceOp.MIN, group=self.group)
        for fragment in self.fragments:
            fragment.load_state_dict(state["agreed"], state["momentum"])
        self.steps, self._place = state["steps"], 0
        if not float(own):
            self._round = self.steps // every
            for fragment in self.fragments:
                fragment.write(fragment.agreed)
            if self._buffers is not None:
                self._buffers.restart()
            return False
        self._round, place, length = state["place"]
        self.begin_round(length)
        self._place = place
        self._samples, self._ages = list(state["samples"]), list(state["ages"])
        self.agreement.load_state_dict(state["agreement"])
        for fragment, saved in zip(self.fragments, state["own"], strict=True):
            fragment.load_own(saved)
        if self._buffers is not None and state.get("buffers") is not None:
            self._buffers.load_state_dict(state["buffers"])
        return True

    def _parts(self) -> list[list[str]]:
        return [[part.label for part in fragment.parameters] for fragment in self.fragments]

    def stop(self) -> None:
        """Stop the threads."""
        self._runner.close()

    def close(self) -> None:
        """Stop the threads and destroy the groups."""
        self.stop()
        self.workers.close()


def _joined(fragments: Iterable[Mapping[Part, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole tensors, by the names of parameters."""
    parts: dict[str, list[torch.Tensor]] = {}
    for fragment in fragments:
        for part, value in fragment.items():
            parts.setdefault(part.name, []).append(value)
    return {name: own[0] if len(own) == 1 else torch.cat(own) for name, own in parts.items()}
