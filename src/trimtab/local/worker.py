"""One worker of a job with local steps: its fragments, their turns, and the model's buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab.collectives import STAGE_GROUPS, runner_for
from trimtab.collectives.groups import destroy_groups, private_groups
from trimtab.collectives.layout import fingerprint
from trimtab.doors.agreement import check_state_version, require_agreement
from trimtab.errors import TrimtabError
from trimtab.local.agreement import AgreedFragment, AveragedBuffers
from trimtab.local.fragments import split, turns
from trimtab.local_settings import LocalSettings
from trimtab.model_state import JobBound

STATE_VERSION = 1


class LocalWorker(JobBound):
    """Exchanges the weights of a module with the other workers, fragment after fragment, while it trains.

    Every rank of the group is a worker. Collectives run beside the training, on groups of their own; `step` waits only
    for a fragment whose delay is over.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        settings: LocalSettings,
        *,
        seed: int = 0,
        start: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Collective. All workers start from the weights and buffers of the group's first rank.

        Args:
            start: weights that all workers agreed on some steps ago; the present ones are then each worker's own.
        """
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise TrimtabError("local_steps: the model has no parameter that is trained")
        self.settings, self.group = settings, group
        self.device = next(iter(trained.values())).device
        self._groups = private_groups(group, self.device, 1 + STAGE_GROUPS)
        sizes = {name: p.numel() for name, p in trained.items()}
        require_agreement(
            fingerprint([], str(settings), *sizes.items(), seed),
            self.device,
            self._groups[0],
            what="changes of weights",
            remedy="give trimtab.local_steps the same model and arguments on every rank",
        )
        buffers = [b for b in module.buffers() if b.is_floating_point()]
        first = dist.get_global_rank(self._groups[0], 0)
        weights = [p.detach() for p in trained.values()] if start is None else []
        for tensor in weights + buffers:
            dist.broadcast(tensor, first, group=self._groups[0])
        self.fragments = [
            AgreedFragment({name: trained[name] for name in names}, self._groups, settings, seed=seed)
            for names in split(sizes, settings.fragments)
        ]
        if start is not None:
            for fragment in self.fragments:
                fragment.set_agreed(start)
        self._turns = turns(settings.every, len(self.fragments))
        self._buffers = AveragedBuffers(buffers, self._groups[0]) if buffers else None
        self._runner = runner_for(self.device)
        self._samples = [0] * len(self.fragments)
        self.steps = 0

    def step(self, samples: int) -> None:
        """Tell that a step of so many samples has ended: fragments whose turn it is are taken and sent."""
        self.steps += 1
        self._samples = [before + samples for before in self._samples]
        round_, place = divmod(self.steps, self.settings.every)
        for index, fragment in enumerate(self.fragments):
            since = (place - self._turns[index]) % self.settings.every
            if fragment.in_flight and (since >= self.settings.delay or since == 0):
                fragment.take()
            if since == 0:
                fragment.send(self._runner, round_, self._samples[index])
                self._samples[index] = 0
                if not self.settings.delay:
                    fragment.take()
        if self._buffers is not None:  # with the last fragment
            if self._buffers.in_flight and place in (0, self.settings.delay):
                self._buffers.take()
            if place == 0:
                self._buffers.send(self._runner)
                if not self.settings.delay:
                    self._buffers.take()

    def without_feedback(self) -> None:
        """Drop what rounding leaves out, instead of sending it next time; for comparisons."""
        for fragment in self.fragments:
            fragment.drop_feedback()

    def missed(self, steps: int) -> None:
        """Steps that the worker took before this was made; their turns are over."""
        self.steps += steps

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
            "rank": self.group.rank(),
            "world_size": self.group.size(),
            "every": self.settings.every,
            "agreed": {name: value for state in states for name, value in state["agreed"].items()},
            "momentum": {name: value for state in states for name, value in state["momentum"].items()},
            "own": [state["own"] for state in states],
            "samples": list(self._samples),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the last agreement, on the same or another number of workers."""
        check_state_version("local steps", state, STATE_VERSION)
        names = {name for fragment in self.fragments for name in fragment.parameters}
        if missing := sorted(names ^ state["agreed"].keys()):
            raise TrimtabError(
                f"the state of local steps belongs to another model: it differs in {missing[0]}"
            )
        self.steps = state["steps"]
        for fragment in self.fragments:
            fragment.load_state_dict(state["agreed"], state["momentum"])
        same = (state["rank"], state["world_size"], state["every"], len(state["own"]))
        if same == (self.group.rank(), self.group.size(), self.settings.every, len(self.fragments)):
            self._samples = list(state["samples"])
            for fragment, own in zip(self.fragments, state["own"], strict=True):
                fragment.load_own(own)

    def close(self) -> None:
        """Stop the threads and destroy the groups."""
        self._runner.close()
        destroy_groups(self._groups)
