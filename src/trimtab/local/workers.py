"""Which ranks are one worker, and the process groups in which workers and their ranks communicate."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.collectives import STAGE_GROUPS
from trimtab.collectives.groups import destroy_groups, private_groups

HOST = torch.device("cpu")
"""Where changes of weights are exchanged, also those of a model on a GPU."""


def start_alike(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Give every rank the first one's values; where all have them already, only a hash travels. Collective."""
    if not are_alike(tensors, group, device):
        for tensor in tensors:
            values = tensor.detach().contiguous()
            dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
            tensor.detach().copy_(values)


def are_alike(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks have the same values. Collective."""
    digest = blake2b(digest_size=7)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    own = torch.tensor([int.from_bytes(digest.digest(), "little")], device=device)
    everyone = torch.empty(group.size(), dtype=own.dtype, device=device)
    all_gather_single(everyone, own, group)
    return bool((everyone == everyone[0]).all())


class Workers:
    """The workers of a job: single ranks, or hosts whose ranks average their gradients in every step.

    The first rank of a worker, its leader, exchanges with the other leaders and hands the result to its own ranks.
    All exchanges are between the hosts' memories, over Gloo; only gradients stay on the device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        members: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Collective.

        Args:
            members: the ranks of each worker, as the group counts them; by default every rank is one.
        """
        rank, self.ranks = group.rank(), group.size()
        self.members = tuple(map(tuple, members or [(each,) for each in range(self.ranks)]))
        self.index = next(index for index, own in enumerate(self.members) if rank in own)
        self.own = self.members[self.index]
        self.leads = self.own[0] == rank
        self.inside: dist.ProcessGroup | None = None
        """Of this worker's ranks: results of exchanges."""
        self.gradients: dist.ProcessGroup | None = None
        """Of this worker's ranks: the averages of every step. Another thread uses it, so it is another group."""
        if max(map(len, self.members)) == 1:
            self.everyone, *stages = private_groups(group, HOST, 1 + STAGE_GROUPS)
            self.stages = tuple(stages)
        else:
            (self.everyone,) = private_groups(group, HOST, 1)
            leaders = [own[0] for own in self.members]
            others = [each for each in range(self.ranks) if each not in leaders]
            self.stages = private_groups(group, HOST, STAGE_GROUPS, ranks=leaders if self.leads else others)
            (self.inside,) = private_groups(group, HOST, 1, ranks=self.own)
            (self.gradients,) = private_groups(group, device, 1, ranks=self.own)

    @property
    def count(self) -> int:
        return len(self.members)

    def report(self, samples: int, *norms: float) -> torch.Tensor:
        """What this rank adds to the sum over all ranks that begins an exchange: a row of numbers of each worker.

        Samples are those of all its ranks; of `norms` all its ranks have the same, so its leader reports them.
        """
        table = torch.zeros(self.count, 1 + len(norms), dtype=torch.float64, device=HOST)
        table[self.index, 0] = samples
        if self.leads:
            table[self.index, 1:] = torch.tensor(norms, dtype=torch.float64)
        return table

    def shares(self, report: torch.Tensor) -> list[float]:
        """Each worker's part of all samples, from the sum of the reports."""
        samples = report[:, 0].tolist()
        whole = sum(samples)
        return [each / whole if whole else 0.0 for each in samples]

    def close(self) -> None:
        groups = (self.everyone, *self.stages, self.inside, self.gradients)
        destroy_groups([group for group in groups if group is not None])
