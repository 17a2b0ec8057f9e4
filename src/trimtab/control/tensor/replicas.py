"""Data parallelism around tensor parallelism: replicas of a model whose units are divided differently.

DistributedDataParallel averages parameters that have the same shape and meaning on all its ranks. Here each tensor
group divides the units as it needs, so a unit may be on another rank in each replica: its gradient is averaged by
these ranks, unit by unit, and DDP is told to leave it alone.

1. In the backward pass, as soon as the gradients of a block are complete (blocks in the reverse order of the model, the
   same on every rank), its values are sent, while the pass continues.
2. At the end of the pass the averages replace the gradients; clipping and the optimizer see only these.
3. After a move every rank learns who owns what in the other replicas, before the next pass.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from trimtab.codec import Block, Codec, ErrorFeedback
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import DTYPES, MIN_BLOCK, RAW
from trimtab.collectives import STAGE_GROUPS, runner_for
from trimtab.collectives.groups import destroy_groups, private_groups
from trimtab.collectives.scattered import Coding, ScatteredReduction, SharedRun
from trimtab.doors.parameters import choose_bits
from trimtab.errors import TrimtabError
from trimtab.model_state import JobBound, JobHook, find_state
from trimtab.sharding.unit_block import ShardedModel, UnitBlock, UnitTensor
from trimtab.sharding.unit_table import UnitTable

_LOST = "tensor_parallel: a rank of another replica was lost; resume the job from its last checkpoint"


class UnitReplicas(JobBound):
    """The replicas of a model on a mesh of two dimensions: who owns each unit in each of them, and their averages."""

    def __init__(self, mesh: DeviceMesh, dimension: str) -> None:
        """`dimension` is the one over which units are sharded."""
        tensor = (mesh.mesh_dim_names or ()).index(dimension)
        self._grid: list[list[int]] = mesh.mesh.movedim(tensor, 1).tolist()
        """The rank of each place in each replica."""
        self.data_group = mesh.get_group(1 - tensor)
        self._index = mesh.get_local_rank(1 - tensor)
        self._owners: dict[str, NDArray[np.int64]] = {}
        """By block, for each replica and unit, the place of its owner."""
        self._known: dict[str, UnitTable] = {}
        """The tables that the other replicas know."""
        self._plans: dict[str, _BlockPlan] = {}
        self._bits: dict[str, tuple[int, int]] = {}
        self._coding: Coding | None = None
        self._count_steps: Callable[[], int] = lambda: 0
        self._order: list[tuple[UnitBlock, set[int]]] = []
        self._ready: set[int] = set()
        self._launched: list[tuple[_BlockPlan, Tensor, Any]] = []
        self._step = 0
        self._averages = self._wrapped = False

    @property
    def first(self) -> bool:
        """Whether this is the first replica, which writes the units to checkpoints."""
        return self._index == 0

    def differ(self, tables: Mapping[str, UnitTable]) -> bool:
        """Whether some replica divides its units differently. Every rank calls it."""
        self._gather(tables)
        return any(bool((owners != owners[0]).any()) for owners in self._owners.values())

    def attach(self, model: nn.Module, sharded: ShardedModel) -> None:
        """Average the gradients of the units from now on. Every rank calls it, before the model is wrapped in DDP."""
        self._sharded, device = sharded, sharded.device
        for block in sharded.blocks.values():
            if len({tensor.parameter.dtype for tensor in block.tensors}) > 1:
                raise TrimtabError(
                    f"tensor_parallel: the parameters of {block.name} have different dtypes, so that replicas cannot "
                    "divide them differently; convert them to one, or use equal shares without balance"
                )
        world = dist.group.WORLD
        assert world is not None
        self._groups = private_groups(world, device, STAGE_GROUPS)
        self._runner = runner_for(device)
        names = [name for _, tensor in sharded.tensors() for name in (tensor.name, *tensor.aliases)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        for _, tensor in sharded.tensors():
            if tensor.parameter.requires_grad:
                tensor.parameter.register_post_accumulate_grad_hook(self._accumulated)
        model.register_forward_pre_hook(JobHook(torch.compiler.disable(self._before_forward)))
        sharded.replicas = self
        weakref.finalize(model, self.close).atexit = False
        self.share_tables()

    def close(self) -> None:
        self._runner.close()
        destroy_groups(self._groups)

    def compress(
        self,
        model: nn.Module,
        codec: Block,
        overrides: Mapping[str, Codec | None],
        min_numel: int,
        *,
        feedback: bool,
        seed: int,
        count_steps: Callable[[], int],
    ) -> None:
        """Send the gradients of units in fewer bits, which do not change; the arguments are those of `compress`.

        Args:
            count_steps: the number of the step, for the random numbers of rounding.
        """
        sizes = {name: (p.numel(), p.dim()) for name, p in model.named_parameters()}
        full = {tensor.name: tensor.full_shape for _, tensor in self._sharded.tensors()}
        sizes |= {name: (math.prod(shape), len(shape)) for name, shape in full.items()}
        chosen, _ = choose_bits(sizes, codec, overrides, min_numel)
        self._bits = {name: chosen[name][1:] for name in full}
        self._coding = Coding(
            kernels=kernels_for(self._sharded.device),
            seed=seed,
            stochastic=codec.stochastic,
            feedback=ErrorFeedback() if feedback else None,
        )
        self._count_steps = count_steps
        self._plans.clear()

    def share_tables(self) -> None:
        """Tell the other replicas who owns what here, if that has changed in any. Every rank calls it."""
        tables = {name: block.table for name, block in self._sharded.blocks.items()}
        moved = any(self._known.get(name) is not table for name, table in tables.items())
        changed = torch.tensor(float(moved), device=self._sharded.device)
        try:
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=self.data_group)
            if changed:
                self._gather(tables)
        except RuntimeError as error:
            raise TrimtabError(_LOST) from error

    def agree(self, value: Tensor) -> None:
        """Replace a value by that of the first replica: sums over units are rounded in another order in each."""
        dist.broadcast(value, dist.get_global_rank(self.data_group, 0), group=self.data_group)

    def _gather(self, tables: Mapping[str, UnitTable]) -> None:
        own = {name: table.owners().tolist() for name, table in tables.items()}
        every: list[Any] = [None] * len(self._grid)
        dist.all_gather_object(every, own, group=self.data_group)
        for index, other in enumerate(every):
            if other.keys() != own.keys() or any(len(other[name]) != len(own[name]) for name in own):
                raise TrimtabError(
                    f"tensor_parallel: replica {index} has a model with other units than replica {self._index}; give "
                    "all ranks the same model"
                )
        self._owners = {name: np.array([other[name] for other in every], dtype=np.int64) for name in own}
        self._known = dict(tables)
        self._plans.clear()
        if self._coding is not None and self._coding.feedback is not None:
            self._coding.feedback.load_state_dict({})  # of units that other ranks own now

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        repeated = torch._C._current_graph_task_id() != -1
        if repeated or not torch.is_grad_enabled() or not module.training:
            return
        if self._ready:
            missing = next(block.name for block, ids in self._order if not ids <= self._ready)
            raise TrimtabError(
                f"tensor_parallel: {missing} had no part in the last loss, so its gradients were not averaged over the "
                "replicas; let every step use all blocks, or use equal shares without balance"
            )
        ddp = DistributedDataParallel._active_ddp_module
        if not self._wrapped:
            self._check_wrapper(ddp)
            self._wrapped = True
        self._averages = ddp is not None and bool(ddp.require_backward_grad_sync)
        self._step = self._count_steps()
        self._order = []
        for block in reversed(self._sharded.blocks.values()):
            ids = {id(tensor.parameter) for tensor in _trained(block)}
            self._order += [(block, ids)] if ids else []

    def _check_wrapper(self, ddp: DistributedDataParallel | None) -> None:
        ranks = dist.get_process_group_ranks
        if ddp is None or sorted(ranks(ddp.process_group)) != sorted(ranks(self.data_group)):
            raise TrimtabError(
                "tensor_parallel: the replicas of this model divide its units differently, and only DDP averages them; "
                "train DistributedDataParallel(model, process_group=mesh.get_group(...)) with the group of the other "
                "dimension of the mesh, or use equal shares without balance"
            )
        units = {id(tensor.parameter) for _, tensor in self._sharded.tensors()}
        for name, parameter in ddp.module.named_parameters():
            if id(parameter) in units and name not in ddp.parameters_to_ignore:
                raise TrimtabError(
                    f"tensor_parallel: DDP averages {name}, which is divided differently in each replica; wrap the "
                    "module that tensor_parallel was called with, or use equal shares without balance"
                )
        if find_state(ddp, "local_steps") is not None:
            raise TrimtabError(
                "local_steps: the replicas of this model divide its units differently; use equal shares without balance"
            )

    def _accumulated(self, parameter: Tensor) -> None:
        """The gradient of a unit tensor is complete: start what can be averaged."""
        if not self._averages:
            return
        self._ready.add(id(parameter))
        while len(self._launched) < len(self._order) and self._order[len(self._launched)][1] <= self._ready:
            self._launch(self._order[len(self._launched)][0])
            if len(self._launched) == len(self._order):
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._finish)

    @torch.no_grad()
    def _launch(self, block: UnitBlock) -> None:
        plan = self._plans.get(block.name)
        if plan is None:
            plan = self._plans[block.name] = self._plan(block)
        flat = torch.cat([rows[plan.order].flatten() for rows in plan.gradients()])
        steps = plan.reduction.steps(flat, step=self._step, scale=1 / len(self._grid))
        self._launched.append((plan, flat, self._runner.submit(steps, flat)))

    @torch.no_grad()
    def _finish(self) -> None:
        launched, self._launched, self._ready = self._launched, [], set()
        for plan, flat, future in launched:
            future.wait()
            start = 0
            for rows in plan.gradients():
                values = flat[start : start + len(plan.order) * rows.shape[1]]
                rows[plan.order] = values.view(len(plan.order), rows.shape[1])
                start += values.numel()

    def _plan(self, block: UnitBlock) -> _BlockPlan:
        """Which values this rank has in common with which others, in the order of tensors and of units."""
        owners, place = self._owners[block.name], self._sharded.group.rank
        own = np.flatnonzero(owners[self._index] == place)
        slots = np.argsort(self._known[block.name].slots[place], kind="stable")
        changes = np.flatnonzero((owners[:, 1:] != owners[:, :-1]).any(axis=0)) + 1
        edges = [0, *changes.tolist(), block.units]
        replicas, runs, start = len(self._grid), [], 0
        tensors = _trained(block)
        dtype, device = tensors[0].parameter.dtype, tensors[0].parameter.device
        coding = self._coding if dtype in DTYPES else None
        for tensor in tensors:
            row = tensor.by_unit(tensor.parameter.data).shape[1]
            bits, length = (RAW, MIN_BLOCK) if coding is None else self._bits[tensor.name]
            divisor = _block_of(row, length)
            bits = bits if divisor else RAW
            for a, b in pairwise(edges):
                if owners[self._index, a] != place:
                    continue
                members = tuple(self._grid[r][owners[r, a]] for r in range(replicas))
                cuts = [a + (i * (b - a) + a % replicas) // replicas for i in range(replicas + 1)]
                for reducer, (first, end) in zip(members, pairwise(cuts), strict=True):
                    if first < end:
                        runs.append(
                            SharedRun(
                                name=tensor.name,
                                offset=start + int(np.searchsorted(own, first)) * row,
                                numel=(end - first) * row,
                                bits=bits,
                                block=divisor or length,
                                first_block=first * row // divisor if divisor else first,
                                members=members,
                                reducer=reducer,
                            )
                        )
            start += len(own) * row
        return _BlockPlan(
            tensors=tensors,
            order=torch.as_tensor(slots, device=device),
            reduction=ScatteredReduction(runs, dtype, device, self._groups, coding),
        )


@dataclass(frozen=True, kw_only=True)
class _BlockPlan:
    """How the gradients of one block are averaged, until units move or bits change."""

    tensors: list[UnitTensor]
    order: Tensor
    """The slots of this rank's units, in the order of the units."""

    reduction: ScatteredReduction

    def gradients(self) -> list[Tensor]:
        gradients = ((tensor, tensor.parameter.grad) for tensor in self.tensors)
        return [tensor.by_unit(gradient) for tensor, gradient in gradients if gradient is not None]


def _trained(block: UnitBlock) -> list[UnitTensor]:
    return [tensor for tensor in block.tensors if tensor.parameter.requires_grad]


def _block_of(row: int, longest: int) -> int:
    """Values that share a range, so that no block has values of two units; 0 if a unit has too few values."""
    fitting = (row // parts for parts in range(1, row // MIN_BLOCK + 1) if row % parts == 0)
    return next((length for length in fitting if length <= longest), row if row >= MIN_BLOCK else 0)
